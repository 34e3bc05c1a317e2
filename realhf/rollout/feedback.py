"""Feedback prompts for self-distillation: the prompt of an attempt extended by its errors or by a
correct solution.

The errors are those that the environment reported; the solution is another rollout of the group.
The policy with this prompt is the teacher for the same attempt without it.

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
"""Maximum number of attempts to shorten a feedback text before it is left out."""
_MIN_CHARS = 16
"""Minimum length of a feedback text in characters; a shorter one is left out."""
_ERROR_STARTS = ("error:", '{"error"', "{'error'")
"""Prefixes of the messages in which an environment reports an error made by the policy
(``realhf.api.environment.Turn``)."""


@dataclass(frozen=True)
class Feedback:
    """Builder of feedback prompts for the rollouts of a group."""

    chat: TemplateChat
    """Chat template of the policy."""
    source: str
    """``errors``, ``solved``, or ``any``: a solution from another rollout if there is one,
    otherwise the errors."""
    max_added_tokens: int
    """Maximum number of tokens by which a prompt may grow."""
    max_total_tokens: int
    """Maximum number of tokens of the feedback prompt and the row together."""

    @staticmethod
    def from_options(options: RolloutOptions, chat: TemplateChat) -> Feedback | None:
        """Return the builder for the rollout options; None if they do not ask for feedback."""
        if not options.feedback:
            return None
        return Feedback(chat, options.feedback, options.feedback_tokens, options.max_total_tokens)

    def __call__(self, group: Sequence[RolloutOutcome]) -> list[RolloutOutcome]:
        """Return the rollouts with ``feedback_prompt`` set in every row for which there is
        feedback.

        Raises ChatTemplateError.
        """
        return [
            self._add_prompts(rollout, feedback_text(rollout, group, self.source))
            for rollout in group
        ]

    def _add_prompts(self, rollout: RolloutOutcome, text: str) -> RolloutOutcome:
        if not text or not rollout.opening:
            return rollout
        branches = tuple(
            replace(row, feedback_prompt=self._build_prompt(row, text)) for row in rollout.branches
        )
        return replace(
            rollout, feedback_prompt=self._build_prompt(rollout, text), branches=branches
        )

    def _build_prompt(self, row: RolloutOutcome, text: str) -> list[int]:
        """Return the prompt of a row with the feedback text added to it.

        Returns [] if there is no room for it, or if the row does not begin with the environment's
        opening.
        """
        plain = self.chat.opening(row.opening, row.tools)
        room = min(
            self.max_added_tokens,
            self.max_total_tokens - len(row.prompt_ids) - len(row.completion_ids),
        )
        if row.prompt_ids[: len(plain)] != plain:
            return []
        for _ in range(_ATTEMPTS):
            with_text = self.chat.opening(_append_text(row.opening, text), row.tools)
            n_added = len(with_text) - len(plain)
            if n_added <= room:
                return [*with_text, *row.prompt_ids[len(plain) :]]
            if (size := len(text) * room // n_added - 1) < _MIN_CHARS:
                break
            text = shorten(text, size)
        return []


def feedback_text(rollout: RolloutOutcome, group: Sequence[RolloutOutcome], source: str) -> str:
    """Return the feedback text for a rollout; "" if there is none.

    It consists of the turns of the first other rollout of ``group`` that solved the task or, if
    this rollout did not solve it, of the rollout's own turns with an error. ``source`` selects
    which of these may be used.
    """
    if not rollout.valid:
        return ""
    solved = next(
        (other for other in group if other is not rollout and other.valid and other.achieved), None
    )
    if source in (SOLVED, ANY) and solved is not None:
        return _section("A correct solution:", [turn.text for turn in solved.turns])
    errors = [f"{turn.text}\n{turn.output}" for turn in rollout.turns if _is_error(turn)]
    if source in (ERRORS, ANY) and errors and not rollout.achieved:
        return _section("Feedback on an earlier attempt that failed:", errors)
    return ""


def _section(head: str, parts: Sequence[str]) -> str:
    return "\n\n".join((head, "\n".join(parts), "Solve the task correctly."))


def _is_error(turn: PlayedTurn) -> bool:
    return any(
        str(message.get("content") or "").lstrip().startswith(_ERROR_STARTS)
        for message in turn.messages
    )


def _append_text(opening: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """Return the messages with ``text`` appended to the last user message."""
    last = max(
        (n for n, message in enumerate(opening) if message.get("role") == "user"),
        default=len(opening) - 1,
    )
    content = f"{opening[last].get('content') or ''}\n\n{text}"
    return [*opening[:last], {**opening[last], "content": content}, *opening[last + 1 :]]
