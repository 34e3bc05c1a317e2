"""Brings every version of the policy's weights to the generation workers, and proves at the start that it arrives.

The trainer publishes a version; every generation worker loads it in the background of the next step. Nothing is polled.

A generation worker is *current* once it has the version that admission counts, and stays so, because admission counts
the lowest version of those that are current. Only these are listed for the rollout workers. All others are *stale*: one
that joins, in the middle of an update perhaps, brings itself up to date first; so does one that takes much longer for a
version than another, which goes on without it meanwhile.

Each engine answers with digests of what it holds. They must be those of the trainer's tensors; else ``on_wrong`` is
told, which must end the run.

Digests say what an engine holds; it may still compute with something else: a packed copy, or keys and values of earlier
weights from a prefix cache. So the trainer changes some of its weights and publishes them, each engine samples after a
fixed prefix before and after, and the trainer scores what was sampled itself. Then it changes them back, and each
engine must say to the bit what it said before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from realhf.api.calls import (
    PROBE_WEIGHTS,
    PUBLISH_WEIGHTS,
    TRIAL_CHANGE,
    TRIAL_RESTORE,
    UPDATE_WEIGHTS,
    Probe,
    ProbeRequest,
    PublishWeightsAnswer,
    PublishWeightsRequest,
    UpdateWeightsRequest,
)
from realhf.api.generation import WeightsManifest
from realhf.base import process_clock
from realhf.dataflow.weight_proof import WeightRecord, WrongWeights, check_held, verdict
from realhf.dataflow.worker_group import ask
from realhf.transport.errors import RemoteError, RpcError, WorkerDied
from realhf.transport.rpc_master import RpcMaster
from realhf.transport.weights import staging_s

_log = logging.getLogger(__name__)


LAG_S = 10.0
"""Seconds that a worker may take longer than the first one, or as long again as that took, before others go on without
it."""


class WeightUpdates:
    """``trainer`` is the model worker that holds ``role``; ``on_version(v)`` is told the lowest version of all current
    generation workers when it grows; ``on_failed(worker, error)`` when one could not load a version that is still the
    newest, or did not answer in time: it samples from weights that the run does not know any more, so it has to be
    replaced; ``on_wrong(error)`` when one holds other weights than it was given. ``record`` keeps what was published
    and held. ``timeout_s`` bounds each call, loading by what its bytes take in addition."""

    def __init__(
        self,
        caller: RpcMaster,
        trainer: str,
        role: str,
        *,
        on_version: Callable[[int], None],
        on_failed: Callable[[str, Exception], None],
        on_wrong: Callable[[WrongWeights], None],
        record: WeightRecord,
        timeout_s: float,
        lag_s: float = LAG_S,
    ) -> None:
        self._caller, self._trainer, self._role = caller, trainer, role
        self._on_version, self._on_failed, self._on_wrong = on_version, on_failed, on_wrong
        self._record, self._timeout_s, self._lag_s = record, timeout_s, lag_s
        self._versions: dict[str, int] = {}
        self._current: set[str] = set()
        self._told = -1
        self._manifest: WeightsManifest | None = None
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._began = 0.0
        self._lag: asyncio.TimerHandle | None = None
        self._testing = False
        self._fewer: asyncio.Future[None] | None = None
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
    def digest(self) -> str:
        """The digest of the newest version; "" before the first."""
        return "" if self._manifest is None else self._manifest.digest

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
        manifest = (await self._published(PublishWeightsRequest(self._role, version))).manifest
        self._take(manifest)

    async def _published(self, request: PublishWeightsRequest) -> PublishWeightsAnswer:
        began = time.perf_counter()
        answer = await ask(self._caller, self._trainer, PUBLISH_WEIGHTS, request, timeout_s=self._timeout_s)
        self.figures["weight_publish_ms"] = 1000 * (time.perf_counter() - began)
        return answer

    def _take(self, manifest: WeightsManifest) -> None:
        self._manifest = manifest
        self._record.published(manifest)
        if self._lag is not None:
            self._lag.cancel()  # it was about the version before
            self._lag = None
        self._began = asyncio.get_running_loop().time()
        for worker in list(self._versions):
            self._begin(worker)

    async def trial(self, trial: int, probes: Sequence[Probe] = ()) -> PublishWeightsAnswer:
        """Publish the weights of a self-test, changed or restored, and have every current worker load them; those that
        die meanwhile are left out. Nobody else is brought up to date between the change and the end of the restoration.
        Raises RpcError, or WrongWeights where one does not hold what it was given."""
        await self.settled()
        self._testing = True
        request = PublishWeightsRequest(self._role, self.published, trial, list(probes))
        answer = await self._published(request)
        workers = sorted(self._current)
        loads = [self._load(worker, answer.manifest) for worker in workers]
        for worker, found in zip(workers, await asyncio.gather(*loads, return_exceptions=True), strict=True):
            if isinstance(found, WorkerDied):
                _log.warning("%s died in the self-test of weight updates: %s", worker, found)
            elif isinstance(found, BaseException):
                raise found
        if trial == TRIAL_RESTORE:
            self._testing = False
            self._take(answer.manifest)
        return answer

    async def settled(self) -> None:
        """Until no current worker is loading, or, where none is current, no worker at all. One that joins holds up
        nobody."""
        while loading := {self._loading[w] for w in self._loading if w in self._current or not self._current}:
            if self._fewer is None or self._fewer.done():
                self._fewer = asyncio.get_running_loop().create_future()
            await asyncio.wait({*loading, self._fewer}, return_when=asyncio.FIRST_COMPLETED)

    async def loaded(self) -> None:
        """Until no worker at all is loading; each load has a deadline."""
        while self._loading:
            await asyncio.wait(set(self._loading.values()))
            await asyncio.sleep(0)  # what follows from it has been done

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
        if self._lag is not None:
            self._lag.cancel()
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)

    def _begin(self, worker: str) -> None:
        if self._manifest is None or worker in self._loading or self._testing or not self._behind(worker):
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
        if isinstance(error, WrongWeights):
            self._on_wrong(error)
        elif isinstance(error, Exception):
            self._on_failed(worker, error)
        elif error is None and self._behind(worker):
            # The manifest changed after the task ended and before this callback: ``_begin`` still saw a load.
            self._begin(worker)

    def _behind(self, worker: str) -> bool:
        return self._manifest is not None and self._versions[worker] < self._manifest.version

    async def _bring_up(self, worker: str) -> None:
        """Load versions until the worker has the newest, which may change meanwhile."""
        while (manifest := self._manifest) is not None and self._behind(worker):
            try:
                await self._load(worker, manifest)
            except RpcError as error:
                if isinstance(error, RemoteError) and manifest is not self._manifest:
                    continue  # it may have been withdrawn: the newest is what counts
                _log.error("%s did not load version %d: %s", worker, manifest.version, error)
                raise
            self._versions[worker] = manifest.version
            if worker not in self._current and self._versions[worker] >= self._told:
                self._current.add(worker)
                self._caller.list_services(worker, True)
            self._tell()
            self._watch_lag()

    async def _load(self, worker: str, manifest: WeightsManifest) -> None:
        """Have a worker load a version. Raises RpcError, or WrongWeights where it holds others afterwards."""
        timeout_s = self._timeout_s + staging_s(manifest.nbytes)
        answer = await ask(self._caller, worker, UPDATE_WEIGHTS, UpdateWeightsRequest(manifest), timeout_s=timeout_s)
        for name in ("weight_stage_ms", "weight_pause_ms", "weight_digest_ms"):
            self.figures[name] = getattr(answer, name)
        check_held(worker, manifest, answer, self._versions.get(worker, -1))
        if manifest.trial != TRIAL_CHANGE:
            self._record.held(worker, manifest, answer)

    def _watch_lag(self) -> None:
        """Give the others some time once one has the newest version."""
        if self._lag is not None or not self._laggards():
            return
        loop = asyncio.get_running_loop()
        self._lag = loop.call_later(max(self._lag_s, loop.time() - self._began), self._leave_behind)

    def _laggards(self) -> list[str]:
        """Return the current workers that are behind; none where all are."""
        behind = sorted(worker for worker in self._current if self._behind(worker))
        return behind if len(behind) < len(self._current) else []

    def _leave_behind(self) -> None:
        self._lag = None
        for worker in self._laggards():
            _log.warning("%s is stale: others have version %d, and go on without it", worker, self.published)
            self._current.discard(worker)
            self._caller.list_services(worker, False)
        if self._fewer is not None and not self._fewer.done():
            self._fewer.set_result(None)
        self._tell()

    def _tell(self) -> None:
        lowest = min((self._versions[worker] for worker in self._current), default=-1)
        if lowest > self._told:
            self._told = lowest
            self._on_version(lowest)


ATTEMPTS = 3
"""So often is the test begun while every engine that takes part in it dies."""
_LOOK_S = 0.1


class SelfTest:
    """Runs once the first version is loaded and nobody plays yet. ``timeout_s`` bounds each answer; ``warn`` is told of
    what the test could not find out."""

    def __init__(
        self, caller: RpcMaster, weights: WeightUpdates, *, timeout_s: float, warn: Callable[[str], None]
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
        deadline = process_clock.now() + self._timeout_s
        await self._weights.loaded()
        while not self._weights.current and process_clock.now() < deadline:
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
