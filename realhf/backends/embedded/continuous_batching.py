"""Implements continuous batching: requests join and leave between two tokens, on the engine's own thread.

Between two steps the thread does what others asked for, in this order: new weights, ends of requests, forgetting slots,
new requests, a pause. All other threads only leave their wish under the lock.
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
from realhf.backends.embedded.decode_core import DecodeCore, Turn, rest_of_turn
from realhf.backends.embedded.memory import shortage
from realhf.backends.embedded.sampling import check_request, stream_of
from realhf.backends.embedded.weight_copy import copy_weights, held_digests
from realhf.base import process_clock

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 30.0
_SPAN_NS = 100_000_000
"""Longest time in nanoseconds that steps without a break are reported to the tracer as one piece of work."""


@dataclass
class _NewWeights:
    """Holds an update that waits for the engine's thread."""

    version: int
    tensors: Mapping[str, Tensor]
    again: bool
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


@dataclass
class _Span:
    """Holds steps that are not reported yet: wall-clock nanoseconds, and the number of tokens made before them."""

    began: int
    tokens: int
    ended: int = 0


class ContinuousGenerator:
    """Implements ``StreamingGenerator`` on ``model``, whose parameters it owns from now on.

    After new weights, ``kv_policy`` ``recompute`` computes every prefix again before its next token; ``keep`` continues
    with the keys and values of the old weights. ``max_rows`` bounds the sequences that are cached, in play or between
    two turns, and ``most_bytes``, which is asked whenever nothing is cached, the memory of their keys and values; more
    requests wait. ``version`` is the policy version of the model's weights; with -1 it has none yet and requests wait
    for ``load_weights``, which waits up to ``pause_timeout_s`` for a step to end. Requests without a seed draw from
    unpredictable streams."""

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
        most_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._model = model.eval()
        self._kv_policy = kv_policy
        self._threads = threads
        self._compute = compute_threads(threads)
        self._tracer = tracer or Tracer()
        self._core = DecodeCore(model, max_rows=max_rows, most_bytes=most_bytes)
        self._max_rows, self._most_bytes = max_rows, most_bytes
        self._version = version
        self._pause_timeout_s = pause_timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Turn, Done]] = deque()
        self._playing: dict[int, tuple[Turn, Done]] = {}  # by slot
        self._to_abort: set[int] = set()
        self._to_free: set[int] = set()
        self._forget_later: set[int] = set()
        self._weights: _NewWeights | None = None
        self._paused = False
        self._parked = False
        self._closing = False
        self._busy_s = self._weight_pause_ms = 0.0
        self._stopped = 0  # wall-clock ns at which new weights began to keep requests waiting
        self._span: _Span | None = None
        self._thread = threading.Thread(target=self._serve, name="generation", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """See ``StreamingGenerator``."""
        return self._version

    def submit(self, request: GenRequest, config: GenConfig, stop_ids: Sequence[int], done: Done) -> None:
        """See ``StreamingGenerator``. ``done`` gets a ValueError for a request with no tokens, with options out of
        range or for a slot that is in play, and any error that a forward pass raised. Raises RuntimeError after
        ``close``."""
        stream = stream_of(int.from_bytes(os.urandom(8), "little") if request.seed is None else request.seed)
        budget = rest_of_turn(request, config, self._core.limit)
        turn = Turn(request, config, frozenset(stop_ids), budget, stream)
        with self._changed:
            if self._closing:
                raise RuntimeError("the generation engine is closed")
            self._waiting.append((turn, done))
            self._changed.notify_all()

    def abort(self, slots: Sequence[int]) -> None:
        """See ``StreamingGenerator``. Slots without a request are left alone."""
        with self._changed:
            self._to_abort.update(slots)
            self._changed.notify_all()

    def free(self, slots: Sequence[int]) -> None:
        """See ``StreamingGenerator``. A request that is in play continues, and its slot is forgotten at its end."""
        with self._changed:
            self._to_free.update(slots)
            self._changed.notify_all()

    def pause(self, timeout_s: float) -> None:
        """See ``StreamingGenerator``. After a timeout the engine is not paused."""
        with self._changed:
            before, self._paused = self._paused, True
            self._changed.notify_all()
            if not self._wait_for(lambda: self._parked or self._closing, timeout_s):
                self._paused = before
                self._changed.notify_all()
                raise TimeoutError(f"the generation engine did not finish its step within {timeout_s:g} s")

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Return whether the condition comes true within so many seconds. Called under the lock."""
        return process_clock.wait(lambda left_s: self._changed.wait_for(condition, left_s), timeout_s)

    def resume(self) -> None:
        """Go on after ``pause``. Harmless if nothing is paused."""
        with self._changed:
            self._paused = self._parked = False
            self._changed.notify_all()

    def load_weights(self, version: int, tensors: Mapping[str, Tensor], *, again: bool = False) -> None:
        """See ``StreamingGenerator``. Raises TimeoutError when the engine's current step does not end."""
        update = _NewWeights(version, tensors, again)
        with self._changed:
            if not self._wait_for(lambda: self._weights is None or self._closing, self._pause_timeout_s):
                raise TimeoutError(f"the generation engine was busy with other weights for {self._pause_timeout_s:g} s")
            if self._closing:
                raise RuntimeError("the generation engine is closed")
            self._weights = update
            self._changed.notify_all()
        if not process_clock.wait(update.over.wait, self._pause_timeout_s):
            with self._changed:
                taken, self._weights = self._weights is not update, None if self._weights is update else self._weights
            if not taken:
                raise TimeoutError(f"the generation engine's step did not end within {self._pause_timeout_s:g} s")
            update.over.wait()  # the engine is copying, which needs no other thread
        if update.error is not None:
            raise update.error

    def weight_digests(self, names: Sequence[str]) -> dict[str, HeldTensor]:
        """See ``StreamingGenerator``. Computed on the caller's thread, while generation goes on."""
        return held_digests(self._model, names)

    def replica(self) -> ContinuousGenerator | None:
        """See ``StreamingGenerator``: None where there is no memory for the weights twice. The threads of the replica
        compete with those of this engine for the cores."""
        try:
            model = copy.deepcopy(self._model)
        except (MemoryError, RuntimeError) as error:
            if (said := shortage(error)) is None:
                raise
            _log.warning("there is no memory for a second copy of the weights: %s", said)
            return None
        return ContinuousGenerator(
            model,
            kv_policy=self._kv_policy,
            max_rows=self._max_rows,
            threads=self._threads,
            version=self._version,
            pause_timeout_s=self._pause_timeout_s,
            most_bytes=self._most_bytes,
        )

    def stats(self) -> dict[str, float]:
        """See ``StreamingGenerator``; ``weight_pause_ms`` is how long the last update stopped generation: until the
        next token was drawn, if a request waited for one."""
        core = self._core
        with self._changed:
            return {
                "generated_tokens": float(core.generated_tokens),
                "prefill_tokens": float(core.computed_tokens),
                "reused_tokens": float(core.reused_tokens),
                "busy_s": self._busy_s,
                "weight_pause_ms": self._weight_pause_ms,
                "running": float(len(self._playing)),
                "waiting": float(len(self._waiting)),
            }

    def close(self) -> None:
        """See ``StreamingGenerator``. Raises TimeoutError when the thread does not end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the generation engine's thread did not end within {_CLOSE_TIMEOUT_S:g} s")

    def _serve(self) -> None:
        error: BaseException = RuntimeError("the generation engine was closed")
        try:
            self._compute.take()
            while self._round():
                pass
        except BaseException as unexpected:
            _log.exception("the generation engine's thread ends")
            error = unexpected
        self._end(error)

    def _round(self) -> bool:
        """Run one step after doing what others asked for. Return False when the engine closes."""
        with self._changed:
            self._wait_for_work()
            if self._closing:
                return False
            paused, update = self._paused, self._weights
            self._weights = None
            told = self._end_aborted()
            self._forget_freed()
            self._changed.notify_all()
        for done, result in told:
            _tell(done, result)
        if update is not None:
            self._take_weights(update)
        if paused or self._version < 0:
            return True
        try:
            self._join()
            if self._playing:
                self._step()
        except Exception as error:
            _log.exception("a step of generation failed with %d requests in play", len(self._playing))
            self._core.reset()
            self._fail_playing(error)
        return True

    def _wait_for_work(self) -> None:
        """Wait until there is something to do. Called under the lock; a pause begins here."""
        while True:
            if self._paused and not self._parked:
                self._parked = True
                self._changed.notify_all()
            asked = self._weights is not None or self._to_abort or self._to_free
            playable = not self._paused and self._version >= 0 and (self._playing or self._waiting)
            if self._closing or asked or playable:
                return
            self._report()
            self._changed.wait()

    def _end_aborted(self) -> list[tuple[Done, GenOutput]]:
        """Take aborted requests out of play and out of the queue."""
        slots, self._to_abort = self._to_abort, set()
        ended = [self._playing.pop(slot) for slot in slots if slot in self._playing]
        self._core.leave([turn for turn, _ in ended])
        self._to_free |= self._forget_later & slots
        self._forget_later -= slots
        kept: deque[tuple[Turn, Done]] = deque()
        for turn, done in self._waiting:
            (ended if turn.slot in slots else kept).append((turn, done))
        self._waiting = kept
        for turn, _ in ended:
            turn.reason = "aborted"
        return [(done, turn.output()) for turn, done in ended]

    def _forget_freed(self) -> None:
        now = self._to_free - self._playing.keys()
        self._to_free -= now
        self._forget_later |= self._to_free
        self._to_free = set()
        self._core.free(now)

    def _take_weights(self, update: _NewWeights) -> None:
        began = time.time_ns()
        try:
            if update.version < self._version:
                raise ValueError(f"weights of version {update.version} after those of version {self._version}")
            if update.version > self._version or update.again:
                self._report()
                copy_weights(self._model, update.tensors)
                self._version = update.version
                if self._kv_policy == "recompute":
                    self._core.forget_tokens()
                # The stop of generation ends with the next token, if a request waits for one.
                self._stopped = began if self._playing and not self._paused else 0
                self._weight_pause_ms = (time.time_ns() - began) * 1e-6
                self._tracer.record(f"{WEIGHTS}/copy", began, time.time_ns(), version=update.version)
        except Exception as error:
            update.error = error
        update.over.set()

    def _join(self) -> None:
        """Bring waiting requests into play as far as there are rows."""
        with self._changed:
            room = min(len(self._waiting), self._max_rows - len(self._playing))
            chosen = [self._waiting.popleft() for _ in range(room)]
        fit: dict[int, tuple[Turn, Done]] = {}
        for turn, done in chosen:
            error = self._refusal(turn, fit)
            if error is not None:
                _tell(done, error)
            elif turn.budget < 1:
                turn.reason = "length"
                _tell(done, turn.output())
            else:
                fit[turn.slot] = turn, done
        if fit:
            with self._changed:
                self._playing.update(fit)
            seated = self._core.join([turn for turn, _ in fit.values()])
            with self._changed:  # Those that found no row are the first to get one.
                left = [self._playing.pop(slot) for slot in [*fit][seated:]]
                self._waiting.extendleft(reversed(left))

    def _refusal(self, turn: Turn, others: Mapping[int, object]) -> ValueError | None:
        if turn.slot in self._playing or turn.slot in others:
            return ValueError(f"generate: slot {turn.slot} is in play")
        try:
            check_request(turn.request, turn.config)
        except ValueError as error:
            return error
        return None

    def _step(self) -> None:
        began, before = time.time_ns(), self._core.generated_tokens
        with self._compute.computing():
            ended = self._core.step(self._version)
        now = time.time_ns()
        self._busy_s += (now - began) * 1e-9
        if self._stopped and self._core.generated_tokens > before:
            self._weight_pause_ms = (now - self._stopped) * 1e-6
            self._stopped = 0
        if self._span is None:
            self._span = _Span(began, before)
        self._span.ended = now
        if now - self._span.began > _SPAN_NS:
            self._report()
        with self._changed:
            told = [(self._playing.pop(turn.slot)[1], turn.output()) for turn in ended]
            later = self._forget_later & {turn.slot for turn in ended}
            self._forget_later -= later
        self._core.free(later)
        for done, result in told:
            _tell(done, result)

    def _report(self) -> None:
        """Report to the tracer what was done since the last break."""
        span, self._span = self._span, None
        if span is not None:
            tokens = self._core.generated_tokens - span.tokens
            self._tracer.record(GENERATE, span.began, span.ended, tokens=tokens, rows=len(self._playing))

    def _fail_playing(self, error: Exception) -> None:
        with self._changed:
            failed, self._playing = list(self._playing.values()), {}
            self._forget_later.clear()
        for _, done in failed:
            _tell(done, error)

    def _end(self, error: BaseException) -> None:
        """Give every request that is left this error: the engine has ended."""
        failure = error if isinstance(error, Exception) else RuntimeError(f"generation ended: {error!r}")
        self._report()
        with self._changed:
            self._closing = True
            failed = [*self._playing.values(), *self._waiting]
            self._playing, self._waiting = {}, deque()
            update, self._weights = self._weights, None
            self._changed.notify_all()
        for _, done in failed:
            _tell(done, failure)
        if update is not None:
            update.error = failure
            update.over.set()
        self._core.reset()


def _tell(done: Done, result: GenOutput | Exception) -> None:
    try:
        done(result)
    except Exception:
        _log.exception("who asked for tokens failed to take them")
