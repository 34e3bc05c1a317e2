"""Weights proven with a real server: digests are computed inside it, and the self-test sees what it
computes with."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from realhf.backends.vllm.api import VllmApi
from realhf.backends.vllm.generation import VllmGenerator
from realhf.backends.vllm.server import VllmServer
from realhf.base.tensor_digest import digest_tensors
from realhf.dataflow.weight_proof import LONG_PREFIX, WrongWeights
from tests.workers.weight_fleet import Fleet

PREFIX = [5 + (7 * i) % 400 for i in range(LONG_PREFIX)]
"""Longer than a block of the server's prefix cache."""


@pytest.fixture
async def fleet(server: VllmServer, models: list, tmp_path: Path) -> AsyncIterator[Fleet]:
    generator = VllmGenerator(server.url)
    made = Fleet(tmp_path, {"generation/0": generator}, copy.deepcopy(models[0]), PREFIX)
    yield made
    await made.updates.close()
    made.close()


async def test_the_server_holds_and_computes_with_what_the_trainer_publishes(fleet: Fleet) -> None:
    """A tied head, packed on the CPU, fused projections, the prefix cache."""
    await fleet.start()
    engine = fleet.engines["generation/0"]
    weights = fleet.trainer._host._engine.weights()  # pyright: ignore
    held = engine.weight_digests(list(weights))
    assert {name: tensor.digest for name, tensor in held.items()} == digest_tensors(weights)
    assert await fleet.prove() == ["generation/0"]
    for version in (1, 2):
        await fleet.publish(version)
    assert (fleet.wrong, fleet.warned) == ([], []) and fleet.updates.versions == {"generation/0": 2}


async def test_a_cache_that_outlives_its_weights_fails_the_self_test(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = VllmApi.pause

    async def keeping(self: VllmApi, *, clear_cache: bool, timeout_s: float) -> None:
        del clear_cache
        await pause(self, clear_cache=False, timeout_s=timeout_s)

    await fleet.start()
    monkeypatch.setattr(VllmApi, "pause", keeping)
    with pytest.raises(
        WrongWeights, match=r"generation/0 failed the self-test of weight updates: .*cache"
    ):
        await fleet.prove()


async def test_weights_that_the_server_took_from_somebody_else_are_found_at_the_next_update(
    fleet: Fleet, server: VllmServer, models: list
) -> None:
    await fleet.start()
    other = VllmGenerator(server.url)
    try:
        spoilt = {name: tensor.clone() for name, tensor in models[0].state_dict().items()}
        with torch.no_grad():
            spoilt["model.layers.1.self_attn.k_proj.weight"][3, 3] += 1
        other.load_weights(0, spoilt)
    finally:
        other.close()
    await fleet.publish(1)
    (error,) = fleet.wrong
    text = (
        "generation/0: model.layers.1.self_attn.k_proj.weight changed while version 0 was in use: "
        "its digest was "
    )
    assert str(error).startswith(text)
