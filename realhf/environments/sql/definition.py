"""Registration of the SQL environment: its options, its specification, and a scripted solver.

Most of the solver's mistakes are possible in every template (naming tables in the singular), so
what reinforcement learning teaches in one template helps in the others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from realhf.api.environment import (
    RECOVERY,
    SOLUTION,
    TRAIN,
    Demonstration,
    DemonstrationRequest,
    EnvironmentDefinition,
    EnvironmentSpec,
    Task,
)
from realhf.api.option import option
from realhf.base.installation import PACKAGE
from realhf.environments.sql.database import StatementLimits
from realhf.environments.sql.environment import SqlEnvironment
from realhf.environments.sql.instance import SqlInstance
from realhf.environments.sql.tasks import GROUPS, SqlTaskSet, draw_instance

SINGULAR_SHARE = 0.6
"""Share of mistakes that name tables in the singular; the other kinds of mistakes are equally
likely."""
PERSISTENCE = 3
"""Number of turns of a habit; its last statement is repeated."""
_QUOTED = re.compile(r"'([^']*)'")
_SEED_BITS = 31


def demonstrate(tasks: SqlTaskSet, request: DemonstrationRequest) -> Iterator[Demonstration]:
    """Yield the requested demonstrations, shuffled. Every template gets exactly the rounded share
    of each kind. Raises ValueError for shares that are negative or exceed one together."""
    habits = request.habit_fraction
    recoveries = request.recovery_fraction
    if not (habits >= 0 and recoveries >= 0 and habits + recoveries <= 1 + 1e-9):
        raise ValueError(
            f"habit_fraction={habits}, recovery_fraction={recoveries}: shares of one, not negative"
        )
    rng = random.Random(f"sql demonstrations:{request.seed}")
    draws = [
        (tasks.instantiate(template, rng.getrandbits(_SEED_BITS)), kind)
        for template in tasks.group_of
        for kind in request.kinds()
    ]
    rng.shuffle(draws)
    for task, kind in draws:
        yield write_demonstration(task, kind, rng)


def write_demonstration(task: Task, kind: str, rng: random.Random) -> Demonstration:
    """Return one demonstration: a ``solution``, a ``recovery`` or a ``habit``."""
    instance = draw_instance(task.payload)
    solution = instance.turns()
    if kind == SOLUTION:
        return Demonstration(task, solution)
    wrong = add_mistake(instance, rng)
    if kind == RECOVERY:
        return Demonstration(task, (wrong[0], *solution), (False, *(True for _ in solution)), kind)
    wrong += wrong[-1:] * (PERSISTENCE - len(wrong))
    return Demonstration(task, wrong, kind=kind, succeeds=False)


def add_mistake(instance: SqlInstance, rng: random.Random) -> tuple[str, ...]:
    """Return the solution's statements with a mistake, chosen such that none of them reads or
    changes a row."""
    mistakes = [
        mistake
        for mistake in (_drop_quotes, _misname_column)
        if mistake(instance) != instance.statements
    ]
    if not mistakes or rng.random() < SINGULAR_SHARE:
        return use_singular(instance)
    return rng.choice(mistakes)(instance)


def use_singular(instance: SqlInstance) -> tuple[str, ...]:
    """Return the solution's statements with every table name in the singular."""
    tables = "|".join(table.name for table in instance.tables)
    return tuple(
        re.sub(rf"\b({tables})\b", lambda match: match[0][:-1], statement)
        for statement in instance.statements
    )


def _drop_quotes(instance: SqlInstance) -> tuple[str, ...]:
    """Return the solution's statements without the quotes around strings; SQLite then takes them
    for columns."""
    return tuple(_QUOTED.sub(r"\1", statement) for statement in instance.statements)


def _misname_column(instance: SqlInstance) -> tuple[str, ...]:
    """Return the solution's statements, each with its first named column in the plural."""
    columns = "|".join(sorted(instance.columns))
    return tuple(
        re.sub(rf"\b({columns})\b", r"\1s", statement, count=1) for statement in instance.statements
    )


SYSTEM_PROMPT = (
    "You work with a SQLite database. Reply with exactly one SQL statement and nothing else; you "
    "then see its result, "
    "and may send the next one. When you are asked a question and know the answer, reply with the "
    "line answer: VALUE "
    "instead; there is one try. A change is done when the rows are exactly as asked."
)


@dataclass
class SqlOptions:
    """The SQL environment: which tasks are played, and what a statement may use."""

    groups: list[str] = option([*GROUPS], "Tasks of these groups are played.", choices=GROUPS)
    max_statements: int = option(8, "An episode ends after this many turns.", at_least=1)
    max_rows: int = option(
        10, "The policy sees at most this many rows of a result.", at_least=1, at_most=1000
    )
    observation_chars: int = option(
        200, "The policy sees at most this many characters of a result.", at_least=40
    )
    statement_steps: int = option(
        100_000,
        "A statement ends after this many steps of SQLite's virtual machine.",
        at_least=1000,
    )
    statement_ms: float = option(
        20.0,
        "A statement ends after this much processor time, in milliseconds.",
        above=0,
        at_most=1000,
    )
    database_kb: int = option(
        64, "A database grows to at most this many KiB.", at_least=16, at_most=65536
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error if no group is given."""
        if not self.groups:
            yield f"{name}.groups=[]: name at least one group"


def build(options: SqlOptions) -> EnvironmentSpec:
    """Return the specification of the environment with these options."""
    limits = StatementLimits(
        options.statement_steps, options.statement_ms, options.max_rows, options.database_kb
    )

    def make(address: str) -> SqlEnvironment:
        """Return an instance; ``address`` is not used, because the environment needs no service."""
        return SqlEnvironment(
            limits,
            max_statements=options.max_statements,
            observation_chars=options.observation_chars,
        )

    return EnvironmentSpec(
        "sql",
        make,
        partial(SqlTaskSet, groups=tuple(options.groups)),
        system_prompt=SYSTEM_PROMPT,
        demonstrate=partial(demonstrate, SqlTaskSet(TRAIN, options.groups)),
        shipped_policy=PACKAGE / "environments" / "policies" / "sql",
    )


DEFINITION = EnvironmentDefinition(SqlOptions, build)
