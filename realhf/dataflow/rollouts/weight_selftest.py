"""Proves at the start of a run that new weights reach what engines compute with.

Digests say what an engine holds; it may still compute with something else: a packed copy, or keys and values of earlier
weights from a prefix cache. So the trainer changes some of its weights and publishes them, each engine samples after a
fixed prefix before and after, and the trainer scores what was sampled itself. Then it changes them back, and each
engine must say to the bit what it said before.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean

from realhf.api.calls import PROBE_WEIGHTS, TRIAL_CHANGE, TRIAL_RESTORE, Probe, ProbeRequest
from realhf.dataflow.caller import Caller, ask
from realhf.dataflow.rollouts.weight_proof import WrongWeights
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.transport.errors import WorkerDied

ATTEMPTS = 3
"""So often is the test begun while every engine that takes part in it dies."""
NEAR = 0.2
"""Mean distance of an engine's log-probabilities under the changed weights from the trainer's, as a share of how far
the change moved the trainer's. Rounding in bf16 is a few hundredths; an engine that computes with another matrix is
near 1."""
STIR = 0.01
"""Share of the same within which an engine that is not exact in itself may miss what it said before the change."""
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


def verdict(old: Probe, new: Probe, back: Probe, scores: tuple[Sequence[float], Sequence[float]] | None) -> str:
    """Return what an engine does wrong, or "". ``old``, ``new`` and ``back``: what it sampled under the first weights,
    the changed and the first again; ``scores``: what the trainer says about the tokens of ``new`` under the changed and
    the first weights, None where it cannot."""
    if not all(math.isfinite(value) for probe in (old, new, back) for value in probe.logprobs):
        return f"log-probabilities are not finite: {old.logprobs}, {new.logprobs}, {back.logprobs}"
    if not old.logprobs or not new.logprobs:
        return "it sampled nothing"
    if new == old:
        return (
            "it ignores updates, or answers from a cache: changed weights left the log-probabilities of the probe as "
            f"they were, {old.logprobs}"
        )
    moved = _distance(old, new)
    if scores is not None:
        changed, first = scores
        moved = fmean(abs(a - b) for a, b in zip(changed, first, strict=True))
        missed = fmean(abs(a - b) for a, b in zip(new.logprobs, changed, strict=True))
        if missed > NEAR * moved:
            return (
                f"under the changed weights it computes {new.logprobs}, the trainer {list(changed)} for the same "
                "tokens: a part of its weights, or of its cache, is not of this version"
            )
    if back != old and (back.token_ids != old.token_ids or _distance(old, back) > STIR * moved):
        return (
            f"with the first weights again it computes {back.logprobs}, before {old.logprobs}: it did not take all of "
            "the update, or answers from a cache"
        )
    return ""


def _distance(one: Probe, other: Probe) -> float:
    """Return the mean difference of the log-probabilities of two probes, or infinity where tokens differ."""
    if one.token_ids != other.token_ids:
        return math.inf
    return fmean(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
