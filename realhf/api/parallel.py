"""Parallel training by several workers of a model role, which are called its *ranks*, and
validation of the options for it before any worker starts.

Every rank of a group call gets the whole batch and computes batch-wide quantities identically; the
engine divides the sequences and sums gradients and statistics over ranks. Algorithms do not depend
on ranks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from realhf.api.config import ConfigError

if TYPE_CHECKING:
    from realhf.api.config import ModelConfig

SINGLE = "torch"
"""Backend for one worker."""
REPLICATED = "ddp"
"""Backend with a copy of the model on each worker (data parallel)."""
SHARDED = "fsdp2"
"""Backend with the model sharded over all workers (FSDP2)."""


class CollectiveBroken(RuntimeError):
    """Raised when a joint computation of several ranks was aborted because another rank failed,
    left or was too slow."""


class WeightsNotGathered(RuntimeError):
    """Raised when the full weights of a sharded model are needed but were not gathered on this
    rank."""


class Group(Protocol):
    """Group of the ranks of a role, which the model host controls through the attribute ``ranks``
    of an engine.

    Outside of ``together`` each rank works alone: it computes every sequence of a batch and does
    not wait for other ranks.
    """

    @property
    def number(self) -> int:
        """This process's rank, valid outside ``together``, too. Rank 0 does what must be done only
        once."""
        ...

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Context manager within which this rank computes together with the other ranks.

        Raises CollectiveBroken if the other ranks do not join, or if they join with another value
        of ``what``. An error in the block aborts the computation of the other ranks, which then
        raise CollectiveBroken.
        """
        ...

    def abort(self, reason: str) -> None:
        """Abort the joint computation of the ranks permanently. Thread-safe."""
        ...


@dataclass(frozen=True)
class Parallel:
    """Sizes of a parallel layout with ``dp`` copies of a model, each sharded over ``fsdp`` workers.

    Ranks are the role's workers in ascending order; rank ``r`` holds part ``r % fsdp`` of copy ``r
    // fsdp``.
    """

    dp: int = 1
    """Data-parallel size."""
    fsdp: int = 1
    """Number of shards of each copy."""

    @property
    def size(self) -> int:
        """Number of workers that train together."""
        return self.dp * self.fsdp


def resolve_parallel(role: str, config: ModelConfig) -> Parallel:
    """Return the parallel layout of the workers of ``role``.

    Raises ConfigError for invalid options, such as several workers with a single-worker backend, or
    sizes whose product is not the number of workers.
    """
    workers = len(config.workers)
    sizes = config.parallel
    backend = config.backend
    if sizes.tp > 1:
        raise ConfigError(
            f"{role}.parallel.tp={sizes.tp}: no backend cuts layers; set 1, and cut the model with "
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
        return _single_worker_sizes(role, config)
    if backend == REPLICATED and sizes.fsdp > 1:
        raise ConfigError(
            f"{role}.parallel.fsdp={sizes.fsdp}: backend {REPLICATED} keeps whole copies; set "
            f"{role}.backend={SHARDED}"
        )
    if backend == SHARDED and sizes.fsdp == 0:
        dp = sizes.dp or 1
        fsdp = max(1, workers // dp)
    else:
        fsdp = sizes.fsdp or 1
        dp = sizes.dp or max(1, workers // fsdp)
    if dp * fsdp != workers:
        raise ConfigError(
            f"{role}.parallel: dp={dp} times fsdp={fsdp} needs {dp * fsdp} workers, "
            f"{role}.workers={config.workers} "
            f"names {workers}"
        )
    return Parallel(dp, fsdp)


def _single_worker_sizes(role: str, config: ModelConfig) -> Parallel:
    """Return the layout for a single-worker backend. Raises ConfigError for options that need
    several workers."""
    sizes = config.parallel
    for name, size in (("dp", sizes.dp), ("fsdp", sizes.fsdp)):
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


def untrained_backend(backend: str) -> str:
    """Return the backend for an untrained role that shares its model with a role that uses
    ``backend``.

    An untrained role has a complete model on each of its workers.
    """
    return SINGLE if backend in (REPLICATED, SHARDED) else backend
