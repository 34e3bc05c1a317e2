"""Puts what became of an attempt into its prompt: errors that the environment told, or how another rollout of the group
solved the task. The policy that reads it judges the attempt better than the one that made it (self-distillation).

Source: Hübotter et al. 2026, Reinforcement Learning via Self-Distillation (SDPO), its reprompting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realhf.api.chat_template import TemplateChat
from realhf.api.environment import ChatMessage
from realhf.api.experiment import RolloutOptions
from realhf.api.keys import ANY, ERRORS, SOLVED
from realhf.api.rollout import PlayedTurn, RolloutOutcome
from realhf.base.text import shorten

_ATTEMPTS = 6
"""How often a text is cut shorter before it is left out."""
_FEWEST_CHARS = 16
_ERROR_STARTS = ("error:", '{"error"', "{'error'")
"""What the policy did wrong is told in a message that begins so (``realhf.api.environment.Turn``)."""


@dataclass(frozen=True)
class Feedback:
    """Tells the rollouts of a group. ``source``: errors, solved, or any (how another one solved it and, where none did,
    the errors). A prompt grows by ``most_tokens`` at most, and with its row stays within ``max_total_tokens``."""

    chat: TemplateChat
    source: str
    most_tokens: int
    max_total_tokens: int

    @staticmethod
    def of(options: RolloutOptions, chat: TemplateChat) -> Feedback | None:
        """Return what ``options`` ask for; None where they ask for nothing."""
        if not options.feedback:
            return None
        return Feedback(chat, options.feedback, options.feedback_tokens, options.max_total_tokens)

    def __call__(self, group: Sequence[RolloutOutcome]) -> list[RolloutOutcome]:
        """Return the rollouts with ``feedback_prompt`` in every row that can be told something. Raises
        ChatTemplateError."""
        return [self._told(rollout, feedback_text(rollout, group, self.source)) for rollout in group]

    def _told(self, rollout: RolloutOutcome, text: str) -> RolloutOutcome:
        if not text or not rollout.opening:
            return rollout
        branches = tuple(replace(row, feedback_prompt=self._prompt(row, text)) for row in rollout.branches)
        return replace(rollout, feedback_prompt=self._prompt(rollout, text), branches=branches)

    def _prompt(self, row: RolloutOutcome, text: str) -> list[int]:
        """Return the prompt of a row with the text in it, [] where there is no room for it, or where the row does not
        begin with what the environment opened."""
        plain = self.chat.opening(row.opening, row.tools)
        room = min(self.most_tokens, self.max_total_tokens - len(row.prompt_ids) - len(row.completion_ids))
        if row.prompt_ids[: len(plain)] != plain:
            return []
        for _ in range(_ATTEMPTS):
            told = self.chat.opening(_with(row.opening, text), row.tools)
            grown = len(told) - len(plain)
            if grown <= room:
                return [*told, *row.prompt_ids[len(plain) :]]
            if (size := len(text) * room // grown - 1) < _FEWEST_CHARS:
                break
            text = shorten(text, size)
        return []


def feedback_text(rollout: RolloutOutcome, group: Sequence[RolloutOutcome], source: str) -> str:
    """Return what a rollout is told, "" for nothing: what the first other rollout of its ``group`` that solved the task
    said; or, if it did not solve the task itself, its turns that the environment called an error."""
    if not rollout.valid:
        return ""
    solved = next((one for one in group if one is not rollout and one.valid and one.achieved), None)
    if source in (SOLVED, ANY) and solved is not None:
        return _section("A correct solution:", [turn.text for turn in solved.turns])
    errors = [f"{turn.text}\n{turn.output}" for turn in rollout.turns if _failed(turn)]
    if source in (ERRORS, ANY) and errors and not rollout.achieved:
        return _section("Feedback on an earlier attempt that failed:", errors)
    return ""


def _section(head: str, parts: Sequence[str]) -> str:
    return "\n\n".join((head, "\n".join(parts), "Solve the task correctly."))


def _failed(turn: PlayedTurn) -> bool:
    return any(str(message.get("content") or "").lstrip().startswith(_ERROR_STARTS) for message in turn.messages)


def _with(opening: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """Return the messages with a text behind the last one of the user."""
    last = max((n for n, message in enumerate(opening) if message.get("role") == "user"), default=len(opening) - 1)
    content = f"{opening[last].get('content') or ''}\n\n{text}"
    return [*opening[:last], {**opening[last], "content": content}, *opening[last + 1 :]]
