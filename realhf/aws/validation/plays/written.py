"""Reads the plays that a person wrote, in ``<tier>.yaml`` beside this module, by the task's number.

    413:
      harmful:
        - name: revokes the live rule
          commands: [...]
          needs: one

Places and captures are as in a task's solution; ``needs`` is as in ``play.Play``, "all" unless said.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, get_args

import yaml

from realhf.aws.tasks.loader import fill
from realhf.aws.tasks.task import Task, TaskError
from realhf.aws.validation.plays.play import KINDS, Needs, Play

_KEYS = frozenset({"name", "commands", "needs"})


def written_plays(task: Task) -> list[Play]:
    """Return the plays written for this task, places filled. Raises TaskError for a malformed entry."""
    found = []
    for kind in KINDS:
        for entry in _entries().get(task.task_id, {}).get(kind, ()):
            needs = entry.get("needs", "all")
            if set(entry) - _KEYS or not entry.get("commands") or needs not in get_args(Needs):
                raise TaskError(f"plays of task {task.task_id}: malformed {kind} play {entry.get('name')!r}")
            commands = tuple(fill(list(entry["commands"]), task.params))
            found.append(Play(kind, entry["name"], commands, needs, written=True))
    return found


def written_ids() -> frozenset[int]:
    """Return the tasks that have an entry."""
    return frozenset(_entries())


@cache
def _entries() -> dict[int, Mapping[str, Any]]:
    entries: dict[int, Mapping[str, Any]] = {}
    for file in sorted(resources.files("realhf.aws.validation.plays").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            for task_id, entry in (yaml.load(file.read_text(), Loader=yaml.CSafeLoader) or {}).items():
                unknown = set(entry) - set(KINDS)
                if unknown or task_id in entries:
                    raise TaskError(f"{file.name}: task {task_id} is there twice or has an unknown class {unknown}")
                entries[task_id] = entry
    return entries
