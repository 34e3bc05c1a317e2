"""The templates that ask a question: groups ``lookup``, ``aggregate`` and ``join``."""

from __future__ import annotations

from realhf.environments.sql import names
from realhf.environments.sql.instance import Instance, Scene, Table, question


def cell(scene: Scene) -> Instance:
    """A number of a row with a given name."""
    table, number, row = scene.table, scene.number, scene.target
    return question(
        scene,
        f"What is the {number} in {table} where name='{row.name}'?",
        f"SELECT {number} FROM {table} WHERE name='{row.name}'",
        row.number,
    )


def name_of_id(scene: Scene) -> Instance:
    """The name of a row with a given id."""
    return question(
        scene,
        f"What is the name in {scene.table} where id={scene.target.id}?",
        f"SELECT name FROM {scene.table} WHERE id={scene.target.id}",
        scene.target.name,
    )


def name_of_number(scene: Scene) -> Instance:
    """The name of the row with a given number."""
    table, number, row = scene.table, scene.number, scene.target
    return question(
        scene,
        f"What is the name in {table} where {number}={row.number}?",
        f"SELECT name FROM {table} WHERE {number}={row.number}",
        row.name,
    )


def count(scene: Scene) -> Instance:
    """How many rows have a given text."""
    table, text, value = scene.table, scene.text, scene.target.text
    return question(
        scene,
        f"How many rows are in {table} where {text}='{value}'?",
        f"SELECT count(*) FROM {table} WHERE {text}='{value}'",
        len(scene.having(value)),
    )


def total(scene: Scene) -> Instance:
    """The sum of the numbers of the rows with a given text."""
    table, text, number, value = scene.table, scene.text, scene.number, scene.target.text
    return question(
        scene,
        f"What is the total {number} in {table} where {text}='{value}'?",
        f"SELECT sum({number}) FROM {table} WHERE {text}='{value}'",
        sum(row.number for row in scene.having(value)),
    )


def extreme(scene: Scene) -> Instance:
    """The name of the row with the largest or smallest number."""
    table, number = scene.table, scene.number
    largest = scene.rng.random() < 0.5
    row = (max if largest else min)(scene.rows, key=lambda row: row.number)
    return question(
        scene,
        f"Which name in {table} has the {'largest' if largest else 'smallest'} {number}?",
        f"SELECT name FROM {table} ORDER BY {number}{' DESC' if largest else ''} LIMIT 1",
        row.name,
    )


def total_above(scene: Scene) -> Instance:
    """The sum of the numbers of the rows above a given number."""
    table, number, limit = scene.table, scene.number, scene.other.number
    limit = min(limit, max(row.number for row in scene.rows) - 1)
    return question(
        scene,
        f"What is the total {number} in {table} where {number}>{limit}?",
        f"SELECT sum({number}) FROM {table} WHERE {number}>{limit}",
        sum(row.number for row in scene.rows if row.number > limit),
    )


def linked_value(scene: Scene) -> Instance:
    """What a second table says about a row with a given name."""
    linked, row = linked_table(scene), scene.target
    return question(
        scene,
        f"What is the {linked.columns[1]} in {scene.table} where name='{row.name}'?",
        f"SELECT {linked.columns[1]} FROM {scene.table} JOIN {linked.name} USING({scene.text}) WHERE name='{row.name}'",
        _value_of(linked)[row.text],
        linked,
    )


def linked_count(scene: Scene) -> Instance:
    """How many rows have a given value in a second table."""
    linked = linked_table(scene)
    column, value, having = _rows_with_value(scene, linked)
    return question(
        scene,
        f"How many rows are in {scene.table} where {column}='{value}'?",
        f"SELECT count(*) FROM {scene.table} JOIN {linked.name} USING({scene.text}) WHERE {column}='{value}'",
        len(having),
        linked,
    )


def linked_total(scene: Scene) -> Instance:
    """The sum of the numbers of the rows with a given value in a second table."""
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


def linked_table(scene: Scene) -> Table:
    """Draw a second table: it gives a value to every text that there is but one, which the main table does not have."""
    column = scene.rng.choice([*names.LINKED_COLUMNS])
    used = {row.text for row in scene.rows}
    left_out = scene.rng.choice([text for text in names.TEXT_COLUMNS[scene.text] if text not in used])
    texts = [text for text in names.TEXT_COLUMNS[scene.text] if text != left_out]
    rows = tuple((text, scene.rng.choice(names.LINKED_COLUMNS[column])) for text in texts)
    return Table(scene.other_table_name(), (scene.text, column), ("TEXT", "TEXT"), rows)


def _rows_with_value(scene: Scene, linked: Table) -> tuple[str, str, list[int]]:
    """Return the second table's column, its value for the target, and the numbers of the rows that share it."""
    value_of = _value_of(linked)
    value = value_of[scene.target.text]
    return linked.columns[1], value, [row.number for row in scene.rows if value_of[row.text] == value]


def _value_of(linked: Table) -> dict[str, str]:
    return {str(text): str(value) for text, value in linked.rows}
