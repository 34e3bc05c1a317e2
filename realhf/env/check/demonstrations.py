"""Selection of the demonstrations that a check plays, from those that a launch with default options
would play."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, zip_longest

from realhf.api.config import WarmStartConfig
from realhf.api.environment import Demonstration, DemonstrationRequest

_LAUNCH_SEED = 1
"""``seed`` of a launch that sets none."""
_MAX_SCRIPTS = 10_000
"""Maximum number of demonstrations read from a solver."""


@dataclass
class DemonstrationChoice:
    """Demonstrations to play, and statistics of the demonstrations that a launch would play."""

    played: Sequence[Demonstration] = ()
    """First the longest demonstration of each kind, then one of each task and kind, with the kinds
    alternating."""
    longest: int = 0
    """Number of turns of the longest demonstration that was read."""
    read_count: int = 0
    """Number of demonstrations of a launch that were read."""
    is_cut_short: bool = False
    """Whether reading stopped before the last demonstration of the launch."""


def launch_request() -> DemonstrationRequest:
    """Return the request that a launch with default options sends to an environment's solver."""
    options = WarmStartConfig()
    return DemonstrationRequest(
        options.episodes_per_task, _LAUNCH_SEED, options.habit_fraction, options.recovery_fraction
    )


def smallest_request(launch: DemonstrationRequest) -> DemonstrationRequest:
    """Return the smallest request that still contains every kind of demonstration of ``launch`` in
    the same proportions."""
    kinds = {*launch.kinds()}
    smaller = (replace(launch, episodes_per_task=number) for number in count(1))
    return next(request for request in smaller if {*request.kinds()} == kinds)


def choose_demonstrations(
    demonstrate: Callable[[DemonstrationRequest], Iterable[Demonstration]], limit_s: float
) -> DemonstrationChoice:
    """Choose from the demonstrations that the solver ``demonstrate`` yields, at most one per task
    and kind.

    Reading a launch's demonstrations stops after ``limit_s`` seconds. Errors of the solver are
    passed on.
    """
    launch = launch_request()
    fallback: list[Demonstration] = []
    for request in (DemonstrationRequest(1, 0), smallest_request(launch)):
        fallback += islice(demonstrate(request), _MAX_SCRIPTS)
    choice = DemonstrationChoice()
    longest: dict[str, Demonstration] = {}
    deadline = time.monotonic() + limit_s
    for script in demonstrate(launch):
        if choice.read_count == _MAX_SCRIPTS or time.monotonic() > deadline:
            choice.is_cut_short = True
            break
        choice.read_count += 1
        _keep_longest_of_kind(longest, script)
    for script in fallback:
        _keep_longest_of_kind(longest, script)
    choice.longest = max((len(script.turns) for script in longest.values()), default=0)
    choice.played = _kinds_in_turn([*longest.values(), *fallback])
    return choice


def _keep_longest_of_kind(longest: dict[str, Demonstration], script: Demonstration) -> None:
    earlier = longest.get(script.kind)
    if earlier is None or len(script.turns) > len(earlier.turns):
        longest[script.kind] = script


def _kinds_in_turn(scripts: Iterable[Demonstration]) -> list[Demonstration]:
    """Return the first demonstration of each task and kind, with the kinds alternating, so that the
    first few cover all kinds."""
    by_kind: dict[str, dict[str, Demonstration]] = {}
    for script in scripts:
        by_kind.setdefault(script.kind, {}).setdefault(script.task.id, script)
    rounds = zip_longest(*(by_task.values() for by_task in by_kind.values()))
    return [script for each in rounds for script in each if script is not None]
