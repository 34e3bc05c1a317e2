"""The continuous engine: the tokens of the lockstep engine whatever the company, weights, pauses
and ends between two tokens."""

from __future__ import annotations

import copy
import queue
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.embedded.memory import token_bytes

DEADLINE_S = 120.0
POSITIONS = 4096
LONG = GenConfig(max_new_tokens=4000)
"""Seconds of work: what a test does in the middle of it comes in the middle of it."""
SHORT = GenConfig(max_new_tokens=20)


class Client:
    """Waits for outputs by slot."""

    def __init__(self, engine: ContinuousGenerator) -> None:
        self.engine = engine
        self._ready: queue.Queue[tuple[int, GenOutput | Exception]] = queue.Queue()
        self._over: dict[int, GenOutput | Exception] = {}

    def submit(self, request: GenRequest, config: GenConfig, stop_ids: Any = (2,)) -> None:
        self.engine.submit(
            request, config, stop_ids, lambda result: self._ready.put((request.slot, result))
        )

    def result(self, slot: int) -> GenOutput | Exception:
        while slot not in self._over:
            over, result = self._ready.get(timeout=DEADLINE_S)
            assert over not in self._over, "told twice"
            self._over[over] = result
        return self._over.pop(slot)

    def output(self, slot: int) -> GenOutput:
        result = self.result(slot)
        assert isinstance(result, GenOutput), result
        return result


@contextmanager
def running(model: Any, **options: Any) -> Iterator[Client]:
    engine = ContinuousGenerator(model, **options)
    try:
        yield Client(engine)
    finally:
        engine.close()


def until_tokens(engine: ContinuousGenerator, count: int) -> None:
    """Wait until so many tokens were made in all."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.002)):
        if engine.stats()["generated_tokens"] >= count:
            return
        pause.wait(0.002)
    raise AssertionError(f"no {count} tokens within {DEADLINE_S} s")


def alone(model: Any, request: GenRequest, config: GenConfig, stop_ids: Any = (2,)) -> GenOutput:
    return EmbeddedGenerator(model).generate([request], config, stop_ids=stop_ids, seed=0)[0]


def logprobs_under(model: Any, prefix: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([prefix + tokens])).logits[0].log_softmax(-1)
    return log_p[len(prefix) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]


def changed(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() * 1.1 + 0.01 for name, value in model.named_parameters()}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "max_rows"), [("qwen3", 4), ("qwen3", 64), ("gpt2", 4)])
def test_turns_that_come_and_go_get_the_tokens_they_get_alone(
    tiny_model: Any, architecture: str, max_rows: int
) -> None:
    model = tiny_model(architecture)
    rng = random.Random(3)
    common = [rng.randrange(3, 97) for _ in range(20)]
    texts = {
        slot: common[: rng.randrange(5, 21)] + [rng.randrange(3, 97) for _ in range(9)]
        for slot in range(10)
    }
    texts[4] = list(texts[3])
    with running(tiny_model(architecture), max_rows=max_rows) as client:
        for turn in range(3):
            configs = {
                slot: GenConfig(
                    max_new_tokens=rng.randrange(3, 20), temperature=rng.choice([1.0, 0.8])
                )
                for slot in texts
            }
            requests = {
                slot: GenRequest(slot, list(ids), seed=100 * slot + turn)
                for slot, ids in texts.items()
            }
            for slot in rng.sample(sorted(texts), len(texts)):
                client.submit(requests[slot], configs[slot], stop_ids=range(8))
                if rng.random() < 0.3:
                    until_tokens(client.engine, int(client.engine.stats()["generated_tokens"]) + 1)
            for slot, request in requests.items():
                output = client.output(slot)
                expected = alone(model, request, configs[slot], range(8))
                assert (output.token_ids, output.finish_reason) == (
                    expected.token_ids,
                    expected.finish_reason,
                )
                torch.testing.assert_close(
                    torch.tensor(output.logprobs),
                    torch.tensor(expected.logprobs),
                    atol=1e-4,
                    rtol=0,
                )
                texts[slot] += output.token_ids + [rng.randrange(3, 97) for _ in range(4)]
        stats = client.engine.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["busy_s"] > 0
    if max_rows == 64:
        assert stats["reused_tokens"] > 2 * stats["prefill_tokens"]


@pytest.fixture
def long_model(tiny_model: Any) -> Any:
    return tiny_model("qwen3", POSITIONS)


@pytest.mark.slow
@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
def test_new_weights_come_between_two_tokens(
    long_model: Any, tiny_model: Any, kv_policy: str
) -> None:
    new = changed(long_model)
    prompts = {slot: [5, 6, 7, 8, 9, 10, 11, 12, 13, slot + 20] for slot in range(6)}
    with running(long_model, kv_policy=kv_policy) as client:
        for slot, prompt in prompts.items():
            client.submit(GenRequest(slot, prompt, seed=slot), LONG, stop_ids=())
        until_tokens(client.engine, 30)
        client.engine.load_weights(3, new)
        assert client.engine.version == 3
        until_tokens(client.engine, int(client.engine.stats()["generated_tokens"]) + 60)
        assert client.engine.stats()["weight_pause_ms"] > 0
        client.engine.abort(list(prompts))
        outputs = {slot: client.output(slot) for slot in prompts}
    first = tiny_model("qwen3", POSITIONS)
    updated = tiny_model("qwen3", POSITIONS)
    updated.load_state_dict(new, strict=False)
    for slot, output in outputs.items():
        old = output.versions.count(0)
        n = len(output.token_ids)
        assert 0 < old < n and output.versions == [0] * old + [3] * (n - old)
        before = logprobs_under(first, prompts[slot], output.token_ids)
        after = logprobs_under(updated, prompts[slot], output.token_ids)
        got = torch.tensor(output.logprobs)
        torch.testing.assert_close(got[:old], before[:old], atol=1e-4, rtol=0)
        exact = torch.allclose(got[old:], after[old:], atol=1e-4, rtol=0)
        assert exact == (kv_policy == "recompute"), (
            "keys and values of the old weights show in what follows"
        )


@pytest.mark.slow
def test_weights_are_taken_whole_or_not_at_all(tiny_model: Any) -> None:
    model = tiny_model()
    new = changed(model)
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: value for key, value in new.items() if key != name}
    request = GenRequest(0, [5, 6, 7], seed=1)
    with running(model, version=4) as client:
        for tensors, text in (
            (missing, f"{name} is missing"),
            ({**new, "x": new[name]}, "no tensor x"),
            ({**new, name: new[name][1:]}, name),
            ({**new, name: new[name].long()}, name),
        ):
            with pytest.raises(ValueError, match=text):
                client.engine.load_weights(5, tensors)
        with pytest.raises(ValueError, match="version 3 after"):
            client.engine.load_weights(3, new)
        client.engine.load_weights(4, new)  # in use already: left alone
        client.submit(request, SHORT)
        output = client.output(0)
        assert set(output.versions) == {4}
        assert output.token_ids == alone(tiny_model(), request, SHORT).token_ids
        client.engine.load_weights(5, {**new, "lm_head.weight": new["model.embed_tokens.weight"]})
        assert client.engine.version == 5
        torch.testing.assert_close(model.get_parameter(name), new[name])


def test_requests_wait_for_the_first_weights(tiny_model: Any) -> None:
    model = tiny_model()
    weights = changed(model)
    with running(model, version=-1) as client:
        client.submit(GenRequest(0, [5, 6], seed=1), GenConfig(max_new_tokens=4), stop_ids=())
        assert client.engine.version == -1 and client.engine.stats()["waiting"] == 1
        client.engine.load_weights(0, weights)
        assert client.output(0).versions == [0] * 4


@pytest.mark.slow
def test_a_pause_stops_sampling_until_resume(long_model: Any) -> None:
    new = changed(long_model)
    with running(long_model) as client:
        client.submit(GenRequest(0, [5, 6], seed=1), LONG, stop_ids=())
        until_tokens(client.engine, 3)
        client.engine.pause(DEADLINE_S)
        made = int(client.engine.stats()["generated_tokens"])
        client.submit(GenRequest(1, [7, 8], seed=2), SHORT, stop_ids=())
        client.engine.load_weights(1, new)
        threading.Event().wait(0.05)
        assert client.engine.stats()["generated_tokens"] == made
        client.engine.resume()
        assert client.output(1).versions == [1] * 20
        client.engine.pause(DEADLINE_S)
        client.engine.abort([0])
        assert client.output(0).versions.count(0) == made
        client.engine.resume()


@pytest.mark.slow
def test_aborted_requests_keep_their_tokens_and_free_their_place(
    long_model: Any, tiny_model: Any
) -> None:
    requests = [GenRequest(slot, [5, 6, slot + 7], seed=slot) for slot in range(4)]
    with running(long_model, max_rows=2) as client:
        for request in requests:
            client.submit(request, SHORT if request.slot == 2 else LONG, stop_ids=())
        until_tokens(client.engine, 6)
        client.engine.abort([0, 3, 99])
        first = client.output(0)
        last = client.output(3)
        assert (first.finish_reason, last.finish_reason) == ("aborted", "aborted")
        assert first.token_ids and last.token_ids == []
        assert client.output(2).token_ids == alone(tiny_model(), requests[2], SHORT, ()).token_ids
        made = len(first.token_ids)
        rest = GenRequest(0, [5, 6, 7, *first.token_ids], made, seed=0)
        client.submit(rest, GenConfig(max_new_tokens=made + 20), stop_ids=())
        whole = alone(
            tiny_model("qwen3", POSITIONS), requests[0], GenConfig(max_new_tokens=made + 20), ()
        )
        assert first.token_ids + client.output(0).token_ids == whole.token_ids
        client.engine.abort([1])
        assert client.output(1).finish_reason == "aborted"


def test_freed_slots_are_computed_again_and_a_playing_one_is_forgotten_later(
    long_model: Any,
) -> None:
    prompt = list(range(3, 33))
    with running(long_model) as client:
        client.submit(GenRequest(0, prompt, seed=1), LONG, stop_ids=())
        until_tokens(client.engine, 1)
        client.engine.free([0, 55])
        until_tokens(client.engine, 10)
        client.engine.abort([0])
        assert len(client.output(0).token_ids) >= 10
        client.submit(GenRequest(1, prompt, seed=1), SHORT, stop_ids=())
        client.output(1)
        assert client.engine.stats()["reused_tokens"] == 0
        client.submit(GenRequest(2, prompt, seed=1), SHORT, stop_ids=())
        client.output(2)
        assert client.engine.stats()["reused_tokens"] == 29


def test_bad_requests_fail_alone(long_model: Any) -> None:
    with running(long_model) as client:
        client.submit(GenRequest(0, [5], seed=1), LONG, stop_ids=())
        until_tokens(client.engine, 1)
        second: queue.Queue[Any] = queue.Queue()
        client.engine.submit(GenRequest(0, [6]), LONG, (), second.put)
        assert "slot 0 is in play" in str(second.get(timeout=DEADLINE_S))
        client.submit(GenRequest(1, []), LONG)
        client.submit(GenRequest(2, [5]), GenConfig(top_p=0.0))
        client.submit(GenRequest(3, [5] * POSITIONS), LONG)
        assert "slot 1 has no tokens" in str(client.result(1))
        assert "top_p" in str(client.result(2))
        assert client.output(3) == GenOutput([], [], [], "length")
        client.engine.abort([0])
        assert client.output(0).token_ids


@pytest.mark.slow
def test_a_failed_forward_pass_fails_its_requests_and_not_the_engine(
    long_model: Any, tiny_model: Any
) -> None:
    request = GenRequest(0, [5, 6, 7], seed=1)
    good = {name: value.detach().clone() for name, value in long_model.named_parameters()}
    broken = {name: torch.full_like(value, float("nan")) for name, value in good.items()}
    with running(long_model) as client:
        client.submit(request, LONG, stop_ids=())
        until_tokens(client.engine, 1)
        client.engine.load_weights(1, broken)
        assert isinstance(client.result(0), FloatingPointError)
        client.engine.load_weights(2, good)
        client.submit(request, SHORT, stop_ids=())
        assert client.output(0).token_ids == alone(tiny_model(), request, SHORT, ()).token_ids


def test_close_ends_what_is_in_flight(long_model: Any) -> None:
    with running(long_model, max_rows=1) as client:
        for slot in range(2):
            client.submit(GenRequest(slot, [5]), LONG, stop_ids=())
        until_tokens(client.engine, 1)
        client.engine.close()
        for slot in range(2):
            assert "closed" in str(client.result(slot))
        with pytest.raises(RuntimeError, match="closed"):
            client.submit(GenRequest(2, [5]), LONG)
        with pytest.raises(RuntimeError, match="closed"):
            client.engine.load_weights(1, {})
        client.engine.close()
        client.engine.pause(1.0)


@pytest.mark.slow
def test_requests_without_a_seed_differ(tiny_model: Any) -> None:
    with running(tiny_model()) as client:
        for slot in range(2):
            client.submit(GenRequest(slot, [5]), SHORT, stop_ids=())
        assert client.output(0).token_ids != client.output(1).token_ids


@pytest.mark.slow
def test_a_replica_keeps_the_weights_that_it_was_made_with(tiny_model: Any) -> None:
    """Also while the engine itself is in the middle of a turn, takes others, and is closed."""
    model = tiny_model()
    request = GenRequest(0, [5, 6, 7], seed=1)
    greedy = GenConfig(max_new_tokens=12, temperature=0)
    with running(model, version=4) as client:
        client.submit(GenRequest(1, [5, 6], seed=2), SHORT, stop_ids=())
        second = client.engine.replica()
        assert second is not None
        replica = Client(second)
        client.engine.load_weights(5, changed(model))
        assert (client.engine.version, replica.engine.version) == (5, 4)
        replica.submit(request, greedy, stop_ids=())
        kept = replica.output(0)
        client.submit(request, greedy, stop_ids=())
        assert client.output(0).logprobs != pytest.approx(kept.logprobs), (
            "the engine has other weights"
        )
        client.output(1)
    try:
        replica.submit(GenRequest(3, [5, 6, 7], seed=1), greedy, stop_ids=())
        assert replica.output(3).token_ids == kept.token_ids
    finally:
        replica.engine.close()
    expected = alone(tiny_model(), request, greedy, stop_ids=())
    assert kept.token_ids == expected.token_ids and kept.logprobs == pytest.approx(
        expected.logprobs, abs=1e-5
    )
    assert kept.versions == [4] * 12


def test_without_memory_for_a_second_copy_there_is_no_replica(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(model: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 16 GiB")

    with running(tiny_model()) as client:
        monkeypatch.setattr("copy.deepcopy", no_memory)
        assert client.engine.replica() is None
    assert "tried to allocate 16 GiB" in caplog.text


@pytest.mark.slow
def test_requests_that_find_no_memory_wait_for_others(tiny_model: Any) -> None:
    """With a bound on keys and values that two of them fill, and longer ones in between."""
    model = tiny_model()
    one = token_bytes(model.config, model.dtype) * 64
    prompts = [[5 + n, 6, 7] * (40 if n in (3, 6) else 2) for n in range(9)]
    told: dict[bool, list[list[int]]] = {}
    for bound in (False, True):
        most = 2 * one if bound else None
        with closing(
            ContinuousGenerator(copy.deepcopy(model), max_bytes=lambda most=most: most)
        ) as engine:
            client = Client(engine)
            for n, prompt in enumerate(prompts):
                client.submit(GenRequest(n, prompt, seed=n), GenConfig(max_new_tokens=7), ())
            outputs = [client.result(n) for n in range(len(prompts))]
            told[bound] = [output.token_ids for output in outputs if isinstance(output, GenOutput)]
            if bound:
                assert engine._core.kv_bytes <= 2 * one
    assert told[True] == told[False] and all(len(tokens) == 7 for tokens in told[True])
