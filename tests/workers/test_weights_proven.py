"""From the trainer's tensors to an engine's log-probabilities, everything real but the processes:
an engine that is right passes, and one that is wrong in any of these ways is found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from realhf.api.config import BuiltinModelConfig
from realhf.api.generation import HeldTensor
from realhf.api.keys import dtype_tag
from realhf.backends.builtin_policy import build_model
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.base.tensor_digest import digest_tensors
from realhf.dataflow.weight_proof import WrongWeights
from tests.workers.weight_fleet import Fleet

SIZES = BuiltinModelConfig(
    vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64
)
PREFIX = [5, 9, 200, 41, 77, 130, 12, 300, 8, 33, 60, 61]
VICTIM = "model.layers.1.mlp.down_proj.weight"


class Boaster(ContinuousGenerator):
    """Says that it holds whatever it was given, and loads of it what ``takes`` says."""

    def __init__(self, model, takes, **options):
        super().__init__(model, **options)
        self.takes = takes
        self.given = dict[str, Tensor]()

    def load_weights(self, version, tensors, *, again=False):
        self.given = dict(tensors)
        own = dict(self._model.state_dict())
        mixed = {
            name: new if self.version < 0 or self.takes(name) else own[name]
            for name, new in tensors.items()
        }
        super().load_weights(version, mixed, again=again)

    def weight_digests(self, names):
        found = digest_tensors(self.given)
        return {
            name: HeldTensor(dtype_tag(self.given[name].dtype), found[name])
            for name in names
            if name in found
        }


class Corrupted(ContinuousGenerator):
    """Loses one bit of a tensor while it loads a version, which is what a test asks it to do."""

    def load_weights(self, version, tensors, *, again=False):
        super().load_weights(version, tensors, again=again)
        if version > 0:
            flip(self._model)


def flip(model):
    """Flip the lowest bit of the last element of a tensor."""
    with torch.no_grad():
        model.state_dict()[VICTIM].view(torch.int32)[-1, -1] ^= 1


Make = Callable[..., Fleet]


@pytest.fixture
async def make(tmp_path):
    fleets: list[Fleet] = []
    model = build_model(SIZES, SIZES.vocab_size, 3, 0, 7)

    def made(kind=ContinuousGenerator, **options):
        """A fleet whose second engine is of this kind."""
        engines = {
            "generation/0": ContinuousGenerator(copy.deepcopy(model), version=-1),
            "generation/1": kind(copy.deepcopy(model), version=-1, **options),
        }
        fleets.append(Fleet(tmp_path, engines, model, PREFIX))
        return fleets[-1]

    yield made
    for fleet in fleets:
        await fleet.updates.close()
        fleet.close()


@pytest.mark.slow
async def test_right_engines_pass_and_hold_every_version(make):
    fleet = make()
    await fleet.start()
    before = digest_tensors(fleet.trainer._host._engine.weights())  # pyright: ignore
    assert await fleet.prove() == ["generation/0", "generation/1"]
    assert digest_tensors(fleet.trainer._host._engine.weights()) == before  # pyright: ignore
    for version in (1, 2):
        await fleet.publish(version)
    assert (fleet.wrong, fleet.warned) == ([], []) and fleet.updates.versions == {
        "generation/0": 2,
        "generation/1": 2,
    }


@pytest.mark.slow
async def test_an_engine_that_ignores_updates_and_says_otherwise_fails_the_self_test(make):
    fleet = make(Boaster, takes=lambda name: False)
    await fleet.start()
    with pytest.raises(
        WrongWeights,
        match="generation/1 failed the self-test of weight updates: it ignores updates",
    ):
        await fleet.prove()


@pytest.mark.slow
async def test_an_engine_that_computes_with_an_old_copy_of_one_matrix_fails_the_self_test(make):
    """As a server did whose packed copy of a tied head was not renewed."""
    fleet = make(Boaster, takes=lambda name: "embed_tokens" not in name)
    await fleet.start()
    with pytest.raises(
        WrongWeights, match=r"generation/1 failed .* a part of its weights, or of its cache"
    ):
        await fleet.prove()


@pytest.mark.slow
async def test_an_engine_that_answers_from_a_cache_of_earlier_weights_fails_the_self_test(make):
    fleet = make(kv_policy="keep")
    await fleet.start()
    with pytest.raises(
        WrongWeights, match=r"generation/1 failed the self-test of weight updates: .*cache"
    ):
        await fleet.prove()


@pytest.mark.slow
async def test_one_bit_that_is_lost_on_the_way_into_a_model_ends_the_run(make):
    fleet = make(Corrupted)
    await fleet.start()
    await fleet.publish(1)
    (error,) = fleet.wrong
    assert str(error).startswith(
        f"generation/1 does not hold the weights of version 1: {VICTIM} should have digest "
    )
    assert "1 of " in str(error) and fleet.updates.versions["generation/0"] == 1


@pytest.mark.slow
async def test_one_bit_that_changes_between_two_updates_is_found_at_the_next(make):
    fleet = make()
    await fleet.start()
    await fleet.publish(1)
    flip(fleet.engines["generation/1"]._model)
    assert fleet.wrong == []
    await fleet.publish(2)
    (error,) = fleet.wrong
    assert str(error).startswith(
        f"generation/1: {VICTIM} changed while version 1 was in use: its digest was "
    )


@pytest.mark.slow
async def test_an_engine_of_another_element_type_is_compared_in_its_own(make):
    fleet = make(lambda model, **options: ContinuousGenerator(model.to(torch.bfloat16), **options))
    await fleet.start()
    assert await fleet.prove() == ["generation/0", "generation/1"]
    await fleet.publish(1)
    assert fleet.wrong == [] and fleet.updates.versions["generation/1"] == 1
    flip_bf16 = fleet.engines["generation/1"]._model.state_dict()[VICTIM]
    with torch.no_grad():
        flip_bf16.view(torch.int16)[0, 0] ^= 1
    await fleet.publish(2)
    assert "generation/1" in str(fleet.wrong[0]) and VICTIM in str(fleet.wrong[0])
