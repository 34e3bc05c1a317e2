"""Brings every version of the policy's weights to the generation workers (spec dataflow, section 9, weight update).

The trainer publishes a version; every generation worker loads it in the background of the next step, one version at a
time. A worker that joins late gets the last version first. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from realhf.dataflow.model_function_call import Caller
from realhf.transport.errors import RpcError

_log = logging.getLogger(__name__)


class WeightUpdates:
    """``trainer`` is the model worker that holds ``role``; ``on_version(v)`` is told the lowest version of all
    generation workers when it changes; ``on_failed(worker, error)`` when one could not load a version: it samples from
    weights that the run does not know any more, so it has to be replaced."""

    def __init__(
        self, caller: Caller, trainer: str, role: str, *, on_version: Callable[[int], None],
        on_failed: Callable[[str, Exception], None], timeout_s: float,
    ) -> None:
        self._caller, self._trainer, self._role = caller, trainer, role
        self._on_version, self._on_failed = on_version, on_failed
        self._timeout_s = timeout_s
        self._versions: dict[str, int] = {}
        self._manifest: dict[str, Any] | None = None
        self._loading: dict[str, asyncio.Task[None]] = {}
        self.figures: dict[str, float] = {}

    @property
    def versions(self) -> Mapping[str, int]:
        """Version of every generation worker; -1 while it has none."""
        return self._versions

    async def publish(self, version: int) -> None:
        """Take the trainer's weights as ``version`` and have them loaded; returns before they are. Waits until the
        version before has been loaded. Raises RpcError when the trainer cannot publish."""
        await self.settled()
        began = time.perf_counter()
        payload = {"role": self._role, "version": version, "receivers": len(self._versions)}
        reply = await self._caller.call(self._trainer, "publish_weights", payload, timeout_s=self._timeout_s)
        self._manifest = reply["manifest"]
        self.figures["weight_publish_ms"] = 1000 * (time.perf_counter() - began)
        for worker in self._versions:
            self._begin(worker)

    async def settled(self) -> None:
        """Until no worker is loading."""
        while self._loading:
            await asyncio.gather(*self._loading.values(), return_exceptions=True)

    def joined(self, worker: str) -> None:
        """A generation worker has registered."""
        self._versions[worker] = -1
        if self._manifest is not None:
            self._begin(worker)

    def left(self, worker: str) -> None:
        """A generation worker has died."""
        self._versions.pop(worker, None)
        task = self._loading.pop(worker, None)
        if task is not None:
            task.cancel()
        self._tell()

    def _begin(self, worker: str) -> None:
        task = asyncio.create_task(self._load(worker), name=f"weights for {worker}")
        self._loading[worker] = task
        task.add_done_callback(lambda done: self._over(worker, done))

    def _over(self, worker: str, task: asyncio.Task[None]) -> None:
        if self._loading.get(worker) is task:
            del self._loading[worker]

    async def _load(self, worker: str) -> None:
        manifest = self._manifest
        assert manifest is not None
        try:
            reply = await self._caller.call(worker, "update_weights", {"manifest": manifest}, timeout_s=self._timeout_s)
        except RpcError as error:
            if worker in self._versions:
                _log.error("%s did not load version %d: %s", worker, manifest["version"], error)
                self._on_failed(worker, error)
            return
        if worker in self._versions:
            self._versions[worker] = int(manifest["version"])
            self.figures |= {name: float(reply[name]) for name in ("weight_stage_ms", "weight_pause_ms")}
            self._tell()

    def _tell(self) -> None:
        known = [version for version in self._versions.values() if version >= 0]
        if known:
            self._on_version(min(known))
