"""Request scheduler: runs each model's requests in ``seq_id`` order on the compute process and
persists the results.

Each request has a future, named after its target and sequence number, so a request that is sent
twice gets the same future and runs once. Requests of one model may arrive out of order (the client
sends the parts of a batch concurrently); they start in the order of their sequence numbers.

If the compute process crashes, the requests that it had not answered run again in a new one. If
this process crashes, ``open`` finds the pending requests after its restart. Either way a lost model
is rebuilt from its last saved state by replaying the requests after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from realhf.base import process_clock
from realhf.tinker.channel import (
    Began,
    Cancel,
    ComputeProcess,
    ComputeReply,
    Create,
    Done,
    Drop,
    Forward,
    Job,
    Load,
    Ready,
    Sample,
    Save,
    Spoil,
    Unload,
    Update,
    Work,
)
from realhf.tinker.checkpoints import ServerCheckpoints, safe_name
from realhf.tinker.options import ServerOptions
from realhf.tinker.store import (
    CHANGING,
    FAILED,
    WAITING,
    CheckpointRow,
    ModelRow,
    RequestRow,
    TrainingStore,
)
from realhf.web.refusal import Refusal

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0
"""Maximum seconds for the compute process to load the base model."""
MAX_CRASHES = 3
"""Maximum number of crashes of the compute process within ``CRASH_WINDOW_S``; after one more, the
server stops."""
CRASH_WINDOW_S = 600.0
"""Length in seconds of the window in which crashes are counted."""
MAX_TRIES = 2
"""Number of crashes of the compute process while running a request after which the request
fails."""
FETCHED_RESULT_TTL_S = 900.0
"""Seconds that a result is kept after the client has fetched it."""
UNUSED_TTL_S = 7 * 86400.0
"""Seconds that results that were not fetched, and models without requests, are kept."""
CLEAN_INTERVAL_S = 60.0
"""Seconds between two clean-ups."""
TOTAL_QUOTA_FACTOR = 4
"""Limit of the pending bytes of all API keys together, as a multiple of one key's quota. Without a
file of keys the server accepts any key, so a client could otherwise get any number of quotas."""
CHECKPOINT_KINDS = (
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
)
"""Kinds of requests that contain the path of a checkpoint."""
_FULL_WEIGHTS_PREFIX = "whole:"
"""Prefix of the stored digest of the base model if the server trains all weights."""
NEVER_CAME = "an earlier request never arrived"
"""Error text of a request that waited for one with a lower sequence number."""
REFUSED = "refused"
"""Kind recorded for a refused request of which only the sequence number is known."""
MAX_SEQ_AHEAD = 1 << 16
"""Maximum distance of a refused request's sequence number from the first missing one. A number
further ahead is ignored: no real client counts that far, and each stored number takes memory."""
GAP_TIMEOUT_CLEANS = 10
"""Number of successive clean-ups after which the server stops waiting for a missing request.
Clean-ups are counted instead of seconds so that time during which this process was stopped does not
count."""


@dataclass
class _RunningJob:
    """A job that was sent to the compute process and has not been answered yet."""

    work: Work
    """The work."""
    body: bytes
    """Body of the job."""
    model: str
    """Id of the job's model; "" for sampling."""
    request: RequestRow | None
    """The request that the job runs; None for a job that only helps to rebuild a model."""
    redo: bool = False
    """Whether the job replays a request that has already ended."""
    began: bool = False
    """Whether the compute process has started the job."""


@dataclass(frozen=True)
class _QueueState:
    """State of a model's sequence numbers. A client that disappears may leave a gap in each of its
    models."""

    first_missing: int
    """The first sequence number that has not arrived."""
    has_pending: bool
    """Whether a request before the first missing one is pending."""
    is_blocked: bool
    """Whether a pending request waits for the missing one."""


class TrainingService:
    """Requests, models and checkpoints of one server, persisted below ``options.root``. All methods
    must be called on one event loop."""

    failure: str
    """Reason why the server has to stop; "" while it works."""
    ended: asyncio.Event
    """Set when the server has to stop."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.root = Path(options.root)
        self.store = TrainingStore(self.root)
        self.checkpoints = ServerCheckpoints(self.store, self.root)
        self.ready: Ready | None = None
        self.failure = ""
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._process = ComputeProcess(options.compute(), self._on_reply, self._on_exit)
        self._jobs: dict[int, _RunningJob] = {}  # by number
        self._last_job = 0
        self._job_of: dict[str, int] = {}  # by request: the number of its job
        self._loaded: set[str] = set()  # models in memory, or being rebuilt
        self._next_seq: dict[
            str, int
        ] = {}  # by loaded model: sequence number of the next request to dispatch
        self._queued: dict[
            str, dict[int, RequestRow]
        ] = {}  # by loaded model and sequence number: not dispatched
        self._waiters: dict[str, list[asyncio.Event]] = {}  # by request: set when it ends
        self._pending: dict[
            str, tuple[int, int]
        ] = {}  # by owner: number of pending requests, and their bytes
        self._crashes: deque[float] = deque()
        self._state_saved_at: dict[str, float] = {}  # by model: when its state was last saved
        self._tries: dict[
            str, int
        ] = {}  # by request: how often the compute process has crashed while running it
        self._rebuild_retried: set[str] = set()  # models whose first rebuild failed
        self._gaps: dict[
            str, tuple[int, int]
        ] = {}  # by model: the missing number, and for how many clean-ups
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = asyncio.Event()

    # ---- life cycle

    async def open(self) -> None:
        """Start the compute process and resume the pending requests. Raises RuntimeError if the
        process does not start."""
        self.checkpoints.remove_partial()
        self._process.start()
        await self._wait_until_ready()
        self._start_task(self._clean_periodically())
        pending = self.store.pending()
        for request in pending:
            self._add_pending(request.owner, 1, len(request.body))
        for target in dict.fromkeys(request.target for request in pending):
            if self.store.model(target) is not None:
                if self._queue_state(target).has_pending:
                    self._rebuild(target)
            else:
                for request in pending:
                    if request.target == target:
                        self._dispatch(request)
        if pending:
            _log.info("resuming %d pending requests", len(pending))

    async def _wait_until_ready(self) -> None:
        started = asyncio.ensure_future(self._started.wait())
        ended = asyncio.ensure_future(self.ended.wait())
        await asyncio.wait(
            (started, ended), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        started.cancel()
        ended.cancel()
        if self.ready is None:
            raise RuntimeError(
                self.failure or f"the model was not loaded within {START_TIMEOUT_S:g} s"
            )

    async def close(self) -> None:
        """Stop the compute process. Requests that it has not answered stay pending in the store."""
        for task in self._tasks:
            task.cancel()
        await self._process.stop()
        self.store.close()

    def _fail(self, why: str) -> None:
        """Stop the server. Pending requests stay in the store, and the next server resumes them."""
        _log.error("%s", why, exc_info=True)
        self.failure = self.failure or why
        self.ended.set()

    def _on_exit(self, code: int) -> None:
        try:
            self._restart(code)
        except Exception as error:
            self._fail(f"the process that computes has ended, and cannot be replaced: {error}")

    def _restart(self, code: int) -> None:
        """Start a new compute process after a crash, and send it the unanswered jobs again."""
        now = process_clock.now()
        self._crashes.append(now)
        while self._crashes[0] < now - CRASH_WINDOW_S:
            self._crashes.popleft()
        reason = f"the process that computes has ended (exit code {code})"
        if self.ready is None or len(self._crashes) > MAX_CRASHES:
            self.failure = self.failure or reason
            self.ended.set()
            return
        _log.error("%s; a new one repeats its work", reason)
        jobs = list(self._jobs.values())
        self._jobs = {}
        self._job_of = {}
        self._count_tries(jobs)
        self._loaded = set()
        self._queued = {}
        self._next_seq = {}
        self._process.start()
        for job in jobs:
            if (
                job.request is not None
                and self._tries.get(job.request.id, 0) >= MAX_TRIES
                and not job.redo
            ):
                self._finish(job.request, error=f"{reason} during this request")
        for model in dict.fromkeys(job.model for job in jobs if job.model):
            self._rebuild(model)
        for job in jobs:
            if job.request is not None and not job.model:
                row = self.store.request(job.request.id)
                if row is not None and row.state == WAITING:
                    self._dispatch(job.request)

    def _count_tries(self, jobs: list[_RunningJob]) -> None:
        """Count a crash for the requests that may have caused it: that of the started training job
        or, if there is none, those of all started sampling jobs. The process computes on one
        thread, so while it trains it does not sample."""
        started = [job for job in jobs if job.began and job.request is not None]
        for job in [job for job in started if job.model] or started:
            assert job.request is not None
            self._tries[job.request.id] = self._tries.get(job.request.id, 0) + 1

    def _on_reply(self, reply: ComputeReply, body: bytes) -> None:
        try:
            self._handle_reply(reply, body)
        except Exception as error:
            self._fail(f"--root {self.root}: what was computed cannot be written down ({error})")

    def _handle_reply(self, reply: ComputeReply, body: bytes) -> None:
        if isinstance(reply, Ready):
            base = f"{_FULL_WEIGHTS_PREFIX if self.options.full_weights else ''}{reply.digest}"
            stored_base = self.store.get_or_set("base", base)
            if stored_base != base:
                if stored_base.removeprefix(_FULL_WEIGHTS_PREFIX) != reply.digest:
                    what = f"another base model, or --dtype, than {self.options.model}"
                else:
                    what = (
                        f"a server {'without' if self.options.full_weights else 'with'} "
                        f"--full-weights"
                    )
                self.failure = f"--root {self.root} belongs to {what}: give another folder"
                self.ended.set()
                return
            self.ready = reply
            self._started.set()
            _log.info(
                "%s: %d tokens of context, digest %s",
                self.options.model,
                reply.longest,
                reply.digest,
            )
        elif isinstance(reply, Began):
            job = self._jobs.get(reply.number)
            if job is not None:
                job.began = True
        elif (job := self._jobs.pop(reply.number, None)) is not None:
            self._on_done(job, reply, body)
            self._dispatch_ready(job.model)

    # ---- futures

    def submit(
        self,
        owner: str,
        kind: str,
        target: str,
        seq: int,
        body: bytes,
        new_model: tuple[str, Mapping[str, Any]] | None = None,
    ) -> str:
        """Queue a request and return the id of its future. A request that was submitted before is
        not queued again.

        ``new_model`` is the session and the options of the model that the request creates. Raises
        Refusal: 400 if the sequence number is out of range or belongs to another request, 429 if
        the owner or the server has too much pending or no model can be unloaded, 507 if the disk is
        nearly full.
        """
        name = f"{target}:{seq}"
        known = self.store.request(name)
        if known is not None:
            if known.kind == REFUSED and known.owner == owner:
                raise Refusal(400, f"number {seq} of {target} is taken: {known.error}")
            if known.owner != owner or known.kind != kind:
                raise Refusal(400, f"number {seq} of {target} was another request ({known.kind})")
            return name
        if not 0 <= seq < 1 << 31:
            raise Refusal(400, f"seq_id {seq} is out of range")
        if self._gaps.get(target, (None, 0))[0] == seq:
            # the missing request has come; if it is refused with 429 or 507 it comes again
            del self._gaps[target]
        is_training = kind != "sample"
        try:
            self._check_pending(owner, len(body), 1)
        except Refusal:
            # The requests that wait for this one may themselves fill the quota, and would do so
            # until their session lapses. So the first missing request may exceed it.
            queue = self._queue_state(target)
            if not (is_training and queue.is_blocked and seq == queue.first_missing):
                raise
            self._check_pending(owner, len(body), 2)
        self.check_disk()
        if is_training and target not in self._loaded:
            self._make_room(owner)
        with self.store.transaction():
            if new_model is not None:
                self.store.add_model(target, owner, *new_model)
            self.store.add_request(name, owner, kind, target, seq, body)
        self._add_pending(owner, 1, len(body))
        request = RequestRow(name, owner, kind, target, seq, body, WAITING, b"", "", False, {})
        if not is_training:
            self._dispatch(request)
        elif target in self._loaded:
            self._enqueue(request)
        else:
            self._rebuild(target)
        return name

    def skip(self, owner: str, model: str, seq: int, why: str, kind: str = "") -> None:
        """Record a permanently refused request as failed, so that the requests after it do not wait
        for it. A later optimizer step may lack a gradient, and fails. ``kind`` is the kind of the
        request, "" if unknown."""
        kind = kind or REFUSED
        name = f"{model}:{seq}"
        if not 1 <= seq < 1 << 31 or self.store.request(name) is not None:
            return
        first = (
            self._next_seq[model]
            if model in self._loaded
            else self._queue_state(model).first_missing
        )
        if seq - first > MAX_SEQ_AHEAD:
            return
        with self.store.transaction():
            self.store.add_request(name, owner, kind, model, seq, b"")
            self.store.finish(name, error=why, is_client_error=True, info={})
        if model in self._loaded:
            self._enqueue(
                RequestRow(name, owner, kind, model, seq, b"", FAILED, b"", why, True, {})
            )
        elif self._queue_state(model).has_pending:
            self._rebuild_if_room(owner, model)

    def _check_pending(self, owner: str, nbytes: int, times: int) -> None:
        """Raise Refusal (429) if another request of ``nbytes`` would exceed a limit on pending
        requests.

        The limits are on the number of the owner's requests, the owner's bytes, and the bytes of
        all owners together. ``times`` multiplies the limits.
        """
        options = self.options
        count, own_bytes = self._pending.get(owner, (0, 0))
        total_bytes = sum(each for _, each in self._pending.values())
        if count >= times * options.max_pending:
            raise Refusal(
                429, f"{count} requests of yours are in work (--max-pending); wait for some"
            )
        if count and own_bytes + nbytes > times * options.max_pending_mib << 20:
            mib = own_bytes >> 20
            raise Refusal(
                429, f"requests of yours in work have {mib} MiB (--max-pending-mib); wait for some"
            )
        if (
            total_bytes
            and total_bytes + nbytes > times * TOTAL_QUOTA_FACTOR * options.max_pending_mib << 20
        ):
            mib = total_bytes >> 20
            raise Refusal(
                429, f"requests of all in work have {mib} MiB (--max-pending-mib); wait for some"
            )

    def check_saving(self, owner: str, kind: str) -> None:
        """Raise Refusal if another checkpoint of ``kind`` would exceed the owner's quota (400) or
        leave too little disk space (507). Saves in progress count with their estimated size."""
        saving = [(owner, self._estimate_bytes(kind))]
        for job in self._jobs.values():
            if isinstance(job.work, Save) and job.request is not None:
                saving.append((job.request.owner, self._estimate_bytes(job.work.kind)))
        own = sum(size for whose, size in saving if whose == owner)
        used = (self.store.saved_bytes(owner) + own) / 2**30
        if used > self.options.max_saved_gib:
            limit = f"{self.options.max_saved_gib:g} GiB (--max-saved-gib)"
            raise Refusal(400, f"your saved weights take {used:.1f} of {limit}: delete some")
        self.check_disk(sum(size for _, size in saving))

    def _estimate_bytes(self, kind: str) -> int:
        """Return the estimated size in bytes of a checkpoint that has not been saved yet. A whole
        model is as large as the base model, and three times as large with its optimizer moments.
        Adapters are small and count as 0 until they are saved."""
        base = 0 if self.ready is None else self.ready.nbytes
        if self.options.full_weights:
            return base * (3 if kind == "training" else 1)
        return base if kind == "external" else 0

    def check_disk(self, nbytes: int = 0) -> None:
        """Raise Refusal (507) if less than ``min_free_gib`` would be free after writing ``nbytes``.
        The reserve is for requests that have already been accepted."""
        free = (shutil.disk_usage(self.root).free - nbytes) / 2**30
        min_free_gib = self.options.min_free_gib
        if free < min_free_gib:
            raise Refusal(
                507,
                f"the server's disk has {free:.1f} GiB left (--min-free-gib {min_free_gib:g}); "
                "try again "
                f"later",
            )

    def _add_pending(self, owner: str, count: int, nbytes: int) -> None:
        old_count, old_bytes = self._pending.get(owner, (0, 0))
        self._pending[owner] = old_count + count, old_bytes + nbytes

    async def wait_for(self, owner: str, name: str, timeout_s: float) -> RequestRow | None:
        """Return a request once it has ended; None if it is still pending after ``timeout_s``.
        Raises Refusal (410) if the future is unknown, or its result was deleted."""
        request = self._find_request(owner, name)
        if request.state == WAITING and timeout_s > 0:
            event = asyncio.Event()
            self._waiters.setdefault(name, []).append(event)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            if (waiters := self._waiters.get(name)) is not None:
                waiters.remove(event)
            request = self._find_request(owner, name)
        if request.state == WAITING:
            return None
        self.store.mark_fetched(name)
        return request

    def _find_request(self, owner: str, name: str) -> RequestRow:
        request = self.store.request(name)
        if request is None or request.owner != owner:
            raise Refusal(410, f"there is no future {name!r:.100}; send the request again")
        if request.info.get("gone"):
            raise Refusal(
                410, f"the result of {name} is no longer available; send the request again"
            )
        return request

    def cancel(self, owner: str, name: str) -> None:
        """Cancel a pending ``sample`` request. Requests of other kinds are not cancelled."""
        request = self._find_request(owner, name)
        if request.kind != "sample" or request.state != WAITING:
            return
        number = self._job_of.pop(name)
        job = self._jobs.pop(number)
        self._process.send(Job(0, Cancel(number)))
        assert job.request is not None, "it is the job of a request"
        self._finish(job.request, error="it was cancelled", is_client_error=True)

    # ---- the order of a model's requests

    def _enqueue(self, request: RequestRow) -> None:
        if request.seq >= self._next_seq[request.target]:
            self._queued[request.target][request.seq] = request
        self._dispatch_ready(request.target)

    def _dispatch_ready(self, model: str) -> None:
        """Dispatch the queued requests of a model up to the first missing one. A request with a
        checkpoint path waits until the requests before it have ended, because they may save or
        delete the checkpoint."""
        while (
            model in self._loaded
            and (first := self._queued[model].get(self._next_seq[model])) is not None
        ):
            if first.kind in CHECKPOINT_KINDS and first.state == WAITING and self._has_jobs(model):
                return
            del self._queued[model][first.seq]
            self._next_seq[model] += 1
            self._dispatch(first)

    def _rebuild(self, model: str) -> None:
        """Load a model into the compute process: first its saved state, if any, then the requests
        after it. Requests that have already ended are replayed for their effect on the model; their
        results do not change."""
        if model in self._loaded:
            return
        row = self.store.model(model)
        assert row is not None, f"{model} was written down before its requests"
        self._loaded.add(model)
        self._queued[model] = {
            request.seq: request for request in self.store.history(model, row.state_seq)
        }
        self._next_seq[model] = row.state_seq + 1
        if row.state_seq >= 0:
            folder = str(self._state_folder(model, row.state_seq))
            self._send(
                msgspec.structs.replace(self._build_create(model), folder=folder), b"", model, None
            )
        self._dispatch_ready(model)

    def _queue_state(self, model: str) -> _QueueState:
        row = self.store.model(model)
        first_missing = 0 if row is None else row.state_seq + 1
        has_pending = False
        is_blocked = False
        for seq, state in self.store.request_states(model, first_missing - 1):
            if seq == first_missing:
                first_missing += 1
                has_pending = has_pending or state == WAITING
            else:
                is_blocked = is_blocked or state == WAITING
        return _QueueState(first_missing, has_pending, is_blocked)

    def _dispatch(self, request: RequestRow) -> None:
        """Send a request to the compute process. A request that has already ended is replayed for
        its effect on the model. If it had failed, the effect is that of the failure: an optimizer
        step dropped the gradients, a backward pass makes the next step fail, and other requests
        changed nothing."""
        is_replay = request.state != WAITING
        if is_replay and request.kind not in (*CHANGING, REFUSED):
            return
        if request.state == FAILED:
            if request.kind == "optim_step":
                self._send(Drop(request.target), b"", request.target, None)
            elif request.kind in ("forward_backward", REFUSED):
                self._send(Spoil(request.target, request.error), b"", request.target, None)
            return
        try:
            work, body = self._build_work(request, is_replay)
        except Refusal as error:
            if is_replay:
                self._on_rebuild_failed(request.target, str(error))
            else:
                self._finish(request, error=str(error), is_client_error=True)
            return
        self._send(
            work, body, "" if request.kind == "sample" else request.target, request, redo=is_replay
        )

    def _send(
        self, work: Work, body: bytes, model: str, request: RequestRow | None, *, redo: bool = False
    ) -> None:
        self._last_job += 1
        self._jobs[self._last_job] = _RunningJob(work, body, model, request, redo)
        if request is not None:
            self._job_of[request.id] = self._last_job
        self._process.send(Job(self._last_job, work, redo), body)

    def _build_work(self, request: RequestRow, is_replay: bool) -> tuple[Work, bytes]:
        """Return the work of a request for the compute process, and its body. Raises Refusal if the
        request's checkpoint is gone, already exists, or may not be saved."""
        kind = request.kind
        model = request.target
        if kind == "sample":
            return self._build_sample(request)
        if kind in ("forward", "forward_backward"):
            return Forward(model, kind == "forward_backward"), request.body
        fields = json.loads(request.body)
        if kind == "create_model":
            return self._build_create(model), b""
        if kind == "optim_step":
            return Update(
                model, fields["params"], "" if is_replay else self._choose_keep(model, request.seq)
            ), b""
        if kind == "load_weights":
            # A replay loads the weights of the first run, even if the path has other weights by
            # now.
            folder = (
                request.info.get("folder")
                or self.checkpoints.find(request.owner, fields["path"]).info["folder"]
            )
            keep = "" if is_replay else str(self._state_folder(model, request.seq))
            if request.seq:
                return Load(model, folder, fields["optimizer"], keep), b""
            create = self._build_create(model)
            return msgspec.structs.replace(
                create, folder=folder, moments=fields["optimizer"], keep=keep
            ), b""
        if kind == "unload_model":
            return Unload(model), b""
        if not fields["overwrite"] and self.store.checkpoint(fields["path"]) is not None:
            raise Refusal(
                409,
                f"weights {fields['path']} exist already; pass overwrite, or choose another name",
            )
        # It was checked when it was submitted, but requests before it may have saved weights since.
        self.check_saving(request.owner, fields["kind"])
        return Save(model, fields["folder"], fields["kind"]), b""

    def _build_create(self, model: str) -> Create:
        row = self.store.model(model)
        assert row is not None, f"{model} is written down with its first request"
        options = row.options
        layers = (options["mlp"], options["attention"], options["unembedding"])
        return Create(row.id, options["rank"], options["seed"], *layers)

    def _build_sample(self, request: RequestRow) -> tuple[Work, bytes]:
        sampler = self.store.sampler(request.target)
        if sampler is None:
            raise Refusal(404, f"there is no sampler {request.target}")
        return Sample(sampler.folder), request.body

    def _choose_keep(self, model: str, seq: int) -> str:
        """Return the folder into which the state after this request is saved; "" if the last saved
        state is younger than ``state_every_s``, or if there is too little disk space."""
        now = process_clock.now()
        if now - self._state_saved_at.get(model, -1e9) < self.options.state_every_s:
            return ""
        try:
            self.check_disk(self._estimate_bytes("training"))
        except Refusal as error:
            _log.warning("the state of %s is not kept: %s", model, error)
            return ""
        self._state_saved_at[model] = now
        return str(self._state_folder(model, seq))

    def _state_folder(self, model: str, seq: int) -> Path:
        return self.root / "state" / safe_name(model) / str(seq)

    # ---- results

    def _on_done(self, job: _RunningJob, done: Done, body: bytes) -> None:
        """Persist the result of a job and complete its future."""
        request = job.request
        if request is not None:
            self._job_of.pop(request.id, None)
        if request is None or job.redo:
            if done.error:
                self._on_rebuild_failed(job.model, done.error)
            return
        self._rebuild_retried.discard(job.model)
        info: dict[str, Any] = {
            "version": done.version,
            "digest": done.digest,
            "numbers": done.numbers,
        }
        if request.kind in CHECKPOINT_KINDS:
            fields = json.loads(request.body)
            info |= {name: fields.get(name) for name in ("path", "sampler")}
        if isinstance(job.work, (Create, Load)):
            info["folder"] = job.work.folder
        obsolete: list[Path] = []
        with self.store.transaction():
            self._finish(
                request, result=body, error=done.error, is_client_error=done.theirs, info=info
            )
            if not done.error:
                obsolete = self._register_files(request, job, done)
        for folder in obsolete:  # only after the transaction: before it they are still referenced
            shutil.rmtree(folder, ignore_errors=True)
        _log.info(
            "%s %s: %s, weights %d %s",
            request.kind,
            request.id,
            done.error or "done",
            done.version,
            done.digest,
        )

    def _register_files(self, request: RequestRow, job: _RunningJob, done: Done) -> list[Path]:
        """Record the files that a job has saved; return the folders that are now obsolete. The last
        two saved states are kept, because after a power failure the store may still reference the
        older one."""
        work = job.work
        model = request.target
        if isinstance(work, (Create, Update, Load)) and done.kept:
            row = self.store.model(model)
            previous_seq = -1 if row is None else row.state_seq
            self.store.update_model(model, state_seq=request.seq)
            self.store.drop_bodies(model, previous_seq)
            states = self._state_folder(model, request.seq).parent
            return [
                each
                for each in states.iterdir()
                if each.name not in (str(request.seq), str(previous_seq))
            ]
        if isinstance(work, Save):
            fields = json.loads(request.body)
            weights = {"version": done.version, "digest": done.digest}
            checkpoint = CheckpointRow(
                path=fields["path"],
                owner=request.owner,
                model=model,
                kind=fields["kind"],
                name=fields["name"],
                created=time.time(),
                expires=fields["expires"],
                info={**fields["info"], **done.numbers, **weights, "folder": work.folder},
            )
            replaced = self.store.checkpoint(checkpoint.path)
            self.store.put_checkpoint(checkpoint)
            if fields.get("sampler"):
                self.store.add_sampler(
                    fields["sampler"], request.owner, fields["session"], work.folder, fields["path"]
                )
                return self.checkpoints.unregister_ephemeral(model, self.options.keep_ephemeral)
            return [] if replaced is None else [self.checkpoints.folder_of(replaced)]
        if isinstance(work, Unload):
            return [self._retire(model)]
        return []

    def _retire(self, model: str) -> Path:
        """Mark a model as permanently unloaded and fail its pending requests. Returns the folder of
        its saved states, which the caller deletes. Checkpoints are kept."""
        self._discard_jobs(model)
        self._fail_pending(model, NEVER_CAME, is_client_error=True)
        self.store.drop_bodies(model)
        self.store.update_model(model, unloaded=1)
        self._loaded.discard(model)
        for by_model in (self._next_seq, self._queued, self._state_saved_at):
            by_model.pop(model, None)
        return self._state_folder(model, 0).parent

    def _on_rebuild_failed(self, model: str, why: str) -> None:
        """Retry the rebuild of a model once. After a second failure, fail its pending requests,
        because they would run with the wrong weights."""
        _log.error("model %s is not rebuilt: %s", model, why)
        self._discard_jobs(model)
        self._unload(model)
        if model in self._rebuild_retried:
            self._rebuild_retried.discard(model)
            self._fail_pending(model, f"the model was not rebuilt: {why}", is_client_error=False)
        else:
            self._rebuild_retried.add(model)
            self._rebuild(model)

    def _discard_jobs(self, model: str) -> None:
        """Ignore the replies to the running jobs of a model."""
        for number, job in list(self._jobs.items()):
            if job.model == model:
                del self._jobs[number]
                if job.request is not None:
                    self._job_of.pop(job.request.id, None)

    def _fail_pending(self, model: str, reason: str, *, is_client_error: bool) -> None:
        """Fail the pending requests of a model that has no running jobs."""
        for request in self.store.pending(model):
            self._finish(request, error=reason, is_client_error=is_client_error)

    def _finish(
        self,
        request: RequestRow,
        *,
        result: bytes = b"",
        error: str = "",
        is_client_error: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.store.finish(
            request.id, result=result, error=error, is_client_error=is_client_error, info=info or {}
        )
        self._tries.pop(request.id, None)
        self._add_pending(request.owner, -1, -len(request.body))
        for event in self._waiters.pop(request.id, ()):
            event.set()

    # ---- housekeeping

    def _make_room(self, owner: str) -> None:
        """If a limit on loaded models is reached, unload the least recently used idle model: of
        this owner for the owner's limit, of any owner for the total limit. Raises Refusal (429) if
        no model is idle."""
        options = self.options
        for whose, limit in ((owner, options.max_adapters_per_key), (None, options.max_adapters)):
            rows = [row for row in self._loaded_models() if whose in (None, row.owner)]
            if len(rows) < limit:
                continue
            idle = [row for row in rows if not self._has_jobs(row.id)]
            if not idle:
                option = "--max-adapters" if whose is None else "--max-adapters-per-key"
                raise Refusal(
                    429, f"{len(rows)} models are at work at once ({option}); wait for one"
                )
            self._unload(min(idle, key=lambda row: row.used).id)

    def _rebuild_if_room(self, owner: str, model: str) -> None:
        """Rebuild a model, unless there is no room because all loaded models are busy;
        ``close_gaps`` tries again later."""
        with contextlib.suppress(Refusal):
            self._make_room(owner)
            self._rebuild(model)

    def unload_lapsed(self) -> None:
        """Unload idle models whose session has finished or had no heartbeat for
        ``session_lapses_s``, and fail their pending requests, which wait for a request that never
        arrived."""
        for model in dict.fromkeys((*self._loaded, *self.store.models_with_pending())):
            row = self.store.model(model)
            if row is None or self._has_jobs(model):
                continue
            session = self.store.session(row.session)
            if (
                session is None
                or session[2]
                or time.time() - session[1] > self.options.session_lapses_s
            ):
                self._fail_pending(model, NEVER_CAME, is_client_error=True)
                if model in self._loaded:
                    self._unload(model)

    def close_gaps(self) -> None:
        """Stop waiting for a missing request once others have been blocked by it for
        ``GAP_TIMEOUT_CLEANS`` clean-ups. The missing number then counts as refused, and the
        requests behind it run (except an optimizer step among them, which fails).

        Also rebuild models that have pending requests but found no room in memory before.
        """
        gaps: dict[str, tuple[int, int]] = {}
        for model in self.store.models_with_pending():
            row = self.store.model(model)
            queue = self._queue_state(model)
            if row is None:
                continue
            if self._has_jobs(model):
                if model in self._gaps:
                    gaps[model] = self._gaps[model]
                continue
            # there was no room when it was submitted
            if queue.has_pending and model not in self._loaded:
                self._rebuild_if_room(row.owner, model)
            if queue.has_pending or not queue.is_blocked:
                continue
            missing = queue.first_missing
            previous, count = self._gaps.get(model, (missing, 0))
            count = count + 1 if previous == missing else 1
            if count < GAP_TIMEOUT_CLEANS:
                gaps[model] = missing, count
                continue
            waited_s = GAP_TIMEOUT_CLEANS * CLEAN_INTERVAL_S
            reason = (
                f"request {missing} never arrived: the requests behind it waited {waited_s:g} s"
            )
            self.skip(row.owner, model, missing, reason)
        self._gaps = gaps

    def _loaded_models(self) -> list[ModelRow]:
        return [row for model in self._loaded if (row := self.store.model(model)) is not None]

    def _has_jobs(self, model: str) -> bool:
        """Return whether the compute process has jobs of a model. Queued requests that wait for a
        missing one do not count: they are in the store, and the missing one may never arrive, so
        the model may be unloaded."""
        return any(job.model == model for job in self._jobs.values())

    def _unload(self, model: str) -> None:
        """Remove a model from memory; its next request rebuilds it."""
        _log.info("model %s leaves the memory until its next request", model)
        self._loaded.discard(model)
        self._send(Unload(model), b"", model, None)

    async def _clean_periodically(self) -> None:
        while True:
            await asyncio.sleep(CLEAN_INTERVAL_S)
            now = time.time()
            unused_before = now - UNUSED_TTL_S
            try:
                self.store.drop_results(
                    fetched_before=now - FETCHED_RESULT_TTL_S, finished_before=unused_before
                )
                self.checkpoints.delete_expired(unused_before)
                self.unload_lapsed()
                self.close_gaps()
                for model in self.store.find_unused_models(unused_before):
                    if model not in self._loaded:
                        for folder in (
                            self._retire(model),
                            *self.checkpoints.unregister_ephemeral(model),
                        ):
                            shutil.rmtree(folder, ignore_errors=True)
            except (
                sqlite3.Error,
                OSError,
            ) as error:  # such as a full disk; try again at the next clean-up
                _log.error("--root %s was not cleaned: %s", self.root, error)

    def _start_task(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
