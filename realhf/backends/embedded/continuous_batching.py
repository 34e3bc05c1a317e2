"""Continuous batching: requests join and leave between two tokens, on the engine's own thread.

Other threads only record their requests under the lock. Between two steps the engine's thread
processes them in this order: aborts, freed slots, new weights, new requests. A pause stops it
before the next step.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from realhf.api.config import GenConfig
from realhf.api.generation import Done, HeldTensor
from realhf.api.model import GenOutput, GenRequest
from realhf.api.trace import GENERATE, WEIGHTS, Tracer
from realhf.backends.embedded.compute_threads import threads as compute_threads
from realhf.backends.embedded.decode_core import DecodeCore, DecodeTurn, remaining_tokens
from realhf.backends.embedded.memory import oom_message
from realhf.backends.embedded.sampling import check_request, seed_stream
from realhf.backends.embedded.token_masks import GrammarProblem, TokenMask, TokenMasks
from realhf.backends.embedded.weight_copy import copy_weights, digest_weights
from realhf.base import process_clock

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 30.0
"""Time in seconds that ``close`` waits for the engine's thread to end."""
_SPAN_NS = 100_000_000
"""Maximum duration in nanoseconds of consecutive steps that are reported to the tracer as one
span."""


@dataclass
class _PendingUpdate:
    """A weight update that waits for the engine's thread."""

    version: int
    """Version of the weights."""
    tensors: Mapping[str, Tensor]
    """The weights, by name."""
    again: bool
    """Whether to load the version even if it is already loaded."""
    finished: threading.Event = field(default_factory=threading.Event)
    """Set when the update is complete or has failed."""
    error: BaseException | None = None
    """Error of a failed update; None otherwise."""


@dataclass
class _StepSpan:
    """Consecutive steps that have not been reported to the tracer yet."""

    start_ns: int
    """Start of the first step in nanoseconds of wall-clock time."""
    tokens: int
    """Total number of tokens generated before the first step."""
    end_ns: int = 0
    """End of the last step in nanoseconds of wall-clock time."""


class ContinuousGenerator:
    """``StreamingGenerator`` with continuous batching.

    Args:
        model: The model. The generator owns its parameters from now on.
        kv_policy: After a weight update, ``recompute`` computes every prefix again before its next token,
            ``keep`` continues with the keys and values of the old weights.
        max_rows: Maximum number of cached sequences, in progress or between two turns. Others wait.
        threads: Number of compute threads.
        version: Policy version of the model's weights; -1 for none, so that requests wait for
            ``load_weights``.
        pause_timeout_s: Time that ``load_weights`` waits for the current step to end, seconds.
        tracer: Receives spans of generation and weight updates.
        max_bytes: Function that returns the maximum size of keys and values in bytes, None for no limit. It
            is called whenever nothing is cached.
        masks: Factory of the token masks of requests with a grammar; None if such requests are refused.

    Requests without a seed use random numbers from the operating system.
    """

    def __init__(
        self,
        model: Any,
        *,
        kv_policy: str = "recompute",
        max_rows: int = 256,
        threads: int = 1,
        version: int = 0,
        pause_timeout_s: float = 60.0,
        tracer: Tracer | None = None,
        max_bytes: Callable[[], int | None] = lambda: None,
        masks: TokenMasks | None = None,
    ) -> None:
        self._model = model.eval()
        self._kv_policy = kv_policy
        self._threads = threads
        self._compute = compute_threads(threads)
        self._tracer = tracer or Tracer()
        self._masks = masks
        self._core = DecodeCore(model, max_rows=max_rows, max_bytes=max_bytes, masks=masks)
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._version = version
        self._pause_timeout_s = pause_timeout_s
        self._condition = threading.Condition()
        self._waiting: deque[tuple[DecodeTurn, Done]] = deque()
        self._running: dict[int, tuple[DecodeTurn, Done]] = {}  # By slot.
        self._to_abort: set[int] = set()
        self._to_free: set[int] = set()
        # Slots with a request in progress, to be freed when it ends.
        self._free_at_end: set[int] = set()
        self._weights: _PendingUpdate | None = None
        self._paused = False  # A pause is requested.
        self._parked = False  # The engine's thread has stopped for the pause.
        self._closing = False
        self._busy_s = 0.0
        self._weight_pause_ms = 0.0
        self._pause_start_ns = (
            0  # Wall-clock ns of the start of a weight update that requests wait for, otherwise 0.
        )
        self._span: _StepSpan | None = None
        self._thread = threading.Thread(target=self._serve, name="generation", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """See ``StreamingGenerator``."""
        return self._version

    def submit(
        self, request: GenRequest, config: GenConfig, stop_ids: Sequence[int], done: Done
    ) -> None:
        """See ``StreamingGenerator``. Raises RuntimeError after ``close``.

        ``done`` receives a ValueError if the request has no tokens, an option is out of range, its
        slot already has a request in progress, or its grammar cannot be followed. It receives the
        error of a failed forward pass.
        """
        stream = seed_stream(
            int.from_bytes(os.urandom(8), "little") if request.seed is None else request.seed
        )
        try:
            # Here and not on the engine's thread: compiling a grammar may take long.
            mask = self._start_mask(request, config)
        except GrammarProblem as error:
            done(error)
            return
        budget = remaining_tokens(request, config, self._core.limit)
        turn = DecodeTurn(request, config, frozenset(stop_ids), budget, stream, mask=mask)
        with self._condition:
            if self._closing:
                raise RuntimeError("the generation engine is closed")
            self._waiting.append((turn, done))
            self._condition.notify_all()

    def _start_mask(self, request: GenRequest, config: GenConfig) -> TokenMask | None:
        """Return the token mask of a request; None if it has no grammar. Raises GrammarProblem."""
        if not request.grammar:
            return None
        if self._masks is None:
            raise GrammarProblem("generate: a grammar needs rollout.agent_structured=constrain")
        if config.min_new_tokens:
            raise GrammarProblem(
                "generate: gen.min_new_tokens bans the stop ids that a grammar may require; set 0"
            )
        sampled = request.token_ids[len(request.token_ids) - request.sampled :]
        return self._masks.start(request.grammar, sampled)

    def abort(self, slots: Sequence[int]) -> None:
        """See ``StreamingGenerator``. Slots without a request are ignored."""
        with self._condition:
            self._to_abort.update(slots)
            self._condition.notify_all()

    def free(self, slots: Sequence[int]) -> None:
        """See ``StreamingGenerator``. The slot of a request in progress is freed when it ends."""
        with self._condition:
            self._to_free.update(slots)
            self._condition.notify_all()

    def pause(self, timeout_s: float) -> None:
        """See ``StreamingGenerator``. If it raises TimeoutError, the engine is not paused."""
        with self._condition:
            was_paused = self._paused
            self._paused = True
            self._condition.notify_all()
            if not self._wait_for(lambda: self._parked or self._closing, timeout_s):
                self._paused = was_paused
                self._condition.notify_all()
                raise TimeoutError(
                    f"the generation engine did not finish its step within {timeout_s:g} s"
                )

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition; return whether it became true in time. Called under the lock."""
        return process_clock.wait(
            lambda left_s: self._condition.wait_for(condition, left_s), timeout_s
        )

    def resume(self) -> None:
        """Continue after ``pause``. Does nothing if the engine is not paused."""
        with self._condition:
            self._paused = False
            self._parked = False
            self._condition.notify_all()

    def load_weights(
        self, version: int, tensors: Mapping[str, Tensor], *, again: bool = False
    ) -> None:
        """See ``StreamingGenerator``. Raises TimeoutError if the current step does not end in
        time."""
        update = _PendingUpdate(version, tensors, again)
        with self._condition:
            if not self._wait_for(
                lambda: self._weights is None or self._closing, self._pause_timeout_s
            ):
                raise TimeoutError(
                    f"the generation engine was busy with other weights for "
                    f"{self._pause_timeout_s:g} s"
                )
            if self._closing:
                raise RuntimeError("the generation engine is closed")
            self._weights = update
            self._condition.notify_all()
        if not process_clock.wait(update.finished.wait, self._pause_timeout_s):
            with self._condition:
                withdrawn = self._weights is update
                if withdrawn:
                    self._weights = None
            if withdrawn:
                raise TimeoutError(
                    f"the generation engine's step did not end within {self._pause_timeout_s:g} s"
                )
            update.finished.wait()  # The engine is already copying the weights, which ends without other threads.
        if update.error is not None:
            raise update.error

    def weight_digests(self, names: Sequence[str]) -> dict[str, HeldTensor]:
        """See ``StreamingGenerator``. Computed on the caller's thread while generation
        continues."""
        return digest_weights(self._model, names)

    def replica(self) -> ContinuousGenerator | None:
        """See ``StreamingGenerator``. None if memory does not suffice for a second copy of the
        weights.

        The compute threads of the replica compete with those of this engine for the cores.
        """
        try:
            model = copy.deepcopy(self._model)
        except (MemoryError, RuntimeError) as error:
            if (message := oom_message(error)) is None:
                raise
            _log.warning("there is no memory for a second copy of the weights: %s", message)
            return None
        return ContinuousGenerator(
            model,
            kv_policy=self._kv_policy,
            max_rows=self._max_rows,
            threads=self._threads,
            version=self._version,
            pause_timeout_s=self._pause_timeout_s,
            max_bytes=self._max_bytes,
            masks=self._masks,
        )

    def stats(self) -> dict[str, float]:
        """See ``StreamingGenerator``.

        ``weight_pause_ms`` is the time that the last weight update stopped generation: until the
        next token was sampled if a request was in progress, otherwise until the weights were
        copied.
        """
        core = self._core
        with self._condition:
            return {
                "generated_tokens": float(core.generated_tokens),
                "prefill_tokens": float(core.computed_tokens),
                "reused_tokens": float(core.reused_tokens),
                "busy_s": self._busy_s,
                "weight_pause_ms": self._weight_pause_ms,
                "running": float(len(self._running)),
                "waiting": float(len(self._waiting)),
            }

    def close(self) -> None:
        """See ``StreamingGenerator``. Raises TimeoutError if the thread does not end in time."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the generation engine's thread did not end within {_CLOSE_TIMEOUT_S:g} s"
            )

    def _serve(self) -> None:
        """Run the engine's thread."""
        error: BaseException = RuntimeError("the generation engine was closed")
        try:
            self._compute.use_in_this_thread()
            while self._run_round():
                pass
        except BaseException as unexpected:
            _log.exception("the generation engine's thread ends")
            error = unexpected
        self._fail_all(error)

    def _run_round(self) -> bool:
        """Process the requests of other threads and run one step. Return False when the engine
        closes."""
        with self._condition:
            self._wait_for_work()
            if self._closing:
                return False
            paused = self._paused
            update = self._weights
            self._weights = None
            results = self._end_aborted()
            self._free_slots()
            self._condition.notify_all()
        for done, result in results:
            _call_done(done, result)
        if update is not None:
            self._apply_update(update)
        if paused or self._version < 0:
            return True
        try:
            self._start_waiting()
            if self._running:
                self._step()
        except Exception as error:
            _log.exception(
                "a step of generation failed with %d requests in play", len(self._running)
            )
            self._core.reset()
            self._fail_running(error)
        return True

    def _wait_for_work(self) -> None:
        """Wait until there is something to do. Called under the lock. A requested pause starts
        here."""
        while True:
            if self._paused and not self._parked:
                self._parked = True
                self._condition.notify_all()
            has_requests = self._weights is not None or self._to_abort or self._to_free
            can_step = not self._paused and self._version >= 0 and (self._running or self._waiting)
            if self._closing or has_requests or can_step:
                return
            self._report_span()
            self._condition.wait()

    def _end_aborted(self) -> list[tuple[Done, GenOutput]]:
        """Remove aborted requests from the running and waiting ones; return their callbacks and
        outputs."""
        slots = self._to_abort
        self._to_abort = set()
        ended = [self._running.pop(slot) for slot in slots if slot in self._running]
        self._core.leave([turn for turn, _ in ended])
        self._to_free |= self._free_at_end & slots
        self._free_at_end -= slots
        still_waiting: deque[tuple[DecodeTurn, Done]] = deque()
        for turn, done in self._waiting:
            (ended if turn.slot in slots else still_waiting).append((turn, done))
        self._waiting = still_waiting
        for turn, _ in ended:
            turn.reason = "aborted"
        return [(done, turn.output()) for turn, done in ended]

    def _free_slots(self) -> None:
        """Free the requested slots; those with a request in progress are freed when it ends."""
        idle = self._to_free - self._running.keys()
        self._to_free -= idle
        self._free_at_end |= self._to_free
        self._to_free = set()
        self._core.free(idle)

    def _apply_update(self, update: _PendingUpdate) -> None:
        """Load new weights into the model and complete the update."""
        start_ns = time.time_ns()
        try:
            if update.version < self._version:
                raise ValueError(
                    f"weights of version {update.version} after those of version {self._version}"
                )
            if update.version > self._version or update.again:
                self._report_span()
                copy_weights(self._model, update.tensors)
                self._version = update.version
                if self._kv_policy == "recompute":
                    self._core.forget_tokens()
                # If a request is in progress, the pause ends with its next token (see _step).
                self._pause_start_ns = start_ns if self._running and not self._paused else 0
                self._weight_pause_ms = (time.time_ns() - start_ns) * 1e-6
                self._tracer.record(
                    f"{WEIGHTS}/copy", start_ns, time.time_ns(), version=update.version
                )
        except Exception as error:
            update.error = error
        update.finished.set()

    def _start_waiting(self) -> None:
        """Start waiting requests until the cache has no free row."""
        with self._condition:
            n_free = min(len(self._waiting), self._max_rows - len(self._running))
            candidates = [self._waiting.popleft() for _ in range(n_free)]
        valid: dict[int, tuple[DecodeTurn, Done]] = {}
        for turn, done in candidates:
            error = self._find_error(turn, valid)
            if error is not None:
                _call_done(done, error)
            elif turn.budget < 1:
                turn.reason = "length"
                _call_done(done, turn.output())
            else:
                valid[turn.slot] = (turn, done)
        if valid:
            with self._condition:
                self._running.update(valid)
            n_started = self._core.join([turn for turn, _ in valid.values()])
            with self._condition:
                # Those without a row go back to the front of the queue, in their order.
                not_started = [self._running.pop(slot) for slot in [*valid][n_started:]]
                self._waiting.extendleft(reversed(not_started))

    def _find_error(self, turn: DecodeTurn, others: Mapping[int, object]) -> ValueError | None:
        """Return the error for a request that cannot start, or None. ``others`` are the slots that
        start in the same round."""
        if turn.slot in self._running or turn.slot in others:
            return ValueError(f"generate: slot {turn.slot} is in play")
        try:
            check_request(turn.request, turn.config)
        except ValueError as error:
            return error
        return None

    def _step(self) -> None:
        """Run one step of the core and complete the requests that ended."""
        start_ns = time.time_ns()
        before = self._core.generated_tokens
        with self._compute.computing():
            ended = self._core.step(self._version)
        end_ns = time.time_ns()
        self._busy_s += (end_ns - start_ns) * 1e-9
        if self._pause_start_ns and self._core.generated_tokens > before:
            self._weight_pause_ms = (end_ns - self._pause_start_ns) * 1e-6
            self._pause_start_ns = 0
        if self._span is None:
            self._span = _StepSpan(start_ns, before)
        self._span.end_ns = end_ns
        if end_ns - self._span.start_ns > _SPAN_NS:
            self._report_span()
        with self._condition:
            results = [(self._running.pop(turn.slot)[1], turn.output()) for turn in ended]
            to_free = self._free_at_end & {turn.slot for turn in ended}
            self._free_at_end -= to_free
        self._core.free(to_free)
        for done, result in results:
            _call_done(done, result)

    def _report_span(self) -> None:
        """Report the steps since the last report to the tracer as one span."""
        span = self._span
        self._span = None
        if span is not None:
            tokens = self._core.generated_tokens - span.tokens
            self._tracer.record(
                GENERATE, span.start_ns, span.end_ns, tokens=tokens, rows=len(self._running)
            )

    def _fail_running(self, error: Exception) -> None:
        """Complete all running requests with an error."""
        with self._condition:
            failed = list(self._running.values())
            self._running = {}
            self._free_at_end.clear()
        for _, done in failed:
            _call_done(done, error)

    def _fail_all(self, error: BaseException) -> None:
        """Complete all requests and the pending weight update with an error, because the engine's
        thread has failed."""
        failure = (
            error if isinstance(error, Exception) else RuntimeError(f"generation ended: {error!r}")
        )
        self._report_span()
        with self._condition:
            self._closing = True
            failed = [*self._running.values(), *self._waiting]
            self._running = {}
            self._waiting = deque()
            update = self._weights
            self._weights = None
            self._condition.notify_all()
        for _, done in failed:
            _call_done(done, failure)
        if update is not None:
            update.error = failure
            update.finished.set()
        self._core.reset()


def _call_done(done: Done, result: GenOutput | Exception) -> None:
    """Call ``done`` and log its errors, which must not end the engine's thread."""
    try:
        done(result)
    except Exception:
        _log.exception("the callback of a generation request raised an error")
