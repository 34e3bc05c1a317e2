"""Environments that are broken on purpose, one fault each: the check names it, with the line and
the way to mend it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.env.check import leaks, supervisor
from realhf.env.check.command import Report, check
from realhf.env.check.report import NOW, SKIPPED, Order
from tests.process_family import family

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
BROKEN = HERE / "broken"
NAMED = {
    "blocks_the_loop": (
        "event loop: it blocks the event loop for ",
        "blocks_the_loop.py:17 in ask",
        "asyncio.to_thread",
    ),
    "crashes": (
        "dies: the process of the environment died by signal SIGSEGV in step, at ",
        "crashes.py:13 in step",
    ),
    "depends_on_hashes": (
        "determinism: another process answers differently: the opening is ",
        "the order of a set",
    ),
    "dies": (
        "dies: the process of the environment died by os._exit(7) in step, at ",
        "dies.py:14 in step",
    ),
    "done_is_a_method": (
        "load: ",
        "Broken.done is a method, so it would end no episode",
        "line 20",
    ),
    "forgets_its_seed": (
        "determinism: the same task, seed and messages give other turns: the opening differs: "
        "messages[0].content is ",
        "forgets_its_seed.py:9 in reset",
        "random.Random(seed)",
    ),
    "hangs": (
        "step: step gave no answer within 0.5 s, at ",
        "hangs.py:16 in answer",
        "a deadline of its own",
    ),
    "hangs_hard": (
        "hangs: step blocks the event loop and gave no answer within 0.5 s, at ",
        "hangs_hard.py:1",
        " in step (task Broken@",
    ),
    "hangs_hard_and_prints": (
        "hangs: step blocks the event loop and gave no answer within 0.5 s, at ",
        "hangs_hard_and_prints.py:1",
        " in step (task Broken@",
    ),
    "leaks_files": (
        "leaks: ",
        " closed instances left ",
        " file descriptors behind, at ",
        "leaks_files.py:13 in reset",
    ),
    "leaks_tasks": (
        "leaks: ",
        " closed instances left ",
        " tasks of the event loop behind, at ",
        "leaks_tasks.py:13 in tick",
    ),
    "leaks_threads": (
        "leaks: ",
        " closed instances left ",
        " threads behind, at ",
        "leaks_threads.py:15 in watch",
    ),
    "never_ends": (
        "end: no episode ended within 100 turns, at ",
        "never_ends.py:10 in step",
        "done=True",
    ),
    "outlives_its_end": (
        "exit: the process does not end within ",
        "outlives_its_end.py:7 in wait",
        "Make threads daemons",
    ),
    "pays_for_silence": (
        "rewards: the task is solved by an empty message, at ",
        "pays_for_silence.py:10 in step",
    ),
    "pays_increments": (
        "rewards: get_reward returns 0.25, and 0 when it is called again, at ",
        "pays_increments.py:18 in get_reward",
        "what turns earn is added up in the instance",
    ),
    "raises_in_reset": (
        "reset: reset raised IndexError: tuple index out of range, at ",
        "raises_in_reset.py:10 in reset",
    ),
    "raises_in_step": (
        "step: step raised ValueError: invalid literal for int() ",
        "raises_in_step.py:11 in step",
        " times)",
    ),
    "raises_in_a_verifier": (
        "step: step raised ValueError: invalid literal for int() ",
        ".py:9 in Broken",
    ),
    "raises_in_reward": (
        "step: step raised ZeroDivisionError: division by zero ",
        "raises_in_reward.py:21 in get_reward",
    ),
    "remembers": (
        "determinism: an instance that has played before answers differently: turn 1 differs: ",
        '"That was turn 1." and then "That was turn 2."',
        "in reset",
    ),
    "returns_nan": (
        "step: step breaks the contract: reward must be a finite number, not nan, at ",
        "returns_nan.py:10",
    ),
    "returns_no_json": (
        "step: step breaks the contract: messages[0]: the content must be text, not b'bytes', at ",
        "returns_no_json.py:10 in step",
    ),
    "row_without_its_column": (
        "tasks: the split 'train' cannot be made: ",
        "line 4",
        "row 2: the row has no column 'answer'",
    ),
    "shares_state": (
        "instances: among 40 instances a task is answered differently than alone: turn 1 differs: ",
        "shares_state.py:7 in reset",
        "Keep what an episode changes in the instance (self)",
    ),
    "sleeps_in_a_tool": (
        "step: step gave no answer within 0.5 s, at ",
        "sleeps_in_a_tool.py:14 in ask",
    ),
    "splits_overlap": (
        "tasks: the splits share an instance: train 'n5' and held-out 'n5' (task n5). Hold out",
    ),
    "tool_without_type_hints": (
        "load: ",
        "Broken.add: the argument 'amount' has no type hint (",
        ".py, line 11)",
    ),
    "wrong_demonstrations": (
        "demonstrations: a demonstration of the kind 'solution' does not succeed: the last answer "
        "is '', at ",
        "wrong_demonstrations.py:9 in demonstrate",
    ),
    "wrong_recoveries": (
        "demonstrations: a demonstration of the kind 'recovery' does not succeed: the last answer "
        "is 'No.', at ",
        "wrong_recoveries.py:9 in demonstrate",
    ),
}


@pytest.fixture(autouse=True)
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short where the fault is what is waited for, and elsewhere longer than a busy
    machine needs."""
    monkeypatch.setattr(supervisor, "_GRACE_S", 4.0 if "hangs_hard" in request.node.name else 20.0)
    if "and_prints" in request.node.name:
        # what is printed comes faster than it is read
        monkeypatch.setattr(supervisor, "_READ_BYTES", 1)
    monkeypatch.setattr(
        supervisor, "_EXIT_S", 0.5 if "outlives_its_end" in request.node.name else 20.0
    )


def checked(reference: str, **changed: object) -> Report:
    order = Order(reference, **{"instances": 40, "most_tasks": 3, **changed})  # type: ignore[arg-type]
    report = Report(reference)
    check(order, report, limit_s=240)
    return report


def test_every_broken_environment_is_expected_to_be_named() -> None:
    assert {path.stem for path in BROKEN.glob("*.py")} == set(NAMED)
    assert len(NAMED) >= 20


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMED)
def test_the_fault_is_named_and_no_other(name: str) -> None:
    """One line says what, where and how to mend it; the environment's process is gone
    afterwards."""
    waits = "gave no answer within 0.5 s" in NAMED[name][0]
    tasks = 1 if name == "blocks_the_loop" else 3
    report = checked(
        f"{BROKEN / name}.py:Broken", most_tasks=tasks, timeout_s=0.5 if waits else 30.0
    )
    lines = [finding.line() for finding in report.findings if finding.is_fault]
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]
    assert [text for text in NAMED[name] if text not in lines[0]] == [], lines[0]
    assert not [line for line in family(os.getpid()).values() if "realhf.env.check.checker" in line]


def test_a_sound_environment_has_no_findings() -> None:
    """Tasks, tools, a solver and background tasks that it ends itself."""
    report = checked(f"{HERE / 'sound.py'}:Sound")
    assert [finding.line() for finding in report.findings] == []
    assert [name for name, outcome, _ in report.verdicts if outcome == SKIPPED] == []
    found = report.to_json()
    assert found["ok"] and found["groups"]["train"] == {"small": 1, "large": 1}
    assert [tool["function"]["name"] for tool in found["tools"]] == ["add"]
    assert (
        "demonstrations",
        "ok",
        "4 scripts (4 solution), the longest of 1 turn",
    ) in report.verdicts


def test_what_may_be_meant_is_noted(tmp_path: Path) -> None:
    """A mistake in a tool, which the policy reads as its own, and a reward that falls to nothing:
    what the last turn earned and not what the state is worth."""
    text = (BROKEN / "pays_increments.py").read_text()
    mend = {
        "earned, self.earned = self.earned, 0.0\n        return earned": "return self.earned",
        "self.earned = 0.25": "self.earned = 0.25 * (self.count == 1)",
        "return str(self.count)": 'return self.cuont if self.count == 2 else "counted"',
    }
    for old, new in mend.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "mine.py").write_text(text)
    report = checked(f"{tmp_path / 'mine.py'}:Broken")
    lines = [finding.line() for finding in report.findings]
    assert not any(finding.is_fault for finding in report.findings), lines
    assert any(
        "a tool fails although its call is valid (Broken.add: AttributeError" in line
        for line in lines
    ), lines
    assert any("get_reward falls from 0.25 to 0" in line for line in lines), lines
    assert len(lines) == 2


@pytest.mark.nightly
def test_the_limit_of_the_whole_check_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that would take longer is ended, and says in which check it was."""
    order = Order(f"{HERE / 'sound.py'}:Sound", instances=100_000)
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr(supervisor, "time", clock)

    class Waiting(Report):
        """Lets the limit pass as soon as the instances are checked."""

        def record_event(self, event: Sequence[Any]) -> None:
            super().record_event(event)
            if event[:3] == [NOW, "instances", "instances"]:
                passed[0] = 60.0

    report = Waiting("sound")
    check(order, report, limit_s=60)
    assert (
        "limit: the check was not finished by its limit, in instances" in report.findings[-1].line()
    )
    assert leaks._ROUNDS > 1
