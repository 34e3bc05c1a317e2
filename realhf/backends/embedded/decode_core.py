"""Decodes rows together: gives turns rows of the cache, computes what each is missing, and draws one token for each.

Both generators drive it. A *turn* is one request in play. Between two steps every turn has a last token that was drawn
(or given) and not fed yet. A step first computes what is missing, one token for most turns and a prefix for those that
join, and then draws. So between steps nothing but keys and values depends on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.embedded.forward_pass import Decoding, FastDecoder, ModulePass, Piece, fast_decoder
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.embedded.memory import naming_shortage, token_bytes
from realhf.backends.embedded.sampling import sample_tokens, uniform_at
from realhf.base.hf_config import context_limit

IntArray = np.ndarray
_MIN_DONATED = 8
"""Least number of tokens worth copying from another row; for fewer computing them is cheaper."""
_MAX_LEVELS = 3
"""Number of levels of items: a row may copy from one that itself waits for another, but not further."""


@dataclass(frozen=True)
class PrefillItem:
    """Plans how ``row`` is filled: it takes its first ``start`` tokens from the cache (from row ``donor`` if that is
    another row) and computes the rest, after all items of lower ``level``."""

    row: int
    start: int
    donor: int
    level: int


class RowTable:
    """Keeps the books of cache rows. Of ``tokens`` int64 (rows, columns), the first ``lengths`` int64 (rows,) are
    cached. ``max_rows`` bounds the rows; slots that wait longest for their next turn lose theirs."""

    def __init__(self, max_rows: int | None = None) -> None:
        self.tokens: IntArray = np.full((0, 0), -1, dtype=np.int64)
        self.lengths: IntArray = np.zeros(0, dtype=np.int64)
        self.max_rows = max_rows
        self._row_of_slot: dict[int, int] = {}  # in the order of use, the least recent first

    @property
    def slots(self) -> dict[int, int]:
        """Return the row of every slot (a copy)."""
        return dict(self._row_of_slot)

    def row_of(self, slot: int) -> int:
        """Return the row of a slot. Raises KeyError on a slot without a row."""
        return self._row_of_slot[slot]

    def free(self, slots: Collection[int] | None) -> None:
        """Forget these slots (all when None); an unknown slot is fine."""
        for slot in self.slots if slots is None else slots:
            row = self._row_of_slot.pop(slot, None)
            if row is not None:
                self.lengths[row] = 0

    def forget_tokens(self) -> None:
        """Forget what is cached; slots keep their rows."""
        self.lengths[:] = 0

    def resize(self, rows: int, columns: int) -> None:
        """Enlarge the table to that many rows and columns; what it holds stays."""
        if self.tokens.shape == (rows, columns):
            return
        old, lengths = self.tokens, self.lengths
        self.tokens = np.full((rows, columns), -1, dtype=np.int64)
        self.tokens[: old.shape[0], : old.shape[1]] = old
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.lengths[: len(lengths)] = lengths

    def seat(self, slots: Sequence[int], busy: Collection[int]) -> list[int]:
        """Return rows for these slots, or for the first of them if there are not enough.

        A slot keeps its own row, else it gets the first that is free, else that of the slot not in ``busy`` (nor in
        ``slots``) which was used least recently. A row may lie beyond the table: ``resize`` it then.
        """
        held = self._row_of_slot
        taken, kept = set(held.values()), {*busy, *slots}
        idle = iter([slot for slot in held if slot not in kept])
        rows, lowest = [], 0
        for slot in slots:
            row = held.pop(slot, None)
            if row is None:
                while lowest in taken:
                    lowest += 1
                if self.max_rows is None or lowest < self.max_rows:
                    row = lowest
                elif (victim := next(idle, None)) is not None:
                    row = held.pop(victim)
                else:
                    break
                taken.add(row)
                if row < len(self.lengths):
                    self.lengths[row] = 0
            held[slot] = row
            rows.append(row)
        return rows

    def compact(self, live: Collection[int]) -> tuple[list[int], list[int]]:
        """Bring the rows ``live`` to the front. Return (source, target) rows of the contents to copy, all at once."""
        slot_of = {row: slot for slot, row in self._row_of_slot.items()}
        holes = [row for row in range(len(live)) if row not in live]
        far = sorted(row for row in live if row >= len(live))
        source, target = [*far], [*holes]
        for hole, row in zip(holes, far, strict=True):
            if hole in slot_of:
                source.append(hole)
                target.append(row)
        self.tokens[target], self.lengths[target] = self.tokens[source], self.lengths[source]
        self.lengths[[row for row in far if row not in target]] = 0
        for old, new in zip(source, target, strict=True):
            self._row_of_slot[slot_of[old]] = new
        return source, target

    def plan(self, row: int, prefix: IntArray, planned: Mapping[int, PrefillItem]) -> PrefillItem:
        """Plan how ``row`` comes to hold ``prefix`` (int64, at least one token), and record the prefix as the row's
        tokens.

        The last token is always computed, since its logits are needed; when only the last is missing, it does not count
        as cached yet.

        A row without a useful prefix of its own copies one from another row: rollouts of one group share their prompt,
        and all tasks share the system text. ``planned``: the items of the same batch so far. Items of level 0 copy
        before anything is computed, so a row that is planned later still is a donor.
        """
        last = len(prefix) - 1
        start, donor, level = min(self._common(row, prefix), last), row, 0
        if start < last:
            shared = self._common_all(prefix)
            shared[[r for r, item in planned.items() if item.level + 1 >= _MAX_LEVELS]] = 0
            best = int(shared.argmax())
            gain = min(int(shared[best]), last)
            if gain >= start + _MIN_DONATED:
                start, donor = gain, best
                level = planned[best].level + 1 if best in planned else 0
        self.tokens[row, : len(prefix)] = prefix
        self.lengths[row] = last if start == last else len(prefix)
        return PrefillItem(row, start, donor, level)

    def _common(self, row: int, prefix: IntArray) -> int:
        n = min(int(self.lengths[row]), len(prefix))
        differs = self.tokens[row, :n] != prefix[:n]
        return int(differs.argmax()) if differs.any() else n

    def _common_all(self, prefix: IntArray) -> IntArray:
        """Return the length of the common prefix with each row, int64 (rows,)."""
        same = self.tokens[:, : len(prefix)] == prefix
        run = np.where(same.all(1), same.shape[1], (~same).argmax(1))
        return np.minimum(run, self.lengths)


_STEP_TOKENS = {"cpu": 256}
"""Number of missing tokens that one step computes, by kind of device (8192 elsewhere). The turn that reaches the number
is finished in the same step. The bound lets turns in play draw tokens while others join or recompute."""
_IDLE_FRACTION = 0.25
"""Idle rows in between, per row in play, from which rows are moved together; a move costs ten steps of an idle row."""


def rest_of_turn(request: GenRequest, config: GenConfig, limit: int) -> int:
    """Return how many tokens the turn of a request may still draw in a context of ``limit`` tokens."""
    return min(config.max_new_tokens - request.sampled, limit - len(request.token_ids))


@dataclass(eq=False)
class Turn:
    """Is a request in play. Its random numbers come from ``stream`` (see ``sampling.uniform_at``) or, if given, from
    ``draws`` fp64, one per token. ``budget`` is how many tokens it may still draw."""

    request: GenRequest
    config: GenConfig
    stops: frozenset[int]
    budget: int
    stream: int
    draws: np.ndarray | None = None
    row: int = -1
    cached: bool = False
    reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def slot(self) -> int:
        """The slot of the request."""
        return self.request.slot

    @property
    def length(self) -> int:
        """Number of tokens of the sequence so far."""
        return len(self.request.token_ids) + len(self.token_ids)

    @property
    def short(self) -> bool:
        """Whether the turn is below its minimum of tokens, so that no stop id may be drawn."""
        return self.request.sampled + len(self.token_ids) < self.config.min_new_tokens

    def prefix(self) -> np.ndarray:
        """Return the whole sequence so far, int64 (length,)."""
        return np.fromiter((*self.request.token_ids, *self.token_ids), dtype=np.int64, count=self.length)

    def output(self) -> GenOutput:
        """Return what the turn has drawn so far as the output of its request."""
        return GenOutput(self.token_ids, self.logprobs, self.versions, self.reason)


class DecodeCore:
    """Holds the rows of one model, and runs its forward passes and sampling. Not thread-safe. After an exception of
    ``step`` everything is forgotten, because rows may be half written. ``max_rows`` bounds the rows, and
    ``most_bytes``, which is asked whenever the cache is empty, the memory of keys and values: one row there always
    is."""

    def __init__(
        self, model: Any, *, max_rows: int | None = None, most_bytes: Callable[[], int | None] = lambda: None
    ) -> None:
        self.model = model
        self.limit = context_limit(model.config.to_dict())
        self._cache = RowCache()
        self._max_rows, self._most_bytes = max_rows, most_bytes
        self._bytes: int | None = None
        self._table = RowTable(max_rows)
        self._pass: FastDecoder | ModulePass | None = None
        self._live: list[Turn] = []
        self._usual = (0, 0)
        self.generated_tokens = self.computed_tokens = self.reused_tokens = 0

    @property
    def live(self) -> int:
        """Number of turns in play."""
        return len(self._live)

    @property
    def kv_bytes(self) -> int:
        """Number of bytes held for keys and values."""
        return self._cache.nbytes

    def free(self, slots: Iterable[int] | None) -> None:
        """Forget these slots (all when None). None of them may be in play."""
        self._table.free(None if slots is None else list(slots))

    def release(self) -> None:
        """Give the memory of keys and values back; the next turns allocate as much again, in one piece. Raises
        RuntimeError while turns are in play."""
        if self._live:
            raise RuntimeError(f"{len(self._live)} turns are in play: their keys and values cannot be given back")
        self._usual = max(self._usual[0], self._cache.rows), max(self._usual[1], self._cache.columns)
        held = self._cache.nbytes
        self._cache.clear()
        self._table = RowTable(self._max_rows)
        if held and self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # Another process may compute there, and cannot have what this one's pool keeps.

    def forget_tokens(self) -> None:
        """Forget all cached tokens, because other weights computed them: turns in play compute their prefix again."""
        self._table.forget_tokens()
        for turn in self._live:
            turn.cached = False

    def reset(self) -> None:
        """Forget everything, turns in play too."""
        self._live = []
        self._cache.clear()
        self._table = RowTable(self._max_rows)
        self._pass = None

    def join(self, turns: Sequence[Turn]) -> int:
        """Bring into play as many of the first turns as there are rows for, and return how many: at least one if none
        is in play. Each must leave room for its budget in the model's context, and no two may have the same slot."""
        if not turns:
            return 0
        columns = max(t.length + t.budget for t in turns)
        most = self._room(columns)
        if self._bytes is not None and most is not None and self._cache.rows > most:
            # Longer rows than before: those that there are would take too much, so the cache is made anew.
            if self._live:
                return 0
            self._cache.clear()
            self._table = RowTable(most)
        self._table.max_rows = most
        slots = [t.slot for t in turns]
        rows = self._table.seat(slots, {t.slot for t in self._live})
        if not rows and not self._live:  # The rows are those of turns further back, which would wait for the first.
            self._table.free(None)
            rows = self._table.seat(slots, ())
        seated = turns[: len(rows)]
        if not seated:
            return 0
        self._reserve(max(rows) + 1, columns, most)
        for turn, row in zip(seated, rows, strict=True):
            turn.row, turn.cached = row, False
        self._live.extend(seated)
        return len(seated)

    def _room(self, columns: int) -> int | None:
        """Return how many rows there may be for turns of that many columns; None: any number."""
        if not self._cache.rows:
            self._bytes = self._most_bytes()
        if self._bytes is None:
            return self._max_rows
        wide = self._cache.columns_for(columns) * token_bytes(self.model.config, self.model.dtype)
        room = max(1, self._bytes // wide)
        return room if self._max_rows is None else min(room, self._max_rows)

    def _reserve(self, rows: int, columns: int, most: int | None) -> None:
        held, least = self._cache.rows, rows
        if not held:
            rows = max(rows, self._usual[0])
            columns = max(columns, self._usual[1]) if self._bytes is None else columns
        elif rows > held:
            rows = max(rows, held + held // 2)
        rows = rows if most is None else max(least, min(rows, most))
        with naming_shortage(lambda: f"for the {self._wanting(rows, columns)}"):
            self._cache.reserve(rows, columns)
            self._table.resize(self._cache.rows, self._cache.columns)

    def _wanting(self, rows: int, columns: int) -> str:
        bound = "not set" if self._bytes is None else f"{self._bytes / 2**30:.3g} GiB now"
        return (
            f"keys and values of {rows} rows of {columns} tokens: lower engine.kv_cache_gib ({bound}) or "
            "rollout.max_total_tokens"
        )

    def leave(self, turns: Iterable[Turn]) -> None:
        """Take turns out of play; their cached tokens stay."""
        gone = set(map(id, turns))
        self._live = [turn for turn in self._live if id(turn) not in gone]

    @torch.inference_mode()
    def step(self, version: int) -> list[Turn]:
        """Compute, and draw one token, stamped ``version``, for each turn whose prefix is complete.

        Returns the turns that ended; they have left. Raises FloatingPointError when logits are not finite, RuntimeError
        that names options where there is no memory, and what the model raises.
        """
        rows, columns = self._cache.rows, self._cache.columns
        try:
            with naming_shortage(lambda: f"in a step of generation with {self._wanting(rows, columns)}"):
                self._compact()
                turns, logits = self._compute()
                return self._draw(turns, logits, version)
        except BaseException:
            self.reset()
            raise

    def _compact(self) -> None:
        rows = {turn.row for turn in self._live}
        idle = max(rows, default=-1) + 1 - len(rows)
        if idle < max(2.0, _IDLE_FRACTION * len(rows)):
            return
        self._copy(*self._table.compact(rows))
        for turn in self._live:
            turn.row = self._table.row_of(turn.slot)

    def _copy(self, source: list[int], target: list[int], columns: int | None = None) -> None:
        if source:
            used = int(self._table.lengths[target].max()) if columns is None else columns
            self._cache.copy_rows(self._index(source), self._index(target), used)

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)

    def _compute(self) -> tuple[list[Turn], Tensor]:
        """Compute what is missing; return the turns whose next token can be drawn, and their logits (n, vocabulary)."""
        plan = self._plan()
        turns: list[Turn] = []
        logits: list[Tensor] = []
        levels = 1 + max((item.level for _, item in plan), default=0)
        for level in range(levels):
            members = [(turn, item) for turn, item in plan if item.level == level]
            donated = [item for _, item in members if item.donor != item.row]
            most = max((item.start for item in donated), default=0)
            self._copy([item.donor for item in donated], [item.row for item in donated], most)
            joining = [(turn, item) for turn, item in members if turn.length - item.start > 1]
            pieces = [Piece(turn.row, item.start, turn.prefix()[item.start :]) for turn, item in joining]
            decoding = None
            if level == levels - 1:
                late = {turn.row for turn, item in plan if turn.length - item.start > 1}
                decoding = self._decoding(ready := [t for t in self._live if t.cached and t.row not in late])
                turns.extend(ready)
            turns.extend(turn for turn, _ in joining)
            if decoding is not None or pieces:
                logits.append(self._forward().run(decoding, pieces))
        return turns, torch.cat(logits) if len(logits) > 1 else logits[0]

    def _plan(self) -> list[tuple[Turn, PrefillItem]]:
        planned: dict[int, PrefillItem] = {}
        plan: list[tuple[Turn, PrefillItem]] = []
        spent, most = 0, _STEP_TOKENS.get(self.model.device.type, 8192)
        for turn in self._live:
            if not turn.cached and spent < most:
                item = planned[turn.row] = self._table.plan(turn.row, turn.prefix(), planned)
                turn.cached = True
                plan.append((turn, item))
                spent += turn.length - item.start
                self.computed_tokens += turn.length - item.start
                self.reused_tokens += item.start
        return plan

    def _decoding(self, ready: list[Turn]) -> Decoding | None:
        if not ready:
            return None
        ready.sort(key=lambda turn: turn.row)
        rows = np.array([turn.row for turn in ready])
        positions = self._table.lengths[rows]
        self._table.lengths[rows] += 1
        return Decoding(rows, self._table.tokens[rows, positions], positions, self._table.tokens)

    def _forward(self) -> FastDecoder | ModulePass:
        if self._pass is None:
            self._pass = fast_decoder(self.model, self._cache) or ModulePass(self.model, self._cache, self.limit)
        return self._pass

    def _draw(self, turns: list[Turn], logits: Tensor, version: int) -> list[Turn]:
        tokens, logprobs = self._sample(turns, logits)
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("generate: the model returned logits that are not finite")
        rows, columns = [turn.row for turn in turns], [turn.length for turn in turns]
        self._table.tokens[rows, columns] = tokens
        self.generated_tokens += len(turns)
        ended = []
        for turn, token, logprob in zip(turns, tokens.tolist(), logprobs.tolist(), strict=True):
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)
            turn.versions.append(version)
            if token in turn.stops:
                turn.reason = "stop"
            elif len(turn.token_ids) >= turn.budget:
                turn.reason = "length"
            if turn.reason:
                ended.append(turn)
        if ended:
            self.leave(ended)
        return ended

    def _sample(self, turns: list[Turn], logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Draw tokens int64 and their log-probabilities fp32, (n,) each."""
        streams = np.array([turn.stream for turn in turns], dtype=np.uint64)
        uniform = uniform_at(streams, np.array([turn.length for turn in turns], dtype=np.int64))
        for i, turn in enumerate(turns):
            if turn.draws is not None:
                uniform[i] = turn.draws[len(turn.token_ids)]
        ways: dict[tuple[float, float, int], list[int]] = {}
        for i, turn in enumerate(turns):
            ways.setdefault((turn.config.temperature, turn.config.top_p, turn.config.top_k), []).append(i)
        draw, banned = torch.from_numpy(uniform).to(logits.device), self._banned(turns, logits)
        if len(ways) == 1:
            tokens, logprobs = sample_tokens(logits, draw, turns[0].config, banned)
            return tokens.cpu().numpy(), logprobs.cpu().numpy()
        tokens, logprobs = np.zeros(len(turns), dtype=np.int64), np.zeros(len(turns), dtype=np.float32)
        for members in ways.values():
            at = self._index(members)
            some = sample_tokens(logits[at], draw[at], turns[members[0]].config, None if banned is None else banned[at])
            tokens[members], logprobs[members] = (part.cpu().numpy() for part in some)
        return tokens, logprobs

    def _banned(self, turns: list[Turn], logits: Tensor) -> Tensor | None:
        short = [i for i, turn in enumerate(turns) if turn.short and turn.stops]
        if not short:
            return None
        banned = torch.zeros(logits.shape, dtype=torch.bool)
        for i in short:
            banned[i, list(turns[i].stops)] = True
        return banned.to(logits.device)
