"""Proves at the start of a run that new weights reach what engines compute with.

Digests say what an engine holds; it may still compute with something else: a packed copy, or keys and values of earlier
weights from a prefix cache. So the trainer changes some of its weights and publishes them, each engine samples after a
fixed prefix before and after, and the trainer scores what was sampled itself. Then it changes them back, and each
engine must say to the bit what it said before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from realhf.api.calls import PROBE_WEIGHTS, TRIAL_CHANGE, TRIAL_RESTORE, Probe, ProbeRequest
from realhf.dataflow.caller import Caller, ask
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.dataflow.weight_proof import WrongWeights, verdict
from realhf.transport.errors import WorkerDied

ATTEMPTS = 3
"""So often is the test begun while every engine that takes part in it dies."""
_LOOK_S = 0.1
_log = logging.getLogger(__name__)


class SelfTest:
    """Runs once the first version is loaded and nobody plays yet. ``timeout_s`` bounds each answer; ``warn`` is told of
    what the test could not find out."""

    def __init__(
        self, caller: Caller, weights: WeightUpdates, *, timeout_s: float, warn: Callable[[str], None]
    ) -> None:
        self._caller, self._weights, self._timeout_s, self._warn = caller, weights, timeout_s, warn

    async def run(self) -> list[str]:
        """Return the engines that passed. Raises WrongWeights that names an engine and what it does wrong, or
        RpcError."""
        for _ in range(ATTEMPTS):
            await self._somebody()
            if passed := await self._attempt():
                return passed
        raise WrongWeights("no generation worker lived through the self-test of weight updates")

    async def _somebody(self) -> None:
        """Wait until every engine has loaded, or failed to, and there is one."""
        deadline = time.monotonic() + self._timeout_s
        await self._weights.loaded()
        while not self._weights.current and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
            await self._weights.loaded()

    async def _attempt(self) -> list[str]:
        digest = self._weights.digest
        old = await self._probes(last=False)
        await self._weights.trial(TRIAL_CHANGE)
        new = await self._probes(last=False)
        workers = sorted(new)
        answer = await self._weights.trial(TRIAL_RESTORE, [new[worker] for worker in workers])
        if self._weights.digest != digest:
            raise WrongWeights(
                f"the trainer's weights were changed for the self-test of weight updates and are not as before: digest "
                f"{self._weights.digest}, it was {digest}"
            )
        back = await self._probes(last=True)
        scores = dict(zip(workers, zip(answer.changed, answer.restored, strict=True), strict=False))
        tested = [worker for worker in workers if worker in old and worker in back]
        for worker in tested:
            self._judge(worker, old[worker], new[worker], back[worker], scores.get(worker))
        return tested

    async def _probes(self, *, last: bool) -> dict[str, Probe]:
        names = sorted(self._weights.current)
        calls = (
            ask(self._caller, name, PROBE_WEIGHTS, ProbeRequest(last), timeout_s=self._timeout_s) for name in names
        )
        probes: dict[str, Probe] = {}
        for name, found in zip(names, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(found, WorkerDied):
                _log.warning("%s died in the self-test of weight updates: %s", name, found)
            elif isinstance(found, BaseException):
                raise found
            else:
                probes[name] = found
        return probes

    def _judge(
        self, worker: str, old: Probe, new: Probe, back: Probe, scores: tuple[Sequence[float], Sequence[float]] | None
    ) -> None:
        if error := verdict(old, new, back, scores):
            raise WrongWeights(f"{worker} failed the self-test of weight updates: {error}")
        if scores is None:
            self._warn(
                f"the self-test of weight updates could not compare {worker} with the trainer's own forward pass"
            )
        if back != old:
            self._warn(f"{worker} is not exact: the same weights gave {back.logprobs}, before {old.logprobs}")
