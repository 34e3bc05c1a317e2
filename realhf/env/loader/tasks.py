"""Task sets for environments that define none of their own: one task per row of a data set, or one
per seed."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from realhf.api.environment import HELD_OUT, SPLITS, TRAIN, Task, TaskSet
from realhf.api.option import option
from realhf.base.json_rows import Row, read_row_file
from realhf.base.json_values import format_value, json_problem

ONE_GROUP = "all"
"""Name of the group of tasks that name no group."""
GROUP_COLUMN = "group"
"""Name of the column that holds a row's group, unless the options name another one."""


class RowTaskSet:
    """Finite task set in which each task is a template with one instance. With ``seeded``, each
    seed gives another instance with its own id.

    Raises ValueError if two tasks have the same id.
    """

    def __init__(self, tasks: Iterable[Task], *, seeded: bool = False) -> None:
        self._tasks: dict[str, Task] = {}
        for task in tasks:
            if task.id in self._tasks:
                raise ValueError(f"two tasks have the id {task.id!r}")
            self._tasks[task.id] = task
        self._seeded = seeded
        self.group_of: Mapping[str, str] = MappingProxyType(
            {key: task.group or ONE_GROUP for key, task in self._tasks.items()}
        )
        self.groups: Sequence[str] = tuple(dict.fromkeys(self.group_of.values()))

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the task of a template with this seed. Raises KeyError for an unknown id."""
        task = self._tasks[template_id]
        group = self.group_of[template_id]
        if not self._seeded:
            return (
                task
                if task.group == group and task.seed == seed
                else replace(task, group=group, seed=seed)
            )
        return replace(task, id=f"{template_id}@{seed}", group=group, seed=seed)


class SeedTaskSet:
    """Infinite task set with one template. Each seed is another task, and the two splits have no
    seed in common.

    Raises ValueError for an unknown split.
    """

    def __init__(self, name: str, split: str) -> None:
        self._name, self._split, self._split_index = name, split, SPLITS.index(split)
        self.group_of: Mapping[str, str] = MappingProxyType({name: name})
        self.groups: Sequence[str] = (name,)

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the task of a seed. Raises KeyError for an unknown template."""
        if template_id != self._name:
            raise KeyError(template_id)
        task_seed = len(SPLITS) * seed + self._split_index
        return Task(f"{self._name}@{task_seed}", group=self._name, seed=task_seed)


class GroupedTaskSet:
    """Base class of task sets whose templates have unlimited instances, restricted to the
    ``chosen`` groups.

    Raises ValueError for an unknown group or split.

    Args:
        templates: Group by template.
        groups: All existing groups, easiest first.
        chosen: Groups to draw from.
        split: Name of the split.
        group_word: The word for a group in error messages.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        groups: Sequence[str],
        chosen: Iterable[str],
        split: str,
        group_word: str = "group",
    ) -> None:
        chosen = [*chosen]
        for name, known, kind in (
            *((name, groups, group_word) for name in chosen),
            (split, SPLITS, "split"),
        ):
            if name not in known:
                raise ValueError(f"unknown {kind} {name!r} (known: {', '.join(known)})")
        self.split = split
        self.groups: Sequence[str] = tuple(group for group in groups if group in chosen)
        self.group_of: Mapping[str, str] = {
            name: group for name, group in templates.items() if group in chosen
        }


HELD_OUT_SHARE = 5
"""One in this many strings is held out for evaluation."""


def is_held_out(text: str) -> bool:
    """Return whether a string, such as a name from which tasks are made, is held out for
    evaluation. A stable hash of the string decides."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def tasks_of_rows(rows: Iterable[Row], group_column: str = GROUP_COLUMN) -> list[Task]:
    """Build one task per row.

    The id of a task is the row's ``id`` if it has one, else a hash of the row, so that it does not
    change when rows are added or moved. Every row must have the ``group_column``, except that the
    default column, ``group``, may be missing. Raises ValueError that names the position of the row.
    """
    tasks: dict[str, Task] = {}
    copies: dict[str, int] = {}
    for row in rows:
        group = row.values.get(group_column, ONE_GROUP if group_column == GROUP_COLUMN else None)
        if not isinstance(group, (str, int)):
            raise ValueError(
                f"{row.where}: the column {group_column!r} must name a group, not {format_value(group)}"
            )
        given_id = _read_id(row)
        name = given_id or _digest(row.values)[:16]
        if name in tasks and given_id:
            raise ValueError(f"{row.where}: an earlier row has the id {name!r}, too")
        task_id = name
        while task_id in tasks:
            copies[name] = copies.get(name, 1) + 1
            task_id = f"{name}-{copies[name]}"
        tasks[task_id] = Task(task_id, str(group), row.values)
    return [*tasks.values()]


def _read_id(row: Row) -> str:
    """Return the task id given in a row; "" if there is none.

    Raises ValueError that names the position of the row if the id is neither a string nor an
    integer.
    """
    row_id = row.values.get("id")
    if row_id is None:
        return ""
    if not isinstance(row_id, (str, int)) or isinstance(row_id, bool):
        raise ValueError(
            f"{row.where}: an id must be text or a whole number, not {format_value(row_id)}"
        )
    return str(row_id)


def check_ids(rows: Iterable[Row], places: dict[str, str]) -> None:
    """Raise ValueError that names the positions if two rows, of the same or of different splits,
    have the same id; ``1`` and ``"1"`` are equal.

    ``places`` maps the ids of rows that were checked earlier to their positions; the ids of
    ``rows`` are added to it.
    """
    for row in rows:
        if (name := _read_id(row)) and (earlier := places.setdefault(name, row.where)) != row.where:
            raise ValueError(f"{row.where}: an earlier row has the id {name!r}, too ({earlier})")


def split_rows(
    rows: Sequence[Row], heldout_fraction: float, key: Callable[[Mapping[str, Any]], Any]
) -> dict[str, list[Row]]:
    """Split rows into training and held-out rows by a hash of ``key(row)``.

    Rows with equal keys stay together, and a row keeps its split when others are added. As an
    exception, to keep both splits non-empty, each split gets at least one key if there are two or
    more keys and ``heldout_fraction`` is positive.
    """
    fractions = [_hash_fraction(key(row.values)) for row in rows]
    bound = heldout_fraction
    if heldout_fraction > 0 and len(set(fractions)) > 1:
        ordered = sorted(set(fractions))
        bound = min(max(heldout_fraction, ordered[1]), ordered[-1])
    parts: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for row, fraction in zip(rows, fractions, strict=True):
        parts[HELD_OUT if fraction < bound else TRAIN].append(row)
    return parts


def describe_shared_row(
    train: Sequence[Row], held_out: Sequence[Row], key: Callable[[Mapping[str, Any]], Any]
) -> str:
    """Describe a held-out row whose key is also that of a training row; "" if there is none."""
    positions = {_digest(key(row.values)): row.where for row in train}
    for row in held_out:
        if position := positions.get(_digest(key(row.values))):
            return f"{row.where} is also a training task ({position})"
    return ""


def row_content(values: Mapping[str, Any]) -> Any:
    """Return the content of a row that identifies its task: all columns except its id."""
    return {name: value for name, value in values.items() if name != "id"}


def to_task_set(
    value: Any,
    description: str,
    *,
    seeded: bool,
    check: Callable[[Row], None],
    places: dict[str, str] | None = None,
) -> TaskSet:
    """Convert the result of an author's ``tasks(split)``, which is a ``TaskSet``, tasks or rows, to
    a ``TaskSet``.

    Raises ValueError for other results (the message begins with ``description``), and the errors of
    ``check`` and of ``check_ids`` (called with ``places``) for rows.
    """
    if isinstance(value, TaskSet):
        return value
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(
            f"{description} must return rows, tasks or a TaskSet, not {format_value(value)}"
        )
    items = [*value]
    if items and all(isinstance(item, Task) for item in items):
        return RowTaskSet(items, seeded=seeded)
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(
                f"{description}, row {number}: a row is a map from columns to values, not "
                f"{format_value(item)}"
            )
        if problem := json_problem(item):
            raise ValueError(f"{description}, row {number}: {problem}")
    rows = [Row(item, f"{description}, row {number}") for number, item in enumerate(items)]
    for row in rows:
        check(row)
    check_ids(rows, {} if places is None else places)
    return RowTaskSet(tasks_of_rows(rows), seeded=seeded)


def _digest(value: Any) -> str:
    plain = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(plain.encode()).hexdigest()


def _hash_fraction(value: Any) -> float:
    """Return a number in [0, 1) computed by a stable hash of a value."""
    return int(_digest(value)[:12], 16) / 16**12


@dataclass
class RowOptions:
    """Where the tasks of an environment come from."""

    data: str = option(
        "", "Each row of this JSON lines file, Parquet file or datasets folder is a task."
    )
    heldout_data: str = option(
        "", "The rows of this file are the held-out tasks; without it they are a part of data."
    )
    heldout_fraction: float = option(
        0.1, "This part of data is held out, decided by a hash of the row.", at_least=0, at_most=0.9
    )
    group_column: str = option(
        GROUP_COLUMN, "This column names the group of a task, by which success is reported."
    )


def extract_row_options(environment_options: Any) -> RowOptions:
    """Extract the data set options from the options of an environment. Raises ValueError for an
    option that has no effect in combination with the others."""
    default = RowOptions()
    options = RowOptions(
        **{each.name: getattr(environment_options, each.name) for each in fields(RowOptions)}
    )
    changed = [
        each.name
        for each in fields(RowOptions)
        if getattr(options, each.name) != getattr(default, each.name)
    ]
    if changed and not options.data:
        raise ValueError(f"env.{changed[0]} has no effect without env.data")
    if options.heldout_data and "heldout_fraction" in changed:
        raise ValueError("env.heldout_fraction has no effect with env.heldout_data")
    return options


def load_task_sets(
    options: RowOptions,
    base_folder: Path,
    *,
    seeded: bool,
    check: Callable[[Row], None] = lambda row: None,
    key: Callable[[Mapping[str, Any]], Any] = row_content,
) -> Callable[[str], TaskSet]:
    """Read the files that the options name; return a function split -> task set.

    Raises ValueError that names the file and the line.

    Args:
        options: The files and how to split them.
        base_folder: Folder in which relative paths are searched if the working directory lacks them.
        seeded: Whether instances with different seeds are different tasks.
        check: Raises ValueError for an unusable row.
        key: Returns the content that identifies the task of a row.
    """
    parts = {TRAIN: read_rows(options.data, base_folder), HELD_OUT: []}
    if options.heldout_data:
        parts[HELD_OUT] = read_rows(options.heldout_data, base_folder, "heldout_data")
    for row in [*parts[TRAIN], *parts[HELD_OUT]]:
        check(row)
    check_ids([*parts[TRAIN], *parts[HELD_OUT]], {})
    if not options.heldout_data:
        parts = split_rows(parts[TRAIN], options.heldout_fraction, key)
    elif problem := describe_shared_row(parts[TRAIN], parts[HELD_OUT], key):
        raise ValueError(problem)
    sets = {
        split: RowTaskSet(tasks_of_rows(parts[split], options.group_column), seeded=seeded)
        for split in SPLITS
    }

    def tasks(split: str) -> TaskSet:
        """Return the tasks of a split. Raises ValueError for a split without tasks."""
        if not sets[split].group_of:
            raise ValueError(
                f"{options.data} leaves no task for the split {split!r} with env.heldout_fraction="
                f"{options.heldout_fraction:g}: change it, add rows, or name env.heldout_data"
            )
        return sets[split]

    return tasks


def read_rows(path: str, base_folder: Path, option_name: str = "data") -> list[Row]:
    """Read all rows of a file or folder. A relative path is searched in the working directory, then
    in the folder ``base_folder``.

    Raises ValueError that names the file and the line if data is missing, unreadable, empty or not
    JSON.
    """
    file = Path(path).expanduser()
    if not file.exists() and not file.is_absolute() and (base_folder / file).exists():
        file = base_folder / file
    if not file.exists():
        raise ValueError(f"env.{option_name}={path}: there is no such file")
    rows = [*read_row_file(file)]
    if not rows:
        raise ValueError(f"{file}: has no rows")
    return rows
