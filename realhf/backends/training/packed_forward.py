"""Computes log-probabilities of packed sequences by any causal language model of transformers.

Sequences are sorted by length and run in right-padded batches without an attention mask: under causal attention no real
token sees padding behind it, and the maskless kernels are the fast ones. The vocabulary projection runs only at
positions whose prediction is asked for, in chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from realhf.api.sample import SequenceSample
from realhf.backends.training.padded_batches import BATCH_TOKENS, padded_batches

_CHUNK_ELEMENTS = 1 << 24
"""Number of logits held at once: larger vocabularies are projected in chunks, recomputed in the backward pass."""


@dataclass(frozen=True)
class _Bucket:
    """Holds the sequences of one padded batch. ``tokens`` int64 (n, length); ``row``, ``column`` int64 (m,): positions
    whose prediction is asked for; ``target`` int64 (m,): the predicted token; ``output`` int64 (m,): where the result
    stands in the packed L-1 layout."""

    tokens: Tensor
    row: Tensor
    column: Tensor
    target: Tensor
    output: Tensor


class PackedForward:
    """Scores packed sequences with ``model``; keeps no state between calls. ``pace`` is called between two padded
    batches."""

    def __init__(self, model: Any, *, pace: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.pace = pace
        self._plain_head = _has_plain_head(model)

    def __call__(
        self,
        sample: SequenceSample,
        *,
        temperature: float,
        with_entropy: bool = False,
        max_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities (and entropies) of ``packed_input_ids``: fp32 (sum of L-1,).

        They are 0 where ``loss_mask`` (if present) is False at the predicted token. Logits are divided by
        ``temperature``; a padded batch has at most ``max_tokens`` positions, unless one sequence is longer. Raises
        ValueError on an empty sequence or a temperature that is not positive.
        """
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        device = self.model.device
        buckets, size = _buckets(sample, BATCH_TOKENS if max_tokens is None else min(max_tokens, BATCH_TOKENS))
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        places: list[Tensor] = []
        for bucket in buckets:
            self.pace()
            for rows, targets, places_of_rows in self._projected(bucket, device):
                scored = self._score(rows, targets.to(device), temperature, with_entropy)
                logprobs.append(scored[0])
                entropies.append(scored[1])
                places.append(places_of_rows)
        if not places:
            empty = torch.zeros(size, device=device)
            return empty, (torch.zeros_like(empty) if with_entropy else None)
        index = torch.cat(places).to(device)
        blank = torch.zeros(size, device=device)
        spread = blank.index_copy(0, index, torch.cat(logprobs))
        return spread, (blank.index_copy(0, index, torch.cat(entropies)) if with_entropy else None)

    def _projected(self, bucket: _Bucket, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return chunks of (hidden states, or logits if the model's head is not a plain projection; targets; output
        places)."""
        tokens, row, column = bucket.tokens.to(device), bucket.row.to(device), bucket.column.to(device)
        if not self._plain_head:
            logits = self.model(input_ids=tokens, use_cache=False).logits[row, column]
            return [(logits, bucket.target, bucket.output)]
        hidden = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[row, column]
        size = max(1, _CHUNK_ELEMENTS // self.model.config.vocab_size)
        chunks = zip(hidden.split(size), bucket.target.split(size), bucket.output.split(size), strict=True)
        return list(chunks)

    def _score(self, rows: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        large = rows.shape[0] * self.model.config.vocab_size > _CHUNK_ELEMENTS // 2
        if self._plain_head and large and torch.is_grad_enabled():
            return checkpoint(self._log_softmax, rows, targets, temperature, with_entropy, use_reentrant=False)  # type: ignore[return-value]
        return self._log_softmax(rows, targets, temperature, with_entropy)

    def _log_softmax(
        self, rows: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logits = self.model.get_output_embeddings()(rows) if self._plain_head else rows
        logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        if not with_entropy:
            return -functional.cross_entropy(logits, targets, reduction="none"), logits.new_zeros(0)
        log_p = functional.log_softmax(logits, -1)
        return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@torch.no_grad()
def _has_plain_head(model: Any) -> bool:
    """Return whether logits are output_embeddings(decoder output), without scaling or soft caps on top."""
    tokens = torch.tensor([[0, 1]], device=model.device)
    head = model.get_output_embeddings()
    if head is None:
        return False
    try:
        hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return torch.equal(head(hidden), model(input_ids=tokens, use_cache=False).logits)
    except (AttributeError, TypeError, RuntimeError):
        return False


def _buckets(sample: SequenceSample, most: int) -> tuple[list[_Bucket], int]:
    """Form padded batches of the sequences that have a position to score; return them and the packed output size."""
    lengths = np.asarray(sample.lengths("packed_input_ids").values)
    if (lengths < 1).any():
        raise ValueError("packed_input_ids has an empty sequence")
    tokens = sample["packed_input_ids"].cpu().numpy()
    wanted = sample["loss_mask"].cpu().numpy().astype(bool) if "loss_mask" in sample.keys else None
    starts = np.cumsum(lengths) - lengths
    output_starts = starts - np.arange(len(lengths))
    positions = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        ends = slice(start + 1, start + length)
        positions.append(np.arange(length - 1) if wanted is None else np.flatnonzero(wanted[ends]))
    scored = [i for i in range(len(lengths)) if len(positions[i])]
    out: list[_Bucket] = []
    for members in padded_batches(scored, lengths, most):
        width = int(lengths[members].max()) - 1
        padded = np.zeros((len(members), width), dtype=np.int64)
        for n, i in enumerate(members):
            padded[n, : lengths[i] - 1] = tokens[starts[i] : starts[i] + lengths[i] - 1]
        row = np.repeat(np.arange(len(members)), [len(positions[i]) for i in members])
        column = np.concatenate([positions[i] for i in members])
        target = np.concatenate([tokens[starts[i] + 1 + positions[i]] for i in members])
        place = np.concatenate([output_starts[i] + positions[i] for i in members])
        out.append(_Bucket(*(torch.from_numpy(a) for a in (padded, row, column, target, place))))
    return out, int((lengths - 1).sum())
