"""Episode of the SQL environment: a conversation about one database. Each turn is rewarded by the
change of a potential.

The potential is 0 at the start and 1 when the task is solved. For a question it is ``FOUND`` once a
statement has found the answer, and 1 once the correct answer is given. For a change it is the
relative decrease of the distance to the expected rows over all tables, so rows that should be kept
count as well. If the distance grows, it is negative, but at least ``HARM``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, EnvironmentFailure, Opening, Turn
from realhf.environments.sql.database import Database, Result, Rows, StatementLimits
from realhf.environments.sql.instance import SqlInstance
from realhf.environments.sql.tasks import draw_instance

_FENCE = re.compile(
    r"```[ \t]*(?:sqlite|sql)?[ \t]*\r?\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE
)
_ANSWER = re.compile(r"\s*answer[ \t]*:(.*)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?")
_TOLERANCE = 1e-6
"""Largest accepted deviation of a numeric answer."""


def read_answer(content: str) -> str | None:
    """Return VALUE if the last non-empty line is ``answer: VALUE``, otherwise None."""
    lines = content.strip().splitlines()
    match = _ANSWER.fullmatch(lines[-1]) if lines else None
    return match[1].strip() if match else None


def read_statement(content: str) -> str:
    """Return the SQL of a turn: the content of its first code fence, or the whole text, without
    trailing semicolons."""
    fence = _FENCE.search(content)
    return (fence[1] if fence else content).strip().rstrip("; \t\r\n")


def is_right(answer: str, expected: int | str) -> bool:
    """Return whether an answer is correct: the expected number, or the expected string, ignoring
    case, quotes and a full stop."""
    plain = read_value(answer)
    if isinstance(expected, str):
        return plain == expected.casefold()
    return bool(_NUMBER.fullmatch(plain)) and abs(float(plain) - expected) <= _TOLERANCE


def read_value(answer: str) -> str:
    """Return an answer in canonical form: without quotes and full stop, in lower case, integers
    without decimals."""
    plain = answer.strip().rstrip(".").strip("'\"` ").casefold()
    return (
        f"{float(plain):.0f}" if _NUMBER.fullmatch(plain) and float(plain).is_integer() else plain
    )


def result_text(result: Result, max_chars: int) -> str:
    """Return the result of a statement in at most ``max_chars`` characters: its rows, one per line
    with | between the values, the number of changed rows, or its error."""
    if result.error:
        return shorten(f"error: {_printable(result.error)}", max_chars)
    if result.changed is not None and not result.rows:
        return f"ok, {result.changed} row{'' if result.changed == 1 else 's'} changed"
    lines = [row_text(row) for row in result.rows]
    return shorten(
        "\n".join([*lines, *(["more rows"] if result.more else [])]) or "no rows", max_chars
    )


def row_text(row: Iterable[Any]) -> str:
    """Return the values of a row with | between them."""
    return "|".join(map(_value_text, row))


def shorten(text: str, max_chars: int) -> str:
    """Return the text, truncated and ended with "..." if it is longer than ``max_chars``, which
    must be at least 3."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def _value_text(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, float):
        return f"{value:.10g}" if math.isfinite(value) else ("Inf" if value > 0 else "-Inf")
    return _printable(str(value))


def _printable(characters: Iterable[str]) -> str:
    """Return the text with every unprintable character replaced by a space, so that a row stays one
    line."""
    return "".join(character if character.isprintable() else " " for character in characters)


FOUND = 0.5
"""Potential after a statement has found the answer, before it is given."""
HARM = -0.2
"""Smallest potential, if the database is farther from the expected rows than at the start."""
MAX_LINES = 8
MAX_LINE_CHARS = 120
"""Maximum number of wrong rows, and of characters of each, in the info for people."""
MAX_ROWS = 40
"""Maximum number of rows of a database in the view for people."""


class QuestionGoal:
    """Goal of answering a question.

    The answer counts as found if the result is a single value that equals it, the statement reads
    all columns on which the answer depends, and the same statement also finds the answer on other
    rows; a statement that returns a constant thus does not count. Only the latest result with a
    single value counts.
    """

    def __init__(self, instance: SqlInstance, limits: StatementLimits) -> None:
        assert instance.answer is not None
        self._expected = instance.answer
        self._required_columns = instance.reads
        self._instance = instance
        self._limits = limits
        self._answer = ""
        self.potential = 0.0
        self.solved = False

    def record_result(self, statement: str, result: Result, database: Database) -> None:
        """Update the potential after a statement was run."""
        value = _single_value(result)
        if value is not None:
            right = (
                value == self._expected
                and result.columns_read >= self._required_columns
                and self._finds_other_answers(statement)
            )
            self.potential = FOUND if right else 0.0

    def _finds_other_answers(self, statement: str) -> bool:
        """Return whether a statement also finds the correct answer on rows for which it is
        different."""
        for tables in self._instance.twins():
            twin = Database(tables, self._limits, writable=False)
            try:
                expected = _single_value(twin.execute(self._instance.statements[-1]))
                if expected is not None and expected != self._expected:
                    return _single_value(twin.execute(statement)) == expected
            finally:
                twin.close()
        return False

    def judge_answer(self, answer: str) -> tuple[str, bool]:
        """Judge the policy's only answer. Return (reply to the policy, whether the episode
        ends)."""
        self._answer = read_value(answer)
        self.solved = is_right(answer, self._expected)
        if self.solved:
            self.potential = 1.0
        return ("right" if self.solved else "wrong"), True

    @property
    def state_key(self) -> str:
        """Always "": a question changes no rows, and the conversation contains everything that the
        policy knows."""
        return ""

    def info(self) -> dict[str, Any]:
        """Return the answer for people; a question changes no rows."""
        return {"view": {"title": "The answer", "text": self._answer[:MAX_LINE_CHARS]}}


def _single_value(result: Result) -> Any:
    """Return the value of a result that is a single value, otherwise None."""
    is_value = len(result.rows) == 1 and len(result.rows[0]) == 1 and not result.more
    return result.rows[0][0] if is_value else None


class ChangeGoal:
    """Goal of changing the database to exactly the expected rows. The distance is the number of
    primary keys whose row differs from the expected one, so deleting a row that should be changed
    is not progress."""

    def __init__(self, instance: SqlInstance) -> None:
        names = [table.name for table in instance.tables]
        self._wanted: Rows = {
            name: {row[0]: row for row in rows}
            for name, rows in zip(names, instance.wanted, strict=True)
        }
        self._rows: Rows = {
            table.name: {row[0]: row for row in table.rows} for table in instance.tables
        }
        self._start = len(self._find_wrong_keys())
        if not self._start:
            raise ValueError("the task asks for a change that changes nothing")
        self.potential = 0.0
        self.solved = False

    def record_result(self, statement: str, result: Result, database: Database) -> None:
        """Compare the database with the expected rows. This is done after a failed statement too,
        because it may have changed rows."""
        self._rows = database.rows()
        distance = len(self._find_wrong_keys())
        self.solved = distance == 0
        self.potential = max(HARM, (self._start - distance) / self._start)

    def judge_answer(self, answer: str) -> tuple[str, bool]:
        """Reject an answer, because the task is a change; the episode continues."""
        return (
            "error: the task asks for a change, not for an answer; reply with one SQL statement",
            False,
        )

    @property
    def state_key(self) -> str:
        """Digest of all rows."""
        rows = {
            name: sorted(map(repr, table_rows.values())) for name, table_rows in self._rows.items()
        }
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def info(self) -> dict[str, Any]:
        """Return all rows, and some of the missing and surplus rows as lines ``table|value|...``,
        for people."""
        wrong = self._find_wrong_keys()[:MAX_LINES]
        sides = {"missing": self._wanted, "surplus": self._rows}
        view: dict[str, Any] = {
            "view": {
                "title": "The rows",
                "columns": ["table", "row"],
                "rows": _visible_rows(self._rows),
            }
        }
        return view | {
            side: [
                row_text((name, *rows[name][key]))[:MAX_LINE_CHARS]
                for name, key in wrong
                if key in rows[name]
            ]
            for side, rows in sides.items()
        }

    def _find_wrong_keys(self) -> list[tuple[str, Any]]:
        """Return (table, primary key) of each row that is missing, surplus or different from the
        expected one."""
        return [
            (name, key)
            for name, wanted_rows in self._wanted.items()
            for key in dict.fromkeys((*wanted_rows, *self._rows[name]))
            if wanted_rows.get(key) != self._rows[name].get(key)
        ]


def _visible_rows(tables: Rows) -> list[list[str]]:
    """Return all rows as (table, row); if they are many or long, only the first few and a digest of
    all."""
    rows = [
        [name, row_text(row)] for name, table_rows in tables.items() for row in table_rows.values()
    ]
    if len(rows) <= MAX_ROWS and all(len(text) <= MAX_LINE_CHARS for _, text in rows):
        return rows
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    shortened = [[name, text[:MAX_LINE_CHARS]] for name, text in rows[:MAX_LINES]]
    return [*shortened, ["...", f"{len(rows)} rows, sha256 {digest}"]]


NO_STATEMENT = "error: no statement; reply with one SQL statement or a line answer: VALUE"


class SqlEnvironment:
    """``realhf.api.environment.Environment`` that plays on a database. Every statement runs on the
    event loop, within the processor time of ``limits``. ``max_statements``: maximum number of
    turns of an episode. ``observation_chars``: maximum length of an answer to the policy."""

    def __init__(
        self, limits: StatementLimits, *, max_statements: int, observation_chars: int
    ) -> None:
        self._limits = limits
        self._max_statements = max_statements
        self._observation_chars = observation_chars
        self._database: Database | None = None
        self._goal: QuestionGoal | ChangeGoal | None = None
        self._turns = 0
        self._rewarded = 0.0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode. The payload determines everything; ``seed`` is not used. Raises
        EnvironmentFailure (internal) for a payload of another environment."""
        await self.close()
        try:
            instance = draw_instance(task)
        except ValueError as error:
            raise EnvironmentFailure("internal", str(error)) from None
        self._goal = (
            QuestionGoal(instance, self._limits)
            if instance.answer is not None
            else ChangeGoal(instance)
        )
        self._database = Database(
            instance.tables, self._limits, writable=isinstance(self._goal, ChangeGoal)
        )
        self._turns = 0
        self._rewarded = 0.0
        return Opening(
            [{"role": "user", "content": instance.text()}],
            info={
                "tables": {
                    table.name: [list(row) for row in table.rows] for table in instance.tables
                }
            },
            state_key=self._goal.state_key,
        )

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the policy's statement, or judge its answer. Raises EnvironmentFailure (internal) if
        no episode is open."""
        if self._database is None or self._goal is None:
            raise EnvironmentFailure("internal", "no episode is open; call reset first")
        self._turns += 1
        content = message.content or ""
        answer = read_answer(content)
        if answer is not None:
            text, ended = self._goal.judge_answer(answer)
        else:
            text = self._run(self._database, self._goal, read_statement(content))
            ended = False
        return self._build_turn(text, ended=ended)

    async def close(self) -> None:
        """Free the database. Idempotent."""
        if self._database is not None:
            self._database.close()
        self._database = self._goal = None

    def _run(self, database: Database, goal: QuestionGoal | ChangeGoal, statement: str) -> str:
        if not statement:
            return NO_STATEMENT
        result: Result = database.execute(statement)
        goal.record_result(statement, result, database)
        return result_text(result, self._observation_chars)

    def _build_turn(self, text: str, *, ended: bool) -> Turn:
        """Return the turn. Its reward is the change of the potential. The episode ends if the task
        is solved, a question was answered, or the maximum number of turns is reached."""
        assert self._goal is not None
        potential = self._goal.potential
        solved = self._goal.solved
        reward = potential - self._rewarded
        self._rewarded = potential
        done = solved or ended or self._turns >= self._max_statements
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
