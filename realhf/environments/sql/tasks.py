"""Tasks of the SQL environment: templates of questions (lookup, aggregate, join) and of changes
(change, steps), and the task set."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from realhf.api.environment import TRAIN, Task
from realhf.env.loader.tasks import GroupedTaskSet
from realhf.environments.sql import instance
from realhf.environments.sql.instance import (
    MAX_NUMBER,
    SMALLEST,
    MainRow,
    SqlInstance,
    SqlScene,
    SqlTable,
    change,
    draw_scene,
    question,
)

GROUPS = ("lookup", "aggregate", "join", "change", "steps")
"""Groups by difficulty: one cell; over several rows; over two tables; one change; several
statements."""


def cell(scene: SqlScene) -> SqlInstance:
    """Generate a question about the number in a row; the question names the row."""
    table = scene.table
    number = scene.number
    row = scene.target
    return question(
        scene,
        f"What is the {number} in {table} where name='{row.name}'?",
        f"SELECT {number} FROM {table} WHERE name='{row.name}'",
        row.number,
    )


def name_of_id(scene: SqlScene) -> SqlInstance:
    """Generate a question about the name of a row; the question gives its id."""
    return question(
        scene,
        f"What is the name in {scene.table} where id={scene.target.id}?",
        f"SELECT name FROM {scene.table} WHERE id={scene.target.id}",
        scene.target.name,
    )


def name_of_number(scene: SqlScene) -> SqlInstance:
    """Generate a question about the name of a row; the question gives its number."""
    table = scene.table
    number = scene.number
    row = scene.target
    return question(
        scene,
        f"What is the name in {table} where {number}={row.number}?",
        f"SELECT name FROM {table} WHERE {number}={row.number}",
        row.name,
    )


def count(scene: SqlScene) -> SqlInstance:
    """Generate a question about how many rows have a given text."""
    table = scene.table
    text = scene.text
    value = scene.target.text
    return question(
        scene,
        f"How many rows are in {table} where {text}='{value}'?",
        f"SELECT count(*) FROM {table} WHERE {text}='{value}'",
        len(scene.rows_with_text(value)),
    )


def total(scene: SqlScene) -> SqlInstance:
    """Generate a question about the sum of the numbers in rows with a given text."""
    table = scene.table
    text = scene.text
    number = scene.number
    value = scene.target.text
    return question(
        scene,
        f"What is the total {number} in {table} where {text}='{value}'?",
        f"SELECT sum({number}) FROM {table} WHERE {text}='{value}'",
        sum(row.number for row in scene.rows_with_text(value)),
    )


def extreme(scene: SqlScene) -> SqlInstance:
    """Generate a question about the name of the row with the largest or smallest number."""
    table = scene.table
    number = scene.number
    largest = scene.rng.random() < 0.5
    row = (max if largest else min)(scene.rows, key=lambda row: row.number)
    return question(
        scene,
        f"Which name in {table} has the {'largest' if largest else 'smallest'} {number}?",
        f"SELECT name FROM {table} ORDER BY {number}{' DESC' if largest else ''} LIMIT 1",
        row.name,
    )


def total_above(scene: SqlScene) -> SqlInstance:
    """Generate a question about the sum of all numbers greater than a given number."""
    table = scene.table
    number = scene.number
    limit = scene.other.number
    limit = min(limit, max(row.number for row in scene.rows) - 1)
    return question(
        scene,
        f"What is the total {number} in {table} where {number}>{limit}?",
        f"SELECT sum({number}) FROM {table} WHERE {number}>{limit}",
        sum(row.number for row in scene.rows if row.number > limit),
    )


def linked_value(scene: SqlScene) -> SqlInstance:
    """Generate a question about the value that a second table has for a row of the main table.
    The question names the row."""
    linked = linked_table(scene)
    row = scene.target
    return question(
        scene,
        f"What is the {linked.columns[1]} in {scene.table} where name='{row.name}'?",
        f"SELECT {linked.columns[1]} FROM {scene.table} JOIN {linked.name} USING({scene.text}) "
        f"WHERE name='{row.name}'",
        _value_of(linked)[row.text],
        linked,
    )


def linked_count(scene: SqlScene) -> SqlInstance:
    """Generate a question about how many rows have a given value in a second table."""
    linked = linked_table(scene)
    column, value, having = _rows_with_value(scene, linked)
    return question(
        scene,
        f"How many rows are in {scene.table} where {column}='{value}'?",
        f"SELECT count(*) FROM {scene.table} JOIN {linked.name} USING({scene.text}) WHERE "
        f"{column}='{value}'",
        len(having),
        linked,
    )


def linked_total(scene: SqlScene) -> SqlInstance:
    """Generate a question about the sum of the numbers in the rows that have a given value in a
    second table."""
    linked = linked_table(scene)
    column, value, having = _rows_with_value(scene, linked)
    return question(
        scene,
        f"What is the total {scene.number} in {scene.table} where {column}='{value}'?",
        f"SELECT sum({scene.number}) FROM {scene.table} JOIN {linked.name} USING({scene.text}) "
        f"WHERE {column}='{value}'",
        sum(having),
        linked,
    )


def linked_table(scene: SqlScene) -> SqlTable:
    """Draw a second table that maps every possible text, except one that does not occur in the main
    table, to a value."""
    column = scene.rng.choice([*instance.LINKED_COLUMNS])
    used = {row.text for row in scene.rows}
    left_out = scene.rng.choice(
        [text for text in instance.TEXT_COLUMNS[scene.text] if text not in used]
    )
    texts = [text for text in instance.TEXT_COLUMNS[scene.text] if text != left_out]
    rows = tuple((text, scene.rng.choice(instance.LINKED_COLUMNS[column])) for text in texts)
    return SqlTable(scene.other_table_name(), (scene.text, column), ("TEXT", "TEXT"), rows)


def _rows_with_value(scene: SqlScene, linked: SqlTable) -> tuple[str, str, list[int]]:
    """Return (column of the second table, its value for the target row, numbers of the rows with
    that value)."""
    value_of = _value_of(linked)
    value = value_of[scene.target.text]
    return (
        linked.columns[1],
        value,
        [row.number for row in scene.rows if value_of[row.text] == value],
    )


def _value_of(linked: SqlTable) -> dict[str, str]:
    return {str(text): str(value) for text, value in linked.rows}


def set_number(scene: SqlScene) -> SqlInstance:
    """Generate a task that asks to change the number of a row."""
    table = scene.table
    number = scene.number
    row = scene.target
    value = scene.rng.choice(
        [value for value in range(SMALLEST, MAX_NUMBER + 1) if value != row.number]
    )
    return change(
        scene,
        f"Set {number} to {value} in {table} where name='{row.name}'.",
        [f"UPDATE {table} SET {number}={value} WHERE name='{row.name}'"],
        _set_row_number(scene, row, value),
    )


def delete(scene: SqlScene) -> SqlInstance:
    """Generate a task that asks to delete a row."""
    return change(
        scene,
        f"Delete the row in {scene.table} where name='{scene.target.name}'.",
        [f"DELETE FROM {scene.table} WHERE name='{scene.target.name}'"],
        _drop_row(scene, scene.target),
    )


def insert(scene: SqlScene) -> SqlInstance:
    """Generate a task that asks to add a row."""
    new = scene.draw_new_rows(1)[0]
    values = f"{new.id},'{new.name}','{new.text}',{new.number}"
    return change(
        scene,
        f"Add the row {values} to {scene.table}.",
        [f"INSERT INTO {scene.table} VALUES({values})"],
        (*scene.rows, new),
    )


def raise_numbers(scene: SqlScene) -> SqlInstance:
    """Generate a task that asks to increase the numbers of all rows with a given text."""
    table = scene.table
    text = scene.text
    number = scene.number
    value = scene.target.text
    step = scene.rng.randint(2, 9)
    return change(
        scene,
        f"Add {step} to {number} in {table} where {text}='{value}'.",
        [f"UPDATE {table} SET {number}={number}+{step} WHERE {text}='{value}'"],
        scene.map_rows(
            lambda row: row._replace(number=row.number + step) if row.text == value else row
        ),
    )


def transfer(scene: SqlScene) -> SqlInstance:
    """Generate a task that asks to move a part of a row's number to another row."""
    table = scene.table
    number = scene.number
    giver = scene.target
    taker = scene.other
    moved = scene.rng.randint(2, 9)
    rows_after = {giver: giver.number - moved, taker: taker.number + moved}
    return change(
        scene,
        f"Move {moved} of {number} in {table} from name='{giver.name}' to name='{taker.name}'.",
        [
            f"UPDATE {table} SET {number}={number}-{moved} WHERE name='{giver.name}'",
            f"UPDATE {table} SET {number}={number}+{moved} WHERE name='{taker.name}'",
        ],
        scene.map_rows(lambda row: row._replace(number=rows_after.get(row, row.number))),
    )


def copy_number(scene: SqlScene) -> SqlInstance:
    """Generate a task that asks to copy the number of a row to another row."""
    table = scene.table
    number = scene.number
    source = scene.target
    target = scene.other
    return change(
        scene,
        f"Set {number} in {table} where name='{target.name}' to that where name='{source.name}'.",
        [
            f"SELECT {number} FROM {table} WHERE name='{source.name}'",
            f"UPDATE {table} SET {number}={source.number} WHERE name='{target.name}'",
        ],
        _set_row_number(scene, target, source.number),
    )


def archive(scene: SqlScene) -> SqlInstance:
    """Generate a task that asks to move a row to another table."""
    table = scene.table
    target = scene.target
    remaining = scene.draw_new_rows(3)
    before = scene.table_of(scene.other_table_name(), sorted(remaining))
    after = scene.table_of(before.name, [*remaining, target])
    return change(
        scene,
        f"Move the row where name='{target.name}' from {table} to {before.name}.",
        [
            f"INSERT INTO {before.name} SELECT * FROM {table} WHERE name='{target.name}'",
            f"DELETE FROM {table} WHERE name='{target.name}'",
        ],
        _drop_row(scene, target),
        (before, after),
    )


def rename(scene: SqlScene) -> SqlInstance:
    """Generate a task that asks to replace a text with another one in two tables."""
    linked = linked_table(scene)
    text = scene.text
    old = scene.target.text
    linked_texts = {text for text, _ in linked.rows}
    new = next(text for text in instance.TEXT_COLUMNS[scene.text] if text not in linked_texts)
    after = SqlTable(
        linked.name,
        linked.columns,
        linked.types,
        tuple((new if text == old else text, value) for text, value in linked.rows),
    )
    return change(
        scene,
        f"Change {text}='{old}' to {text}='{new}' in {scene.table} and {linked.name}.",
        [
            f"UPDATE {name} SET {text}='{new}' WHERE {text}='{old}'"
            for name in (scene.table, linked.name)
        ],
        scene.map_rows(lambda row: row._replace(text=new) if row.text == old else row),
        (linked, after),
    )


def _set_row_number(scene: SqlScene, target: MainRow, number: int) -> tuple[MainRow, ...]:
    return scene.map_rows(lambda row: row._replace(number=number) if row == target else row)


def _drop_row(scene: SqlScene, target: MainRow) -> tuple[MainRow, ...]:
    return scene.map_rows(lambda row: None if row == target else row)


TEMPLATES: Mapping[str, tuple[str, Callable[[SqlScene], SqlInstance]]] = MappingProxyType(
    {
        draw.__name__: (group, draw)
        for group, draws in {
            "lookup": (cell, name_of_id, name_of_number),
            "aggregate": (count, total, total_above, extreme),
            "join": (linked_value, linked_count, linked_total),
            "change": (set_number, delete, insert, raise_numbers),
            "steps": (transfer, copy_number, archive, rename),
        }.items()
        for draw in draws
    }
)
"""(group, function that makes an instance) of each template, by name."""


class SqlTaskSet(GroupedTaskSet):
    """Task set of the templates in the given groups; each has unlimited instances by seed. The
    splits draw disjoint names. Raises ValueError for an unknown split or group."""

    def __init__(self, split: str = TRAIN, groups: Sequence[str] = GROUPS) -> None:
        super().__init__(
            {name: group for name, (group, _) in TEMPLATES.items()}, GROUPS, groups, split
        )

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the instance for ``seed``. Raises KeyError for a template that is not in the
        set."""
        group = self.group_of[template_id]
        payload = {"template": template_id, "split": self.split, "seed": seed}
        return Task(f"{template_id}:{self.split}:{seed}", group, payload, seed=seed)


def draw_instance(payload: Mapping[str, Any]) -> SqlInstance:
    """Return the instance that a task's payload describes; deterministic. Raises ValueError for a
    payload of another environment."""
    name, split, seed = (payload.get(key) for key in ("template", "split", "seed"))
    if not isinstance(name, str) or name not in TEMPLATES:
        raise ValueError(f"the task names no template of this environment: {name!r}")
    if not isinstance(split, str) or type(seed) is not int:
        raise ValueError(
            f"the task of template {name} needs a split and a whole number as seed, not {split!r}, "
            f"{seed!r}"
        )
    rng = random.Random(f"sql:{name}:{split}:{seed}")
    return TEMPLATES[name][1](draw_scene(rng, split))
