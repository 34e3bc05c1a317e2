"""Computes the hidden states of packed sequences by any decoder of transformers.

Sequences are sorted by length and run in right-padded batches without an attention mask: under causal attention no real
token sees padding behind it, and the maskless kernels are the fast ones. Hidden states are kept only at positions whose
prediction is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.sample import SequenceSample
from realhf.backends.training.forward_outputs import Heads, PackedOutputs, ScoredRows
from realhf.backends.training.padded_batches import BATCH_TOKENS, padded_batches


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
    """Runs packed sequences through ``model``, a causal language model or a decoder with a ``value_head``; keeps no
    state between calls. ``pace`` is called before each padded batch."""

    def __init__(self, model: Any, *, pace: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.pace = pace
        self.heads = heads_of(model)

    def __call__(self, sample: SequenceSample, *, max_tokens: int | None = None) -> PackedOutputs:
        """Return what is known of the positions whose prediction is asked for: where ``loss_mask`` is True at the
        predicted token, or everywhere without one. A padded batch has at most ``max_tokens`` positions, unless one
        sequence is longer. Raises ValueError on an empty sequence."""
        buckets, size = _buckets(sample, BATCH_TOKENS if max_tokens is None else min(max_tokens, BATCH_TOKENS))
        rows = []
        for bucket in buckets:
            self.pace()
            rows.append(self._rows(bucket))
        return PackedOutputs(rows, size, self.heads, self.model.device)

    def nothing(self) -> Tensor:
        """Run one token through the decoder; return a 0 with its graph, which every weight is part of."""
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        nothing = 0.0 * self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state.sum()
        language = None if self.heads.value is not None else self.model.get_output_embeddings()
        for head in (language, self.heads.value):
            for weight in () if head is None else head.parameters():
                nothing = nothing + 0.0 * weight.sum()
        return nothing

    def _rows(self, bucket: _Bucket) -> ScoredRows:
        device = self.model.device
        tokens, row, column = (t.to(device) for t in (bucket.tokens, bucket.row, bucket.column))
        target, place = bucket.target.to(device), bucket.output.to(device)
        if self.heads.logits and self.heads.language is None:
            hidden, logits = _through_the_whole_model(self.model, tokens, row, column)
            return ScoredRows(hidden, target, place, logits)
        hidden = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[row, column]
        return ScoredRows(hidden, target, place)


def heads_of(model: Any) -> Heads:
    """Find out what ``model`` has on top of its decoder."""
    value = getattr(model, "value_head", None)
    if value is not None:
        return Heads(value=value, logits=False)
    return Heads(language=(lambda: model.get_output_embeddings().weight) if _has_plain_head(model) else None)


def _through_the_whole_model(model: Any, tokens: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits at some positions, for a head that scales or bounds its logits: it sees those
    positions only."""
    kept: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> Any:
        kept.append(output.last_hidden_state[row, column])
        output.last_hidden_state = kept[0][None]
        return output

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    finally:
        handle.remove()
    return kept[0], logits


@torch.no_grad()
def _has_plain_head(model: Any) -> bool:
    """Return whether logits are output_embeddings(decoder output), without scaling or soft caps on top."""
    tokens = torch.tensor([[0, 1]], device=model.device)
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
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
