"""Judges a completion of a countdown task: a pure function of the completion and the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from realhf.environments.countdown.arithmetic import LONGEST_ANSWER, ArithmeticRefused, evaluate

PARTIAL_CREDIT = 0.1
_OPEN, _CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True)
class Verdict:
    """What a completion is worth. ``valid``: right arithmetic on the given numbers, at least one operation;
    ``solved``: it reaches the target, too; ``problem``: why it does not, in a sentence."""

    valid: bool
    solved: bool
    problem: str = ""


def answer_in(completion: str) -> str:
    """Return the part of a completion that is judged: what the last ``<answer>`` element holds, else the last line that
    is not blank. What comes before is thinking aloud."""
    before, found, _ = completion.rpartition(_CLOSE)
    if found and _OPEN in before:
        return before.rpartition(_OPEN)[2].strip()
    return completion.rstrip().rpartition("\n")[2].strip()


def judge(completion: str, numbers: Sequence[int], target: int) -> Verdict:
    """Judge a completion against the ``numbers`` and the ``target`` of its row; whatever the completion, it returns."""
    try:
        found = evaluate(answer_in(completion), numbers)
    except ArithmeticRefused as error:
        return Verdict(False, False, str(error))
    if not found.operations:
        return Verdict(False, False, "a number alone is no arithmetic")
    if found.value != target:
        return Verdict(True, False, f"the last step comes to {_shown(found.value)}, not to {target}")
    return Verdict(True, True)


def reward(
    completion: str, *, numbers: Sequence[int], target: int, partial_credit: float = PARTIAL_CREDIT, **row: Any
) -> float:
    """Return 1 for steps that reach ``target`` from ``numbers``, each used at most once; ``partial_credit`` for right
    arithmetic on them that comes to something else; 0 for everything else. Other columns of the row do not matter."""
    verdict = judge(completion, numbers, target)
    return 1.0 if verdict.solved else partial_credit * verdict.valid


def _shown(value: Fraction) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_ANSWER else "a very large number"
