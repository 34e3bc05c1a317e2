"""What a loss and a post-processing function see of a forward pass, and that several ranks compute
what one does."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from realhf.api.config import OptimizerConfig
from realhf.api.model import POSITIONS, ForwardOutputs, TrainResult
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.packed_forward import Heads, PackedForward
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.partition import balanced_parts
from tests.backends.conftest import VOCABULARY

GROUPS = [[20, 5], [11], [30, 8, 8], [3, 1]]
DEADLINE_S = 60


class ValueModel(nn.Module):
    """A decoder with a value head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model.get_decoder()
        self.config = model.config
        self.device = model.device
        self.value_head = nn.Linear(self.config.hidden_size, 1)

    def get_decoder(self) -> Any:
        """What the engine runs."""
        return self.decoder


def engine_of(model: Any, **more: Any) -> TorchEngine:
    return TorchEngine(
        model, None, optimizer=OptimizerConfig(lr=1e-2), total_train_steps=10, **more
    )


def nll(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
    logprobs, entropy = outputs.logprobs(temperature=0.7, with_entropy=True)
    assert entropy is not None
    outputs.keep("twice", 2 * logprobs)
    return -logprobs.sum() - 0.1 * entropy.sum(), {
        "n": float(len(outputs.target)),
        "low_max": -float(logprobs.detach().min()),
    }


def test_hidden_states_head_and_places_give_the_log_probabilities(
    tiny_model: Any, ragged_sample: Any
) -> None:
    sample = ragged_sample(GROUPS)

    def by_hand(outputs: ForwardOutputs, part: SequenceSample) -> Tensor:
        assert (
            outputs.head is not None and outputs.place.dtype == outputs.target.dtype == torch.int64
        )
        logits = outputs.hidden @ outputs.head.T / 0.7
        found = logits.log_softmax(-1).gather(1, outputs.target[:, None])[:, 0]
        size = part.n_tokens("packed_input_ids") - len(part.lengths("packed_input_ids").values)
        return torch.zeros(size).index_copy(0, outputs.place, found)

    engine = engine_of(tiny_model())
    for spec in (MicroBatchSpec(), MicroBatchSpec(n_mbs=3, max_tokens_per_mb=32)):
        expected = engine.logprobs(sample, temperature=0.7, mb_spec=spec)
        torch.testing.assert_close(
            engine.forward(sample, by_hand, mb_spec=spec), expected, atol=1e-5, rtol=0
        )


def test_what_a_loss_keeps_comes_back_for_the_whole_batch(
    tiny_model: Any, ragged_sample: Any
) -> None:
    sample = ragged_sample(GROUPS)
    engine = engine_of(tiny_model())
    before = engine.logprobs(sample, temperature=0.7, mb_spec=MicroBatchSpec())
    result = engine.train_batch(sample, nll, mb_spec=MicroBatchSpec(n_mbs=3))
    torch.testing.assert_close(result.kept["twice"], 2 * before, atol=1e-5, rtol=0)

    def wrong(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        outputs.keep("odd", torch.zeros(3))
        return outputs.logprobs()[0].sum(), {}

    with pytest.raises(ValueError, match=r"keep\('odd'\): shape \(3,\)"):
        engine.train_batch(sample, wrong, mb_spec=MicroBatchSpec())
    with pytest.raises(ValueError, match=r"post_fn returned \(2,\)"):
        engine.forward(sample, lambda *_: torch.zeros(2), mb_spec=MicroBatchSpec())


@pytest.mark.slow
def test_the_normaliser_divides_the_loss_and_its_gradient(
    tiny_model: Any, ragged_sample: Any
) -> None:
    sample = ragged_sample(GROUPS)
    plain, divided = (
        engine_of(tiny_model()).train_batch(sample, nll, mb_spec=MicroBatchSpec(), normaliser=n)
        for n in (1.0, 8.0)
    )
    assert divided.stats["loss"] == plain.stats["loss"] / 8
    assert (
        divided.grad_norm == pytest.approx(plain.grad_norm / 8, rel=1e-6)
        and divided.stats["n"] == plain.stats["n"]
    )
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="normaliser"):
            engine_of(tiny_model()).train_batch(
                sample, nll, mb_spec=MicroBatchSpec(), normaliser=bad
            )


@pytest.mark.slow
def test_a_value_head_trains_and_neither_scores_nor_generates(
    tiny_model: Any, ragged_sample: Any
) -> None:
    sample = ragged_sample(GROUPS)
    engine = engine_of(ValueModel(tiny_model()))
    wanted = torch.cat([m[1:] for m in sample["loss_mask"].split([n for g in GROUPS for n in g])])

    def to_one(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        values = outputs.values()
        return (values[outputs.place] - 1).square().mean(), {}

    losses = []
    for _ in range(8):
        losses.append(engine.train_batch(sample, to_one, mb_spec=MicroBatchSpec()).stats["loss"])
        engine.version += 1
    assert losses[-1] < 0.5 * losses[0]
    values = engine.forward(
        sample, lambda outputs, _: outputs.values(), mb_spec=MicroBatchSpec(n_mbs=2)
    )
    assert bool((values[wanted] != 0).all()) and not values[~wanted].any()
    with pytest.raises(ValueError, match="no language-model head"):
        engine.logprobs(sample, temperature=1.0, mb_spec=MicroBatchSpec())
    with pytest.raises(ValueError, match="does not generate"):
        engine.generator()
    with pytest.raises(ValueError, match="no value head"):
        engine_of(tiny_model()).forward(
            sample, lambda outputs, _: outputs.values(), mb_spec=MicroBatchSpec()
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Gemma2Config, GraniteConfig])
def test_a_head_that_bounds_or_scales_its_logits_sees_scored_positions_only(
    kind: Any, ragged_sample: Any
) -> None:
    torch.manual_seed(1)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    more = (
        {"logits_scaling": 3.0}
        if kind is GraniteConfig
        else {"final_logit_softcapping": 2.0, "head_dim": 8}
    )
    config = kind(**shape, num_key_value_heads=2, intermediate_size=48, pad_token_id=0, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    sample = ragged_sample(GROUPS)
    rows = []
    model.get_output_embeddings().register_forward_hook(
        lambda _, args, output: rows.append(output[..., 0].numel())
    )
    forward = PackedForward(model)
    assert forward.heads.language is not None
    forward.heads = Heads()  # As if nothing were known of it.
    rows.clear()
    outputs = forward(sample)
    assert outputs.head is None and sum(rows) == len(outputs.target) < sample.n_tokens(
        "packed_input_ids"
    )
    found = outputs.logprobs(temperature=0.8)[0]
    start = 0
    for number, length in enumerate(n for group in GROUPS for n in group):
        ids, wanted = (sample[k][start : start + length] for k in ("packed_input_ids", "loss_mask"))
        log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].double() / 0.8, -1)
        expected = torch.where(wanted[1:], log_p.gather(1, ids[1:, None])[:, 0], 0.0)
        own = found[start - number : start - number + length - 1]
        torch.testing.assert_close(own.double(), expected, atol=1e-4, rtol=0)
        start += length


class ThreadRanks:
    """Ranks that are threads of one process: what they have in common is a list under a barrier."""

    passes_are_collective = True

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self._board = board
        self._barrier = barrier

    def select_rows(self, costs: Sequence[int]) -> list[int]:
        """Sequences by their tokens; a rank may go without."""
        real = [i for i, cost in enumerate(costs) if cost]
        if len(real) < self.size:
            return real[self.rank : self.rank + 1] + (
                [i for i, c in enumerate(costs) if not c] if not self.rank else []
            )
        return balanced_parts(costs, self.size)[self.rank]

    def _all(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(DEADLINE_S)
        found = list(self._board)
        self._barrier.wait(DEADLINE_S)
        return found

    def settle(self) -> None:
        """Threads have no device to wait for."""

    def sum_(self, tensor: Tensor) -> None:
        """Add up in the order of ranks."""
        tensor.copy_(sum(self._all(tensor.clone())))  # type: ignore[arg-type]

    def gather(self, numbers: Mapping[str, float]) -> list[dict[str, float]]:
        """Everybody's numbers."""
        return self._all(dict(numbers))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """One by one; nothing counts as zeros."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.sum_(parameter.grad)

    def abort(self) -> None:
        """Wake who waits."""
        self._barrier.abort()


def on_ranks(
    size: int, model: Any, sample: SequenceSample, spec: MicroBatchSpec
) -> list[tuple[Any, ...]]:
    board, barrier, passes = [None] * size, threading.Barrier(size), [0] * size
    # Drawn one after another: the random numbers are the process's.
    models = [model() for _ in range(size)]

    def run(rank: int) -> tuple[Any, ...]:
        own = models[rank]
        own.get_decoder().register_forward_hook(
            lambda *_: passes.__setitem__(rank, passes[rank] + 1)
        )
        ranks = ThreadRanks(rank, size, board, barrier)
        engine = engine_of(own, **({} if size == 1 else {"ranks": ranks}))
        passes[rank] = 0
        try:
            results: list[TrainResult] = []
            for _ in range(3):
                results.append(engine.train_batch(sample, nll, mb_spec=spec))
                engine.version += 1
            scores = engine.logprobs(sample, temperature=0.9, mb_spec=spec)
        except BaseException:
            ranks.abort()
            raise
        return (
            results,
            scores,
            torch.cat([p.detach().reshape(-1) for p in own.parameters()]),
            passes,
        )

    with ThreadPoolExecutor(size) as pool:
        return [job.result(DEADLINE_S) for job in [pool.submit(run, rank) for rank in range(size)]]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [GROUPS, [[9, 30]]], ids=["many", "fewer-than-ranks"])
def test_several_ranks_compute_what_one_computes(
    tiny_model: Any, ragged_sample: Any, groups: list[list[int]]
) -> None:
    """Losses, statistics, kept tensors, gradients and scores, with a rank that has nothing to do
    among them."""
    sample = ragged_sample(groups)
    spec = MicroBatchSpec(n_mbs=2, max_tokens_per_mb=32)
    alone = on_ranks(1, tiny_model, sample, spec)[0]
    found = on_ranks(3, tiny_model, sample, spec)
    for results, scores, weights, passes in found:
        assert len(set(passes)) == 1, "every rank takes part in every pass"
        for own, expected in zip(results, alone[0], strict=True):
            found_stats, of_one = (
                {k: v for k, v in r.stats.items() if k != POSITIONS} for r in (own, expected)
            )
            assert found_stats == pytest.approx(of_one, rel=1e-4)
            assert own.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            torch.testing.assert_close(own.kept["twice"], expected.kept["twice"], atol=1e-4, rtol=0)
        torch.testing.assert_close(
            results[0].kept["twice"], alone[0][0].kept["twice"], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(scores, alone[1], atol=1e-4, rtol=0)
        assert torch.equal(weights, found[0][2]) and torch.equal(scores, found[0][1])
