"""Brings every version of the policy's weights to the generation workers (docs/reference/dataflow.md 9, weight update).

The trainer publishes a version; every generation worker loads it in the background of the next step. Nothing is polled.

A generation worker is *current* once it has the version that admission counts, and stays so, because admission counts
the lowest version of those that are current. Only these are listed for the rollout workers: one that joins, in the
middle of an update perhaps, brings itself up to date first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from realhf.api.calls import PUBLISH_WEIGHTS, UPDATE_WEIGHTS, PublishWeightsRequest, UpdateWeightsRequest
from realhf.api.generation import WeightsManifest
from realhf.dataflow.caller import Caller, ask
from realhf.transport.errors import RemoteError, RpcError
from realhf.transport.weights.deadline import staging_s

_log = logging.getLogger(__name__)


class GenerationCaller(Caller, Protocol):
    """A caller that also decides which workers others may ask; ``RpcMaster`` is one."""

    def list_services(self, worker: str, listed: bool) -> None:
        """Whether the roster shows the addresses of a worker."""
        ...

    def dismiss(self, worker: str, reason: str) -> None:
        """Send a worker away; for everybody it has died."""
        ...


class WeightUpdates:
    """``trainer`` is the model worker that holds ``role``; ``on_version(v)`` is told the lowest version of all current
    generation workers when it grows; ``on_failed(worker, error)`` when one could not load a version that is still the
    newest, or did not answer in time: it samples from weights that the run does not know any more, so it has to be
    replaced. ``timeout_s`` bounds each call, loading by what its bytes take in addition."""

    def __init__(
        self,
        caller: GenerationCaller,
        trainer: str,
        role: str,
        *,
        on_version: Callable[[int], None],
        on_failed: Callable[[str, Exception], None],
        timeout_s: float,
    ) -> None:
        self._caller, self._trainer, self._role = caller, trainer, role
        self._on_version, self._on_failed = on_version, on_failed
        self._timeout_s = timeout_s
        self._versions: dict[str, int] = {}
        self._current: set[str] = set()
        self._told = -1
        self._manifest: WeightsManifest | None = None
        self._loading: dict[str, asyncio.Task[None]] = {}
        self.figures: dict[str, float] = {}

    @property
    def versions(self) -> Mapping[str, int]:
        """Version of every generation worker; -1 while it has none."""
        return self._versions

    @property
    def published(self) -> int:
        """The newest version; -1 before the first."""
        return -1 if self._manifest is None else self._manifest.version

    @property
    def current(self) -> frozenset[str]:
        """The generation workers that are listed."""
        return frozenset(self._current)

    @property
    def busy(self) -> bool:
        """Whether a worker is loading; each load has a deadline."""
        return bool(self._loading)

    async def publish(self, version: int) -> None:
        """Take the trainer's weights as ``version`` and have them loaded; returns before they are. Waits until the
        version before has been loaded by those who are current. Raises RpcError when the trainer cannot publish."""
        await self.settled()
        began = time.perf_counter()
        request = PublishWeightsRequest(self._role, version, receivers=len(self._versions))
        answer = await ask(self._caller, self._trainer, PUBLISH_WEIGHTS, request, timeout_s=self._timeout_s)
        self._manifest = answer.manifest
        self.figures["weight_publish_ms"] = 1000 * (time.perf_counter() - began)
        for worker in list(self._versions):
            self._begin(worker)

    async def settled(self) -> None:
        """Until no current worker is loading, or, where none is current, no worker at all. One that joins holds up
        nobody."""
        while loading := {self._loading[w] for w in self._loading if w in self._current or not self._current}:
            await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)

    def joined(self, worker: str) -> None:
        """A generation worker has registered."""
        self._versions[worker] = -1
        self._caller.list_services(worker, False)
        self._begin(worker)

    def left(self, worker: str) -> None:
        """A generation worker has died."""
        self._versions.pop(worker, None)
        self._current.discard(worker)
        task = self._loading.pop(worker, None)
        if task is not None:
            task.cancel()
        self._tell()

    async def close(self) -> None:
        """Nothing is loaded any more."""
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)

    def _begin(self, worker: str) -> None:
        if self._manifest is None or worker in self._loading:
            return
        task = asyncio.create_task(self._bring_up(worker), name=f"weights for {worker}")
        self._loading[worker] = task
        task.add_done_callback(lambda done: self._over(worker, done))

    def _over(self, worker: str, task: asyncio.Task[None]) -> None:
        if self._loading.get(worker) is not task:
            return  # the worker has left; another may have its name by now
        del self._loading[worker]
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            self._on_failed(worker, error)
        elif error is None and self._behind(worker):
            # The manifest changed after the task ended and before this callback: ``_begin`` still saw a load.
            self._begin(worker)

    def _behind(self, worker: str) -> bool:
        return self._manifest is not None and self._versions[worker] < self._manifest.version

    async def _bring_up(self, worker: str) -> None:
        """Load versions until the worker has the newest, which may change meanwhile."""
        while (manifest := self._manifest) is not None and self._behind(worker):
            timeout_s = self._timeout_s + staging_s(manifest.nbytes)
            try:
                answer = await ask(
                    self._caller, worker, UPDATE_WEIGHTS, UpdateWeightsRequest(manifest), timeout_s=timeout_s
                )
            except RpcError as error:
                if isinstance(error, RemoteError) and manifest is not self._manifest:
                    continue  # it may have been withdrawn: the newest is what counts
                _log.error("%s did not load version %d: %s", worker, manifest.version, error)
                raise
            self._versions[worker] = manifest.version
            self.figures["weight_stage_ms"] = answer.weight_stage_ms
            self.figures["weight_pause_ms"] = answer.weight_pause_ms
            if worker not in self._current and self._versions[worker] >= self._told:
                self._current.add(worker)
                self._caller.list_services(worker, True)
            self._tell()

    def _tell(self) -> None:
        lowest = min((self._versions[worker] for worker in self._current), default=-1)
        if lowest > self._told:
            self._told = lowest
            self._on_version(lowest)
