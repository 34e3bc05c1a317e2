"""Plays one episode: a conversation about a database of its own, paid by how far it has come.

It is 0 where nothing was done and 1 where the task is solved. A question is half solved when a statement has found the
answer, and solved when it was given. A change is as far as the distance to the wanted rows has shrunk, over all tables,
so that what should have stayed counts too; farther away than at the beginning it is negative, ``HARM`` at the least.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, EnvironmentFailure, Opening, Turn
from realhf.environments.sql.database import Database, Limits, Result, Rows
from realhf.environments.sql.instance import Instance
from realhf.environments.sql.tasks import draw_instance

_FENCE = re.compile(r"```[ \t]*(?:sqlite|sql)?[ \t]*\r?\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"\s*answer[ \t]*:(.*)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?")
_TOLERANCE = 1e-6


def read_answer(content: str) -> str | None:
    """Return VALUE if the last line that is not empty is ``answer: VALUE``, else None."""
    lines = content.strip().splitlines()
    found = _ANSWER.fullmatch(lines[-1]) if lines else None
    return found[1].strip() if found else None


def read_statement(content: str) -> str:
    """Return the SQL of a turn: what stands in its first fence, or all of it; without semicolons at its end."""
    fence = _FENCE.search(content)
    return (fence[1] if fence else content).strip().rstrip("; \t\r\n")


def is_right(given: str, expected: int | str) -> bool:
    """Whether an answer says what is expected: the number, or the text but for case, quotes and a full stop."""
    plain = read_value(given)
    if isinstance(expected, str):
        return plain == expected.casefold()
    return bool(_NUMBER.fullmatch(plain)) and abs(float(plain) - expected) <= _TOLERANCE


def read_value(given: str) -> str:
    """Return the value that an answer means, in the only spelling of it: without quotes and a full stop, in lower case,
    and a whole number without its zeros."""
    plain = given.strip().rstrip(".").strip("'\"` ").casefold()
    return f"{float(plain):.0f}" if _NUMBER.fullmatch(plain) and float(plain).is_integer() else plain


def result_text(result: Result, most_chars: int) -> str:
    """Return what a statement did in at most ``most_chars`` characters: rows, one a line with | between the values;
    how many rows it changed; or its error."""
    if result.error:
        return shorten(f"error: {_printable(result.error)}", most_chars)
    if result.changed is not None and not result.rows:
        return f"ok, {result.changed} row{'' if result.changed == 1 else 's'} changed"
    lines = [row_text(row) for row in result.rows]
    return shorten("\n".join([*lines, *(["more rows"] if result.more else [])]) or "no rows", most_chars)


def row_text(row: Iterable[Any]) -> str:
    """Return the values of a row with | between them."""
    return "|".join(map(_value_text, row))


def shorten(text: str, most_chars: int) -> str:
    """Return the text, or its beginning with dots when it is longer than ``most_chars`` (at least 3)."""
    return text if len(text) <= most_chars else f"{text[: most_chars - 3]}..."


def _value_text(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, float):
        return f"{value:.10g}" if math.isfinite(value) else ("Inf" if value > 0 else "-Inf")
    return _printable(str(value))


def _printable(characters: Iterable[str]) -> str:
    """Return the text with a space for every character that cannot be printed, so that a row stays a line."""
    return "".join(character if character.isprintable() else " " for character in characters)


FOUND = 0.5
"""What an answer that was found but not given is worth."""
HARM = -0.2
"""The least potential: a database that is farther from what is wanted than it was."""
MOST_LINES, MOST_LINE_CHARS = 8, 120
"""How much of the difference people see: wrong rows, and characters of each."""
MOST_ROWS = 40
"""Rows of a database that people see."""


class QuestionGoal:
    """A question is answered. Finding it means a result of one value, the answer, by a statement that reads all columns
    that the answer depends on and finds the answer among other rows as well: one that returns a constant does not,
    whatever it names. Only the last result of one value counts."""

    def __init__(self, instance: Instance, limits: Limits) -> None:
        assert instance.answer is not None
        self._expected, self._needed = instance.answer, instance.reads
        self._instance, self._limits = instance, limits
        self._given = ""
        self.potential, self.solved = 0.0, False

    def take_result(self, statement: str, result: Result, database: Database) -> None:
        """See what a statement returned."""
        value = _value_of(result)
        if value is not None:
            right = value == self._expected and result.read >= self._needed and self._finds_others(statement)
            self.potential = FOUND if right else 0.0

    def _finds_others(self, statement: str) -> bool:
        """Return whether a statement finds the answer where it is another one."""
        for tables in self._instance.twins():
            twin = Database(tables, self._limits, writable=False)
            try:
                expected = _value_of(twin.execute(self._instance.statements[-1]))
                if expected is not None and expected != self._expected:
                    return _value_of(twin.execute(statement)) == expected
            finally:
                twin.close()
        return False

    def take_answer(self, answer: str) -> tuple[str, bool]:
        """Take the answer, the only one there is. Returns what the policy is told, and whether the episode ends."""
        self._given = read_value(answer)
        self.solved = is_right(answer, self._expected)
        if self.solved:
            self.potential = 1.0
        return ("right" if self.solved else "wrong"), True

    @property
    def state_key(self) -> str:
        """Nothing: a question changes no rows, and what the policy knows stands in what it has read."""
        return ""

    def info(self) -> dict[str, Any]:
        """Return for people what was answered; a question changes no rows."""
        return {"view": {"title": "The answer", "text": self._given[:MOST_LINE_CHARS]}}


def _value_of(result: Result) -> Any:
    """Return the value of a result that has only one, else None."""
    is_value = len(result.rows) == 1 and len(result.rows[0]) == 1 and not result.more
    return result.rows[0][0] if is_value else None


class ChangeGoal:
    """The database holds exactly the wanted rows. The distance to them is the number of primary keys whose row is not
    the wanted one, so that deleting a row that should have been changed is no progress."""

    def __init__(self, instance: Instance) -> None:
        names = [table.name for table in instance.tables]
        self._wanted: Rows = {
            name: {row[0]: row for row in rows} for name, rows in zip(names, instance.wanted, strict=True)
        }
        self._rows: Rows = {table.name: {row[0]: row for row in table.rows} for table in instance.tables}
        self._start = len(self._wrong_keys())
        if not self._start:
            raise ValueError("the task asks for a change that changes nothing")
        self.potential, self.solved = 0.0, False

    def take_result(self, statement: str, result: Result, database: Database) -> None:
        """Compare the database with what is wanted. A failed statement may have changed it as well."""
        self._rows = database.rows()
        distance = len(self._wrong_keys())
        self.solved = distance == 0
        self.potential = max(HARM, (self._start - distance) / self._start)

    def take_answer(self, answer: str) -> tuple[str, bool]:
        """Refuse an answer; the episode goes on."""
        return "error: the task asks for a change, not for an answer; reply with one SQL statement", False

    @property
    def state_key(self) -> str:
        """A digest of all rows."""
        rows = {name: sorted(map(repr, kept.values())) for name, kept in self._rows.items()}
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def info(self) -> dict[str, Any]:
        """Return for people all rows, and those that are missing and that should not be there, as lines
        ``table|value|...``, a few."""
        wrong = self._wrong_keys()[:MOST_LINES]
        sides = {"missing": self._wanted, "surplus": self._rows}
        found: dict[str, Any] = {"view": {"title": "The rows", "columns": ["table", "row"], "rows": _shown(self._rows)}}
        return found | {
            side: [row_text((name, *rows[name][key]))[:MOST_LINE_CHARS] for name, key in wrong if key in rows[name]]
            for side, rows in sides.items()
        }

    def _wrong_keys(self) -> list[tuple[str, Any]]:
        """Return the primary keys, with their tables, whose row is missing, surplus or another one than is wanted."""
        return [
            (name, key)
            for name, wanted in self._wanted.items()
            for key in dict.fromkeys((*wanted, *self._rows[name]))
            if wanted.get(key) != self._rows[name].get(key)
        ]


def _shown(tables: Rows) -> list[list[str]]:
    """Return all rows as (table, row); where the policy made many or long ones, the beginning and a digest of all."""
    rows = [[name, row_text(row)] for name, kept in tables.items() for row in kept.values()]
    if len(rows) <= MOST_ROWS and all(len(text) <= MOST_LINE_CHARS for _, text in rows):
        return rows
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    cut = [[name, text[:MOST_LINE_CHARS]] for name, text in rows[:MOST_LINES]]
    return [*cut, ["...", f"{len(rows)} rows, sha256 {digest}"]]


NO_STATEMENT = "error: no statement; reply with one SQL statement or a line answer: VALUE"


class SqlEnvironment:
    """Implements ``realhf.api.environment.Environment``. Every statement runs on the event loop, within the processor
    time of ``limits``. ``most_statements``: the episode ends after as many turns; ``observation_chars``: the longest
    answer to one."""

    def __init__(self, limits: Limits, *, most_statements: int, observation_chars: int) -> None:
        self._limits, self._most_statements, self._observation_chars = limits, most_statements, observation_chars
        self._database: Database | None = None
        self._goal: QuestionGoal | ChangeGoal | None = None
        self._turns, self._paid = 0, 0.0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode; the payload decides everything, ``seed`` nothing. Raises EnvironmentFailure (internal) for
        a payload of another environment."""
        await self.close()
        try:
            instance = draw_instance(task)
        except ValueError as error:
            raise EnvironmentFailure("internal", str(error)) from None
        self._goal = QuestionGoal(instance, self._limits) if instance.answer is not None else ChangeGoal(instance)
        self._database = Database(instance.tables, self._limits, writable=isinstance(self._goal, ChangeGoal))
        self._turns, self._paid = 0, 0.0
        return Opening(
            [{"role": "user", "content": instance.text()}],
            info={"tables": {table.name: [list(row) for row in table.rows] for table in instance.tables}},
            state_key=self._goal.state_key,
        )

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the statement, or take the answer. Raises EnvironmentFailure (internal) when no episode is open."""
        if self._database is None or self._goal is None:
            raise EnvironmentFailure("internal", "no episode is open; call reset first")
        self._turns += 1
        content = message.content or ""
        answer = read_answer(content)
        if answer is not None:
            text, ended = self._goal.take_answer(answer)
        else:
            text, ended = self._run(self._database, self._goal, read_statement(content)), False
        return self._turn(text, ended=ended)

    async def close(self) -> None:
        """Free the database; it may be called at any time."""
        if self._database is not None:
            self._database.close()
        self._database = self._goal = None

    def _run(self, database: Database, goal: QuestionGoal | ChangeGoal, statement: str) -> str:
        if not statement:
            return NO_STATEMENT
        result: Result = database.execute(statement)
        goal.take_result(statement, result, database)
        return result_text(result, self._observation_chars)

    def _turn(self, text: str, *, ended: bool) -> Turn:
        """Pay the difference of the potential, and end the episode if it is solved, answered or too long."""
        assert self._goal is not None
        potential, solved = self._goal.potential, self._goal.solved
        reward, self._paid = potential - self._paid, potential
        done = solved or ended or self._turns >= self._most_statements
        if done and self._database is not None:
            self._database.close()
            self._database = None
        return Turn(
            [{"role": "user", "content": text}],
            done=done,
            reward=reward,
            metrics={"success": float(solved), "progress": max(0.0, potential)},
            info=self._goal.info(),
            state_key=self._goal.state_key,
        )
