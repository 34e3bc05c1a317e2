"""Chooses the demonstrations that a check plays, from those that a launch with the default options
would make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, zip_longest

from realhf.api.config import WarmStartConfig
from realhf.api.environment import Demonstration, DemonstrationRequest

_LAUNCH_SEED = 1
"""The ``seed`` of a launch that names none."""
_MOST_SCRIPTS = 10_000


@dataclass
class Scripts:
    """Holds the demonstrations that are played, and what is known of those that a launch would
    play."""

    played: Sequence[Demonstration] = ()
    """The longest of each kind first, then one of each task and kind, one kind after the other."""
    longest: int = 0
    """Turns of the longest demonstration, among all that were read."""
    read: int = 0
    """How many demonstrations of a launch were read."""
    is_cut: bool = False
    """Whether the launch would have made more than were read."""


def launch_request() -> DemonstrationRequest:
    """Return what a launch with the default options asks the solver of an environment for."""
    options = WarmStartConfig()
    return DemonstrationRequest(
        options.episodes_per_task, _LAUNCH_SEED, options.habit_fraction, options.recovery_fraction
    )


def few_of_each_kind(whole: DemonstrationRequest) -> DemonstrationRequest:
    """Return the smallest request of the same shares that asks for every kind that ``whole`` asks
    for."""
    kinds = {*whole.kinds()}
    smaller = (replace(whole, episodes_per_task=number) for number in count(1))
    return next(request for request in smaller if {*request.kinds()} == kinds)


def choose_scripts(
    demonstrate: Callable[[DemonstrationRequest], Iterable[Demonstration]], seconds: float
) -> Scripts:
    """Choose from what the solver ``demonstrate`` yields; no two have the task and the kind in
    common. Reading what a launch would play ends after ``seconds``. What the solver raises is
    raised."""
    whole = launch_request()
    few: list[Demonstration] = []
    for request in (DemonstrationRequest(1, 0), few_of_each_kind(whole)):
        few += islice(demonstrate(request), _MOST_SCRIPTS)
    scripts = Scripts()
    longest: dict[str, Demonstration] = {}
    late_at = time.monotonic() + seconds
    for script in demonstrate(whole):
        if scripts.read == _MOST_SCRIPTS or time.monotonic() > late_at:
            scripts.is_cut = True
            break
        scripts.read += 1
        _keep_longest(longest, script)
    for script in few:
        _keep_longest(longest, script)
    scripts.longest = max((len(script.turns) for script in longest.values()), default=0)
    scripts.played = _kinds_in_turn([*longest.values(), *few])
    return scripts


def _keep_longest(longest: dict[str, Demonstration], script: Demonstration) -> None:
    known = longest.get(script.kind)
    if known is None or len(script.turns) > len(known.turns):
        longest[script.kind] = script


def _kinds_in_turn(scripts: Iterable[Demonstration]) -> list[Demonstration]:
    """Return the first of each task and kind, one kind after the other, so that the first few have
    all kinds."""
    by_kind: dict[str, dict[str, Demonstration]] = {}
    for script in scripts:
        by_kind.setdefault(script.kind, {}).setdefault(script.task.id, script)
    rounds = zip_longest(*(found.values() for found in by_kind.values()))
    return [script for each in rounds for script in each if script is not None]
