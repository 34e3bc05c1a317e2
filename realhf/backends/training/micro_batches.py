"""Divides a batch into micro-batches, whose activations exist at once: they bound the memory of a train step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.api.sequence_choice import choose_sequences
from realhf.backends.training.padded_batches import BATCH_TOKENS, padded_batches, padded_size
from realhf.backends.training.ranks import Ranks, SingleRank

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Is a micro-batch. ``sample`` has some of the batch's sequences; ``place`` i64 (sum of its L-1,) says where its
    packed L-1 entries stand in those of the batch; ``empty``: it has nothing to compute."""

    sample: SequenceSample
    place: torch.Tensor
    empty: bool


def micro_batches(sample: SequenceSample, spec: MicroBatchSpec) -> list[SequenceSample]:
    """Cut a batch by sequence, even within a group: what concerns groups or the whole batch is already in its keys.

    No part computes more than ``spec.max_tokens_per_mb`` positions, padding included (a single longer sequence is a
    part of its own, and logged), and there are at least ``spec.n_mbs`` parts as far as there are sequences. A sequence
    without a trainable token computes nothing; it goes with the first part. Deterministic; the largest part comes
    first.
    """
    return [part.sample for part in parts_of(sample, spec, SingleRank())]


def parts_of(sample: SequenceSample, spec: MicroBatchSpec, ranks: Ranks) -> list[Part]:
    """Return the micro-batches (see ``micro_batches``) of the sequences that this rank computes; none if it has no
    sequence. Where ranks go in step each of them is a single pass through the model."""
    lengths, trained = _trained(sample)
    own = np.arange(len(lengths))
    if ranks.size > 1:
        costs = np.zeros(len(lengths), dtype=np.int64)
        costs[trained] = lengths[trained]
        own = np.sort(np.asarray(ranks.own(costs.tolist()), dtype=np.int64))
        trained = np.intersect1d(trained, own)
    if not len(own):
        return []
    groups = _parts(trained, lengths, spec, one_pass=ranks.in_step) or [[]]
    idle = np.setdiff1d(own, trained).tolist()
    return [_part(sample, lengths, members, [] if number else idle) for number, members in enumerate(groups)]


def _part(sample: SequenceSample, lengths: np.ndarray, members: list[int], idle: list[int]) -> Part:
    keep = np.zeros(len(lengths), dtype=bool)
    keep[members + idle] = True
    chosen = sample if keep.all() else choose_sequences(sample, keep)
    assert chosen is not None
    place = torch.from_numpy(np.flatnonzero(np.repeat(keep, np.maximum(lengths - 1, 0))))
    return Part(chosen, place, empty=not members)


def _trained(sample: SequenceSample) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths int64 (n sequences,), and which sequences have a trainable token after the first."""
    lengths = np.asarray(sample.lengths("packed_input_ids").values)
    if "loss_mask" not in sample.keys:
        return lengths, np.flatnonzero(lengths > 1)
    mask = sample["loss_mask"].cpu().numpy().astype(bool)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    counted = np.concatenate(([0], np.cumsum(mask)))
    after_first = np.minimum(starts + 1, ends)
    return lengths, np.flatnonzero(counted[ends] - counted[after_first] > 0)


def _parts(trained: np.ndarray, lengths: np.ndarray, spec: MicroBatchSpec, one_pass: bool) -> list[list[int]]:
    """Group padded batches in their order, as many in a part as its budget holds, or one in each part."""
    cap = spec.max_tokens_per_mb
    batches = padded_batches(trained.tolist(), lengths, BATCH_TOKENS if cap is None else min(cap, BATCH_TOKENS))
    parts: list[list[int]] = []
    spent = 0
    for batch in batches:
        size = padded_size(batch, lengths)
        if parts and not one_pass and (cap is None or spent + size <= cap):
            parts[-1] += batch
            spent += size
        else:
            parts.append(list(batch))
            spent = size
    above = int((lengths[trained] > cap).sum()) if cap is not None else 0
    if above:
        _log.warning("%d sequences are longer than max_tokens_per_mb=%s: one micro-batch each", above, cap)
    while len(parts) < min(spec.n_mbs, len(trained)):
        _halve_largest(parts, lengths)
    return parts


def _halve_largest(parts: list[list[int]], lengths: np.ndarray) -> None:
    """Halve the part with the most tokens among those with two sequences or more."""
    divisible = [i for i, part in enumerate(parts) if len(part) > 1]
    largest = max(divisible, key=lambda i: (int(lengths[parts[i]].sum()), -i))
    part = parts[largest]
    parts[largest : largest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
