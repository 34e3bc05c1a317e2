"""Conversion of conversations to token ids with the tokenizer's chat template. Sampled text is
never re-tokenized.

A conversation is extended with the ids of the text that the template writes *around* the sampled
ids. The text that follows a policy turn is found by rendering a conversation in which a marker
replaces the policy's words. Results are cached by list of messages.

Tokenizers encode control words as control ids anywhere in a string. So a file, a web page or a
database row that contains them could end the environment's turn and continue as the policy, the
user or the system. Therefore a space is inserted after the first character of such words, and they
are encoded as ordinary text. Other text is not changed.
"""

from __future__ import annotations

import json
import logging
import marshal
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from realhf.api.environment import AssistantMessage
from realhf.api.tool_parser import (
    AUTO,
    PLAIN,
    detect_family,
    find_unread_variables,
    parse_turn,
    template_reads_tools,
)
from realhf.api.tool_syntax.json_values import write_json
from realhf.api.tool_syntax.table import SYNTAXES

_MARKER = "\u2e28policy-turn\u2e29"
"""String that takes the place of the policy's words in a test rendering."""
_PROBE = "probe0of0message"
"""Content of messages in test renderings."""
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Character to which bytes are decoded that do not form a complete character."""
_BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""Name of a one-byte token in tokenizers with byte fallback."""
_TAIL_TOKENS = 32
"""Number of tokens at the end of a prompt in which a tag of reasoning is looked for."""
_CACHED = 512
"""Number of entries of each cache."""
_MAX_CACHED_BYTES = 1 << 15
"""Maximum size of a cached conversation in bytes."""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character represents in the token names of a byte-level tokenizer.

    Printable Latin-1 characters represent themselves. The characters from U+0100 on represent the
    other bytes in ascending order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class ChatTemplateError(ValueError):
    """Raised if the tokenizer has no chat template, or if its template cannot render the messages
    or omits some of them."""


class TemplateChat:
    """``realhf.api.rollout.ChatFormat`` that uses a Hugging Face tokenizer and its chat template.

    ``family`` is the syntax of the policy's tool calls (``tool_parser.FAMILIES``), and
    ``frames_words`` whether that puts control words around a turn's words, too. Control words in
    messages and tools are converted to ordinary text (``find_control_words``). A turn ends with the
    template's end-of-turn token, the tokenizer's end-of-sequence token, an end token in the model's
    ``generation_config.json``, or one of ``stop_ids``.

    system_prompt: system message of the conversations that ``first`` starts. template_kwargs:
    template variables for all renderings, such as ``enable_thinking``. tool_parser: value of
    ``family``; "auto" detects it from the template.

    Raises ChatTemplateError, also for a variable that the template does not read and for a template
    that writes nothing at the end of a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
        tool_parser: str = AUTO,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or "of actor.path"
            raise ChatTemplateError(
                f"the tokenizer {name!r} has no chat template; use an instruction-tuned model "
                "or add a chat_template to its tokenizer"
            )
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        if unread := find_unread_variables(tokenizer.get_chat_template(), self._template_kwargs):
            raise ChatTemplateError(
                f"chat_template_kwargs: the chat template does not read {', '.join(unread)}"
            )
        with_tools = tokenizer.get_chat_template(tools=[{}])
        self.family = detect_family(with_tools) if tool_parser == AUTO else tool_parser
        self._syntax = SYNTAXES[self.family]
        self.frames_words = self._syntax.frames_words
        self._template_has_reasoning = "</think>" in with_tools
        self._template_reads_tools = template_reads_tools(with_tools)
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._cached_opening = lru_cache(_CACHED)(
            lambda key: array("q", self._encode_opening(*marshal.loads(key)))
        )
        self._cached_following = lru_cache(_CACHED)(
            lambda key: array("q", self._encode_following(*marshal.loads(key)))
        )
        self._cached_forgotten = lru_cache(_CACHED)(self._find_forgotten)
        self._requires_calls_cached = lru_cache(_CACHED)(self._requires_calls)
        self._turn_prefix = lru_cache(2)(self._find_turn_prefix)
        self._control = ControlWords(())
        self._arguments_are_text = self._template_reads_text_arguments()
        self._control = ControlWords(find_control_words(tokenizer, self._render_framing()))
        self._turn_end = self._render_after_marker([], [], generation=False)
        self._syntax_ends = self._find_syntax_ends(is_chosen=tool_parser != AUTO)
        self.stop_ids: tuple[int, ...] = self._find_stop_ids(stop_ids)
        self._stops = frozenset(self.stop_ids)
        self._inner_turn_end = self._find_inner_turn_end()

    def opening(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Return the ids of the conversation's first messages, followed by the generation prompt.

        tools: JSON schemas, which the template renders. No system prompt is added. Raises
        ChatTemplateError, also for tools if the template does not read them.
        """
        plain = self._normalise_messages(messages)
        schemas = self._check_schemas(tools)
        key = _cache_key(plain, schemas)
        return (
            self._encode_opening(plain, schemas)
            if key is None
            else self._cached_opening(key).tolist()
        )

    def following_messages(
        self, messages: Messages, *, ended: bool, tools: Tools = (), end: int | None = None
    ) -> list[int]:
        """Return the ids between two policy turns: the end of the earlier turn, the ``messages``
        (of any role), and the generation prompt of the later turn.

        ended: whether the policy sampled a stop id itself, which is ``end`` (None: the first id of
        the template's turn end). The result then omits the template's turn end up to and including
        that id, or completely if the template's turn end does not contain that id. tools: the tools
        passed to ``opening``. Raises ChatTemplateError, also for tools or a role that the template
        does not show after a policy turn.
        """
        plain = self._normalise_messages(messages)
        schemas = self._check_schemas(tools)
        key = _cache_key(plain, schemas)
        ids = (
            self._encode_following(plain, schemas)
            if key is None
            else self._cached_following(key).tolist()
        )
        if ended:
            del ids[: self._count_sampled_end(ids, end)]
        return ids

    def parse(
        self, token_ids: Sequence[int], tools: Tools = (), *, text: str | None = None
    ) -> AssistantMessage:
        """Return the parsed policy turn (``tool_parser.parse_turn``); its token count includes the
        stop id. Never raises.

        text: the text of the turn if it ends before that of the ids (None: all of it).
        """
        words = self.decode(token_ids) if text is None else text
        return parse_turn(words, self.family, token_count=len(token_ids), tools=tools)

    def first(self, text: str) -> list[int]:
        """Return the ids of the system prompt and one user message, with the generation prompt."""
        return self.opening([*self._system, {"role": "user", "content": text}])

    def following(self, text: str, *, ended: bool) -> list[int]:
        """Return the ids of ``following_messages`` for one user message."""
        return self.following_messages([{"role": "user", "content": text}], ended=ended)

    def closing(self, *, with_calls: bool = False) -> list[int]:
        """Return the ids that end a policy turn in a demonstration. The first one is a stop id.

        with_calls: whether the turn has tool calls, after which it may end differently.
        """
        if with_calls and self._syntax_ends:
            return self._syntax_ends[:1]
        return self._encode(self._turn_end) if self._turn_end.strip() else self._syntax_ends[-1:]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a demonstrated policy turn, without the end of the turn."""
        return self._encode(text)

    def encode_turn(self, message: Mapping[str, Any], tools: Tools = ()) -> list[int]:
        """Return the ids of a demonstrated policy turn, without its end.

        Content, ``tool_calls`` and ``reasoning_content`` are rendered as the template does after
        its generation prompt. If the prompt opens a reasoning block, the block is closed first.
        Raises ChatTemplateError if the template does not render the turn, or if ``parse`` does not
        find the same calls in it.
        """
        if message.get("reasoning_content"):
            return self._encode_reasoned(message, tools)
        content = str(message.get("content") or "")
        turn = self._normalise_messages([message])[0]
        schemas = self._check_schemas(tools)
        if turn.get("tool_calls"):
            text = self._render_turn(turn, schemas)
            if not all(call.get("function", call)["name"] in text for call in turn["tool_calls"]):
                raise ChatTemplateError(_NOT_WRITTEN)
            self._check_calls(text, turn["tool_calls"], tools)
            return self._encode(text)
        before = self._turn_prefix(bool(schemas))
        if "</think>" in before and "</think>" in content:
            opened, tag, _ = before.partition("<think>")
            thought = _LEADING_THINK_TAG.sub("", content)
            return self._encode(f"{opened}{tag}{thought}" if tag else thought)
        return self._encode(before + content)

    def _find_turn_prefix(self, with_tools: bool) -> str:
        """Return the text that the template writes between its generation prompt and the words of a
        turn.

        Examples are the rest of an empty reasoning block that the prompt opens, the channel of
        gpt-oss, and Cohere's start of an answer.
        """
        tools = [_PROBE_TOOL] if with_tools else []
        with suppress(ChatTemplateError):
            prefix, marker, _ = self._render_turn(
                {"role": "assistant", "content": _MARKER}, tools
            ).partition(_MARKER)
            return prefix if marker else ""
        return ""

    def _render_turn(self, turn: dict[str, Any], schemas: list[dict[str, Any]]) -> str:
        """Return the rendered text of a turn after the template's generation prompt, without the
        end of the turn. Raises ChatTemplateError."""
        head = [*self._system, {"role": "user", "content": "task"}]
        before = self._render(head, schemas, generation=True)
        opened = before[: find_open_tag(before)]
        problem = ""
        for tail in ([{"role": "user", "content": "task"}], []):
            try:
                after = self._render_after_marker(tail, schemas, generation=False)
                whole = self._render([*head, turn, *tail], schemas, generation=False)
            except ChatTemplateError as error:
                problem = f": {error}"
                continue
            if turn.get("tool_calls") and not tail and not whole.endswith(after):
                start = self._find_turn_end(whole)
                after = whole[start:] if start is not None else after
            if not whole.endswith(after):
                continue
            if len(whole) >= len(before) + len(after) and whole.startswith(before):
                return whole[len(before) : len(whole) - len(after)]
            # Nemotron writes a line break after <think> in its generation prompt, but not in
            # earlier turns.
            rest = whole.removesuffix(after).removeprefix(opened)
            if whole.startswith(opened) and (match := _EMPTY_REASONING.match(rest)):
                return rest[match.start(1) :]
            # Gemma writes an empty thought in its generation prompt, but not in earlier turns.
            cue = _EMPTY_THOUGHT.sub("", before)
            if cue != before and whole.startswith(cue):
                return whole[len(cue) : len(whole) - len(after)]
        raise ChatTemplateError(f"{_NOT_WRITTEN}{problem}")

    def _check_calls(self, text: str, calls: Sequence[Mapping[str, Any]], tools: Tools) -> None:
        """Raise ChatTemplateError if ``parse`` does not find exactly ``calls`` in the text of a
        demonstrated turn."""
        functions = [call.get("function", call) for call in calls]
        expected = [
            _format_call(function["name"], function.get("arguments") or {})
            for function in functions
        ]
        parsed = parse_turn(text, self.family, tools=tools).tool_calls
        actual = [call.problem or _format_call(call.name, call.arguments) for call in parsed]
        if actual == expected:
            return
        mistake = next((call.problem for call in parsed if call.problem), "")
        mistake = mistake or (
            f"reads {'; '.join(actual)}"[:_SHOWN_CHARS] if actual else "finds no call"
        )
        raise ChatTemplateError(
            f"the chat template writes the call {expected[0][:_SHOWN_CHARS]} as "
            f"{text[:_SHOWN_CHARS]!r}, in which the "
            f"parser {self.family!r} "
            f"{mistake if mistake.startswith(('reads', 'finds')) else f'sees a mistake: {mistake}'}; "
            f"choose the parser of this syntax with actor.tool_parser ({_KNOWN_SYNTAXES}), or "
            "another model"
        )

    def _encode_reasoned(self, message: Mapping[str, Any], tools: Tools) -> list[int]:
        """Return the ids of a demonstrated turn with reasoning. It is rendered as the last turn of
        a conversation, because templates may omit the reasoning of earlier turns."""
        turn = self._normalise_messages([message])[0]
        schemas = self._check_schemas(tools)
        head = [*self._system, {"role": "user", "content": "task"}]
        before = self._render(head, schemas, generation=True)
        whole = self._render([*head, turn], schemas, generation=False)
        start = self._find_turn_end(whole) if turn.get("tool_calls") else None
        end = self._turn_end if start is None else whole[start:]
        text = whole.removeprefix(before).removesuffix(end)
        reasoning = message["reasoning_content"].strip()
        words = (message.get("content") or "").strip()
        calls = turn.get("tool_calls") or ()
        names = [call.get("function", call)["name"] for call in calls]
        if len(text) != len(whole) - len(before) - len(end) or not whole.startswith(before):
            raise ChatTemplateError(
                "the chat template does not write a turn with reasoning_content as it cues one"
            )
        if any(
            part not in text
            for part in (self._control.escape(reasoning), self._control.escape(words), *names)
        ):
            raise ChatTemplateError(
                "the chat template does not write reasoning_content; write the reasoning into the "
                "content, as the "
                "policy is to say it, or leave it out"
            )
        if calls:
            self._check_calls(text, calls, tools)
        return self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a policy turn, with its special tokens except stop ids."""
        stops = self._stops
        return self._decode_all([i for i in token_ids if i not in stops])

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds to the text of a turn; they may be only part of a
        character.

        Returns b"" for a stop id, and None if the bytes cannot be determined from the tokenizer.
        """
        text = self.decode([token_id])
        if _NO_CHARACTER not in text:
            return text.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if fallback := _BYTE_FALLBACK.fullmatch(token):
            return bytes([int(fallback[1], 16)])
        return bytes(_BYTE_OF[letter] for letter in token) if _BYTE_OF.keys() >= {*token} else None

    def find_forgotten_turns(
        self, shape: Sequence[Sequence[str]], tools: Tools = ()
    ) -> tuple[bool, ...]:
        """Return, for each policy turn, whether the template omits its reasoning from the prompt
        after the last answer.

        shape: roles of the messages in the opening, then roles of the messages in the answer to
        each turn.
        """
        return self._cached_forgotten(tuple(map(tuple, shape)), bool(tools))

    def without_reasoning(self, token_ids: Sequence[int]) -> list[int] | None:
        """Return the ids of a turn without its leading reasoning block and the line breaks after
        that; None if no reasoning block is closed in it.

        The returned ids are sampled ids, unless one token contains both the end of the reasoning
        and the start of the words.
        """
        ids = list(token_ids)
        text = self.decode(ids)
        place = self._syntax.find_reasoning_end(text)
        if not place:
            return None
        start = find_token_boundary(ids, self.decode, place)
        return (
            ids[start:]
            if start is not None
            else [*self._encode(text[place:]), *(i for i in ids[-1:] if i in self._stops)]
        )

    def without_open_reasoning(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt without a trailing tag that opens the reasoning of the next
        turn."""
        ids = list(token_ids)
        text = self._decode_all(ids)
        place = find_open_tag(text)
        if place == len(text):
            return ids
        end = find_token_boundary(ids, self._decode_all, place)
        return ids[:end] if end is not None else self._encode(text[:place])

    def find_reasoning(self, prompt: Sequence[int]) -> Literal["open", "own"] | None:
        """Return whether the turn after a prompt may begin with reasoning: ``open`` if the prompt
        ends with the tag that opens it, ``own`` if the policy may write that tag itself, because
        the chat template knows it; None if there is no reasoning."""
        tail = self._decode_all(prompt[-_TAIL_TOKENS:])
        if find_open_tag(tail) < len(tail):
            return "open"
        closed = tail.rstrip().endswith("</think>")
        return "own" if self._template_has_reasoning and not closed else None

    def find_added_token(self, word: str) -> int | None:
        """Return the id of a word that was added to the tokenizer as one token; None for other
        words."""
        ids = self._encode(word)
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return ids[0] if len(ids) == 1 and ids[0] in added else None

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of all ids.

        Turns off the clean-up that some tokenizers enable, which removes spaces before punctuation.
        """
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _find_forgotten(
        self, shape: tuple[tuple[str, ...], ...], with_tools: bool
    ) -> tuple[bool, ...]:
        """Return the result of ``find_forgotten_turns``, from a test rendering; False for all turns
        if the template cannot render such a conversation."""
        tools = [_PROBE_TOOL] if with_tools else []
        template = self._tokenizer.get_chat_template(tools=tools or None)
        keys = ("reasoning_content", self._syntax.reasoning_key)
        key = next((key for key in keys if key and key in template), "")
        for calls in (True, False):
            with suppress(ChatTemplateError):
                return find_forgotten_turns(
                    lambda messages: self._render(messages, tools, generation=True),
                    shape,
                    key=key,
                    tool_calls=calls,
                )
        return (False,) * (len(shape) - 1)

    def _check_schemas(self, tools: Tools) -> list[dict[str, Any]]:
        """Return the schemas as dicts. Raises ChatTemplateError if the template does not read
        tools."""
        if tools and not self._template_reads_tools:
            raise ChatTemplateError(
                "the chat template does not read tools; use a model that was trained with them"
            )
        return [dict(tool) for tool in tools]

    def _encode_opening(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[int]:
        return self._encode(self._render(messages, tools, generation=True))

    def _encode_following(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[int]:
        """Return the ids from the end of a policy turn to the next generation prompt."""
        roles = dict.fromkeys(str(message.get("role")) for message in messages)
        with_calls = any([self._requires_calls_cached(role, bool(tools)) for role in roles])
        after = self._render_after_calls if with_calls else self._render_after_marker
        return self._encode(after(messages, tools, generation=True))

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, generation: bool
    ) -> str:
        """Return the text that the template renders for ``messages``. Raises ChatTemplateError."""
        try:
            return self._tokenizer.apply_chat_template(
                self._control.escape(self._format_arguments(messages)),
                tools=self._control.escape(tools) or None,
                tokenize=False,
                add_generation_prompt=generation,
                **self._template_kwargs,
            )
        except Exception as error:
            raise ChatTemplateError(
                f"the chat template cannot render the messages: {error}"
            ) from error

    def _format_arguments(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the arguments of calls as JSON text if the template reads them
        so."""
        if not self._arguments_are_text:
            return messages
        return [
            {**message, "tool_calls": [_write_arguments(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]

    def _template_reads_text_arguments(self) -> bool:
        """Return whether the template renders calls only if their arguments are JSON text, as those
        of DeepSeek V3 and V3.1 do."""
        self._arguments_are_text = False
        if self.family == PLAIN:
            return False
        call = _probe_call(0, 0)
        messages = self._normalise_messages(
            [
                {"role": "user", "content": _PROBE},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
        )
        for as_text in (False, True):
            self._arguments_are_text = as_text
            with suppress(ChatTemplateError):
                self._render(messages, [], generation=False)
                return as_text
        return False

    def _normalise_messages(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages in the form that templates expect: content is a string even if there
        are calls, arguments are objects instead of JSON strings, and the ids of calls have the form
        of the syntax."""
        plain = [dict(message) for message in messages]
        for message in plain:
            if message.get("tool_calls"):
                message["content"] = message.get("content") or ""
                message["tool_calls"] = [_normalise_call(call) for call in message["tool_calls"]]
        if self._syntax.format_id is not None:
            _format_ids(plain, self._syntax.format_id)
        return plain

    def _render_framing(self) -> str:
        """Return a rendering with messages of all roles that the template supports, to find the
        text that it writes around messages."""
        user = {"role": "user", "content": _PROBE}
        assistant = {"role": "assistant", "content": _PROBE}
        function = {"name": "tool", "arguments": {}}
        calls = {
            **assistant,
            "tool_calls": [{"type": "function", "id": "call00000", "function": function}],
        }
        answer = {"role": "tool", "name": "tool", "tool_call_id": "call00000", "content": _PROBE}
        texts = []
        for messages in (
            [{"role": "system", "content": _PROBE}, user],
            [user, assistant, user],
            [user, calls, answer, assistant],
        ):
            with suppress(ChatTemplateError):
                texts.append(self._render(messages, [], generation=True))
        return "".join(texts)

    def _render_after_marker(
        self, tail: list[dict[str, Any]], tools: list[dict[str, Any]], *, generation: bool
    ) -> str:
        """Render a policy turn followed by the messages ``tail``, and return the text after the
        turn's words."""
        head = [
            *self._system,
            {"role": "user", "content": "task"},
            {"role": "assistant", "content": _MARKER},
        ]
        _, marker, after = self._render([*head, *tail], tools, generation=generation).partition(
            _MARKER
        )
        if not marker:
            raise ChatTemplateError("the chat template does not show the assistant's words")
        return after

    def _render_after_calls(
        self, tail: list[dict[str, Any]], tools: list[dict[str, Any]], *, generation: bool
    ) -> str:
        """Return the result of ``_render_after_marker`` for a template that shows ``tool`` messages
        only after a turn with calls."""
        calls = []
        answers = [dict(message) for message in tail]
        for number, answer in enumerate(answer for answer in answers if answer["role"] == "tool"):
            answer["tool_call_id"] = answer.get("tool_call_id") or f"call{number:05d}"
            function = {"name": answer.setdefault("name", "tool"), "arguments": {}}
            calls.append({"type": "function", "id": answer["tool_call_id"], "function": function})
        problem = "ends a turn with calls neither as it ends any other nor with a stop id"
        # Mistral's template refuses words beside calls; Gemma's writes them after the answers.
        for words in (_MARKER, ""):
            turn = {"role": "assistant", "content": words, "tool_calls": calls}
            head = [*self._system, {"role": "user", "content": "task"}, turn]
            try:
                before = self._render(head, tools, generation=False)
                whole = self._render([*head, *answers], tools, generation=generation)
            except ChatTemplateError as error:
                problem = str(error).removeprefix("the chat template ")
                continue
            start = self._find_turn_end(before)
            if start is not None and whole.startswith(before):
                return whole[start:]
        raise ChatTemplateError(f"the chat template {problem}")

    def _find_turn_end(self, text: str) -> int | None:
        """Return the index in ``text`` at which the text that ends the last turn starts; None if
        that text is not known.

        A turn with calls may end differently from a turn without: in gpt-oss, with ``<|call|>``.
        """
        if text.endswith(self._turn_end):
            return len(text) - len(self._turn_end)
        words = self._tokenizer.convert_ids_to_tokens(list(self.stop_ids))
        places = [
            text.rfind(word) for word in words if word and not text.rpartition(word)[2].strip()
        ]
        return max((place for place in places if place >= 0), default=None)

    def _find_inner_turn_end(self) -> list[int]:
        """Return the ids with which the template ends a policy turn that is followed by other
        messages, up to the last control id.

        The last turn may end differently: in gpt-oss, with ``<|return|>`` instead of ``<|end|>``.
        """
        text = self._turn_end
        with suppress(ChatTemplateError):
            head = [*self._system, {"role": "user", "content": "task"}]
            with_cue = self._render(head, [], generation=True)
            without_cue = self._render(head, [], generation=False)
            after = self._render_after_marker([], [], generation=True)
            if with_cue.startswith(without_cue) and after.endswith(
                cue := with_cue[len(without_cue) :]
            ):
                text = after.removesuffix(cue)
        ids = self._encode(text)
        control = {*self._tokenizer.all_special_ids, *self._stops}
        return ids[: max((place for place, i in enumerate(ids, 1) if i in control), default=0)]

    def _count_sampled_end(self, ids: Sequence[int], end: int | None) -> int:
        """Return how many of the first ``ids`` after a turn repeat the turn end that the policy has
        sampled."""
        length = len(self._inner_turn_end)
        if not length or list(ids[:length]) != self._inner_turn_end:
            length = int(bool(ids) and ids[0] in self._stops)
        sampled = self.closing()[0] if end is None else end
        places = [place for place, i in enumerate(ids[:length], 1) if i == sampled]
        # Without an end of turns, the first id starts the next message and may be sampled.
        return max(places, default=length if self._turn_end.strip() else 0)

    def _requires_calls(self, role: str, with_tools: bool) -> bool:
        """Return whether the template shows messages of ``role`` only after a turn with calls.

        Raises ChatTemplateError if it never shows them.
        """
        tail = [{"role": role, "content": _PROBE}]
        tools = [_PROBE_TOOL] if with_tools else []
        problem = ""
        renderings = [self._render_after_marker]
        if role == "tool":
            # Where a turn with calls ends in its own way, its answers may follow in their own.
            renderings.insert(0 if self._syntax.ends else 1, self._render_after_calls)
        for after in renderings:
            try:
                if _PROBE in after(tail, tools, generation=True):
                    return after == self._render_after_calls
            except ChatTemplateError as error:
                problem = f": {error}"
        raise ChatTemplateError(
            f"the chat template does not show a {role!r} message after a policy turn{problem}"
        )

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a string.

        Unpaired surrogates become U+FFFD: an environment may echo them, and tokenizers reject them.
        """
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _find_syntax_ends(self, *, is_chosen: bool) -> list[int]:
        """Return the ids of the syntax's ends of turns.

        Ends that are no tokens are left out with a warning if the syntax was not chosen
        (``is_chosen``) but detected, and something else ends turns. Otherwise ChatTemplateError is
        raised.
        """
        encoded = {word: self._encode(word) for word in self._syntax.ends}
        ends = [ids[0] for ids in encoded.values() if len(ids) == 1]
        missing = next((word for word, ids in encoded.items() if len(ids) != 1), None)
        if missing is not None:
            problem = (
                f"the tokenizer has no token {missing!r}, which ends turns in the syntax "
                f"{self.family!r} of the chat template's tool calls"
            )
            if is_chosen or not (ends or self._turn_end.strip()):
                raise ChatTemplateError(
                    f"{problem}; use the model's own tokenizer, or actor.tool_parser=plain"
                )
            _log.warning("%s: turns end without it", problem)
        return ends

    def _find_stop_ids(self, further: Sequence[int]) -> tuple[int, ...]:
        """Return all ids that end a turn, including ``further``. Raises ChatTemplateError if there
        are none, or for an unknown id."""
        if not self._turn_end.strip() and not self._syntax_ends:
            name = getattr(self._tokenizer, "name_or_path", "") or "of actor.path"
            raise ChatTemplateError(
                f"the chat template of {name!r} writes nothing after a policy turn, so no token "
                f"ends one and the next "
                "message follows at once; use a model whose template ends its turns"
            )
        if unknown := [i for i in further if not 0 <= i < len(self._tokenizer)]:
            raise ChatTemplateError(f"gen.stop_ids: the tokenizer has no token {unknown[0]}")
        closing = self._encode(self._turn_end)
        special = set(self._tokenizer.all_special_ids)
        stops = [*(i for i in closing[:1] if i in special), *self._syntax_ends]
        if self._tokenizer.eos_token_id is not None:
            stops.append(self._tokenizer.eos_token_id)
        stops += [*_read_generation_ends(getattr(self._tokenizer, "name_or_path", "")), *further]
        if not stops:
            raise ChatTemplateError(
                "the tokenizer has neither an end-of-sequence token nor one that ends a turn; name "
                "one in gen.stop_ids"
            )
        return tuple(dict.fromkeys(stops))


def _read_generation_ends(path: str) -> list[int]:
    """Return the ids of ``eos_token_id`` in the ``generation_config.json`` of a folder or hub id;
    [] if there is none.

    Llama 3.1 ends turns that contain calls with a different id, which only this file specifies.
    """
    from transformers.utils.hub import cached_file

    if not path:
        return []
    with suppress(OSError, ValueError, AttributeError):
        file = cached_file(
            path, "generation_config.json", _raise_exceptions_for_missing_entries=False
        )
        ends = (
            json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id") if file else None
        )
        return [i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int]
    return []


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
"""Tool schema for test renderings."""


def _format_ids(messages: list[dict[str, Any]], format_id: Callable[[str, str, int], str]) -> None:
    """Convert the ids of calls, and those in the answers of tools, with ``format_id``."""
    number = n_answers = 0
    converted: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            known = str(call.get("id") or "")
            call["id"] = format_id(known, call.get("function", call)["name"], number)
            converted[known] = call["id"]
            number += 1
        if message.get("role") == "tool":
            known = str(message.get("tool_call_id") or "")
            name = str(message.get("name") or "tool")
            message["tool_call_id"] = converted.get(known) or format_id(known, name, n_answers)
            n_answers += 1


def _write_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of the chat API with its arguments as JSON text."""
    function = dict(call.get("function", call))
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = write_json(function.get("arguments") or {})
    return {**call, "function": function} if "function" in call else function


def _normalise_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function} if "function" in call else function


def _format_call(name: str, arguments: Any) -> str:
    """Return a call as a string for comparison, which is the same for equal arguments and
    distinguishes true from 1."""
    return f"{name} {json.dumps(arguments, sort_keys=True, ensure_ascii=False, default=str)}"


def _cache_key(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bytes | None:
    """Return messages and tools as bytes for ``marshal.loads``; None if they are too long or not
    plain JSON."""
    try:
        key = marshal.dumps((messages, tools), 2)
    except ValueError:
        return None
    return key if len(key) <= _MAX_CACHED_BYTES else None


_TAG = re.compile(r"</?\w+>")
"""Tags within a turn, such as ``<think>`` and ``<tool_call>``, which an environment may mention."""
_PREFIX_CHARS = 3
"""Length in characters of the prefixes by which ``_compile_words`` groups words."""
_NOT_WRITTEN = "the chat template does not write a demonstrated turn as it cues one"
_KNOWN_SYNTAXES = ", ".join(name for name, syntax in SYNTAXES.items() if syntax.writers)
_SHOWN_CHARS = 160
"""Maximum number of characters of a demonstrated call in an error message."""
_LEADING_THINK_TAG = re.compile(r"\s*<think>\n?")
_EMPTY_REASONING = re.compile(r"(?:<think>)?(\s*</think>)")
_EMPTY_THOUGHT = re.compile(r"<\|channel>thought\n<channel\|>\Z")
_log = logging.getLogger(__name__)


def find_control_words(tokenizer: Any, framing: str) -> set[str]:
    """Return the words that a tokenizer encodes as control ids.

    They are its special tokens, and those other added tokens that occur in the text that the
    template writes around messages (``framing``), except tags within a turn.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    framed = {
        each.content
        for each in added
        if each.content in framing and not _TAG.fullmatch(each.content)
    }
    return {
        *tokenizer.all_special_tokens,
        *framed,
        *(each.content for each in added if each.special),
    }


class ControlWords:
    """Converter of control words in messages to ordinary text. It logs the first conversion."""

    def __init__(self, words: Iterable[str]) -> None:
        distinct = {word for word in words if word.strip()}
        self._words = _compile_words(distinct)
        # Some templates write a schema's keys in angle brackets.
        self._keys = _compile_words(
            distinct
            | {word[1:-1] for word in distinct if word[0] == "<" and not _TAG.fullmatch(word)}
        )
        self._logged = False

    def escape(self, value: Any) -> Any:
        """Return a string, or mappings and lists of strings, with a space inserted into each
        control word.

        Raises RecursionError for values that are nested too deeply.
        """
        if isinstance(value, str):
            return self._escape_text(self._words, value)
        if isinstance(value, dict):
            return {
                self._escape_text(self._keys, key) if isinstance(key, str) else key: self.escape(
                    item
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return self._separate_parts([self.escape(item) for item in value])
        return value

    def _separate_parts(self, parts: list[Any]) -> list[Any]:
        """Return the parts of a message's content, with spaces between parts that would form a
        control word when a template joins them."""
        texts = [
            part.get("text")
            for part in parts
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if (
            len(texts) > 1
            and self._words is not None
            and self._words.search("".join(map(str, texts)))
        ):
            return [
                {**part, "text": f" {part['text']}"}
                if isinstance(part, dict) and "text" in part
                else part
                for part in parts
            ]
        return parts

    def _escape_text(self, words: re.Pattern[str] | None, text: str) -> str:
        """Return ``text`` with a space inserted into each match of ``words``."""
        while words is not None and (word := words.search(text)):
            if not self._logged:
                self._logged = True
                _log.warning(
                    "a message holds %r, which controls the chat; the policy reads such words as "
                    "ordinary text, broken "
                    "by a space (logged once)",
                    word[0],
                )
            text = words.sub(
                lambda match: f"{match[0][0]} {match[0][1:]}" if len(match[0]) > 1 else "", text
            )
        return text


def _compile_words(words: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of the words; None if there are none.

    Words are grouped by common prefixes for speed: some tokenizers have hundreds of control words,
    and a page may have thousands of brackets.
    """
    tails: dict[str, list[str]] = {}
    for word in sorted(words, key=lambda word: (-len(word), word)):
        tails.setdefault(word[:_PREFIX_CHARS], []).append(re.escape(word[_PREFIX_CHARS:]))
    branches = [f"{re.escape(head)}(?:{'|'.join(rest)})" for head, rest in tails.items()]
    return re.compile("|".join(branches)) if branches else None


_OPEN_AT_END = re.compile(r"(?:<think>|\[THINK\]|<\|channel>thought)\s*$")
Decode = Callable[[Sequence[int]], str]
"""Function from token ids to their text."""
Encode = Callable[[str], list[int]]
"""Function from a string to its token ids."""
Render = Callable[[list[dict[str, Any]]], str]
"""Function from messages to the text of the prompt."""


def find_open_tag(text: str) -> int:
    """Return the index of a reasoning tag that a prompt opens at its end; the length of the text if
    there is no such tag."""
    match = _OPEN_AT_END.search(text)
    return match.start() if match else len(text)


def find_token_boundary(ids: Sequence[int], decode: Decode, place: int) -> int | None:
    """Return how many of ``ids`` make up the first ``place`` characters of their text; None if a
    token extends over that position."""
    low = 0
    high = len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(ids[:middle])) < place:
            low = middle + 1
        else:
            high = middle
    return (
        low
        if len(decode(ids[:low])) == place and decode(ids[:low]) == decode(ids)[:place]
        else None
    )


def find_forgotten_turns(
    render: Render, shape: Sequence[Sequence[str]], *, key: str, tool_calls: bool
) -> tuple[bool, ...]:
    """Return, for each policy turn, whether the template omits its reasoning from the prompt after
    the last answer.

    shape: roles of the messages in the opening, then roles of the messages in the answer to each
    turn. render: returns the text of a prompt. key: the key of a message in which the
    template reads reasoning; "" for tags in the content. tool_calls: whether turns that ``tool``
    messages follow contain calls.
    """
    messages: list[dict[str, Any]] = [{"role": role, "content": "words"} for role in shape[0]]
    for number, roles in enumerate(shape[1:]):
        calls = [
            _probe_call(number, place)
            for place, role in enumerate(roles)
            if role == "tool" and tool_calls
        ]
        reasoning = _marked_reasoning(number)
        turn = (
            # gpt-oss takes either words or reasoning beside calls.
            {"content": "" if calls and key == "thinking" else "said", key: reasoning}
            if key
            else {"content": _add_think_tags(reasoning)}
        )
        messages.append({"role": "assistant", **turn, **({"tool_calls": calls} if calls else {})})
        ids = iter(calls)
        for role in roles:
            answer = {"role": role, "content": "words"}
            if role == "tool" and (call := next(ids, None)):
                answer |= {"tool_call_id": call["id"], "name": "tool"}
            messages.append(answer)
    text = render(messages)
    return tuple(_marked_reasoning(number) not in text for number in range(len(shape) - 1))


def _marked_reasoning(number: int) -> str:
    return f"thought{number}of0turn"


def _add_think_tags(reasoning: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\nsaid"


def _probe_call(number: int, place: int) -> dict[str, Any]:
    function = {"name": "tool", "arguments": {}}
    return {
        "id": f"c{number % 10000:04d}{place % 10000:04d}",
        "type": "function",
        "function": function,
    }
