"""Checks that something is as it was after set-up: what a task protects, and what else it must leave alone.

In a task: a resource with the ``fields`` (JMESPath, as attribute keys) that must keep their values, none of them for
"it still exists"; or a call, whose answer, or what ``json_path`` finds there, must stay the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from realhf.aws.grading.verifier import CallCheck, ResourceCheck, StateReader, search
from realhf.aws.tasks.task import TaskError


@dataclass(frozen=True)
class UnchangedCheck:
    """Holds while ``paths`` find in ``source`` what they found when the check was ``bound``; until then it holds
    always."""

    source: ResourceCheck | CallCheck
    paths: tuple[str, ...] = ()
    before: str | None = None

    @property
    def service(self) -> str:
        """See ``Check``."""
        return self.source.service

    def bound(self, state: StateReader) -> UnchangedCheck:
        """Return the check that compares with what there is now. Raises TaskError for a resource that does not
        exist."""
        reading = self.reading(state)
        if reading == "[]":
            raise TaskError(f"the task protects {self.source.service} {self.source}, which does not exist")
        return replace(self, before=reading)

    def holds(self, state: StateReader) -> bool:
        """See ``Check``."""
        return self.before is None or self.reading(state) == self.before

    def reading(self, state: StateReader) -> str:
        """Return what is there now, as text."""
        if isinstance(self.source, CallCheck):
            return _text([search(path, self.source.answer(state)) for path in self.paths])
        objects = self.source.objects(state, self.paths)
        return _text(sorted(_text([search(path, found) for path in self.paths]) for found in objects))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
