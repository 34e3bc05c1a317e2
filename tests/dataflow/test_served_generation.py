"""A trainer whose tokens come from an engine beside it: the tokens of its own weights, proven,
version by version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from realhf.api.config import BuiltinModelConfig, GenConfig
from realhf.api.model import GenRequest
from realhf.backends.builtin_policy import build_model
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.tensor_digest import digest_tensors
from realhf.dataflow.served_generation import ServedEngine, ServedGeneration
from realhf.dataflow.weight_proof import WrongWeights
from tests.workers.test_weights_proven import Boaster

torch.set_num_threads(1)
SIZES = BuiltinModelConfig(
    vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64
)
PREFIX = [5, 9, 200, 41, 77, 130, 12]
GEN = GenConfig(max_new_tokens=6)
Serve = Callable[..., ServedEngine]


@pytest.fixture
def serve() -> Iterator[Serve]:
    engines: list[ContinuousGenerator] = []

    def made(
        kind: Callable[..., ContinuousGenerator] = ContinuousGenerator, **options: Any
    ) -> ServedEngine:
        model = build_model(SIZES, SIZES.vocab_size, 3, 0, 7)
        engines.append(kind(build_model(SIZES, SIZES.vocab_size, 3, 0, 8), version=-1, **options))
        trainer: Any = TorchEngine(model, None)
        generation = ServedGeneration(
            trainer, engines[-1], name="the server", context_limit=64, probe=PREFIX, timeout_s=60.0
        )
        return ServedEngine(trainer, generation)

    yield made
    for engine in engines:
        engine.close()


def own_logprobs(engine: Any, output: Any) -> torch.Tensor:
    with torch.inference_mode():
        rows = (
            engine.model(torch.tensor([PREFIX + output.token_ids]))
            .logits[0, len(PREFIX) - 1 : -1]
            .log_softmax(-1)
        )
    return rows.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]


@pytest.mark.slow
def test_tokens_are_those_of_the_trainers_weights_at_every_version(serve: Serve) -> None:
    engine = serve()
    before = digest_tensors(engine.weights())
    requests = [GenRequest(slot, PREFIX, seed=slot) for slot in range(3)]
    for version in (4, 5):
        engine.version = version
        outputs = engine.generator().generate(requests, GEN, stop_ids=(2,), seed=1)
        for output in outputs:
            assert set(output.versions) == {version}
            assert (torch.tensor(output.logprobs) - own_logprobs(engine, output)).abs().max() < 1e-4
        if version == 4:
            assert digest_tensors(engine.weights()) == before, (
                "the self-test has left the trainer as it was"
            )
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
    engine.generator().free([0, 1, 2])


@pytest.mark.slow
def test_requests_without_a_seed_follow_that_of_the_batch(serve: Serve) -> None:
    generator = serve().generator()
    requests = [GenRequest(slot, PREFIX) for slot in range(2)]
    first, again, other = (
        [output.token_ids for output in generator.generate(requests, GEN, stop_ids=(), seed=seed)]
        for seed in (1, 1, 2)
    )
    assert first == again != other and first[0] != first[1]


@pytest.mark.slow
def test_an_engine_that_ignores_the_trainer_is_found_before_the_first_token(serve: Serve) -> None:
    engine = serve(Boaster, takes=lambda name: False)
    before = digest_tensors(engine.weights())
    with pytest.raises(WrongWeights, match="the server failed the self-test of weight updates"):
        engine.generator().generate([GenRequest(0, PREFIX)], GEN, stop_ids=(), seed=1)
    assert digest_tensors(engine.weights()) == before


@pytest.mark.slow
def test_what_the_engine_refuses_is_raised_and_a_slot_is_asked_for_once(serve: Serve) -> None:
    generator = serve().generator()
    with pytest.raises(ValueError, match="no tokens"):
        generator.generate([GenRequest(0, PREFIX), GenRequest(1, [])], GEN, stop_ids=(), seed=1)
    with pytest.raises(ValueError, match="named by two requests"):
        generator.generate([GenRequest(0, PREFIX), GenRequest(0, PREFIX)], GEN, stop_ids=(), seed=1)
    (output,) = generator.generate([GenRequest(0, PREFIX)], GEN, stop_ids=(), seed=1)
    assert len(output.token_ids) == 6
