"""Turns conversations into token ids, through the tokenizer's own chat template.

The ids a policy sampled are never rendered again: a conversation grows by the ids of the template's text *around* them.
The text that follows a policy turn is found once per observation by rendering a conversation in which a marker stands
for the policy's words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SYSTEM_PROMPT = (
    "You operate an AWS account through the AWS CLI. Reply with exactly one command that starts with "
    "'aws ' and nothing else. You then see its output, and may send the next command, until the task is done."
)
_SET_HERE = frozenset({"messages", "add_generation_prompt", "tokenize", "chat_template", "tools"})
_MARKER = "\u2e28policy-turn\u2e29"


class ChatTemplateError(ValueError):
    """The tokenizer has no chat template, or one that drops the policy's words."""


def unread_variables(template: str, names: Iterable[str]) -> list[str]:
    """Return the names that do not occur in the text of a chat template, and those that are set at every rendering
    anyway."""
    return [name for name in names if name in _SET_HERE or not re.search(rf"\b{re.escape(name)}\b", template)]


class TemplateChat:
    """Implements ``realhf.api.env.ChatFormat`` with a Hugging Face tokenizer. ``template_kwargs`` are variables of the
    template, e.g. ``enable_thinking``, for everything that is rendered. Raises ChatTemplateError, also for a variable
    that the template does not read."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = SYSTEM_PROMPT,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or "of actor.path"
            raise ChatTemplateError(
                f"the tokenizer {name!r} has no chat template; use an instruction-tuned model "
                "or add a chat_template to its tokenizer"
            )
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        template = tokenizer.get_chat_template() if self._template_kwargs else ""
        if idle := unread_variables(template, self._template_kwargs):
            raise ChatTemplateError(f"chat_template_kwargs: the chat template does not read {', '.join(idle)}")
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._turn_end = self._text_after_marker([], generation=False)
        self.stop_ids: tuple[int, ...] = self._find_stop_ids()

    def first(self, task: str) -> list[int]:
        """Return the ids up to the point where the policy speaks for the first time."""
        return self._ids(self._render([*self._system, {"role": "user", "content": task}], generation=True))

    def following(self, observation: str, *, ended: bool) -> list[int]:
        """Return the ids between two policy turns. ``ended``: the policy itself sampled the end of its turn."""
        return self.following_messages([{"role": "user", "content": observation}], ended=ended)

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a whole conversation, none of it sampled here, with the cue for the policy at its end. No
        system prompt is added."""
        return self._ids(self._render(messages, generation=True))

    def following_messages(self, messages: Sequence[Mapping[str, str]], *, ended: bool) -> list[int]:
        """Return what ``following`` does, for any messages between two policy turns."""
        ids = self._ids(self._text_after_marker(messages, generation=True))
        if ended and ids and ids[0] in self.stop_ids:
            del ids[0]
        return ids

    def closing(self) -> list[int]:
        """Return the ids that end a policy turn in a demonstration; the first is a stop id."""
        return self._ids(self._turn_end)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a demonstrated policy turn, without its end."""
        return self._ids(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a policy turn. Stop ids are left out, other special tokens stay visible."""
        stop = set(self.stop_ids)
        return self._tokenizer.decode([i for i in token_ids if i not in stop], skip_special_tokens=False)

    def _render(self, messages: Sequence[Mapping[str, str]], *, generation: bool) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation, **self._template_kwargs
        )

    def _text_after_marker(self, tail: Sequence[Mapping[str, str]], *, generation: bool) -> str:
        head = [*self._system, {"role": "user", "content": "task"}, {"role": "assistant", "content": _MARKER}]
        _, found, after = self._render([*head, *tail], generation=generation).partition(_MARKER)
        if not found:
            raise ChatTemplateError("the chat template does not show the assistant's words")
        return after

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _find_stop_ids(self) -> tuple[int, ...]:
        closing = self._ids(self._turn_end)
        special = set(self._tokenizer.all_special_ids)
        stops = [i for i in closing[:1] if i in special]
        if self._tokenizer.eos_token_id is not None:
            stops.append(self._tokenizer.eos_token_id)
        if not stops:
            raise ChatTemplateError("the tokenizer has neither an end-of-sequence token nor one that ends a turn")
        return tuple(dict.fromkeys(stops))
