"""Weight updates of the generation workers, and the self-test at the start that proves that they
arrive.

The trainer publishes a version; every generation worker loads it in the background of the next
step. Nothing is polled.

A generation worker is *current* once it has loaded the version that admission counts. It stays
current, because admission counts the lowest version of the current workers. Only current workers
are listed for the rollout workers. All others are *stale*: a worker that joins, perhaps in the
middle of an update, catches up first; so does a straggler that takes much longer than the others to
load a version, which continue without it until then.

Each worker answers with digests of the tensors it holds. They must equal the digests of the
trainer's tensors; if not, ``on_wrong`` is called, which must end the run.

The load task of a worker
  produces: a worker with the newest version, and calls ``on_version`` when the lowest current
            version grows;
  waits for: the worker's answer to ``update_weights``;
  unblocked by: that answer, the worker's death, or the timeout of the call.
``publish``
  produces: a new manifest, and one load task for each worker;
  waits for: the loads of the previous version by the current workers, then the trainer;
  unblocked by: the end of those loads, or the straggler timer, after which stragglers are no
            longer current.

With ``groups`` versions are sent by broadcast (``group_loads``). A worker that a broadcast does not
reach takes part in another one; after ``GROUP_ATTEMPTS`` of them, or if its engine can take none,
all versions go through the host's memory from then on. A worker that joins after the trainer has
begun to change the version waits for the next one.
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
    UpdateWeightsAnswer,
    UpdateWeightsRequest,
)
from realhf.api.generation import WeightsManifest
from realhf.base import process_clock
from realhf.dataflow.rollouts.group_loads import (
    GROUP_MEDIUM,
    GroupLoadError,
    GroupLoads,
    NoGroup,
    NotOffered,
)
from realhf.dataflow.weight_proof import (
    WeightRecord,
    WrongWeights,
    check_engine_weights,
    find_probe_error,
)
from realhf.dataflow.worker_group import ask
from realhf.transport.errors import RemoteError, RpcError, WorkerDied
from realhf.transport.rpc_master import RpcMaster
from realhf.transport.weights import compute_staging_s

_log = logging.getLogger(__name__)
STRAGGLER_GRACE_S = 10.0
"""Minimum time in seconds that workers get to load a version after the first worker has loaded it.
If the first worker took longer than this, the others get as long as it took. Then workers continue
without those that are still loading."""


GROUP_ATTEMPTS = 3
"""Maximum number of broadcasts of one version to a worker."""


class WeightUpdates:
    """Publisher of the trainer's weights to all generation workers.

    ``trainer`` is the model worker that holds ``role``. ``timeout_s`` bounds each call; a load also
    gets the time that its bytes take. ``record`` logs what was published and what each worker
    holds. ``groups`` sends weights by broadcast (None: they go through the host's memory).
    Callbacks:

    - ``on_version(version)``: the lowest version of all current workers has grown to this;
    - ``on_failed(worker, error)``: a worker could not load a version that is still the newest, or
      did not answer in time. The version it samples from is unknown, so it has to be replaced;
    - ``on_wrong(error)``: a worker holds other weights than those that were sent.
    """

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
        straggler_grace_s: float = STRAGGLER_GRACE_S,
        groups: GroupLoads | None = None,
    ) -> None:
        self._caller = caller
        self._trainer = trainer
        self._role = role
        self._on_version = on_version
        self._on_failed = on_failed
        self._on_wrong = on_wrong
        self._record = record
        self._timeout_s = timeout_s
        self._straggler_grace_s = straggler_grace_s
        self._groups = groups
        self._uses_groups = groups is not None
        self._publishing_again: asyncio.Task[None] | None = None
        self._versions: dict[str, int] = {}
        self._current: set[str] = set()
        self._announced_version = -1
        self._manifest: WeightsManifest | None = None
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._load_started_at = 0.0
        """Event-loop time in seconds at which the loads of the newest version started."""
        self._straggler_timer: asyncio.TimerHandle | None = None
        self._testing = False
        self._stragglers_dropped: asyncio.Future[None] | None = None
        """Resolved when the straggler timer fires, so that ``wait_for_current`` checks again."""
        self.metrics: dict[str, float] = {}
        """Duration in milliseconds of the last publication and the last load, by metric name."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Version that each generation worker has loaded; -1 if none."""
        return self._versions

    @property
    def published_version(self) -> int:
        """Version that was published last; -1 before the first publication."""
        return -1 if self._manifest is None else self._manifest.version

    @property
    def published_digest(self) -> str:
        """Digest of the version that was published last; "" before the first publication."""
        return "" if self._manifest is None else self._manifest.digest

    @property
    def current_workers(self) -> frozenset[str]:
        """Generation workers that are listed for the rollout workers."""
        return frozenset(self._current)

    @property
    def busy(self) -> bool:
        """Whether a worker is loading; each load has a deadline."""
        return bool(self._loading)

    async def publish(self, version: int) -> None:
        """Publish the trainer's weights as ``version`` and start the loads, without waiting for
        them.

        Waits first until the current workers have loaded the previous version. Raises RpcError when
        the trainer cannot publish.
        """
        await self.wait_for_current()
        manifest = (
            await self._request_publish(
                PublishWeightsRequest(self._role, version, broadcast=self._uses_groups)
            )
        ).manifest
        self._start_loads(manifest)

    async def _request_publish(self, request: PublishWeightsRequest) -> PublishWeightsAnswer:
        started_at = time.perf_counter()
        answer = await ask(
            self._caller, self._trainer, PUBLISH_WEIGHTS, request, timeout_s=self._timeout_s
        )
        self.metrics["weight_publish_ms"] = 1000 * (time.perf_counter() - started_at)
        return answer

    def _start_loads(self, manifest: WeightsManifest) -> None:
        self._manifest = manifest
        self._record.record_published(manifest)
        if self._straggler_timer is not None:
            self._straggler_timer.cancel()  # it belongs to the previous version
            self._straggler_timer = None
        self._load_started_at = asyncio.get_running_loop().time()
        for worker in list(self._versions):
            self._start_load(worker)

    async def publish_trial(self, trial: int, probes: Sequence[Probe] = ()) -> PublishWeightsAnswer:
        """Publish the changed or restored weights of a self-test, and wait until every current
        worker has loaded them.

        Workers that die meanwhile are left out. Between ``TRIAL_CHANGE`` and the end of
        ``TRIAL_RESTORE`` no other worker catches up. Raises RpcError, or WrongWeights if a worker
        does not hold the weights that it was sent.
        """
        await self.wait_for_current()
        self._testing = True
        request = PublishWeightsRequest(
            self._role,
            self.published_version,
            trial,
            list(probes),
            broadcast=self._uses_groups,
        )
        answer = await self._request_publish(request)
        workers = sorted(self._current)
        loads = [self._load(worker, answer.manifest) for worker in workers]
        for worker, outcome in zip(
            workers, await asyncio.gather(*loads, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, WorkerDied):
                _log.warning("%s died in the self-test of weight updates: %s", worker, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        if trial == TRIAL_RESTORE:
            self._testing = False
            self._start_loads(answer.manifest)
        return answer

    async def wait_for_current(self) -> None:
        """Wait until no current worker is loading or, if there are no current workers, until no
        worker is.

        A newly joined worker does not delay this.
        """
        while loading := {
            self._loading[w] for w in self._loading if w in self._current or not self._current
        }:
            if self._stragglers_dropped is None or self._stragglers_dropped.done():
                self._stragglers_dropped = asyncio.get_running_loop().create_future()
            await asyncio.wait(
                {*loading, self._stragglers_dropped}, return_when=asyncio.FIRST_COMPLETED
            )

    async def wait_for_all(self) -> None:
        """Wait until no worker is loading; each load has a deadline."""
        while self._loading:
            await asyncio.wait(set(self._loading.values()))
            await asyncio.sleep(0)  # let the done callbacks run

    def worker_joined(self, worker: str) -> None:
        """Start to bring a newly registered generation worker up to date."""
        self._versions[worker] = -1
        self._caller.list_services(worker, False)
        self._start_load(worker)

    def worker_left(self, worker: str) -> None:
        """Forget a generation worker that has died or left."""
        if self._groups is not None:
            self._groups.forget(worker)
        self._versions.pop(worker, None)
        self._current.discard(worker)
        task = self._loading.pop(worker, None)
        if task is not None:
            task.cancel()
        self._announce_version()

    async def close(self) -> None:
        """Cancel all loads."""
        if self._straggler_timer is not None:
            self._straggler_timer.cancel()
        loading = list(self._loading.values())
        if self._publishing_again is not None:
            loading.append(self._publishing_again)
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        if self._groups is not None:
            await self._groups.close()

    def _start_load(self, worker: str) -> None:
        if (
            self._manifest is None
            or worker in self._loading
            or self._testing
            or not self._is_stale(worker)
        ):
            return
        task = asyncio.create_task(self._catch_up(worker), name=f"weights for {worker}")
        self._loading[worker] = task
        task.add_done_callback(lambda done: self._on_load_done(worker, done))

    def _on_load_done(self, worker: str, task: asyncio.Task[None]) -> None:
        if self._loading.get(worker) is not task:
            return  # the worker has left, and a successor may have its name
        del self._loading[worker]
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, WrongWeights):
            self._on_wrong(error)
        elif isinstance(error, GroupLoadError):
            self._on_group_failed(worker, error)
        elif isinstance(error, Exception):
            self._on_failed(worker, error)
        elif error is None and self._is_stale(worker):
            # The manifest changed between the end of the task and this callback, so ``_start_load``
            # still saw a load.
            self._start_load(worker)

    def _on_group_failed(self, worker: str, error: GroupLoadError) -> None:
        """Leave a worker without the newest version, which broadcasts did not bring, until the next
        one is published; publish by another medium if it was not only too late."""
        if self._manifest is not None and self._manifest.medium != GROUP_MEDIUM:
            self._start_load(worker)  # it was published again meanwhile
        elif isinstance(error, NotOffered):
            _log.info("%s waits for the next version of the weights: %s", worker, error)
        elif self._publishing_again is None:
            _log.warning("weights go through the host's memory from now on: %s", error)
            self._uses_groups = False
            self._publishing_again = asyncio.create_task(self._publish_again())

    async def _publish_again(self) -> None:
        """Publish the newest version once more, by the medium that replaces broadcasts."""
        version = self.published_version
        try:
            answer = await self._request_publish(PublishWeightsRequest(self._role, version))
        except RpcError as error:  # the trainer has begun to change it, and the next one follows
            _log.info("version %d is not published again: %s", version, error)
            return
        if version == self.published_version:
            self._start_loads(answer.manifest)

    def _is_stale(self, worker: str) -> bool:
        return self._manifest is not None and self._versions[worker] < self._manifest.version

    async def _catch_up(self, worker: str) -> None:
        """Have a worker load versions until it has the newest one, which may change during a
        load."""
        while (manifest := self._manifest) is not None and self._is_stale(worker):
            try:
                await self._load(worker, manifest)
            except GroupLoadError:
                if manifest is not self._manifest:
                    continue
                raise
            except RpcError as error:
                if isinstance(error, RemoteError) and manifest is not self._manifest:
                    # The old version may have been withdrawn: only a failure of the newest counts.
                    continue
                _log.error("%s did not load version %d: %s", worker, manifest.version, error)
                raise
            self._versions[worker] = manifest.version
            if worker not in self._current and self._versions[worker] >= self._announced_version:
                self._current.add(worker)
                self._caller.list_services(worker, True)
            self._announce_version()
            self._start_straggler_timer()

    async def _load(self, worker: str, manifest: WeightsManifest) -> None:
        """Have a worker load a version. Raises RpcError, or WrongWeights if the worker holds other
        weights afterwards."""
        if manifest.medium == GROUP_MEDIUM:
            answer = await self._load_in_group(worker, manifest)
        else:
            answer = await ask(
                self._caller,
                worker,
                UPDATE_WEIGHTS,
                UpdateWeightsRequest(manifest),
                timeout_s=self._timeout_s + compute_staging_s(manifest.nbytes),
            )
        for name in ("weight_stage_ms", "weight_pause_ms", "weight_digest_ms"):
            self.metrics[name] = getattr(answer, name)
        check_engine_weights(worker, manifest, answer, self._versions.get(worker, -1))
        if manifest.trial != TRIAL_CHANGE:
            self._record.record_loaded(worker, manifest, answer)

    async def _load_in_group(self, worker: str, manifest: WeightsManifest) -> UpdateWeightsAnswer:
        """Have a worker load a version by a broadcast, or by another one if that fails. Raises
        GroupLoadError, and RpcError if the worker itself fails."""
        failed: GroupLoadError | None = None
        for _ in range(GROUP_ATTEMPTS):
            if self._groups is None or not self._uses_groups:
                break
            try:
                return await self._groups.load(worker, manifest)
            except (NoGroup, NotOffered):
                raise
            except GroupLoadError as error:
                failed = error
                _log.warning("%s takes part in another broadcast: %s", worker, error)
        raise failed or GroupLoadError("broadcasts of weights were given up")

    def _start_straggler_timer(self) -> None:
        """Start the time limit for the other workers, once one of them has loaded the newest
        version."""
        if self._straggler_timer is not None or not self._stragglers():
            return
        loop = asyncio.get_running_loop()
        delay_s = max(self._straggler_grace_s, loop.time() - self._load_started_at)
        self._straggler_timer = loop.call_later(delay_s, self._drop_stragglers)

    def _stragglers(self) -> list[str]:
        """Return the current workers without the newest version; [] if no current worker has it."""
        behind = sorted(worker for worker in self._current if self._is_stale(worker))
        return behind if len(behind) < len(self._current) else []

    def _drop_stragglers(self) -> None:
        self._straggler_timer = None
        for worker in self._stragglers():
            _log.warning(
                "%s is stale: others have version %d and continue without it",
                worker,
                self.published_version,
            )
            self._current.discard(worker)
            self._caller.list_services(worker, False)
        if self._stragglers_dropped is not None and not self._stragglers_dropped.done():
            self._stragglers_dropped.set_result(None)
        self._announce_version()

    def _announce_version(self) -> None:
        lowest = min((self._versions[worker] for worker in self._current), default=-1)
        if lowest > self._announced_version:
            self._announced_version = lowest
            self._on_version(lowest)


ATTEMPTS = 3
"""Maximum number of attempts at the self-test. It is repeated if all participating generation
workers die."""
_POLL_S = 0.1


class SelfTest:
    """Self-test of weight updates, run once the first version is loaded and before any rollout
    starts.

    The trainer publishes changed weights, then restores the original ones. Token sequences
    ("probes") are sampled under the original, changed and restored weights: the changed weights
    must give other results, the restored ones the original results, and all must match the
    trainer's forward pass. ``timeout_s`` limits each answer; ``warn(text)`` reports what could not
    be tested.
    """

    def __init__(
        self,
        caller: RpcMaster,
        weights: WeightUpdates,
        *,
        timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self._caller = caller
        self._weights = weights
        self._timeout_s = timeout_s
        self._warn = warn

    async def run(self) -> list[str]:
        """Run the test and return the generation workers that passed.

        Raises WrongWeights, naming a worker and its error, or RpcError.
        """
        for _ in range(ATTEMPTS):
            await self._wait_for_engine()
            if passed := await self._attempt():
                return passed
        raise WrongWeights("no generation worker lived through the self-test of weight updates")

    async def _wait_for_engine(self) -> None:
        """Wait until every worker has loaded or failed to load, and at least one is current; at
        most ``timeout_s``."""
        deadline = process_clock.now() + self._timeout_s
        await self._weights.wait_for_all()
        while not self._weights.current_workers and process_clock.now() < deadline:
            await asyncio.sleep(_POLL_S)
            await self._weights.wait_for_all()

    async def _attempt(self) -> list[str]:
        digest = self._weights.published_digest
        before = await self._sample_probes(last=False)
        await self._weights.publish_trial(TRIAL_CHANGE)
        changed = await self._sample_probes(last=False)
        workers = sorted(changed)
        answer = await self._weights.publish_trial(
            TRIAL_RESTORE, [changed[worker] for worker in workers]
        )
        if self._weights.published_digest != digest:
            raise WrongWeights(
                f"the trainer's weights were changed for the self-test of weight updates and are "
                f"not as before: digest "
                f"{self._weights.published_digest}, it was {digest}"
            )
        restored = await self._sample_probes(last=True)
        scores = dict(zip(workers, zip(answer.changed, answer.restored, strict=True), strict=False))
        tested = [worker for worker in workers if worker in before and worker in restored]
        for worker in tested:
            self._check(
                worker, before[worker], changed[worker], restored[worker], scores.get(worker)
            )
        return tested

    async def _sample_probes(self, *, last: bool) -> dict[str, Probe]:
        names = sorted(self._weights.current_workers)
        calls = (
            ask(self._caller, name, PROBE_WEIGHTS, ProbeRequest(last), timeout_s=self._timeout_s)
            for name in names
        )
        probes: dict[str, Probe] = {}
        for name, outcome in zip(
            names, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, WorkerDied):
                _log.warning("%s died in the self-test of weight updates: %s", name, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                probes[name] = outcome
        return probes

    def _check(
        self,
        worker: str,
        before: Probe,
        changed: Probe,
        restored: Probe,
        scores: tuple[Sequence[float], Sequence[float]] | None,
    ) -> None:
        if error := find_probe_error(before, changed, restored, scores):
            raise WrongWeights(f"{worker} failed the self-test of weight updates: {error}")
        if scores is None:
            self._warn(
                f"the self-test of weight updates could not compare {worker} with the trainer's "
                f"own forward pass"
            )
        if restored != before:
            self._warn(
                f"{worker} is not exact: the same weights gave {restored.logprobs}, before "
                f"{before.logprobs}"
            )
