"""Says how far an episode is: a potential whose differences are the rewards.

It is 0 where nothing was done and 1 where the task is solved. A question is half solved when a statement has found the
answer, and solved when it was given. A change is as far as the distance to the wanted rows has shrunk, over all tables,
so that what should have stayed counts too; farther away than at the beginning it is negative, ``HARM`` at the least.
"""

from __future__ import annotations

import hashlib
from typing import Any

from realhf.environments.sql.database import Database, Result, Rows
from realhf.environments.sql.instance import Instance
from realhf.environments.sql.reply import is_right, read_value, row_text

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
    that the answer depends on."""

    def __init__(self, instance: Instance) -> None:
        assert instance.answer is not None
        self._expected, self._needed = instance.answer, instance.reads
        self._given = ""
        self.potential, self.solved = 0.0, False

    def take_result(self, result: Result, database: Database) -> None:
        """See what a statement returned."""
        is_value = len(result.rows) == 1 and len(result.rows[0]) == 1 and not result.more
        if is_value and result.rows[0][0] == self._expected and result.read >= self._needed:
            self.potential = max(self.potential, FOUND)

    def take_answer(self, answer: str) -> tuple[str, bool]:
        """Take the answer, the only one there is. Returns what the policy is told, and whether the episode ends."""
        self._given = read_value(answer)
        self.solved = is_right(answer, self._expected)
        if self.solved:
            self.potential = 1.0
        return ("right" if self.solved else "wrong"), True

    def info(self) -> dict[str, Any]:
        """Return for people what was answered; a question changes no rows."""
        return {"view": {"title": "The answer", "text": self._given[:MOST_LINE_CHARS]}}


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

    def take_result(self, result: Result, database: Database) -> None:
        """Compare the database with what is wanted. A failed statement may have changed it as well."""
        self._rows = database.rows()
        distance = len(self._wrong_keys())
        self.solved = distance == 0
        self.potential = max(HARM, (self._start - distance) / self._start)

    def take_answer(self, answer: str) -> tuple[str, bool]:
        """Refuse an answer; the episode goes on."""
        return "error: the task asks for a change, not for an answer; reply with one SQL statement", False

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
