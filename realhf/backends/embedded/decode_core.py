"""Batched decoding: assignment of cache rows to turns, prefill, and sampling of one token per turn
and step.

Both generators use it. A *turn* is a request in progress. Between two steps, the last token of
every turn has been sampled (or given) but not yet passed through the model. A step first computes
the missing tokens (one for most turns, a whole prefix for new ones) and then samples. So between
steps, only the cached keys and values depend on the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.embedded.compiled_decoder import (
    CompiledDecoder,
    build_compiled_decoder,
    sample_rows,
)
from realhf.backends.embedded.forward_pass import (
    Decoding,
    FastDecoder,
    ModulePass,
    PrefillPiece,
    build_fast_decoder,
)
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.embedded.memory import explain_oom, token_bytes
from realhf.backends.embedded.sampling import sample_tokens, token_logprobs, uniform_at
from realhf.backends.embedded.token_masks import (
    GrammarProblem,
    TokenMask,
    TokenMasks,
    mask_logits,
)
from realhf.base.hf_config import context_limit

_log = logging.getLogger(__name__)
IntArray = np.ndarray
_MIN_DONATED = 8
"""Minimum number of cached tokens to copy from another row; computing fewer is cheaper than copying
them."""
_MAX_LEVELS = 3
"""Maximum number of levels (see ``PrefillItem.level``) in a step. Each level needs its own forward
pass."""
_STEP_TOKENS = {"cpu": 256}
"""Maximum number of missing tokens that a step computes, by device type; the turn that reaches it
is still completed. The bound lets running turns sample tokens while new turns, or all turns after a
weight update, compute their prefixes."""
_STEP_TOKENS_DEFAULT = 8192
"""Maximum number of missing tokens that a step computes on all other device types."""
_IDLE_FRACTION = 0.25
"""Idle rows between active ones, per active row, from which rows are compacted. Idle rows are
computed too; a copy costs as much as computing an idle row in ten steps."""


@dataclass(frozen=True)
class PrefillItem:
    """Plan for the prefill of one row."""

    row: int
    """Row to fill."""
    start: int
    """Number of tokens that are already cached; the others are computed."""
    donor: int
    """Row from which the cached tokens are copied; ``row`` itself if it holds them."""
    level: int
    """Number of the forward pass that computes the item. Items of lower levels are computed before,
    so they can be its donor."""


class RowTable:
    """Assignment of cache rows to slots, and the tokens in the rows.

    The least recently used slots lose their rows if there are not enough.

    Attributes:
        tokens: Tokens of each row, int64 (rows, columns), -1 where empty.
        lengths: Number of tokens of each row whose keys and values are cached, int64 (rows,).
        max_rows: Maximum number of rows, None for no limit.
    """

    def __init__(self, max_rows: int | None = None) -> None:
        self.tokens: IntArray = np.full((0, 0), -1, dtype=np.int64)
        self.lengths: IntArray = np.zeros(0, dtype=np.int64)
        self.max_rows = max_rows
        self._row_of_slot: dict[int, int] = {}  # In order of use, the least recent first.

    @property
    def slots(self) -> dict[int, int]:
        """Row of every slot (a copy)."""
        return dict(self._row_of_slot)

    def row_of(self, slot: int) -> int:
        """Return the row of a slot. Raises KeyError for a slot without a row."""
        return self._row_of_slot[slot]

    def free(self, slots: Collection[int] | None) -> None:
        """Release the rows of these slots (all if None). Unknown slots are ignored."""
        for slot in self.slots if slots is None else slots:
            row = self._row_of_slot.pop(slot, None)
            if row is not None:
                self.lengths[row] = 0

    def forget_tokens(self) -> None:
        """Mark all tokens as not cached. Slots keep their rows."""
        self.lengths[:] = 0

    def resize(self, rows: int, columns: int) -> None:
        """Enlarge the table to ``rows`` and ``columns``, keeping its contents."""
        if self.tokens.shape == (rows, columns):
            return
        old = self.tokens
        lengths = self.lengths
        self.tokens = np.full((rows, columns), -1, dtype=np.int64)
        self.tokens[: old.shape[0], : old.shape[1]] = old
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.lengths[: len(lengths)] = lengths

    def assign_rows(self, slots: Sequence[int], busy: Collection[int]) -> list[int]:
        """Return a row for each of these slots, or only for the first slots if there are not enough
        rows.

        A slot keeps its row. Otherwise it gets the first free row, or the row of the least recently
        used slot that is neither in ``busy`` nor in ``slots``. A returned row may lie outside the
        table; the caller then has to ``resize`` it.
        """
        row_of_slot = self._row_of_slot
        used_rows = set(row_of_slot.values())
        protected = {*busy, *slots}
        evictable = iter([slot for slot in row_of_slot if slot not in protected])
        rows: list[int] = []
        next_free = 0
        for slot in slots:
            row = row_of_slot.pop(slot, None)
            if row is None:
                while next_free in used_rows:
                    next_free += 1
                if self.max_rows is None or next_free < self.max_rows:
                    row = next_free
                elif (victim := next(evictable, None)) is not None:
                    row = row_of_slot.pop(victim)
                else:
                    break
                used_rows.add(row)
                if row < len(self.lengths):
                    self.lengths[row] = 0
            row_of_slot[slot] = (
                row  # Popped and inserted again: the slot is now the most recently used one.
            )
            rows.append(row)
        return rows

    def compact(self, busy: Collection[int]) -> tuple[list[int], list[int]]:
        """Move the rows ``busy`` to the front of the table.

        Returns the source rows and the target rows whose cache contents the caller has to copy.
        They form a permutation, so all sources have to be read before any target is written.
        """
        slot_of = {row: slot for slot, row in self._row_of_slot.items()}
        # With n busy rows, those at n or above move to the rows below n that are not busy.
        # There are equally many of both.
        holes = [row for row in range(len(busy)) if row not in busy]
        moving = sorted(row for row in busy if row >= len(busy))
        source = [*moving]
        target = [*holes]
        for hole, row in zip(holes, moving, strict=True):
            # A hole may have the cached tokens of an idle slot: it changes places with the
            # busy row.
            if hole in slot_of:
                source.append(hole)
                target.append(row)
        # NumPy reads the whole right side before it assigns, as the permutation requires.
        self.tokens[target] = self.tokens[source]
        self.lengths[target] = self.lengths[source]
        self.lengths[[row for row in moving if row not in target]] = 0
        for old, new in zip(source, target, strict=True):
            self._row_of_slot[slot_of[old]] = new
        return source, target

    def plan(self, row: int, prefix: IntArray, planned: Mapping[int, PrefillItem]) -> PrefillItem:
        """Return the plan that fills ``row`` with ``prefix``, and record the prefix as the row's
        tokens.

        The last token is always computed, because its logits are needed. If only the last token is
        missing, a decoding step computes it, and it does not count as cached yet.

        If the row itself has cached only a short part of the prefix, the prefix is copied from
        another row: rollouts of a group share their prompt, and all tasks share the system message.
        Copies of level 0 are made before anything is computed, so even a row that is planned later
        can be a donor.

        Args:
            row: The row to fill.
            prefix: The tokens, int64 (n,), at least one.
            planned: Items already planned in this step, by row.
        """
        last = len(prefix) - 1
        start = min(self._count_common(row, prefix), last)
        donor = row
        level = 0
        if start < last:
            common = self._count_common_all(prefix)
            common[[r for r, item in planned.items() if item.level + 1 >= _MAX_LEVELS]] = 0
            best_donor = int(common.argmax())
            n_donated = min(int(common[best_donor]), last)
            if n_donated >= start + _MIN_DONATED:
                start = n_donated
                donor = best_donor
                level = planned[best_donor].level + 1 if best_donor in planned else 0
        self.tokens[row, : len(prefix)] = prefix
        self.lengths[row] = last if start == last else len(prefix)
        return PrefillItem(row, start, donor, level)

    def _count_common(self, row: int, prefix: IntArray) -> int:
        """Return the length of the common prefix of ``prefix`` and a row's cached tokens."""
        n = min(int(self.lengths[row]), len(prefix))
        differs = self.tokens[row, :n] != prefix[:n]
        return int(differs.argmax()) if differs.any() else n

    def _count_common_all(self, prefix: IntArray) -> IntArray:
        """Return the length of the common prefix of ``prefix`` and each row's cached tokens, int64
        (rows,)."""
        same = self.tokens[:, : len(prefix)] == prefix
        run = np.where(same.all(1), same.shape[1], (~same).argmax(1))
        return np.minimum(run, self.lengths)


def remaining_tokens(request: GenRequest, config: GenConfig, limit: int) -> int:
    """Return the number of tokens that a request may still sample if the context holds ``limit``
    tokens."""
    return min(request.limit_turn(config.max_new_tokens), limit - len(request.token_ids))


@dataclass(eq=False)
class DecodeTurn:
    """A request in progress and the tokens sampled for it."""

    request: GenRequest
    """The request."""
    config: GenConfig
    """Sampling parameters."""
    stops: frozenset[int]
    """Token ids that end the turn."""
    budget: int
    """Number of tokens that the turn may sample."""
    stream: int
    """Seed of the turn's random numbers (``sampling.uniform_at``)."""
    draws: np.ndarray | None = None
    """Random numbers to use instead of those from ``stream``, fp64 (tokens,)."""
    mask: TokenMask | None = None
    """Mask of the request's grammar; None if the turn is sampled freely."""
    row: int = -1
    """The turn's cache row, -1 before one is assigned."""
    cached: bool = False
    """Whether all tokens but the last are cached, or will be by this step's plan."""
    reason: str = ""
    """Finish reason, ``stop`` or ``length``; empty while the turn runs."""
    mask_failed: bool = False
    """Whether the mask failed, which ends the turn with the token sampled next or just now."""
    token_ids: list[int] = field(default_factory=list)
    """Sampled tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the sampled tokens, under the mask if the turn has one."""
    unmasked_logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the sampled tokens without the mask; empty if the turn has none."""
    versions: list[int] = field(default_factory=list)
    """Weight version that sampled each token."""

    @property
    def slot(self) -> int:
        """Slot of the request."""
        return self.request.slot

    @property
    def length(self) -> int:
        """Number of tokens in the sequence, given and sampled."""
        return len(self.request.token_ids) + len(self.token_ids)

    @property
    def below_minimum(self) -> bool:
        """Whether the turn has sampled fewer than ``min_new_tokens``, so that stop ids are
        banned."""
        return self.request.sampled + len(self.token_ids) < self.config.min_new_tokens

    def prefix(self) -> np.ndarray:
        """Return the whole sequence, int64 (length,)."""
        return np.fromiter(
            (*self.request.token_ids, *self.token_ids), dtype=np.int64, count=self.length
        )

    def output(self) -> GenOutput:
        """Return the sampled tokens as the request's output."""
        unmasked = None if self.mask is None else self.unmasked_logprobs
        return GenOutput(
            self.token_ids, self.logprobs, self.versions, self.reason, unmasked, self.mask_failed
        )


class DecodeCore:
    """Cache rows, forward passes and sampling of one model. Not thread-safe.

    After an exception in ``step`` all state is discarded, because rows may be partly written.

    Args:
        model: The model.
        max_rows: Maximum number of rows, None for no limit.
        max_bytes: Function that returns the maximum size of keys and values in bytes, None for no limit. It
            is called whenever the cache is empty. One row is always allocated.
        masks: Factory of the masks of turns with a grammar; None if there are no such turns.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int | None = None,
        max_bytes: Callable[[], int | None] = lambda: None,
        masks: TokenMasks | None = None,
    ) -> None:
        self.model = model
        self.masks = masks
        self.limit = context_limit(model.config.to_dict())
        self._cache = RowCache()
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_cache_bytes: int | None = None
        self._table = RowTable(max_rows)
        self._forward_pass: CompiledDecoder | FastDecoder | ModulePass | None = None
        self._running: list[DecodeTurn] = []
        # Largest (rows, columns) of the cache before it was released.
        self._largest_shape = (0, 0)
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.reused_tokens = 0

    @property
    def n_running(self) -> int:
        """Number of turns in progress."""
        return len(self._running)

    @property
    def kv_bytes(self) -> int:
        """Allocated size of keys and values, bytes."""
        return self._cache.nbytes

    def free(self, slots: Iterable[int] | None) -> None:
        """Release the rows of these slots (all if None). None of them may have a turn in
        progress."""
        self._table.free(None if slots is None else list(slots))

    def release(self) -> None:
        """Free the memory of keys and values, and the workspace of the forward pass.

        The next turns allocate the same size at once, instead of growing the cache step by step.
        Raises RuntimeError while turns are in progress.
        """
        if self._running:
            raise RuntimeError(
                f"{len(self._running)} turns are in progress: their keys and values cannot be freed"
            )
        rows, columns = self._largest_shape
        self._largest_shape = (max(rows, self._cache.rows), max(columns, self._cache.columns))
        had_bytes = self._cache.nbytes
        self._cache.clear()
        self._table = RowTable(self._max_rows)
        if isinstance(self._forward_pass, CompiledDecoder):
            self._forward_pass.release()
        if had_bytes and self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # Other processes on the GPU cannot use memory in the pool of this one.

    def forget_tokens(self) -> None:
        """Invalidate all cached tokens after a weight update. Turns in progress compute their
        prefix again."""
        self._table.forget_tokens()
        for turn in self._running:
            turn.cached = False

    def reset(self) -> None:
        """Discard all state, turns in progress included."""
        self._running = []
        self._cache.clear()
        self._table = RowTable(self._max_rows)
        self._forward_pass = None

    def join(self, turns: Sequence[DecodeTurn]) -> int:
        """Start as many of ``turns`` as there are rows for, from the first one on; return their
        number.

        It is at least one if no turn is in progress. A turn's length plus its budget must fit into
        the model's context, and all turns must have different slots.
        """
        if not turns:
            return 0
        columns = max(t.length + t.budget for t in turns)
        max_rows = self._compute_max_rows(columns)
        if (
            self._max_cache_bytes is not None
            and max_rows is not None
            and self._cache.rows > max_rows
        ):
            # With longer rows the allocated ones would exceed the memory budget: allocate a new
            # cache once it is idle.
            if self._running:
                return 0
            self._cache.clear()
            self._table = RowTable(max_rows)
        self._table.max_rows = max_rows
        slots = [t.slot for t in turns]
        rows = self._table.assign_rows(slots, {t.slot for t in self._running})
        if not rows and not self._running:
            # All rows belong to later turns of this call, which wait for the first one: free them.
            self._table.free(None)
            rows = self._table.assign_rows(slots, ())
        started = turns[: len(rows)]
        if not started:
            return 0
        self._reserve(max(rows) + 1, columns, max_rows)
        for turn, row in zip(started, rows, strict=True):
            turn.row = row
            turn.cached = False
        self._running.extend(started)
        return len(started)

    def _compute_max_rows(self, columns: int) -> int | None:
        """Return the maximum number of rows with ``columns`` columns, None for no limit."""
        if not self._cache.rows:
            self._max_cache_bytes = self._max_bytes()
        if self._max_cache_bytes is None:
            return self._max_rows
        row_bytes = self._cache.columns_after_reserve(columns) * token_bytes(
            self.model.config, self.model.dtype
        )
        fitting = max(1, self._max_cache_bytes // row_bytes)
        return fitting if self._max_rows is None else min(fitting, self._max_rows)

    def _reserve(self, rows: int, columns: int, max_rows: int | None) -> None:
        """Enlarge the cache to at least ``rows`` and ``columns``, and more to allow for further
        growth."""
        allocated = self._cache.rows
        required = rows
        if not allocated:
            rows = max(rows, self._largest_shape[0])
            columns = (
                max(columns, self._largest_shape[1]) if self._max_cache_bytes is None else columns
            )
        elif rows > allocated:
            rows = max(rows, allocated + allocated // 2)
        rows = rows if max_rows is None else max(required, min(rows, max_rows))
        with explain_oom(lambda: f"for the {self._describe_cache(rows, columns)}"):
            self._cache.reserve(rows, columns)
            self._table.resize(self._cache.rows, self._cache.columns)

    def _describe_cache(self, rows: int, columns: int) -> str:
        """Return an error text with the size of a cache and the options that lower it."""
        bound = (
            "not set"
            if self._max_cache_bytes is None
            else f"{self._max_cache_bytes / 2**30:.3g} GiB now"
        )
        return (
            f"keys and values of {rows} rows of {columns} tokens: lower engine.kv_cache_gib "
            f"({bound}) or "
            "rollout.max_total_tokens"
        )

    def leave(self, turns: Iterable[DecodeTurn]) -> None:
        """Remove turns from those in progress. Their tokens stay cached."""
        leaving = set(map(id, turns))
        self._running = [turn for turn in self._running if id(turn) not in leaving]

    @torch.inference_mode()
    def step(self, version: int) -> list[DecodeTurn]:
        """Run one step: a forward pass, and one sampled token for each turn whose prefix is
        complete.

        The tokens are recorded with the weight version ``version``. Returns the turns that ended,
        which are no longer in progress. Raises FloatingPointError for logits that are not finite,
        RuntimeError naming options if memory is exhausted, and any exception of the model.
        """
        rows = self._cache.rows
        columns = self._cache.columns
        try:
            with explain_oom(
                lambda: f"in a step of generation with {self._describe_cache(rows, columns)}"
            ):
                self._compact()
                turns, logits = self._compute()
                return self._sample_next(turns, logits, version)
        except BaseException:
            self.reset()
            raise

    def _compact(self) -> None:
        """Move the active rows to the front if too many idle rows are between them."""
        rows = {turn.row for turn in self._running}
        idle = max(rows, default=-1) + 1 - len(rows)
        if idle < max(2.0, _IDLE_FRACTION * len(rows)):
            return
        self._copy(*self._table.compact(rows))
        for turn in self._running:
            turn.row = self._table.row_of(turn.slot)

    def _copy(self, source: list[int], target: list[int], columns: int | None = None) -> None:
        """Copy keys and values between rows, by default those of all cached tokens of the
        targets."""
        if source:
            used = int(self._table.lengths[target].max()) if columns is None else columns
            self._cache.copy_rows(self._to_index(source), self._to_index(target), used)

    def _to_index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)

    def _compute(self) -> tuple[list[DecodeTurn], Tensor]:
        """Compute the missing tokens of the turns.

        Returns the turns whose next token can be sampled, and their logits (n, vocabulary). There
        is one forward pass per level of the plan; the last pass also decodes the turns whose prefix
        is cached.
        """
        plan = self._plan()
        turns: list[DecodeTurn] = []
        logits: list[Tensor] = []
        levels = 1 + max((item.level for _, item in plan), default=0)
        for level in range(levels):
            members = [(turn, item) for turn, item in plan if item.level == level]
            copied = [item for _, item in members if item.donor != item.row]
            longest = max((item.start for item in copied), default=0)
            self._copy([item.donor for item in copied], [item.row for item in copied], longest)
            # Turns that miss only their last token are decoded with the others, not prefilled.
            prefilled = [(turn, item) for turn, item in members if turn.length - item.start > 1]
            pieces = [
                PrefillPiece(turn.row, item.start, turn.prefix()[item.start :])
                for turn, item in prefilled
            ]
            decoding = None
            if level == levels - 1:
                prefilled_rows = {turn.row for turn, item in plan if turn.length - item.start > 1}
                ready = [t for t in self._running if t.cached and t.row not in prefilled_rows]
                decoding = self._build_decoding(ready)
                turns.extend(ready)
            turns.extend(turn for turn, _ in prefilled)
            if decoding is not None or pieces:
                logits.append(self._forward().run(decoding, pieces))
        return turns, torch.cat(logits) if len(logits) > 1 else logits[0]

    def _plan(self) -> list[tuple[DecodeTurn, PrefillItem]]:
        """Return the turns to prefill in this step with their plans, up to the step's token
        limit."""
        planned: dict[int, PrefillItem] = {}
        plan: list[tuple[DecodeTurn, PrefillItem]] = []
        n_tokens = 0
        max_tokens = _STEP_TOKENS.get(self.model.device.type, _STEP_TOKENS_DEFAULT)
        for turn in self._running:
            if not turn.cached and n_tokens < max_tokens:
                item = self._table.plan(turn.row, turn.prefix(), planned)
                planned[turn.row] = item
                turn.cached = True
                plan.append((turn, item))
                n_tokens += turn.length - item.start
                self.computed_tokens += turn.length - item.start
                self.reused_tokens += item.start
        return plan

    def _build_decoding(self, ready: list[DecodeTurn]) -> Decoding | None:
        """Return a ``Decoding`` of one token for each turn, None if there is no turn. Sorts
        ``ready`` by row."""
        if not ready:
            return None
        ready.sort(key=lambda turn: turn.row)
        rows = np.array([turn.row for turn in ready])
        positions = self._table.lengths[rows]
        self._table.lengths[rows] += 1
        return Decoding(rows, self._table.tokens[rows, positions], positions, self._table.tokens)

    def _forward(self) -> CompiledDecoder | FastDecoder | ModulePass:
        """Return the forward pass of the model."""
        if self._forward_pass is None:
            fast = build_fast_decoder(self.model, self._cache)
            if fast is None:
                self._forward_pass = ModulePass(self.model, self._cache, self.limit)
            else:
                self._forward_pass = build_compiled_decoder(self.model, self._cache) or fast
        return self._forward_pass

    def _sample_next(
        self, turns: list[DecodeTurn], logits: Tensor, version: int
    ) -> list[DecodeTurn]:
        """Sample and record the next token of each turn; return the turns that ended."""
        masked_rows, masked_logits = self._apply_masks(turns, logits)
        tokens, logprobs = self._sample(turns, masked_logits)
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("generate: the model returned logits that are not finite")
        for row, logprob in self._score_unmasked(turns, masked_rows, logits, tokens):
            turns[row].unmasked_logprobs.append(logprob)
        rows = [turn.row for turn in turns]
        columns = [turn.length for turn in turns]
        self._table.tokens[rows, columns] = tokens
        self.generated_tokens += len(turns)
        ended = []
        for turn, token, logprob in zip(turns, tokens.tolist(), logprobs.tolist(), strict=True):
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)
            turn.versions.append(version)
            if token in turn.stops:
                turn.reason = "stop"
            elif len(turn.token_ids) >= turn.budget or not _follow(turn, token):
                turn.reason = "length"
            if turn.reason:
                ended.append(turn)
        if ended:
            self.leave(ended)
        return ended

    def _apply_masks(self, turns: list[DecodeTurn], logits: Tensor) -> tuple[list[int], Tensor]:
        """Return which of the turns have a mask, and the logits with these masks applied.

        The logits of a turn whose mask fails remain as they are: its last token is sampled freely,
        so that even a turn whose first mask fails has one.
        """
        masked = [(row, turn, turn.mask) for row, turn in enumerate(turns) if turn.mask is not None]
        if not masked or self.masks is None:
            return [], logits
        packed = self.masks.allocate(len(masked))
        for position, (_, turn, mask) in enumerate(masked):
            try:
                mask.fill(packed[position])
            except GrammarProblem as error:
                _end_mask(turn, error)
                packed[position] = -1
        rows = [row for row, _, _ in masked]
        return rows, mask_logits(logits, rows, packed)

    def _score_unmasked(
        self, turns: list[DecodeTurn], rows: list[int], logits: Tensor, tokens: np.ndarray
    ) -> Iterator[tuple[int, float]]:
        """Yield each of ``rows`` with the log-probability of its token under ``logits``."""
        by_config: dict[float, list[int]] = {}
        for row in rows:
            by_config.setdefault(turns[row].config.temperature, []).append(row)
        for members in by_config.values():
            chosen = torch.from_numpy(tokens[members]).to(logits.device)
            config = turns[members[0]].config
            values = token_logprobs(logits[self._to_index(members)], chosen, config)
            yield from zip(members, values.tolist(), strict=True)

    def _sample(self, turns: list[DecodeTurn], logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return sampled tokens, int64 (n,), and their log-probabilities, fp32 (n,)."""
        streams = np.array([turn.stream for turn in turns], dtype=np.uint64)
        uniform = uniform_at(streams, np.array([turn.length for turn in turns], dtype=np.int64))
        for i, turn in enumerate(turns):
            if turn.draws is not None:
                uniform[i] = turn.draws[len(turn.token_ids)]
        by_parameters: dict[tuple[float, float, int], list[int]] = {}
        for i, turn in enumerate(turns):
            by_parameters.setdefault(
                (turn.config.temperature, turn.config.top_p, turn.config.top_k), []
            ).append(i)
        banned = self._banned_tokens(turns, logits)
        if len(by_parameters) == 1 and banned is None:
            [(temperature, top_p, top_k)] = by_parameters
            compiled = isinstance(self._forward_pass, CompiledDecoder)
            if compiled and temperature > 0 and top_p == 1 and not top_k:
                sampled = sample_rows(logits, uniform, temperature)
                if sampled is not None:
                    return sampled
        draws = torch.from_numpy(uniform).to(logits.device)
        if len(by_parameters) == 1:
            tokens, logprobs = sample_tokens(logits, draws, turns[0].config, banned)
            return tokens.cpu().numpy(), logprobs.cpu().numpy()
        all_tokens = np.zeros(len(turns), dtype=np.int64)
        all_logprobs = np.zeros(len(turns), dtype=np.float32)
        for members in by_parameters.values():
            index = self._to_index(members)
            tokens, logprobs = sample_tokens(
                logits[index],
                draws[index],
                turns[members[0]].config,
                None if banned is None else banned[index],
            )
            all_tokens[members] = tokens.cpu().numpy()
            all_logprobs[members] = logprobs.cpu().numpy()
        return all_tokens, all_logprobs

    def _banned_tokens(self, turns: list[DecodeTurn], logits: Tensor) -> Tensor | None:
        """Return bool (n, vocabulary), true for tokens that a turn below its minimum length must
        not sample; None if there is no such turn."""
        below_minimum = [i for i, turn in enumerate(turns) if turn.below_minimum and turn.stops]
        if not below_minimum:
            return None
        banned = torch.zeros(logits.shape, dtype=torch.bool)
        for i in below_minimum:
            banned[i, list(turns[i].stops)] = True
        return banned.to(logits.device)


def _follow(turn: DecodeTurn, token: int) -> bool:
    """Add a sampled token to the turn's mask, if it has one; return whether the turn can go on."""
    if turn.mask is not None and not turn.mask_failed:
        try:
            turn.mask.accept(token)
        except GrammarProblem as error:
            _end_mask(turn, error)
    return not turn.mask_failed


def _end_mask(turn: DecodeTurn, error: GrammarProblem) -> None:
    """Note that the turn's mask has failed."""
    turn.mask_failed = True
    _log.warning(
        "a turn ends after %d tokens: %s", turn.request.sampled + len(turn.token_ids), error
    )
