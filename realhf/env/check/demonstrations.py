"""Choice of the demonstrations that a check plays, from those of a launch with the default
options."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, zip_longest

from realhf.api.config import WarmStartConfig
from realhf.api.environment import Demonstration, DemonstrationRequest

_LAUNCH_SEED = 1
"""``seed`` of a launch that sets none."""
_MOST_SCRIPTS = 10_000
"""Maximum number of demonstrations read from a solver."""


@dataclass
class Scripts:
    """The demonstrations to play, and statistics of those that a launch would play."""

    played: Sequence[Demonstration] = ()
    """The longest of each kind first, then one of each task and kind, in alternating kinds."""
    longest: int = 0
    """Number of turns of the longest demonstration read."""
    read: int = 0
    """Number of demonstrations of a launch that were read."""
    is_cut: bool = False
    """Whether reading stopped before the last demonstration of the launch."""


def launch_request() -> DemonstrationRequest:
    """Return the request that a launch with the default options sends to the solver of an
    environment."""
    options = WarmStartConfig()
    return DemonstrationRequest(
        options.episodes_per_task, _LAUNCH_SEED, options.habit_fraction, options.recovery_fraction
    )


def few_of_each_kind(whole: DemonstrationRequest) -> DemonstrationRequest:
    """Return the smallest request with the same shares that contains every kind of ``whole``."""
    kinds = {*whole.kinds()}
    smaller = (replace(whole, episodes_per_task=number) for number in count(1))
    return next(request for request in smaller if {*request.kinds()} == kinds)


def choose_scripts(
    demonstrate: Callable[[DemonstrationRequest], Iterable[Demonstration]], seconds: float
) -> Scripts:
    """Choose from the demonstrations that the solver ``demonstrate`` yields, at most one per task
    and kind.

    Reading the demonstrations of a launch stops after ``seconds``. Errors of the solver are passed
    on.
    """
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
    """Return the first demonstration of each task and kind in alternating kinds, so that the first
    few cover all kinds."""
    by_kind: dict[str, dict[str, Demonstration]] = {}
    for script in scripts:
        by_kind.setdefault(script.kind, {}).setdefault(script.task.id, script)
    rounds = zip_longest(*(found.values() for found in by_kind.values()))
    return [script for each in rounds for script in each if script is not None]
