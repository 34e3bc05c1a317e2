"""Holds an environment and plays sessions on it, in the server's process or in one of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from realhf.api.environment import EnvironmentSpec
from realhf.env.server.spec.place import Place
from realhf.env.server.spec.places import Places
from realhf.env.server.spec.player import SpecPlayer
from realhf.env.server.spec.task_choice import TaskChoice


@dataclass(frozen=True)
class Facts:
    """What the server says about an environment: whether it is ``deterministic``, how many instances may live at once,
    how many templates each split has, and the groups of the training split, the easiest first."""

    name: str
    deterministic: bool
    concurrency: int | None
    templates: dict[str, int]
    groups: list[str]


class Host:
    """Makes places and players for at most ``size`` sessions. ``timeout_s`` bounds a call of the environment; ``info``:
    whether observations carry it. Raises ValueError for an environment that has no tasks, or that lives on a service of
    its own."""

    def __init__(self, spec: EnvironmentSpec, size: int, timeout_s: float, *, info: bool) -> None:
        if spec.launch is not None:
            raise ValueError(
                f"the environment {spec.name} is played on a server of its own: python -m {spec.launch.module}"
            )
        self._spec, self._info = spec, info
        self._choice = TaskChoice(spec)
        self.places = Places(spec.name, lambda: spec.make(""), size, timeout_s)
        templates, groups = self._choice.counts(), self._choice.groups()
        self.facts = Facts(spec.name, spec.deterministic, spec.concurrency, templates, groups)

    def player(self, place: Place) -> SpecPlayer:
        """Return what plays the episodes of a session on its place."""
        return SpecPlayer(place, self.places, self._choice, self._spec.system_prompt, info=self._info)

    def stuck(self) -> int:
        """Return how many threads are left behind in the environment's code."""
        found: Any = self.places.metrics()["stuck_threads"]
        return found
