"""Task instances of the SQL environment: tables, request and success criterion, with randomly drawn
words and rows.

A row is named ``adjective-animal`` and a table has a one-word name, because a small policy can only
copy short names. The held-out split consists of *pairs* of words that training never combines,
chosen by a stable hash: a table with its number column, and the two words of a row name. Every word
occurs in training, so a policy must copy, not recall. Every instance contains such pairs, so no
instance occurs in both splits.

The expected result is computed in Python from the rows, not by the SQL of the scripted solution.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from realhf.api.environment import HELD_OUT, SPLITS
from realhf.env.loader.tasks import is_held_out


def words(text: str) -> tuple[str, ...]:
    """Split a string into words."""
    return tuple(text.split())


TABLES = words(
    """boats books cabins clients engines flights guides hotels items jobs lamps maps orchids parcels parts pets
    rooms ships songs teams tools trains trips visits"""
)
ROW_ADJECTIVES = words(
    """agile bold brave bright calm clever cozy curly eager fancy fierce gentle grand happy jolly keen kind lively lucky
    merry mild noble polite proud quiet rapid shy silent sturdy swift tidy witty"""
)
ANIMALS = words(
    """badger bear beaver bison camel crane dolphin eagle falcon finch fox gecko hawk heron jaguar koala lemur lynx
    moose osprey otter owl panda puffin rabbit raven robin salmon seal tiger walrus wolf"""
)
TEXT_COLUMNS = MappingProxyType(
    {
        "city": words("cairo lima oslo paris rome tokyo"),
        "color": words("black blue green red white yellow"),
        "metal": words("copper iron lead nickel steel zinc"),
    }
)
"""Possible values of each text column."""
NUMBER_COLUMNS = words("age cost price score size stock volume weight")
LINKED_COLUMNS = MappingProxyType(
    {
        "owner": words("anna boris clara david"),
        "region": words("east north south west"),
    }
)
"""Columns of a second table, with their possible values; each value of a text column is mapped to
one of them."""


def is_heldout_pair(first: str, second: str) -> bool:
    """Return whether names that contain this pair of words belong to the held-out split."""
    return is_held_out(f"{first} {second}")


def draw_table(
    rng: random.Random, split: str, numbers: tuple[str, ...] = NUMBER_COLUMNS
) -> tuple[str, str]:
    """Draw a table name and its number column from ``numbers``. Raises ValueError for an unknown
    split."""
    return _draw_pair(rng, split, TABLES, numbers)


def draw_row_names(rng: random.Random, split: str, count: int) -> list[str]:
    """Draw ``count`` different names such as ``brave-otter``; the first two differ only in the last
    word. Raises ValueError for an unknown split."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        first = (pairs[0][0],) if len(pairs) == 1 else ROW_ADJECTIVES
        pair = _draw_pair(rng, split, first, ANIMALS)
        if pair not in pairs:
            pairs.append(pair)
    return ["-".join(pair) for pair in pairs]


def _draw_pair(
    rng: random.Random, split: str, first: tuple[str, ...], second: tuple[str, ...]
) -> tuple[str, str]:
    if split not in SPLITS:
        raise ValueError(f"{split!r} is not a split (known: {', '.join(SPLITS)})")
    while True:
        pair = rng.choice(first), rng.choice(second)
        if is_heldout_pair(*pair) is (split == HELD_OUT):
            return pair


Value = int | str
SMALLEST = 1
MAX_NUMBER = 30
"""Bounds of numbers in rows, inclusive."""
MIN_ROWS = 8
MAX_ROWS = 12


class MainRow(NamedTuple):
    """Row of the main table. The names of its columns ``text`` and ``number`` differ between
    instances."""

    id: int
    """Primary key."""
    name: str
    """Two-word name."""
    text: str
    """Value of the text column."""
    number: int
    """Value of the number column."""


@dataclass(frozen=True)
class SqlTable:
    """A table and its rows."""

    name: str
    """Name of the table."""
    columns: tuple[str, ...]
    """Names of the columns; the first is the primary key."""
    types: tuple[str, ...]
    """SQL types of the columns."""
    rows: tuple[tuple[Value, ...], ...]
    """Values of the rows."""

    def create_sql(self) -> str:
        """Return the CREATE TABLE statement."""
        keys = (" PRIMARY KEY", *("",) * (len(self.columns) - 1))
        parts = zip(self.columns, self.types, keys, strict=True)
        return (
            f"CREATE TABLE {self.name} "
            f"({', '.join(f'{name} {kind} NOT NULL{key}' for name, kind, key in parts)})"
        )

    def heading(self) -> str:
        """Return the table's name and columns, as the policy reads them."""
        return f"{self.name}({','.join(self.columns)})"


@dataclass(frozen=True)
class SqlInstance:
    """One task with its solution."""

    request: str
    """What the policy is asked."""
    tables: tuple[SqlTable, ...]
    """Tables at the start."""
    statements: tuple[str, ...]
    """Statements that solve the task."""
    answer: Value | None = None
    """Answer of a question; None for a change."""
    wanted: tuple[tuple[tuple[Value, ...], ...], ...] = ()
    """Rows of every table after the change; () for a question."""

    @property
    def columns(self) -> frozenset[str]:
        """Names of all columns."""
        return frozenset(column for table in self.tables for column in table.columns)

    @property
    def reads(self) -> frozenset[tuple[str, str]]:
        """Columns that the scripted statements read, as (table, column). Join columns are excluded,
        because SQLite does not report reads of them."""
        words = {*re.findall(r"\w+", " ".join(self.statements))}
        columns = [(table.name, name) for table in self.tables for name in table.columns]
        times = Counter(name for _, name in columns)
        return frozenset(
            (table, name) for table, name in columns if name in words and times[name] == 1
        )

    def twins(self) -> Iterator[tuple[SqlTable, ...]]:
        """Yield copies of the tables with other rows: first without one row and with each column's
        values shifted to other rows, then with other values in a single column."""
        for place in range(max(len(table.rows) for table in self.tables)):
            yield tuple(_rotate_columns(table, place) for table in self.tables)
        for target in self.tables:
            for column in range(1, len(target.columns)):
                yield tuple(
                    _replace_column(table, column) if table is target else table
                    for table in self.tables
                )

    def text(self) -> str:
        """Return the opening for the policy: the tables and the request."""
        return f"Tables: {', '.join(table.heading() for table in self.tables)}.\n{self.request}"

    def turns(self) -> tuple[str, ...]:
        """Return the turns of a policy that solves the task."""
        return (
            self.statements if self.answer is None else (*self.statements, f"answer: {self.answer}")
        )


def _replace_column(table: SqlTable, column: int) -> SqlTable:
    """Return a copy of a table with other values in one column."""
    rows = []
    for row in table.rows:
        value = row[column]
        other_value = f"{value}-2" if isinstance(value, str) else value + MAX_NUMBER
        rows.append((*row[:column], other_value, *row[column + 1 :]))
    return replace(table, rows=tuple(rows))


def _rotate_columns(table: SqlTable, place: int) -> SqlTable:
    """Return a copy of a table without the row at ``place`` (small tables keep all rows), and with
    each column rotated by a different number of rows."""
    rows = (
        table.rows
        if len(table.rows) < MIN_ROWS
        else (*table.rows[:place], *table.rows[place + 1 :])
    )
    turned = [
        [row[column] for row in (*rows[turn:], *rows[:turn])]
        for column in range(len(table.columns))
        for turn in [column * (place + 1) % len(rows)]
    ]
    return replace(table, rows=tuple(zip(*turned, strict=True)))


@dataclass(frozen=True)
class SqlScene:
    """A main table for a template, and random draws related to it."""

    rng: random.Random
    """Random generator of the instance."""
    split: str
    """Split of the names."""
    table: str
    """Name of the main table."""
    text: str
    """Name of the main table's text column."""
    number: str
    """Name of the main table's number column."""
    rows: tuple[MainRow, ...]
    """Rows of the main table."""
    target: MainRow
    """The row that the task is about; another row's name differs from its name only in the last
    word."""
    other: MainRow
    """Another row of the main table, for templates that need two."""

    @property
    def main(self) -> SqlTable:
        """The main table with its rows."""
        return self.table_of(self.table, self.rows)

    def table_of(self, name: str, rows: Sequence[MainRow]) -> SqlTable:
        """Return a table with the main table's columns, the given name and the given rows."""
        columns = ("id", "name", self.text, self.number)
        return SqlTable(
            name, columns, ("INTEGER", "TEXT", "TEXT", "INTEGER"), tuple(tuple(row) for row in rows)
        )

    def rows_with_text(self, text: str) -> list[MainRow]:
        """Return the rows with this value in the text column."""
        return [row for row in self.rows if row.text == text]

    def map_rows(self, change: Callable[[MainRow], MainRow | None]) -> tuple[MainRow, ...]:
        """Return the rows after applying ``change`` to each; rows for which it returns None are
        removed."""
        return tuple(new for row in self.rows if (new := change(row)) is not None)

    def other_table_name(self) -> str:
        """Draw the name of a table other than the main table."""
        while (name := draw_table(self.rng, self.split, (self.number,))[0]) == self.table:
            pass
        return name

    def draw_new_rows(self, count: int) -> list[MainRow]:
        """Draw rows whose ids, names and numbers do not occur in the main table."""
        ids = {row.id for row in self.rows}
        numbers = {row.number for row in self.rows}
        used = {row.name for row in self.rows}
        rows: list[MainRow] = []
        while len(rows) < count:
            row = _draw_rows(self.rng, self.split, self.text, 2)[0]
            if row.id not in ids and row.number not in numbers and row.name not in used:
                rows.append(row)
                ids.add(row.id)
                numbers.add(row.number)
                used.add(row.name)
        return rows


def draw_scene(rng: random.Random, split: str) -> SqlScene:
    """Draw a scene: the main table, its rows, the row that the task is about and another row."""
    text = rng.choice([*TEXT_COLUMNS])
    table, number = draw_table(rng, split)
    rows = _draw_rows(rng, split, text, rng.randint(MIN_ROWS, MAX_ROWS))
    target = rows[0]
    other = rng.choice(rows[2:])
    return SqlScene(rng, split, table, text, number, tuple(sorted(rows)), target, other)


def _draw_rows(rng: random.Random, split: str, text: str, count: int) -> list[MainRow]:
    """Draw rows with different ids, names and numbers; the names of the first two differ only in
    the last word."""
    texts = rng.sample(TEXT_COLUMNS[text], 3)
    ids = rng.sample(range(1, MAX_NUMBER + 1), count)
    numbers = rng.sample(range(SMALLEST, MAX_NUMBER + 1), count)
    row_names = draw_row_names(rng, split, count)
    rows = zip(ids, row_names, numbers, strict=True)
    return [MainRow(number_id, name, rng.choice(texts), number) for number_id, name, number in rows]


def question(
    scene: SqlScene, request: str, statement: str, answer: Value, *tables: SqlTable
) -> SqlInstance:
    """Return a question about the main table and optionally other tables."""
    return SqlInstance(request, (scene.main, *tables), (statement,), answer=answer)


def change(
    scene: SqlScene,
    request: str,
    statements: Sequence[str],
    wanted: Sequence[MainRow],
    *others: tuple[SqlTable, SqlTable],
) -> SqlInstance:
    """Return a task that must leave the main table with the rows ``wanted``. ``others``: (before,
    after) of each other table."""
    tables = (scene.main, *(before for before, _ in others))
    rows = (tuple(tuple(row) for row in wanted), *(after.rows for _, after in others))
    return SqlInstance(request, tables, tuple(statements), wanted=rows)
