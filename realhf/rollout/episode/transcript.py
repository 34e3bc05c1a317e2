"""Writes an episode as a person reads it."""

from __future__ import annotations

import re

from realhf.api.env import RolloutOutcome

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters but ends of lines and tabs, marks of direction, what has no width, halves of characters: a
terminal carries some of them out, others hide what stands beside them, and the last cannot be written to a file."""


def transcript(outcome: RolloutOutcome, *, header: str = "") -> str:
    """Return the turns of an episode as text, with its outcome in the first line. It may be printed and written:
    characters that nobody would see are named, as in ``\\x1b``."""
    reward = "no reward" if outcome.reward is None else f"reward {outcome.reward:.2f}"
    lines = [f"=== {header}: {outcome.group} task {outcome.task_id} (seed {outcome.seed}), {outcome.status}, {reward}"]
    if outcome.task_text:
        lines.append(f"task: {outcome.task_text}")
    for turn in outcome.turns:
        lines.append(f"  $ {turn.text.strip()}")
        if turn.output:
            lines.append(f"    {turn.output.strip()}")
    if outcome.message:
        lines.append(f"  {outcome.message}")
    return _UNSEEN.sub(_named, "\n".join(lines).replace("\r\n", "\n"))


def _named(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
