"""Defines an instance of a task, its tables, what is asked and what counts as solved, and draws its words and rows.

A row is called ``adjective-animal``, a table by one word, because a small policy copies what is short. Held out are
*pairs* of words that training never combines, decided by a stable hash: a table with its column of numbers, and both
words of a row. Every word occurs in training, so a policy must copy, not recall. Every instance has a table with such
a column and rows, so the splits share no instance.

What is wanted is worked out in Python from the rows, not by the SQL of the scripted solution.
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
    """Return the words of a text."""
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
"""A text column, and what its values are drawn from."""
NUMBER_COLUMNS = words("age cost price score size stock volume weight")
LINKED_COLUMNS = MappingProxyType(
    {
        "owner": words("anna boris clara david"),
        "region": words("east north south west"),
    }
)
"""A column that a second table gives to each value of a text column, and its values."""


def is_heldout_pair(first: str, second: str) -> bool:
    """Return whether names with this pair of words are kept for evaluation."""
    return is_held_out(f"{first} {second}")


def draw_table(rng: random.Random, split: str, numbers: tuple[str, ...] = NUMBER_COLUMNS) -> tuple[str, str]:
    """Draw a table's name and its column of ``numbers``. Raises ValueError for an unknown split."""
    return _pair(rng, split, TABLES, numbers)


def draw_row_names(rng: random.Random, split: str, count: int) -> list[str]:
    """Draw ``count`` different names such as ``brave-otter``; the first two differ in the last word alone. Raises
    ValueError for an unknown split."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        first = (pairs[0][0],) if len(pairs) == 1 else ROW_ADJECTIVES
        pair = _pair(rng, split, first, ANIMALS)
        if pair not in pairs:
            pairs.append(pair)
    return ["-".join(pair) for pair in pairs]


def _pair(rng: random.Random, split: str, first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, str]:
    if split not in SPLITS:
        raise ValueError(f"{split!r} is no split (known: {', '.join(SPLITS)})")
    while True:
        pair = rng.choice(first), rng.choice(second)
        if is_heldout_pair(*pair) is (split == HELD_OUT):
            return pair


Value = int | str
SMALLEST, LARGEST = 1, 30
"""Numbers in rows lie between these, inclusive."""
FEWEST_ROWS, MOST_ROWS = 8, 12


class Row(NamedTuple):
    """A row of the main table: ``text`` and ``number`` stand in columns whose names are drawn."""

    id: int
    name: str
    text: str
    number: int


@dataclass(frozen=True)
class Table:
    """A table and its rows. The first column is the primary key; the type of a column is that of ``types``."""

    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def create_sql(self) -> str:
        """Return the statement that makes the table."""
        keys = (" PRIMARY KEY", *("",) * (len(self.columns) - 1))
        parts = zip(self.columns, self.types, keys, strict=True)
        return f"CREATE TABLE {self.name} ({', '.join(f'{name} {kind} NOT NULL{key}' for name, kind, key in parts)})"

    def heading(self) -> str:
        """Return the table's name and columns, as the policy reads them."""
        return f"{self.name}({','.join(self.columns)})"


@dataclass(frozen=True)
class Instance:
    """One task. ``request`` is what is asked; ``statements`` solve it. A question has an ``answer``; a change has
    ``wanted``, the rows of every table afterwards."""

    request: str
    tables: tuple[Table, ...]
    statements: tuple[str, ...]
    answer: Value | None = None
    wanted: tuple[tuple[tuple[Value, ...], ...], ...] = ()

    @property
    def columns(self) -> frozenset[str]:
        """The names of all columns."""
        return frozenset(column for table in self.tables for column in table.columns)

    @property
    def reads(self) -> frozenset[tuple[str, str]]:
        """The columns that the scripted statements name, as (table, column), but for those that tables are joined by:
        SQLite does not tell that it reads them."""
        words = {*re.findall(r"\w+", " ".join(self.statements))}
        columns = [(table.name, name) for table in self.tables for name in table.columns]
        times = Counter(name for _, name in columns)
        return frozenset((table, name) for table, name in columns if name in words and times[name] == 1)

    def twins(self) -> Iterator[tuple[Table, ...]]:
        """Yield the tables with other rows: a row less, and the values of each column handed on to other rows; then
        with other values in one column."""
        for place in range(max(len(table.rows) for table in self.tables)):
            yield tuple(_stirred(table, place) for table in self.tables)
        for changed in self.tables:
            for column in range(1, len(changed.columns)):
                yield tuple(_replaced(table, column) if table is changed else table for table in self.tables)

    def text(self) -> str:
        """Return what the policy reads first: the tables and the request."""
        return f"Tables: {', '.join(table.heading() for table in self.tables)}.\n{self.request}"

    def turns(self) -> tuple[str, ...]:
        """Return what a policy says that solves the task."""
        return self.statements if self.answer is None else (*self.statements, f"answer: {self.answer}")


def _replaced(table: Table, column: int) -> Table:
    """Return a table with other values in a column."""
    rows = []
    for row in table.rows:
        value = row[column]
        other = f"{value}-2" if isinstance(value, str) else value + LARGEST
        rows.append((*row[:column], other, *row[column + 1 :]))
    return replace(table, rows=tuple(rows))


def _stirred(table: Table, place: int) -> Table:
    """Return a table without the row at a place (of a small table none), its columns turned, each by another number of
    rows."""
    rows = table.rows if len(table.rows) < FEWEST_ROWS else (*table.rows[:place], *table.rows[place + 1 :])
    turned = [
        [row[column] for row in (*rows[turn:], *rows[:turn])]
        for column in range(len(table.columns))
        for turn in [column * (place + 1) % len(rows)]
    ]
    return replace(table, rows=tuple(zip(*turned, strict=True)))


@dataclass(frozen=True)
class Scene:
    """A main table that a template asks about, with what was drawn for it. ``target`` and ``other`` are two of its
    rows; another row's name differs from that of ``target`` in the last word alone."""

    rng: random.Random
    split: str
    table: str
    text: str
    number: str
    rows: tuple[Row, ...]
    target: Row
    other: Row

    @property
    def main(self) -> Table:
        """The main table."""
        return self.table_of(self.table, self.rows)

    def table_of(self, name: str, rows: Sequence[Row]) -> Table:
        """Return a table with the columns of the main one."""
        columns = ("id", "name", self.text, self.number)
        return Table(name, columns, ("INTEGER", "TEXT", "TEXT", "INTEGER"), tuple(tuple(row) for row in rows))

    def having(self, text: str) -> list[Row]:
        """Return the rows with this value in the text column."""
        return [row for row in self.rows if row.text == text]

    def changed(self, change: Callable[[Row], Row | None]) -> tuple[Row, ...]:
        """Return the rows as ``change`` makes each of them; one that becomes None is gone."""
        return tuple(new for row in self.rows if (new := change(row)) is not None)

    def other_table_name(self) -> str:
        """Draw the name of another table."""
        while (name := draw_table(self.rng, self.split, (self.number,))[0]) == self.table:
            pass
        return name

    def fresh(self, count: int) -> list[Row]:
        """Draw rows that the main table does not have: other ids, names and numbers."""
        ids, numbers = ({row.id for row in self.rows}, {row.number for row in self.rows})
        taken = {row.name for row in self.rows}
        found: list[Row] = []
        while len(found) < count:
            row = _draw_rows(self.rng, self.split, self.text, 2)[0]
            if row.id not in ids and row.number not in numbers and row.name not in taken:
                found.append(row)
                ids.add(row.id)
                numbers.add(row.number)
                taken.add(row.name)
        return found


def draw_scene(rng: random.Random, split: str) -> Scene:
    """Draw a main table. Raises ValueError for an unknown split."""
    text = rng.choice([*TEXT_COLUMNS])
    table, number = draw_table(rng, split)
    rows = _draw_rows(rng, split, text, rng.randint(FEWEST_ROWS, MOST_ROWS))
    target, other = rows[0], rng.choice(rows[2:])
    return Scene(rng, split, table, text, number, tuple(sorted(rows)), target, other)


def _draw_rows(rng: random.Random, split: str, text: str, count: int) -> list[Row]:
    """Draw rows with different ids, names and numbers; the names of the first two differ in the last word alone."""
    texts = rng.sample(TEXT_COLUMNS[text], 3)
    ids = rng.sample(range(1, LARGEST + 1), count)
    numbers = rng.sample(range(SMALLEST, LARGEST + 1), count)
    row_names = draw_row_names(rng, split, count)
    rows = zip(ids, row_names, numbers, strict=True)
    return [Row(number_id, name, rng.choice(texts), number) for number_id, name, number in rows]


def question(scene: Scene, request: str, statement: str, answer: Value, *tables: Table) -> Instance:
    """Return a question about the main table and perhaps others."""
    return Instance(request, (scene.main, *tables), (statement,), answer=answer)


def change(
    scene: Scene, request: str, statements: Sequence[str], wanted: Sequence[Row], *others: tuple[Table, Table]
) -> Instance:
    """Return a change that leaves the main table with ``wanted``; ``others`` are the other tables before and after."""
    tables = (scene.main, *(before for before, _ in others))
    rows = (tuple(tuple(row) for row in wanted), *(after.rows for _, after in others))
    return Instance(request, tables, tuple(statements), wanted=rows)
