"""Data source of a mixture of environments: which environment each group plays, and a curriculum of
its own for each of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from realhf.api.environment import TRAIN
from realhf.api.source import SampleResult, SourceItem
from realhf.env.curriculum import CurriculumSource
from realhf.env.loader.load import build_environment
from realhf.env.loader.mixture import MixtureTasks

_UNIT = 10**9
"""Number of parts into which shares are divided."""


class SharePlan:
    """Order in which the groups of a run play the environments of a mixture.

    After any number of groups, the number of each environment differs from its share by less than
    one group: the next group goes to an environment that has not reached its share yet, to the one
    that would fall a whole group behind first (Tijdeman 1980, "The chairman assignment problem").
    The order depends on shares, seed and the number of groups so far, but not on how many groups
    are planned at once.

    Args:
        shares: Share of each environment by name; the sum is 1.
        seed: Seed that decides which of several equal environments comes first.
    """

    def __init__(self, shares: Mapping[str, float], seed: int) -> None:
        # Whole numbers, so that equal shares stay equal however many groups a run has.
        self._weights = {name: max(1, round(share * _UNIT)) for name, share in shares.items()}
        self._total = sum(self._weights.values())
        names = random.Random(f"mixture:{seed}").sample(sorted(shares), len(shares))
        self._rank = {name: rank for rank, name in enumerate(names)}
        self.planned: Counter[str] = Counter(dict.fromkeys(shares, 0))
        """Number of groups planned so far, by environment."""

    def plan(self, count: int) -> list[str]:
        """Return the environments of the next ``count`` groups."""
        names = []
        for _ in range(count):
            names.append(self._next())
            self.planned[names[-1]] += 1
        return names

    def _next(self) -> str:
        number = self.planned.total() + 1
        behind = [
            name
            for name, weight in self._weights.items()
            if self.planned[name] * self._total < weight * number
        ]
        return min(
            behind,
            key=lambda n: (Fraction(self.planned[n] + 1, self._weights[n]), self._rank[n]),
        )


class MixtureSource:
    """Infinite data source of the training tasks of a mixture. Each environment has its share of
    the groups (``SharePlan``) and its own curriculum.

    Items are those of ``CurriculumSource``; their metadata names the environment.

    Args:
        seed: Seed of the order of environments and of each curriculum.
        environment: The mixture, as ``load_definition`` takes it.
        options: Options of the mixture as plain values.
        strategy, curriculum: See ``CurriculumSource``.
    """

    def __init__(
        self,
        seed: int,
        environment: str,
        options: Mapping[str, Any],
        strategy: str = "learnability",
        **curriculum: Any,
    ) -> None:
        spec = build_environment(environment, options)
        tasks = spec.tasks(TRAIN)
        assert isinstance(tasks, MixtureTasks)
        self._plan = SharePlan({name: part.share for name, part in spec.parts.items()}, seed)
        self._sources = {
            name: CurriculumSource(seed, own, strategy, **curriculum)
            for name, own in tasks.parts.items()
        }

    def next_batch(self, n: int) -> list[SourceItem]:
        """Draw exactly ``n`` tasks, in the planned order of their environments."""
        names = self._plan.plan(n)
        counts = Counter(names)
        drawn = {
            name: iter(self._sources[name].next_batch(counts[name]))
            for name in self._sources
            if counts[name]
        }
        return [next(drawn[name]) for name in names]

    def record(self, results: Sequence[SampleResult]) -> None:
        """Report results to the curricula of their environments."""
        for name, source in self._sources.items():
            source.record([each for each in results if each.metadata["environment"] == name])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of planned groups and the state of each curriculum."""
        return {
            "planned": dict(self._plan.planned),
            "sources": {name: source.state_dict() for name, source in self._sources.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from ``state_dict``. Raises ValueError for the state of another
        mixture."""
        if {*state["sources"]} != {*self._sources}:
            raise ValueError(
                f"the saved state is that of a mixture of {', '.join(state['sources'])}, not of "
                f"{', '.join(self._sources)}"
            )
        self._plan.planned = Counter(state["planned"])
        for name, source in self._sources.items():
            source.load_state_dict(state["sources"][name])

    def stats(self) -> dict[str, float]:
        """Return ``share/<environment>``, its fraction of all groups so far, and each curriculum's
        metrics as ``<name>/<environment>``; success by group already names the environment."""
        total = self._plan.planned.total()
        stats = {
            f"share/{name}": count / total if total else 0.0
            for name, count in self._plan.planned.items()
        }
        for name, source in self._sources.items():
            stats |= {
                key if "/" in key else f"{key}/{name}": value
                for key, value in source.stats().items()
            }
        return stats
