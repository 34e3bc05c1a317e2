"""Rows in which common prefixes are computed once: they hold every sequence, show each token its
own past only, and change neither scores nor gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPTNeoConfig,
    MistralConfig,
    Phi3Config,
)

from realhf.api.config import OptimizerConfig
from realhf.api.model import POSITIONS, ForwardOutputs
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training import packed_forward
from realhf.backends.training.micro_batches import Ranks, split_micro_batches
from realhf.backends.training.packed_forward import PackedForward, list_model_windows, probe
from realhf.backends.training.sequence_packing import (
    RowPass,
    SequenceInputs,
    build_packed_pass,
    build_row_layout,
    build_visibility,
    pack_shared_rows,
    split_row,
)
from realhf.backends.training.torch_engine import TorchEngine
from tests.backends.conftest import VOCABULARY
from tests.backends.training.test_attention import products

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9)


@pytest.mark.slow
@given(SEQUENCES, st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_a_row_is_the_tree_of_its_sequences(drawn: list[list[int]], most: int) -> None:
    inputs = [np.asarray(sequence) for sequence in drawn]
    rows = pack_shared_rows(range(len(inputs)), inputs, most)
    assert sorted(i for row in rows for i in row.members) == list(range(len(inputs)))
    pieces = [half for row in rows if not row.is_single for half in split_row(row, inputs)]
    assert all(row.is_single or row.length <= most for row in rows) and all(
        row.members for row in pieces
    )
    for row in rows + pieces:
        lay = build_row_layout(row, inputs)
        prefixes = {}
        for i, path in zip(row.members, lay.columns, strict=True):
            assert lay.tokens[path].tolist() == drawn[i] and lay.depth[path].tolist() == list(
                range(len(drawn[i]))
            )
            for depth, column in enumerate(path.tolist()):
                assert prefixes.setdefault(column, drawn[i][: depth + 1]) == drawn[i][: depth + 1]
        assert (
            len(prefixes) == row.length == len({tuple(prefix) for prefix in prefixes.values()})
        ), "each prefix once"
        seen = build_visibility(row, lay, row.length + 2)
        for column, prefix in prefixes.items():
            ancestors = {c for c, other in prefixes.items() if other == prefix[: len(other)]}
            assert set(np.flatnonzero(seen[column])) == ancestors
        assert seen[row.length :].sum() == 2, "padding sees itself only"


def group_batch(seed: int = 0) -> SequenceSample:
    """Two groups of rollouts: a prompt in common, and a turn that two of each took alike."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=g).tolist()

    groups = []
    masks = []
    for prompt in (draw(17), draw(11)):
        turn = draw(6)
        rollouts = [
            prompt + turn + draw(9),
            prompt + turn + draw(4),
            prompt + draw(12),
            prompt + draw(1),
        ]
        groups.append([*rollouts, rollouts[0]])
        masks += [[i >= len(prompt) for i in range(len(r))] for r in groups[-1]]
    lengths = [[len(r) for r in group] for group in groups]
    tensors = {
        "packed_input_ids": torch.tensor([token for group in groups for r in group for token in r]),
        "loss_mask": torch.tensor([inside for mask in masks for inside in mask]),
    }
    return SequenceSample.from_tensors(["a", "b"], tensors, dict.fromkeys(tensors, lengths))


def made(kind: str, tiny_model: Any) -> Any:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    more = {**shape, "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}
    torch.manual_seed(0)
    if kind == "mistral":
        return AutoModelForCausalLM.from_config(MistralConfig(**more, sliding_window=8)).eval()
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**more, head_dim=8, sliding_window=8, layer_types=layers)
        return AutoModelForCausalLM.from_config(config).eval()
    if kind == "phi3":
        return AutoModelForCausalLM.from_config(Phi3Config(**more)).eval()
    if kind == "bloom":
        return AutoModelForCausalLM.from_config(BloomConfig(**shape, n_head=4, n_layer=2)).eval()
    return tiny_model(kind)


def answers_batch(
    prompt: int, number: int, length: int, group: int | None = None
) -> SequenceSample:
    """Answers after one prompt, which part at once; with ``group`` a new prompt after so many of
    them."""
    g = torch.Generator().manual_seed(1)
    rows: list[Tensor] = []
    for each in range(number):
        if each % (group or number) == 0:
            stem = torch.randint(0, VOCABULARY, (prompt,), generator=g)
        answer = torch.randint(0, VOCABULARY, (length,), generator=g)
        answer[0] = each
        rows.append(torch.cat([stem, answer]))  # type: ignore[has-type]
    mask = torch.cat([torch.arange(len(row)) >= prompt for row in rows])
    lengths = [[len(row)] for row in rows]
    tensors = {"packed_input_ids": torch.cat(rows), "loss_mask": mask}
    return SequenceSample.from_tensors(
        [str(n) for n in range(number)], tensors, dict.fromkeys(tensors, lengths)
    )


def gradient(
    model: Any, share: bool, spec: MicroBatchSpec, batch: Callable[[], SequenceSample] = group_batch
) -> tuple[Tensor, Tensor]:
    """Scores, and the gradient of a loss that weighs every token and its entropy."""
    engine = TorchEngine(model, None, optimizer=OptimizerConfig(), total_train_steps=1)
    assert engine._forward.shares
    engine._forward.shares = share
    kept: list[Tensor] = []

    def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        logprobs, entropy = outputs.logprobs(temperature=0.8, with_entropy=True)
        assert entropy is not None
        return (logprobs * part["weight"]).sum() + 0.1 * entropy.sum(), {}

    def keep(*_: Any) -> float:
        kept.append(
            torch.cat(
                [p.grad.reshape(-1).clone() for p in model.parameters() if p.grad is not None]
            )
        )
        return float("nan")  # Ends the step before the optimizer.

    engine._optimizer.gradient_norm = keep  # type: ignore[union-attr, method-assign]
    scores = engine.logprobs(batch(), temperature=0.8, mb_spec=spec)
    sample = batch()
    shifted = [[n - 1 for n in group] for group in sample.seqlens["packed_input_ids"]]
    weight = torch.linspace(-1, 1, sum(map(sum, shifted)))
    engine.train_batch(
        sample.update(
            SequenceSample.from_tensors(sample.ids, {"weight": weight}, {"weight": shifted})
        ),
        loss,
        mb_spec=spec,
    )
    return scores, kept[0]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "gpt2", "mistral", "gemma3", "phi3"])
def test_scores_and_gradients_equal_those_of_separate_rows(tiny_model: Any, kind: str) -> None:
    apart, of_apart = gradient(made(kind, tiny_model), False, MicroBatchSpec())
    for spec in (MicroBatchSpec(), MicroBatchSpec(n_mbs=3), MicroBatchSpec(max_tokens_per_mb=40)):
        together, of_together = gradient(made(kind, tiny_model), True, spec)
        torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-5)
        assert float((of_together - of_apart).abs().max()) <= 1e-5 * float(of_apart.abs().max())


@pytest.mark.slow
def test_many_short_answers_after_a_long_prompt_change_nothing_and_cost_no_wide_mask(
    tiny_model: Any,
) -> None:
    """Their attention is computed in bundles: losses and gradients are those of separate rows."""

    def batch() -> SequenceSample:
        return answers_batch(50, 40, 3)

    made: list[RowPass] = []
    apart, of_apart = gradient(tiny_model(), False, MicroBatchSpec(), batch)
    with mock.patch.object(
        packed_forward,
        "build_packed_pass",
        lambda *a: made.append(build_packed_pass(*a)) or made[-1],
    ):
        together, of_together = gradient(tiny_model(), True, MicroBatchSpec(), batch)
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-5)
    assert float((of_together - of_apart).abs().max()) <= 1e-5 * float(of_apart.abs().max())
    scored, trained = made[-2:]
    assert (
        trained.visible is None
        and trained.trees is not None
        and trained.tokens.shape == scored.tokens.shape
    )
    assert trained.tokens.shape == (1, 50 + 2 * 40)
    assert len(trained.trees.keys.index) <= 4 * 130 < 40 * 52
    assert products(trained.trees) < 0.75 * 130**2


@pytest.mark.parametrize(
    ("n_ranks", "budget", "most"), [(1, None, 2100), (1, 1200, 2500), (4, None, 4300)]
)
def test_a_prompt_longer_than_a_row_is_still_shared(
    n_ranks: int, budget: int | None, most: int
) -> None:
    """Rows had at most 768 positions where attention needs masks, and a share of the batch on
    several workers: with longer prompts every answer was a row of its own, 32 times the
    positions."""
    sample = answers_batch(1000, 32, 9, 32 // n_ranks)
    computed = []
    for rank in range(n_ranks):
        ranks = cast(
            Ranks,
            SimpleNamespace(rank=rank, size=n_ranks, select_rows=partial(owned, rank, n_ranks)),
        )
        parts = split_micro_batches(
            sample, MicroBatchSpec(max_tokens_per_mb=budget), ranks, share=True
        )
        assert all(part.positions <= (budget or 4096) for part in parts)
        computed.append(sum(part.positions for part in parts))
    assert sum(computed) <= most and max(computed) <= 1.1 * most / n_ranks


def test_a_mask_stays_bounded_however_long_the_prompt_and_the_budget() -> None:
    """A row of 8,000 positions would need a mask of 256 MB."""
    for prompt, number, length in ((3000, 4, 600), (4500, 3, 10)):
        (*parts,) = split_micro_batches(
            answers_batch(prompt, number, length),
            MicroBatchSpec(max_tokens_per_mb=20_000),
            Ranks(),
            share=True,
        )
        assert all(row.is_single or row.length <= 4096 for part in parts for row in part.rows)


def owned(rank: int, size: int, costs: Sequence[int]) -> list[int]:
    """Every rank has as many rows as the others."""
    return [i for i in range(len(costs)) if i * size // len(costs) == rank]


@pytest.mark.slow
def test_common_prefixes_are_computed_once_and_counted(tiny_model: Any) -> None:
    """The prompt, the common turn and the repeated rollout each count once; the last token of a
    rollout is not fed."""
    sample = group_batch()
    engine = TorchEngine(tiny_model(), None, optimizer=OptimizerConfig(), total_train_steps=1)

    def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        return -outputs.logprobs()[0].sum(), {}

    own = [17 + 6 + 8 + 4 - 1 + 11, 11 + 6 + 8 + 4 - 1 + 11]
    spec = MicroBatchSpec()
    parts = split_micro_batches(sample, spec, Ranks(), share=True, packed=True)
    assert sum(row.length for part in parts for row in part.rows) == sum(own)
    assert engine.train_batch(sample, loss, mb_spec=spec).stats[POSITIONS] == sum(
        part.positions for part in parts
    )
    engine._forward.shares = False
    assert engine.train_batch(sample, loss, mb_spec=spec).stats[POSITIONS] > 1.8 * sum(own)


def test_rows_without_much_in_common_need_no_mask(ragged_sample: Any) -> None:
    parts = split_micro_batches(
        ragged_sample([[40, 30, 20], [33]]), MicroBatchSpec(), Ranks(), share=True
    )
    assert all(row.is_single for part in parts for row in part.rows)


def test_a_model_that_follows_no_mask_falls_back(
    tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Bloom takes its positions from a mask of columns, not from what it is told."""
    with caplog.at_level(logging.WARNING):
        forward = PackedForward(made("bloom", tiny_model))
    assert not forward.shares and "prefixes are computed for each sequence" in caplog.text
    outputs = forward(group_batch())
    assert bool((outputs.logprobs()[0][outputs.place] < 0).all())


@pytest.mark.parametrize("window", [64, 300])
def test_a_model_with_a_window_of_columns_shares_nothing(window: int) -> None:
    """GPT-Neo cuts what a token sees by columns, whatever the mask says, and in a shared row
    siblings stand between a token and its prefix."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 48,
    }
    config = GPTNeoConfig(
        **shape,
        attention_types=[[["global", "local"], 1]],
        window_size=window,
        max_position_embeddings=512,
    )
    config.bos_token_id = config.eos_token_id = 1
    torch.manual_seed(0)
    assert not PackedForward(AutoModelForCausalLM.from_config(config).eval()).shares


def test_windows_are_tried_up_to_a_width(tiny_model: Any) -> None:
    """Known ones are those of our own masks; a number of layers is none."""
    config = MistralConfig(sliding_window=4096, max_window_layers=28)
    assert list_model_windows(config) == [] and probe(config) is not None
    config.keep_window_size = 4096
    assert list_model_windows(config) == [4096] and probe(config) is None
    config.keep_window_size = 100
    narrow = probe(config)
    assert narrow is not None
    (row,) = pack_shared_rows(narrow.scored, narrow.tokens)
    assert row.length > 100 + 9 + 5 + 7 and max(len(sequence) for sequence in narrow.tokens) < 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", ["positions", "mask"])
def test_a_model_that_drops_positions_or_masks_shares_nothing(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, broken: str
) -> None:
    model = tiny_model("llama").to(dtype)
    assert PackedForward(model).shares
    whole = model.get_decoder().forward
    dropped = {"positions": ("position_ids",), "mask": ("attention_mask", "row_trees")}[broken]
    monkeypatch.setattr(
        model.get_decoder(), "forward", lambda **given: whole(**{**given, **dict.fromkeys(dropped)})
    )
    assert not PackedForward(model).shares


@torch.no_grad()
def test_bf16_models_share_rows(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores differ by rounding, and by much more where a token sees its siblings."""
    model = tiny_model("llama").bfloat16()
    forward = PackedForward(model)
    sample = group_batch()
    assert forward.shares
    inputs = SequenceInputs.from_sample(sample)
    (part,) = split_micro_batches(sample, MicroBatchSpec(), Ranks(), share=True)
    apart = forward(sample).logprobs()[0]
    rounding = float((forward(sample, part.rows).logprobs()[0] - apart).abs().max())
    whole = model.get_decoder().forward
    monkeypatch.setattr(
        model.get_decoder(), "forward", lambda **given: whole(**{**given, "row_trees": None})
    )
    wrong = float((forward(sample, part.rows).logprobs()[0] - apart).abs().max())
    assert inputs.size == len(apart) and rounding < 0.05 < 0.2 < wrong, (rounding, wrong)
