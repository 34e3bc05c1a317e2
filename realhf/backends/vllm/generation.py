"""Generation by a vLLM server over HTTP, with weight updates.

New weights are transferred as a safetensors file in memory (memfd), which the server opens through
/proc. So nothing is left on disk, however the processes end. A server without our extension gets a
temporary folder. On the same GPU they are copied there (``device_transfer``), and a server on other
GPUs may get them from the trainer's GPU (``broadcast``).

Weights are updated between two tokens of running requests: the server is paused, its workers load
the weights, and it resumes. The server reports for each token which version sampled it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save
from torch import Tensor

from realhf.api.config import GenConfig
from realhf.api.generation import Done, GroupSeat, HeldTensor, TensorSlot
from realhf.api.keys import TORCH_NAMES, dtype_tag
from realhf.api.model import GenOutput, GenRequest
from realhf.api.trace import WEIGHTS, Tracer
from realhf.backends.embedded.sampling import check_request
from realhf.backends.vllm.api import (
    EXTENSION,
    Completion,
    ServedModel,
    VllmApi,
    VllmError,
    position_seed,
)
from realhf.backends.vllm.broadcast.payloads import (
    BroadcastError,
    build_init_info,
    build_update_info,
    sort_for_sending,
)
from realhf.backends.vllm.device_transfer import (
    NO_COMMON_GPU,
    ServerGpu,
    WorkerCall,
    find_common_gpus,
    transfer_calls,
)
from realhf.base import event_loops, process_clock
from realhf.base.hf_config import tensor_shapes

TIED_HEAD = "lm_head.weight"
"""Name of the head, which a model with tied embeddings may lack."""
Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Shapes, *, on_host: bool = True
) -> dict[str, Tensor]:
    """Return the tensors in ``expected``, contiguous and, if ``on_host``, on the CPU.

    A head that is tied to the embedding is not expected and is dropped. Raises ValueError naming a
    tensor that is missing, unknown or of another shape.
    """
    _check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    known = {name: tensors[name].detach() for name in expected}
    return {
        name: (tensor.cpu() if on_host else tensor).contiguous() for name, tensor in known.items()
    }


def _check_shapes(given: Shapes, expected: Shapes) -> None:
    """Raise ValueError naming a tensor that is missing, unknown or of another shape."""
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys() - {TIED_HEAD})
    if missing or unknown:
        raise ValueError(
            f"weights do not fit the server's model: missing {missing[:3]}, unknown {unknown[:3]}"
        )
    for name, shape in expected.items():
        if given[name] != shape:
            raise ValueError(f"weights: {name} has shape {given[name]}, the server's model {shape}")


def parse_server_digests(answers: Sequence[Any], names: Sequence[str]) -> dict[str, HeldTensor]:
    """Return the digests of the tensors of a server with a single worker; {} for several workers.

    ``answers`` are those of the workers to ``weight_digests``. A tensor that the server's model
    renames or fuses with others has an empty digest.
    """
    if len(answers) != 1:
        return {}
    digests = answers[0]["held"]
    unproven = frozenset(answers[0].get("unproven", ()))
    proven = {
        name: HeldTensor(dtype_tag(digests[name][0]), digests[name][1])
        for name in names
        if name in digests
    }
    return proven | {
        name: HeldTensor("", "") for name in names if name in unproven and name not in digests
    }


@contextlib.contextmanager
def file_in_memory(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yield the path of a safetensors file in memory, which processes of the same user can open in
    the block."""
    descriptor = os.memfd_create("realhf-weights", os.MFD_CLOEXEC)
    try:
        view = memoryview(save(tensors))
        done = 0
        while done < len(view):
            done += os.write(descriptor, view[done:])
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_on_disk(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yield a temporary folder with ``model.safetensors``, which is removed after the block."""
    with tempfile.TemporaryDirectory(prefix="realhf-weights-") as folder:
        (Path(folder) / "model.safetensors").write_bytes(save(tensors))
        yield folder


_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_CALL_TIMEOUT_S = 30.0
"""Timeout of calls other than generation and weight updates, seconds."""
_ABORT_EVERY_S = 0.2
"""Seconds between two attempts to abort a request."""
_ABORT_TIMEOUT_S = 10.0
"""Seconds after which no further attempt to abort a request is made."""


@dataclass
class _VllmRequest:
    """A request that is not finished."""

    id: str
    """Id of the request on the server."""
    request: GenRequest
    """Prefix and seed."""
    config: GenConfig
    """Sampling parameters."""
    stop_ids: tuple[int, ...]
    """Token ids that end the turn."""
    done: Done
    """Callback for the result."""
    task: asyncio.Task[None] | None = None
    """Exchange with the server, None while the request waits for weights."""
    aborted: bool = False
    """Whether the request was aborted."""


class VllmGenerator:
    """``StreamingGenerator`` that samples on a vLLM server.

    With ``kv_policy`` "recompute" every weight update clears the server's cache. A request with a
    seed gets the same tokens from the same server for the same prefix, but different tokens from
    the embedded engine. The server applies ``top_p``, ``top_k`` and ``min_new_tokens``; its
    log-probabilities are then those of the truncated distribution. A server without our extension
    loads weights from a temporary folder.
    """

    def __init__(
        self,
        url: str,
        *,
        version: int = -1,
        kv_policy: str = "recompute",
        max_requests: int = 256,
        request_timeout_s: float = 600.0,
        update_timeout_s: float = 120.0,
        pause_timeout_s: float = _CALL_TIMEOUT_S,
        tracer: Tracer | None = None,
    ) -> None:
        """Connect to the server and wait for its answer.

        ``version`` is the version of the weights that the server was started with; with -1 requests
        wait for ``load_weights``. Raises VllmError or TimeoutError naming the missing feature of
        the server.
        """
        self._clear_cache = kv_policy == "recompute"
        self._request_timeout_s = request_timeout_s
        self._update_timeout_s = update_timeout_s
        self._pause_timeout_s = pause_timeout_s
        self._tracer = tracer or Tracer()
        self._version = version
        self._requests: dict[int, _VllmRequest] = {}
        self._paused = False
        self._broken = False
        """Whether the server has weights of two versions, so that it must not sample."""
        self._failure: VllmError | None = None
        self._expected: Shapes | None = None
        self._update_lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("generated_tokens", "prefill_tokens", "reused_tokens", "busy_s"), 0.0
        )
        self._weight_pause_ms = 0.0
        self._busy_since: float | None = None
        self._name = uuid.uuid4().hex
        self._number = 0
        self._closed = False
        self._loop = event_loops.ClockedLoop()
        # Weights and aborts must get through while every generating connection is in use.
        self._api = VllmApi(url, connections=max_requests + 8, timeout_s=_CALL_TIMEOUT_S)
        self._slots = asyncio.Semaphore(max_requests)
        self._thread = threading.Thread(target=self._run, name="vllm-generator", daemon=True)
        self._thread.start()
        try:
            self._model = self._call(self._connect(version), _CALL_TIMEOUT_S)
            self._places = self._find_places()
            self._common_gpus = self._find_common_gpus()
        except BaseException:
            self.close()
            raise
        if Path(self._model.root).is_dir():
            self._expected = tensor_shapes(Path(self._model.root)) or None

    @property
    def version(self) -> int:
        """See ``StreamingGenerator``."""
        return self._version

    @property
    def model(self) -> ServedModel:
        """The model that the server serves."""
        return self._model

    def describe_server(self) -> dict[str, Any]:
        """Return the server's versions, device, model runner and dtypes, as far as it reports
        them."""
        known = {"url": self._api.url, "model": self._model.root, "device": self._model.device}
        if self._model.extension != EXTENSION:
            return known
        try:
            answers = self._call(
                self._api.on_workers("describe", {}, _CALL_TIMEOUT_S), _CALL_TIMEOUT_S
            )
        except (VllmError, TimeoutError) as error:
            _log.warning("the server does not describe itself: %s", error)
            return known
        return {**known, **answers[0]} if answers else known

    def submit(
        self, request: GenRequest, config: GenConfig, stop_ids: Sequence[int], done: Done
    ) -> None:
        """See ``StreamingGenerator``. Raises ValueError on an empty prefix or an option out of
        range."""
        check_request(request, config)
        self._post(self._register, _VllmRequest("", request, config, tuple(stop_ids), done))

    def abort(self, slots: Sequence[int]) -> None:
        """See ``StreamingGenerator``."""
        self._post(self._abort, tuple(slots))

    def free(self, slots: Sequence[int]) -> None:
        """Do nothing: the server evicts cached sequences itself."""

    def pause(self, timeout_s: float) -> None:
        """See ``StreamingGenerator``. If the server does not pause in time, it is resumed."""
        with self._update_lock:
            try:
                self._call(self._api.pause(clear_cache=False, timeout_s=timeout_s), timeout_s)
            except BaseException:
                self._post(self._spawn, self._api.resume())
                raise
            self._paused = True

    def resume(self) -> None:
        """Resume the server after ``pause``."""
        with self._update_lock:
            if not self._broken:
                self._call(self._api.resume(), _CALL_TIMEOUT_S)
            self._paused = False

    def load_weights(
        self, version: int, tensors: Mapping[str, Tensor], *, again: bool = False
    ) -> None:
        """See ``StreamingGenerator``. Raises VllmError if the server could not load the weights.

        If the server may then have a mixture of old and new weights, all later requests fail.
        """
        with self._update_lock:
            if not self._needs(version, again):
                return
            shapes = self._expected or {name: tuple(t.shape) for name, t in tensors.items()}
            checked_tensors = check_tensors(tensors, shapes, on_host=not self._common_gpus)
            with self._tracer.span(f"{WEIGHTS}/vllm", version=version):
                self._load(version, checked_tensors)
            self._expected = {name: tuple(t.shape) for name, t in checked_tensors.items()}

    def count_ranks(self) -> tuple[int, str]:
        """See ``GroupMember``."""
        if not self._places:
            return 0, "does not compute on a GPU of CUDA with our worker extension"
        first = self._places[0]
        if first.get("backend") != "nccl":  # a server of ``vllm_url`` may have an older extension
            return 0, (
                "shares a GPU with the trainer, or was started without "
                """--weight-transfer-config '{"backend": "nccl"}'"""
            )
        if first["replicas"] != 1 or first["workers"] != len(self._places):
            return 0, f"has {first['replicas']} data-parallel replicas, which no broadcast reaches"
        return len(self._places), ""

    def take_broadcast(
        self, version: int, slots: Sequence[TensorSlot], seat: GroupSeat, *, again: bool = False
    ) -> None:
        """See ``GroupMember``. Raises BroadcastError if the weights did not arrive, after which
        only ``load_weights`` or another broadcast lets the server continue, and VllmError or
        TimeoutError if the server does not answer; then all later requests fail."""
        with self._update_lock:
            # An engine that needs nothing takes part nevertheless: the others wait for it.
            self._needs(version, again)
            shapes = {slot.name: slot.shape for slot in slots}
            _check_shapes(shapes, self._expected or shapes)
            tensors = sort_for_sending(
                (slot.name, TORCH_NAMES[slot.dtype], slot.shape) for slot in slots
            )
            if seat.unique_id:
                self._join_group(seat)
            arguments = {
                "version": str(version),
                "update_info": build_update_info(tensors),
                "timeout_s": seat.timeout_s,
            }
            with self._tracer.span(f"{WEIGHTS}/vllm", version=version):
                self._commit(
                    version,
                    iter([("take_broadcast", arguments)]),
                    broadcast_s=seat.timeout_s,
                )
            self._expected = shapes

    def _needs(self, version: int, again: bool) -> bool:
        """Return whether a version has to be loaded. Raises ValueError for an older one, and the
        error after which the server is not used any more."""
        if version == self._version and not again and not self._broken:
            return False
        if version < self._version:
            raise ValueError(f"weights of version {version} come after version {self._version}")
        if self._failure is not None:
            raise self._failure
        return True

    def _join_group(self, seat: GroupSeat) -> None:
        """Let the server's workers join a group. Raises BroadcastError if one cannot."""
        info = build_init_info(seat.unique_id, seat.rank_offset, seat.world_size, seat.pack_bytes)
        limit = seat.timeout_s + _CALL_TIMEOUT_S
        try:
            answers = self._call(
                self._api.on_workers("join_group", {"init_info": info}, limit), limit
            )
        except TimeoutError as error:
            # vLLM waits for the missing rank for ever, so that this server is of no use any more.
            failure = VllmError(
                f"the server's workers and the trainer did not meet over NCCL ({error}); "
                "async_rl.weights=shm sends weights through the host's memory"
            )
            self._post(self._fail, failure)
            raise failure from None
        for answer in answers:
            if not answer["ok"]:
                raise BroadcastError(f"{self._api.url} did not join the group: {answer['error']}")

    def weight_digests(self, names: Sequence[str]) -> dict[str, HeldTensor]:
        """See ``StreamingGenerator``. Raises VllmError or TimeoutError.

        Returns {} for a server without our extension, and for one with several workers, each of
        which has a part of the weights.
        """
        if self._model.extension != EXTENSION:
            return {}
        with self._update_lock:
            answers = self._call(
                self._api.on_workers("weight_digests", {}, self._update_timeout_s),
                self._update_timeout_s,
            )
        return parse_server_digests(answers, names)

    def replica(self) -> None:
        """See ``StreamingGenerator``. Returns None: a server has memory for one policy only."""

    def stats(self) -> dict[str, float]:
        """See ``StreamingGenerator``.

        ``busy_s`` is the time with at least one running request, ``weight_pause_ms`` the time that
        the last weight update stopped generation.
        """
        since = self._busy_since
        busy = self._counts["busy_s"] + (process_clock.now() - since if since is not None else 0.0)
        requests = list(self._requests.values())
        running = sum(entry.task is not None for entry in requests)
        return {
            **self._counts,
            "busy_s": busy,
            "running": float(running),
            "waiting": float(len(requests) - running),
            "weight_pause_ms": self._weight_pause_ms,
        }

    def close(self) -> None:
        """Stop the generator. Unfinished requests get an error. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError, VllmError):
            self._call(self._end_requests(), _CALL_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)

    # ---- weight updates, on the caller's thread

    def _load(self, version: int, tensors: dict[str, Tensor]) -> None:
        """Transfer weights by the fastest way that the server supports."""
        if self._common_gpus:
            with transfer_calls(version, tensors, self._common_gpus) as calls:
                self._commit(version, calls)
            return
        if self._model.extension == EXTENSION:
            with file_in_memory(tensors) as path:
                self._commit(
                    version, iter([("take_weights", {"path": path, "version": str(version)})])
                )
            return
        if self._model.device == "cpu" and TIED_HEAD not in tensors:
            # On the CPU vLLM 0.32 computes with a packed copy of the head, which its reload does
            # not update.
            raise VllmError(
                f"{self._api.url} cannot update a tied head: it must run with "
                f"--worker-extension-cls {EXTENSION}"
            )
        with folder_on_disk(tensors) as folder:
            self._commit(version, iter([("reload_weights", {"weights_path": folder})]))

    def _find_places(self) -> list[dict[str, Any]]:
        """Return where each of the server's workers computes; [] if not on CUDA or without our
        extension."""
        if self._model.extension != EXTENSION or self._model.device != "cuda":
            return []
        return self._call(self._api.on_workers("place", {}, _CALL_TIMEOUT_S), _CALL_TIMEOUT_S)

    def _find_common_gpus(self) -> list[ServerGpu]:
        """Return the server's GPUs if it can receive weights from this process by CUDA IPC,
        otherwise []."""
        gpus = find_common_gpus(self._places)
        if self._places and not gpus and self._places[0].get("backend") != "nccl":
            _log.warning(
                "%s: weights go through the host's memory, because %s",
                self._api.url,
                NO_COMMON_GPU,
            )
        return gpus

    def _commit(
        self, version: int, calls: Iterator[WorkerCall], *, broadcast_s: float | None = None
    ) -> None:
        """Run the update on the generator's thread. Raises VllmError if a worker rejected it, or
        BroadcastError with ``broadcast_s``, the seconds that a broadcast may take."""
        each_s = self._update_timeout_s + (broadcast_s or 0.0)
        limit = each_s + self._pause_timeout_s + _CALL_TIMEOUT_S
        swap = self._swap_weights(version, calls, each_s, repairable=broadcast_s is not None)
        for answer in self._call(swap, limit):
            if answer is not None and not answer["ok"]:
                raise (VllmError if broadcast_s is None else BroadcastError)(
                    f"{self._api.url} did not take version {version}: {answer['error']}"
                )

    async def _swap_weights(
        self, version: int, calls: Iterator[WorkerCall], limit_s: float, *, repairable: bool
    ) -> list[Any]:
        """Pause sampling, replace all weights or none, and resume.

        If only some were replaced, the server stays paused until the next update
        (``repairable``), or all requests fail.
        """
        start_s = time.monotonic()
        try:
            await self._api.pause(clear_cache=self._clear_cache, timeout_s=self._pause_timeout_s)
            answers = await self._call_workers(calls, limit_s)
            if all(answer is None or answer["ok"] for answer in answers):
                await self._api.set_version(str(version))
                self._version = version
                self._broken = False
            elif repairable:
                self._broken = True
            elif any(answer["touched"] or answer["ok"] for answer in answers if answer):
                self._fail(VllmError(f"{self._api.url} has weights of two versions: {answers}"))
        finally:
            await self._resume_server()
            self._weight_pause_ms = (time.monotonic() - start_s) * 1e3
        self._start_waiting()
        return answers

    async def _resume_server(self) -> None:
        if self._paused or self._broken:
            return
        try:
            await self._api.resume()
        except (VllmError, TimeoutError) as error:
            self._fail(VllmError(f"{self._api.url} does not continue after an update: {error}"))

    async def _call_workers(self, calls: Iterator[WorkerCall], limit_s: float) -> list[Any]:
        """Make the calls to the workers one by one. Return the results of the last call, or of the
        first one that a worker rejected. ``limit_s`` bounds each call."""
        answers: list[Any] = []
        try:
            while (step := await asyncio.to_thread(next, calls, None)) is not None:
                answers = await self._api.on_workers(*step, limit_s)
                if any(answer is not None and not answer["ok"] for answer in answers):
                    break
        except Exception as error:
            self._fail(VllmError(f"{self._api.url} may have weights of two versions: {error}"))
            raise
        return answers

    # ---- requests, on the generator's thread

    def _register(self, entry: _VllmRequest) -> None:
        """Register a request. It starts at once, or when the first weights arrive."""
        slot = entry.request.slot
        if self._failure is not None or self._closed:
            self._call_done(
                entry, self._failure or VllmError(f"the client of {self._api.url} is closed")
            )
        elif slot in self._requests:
            self._call_done(entry, ValueError(f"generate: slot {slot} has a request already"))
        else:
            self._number += 1
            entry.id = f"{self._name}-{self._number}"
            self._requests[slot] = entry
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start all waiting requests if the server has weights."""
        if self._version < 0:
            return
        for entry in self._requests.values():
            if entry.task is None:
                entry.task = self._loop.create_task(self._run_request(entry))
        if self._busy_since is None and self._requests:
            self._busy_since = process_clock.now()

    async def _run_request(self, entry: _VllmRequest) -> None:
        """Run a request and report its result or error."""
        outcome: GenOutput | Exception
        try:
            outcome = await self._exchange(entry)
        except asyncio.CancelledError:
            given_up = (
                GenOutput([], [], [], "aborted") if entry.aborted and not self._closed else None
            )
            outcome = (
                self._failure or given_up or VllmError(f"the client of {self._api.url} was closed")
            )
        except Exception as error:
            outcome = self._failure or error
        self._finish(entry, outcome)

    async def _exchange(self, entry: _VllmRequest) -> GenOutput:
        """Send a request to the server and return its output."""
        request = entry.request
        config = entry.config
        if request.grammar:
            # Its log-probabilities would be those under the mask alone.
            raise ValueError("generate: engine.name=vllm follows no grammar; use embedded")
        room = self._model.max_tokens - len(request.token_ids)
        count = min(room, request.limit_turn(config.max_new_tokens))
        if count < 1:
            return GenOutput([], [], [], "length")
        params = {
            "max_tokens": count,
            "min_tokens": min(max(0, config.min_new_tokens - request.sampled), count),
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "stop_token_ids": list(entry.stop_ids),
            "ignore_eos": True,
        }
        if request.seed is not None:
            params["seed"] = position_seed(request.seed, len(request.token_ids))
        async with self._slots:
            if entry.aborted:
                return GenOutput([], [], [], "aborted")
            completion = await self._api.generate(
                entry.id, request.token_ids, params, self._request_timeout_s
            )
        return self._to_output(entry, completion)

    def _to_output(self, entry: _VllmRequest, completion: Completion) -> GenOutput:
        """Convert the server's result of a request, and update the counters."""
        if self._failure is not None:
            raise self._failure
        reason = (
            "aborted"
            if completion.finish_reason == "abort" and entry.aborted
            else completion.finish_reason
        )
        if reason not in ("stop", "length", "aborted"):
            raise VllmError(
                f"{self._api.url} ended a request that was not aborted, with the reason "
                f"{completion.finish_reason}"
            )
        try:
            versions = [int(label) for label in completion.versions]
        except ValueError:
            raise VllmError(
                f"{self._api.url} reports weights that another client has labelled: "
                f"{completion.versions}"
            ) from None
        self._counts["generated_tokens"] += len(completion.token_ids)
        self._counts["prefill_tokens"] += completion.prompt_tokens - completion.cached_tokens
        self._counts["reused_tokens"] += completion.cached_tokens
        return GenOutput(completion.token_ids, completion.logprobs, versions, reason)

    def _abort(self, slots: tuple[int, ...]) -> None:
        """Abort the requests of these slots."""
        for slot in slots:
            entry = self._requests.get(slot)
            if entry is None or entry.aborted:
                continue
            entry.aborted = True
            if entry.task is None:
                self._finish(entry, GenOutput([], [], [], "aborted"))
            else:
                self._spawn(self._abort_until_ended(entry))

    async def _abort_until_ended(self, entry: _VllmRequest) -> None:
        """Repeat the abort until the request has ended: the server may not have received the
        request yet."""
        assert entry.task is not None
        deadline = process_clock.now() + _ABORT_TIMEOUT_S
        while not entry.task.done():
            if process_clock.now() > deadline:
                entry.task.cancel()
                return
            with contextlib.suppress(VllmError, TimeoutError):
                await self._api.abort(entry.id)
            await asyncio.wait([entry.task], timeout=_ABORT_EVERY_S)

    def _finish(self, entry: _VllmRequest, outcome: GenOutput | Exception) -> None:
        """Remove a finished request and report its result or error."""
        if self._requests.get(entry.request.slot) is entry:
            del self._requests[entry.request.slot]
        if (
            not any(other.task is not None for other in self._requests.values())
            and self._busy_since is not None
        ):
            self._counts["busy_s"] += process_clock.now() - self._busy_since
            self._busy_since = None
        self._call_done(entry, outcome)

    def _call_done(self, entry: _VllmRequest, outcome: GenOutput | Exception) -> None:
        """Call the callback of a request; log its errors."""
        try:
            entry.done(outcome)
        except Exception:
            _log.exception("the receiver of the output for slot %d raised", entry.request.slot)

    def _fail(self, error: VllmError) -> None:
        """Fail all current and later requests with an error."""
        self._failure = error
        _log.error("%s", error)
        for entry in list(self._requests.values()):
            if entry.task is None:
                self._finish(entry, error)
            else:
                entry.task.cancel()

    # ---- the generator's thread

    async def _connect(self, version: int) -> ServedModel:
        """Check the server and prepare it; return its model."""
        model = await self._api.model()
        # An earlier client may have paused the server and then been killed.
        await self._api.resume()
        if version >= 0:
            await self._api.set_version(str(version))
        return model

    async def _end_requests(self) -> None:
        """End all requests and close the connections."""
        requests = list(self._requests.values())
        for entry in requests:
            if entry.task is None:
                self._finish(entry, VllmError(f"the client of {self._api.url} was closed"))
            else:
                entry.task.cancel()
        await asyncio.gather(
            *(entry.task for entry in requests if entry.task is not None), return_exceptions=True
        )
        await self._api.close()

    def _run(self) -> None:
        """Run the event loop of the generator's thread."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task whose failure is only logged."""
        task = self._loop.create_task(work)
        task.add_done_callback(_log_failure)

    def _post(self, function: Any, argument: Any) -> None:
        """Call a function on the generator's thread. Raises VllmError after ``close``."""
        if self._closed:
            raise VllmError(f"the client of {self._api.url} is closed")
        self._loop.call_soon_threadsafe(function, argument)

    def _call(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Run ``work`` on the generator's thread and return its result. Raises its errors, or
        TimeoutError."""
        future: Future[_T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return event_loops.wait_for_future(future, timeout_s + 1.0)
        except TimeoutError as error:
            future.cancel()
            raise TimeoutError(
                f"{self._api.url}: {str(error) or f'no end within {timeout_s:g} s'}"
            ) from None


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("a call to the vLLM server failed: %s", error)
