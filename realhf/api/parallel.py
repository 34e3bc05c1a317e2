"""Defines how several workers of a model role, its *ranks*, compute together, and refuses what
cannot be before any of them starts.

Every rank of a group call gets the whole batch and computes what concerns all of it alike; the
engine divides the sequences and sums gradients and statistics over ranks. No algorithm knows ranks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from realhf.api.config import ConfigError

if TYPE_CHECKING:
    from realhf.api.config import ModelConfig

SINGLE = "torch"
REPLICATED = "ddp"
SHARDED = "fsdp2"
"""Backends of this package: on one worker, with a copy of the model on each, with the model cut
over all."""


class CollectiveBroken(RuntimeError):
    """What several ranks compute together broke off, because another rank failed, left or was too
    slow."""


class HeldInParts(RuntimeError):
    """The weights of a model that is cut over ranks are wanted whole, and were not brought together
    here."""


class Group(Protocol):
    """The ranks of a role as the model host sees them: the attribute ``ranks`` of their engines.
    Outside ``together`` a rank is alone: it computes every sequence of a batch, and waits for
    nobody."""

    @property
    def number(self) -> int:
        """The own rank, also outside ``together``; what one rank does for all, rank 0 does."""
        ...

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Compute with the other ranks meanwhile. Raises CollectiveBroken when they do not come, or
        come for something else than ``what``. An error inside breaks off what the others compute;
        those raise CollectiveBroken."""
        ...

    def abort(self, reason: str) -> None:
        """Break off for good what the ranks compute together. May be called on any thread."""
        ...


@dataclass(frozen=True)
class Parallel:
    """``dp`` copies of a model, each cut over ``fsdp`` workers. Ranks are the role's workers in
    ascending order; rank ``r`` holds part ``r % fsdp`` of copy ``r // fsdp``."""

    dp: int = 1
    fsdp: int = 1

    @property
    def size(self) -> int:
        """How many workers train together."""
        return self.dp * self.fsdp


def parallel_of(role: str, config: ModelConfig) -> Parallel:
    """Return how the workers of ``role`` train together. Raises ConfigError, with the numbers, for
    what cannot be: a backend for one worker on several, or sizes whose product is not the number of
    workers."""
    workers = len(config.workers)
    asked = config.parallel
    backend = config.backend
    if asked.tp > 1:
        raise ConfigError(
            f"{role}.parallel.tp={asked.tp}: no backend cuts layers; set 1, and cut the model with "
            f"fsdp"
        )
    if config.compile and config.lora.rank:
        raise ConfigError(
            f"{role}.compile=true: blocks with adapters are not compiled; set {role}.lora.rank=0, "
            f"or false"
        )
    if config.compile and backend == SHARDED:
        raise ConfigError(
            f"{role}.compile=true: backend {SHARDED} gathers blocks as it goes and does not "
            f"compile them"
        )
    if backend == SINGLE:
        return _single(role, config)
    if backend == REPLICATED and asked.fsdp > 1:
        raise ConfigError(
            f"{role}.parallel.fsdp={asked.fsdp}: backend {REPLICATED} keeps whole copies; set "
            f"{role}.backend={SHARDED}"
        )
    if backend == SHARDED and asked.fsdp == 0:
        dp = asked.dp or 1
        fsdp = max(1, workers // dp)
    else:
        fsdp = asked.fsdp or 1
        dp = asked.dp or max(1, workers // fsdp)
    if dp * fsdp != workers:
        raise ConfigError(
            f"{role}.parallel: dp={dp} times fsdp={fsdp} needs {dp * fsdp} workers, "
            f"{role}.workers={config.workers} "
            f"names {workers}"
        )
    return Parallel(dp, fsdp)


def _single(role: str, config: ModelConfig) -> Parallel:
    asked = config.parallel
    for name, size in (("dp", asked.dp), ("fsdp", asked.fsdp)):
        if size > 1:
            better = REPLICATED if name == "dp" else SHARDED
            raise ConfigError(
                f"{role}.parallel.{name}={size}: backend {SINGLE} trains on one worker; set "
                f"{role}.backend={better}"
            )
    if len(config.workers) > 1:
        raise ConfigError(
            f"{role}.workers={config.workers}: backend {SINGLE} trains on one worker; set "
            f"{role}.backend={REPLICATED} "
            f"(a copy on each) or {SHARDED} (the model cut over all), or name one worker, e.g. "
            f"{role}.workers=[{config.workers[0]}]"
        )
    return Parallel()


def alone(backend: str) -> str:
    """Return the backend for a role that shares its model with ``backend``'s role and trains
    nothing: such a role has a whole model on each of its workers."""
    return SINGLE if backend in (REPLICATED, SHARDED) else backend
