"""The streaming generator over a real vLLM server on the CPU: tokens, log-probabilities, versions,
weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput
from realhf.backends.vllm.generation import VllmGenerator
from realhf.backends.vllm.server import VllmServer
from tests.vllm.conftest import LONG, PROMPT, Asked, logprobs_of, wait_for_tokens


@pytest.fixture
def generator(server: VllmServer, models: list) -> Iterator[VllmGenerator]:
    """Serves the weights of models[0] as version 0, whatever the test before left there."""
    with closing(VllmGenerator(server.url)) as made:
        made.load_weights(0, models[0].state_dict())
        yield made


@pytest.fixture
def ask(generator: VllmGenerator) -> Asked:
    return Asked(generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_the_trainers(ask: Asked, models: list, temperature: float):
    ask.submit(1, PROMPT, GenConfig(max_new_tokens=100, temperature=temperature), seed=4)
    output = ask.output()
    expected = logprobs_of(models[0], PROMPT, output.token_ids, temperature)
    assert output.finish_reason == "length" and output.versions == [0] * 100
    assert (torch.tensor(output.logprobs) - expected).abs().max() < 1e-3
    if temperature == 0:
        with torch.inference_mode():
            logits = models[0](torch.tensor([PROMPT + output.token_ids])).logits[
                0, len(PROMPT) - 1 : -1
            ]
        assert logits.argmax(-1).tolist() == output.token_ids


def test_stop_ids_minimum_and_what_a_turn_has_already(ask: Asked):
    ask.submit(1, PROMPT, GenConfig(max_new_tokens=60), seed=4)
    free = ask.output().token_ids
    stop = next(t for i, t in enumerate(free) if i > 5 and t not in free[:i])
    at = free.index(stop)
    ask.submit(1, PROMPT, GenConfig(max_new_tokens=60), (stop,), seed=4)
    output = ask.output()
    assert output.finish_reason == "stop" and output.token_ids == free[: at + 1]
    ask.submit(1, PROMPT, GenConfig(max_new_tokens=60, min_new_tokens=at + 5), (stop,), seed=4)
    assert stop not in ask.output().token_ids[: at + 5]
    ask.submit(1, PROMPT, GenConfig(max_new_tokens=60), sampled=50, seed=4)
    output = ask.output()
    assert output.finish_reason == "length" and output.token_ids == free[:10]


def test_room_of_the_model(ask: Asked):
    limit = ask.generator.model.max_tokens
    for length, made in ((limit - 3, 3), (limit, 0), (limit + 5, 0)):
        ask.submit(1, [7] * length, LONG)
        output = ask.output()
        assert output.finish_reason == "length" and len(output.token_ids) == made


def test_seeded_tokens_do_not_depend_on_company_and_turns_differ(ask: Asked):
    config = GenConfig(max_new_tokens=30)
    ask.submit(0, PROMPT, config, seed=11)
    alone = ask.output().token_ids
    for slot in range(6):
        ask.submit(slot, PROMPT, config, seed=11 + slot)
    together = ask.outcomes(6)
    tokens = [out.token_ids for _, out in sorted(together.items()) if isinstance(out, GenOutput)]
    assert tokens[0] == alone and len({tuple(row) for row in tokens}) == 6
    assert (
        ask.generator.stats()["running"] == 0 and ask.generator.stats()["generated_tokens"] == 210
    )


def test_many_seeded_prompts_at_once(ask: Asked):
    """More prompt tokens than the server computes in one step; vLLM itself dies of such on the
    CPU."""
    for slot in range(48):
        ask.submit(slot, [*range(200), slot], GenConfig(max_new_tokens=3), seed=slot)
    for output in ask.outcomes(48).values():
        assert isinstance(output, GenOutput) and len(output.token_ids) == 3, output
    before = ask.generator.stats()["reused_tokens"]
    ask.submit(0, [*range(200), 0], GenConfig(max_new_tokens=3))
    ask.output()
    assert ask.generator.stats()["reused_tokens"] > before


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_new_weights_reach_running_requests_between_tokens(
    server: VllmServer, models: list, policy: str
):
    with closing(VllmGenerator(server.url, kv_policy=policy)) as generator:
        generator.load_weights(5, models[0].state_dict())
        ask = Asked(generator)
        # So many that each of the four has some of the first weights, and of the second.
        for slot in range(4):
            ask.submit(slot, [*PROMPT, slot], LONG, seed=slot)
        wait_for_tokens(server, ask, 400)
        generator.load_weights(6, models[1].state_dict())
        wait_for_tokens(server, ask, 400)
        generator.load_weights(7, models[2].state_dict())
        for slot, output in ask.outcomes(4).items():
            assert isinstance(output, GenOutput), output
            assert (
                len(output.token_ids)
                == len(output.logprobs)
                == len(output.versions)
                == LONG.max_new_tokens
            )
            assert output.versions == sorted(output.versions) and set(output.versions) == {5, 6, 7}
            if policy == "recompute":
                rows = [logprobs_of(m, [*PROMPT, slot], output.token_ids, 1.0) for m in models]
                expected = torch.stack(rows)[
                    torch.tensor(output.versions) - 5, torch.arange(LONG.max_new_tokens)
                ]
                assert (torch.tensor(output.logprobs) - expected).abs().max() < 1e-3
        assert generator.version == 7 and generator.stats()["weight_pause_ms"] > 0


def test_requests_wait_for_the_first_weights(server: VllmServer, models: list):
    with closing(VllmGenerator(server.url)) as generator:
        ask = Asked(generator)
        ask.submit(1, PROMPT, GenConfig(max_new_tokens=3))
        ask.submit(2, PROMPT, GenConfig(max_new_tokens=3))
        assert (
            ask.nothing_for(0.3) and generator.version == -1 and generator.stats()["waiting"] == 2
        )
        generator.abort([2])
        output = ask.output()
        assert output == GenOutput([], [], [], "aborted")
        generator.load_weights(3, models[1].state_dict())
        assert ask.output().versions == [3, 3, 3]


def test_abort_keeps_the_tokens(ask: Asked, server: VllmServer, models: list):
    ask.submit(1, PROMPT, LONG, seed=4)
    ask.submit(2, PROMPT, LONG, seed=5)
    wait_for_tokens(server, ask, 40)
    ask.generator.abort([1, 99])
    outcomes = ask.outcomes(2)
    aborted = outcomes[1]
    other = outcomes[2]
    assert isinstance(aborted, GenOutput) and isinstance(other, GenOutput)
    assert aborted.finish_reason == "aborted" and 0 < len(aborted.token_ids) < LONG.max_new_tokens
    expected = logprobs_of(models[0], PROMPT, aborted.token_ids, 1.0)
    assert (torch.tensor(aborted.logprobs) - expected).abs().max() < 1e-3
    assert other.finish_reason == "length" and len(other.token_ids) == LONG.max_new_tokens


def test_pause_stops_sampling_and_weights_may_change_meanwhile(
    ask: Asked, server: VllmServer, models: list
):
    ask.submit(1, PROMPT, LONG, seed=4)
    wait_for_tokens(server, ask, 10)
    ask.generator.pause(10)
    ask.submit(2, PROMPT, GenConfig(max_new_tokens=2))
    ask.generator.load_weights(1, models[1].state_dict())
    assert ask.nothing_for(4.0)
    ask.generator.resume()
    outcomes = ask.outcomes(2)
    first = outcomes[1]
    second = outcomes[2]
    assert isinstance(first, GenOutput) and isinstance(second, GenOutput)
    assert second.versions == [1, 1] and set(first.versions) == {0, 1}


def test_wrong_weights_are_refused_and_the_old_ones_go_on(ask: Asked, models: list):
    generator = ask.generator
    good = models[1].state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    for wrong in (
        {k: v for k, v in good.items() if k != name},
        {**good, name: good[name][1:]},
        {**good, "model.extra": good[name]},
    ):
        with pytest.raises(ValueError, match=r"up_proj|extra"):
            generator.load_weights(1, wrong)
    generator.load_weights(0, good)  # a version in use is left alone
    ask.submit(1, PROMPT, GenConfig(max_new_tokens=20))
    output = ask.output()
    assert output.versions == [0] * 20
    expected = logprobs_of(models[0], PROMPT, output.token_ids, 1.0)
    assert (torch.tensor(output.logprobs) - expected).abs().max() < 1e-3
    generator.load_weights(2, good)
    with pytest.raises(ValueError, match="after version 2"):
        generator.load_weights(1, good)


def test_what_cannot_be_served_is_told(ask: Asked):
    ask.submit(2, [10**6], GenConfig(max_new_tokens=2))
    assert "10" in str(ask.outcomes()[2])
    with pytest.raises(ValueError, match="no tokens"):
        ask.submit(3, [], LONG)
    ask.submit(1, PROMPT, LONG)
    ask.submit(1, PROMPT, LONG)
    assert isinstance(ask.outcomes()[1], ValueError)
    ask.generator.close()
    assert "closed" in str(ask.outcomes()[1])
