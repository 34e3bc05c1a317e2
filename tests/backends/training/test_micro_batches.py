"""Micro-batches by sequence: they cover a batch, keep to their budget, and change no gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.api.config import OptimizerConfig
from realhf.api.model import ForwardOutputs
from realhf.api.sample import MicroBatchSpec, SequenceSample, choose_sequences
from realhf.backends.training.micro_batches import Ranks, split_micro_batches
from realhf.backends.training.sequence_packing import batch_packed_rows
from realhf.backends.training.torch_engine import TorchEngine

GROUP = [[60] * 8]
RAGGED = [[40, 31, 7, 22], [17, 50, 2, 1], [33, 33, 12, 64]]


def batch(groups: list[list[int]], seed: int = 0) -> SequenceSample:
    generator = torch.Generator().manual_seed(seed)
    n = sum(map(sum, groups))
    tensors = {
        "packed_input_ids": torch.randint(0, 97, (n,), generator=generator),
        "loss_mask": torch.rand(n, generator=generator) < 0.5,
        "number": torch.arange(sum(map(len, groups))),
        "task": torch.arange(len(groups)),
    }
    seqlens = {
        "packed_input_ids": groups,
        "loss_mask": groups,
        "number": [[1] * len(g) for g in groups],
        "task": [[1]] * len(groups),
    }
    ids = [f"s{i}" for i in range(len(groups))]
    return SequenceSample.from_tensors(
        ids, tensors, seqlens, {"name": [f"task {i}" for i in range(len(groups))]}
    )


def positions(part: SequenceSample) -> int:
    """What a forward pass computes at least: sequences up to their last trained token, without
    padding."""
    trained = [
        mask[1:].nonzero()
        for mask in part["loss_mask"].split(part.lengths("packed_input_ids").values.tolist())
    ]
    return sum(int(places.max()) + 1 for places in trained if len(places))


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=5),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 90)),
)
@settings(max_examples=60, deadline=None)
def test_parts_cover_every_sequence_once_within_the_budget(
    groups: list[list[int]], n_mbs: int, cap: int | None
) -> None:
    sample = batch(groups)
    parts = [
        part.sample for part in split_micro_batches(sample, MicroBatchSpec(n_mbs, cap), Ranks())
    ]
    assert sorted(int(i) for part in parts for i in part["number"]) == list(
        range(sum(map(len, groups)))
    )
    trained = sum(
        1
        for mask in sample["loss_mask"].split([n for g in groups for n in g])
        if bool(mask[1:].any())
    )
    assert len(parts) >= min(n_mbs, max(1, trained))
    for part in parts:
        sizes = [n for n in part.lengths("packed_input_ids").values if n]
        assert cap is None or positions(part) <= max(cap, *sizes)
        assert (
            part["task"].tolist()
            == [int(i[1:]) for i in part.ids]
            == [int(t[5:]) for t in part.metadata["name"]]
        )
    again = [
        part.sample for part in split_micro_batches(sample, MicroBatchSpec(n_mbs, cap), Ranks())
    ]
    assert [part["number"].tolist() for part in again] == [
        part["number"].tolist() for part in parts
    ]


@pytest.mark.slow
@given(st.lists(st.integers(1, 90), max_size=40), st.integers(20, 80))
@settings(max_examples=100, deadline=None)
def test_batches_without_padding_are_few_and_alike(lengths: list[int], most: int) -> None:
    batches = batch_packed_rows(lengths, most)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert all(size <= most or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
    assert (
        len([size for size in sizes if size <= most])
        <= 1 + 2 * sum(n for n in lengths if n <= most) // most
    )
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(lengths, reverse=True), "rows of a batch are of similar length"
    assert [len(batch) for batch in batch_packed_rows([10] * 12, 50)] == [4, 4, 4]


@pytest.mark.slow
def test_a_group_is_cut_and_backward_follows_every_part(tiny_model: Any) -> None:
    """Eight rollouts of one task are one sample: no more of them than the budget holds wait for a
    backward pass."""
    model = tiny_model()
    engine = TorchEngine(model, None, optimizer=OptimizerConfig(lr=1e-3), total_train_steps=1)
    waiting = [0]
    most = []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: waiting.__setitem__(0, waiting[0] + kwargs["input_ids"].numel()),
        with_kwargs=True,
    )

    def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        most.append(waiting[0])
        waiting[0] = 0
        return -outputs.logprobs()[0].sum(), {"sequences": float(len(part["number"]))}

    result = engine.train_batch(batch(GROUP), loss, mb_spec=MicroBatchSpec(1, 128))
    assert len(most) == 4 and max(most) <= 128
    assert result.stats["sequences"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("cap", [130, 64, None])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_gradients_equal_the_unsplit_ones(
    tiny_model: Any, architecture: str, cap: int | None
) -> None:
    sample = batch(RAGGED)
    weight = torch.linspace(-1, 1, sum(map(sum, RAGGED)) - 12)

    def gradient(spec: MicroBatchSpec) -> tuple[Tensor, float]:
        """Of a loss with a weight for every token, which is cut with the sequences."""
        engine = TorchEngine(
            tiny_model(architecture), None, optimizer=OptimizerConfig(), total_train_steps=1
        )
        model = engine.model
        shifted = [[n - 1 for n in group] for group in RAGGED]
        whole = sample.update(
            SequenceSample.from_tensors(sample.ids, {"w": weight}, {"w": shifted})
        )
        kept: list[Tensor] = []

        def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
            return (part["w"] * outputs.logprobs()[0]).sum(), {}

        def keep_gradient(*_: Any) -> float:
            kept.append(
                torch.cat(
                    [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
                ).clone()
            )
            return math.nan  # Ends the step before the optimizer.

        engine._optimizer.gradient_norm = keep_gradient  # type: ignore[union-attr, method-assign]
        stats = engine.train_batch(whole, loss, mb_spec=spec).stats
        return kept[0], stats["loss"]

    whole, loss = gradient(MicroBatchSpec())
    parts, loss_of_parts = gradient(MicroBatchSpec(3, cap))
    assert float((parts - whole).abs().max()) <= 1e-5 * float(whole.abs().max())
    assert loss_of_parts == pytest.approx(loss, rel=1e-5)


def test_a_key_of_another_shape_is_named() -> None:
    sample = batch([[4, 4], [3, 5]])
    odd = SequenceSample.from_tensors(sample.ids, {"odd": torch.arange(3)}, {"odd": [[1, 1], [1]]})
    with pytest.raises(ValueError, match="'odd'"):
        choose_sequences(sample.update(odd), np.array([True, False, True, False]))
