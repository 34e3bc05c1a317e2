"""The templates that ask for a change: groups ``change``, done by one statement, and ``steps``, done by several."""

from __future__ import annotations

from realhf.environments.sql import names
from realhf.environments.sql.instance import LARGEST, SMALLEST, Instance, Row, Scene, Table, change
from realhf.environments.sql.questions import linked_table


def set_number(scene: Scene) -> Instance:
    """Give a row another number."""
    table, number, row = scene.table, scene.number, scene.target
    value = scene.rng.choice([value for value in range(SMALLEST, LARGEST + 1) if value != row.number])
    return change(
        scene,
        f"Set {number} to {value} in {table} where name='{row.name}'.",
        [f"UPDATE {table} SET {number}={value} WHERE name='{row.name}'"],
        _with_number(scene, row, value),
    )


def delete(scene: Scene) -> Instance:
    """Delete a row."""
    return change(
        scene,
        f"Delete the row in {scene.table} where name='{scene.target.name}'.",
        [f"DELETE FROM {scene.table} WHERE name='{scene.target.name}'"],
        _without(scene, scene.target),
    )


def insert(scene: Scene) -> Instance:
    """Add a row."""
    new = scene.fresh(1)[0]
    values = f"{new.id},'{new.name}','{new.text}',{new.number}"
    return change(
        scene,
        f"Add the row {values} to {scene.table}.",
        [f"INSERT INTO {scene.table} VALUES({values})"],
        (*scene.rows, new),
    )


def raise_numbers(scene: Scene) -> Instance:
    """Add to the numbers of all rows with a given text."""
    table, text, number, value = scene.table, scene.text, scene.number, scene.target.text
    step = scene.rng.randint(2, 9)
    return change(
        scene,
        f"Add {step} to {number} in {table} where {text}='{value}'.",
        [f"UPDATE {table} SET {number}={number}+{step} WHERE {text}='{value}'"],
        scene.changed(lambda row: row._replace(number=row.number + step) if row.text == value else row),
    )


def transfer(scene: Scene) -> Instance:
    """Move a part of a row's number to another row."""
    table, number, giver, taker = scene.table, scene.number, scene.target, scene.other
    moved = scene.rng.randint(2, 9)
    wanted = {giver: giver.number - moved, taker: taker.number + moved}
    return change(
        scene,
        f"Move {moved} of {number} in {table} from name='{giver.name}' to name='{taker.name}'.",
        [
            f"UPDATE {table} SET {number}={number}-{moved} WHERE name='{giver.name}'",
            f"UPDATE {table} SET {number}={number}+{moved} WHERE name='{taker.name}'",
        ],
        scene.changed(lambda row: row._replace(number=wanted.get(row, row.number))),
    )


def copy_number(scene: Scene) -> Instance:
    """Give a row the number of another one."""
    table, number, source, target = scene.table, scene.number, scene.target, scene.other
    return change(
        scene,
        f"Set {number} in {table} where name='{target.name}' to that where name='{source.name}'.",
        [
            f"SELECT {number} FROM {table} WHERE name='{source.name}'",
            f"UPDATE {table} SET {number}={source.number} WHERE name='{target.name}'",
        ],
        _with_number(scene, target, source.number),
    )


def archive(scene: Scene) -> Instance:
    """Move a row to another table."""
    table, target = scene.table, scene.target
    kept = scene.fresh(3)
    before = scene.table_of(scene.other_table_name(), sorted(kept))
    after = scene.table_of(before.name, [*kept, target])
    return change(
        scene,
        f"Move the row where name='{target.name}' from {table} to {before.name}.",
        [
            f"INSERT INTO {before.name} SELECT * FROM {table} WHERE name='{target.name}'",
            f"DELETE FROM {table} WHERE name='{target.name}'",
        ],
        _without(scene, target),
        (before, after),
    )


def rename(scene: Scene) -> Instance:
    """Rename a text in two tables."""
    linked, text, old = linked_table(scene), scene.text, scene.target.text
    linked_texts = {text for text, _ in linked.rows}
    new = next(text for text in names.TEXT_COLUMNS[scene.text] if text not in linked_texts)
    after = Table(
        linked.name,
        linked.columns,
        linked.types,
        tuple((new if text == old else text, value) for text, value in linked.rows),
    )
    return change(
        scene,
        f"Change {text}='{old}' to {text}='{new}' in {scene.table} and {linked.name}.",
        [f"UPDATE {name} SET {text}='{new}' WHERE {text}='{old}'" for name in (scene.table, linked.name)],
        scene.changed(lambda row: row._replace(text=new) if row.text == old else row),
        (linked, after),
    )


def _with_number(scene: Scene, target: Row, number: int) -> tuple[Row, ...]:
    return scene.changed(lambda row: row._replace(number=number) if row == target else row)


def _without(scene: Scene, target: Row) -> tuple[Row, ...]:
    return scene.changed(lambda row: None if row == target else row)
