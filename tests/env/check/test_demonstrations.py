"""Which demonstrations a check plays, and what it knows of those that a launch would play."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from realhf.api.config import ExperimentConfig
from realhf.api.environment import (
    HABIT,
    RECOVERY,
    SOLUTION,
    Demonstration,
    DemonstrationRequest,
    Task,
)
from realhf.env.check import demonstrations
from realhf.env.check.demonstrations import choose_demonstrations, launch_request, smallest_request

TEMPLATES = ("a", "b")


def demonstrate(request: DemonstrationRequest) -> Iterator[Demonstration]:
    """Yield scripts of every kind; the launch's seventh solution of ``b`` has nine turns."""
    for template in TEMPLATES:
        solved = 0
        for number, kind in enumerate(request.kinds()):
            solved += kind == SOLUTION
            turns = 9 if template == "b" and solved == 7 else 2
            task = Task(f"{template}/{request.seed}/{number}", template)
            yield Demonstration(task, ("x",) * turns, kind=kind, succeeds=kind != HABIT)


def test_every_kind_of_a_launch_is_played_for_every_template() -> None:
    """A share of one episode for a template rounded to none, so habits and recoveries were never
    played."""
    played = choose_demonstrations(demonstrate, 60.0).played
    seen = {(script.task.group, script.kind) for script in played}
    assert seen == {
        (template, kind) for template in TEMPLATES for kind in (HABIT, RECOVERY, SOLUTION)
    }
    assert {script.kind for script in played[:3]} == {HABIT, RECOVERY, SOLUTION}
    assert not [
        key
        for key, number in Counter((each.task.id, each.kind) for each in played).items()
        if number > 1
    ]


def test_the_longest_demonstration_is_that_of_a_launch() -> None:
    """It is played, too: it is the first to be cut by a limit of turns."""
    scripts = choose_demonstrations(demonstrate, 60.0)
    assert (scripts.longest, scripts.read_count, scripts.is_cut_short) == (
        9,
        2 * launch_request().episodes_per_task,
        False,
    )
    assert max(len(script.turns) for script in scripts.played) == 9


def test_reading_ends_in_time_and_says_so() -> None:
    scripts = choose_demonstrations(demonstrate, -1.0)
    assert scripts.is_cut_short and scripts.read_count == 0 and scripts.longest == 2
    assert {script.kind for script in scripts.played} == {HABIT, RECOVERY, SOLUTION}


def test_a_launch_has_the_seed_that_is_read() -> None:
    assert ExperimentConfig.__dataclass_fields__["seed"].default == demonstrations._LAUNCH_SEED
    assert smallest_request(launch_request()).episodes_per_task == 4
