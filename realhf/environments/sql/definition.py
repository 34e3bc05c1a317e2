"""Defines the section ``env`` of runs on the SQL environment, and what is registered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from realhf.api.config.option import option
from realhf.api.environment import TRAIN, EnvironmentDefinition, EnvironmentSpec
from realhf.environments.sql.database import Limits
from realhf.environments.sql.demonstrations import demonstrate
from realhf.environments.sql.environment import SqlEnvironment
from realhf.environments.sql.task_set import GROUPS, SqlTaskSet

SYSTEM_PROMPT = (
    "You work with a SQLite database. Reply with exactly one SQL statement and nothing else; you then see its result, "
    "and may send the next one. When you are asked a question and know the answer, reply with the line answer: VALUE "
    "instead; there is one try. A change is done when the rows are exactly as asked."
)


@dataclass
class SqlOptions:
    """The SQL environment: which tasks are played, and what a statement may use."""

    groups: list[str] = option([*GROUPS], "Tasks of these groups are played.", choices=GROUPS)
    max_statements: int = option(8, "An episode ends after this many turns.", at_least=1)
    max_rows: int = option(10, "The policy sees at most this many rows of a result.", at_least=1, at_most=1000)
    observation_chars: int = option(200, "The policy sees at most this many characters of a result.", at_least=40)
    statement_steps: int = option(
        100_000, "A statement ends after this many steps of SQLite's virtual machine.", at_least=1000
    )
    statement_ms: float = option(
        20.0, "A statement ends after this much processor time, in milliseconds.", above=0, at_most=1000
    )
    database_kb: int = option(64, "A database grows to at most this many KiB.", at_least=16, at_most=65536)

    def problems(self, name: str) -> Iterator[str]:
        """Yield that there is no group."""
        if not self.groups:
            yield f"{name}.groups=[]: name at least one group"


def build(options: SqlOptions) -> EnvironmentSpec:
    """Return the specification of the environment with these options."""
    limits = Limits(options.statement_steps, options.statement_ms, options.max_rows, options.database_kb)

    def make(address: str) -> SqlEnvironment:
        """Return an instance; it needs no service, so the address is not used."""
        return SqlEnvironment(
            limits, most_statements=options.max_statements, observation_chars=options.observation_chars
        )

    return EnvironmentSpec(
        "sql",
        make,
        partial(SqlTaskSet, groups=tuple(options.groups)),
        system_prompt=SYSTEM_PROMPT,
        demonstrate=partial(demonstrate, SqlTaskSet(TRAIN, options.groups)),
    )


DEFINITION = EnvironmentDefinition(SqlOptions, build)
