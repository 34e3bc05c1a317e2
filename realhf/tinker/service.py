"""Schedules requests: runs those of each model in the order of their sequence numbers on the compute process, and
stores their results.

A future is named after its model and the number of its request, so a request that is sent twice gets the same future
and runs once. Requests of one model may arrive out of order, since the client sends the parts of a batch at once. When
the compute process dies, a new one repeats the jobs that it had not answered. When this process dies, the next one
finds the unfinished requests (``open``), and restores a model from its last saved state and the requests after it.
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
    Told,
    Unload,
    Update,
    Work,
)
from realhf.tinker.options import ServerOptions
from realhf.tinker.shelf import Shelf, safe_name
from realhf.tinker.store import CHANGING, FAILED, WAITING, CheckpointRow, ModelRow, Request, Store
from realhf.web.refusal import Refusal

_log = logging.getLogger(__name__)
STARTS_WITHIN_S = 900.0
"""Seconds in which the compute process must load the base model."""
MOST_DEATHS = 3
"""The server ends when the compute process dies more often than this within ``DEATHS_WITHIN_S``."""
DEATHS_WITHIN_S = 600.0
"""Seconds within which deaths of the compute process are counted."""
MOST_TRIES = 2
"""A request fails when the compute process has died this often while it ran."""
KEPT_FETCHED_S = 900.0
"""Seconds that a result is kept after a client has fetched it."""
KEPT_S = 7 * 86400.0
"""Seconds that any result, and an unused model, is kept."""
CLEANS_EVERY_S = 60.0
"""Seconds between two clean-ups."""
KEYS_AT_ONCE = 4
"""All keys together may have this many times the pending bytes of one key. Without a file of keys, anybody can use any
number of keys."""
NAMED = ("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights")
"""Kinds of requests about weights that have a path."""
_WHOLE = "whole:"
"""Prefix of the stored digest of the base where all weights train."""
NEVER_CAME = "a request before it never came"
REFUSED = "refused"
"""Kind of a refused request of which only the number is known."""
MOST_AHEAD = 1 << 16
"""Largest distance of a refused request's number from the first missing number. A number further ahead is not stored:
no client counts that far, and each takes memory."""
GAP_CLEANS = 10
"""Clean-ups in a row for which a model waits for a missing request. Counting clean-ups instead of seconds leaves out
the time in which this process was suspended."""


@dataclass
class _Sent:
    """A job on the compute process."""

    work: Work
    """The job."""
    body: bytes
    """Its data."""
    model: str
    """Its model; "": it belongs to a sampler."""
    request: Request | None
    """The request that it runs; None: it restores a model."""
    redo: bool = False
    """Whether the request has run before, and runs again to restore the model."""
    began: bool = False
    """Whether the compute process has started it."""


@dataclass(frozen=True)
class _Turns:
    """Which requests of a model have arrived. A client that is gone may leave a gap in the numbers of every model."""

    missing: int
    """The first number that has not arrived."""
    owed: bool
    """Whether a request before it is unfinished."""
    held_up: bool
    """Whether a request after it waits."""


class Service:
    """The service of one base model, with its state in ``options.root``. Belongs to one event loop.

    ``failure``: why the service cannot continue; "" while it can.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.root = Path(options.root)
        self.store = Store(self.root)
        self.shelf = Shelf(self.store, self.root)
        self.ready: Ready | None = None
        self.failure = ""
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._process = ComputeProcess(options.compute(), self._told, self._lost)
        self._jobs: dict[int, _Sent] = {}
        self._numbers = 0
        self._loaded: set[str] = set()
        self._next: dict[str, int] = {}
        self._held: dict[str, dict[int, Request]] = {}
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self._pending: dict[str, tuple[int, int]] = {}  # by owner: requests in work, and their bytes
        self._job_of: dict[str, int] = {}
        self._deaths: deque[float] = deque()
        self._kept_at: dict[str, float] = {}
        self._tries: dict[str, int] = {}  # by request: how often the process that computes has begun it
        self._tried_again: set[str] = set()  # models that were not made again at the first try
        self._gaps: dict[str, tuple[int, int]] = {}  # by model: the number that is missing, and for how many cleanings
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = asyncio.Event()

    # ---- life

    async def open(self) -> None:
        """Start the compute process, and resume unfinished requests. Raises RuntimeError if the process does not
        start."""
        self.shelf.sweep()
        self._process.start()
        await self._until_ready()
        self._later(self._clean())
        owed = self.store.unfinished()
        for request in owed:
            self._count(request.owner, 1, len(request.body))
        for target in dict.fromkeys(request.target for request in owed):
            if self.store.model(target) is not None:
                if self._turns(target).owed:
                    self._load(target)
            else:
                for request in owed:
                    if request.target == target:
                        self._dispatch(request)
        if owed:
            _log.info("%d requests of before are done now", len(owed))

    async def _until_ready(self) -> None:
        started, ended = asyncio.ensure_future(self._started.wait()), asyncio.ensure_future(self.ended.wait())
        await asyncio.wait((started, ended), timeout=STARTS_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        ended.cancel()
        if self.ready is None:
            raise RuntimeError(self.failure or f"the model was not loaded within {STARTS_WITHIN_S:g} s")

    async def close(self) -> None:
        """Stop the compute process; requests that it has not answered stay unfinished."""
        for task in self._tasks:
            task.cancel()
        await self._process.stop()
        self.store.close()

    def _fail(self, why: str) -> None:
        """End the server. Unfinished requests resume at its next start."""
        _log.error("%s", why, exc_info=True)
        self.failure = self.failure or why
        self.ended.set()

    def _lost(self, code: int) -> None:
        try:
            self._begin_anew(code)
        except Exception as error:
            self._fail(f"the process that computes has ended, and cannot be replaced: {error}")

    def _begin_anew(self, code: int) -> None:
        """Replace a compute process that died, and repeat the jobs that it had not answered."""
        now = process_clock.now()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        what = f"the process that computes has ended (exit code {code})"
        if self.ready is None or len(self._deaths) > MOST_DEATHS:
            self.failure = self.failure or what
            self.ended.set()
            return
        _log.error("%s; a new one does its work again", what)
        sent, self._jobs, self._job_of = list(self._jobs.values()), {}, {}
        self._blame(sent)
        self._loaded, self._held, self._next = set(), {}, {}
        self._process.start()
        for each in sent:
            if each.request is not None and self._tries.get(each.request.id, 0) >= MOST_TRIES and not each.redo:
                self._finish(each.request, error=f"{what} while it did this")
        for target in dict.fromkeys(each.model for each in sent if each.model):
            self._load(target)
        for each in sent:
            if each.request is not None and not each.model:
                known = self.store.request(each.request.id)
                if known is not None and known.state == WAITING:
                    self._dispatch(each.request)

    def _blame(self, sent: list[_Sent]) -> None:
        """Count the death for the requests that were running. One thread computes, so training and sampling
        alternate: if a training job was running, no sample was."""
        begun = [each for each in sent if each.began and each.request is not None]
        for each in [each for each in begun if each.model] or begun:
            assert each.request is not None
            self._tries[each.request.id] = self._tries.get(each.request.id, 0) + 1

    def _told(self, told: Told, body: bytes) -> None:
        try:
            self._take(told, body)
        except Exception as error:
            self._fail(f"--root {self.root}: what was computed cannot be written down ({error})")

    def _take(self, told: Told, body: bytes) -> None:
        if isinstance(told, Ready):
            served = f"{_WHOLE if self.options.full_weights else ''}{told.digest}"
            before = self.store.once("base", served)
            if before != served:
                if before.removeprefix(_WHOLE) != told.digest:
                    what = f"another base model, or --dtype, than {self.options.model}"
                else:
                    what = f"a server {'without' if self.options.full_weights else 'with'} --full-weights"
                self.failure = f"--root {self.root} belongs to {what}: give another folder"
                self.ended.set()
                return
            self.ready = told
            self._started.set()
            _log.info("%s: %d tokens of context, digest %s", self.options.model, told.longest, told.digest)
        elif isinstance(told, Began):
            sent = self._jobs.get(told.number)
            if sent is not None:
                sent.began = True
        elif (sent := self._jobs.pop(told.number, None)) is not None:
            self._done(sent, told, body)
            self._go_on(sent.model)

    # ---- promises

    def promise(
        self,
        owner: str,
        kind: str,
        target: str,
        seq: int,
        body: bytes,
        made: tuple[str, Mapping[str, Any]] | None = None,
    ) -> str:
        """Queue a request, unless it is queued already, and return the name of its future.

        ``made``: session and options of the model that the request creates. Raises Refusal if the owner has too many
        unfinished requests, the disk is nearly full, or the number is out of range or used by another request.
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
            del self._gaps[target]  # it comes, and where it is refused for now it comes again
        is_model = kind != "sample"
        try:
            self._check_pending(owner, len(body), 1)
        except Refusal:
            # Without the first of several, those that came before it would fill the quota until their session lapses.
            turns = self._turns(target)
            if not (is_model and turns.held_up and seq == turns.missing):
                raise
            self._check_pending(owner, len(body), 2)
        self.check_disk()
        if is_model and target not in self._loaded:
            self._make_room(owner)
        with self.store.together():
            if made is not None:
                self.store.add_model(target, owner, *made)
            self.store.add_request(name, owner, kind, target, seq, body)
        self._count(owner, 1, len(body))
        request = Request(name, owner, kind, target, seq, body, WAITING, b"", "", False, {})
        if not is_model:
            self._dispatch(request)
        elif target in self._loaded:
            self._arrived(request)
        else:
            self._load(target)
        return name

    def skip(self, owner: str, model: str, seq: int, why: str, kind: str = "") -> None:
        """Use up the number of a request of this ``kind`` ("": unknown) that was refused for good: later requests would
        wait for it forever. A later optimizer step may miss a gradient, so the next step fails."""
        kind = kind or REFUSED
        name = f"{model}:{seq}"
        if not 1 <= seq < 1 << 31 or self.store.request(name) is not None:
            return
        first = self._next[model] if model in self._loaded else self._turns(model).missing
        if seq - first > MOST_AHEAD:
            return
        with self.store.together():
            self.store.add_request(name, owner, kind, model, seq, b"")
            self.store.finish(name, error=why, theirs=True, info={})
        if model in self._loaded:
            self._arrived(Request(name, owner, kind, model, seq, b"", FAILED, b"", why, True, {}))
        elif self._turns(model).owed:
            self._load_where_room(owner, model)

    def _check_pending(self, owner: str, nbytes: int, times: int) -> None:
        """Raise Refusal (429) if the owner has more than ``times`` the allowed requests or bytes unfinished."""
        options = self.options
        count, held = self._pending.get(owner, (0, 0))
        whole = sum(each for _, each in self._pending.values())
        if count >= times * options.max_pending:
            raise Refusal(429, f"{count} requests of yours are in work (--max-pending); wait for some")
        if count and held + nbytes > times * options.max_pending_mib << 20:
            raise Refusal(429, f"requests of yours in work have {held >> 20} MiB (--max-pending-mib); wait for some")
        if whole and whole + nbytes > times * KEYS_AT_ONCE * options.max_pending_mib << 20:
            raise Refusal(429, f"requests of all in work have {whole >> 20} MiB (--max-pending-mib); wait for some")

    def check_saving(self, owner: str, kind: str) -> None:
        """Raise Refusal if the saved weights of an owner exceed the quota, or the disk is nearly full.

        Before it is saved, a whole model counts as the size of the base, and with optimizer state three times that.
        Adapters are small and count only afterwards.
        """
        saving = [(owner, self._size_of(kind))]
        for sent in self._jobs.values():
            if isinstance(sent.work, Save) and sent.request is not None:
                saving.append((sent.request.owner, self._size_of(sent.work.kind)))
        own = sum(size for whose, size in saving if whose == owner)
        used = (self.store.saved_bytes(owner) + own) / 2**30
        if used > self.options.max_saved_gib:
            most = f"{self.options.max_saved_gib:g} GiB (--max-saved-gib)"
            raise Refusal(400, f"your saved weights take {used:.1f} of {most}: delete some")
        self.check_disk(sum(size for _, size in saving))

    def _size_of(self, kind: str) -> int:
        """Return the known size of weights before they are saved, in bytes; 0 for adapters."""
        base = 0 if self.ready is None else self.ready.nbytes
        if self.options.full_weights:
            return base * (3 if kind == "training" else 1)
        return base if kind == "external" else 0

    def check_disk(self, nbytes: int = 0) -> None:
        """Raise Refusal (507) if the disk would have less than ``min_free_gib`` left after ``nbytes`` are written:
        queued requests need that space."""
        free, least = (shutil.disk_usage(self.root).free - nbytes) / 2**30, self.options.min_free_gib
        if free < least:
            raise Refusal(507, f"the server's disk has {free:.1f} GiB left (--min-free-gib {least:g}); try again later")

    def _count(self, owner: str, count: int, nbytes: int) -> None:
        before = self._pending.get(owner, (0, 0))
        self._pending[owner] = before[0] + count, before[1] + nbytes

    async def outcome(self, owner: str, name: str, timeout_s: float) -> Request | None:
        """Return a request when it has finished or failed; None after ``timeout_s``. Raises Refusal (410) for an
        unknown request, and for one whose result was deleted."""
        request = self._of(owner, name)
        if request.state == WAITING and timeout_s > 0:
            event = asyncio.Event()
            self._waiting.setdefault(name, []).append(event)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            if (others := self._waiting.get(name)) is not None:
                others.remove(event)
            request = self._of(owner, name)
        if request.state == WAITING:
            return None
        self.store.fetched(name)
        return request

    def _of(self, owner: str, name: str) -> Request:
        request = self.store.request(name)
        if request is None or request.owner != owner:
            raise Refusal(410, f"there is no promise {name!r:.100}; send the request again")
        if request.info.get("gone"):
            raise Refusal(410, f"the result of {name} is not kept any more; send the request again")
        return request

    def cancel(self, owner: str, name: str) -> None:
        """Cancel a sample request."""
        request = self._of(owner, name)
        if request.kind != "sample" or request.state != WAITING:
            return
        job = self._job_of.pop(name)
        sent = self._jobs.pop(job)
        self._process.send(Job(0, Cancel(job)))
        assert sent.request is not None, "it is the job of a request"
        self._finish(sent.request, error="it was cancelled", theirs=True)

    # ---- the order of a model's requests

    def _arrived(self, request: Request) -> None:
        if request.seq >= self._next[request.target]:
            self._held[request.target][request.seq] = request
        self._go_on(request.target)

    def _go_on(self, model: str) -> None:
        """Start all requests of a model whose turn has come. A request for weights with a path waits until all earlier
        ones are done: only then is it known whether the weights exist."""
        while model in self._loaded and (first := self._held[model].get(self._next[model])) is not None:
            if first.kind in NAMED and first.state == WAITING and self._busy(model):
                return
            del self._held[model][first.seq]
            self._next[model] += 1
            self._dispatch(first)

    def _load(self, model: str) -> None:
        """Restore a model in the compute process: load its saved state, and repeat the requests after it. Requests that
        have ended run again for their effect on the model; their results stay the same."""
        if model in self._loaded:
            return
        row = self.store.model(model)
        assert row is not None, f"{model} was written down before its requests"
        self._loaded.add(model)
        self._held[model] = {request.seq: request for request in self.store.history(model, row.state_seq)}
        self._next[model] = row.state_seq + 1
        if row.state_seq >= 0:
            kept = self._state(model, row.state_seq)
            self._send(msgspec.structs.replace(self._creation(model), folder=str(kept)), b"", model, None)
        self._go_on(model)

    def _turns(self, model: str) -> _Turns:
        row = self.store.model(model)
        missing, owed, held_up = 0 if row is None else row.state_seq + 1, False, False
        for seq, state in self.store.standing(model, missing - 1):
            if seq == missing:
                missing, owed = missing + 1, owed or state == WAITING
            else:
                held_up = held_up or state == WAITING
        return _Turns(missing, owed, held_up)

    def _dispatch(self, request: Request) -> None:
        """Send a request to the compute process.

        A request that has ended is sent again only for its effect on the model: a failed step dropped the gradients, a
        failed pass makes the next step fail, and other failed requests had no effect.
        """
        over = request.state != WAITING
        if over and request.kind not in (*CHANGING, REFUSED):
            return
        if request.state == FAILED:
            if request.kind == "optim_step":
                self._send(Drop(request.target), b"", request.target, None)
            elif request.kind in ("forward_backward", REFUSED):
                self._send(Spoil(request.target, request.error), b"", request.target, None)
            return
        try:
            work, body = self._work(request, over)
        except Refusal as error:
            if over:
                self._not_made(request.target, str(error))
            else:
                self._finish(request, error=str(error), theirs=True)
            return
        self._send(work, body, "" if request.kind == "sample" else request.target, request, redo=over)

    def _send(self, work: Work, body: bytes, model: str, request: Request | None, *, redo: bool = False) -> None:
        self._numbers += 1
        self._jobs[self._numbers] = _Sent(work, body, model, request, redo)
        if request is not None:
            self._job_of[request.id] = self._numbers
        self._process.send(Job(self._numbers, work, redo), body)

    def _work(self, request: Request, over: bool) -> tuple[Work, bytes]:
        """Return the job of a request, and its data. Raises Refusal for weights that no longer exist."""
        kind, model = request.kind, request.target
        if kind == "sample":
            return self._sampling(request)
        if kind in ("forward", "forward_backward"):
            return Forward(model, kind == "forward_backward"), request.body
        said = json.loads(request.body)
        if kind == "create_model":
            return self._creation(model), b""
        if kind == "optim_step":
            return Update(model, said["params"], "" if over else self._keep(model, request.seq)), b""
        if kind == "load_weights":
            # A repeated load uses the folder of the first time, even if the path names other weights now.
            folder = request.info.get("folder") or self.shelf.find(request.owner, said["path"]).info["folder"]
            keep = "" if over else str(self._state(model, request.seq))
            if request.seq:
                return Load(model, folder, said["optimizer"], keep), b""
            return msgspec.structs.replace(
                self._creation(model), folder=folder, moments=said["optimizer"], keep=keep
            ), b""
        if kind == "unload_model":
            return Unload(model), b""
        if not said["overwrite"] and self.store.checkpoint(said["path"]) is not None:
            raise Refusal(409, f"there are weights {said['path']} already; say overwrite, or another name")
        self.check_saving(request.owner, said["kind"])  # earlier requests may have saved since
        return Save(model, said["folder"], said["kind"]), b""

    def _creation(self, model: str) -> Create:
        row = self.store.model(model)
        assert row is not None, f"{model} is written down with its first request"
        said = row.options
        return Create(row.id, said["rank"], said["seed"], said["mlp"], said["attention"], said["unembedding"])

    def _sampling(self, request: Request) -> tuple[Work, bytes]:
        sampler = self.store.sampler(request.target)
        if sampler is None:
            raise Refusal(404, f"there is no sampler {request.target}")
        return Sample(sampler.folder), request.body

    def _keep(self, model: str, seq: int) -> str:
        """Return a folder for the state after this request; "" if the last one is recent, or the disk nearly full."""
        now = process_clock.now()
        if now - self._kept_at.get(model, -1e9) < self.options.state_every_s:
            return ""
        try:
            self.check_disk(self._size_of("training"))
        except Refusal as error:
            _log.warning("the state of %s is not kept: %s", model, error)
            return ""
        self._kept_at[model] = now
        return str(self._state(model, seq))

    def _state(self, model: str, seq: int) -> Path:
        return self.root / "state" / safe_name(model) / str(seq)

    # ---- what came of them

    def _done(self, sent: _Sent, done: Done, body: bytes) -> None:
        request = sent.request
        if request is not None:
            self._job_of.pop(request.id, None)
        if request is None or sent.redo:
            if done.error:
                self._not_made(sent.model, done.error)
            return
        self._tried_again.discard(sent.model)
        info: dict[str, Any] = {"version": done.version, "digest": done.digest, "numbers": done.numbers}
        if request.kind in NAMED:
            said = json.loads(request.body)
            info |= {name: said.get(name) for name in ("path", "sampler")}
        if isinstance(sent.work, (Create, Load)):
            info["folder"] = sent.work.folder
        useless: list[Path] = []
        with self.store.together():
            self._finish(request, result=body, error=done.error, theirs=done.theirs, info=info)
            if not done.error:
                useless = self._note(request, sent, done)
        for folder in useless:  # only after the store no longer refers to it
            shutil.rmtree(folder, ignore_errors=True)
        _log.info("%s %s: %s, weights %d %s", request.kind, request.id, done.error or "done", done.version, done.digest)

    def _note(self, request: Request, sent: _Sent, done: Done) -> list[Path]:
        """Record what a job has saved; return the folders that are obsolete. The state before the last one stays:
        after a power failure, the disk may have only that one."""
        work, model = sent.work, request.target
        if isinstance(work, (Create, Update, Load)) and done.kept:
            before = self.store.model(model)
            last = -1 if before is None else before.state_seq
            self.store.change_model(model, state_seq=request.seq)
            self.store.drop_bodies(model, last)
            states = self._state(model, request.seq).parent
            return [each for each in states.iterdir() if each.name not in (str(request.seq), str(last))]
        if isinstance(work, Save):
            said = json.loads(request.body)
            proof = {"version": done.version, "digest": done.digest}
            info = {**said["info"], **done.numbers, **proof, "folder": work.folder}
            before = self.store.checkpoint(said["path"])
            self.store.put_checkpoint(
                CheckpointRow(
                    said["path"], request.owner, model, said["kind"], said["name"], time.time(), said["expires"], info
                )
            )
            if said.get("sampler"):
                self.store.add_sampler(said["sampler"], request.owner, said["session"], work.folder, said["path"])
                return self.shelf.forget_ephemeral(model, self.options.keep_ephemeral)
            return [] if before is None else [self.shelf.folder_of(before)]
        if isinstance(work, Unload):
            return [self._forget(model)]
        return []

    def _forget(self, model: str) -> Path:
        """Record that a model is unloaded for good; return its obsolete folder. Saved weights stay."""
        self._drop_jobs(model)
        self._give_up(model, NEVER_CAME, theirs=True)
        self.store.drop_bodies(model)
        self.store.change_model(model, unloaded=1)
        self._loaded.discard(model)
        for known in (self._next, self._held, self._kept_at):
            known.pop(model, None)
        return self._state(model, 0).parent

    def _not_made(self, model: str, why: str) -> None:
        """Try once more to restore a model. If that fails, too, fail its unfinished requests: with other weights their
        results would be wrong."""
        _log.error("model %s is not made again: %s", model, why)
        self._drop_jobs(model)
        self._leave_memory(model)
        if model in self._tried_again:
            self._tried_again.discard(model)
            self._give_up(model, f"the model was not made again: {why}", theirs=False)
        else:
            self._tried_again.add(model)
            self._load(model)

    def _drop_jobs(self, model: str) -> None:
        """Ignore the replies to the jobs of a model."""
        for number, sent in list(self._jobs.items()):
            if sent.model == model:
                del self._jobs[number]
                if sent.request is not None:
                    self._job_of.pop(sent.request.id, None)

    def _give_up(self, model: str, why: str, *, theirs: bool) -> None:
        """Fail the unfinished requests of a model that has no running job."""
        for request in self.store.unfinished(model):
            self._finish(request, error=why, theirs=theirs)

    def _finish(
        self,
        request: Request,
        *,
        result: bytes = b"",
        error: str = "",
        theirs: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.store.finish(request.id, result=result, error=error, theirs=theirs, info=info or {})
        self._tries.pop(request.id, None)
        self._count(request.owner, -1, -len(request.body))
        for event in self._waiting.pop(request.id, ()):
            event.set()

    # ---- housekeeping

    def _make_room(self, owner: str) -> None:
        """Remove the least recently used idle model from memory if the limit is reached. Raises Refusal (429) if all
        are busy."""
        options = self.options
        for whose, most in ((owner, options.max_adapters_per_key), (None, options.max_adapters)):
            rows = [row for row in self._in_memory() if whose in (None, row.owner)]
            if len(rows) < most:
                continue
            idle = [row for row in rows if not self._busy(row.id)]
            if not idle:
                named = "--max-adapters" if whose is None else "--max-adapters-per-key"
                raise Refusal(429, f"{len(rows)} models are at work at once ({named}); wait for one")
            self._leave_memory(min(idle, key=lambda row: row.used).id)

    def _load_where_room(self, owner: str, model: str) -> None:
        """Restore a model, unless all models in memory are busy: then ``close_gaps`` tries again."""
        with contextlib.suppress(Refusal):
            self._make_room(owner)
            self._load(model)

    def end_lapsed(self) -> None:
        """Remove models from memory whose session has no heartbeat any more, and fail their requests that wait for a
        missing number."""
        for model in dict.fromkeys((*self._loaded, *self.store.owed_models())):
            row = self.store.model(model)
            if row is None or self._busy(model):
                continue
            session = self.store.session(row.session)
            if session is None or session[2] or time.time() - session[1] > self.options.session_lapses_s:
                self._give_up(model, NEVER_CAME, theirs=True)
                if model in self._loaded:
                    self._leave_memory(model)

    def close_gaps(self) -> None:
        """Give up a request that has been missing for ``GAP_CLEANS`` clean-ups: its number counts as refused, later
        requests run, and the next optimizer step fails. Also restore models with unfinished requests for which there
        was no room before."""
        gaps: dict[str, tuple[int, int]] = {}
        for model in self.store.owed_models():
            row = self.store.model(model)
            turns = self._turns(model)
            if row is None:
                continue
            if self._busy(model):
                if model in self._gaps:
                    gaps[model] = self._gaps[model]
                continue
            if turns.owed and model not in self._loaded:  # there was no room when its turn had come
                self._load_where_room(row.owner, model)
            if turns.owed or not turns.held_up:
                continue
            before, times = self._gaps.get(model, (turns.missing, 0))
            times = times + 1 if before == turns.missing else 1
            if times < GAP_CLEANS:
                gaps[model] = turns.missing, times
                continue
            waited = GAP_CLEANS * CLEANS_EVERY_S
            why = f"request {turns.missing} never came: those behind it waited {waited:g} s"
            self.skip(row.owner, model, turns.missing, why)
        self._gaps = gaps

    def _in_memory(self) -> list[ModelRow]:
        return [row for model in self._loaded if (row := self.store.model(model)) is not None]

    def _busy(self, model: str) -> bool:
        """Return whether a job of a model is running. Requests that wait for a missing one do not count: they are on
        the disk, and the missing one may never arrive."""
        return any(sent.model == model for sent in self._jobs.values())

    def _leave_memory(self, model: str) -> None:
        """Remove a model from memory; its next request restores it."""
        _log.info("model %s leaves the memory until its next request", model)
        self._loaded.discard(model)
        self._send(Unload(model), b"", model, None)

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(CLEANS_EVERY_S)
            now = time.time()
            try:
                self.store.forget_results(fetched_before=now - KEPT_FETCHED_S, finished_before=now - KEPT_S)
                self.shelf.drop_expired(now - KEPT_S)
                self.end_lapsed()
                self.close_gaps()
                for model in self.store.unused_models(now - KEPT_S):
                    if model not in self._loaded:
                        for folder in (self._forget(model), *self.shelf.forget_ephemeral(model)):
                            shutil.rmtree(folder, ignore_errors=True)
            except (sqlite3.Error, OSError) as error:  # a full disk may have space again the next time
                _log.error("--root %s was not cleaned: %s", self.root, error)

    def _later(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
