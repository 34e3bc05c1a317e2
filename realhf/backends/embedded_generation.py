"""Batched generation inside the training process, for any causal language model of transformers.

Every request names a *slot*. The engine keeps a slot's keys and values between calls, compares the tokens
it holds with the request's prefix, reuses what matches and computes the rest of all rows in ragged batches;
then all rows decode together. Rows that start alike (the rollouts of a group, the common system text)
compute their shared prefix once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.kv_cache import RowCache
from realhf.backends.row_attention import row_decoding
from realhf.backends.row_table import PrefillItem, RowTable
from realhf.backends.sampling import check_gen_config, sample_tokens, stream_of, uniform_at

_PREFILL_TOKENS = 4096
_PADDING_TOKENS = 768  # computing so many padded tokens costs a small model about as much as another pass
"""Padded tokens of one prefill pass: bounds the memory of its mask and activations."""
_REPACK_FRACTION = 0.2
"""Finished rows are moved out of the batch when they are this part of it: a move costs about ten steps."""


def context_limit(config: Any) -> int:
    """Longest sequence that the model handles with full attention over everything before it."""
    limit = (
        getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 30
    )
    layer_types = getattr(config, "layer_types", None)
    slides = (
        "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    )
    window = getattr(config, "sliding_window", None)
    return min(limit, window) if window and slides else limit


@dataclass
class _Draws:
    """Uniform numbers of one call, in request order: of the sequence's own stream where the request has a seed, of
    the call's generator elsewhere. ``streams`` uint64 (n,), ``lengths`` int64 (n,) of the prefixes."""

    streams: np.ndarray
    own: np.ndarray
    lengths: np.ndarray
    generator: torch.Generator

    @staticmethod
    def of(requests: Sequence[GenRequest], seed: int) -> _Draws:
        streams = np.array([stream_of(r.seed or 0) for r in requests], dtype=np.uint64)
        own = np.array([r.seed is not None for r in requests])
        lengths = np.array([len(r.token_ids) for r in requests], dtype=np.int64)
        return _Draws(streams, own, lengths, torch.Generator().manual_seed(seed))

    def at(self, step: int) -> np.ndarray:
        """For the token ``step`` places after each prefix, fp64 (n,). Called once per step."""
        shared = torch.rand(len(self.own), generator=self.generator, dtype=torch.float64).numpy()
        return np.where(self.own, uniform_at(self.streams, self.lengths + step), shared)


@dataclass
class _Batch:
    """Rows that decode together, in row order. ``request`` int64 (n,): index of each row's request."""

    request: np.ndarray
    draws: _Draws
    positions: Tensor
    mask: Tensor
    alive: np.ndarray
    logits: Tensor


class EmbeddedGenerator:
    """A ``GenerationEngine`` that runs ``model`` itself. ``version`` is asked for at every call, and the
    number it returns is stamped on the tokens. Not thread-safe."""

    def __init__(self, model: Any, *, version: Callable[[], int] = lambda: 0) -> None:
        self.model = model
        self._version = version
        self._cache = RowCache()
        self._table = RowTable()
        self._limit = context_limit(model.config)
        self.computed_tokens = 0
        self.reused_tokens = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes held for keys and values."""
        return self._cache.nbytes

    def free(self, slots: Sequence[int] | None = None) -> None:
        """Forget these slots (all when None)."""
        self._table.free(slots)

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[GenRequest], config: GenConfig, *, stop_ids: Sequence[int], seed: int
    ) -> list[GenOutput]:
        """See ``GenerationEngine``. A request that leaves no room in the model's context gets an empty
        output with finish reason ``length``. Raises ValueError on an empty prefix, a slot named twice or an
        option out of range, FloatingPointError when the model returns logits that are not finite."""
        check_gen_config(config)
        self._check(requests)
        outputs = [GenOutput([], [], [], "length") for _ in requests]
        room = [i for i, r in enumerate(requests) if len(r.token_ids) < self._limit]
        if not room:
            return outputs
        was_training = self.model.training
        self.model.eval()
        try:
            with row_decoding(self.model):
                made = self._run([requests[i] for i in room], config, stop_ids, seed)
        except BaseException:
            # Rows may be half written; a later call must not take their tokens for cached ones.
            self._table.free(None)
            self._cache.clear()
            self._table = RowTable()
            raise
        finally:
            self.model.train(was_training)
        for i, output in zip(room, made, strict=True):
            outputs[i] = output
        return outputs

    def _check(self, requests: Sequence[GenRequest]) -> None:
        slots = [r.slot for r in requests]
        if len(set(slots)) != len(slots):
            raise ValueError("generate: a slot is named by two requests")
        for request in requests:
            if len(request.token_ids) == 0:
                raise ValueError(f"generate: the request for slot {request.slot} has no tokens")

    def _run(
        self, requests: list[GenRequest], config: GenConfig, stop_ids: Sequence[int], seed: int
    ) -> list[GenOutput]:
        prefixes = [np.asarray(r.token_ids, dtype=np.int64) for r in requests]
        slots = [r.slot for r in requests]
        rest = np.array([config.max_new_tokens - r.sampled for r in requests])
        room = np.array([self._limit - len(p) for p in prefixes])
        budgets = np.minimum(np.minimum(rest, room), config.new_tokens_per_chunk or config.max_new_tokens)
        columns = max(len(p) + b for p, b in zip(prefixes, budgets.tolist(), strict=True))
        self._cache.reserve(self._table.rows_needed(slots), columns)
        self._table.resize(self._cache.rows, self._cache.columns)
        self._copy(*self._table.seat(slots))
        rows = self._table.rows_of(slots)
        plan = self._table.plan_prefill(rows, prefixes)
        logits = self._prefill(plan, prefixes)
        batch = self._start(rows, prefixes, logits, _Draws.of(requests, seed))
        minimum = np.array([config.min_new_tokens - r.sampled for r in requests])
        drawn = self._decode(batch, budgets, minimum, config, stop_ids)
        version = self._version()
        outputs = []
        for i, (tokens, logprobs, stopped) in enumerate(drawn):
            # The last token was drawn but never fed, so its keys and values are not in the cache.
            row, end = self._table.rows_of([slots[i]])[0], len(prefixes[i]) + len(tokens) - 1
            self._table.tokens[row, len(prefixes[i]) : end] = tokens[:-1]
            self._table.lengths[row] = end
            goes_on = len(tokens) < min(rest[i], room[i])
            reason = "stop" if stopped else "interrupted" if goes_on else "length"
            outputs.append(GenOutput(tokens, logprobs, [version] * len(tokens), reason))
        return outputs

    def _copy(self, source: list[int], target: list[int], columns: int | None = None) -> None:
        if source:
            used = int(self._table.lengths.max(initial=0)) if columns is None else columns
            self._cache.copy_rows(self._index(source), self._index(target), used)

    def _index(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self.model.device)

    def _prefill(self, plan: list[PrefillItem], prefixes: list[np.ndarray]) -> Tensor:
        """Compute what the cache lacks; logits (n requests, vocabulary) after every prefix."""
        logits: list[Tensor | None] = [None] * len(plan)
        for level in range(1 + max(item.level for item in plan)):
            members = [i for i, item in enumerate(plan) if item.level == level]
            donated = [plan[i] for i in members if plan[i].donor != plan[i].row]
            self._copy(
                [d.donor for d in donated],
                [d.row for d in donated],
                max((d.start for d in donated), default=0),
            )
            for chunk in self._chunks(members, plan, prefixes):
                out = self._prefill_pass([plan[i] for i in chunk], [prefixes[i] for i in chunk])
                for i, row_logits in zip(chunk, out, strict=True):
                    logits[i] = row_logits
        return torch.stack([row for row in logits if row is not None])

    def _chunks(
        self, members: list[int], plan: list[PrefillItem], prefixes: list[np.ndarray]
    ) -> list[list[int]]:
        """Members by number of missing tokens, cut where padding or the pass would grow too large."""
        missing = {i: len(prefixes[i]) - plan[i].start for i in members}
        chunks: list[list[int]] = []
        for i in sorted(members, key=lambda i: (missing[i], i)):
            longest = missing[i]
            current = chunks[-1] if chunks else []
            fits = current and (len(current) + 1) * longest <= _PREFILL_TOKENS
            padding = sum(longest - missing[j] for j in current)
            if fits and padding <= _PADDING_TOKENS + sum(missing[j] for j in current) // 4:
                current.append(i)
            else:
                chunks.append([i])
        return chunks

    def _prefill_pass(self, items: list[PrefillItem], prefixes: list[np.ndarray]) -> Tensor:
        """One forward pass over missing tokens, padded on the left so that the last query is the last token
        of every row; logits (n, vocabulary)."""
        starts = np.array([item.start for item in items])
        lengths = np.array([len(p) for p in prefixes])
        n_query, width = int((lengths - starts).max()), int(lengths.max())
        position = lengths[:, None] - n_query + np.arange(n_query)
        valid = position >= starts[:, None]
        tokens = np.zeros((len(items), n_query), dtype=np.int64)
        for i, prefix in enumerate(prefixes):
            tokens[i, valid[i]] = prefix[starts[i] :]
        self.computed_tokens += int(valid.sum())
        self.reused_tokens += int(starts.sum())
        columns = self._index(np.where(valid, position, 0))
        rows = self._index([item.row for item in items])
        self._cache.bind_prefill(rows, columns, torch.as_tensor(valid, device=self.model.device), width)
        hidden_future = torch.arange(width, device=self.model.device) > columns[:, None, :, None]
        mask = self._blank_mask(hidden_future.shape).masked_fill_(hidden_future, float("-inf"))
        return self._forward(self._index(tokens), mask, columns)

    def _blank_mask(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(*shape, dtype=self.model.dtype, device=self.model.device)

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _start(self, rows: list[int], prefixes: list[np.ndarray], logits: Tensor, draws: _Draws) -> _Batch:
        """The decoding batch: requests put into row order, masks open up to each row's length."""
        request = np.argsort(np.asarray(rows))
        lengths = self._index([len(prefixes[i]) for i in request])
        closed = torch.arange(self._cache.columns, device=lengths.device) >= lengths[:, None]
        mask = self._blank_mask(closed.shape).masked_fill_(closed, float("-inf"))
        alive = np.ones(len(rows), dtype=bool)
        return _Batch(request, draws, lengths, mask, alive, logits[self._index(request)])

    def _decode(
        self,
        batch: _Batch,
        budgets: np.ndarray,
        minimum: np.ndarray,
        config: GenConfig,
        stop_ids: Sequence[int],
    ) -> list[tuple[list[int], list[float], bool]]:
        """Per request: tokens, log-probabilities, whether a stop id ended it. ``budgets`` and ``minimum`` bound
        the new tokens of each request."""
        n, steps = len(budgets), int(budgets.max())
        stops = torch.zeros(batch.logits.shape[-1], dtype=torch.bool, device=batch.logits.device)
        stops[self._index(list(stop_ids))] = True
        tokens_out = np.zeros((steps, n), dtype=np.int64)
        logprobs_out = np.zeros((steps, n), dtype=np.float32)
        counts, stopped = budgets.copy(), np.zeros(n, dtype=bool)
        for step in range(steps):
            # One draw per request and step, whoever is still alive: a row's tokens do not depend on when
            # other rows end.
            uniform = batch.draws.at(step)[batch.request]
            short = torch.from_numpy(minimum[batch.request] > step)
            banned = stops & short[:, None].to(stops.device) if short.any() else None
            draw = torch.from_numpy(uniform).to(batch.logits.device)
            tokens, logprobs = sample_tokens(batch.logits, draw, config, banned)
            tokens_out[step, batch.request] = tokens.cpu().numpy()
            logprobs_out[step, batch.request] = logprobs.cpu().numpy()
            ends = stops[tokens].cpu().numpy() & batch.alive
            stopped[batch.request[ends]] = True
            counts[batch.request[ends]] = step + 1
            batch.alive &= ~ends & (budgets[batch.request] > step + 1)
            if not batch.alive.any():
                break
            tokens = self._repack(batch, tokens)
            self._step(batch, tokens)
        if not np.isfinite(logprobs_out).all():
            raise FloatingPointError("generate: the model returned logits that are not finite")
        return [
            (tokens_out[: counts[i], i].tolist(), logprobs_out[: counts[i], i].tolist(), bool(stopped[i]))
            for i in range(n)
        ]

    def _step(self, batch: _Batch, tokens: Tensor) -> None:
        """Feed one token per row. Finished rows are fed too, at a position that nobody reads."""
        batch.mask.scatter_(1, batch.positions[:, None], 0.0)
        width = int(batch.positions.max()) + 1
        rows = torch.arange(len(tokens), device=tokens.device)
        self._cache.bind_decode(batch.positions, rows, width)
        mask = batch.mask[:, None, None, :width]
        batch.logits = self._forward(tokens[:, None], mask, batch.positions[:, None])
        batch.positions = batch.positions + torch.from_numpy(batch.alive).to(tokens.device)

    def _repack(self, batch: _Batch, tokens: Tensor) -> Tensor:
        """Move finished rows behind the living ones once they are many enough, and drop them."""
        n, living = len(batch.alive), int(batch.alive.sum())
        if n - living < max(1.0, _REPACK_FRACTION * n):
            return tokens
        dead_in_front = np.flatnonzero(~batch.alive[:living])
        living_behind = living + np.flatnonzero(batch.alive[living:])
        order = np.arange(n)
        order[dead_in_front], order[living_behind] = living_behind, dead_in_front
        if len(dead_in_front):
            self._copy(
                *self._table.swap(dead_in_front.tolist(), living_behind.tolist()), int(batch.positions.max())
            )
        keep = self._index(order[:living])
        batch.request, batch.alive = batch.request[order[:living]], batch.alive[order[:living]]
        batch.positions, batch.mask = batch.positions[keep], batch.mask[keep]
        return tokens[keep]
