"""Writes what a scripted solver says: solutions, and mistakes that are repaired or repeated.

Most mistakes are one that every template knows: the tables are named in the singular. So what reinforcement
learning teaches about one template helps with the others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from realhf.api.environment import RECOVERY, SOLUTION, Demonstration, DemonstrationRequest, Task
from realhf.environments.sql.instance import Instance
from realhf.environments.sql.task_set import SqlTaskSet, draw_instance

SINGULAR_SHARE = 0.6
"""Share of the mistakes that name tables in the singular; of the others, each is as likely."""
PERSISTENCE = 3
"""A habit is this many turns long: its last statement is sent again."""
_QUOTED = re.compile(r"'([^']*)'")
_SEED_BITS = 31


def demonstrate(tasks: SqlTaskSet, request: DemonstrationRequest) -> Iterator[Demonstration]:
    """Yield the demonstrations that are asked for, shuffled. Every template has exactly the rounded shares of each
    kind. Raises ValueError for shares that are negative or more than one together."""
    habits, recoveries = request.habit_fraction, request.recovery_fraction
    if not (habits >= 0 and recoveries >= 0 and habits + recoveries <= 1 + 1e-9):
        raise ValueError(f"habit_fraction={habits}, recovery_fraction={recoveries}: shares of one, not negative")
    rng = random.Random(f"sql demonstrations:{request.seed}")
    drawn = [
        (tasks.instantiate(template, rng.getrandbits(_SEED_BITS)), kind)
        for template in tasks.group_of
        for kind in request.kinds()
    ]
    rng.shuffle(drawn)
    for task, kind in drawn:
        yield write_demonstration(task, kind, rng)


def write_demonstration(task: Task, kind: str, rng: random.Random) -> Demonstration:
    """Return one demonstration: a ``solution``, a ``recovery`` or a ``habit``."""
    instance = draw_instance(task.payload)
    solution = instance.turns()
    if kind == SOLUTION:
        return Demonstration(task, solution)
    wrong = with_mistake(instance, rng)
    if kind == RECOVERY:
        return Demonstration(task, (wrong[0], *solution), (False, *(True for _ in solution)), kind)
    wrong += wrong[-1:] * (PERSISTENCE - len(wrong))
    return Demonstration(task, wrong, kind=kind, succeeds=False)


def with_mistake(instance: Instance, rng: random.Random) -> tuple[str, ...]:
    """Return the statements with a mistake, such that none of them reads or changes a row."""
    others = [mistake for mistake in (_unquoted, _misnamed_column) if mistake(instance) != instance.statements]
    if not others or rng.random() < SINGULAR_SHARE:
        return with_singular(instance)
    return rng.choice(others)(instance)


def with_singular(instance: Instance) -> tuple[str, ...]:
    """Return the statements with the name of every table in the singular."""
    tables = "|".join(table.name for table in instance.tables)
    return tuple(
        re.sub(rf"\b({tables})\b", lambda found: found[0][:-1], statement) for statement in instance.statements
    )


def _unquoted(instance: Instance) -> tuple[str, ...]:
    """Leave out the quotes around texts: SQLite then takes them for columns."""
    return tuple(_QUOTED.sub(r"\1", statement) for statement in instance.statements)


def _misnamed_column(instance: Instance) -> tuple[str, ...]:
    """Write a column, the first that a statement names, in the plural."""
    columns = "|".join(sorted(instance.columns))
    return tuple(re.sub(rf"\b({columns})\b", r"\1s", statement, count=1) for statement in instance.statements)
