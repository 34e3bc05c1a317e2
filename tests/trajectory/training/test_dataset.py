"""Batches as samples to train on, and what becomes of their leases: consumed, saved, restarted,
lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.api.source import DataSource
from realhf.registry import interfaces, sources
from realhf.trajectory.client import Denied, NoBatchYet, NotRegistered, TrajectoryClient
from realhf.trajectory.training.dataset import renew_lease
from realhf.trajectory.training.stream_interface import TrajectoryStreamInterface
from tests.trajectory.conftest import running_server
from tests.trajectory.groups import group

RUN: dict[str, Any] = {
    "group": "mine", "project": "a "
                                "b", "batch_size": 4, "num_steps": 9, "max_tokens": 16, "min_group_size": 2,
    "temperature": 1.0, "wait_s": 5.0,
}  # fmt: skip


class FakeEngine:
    """Scores every token with -7."""

    version = 0

    def logprobs(
        self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
    ) -> torch.Tensor:
        assert temperature == 1.0
        return torch.full(
            (sum(length - 1 for length in sample.lengths("packed_input_ids").values),), -7.0
        )


class FakeTokenizer:
    def __len__(self) -> int:
        return 150_000

    def decode(self, ids: list[int], **_: Any) -> str:
        return f"{len(ids)} tokens"


MODEL = Model("actor", FakeEngine(), FakeTokenizer())  # type: ignore[arg-type]
Maker = Callable[..., TrajectoryStreamInterface]


@pytest.fixture
def make(api: httpx.Client, tmp_path: Any) -> Iterator[Maker]:
    made: list[TrajectoryStreamInterface] = []

    def interface(**changed: Any) -> TrajectoryStreamInterface:
        made.append(interfaces.get("trajectory_stream")(**(RUN | changed)))
        return made[-1]

    yield interface
    for one in made:
        one.close()


def generate(
    interface: TrajectoryStreamInterface, step: int, url: str, tmp_path: Any
) -> tuple[SequenceSample, dict]:
    """What the calls of a step do: generate with the weights of its number, then train."""
    MODEL.engine.version = step
    context = CallContext(step, 1, MicroBatchSpec(), tmp_path, {"trajectory": [url]})
    slots = SequenceSample([f"slot{i}@{2 * step + i}" for i in range(2)], {}, {}, {})
    result = interface.generate(MODEL, slots, context)
    MODEL.engine.version = step + 1
    return result


def push(url: str, *seeds: int, **changed: Any) -> None:
    with TrajectoryClient(url) as client:
        client.push_many([group(2, 4, seed=seed) | changed for seed in seeds])


def leases(url: str) -> list[dict[str, Any]]:
    with TrajectoryClient(url) as client:
        return client.leases()


def test_the_source_names_places_and_goes_on_where_it_was():
    source = sources.get("trajectory_slots")(seed=1)
    assert isinstance(source, DataSource)
    assert [item.id for item in source.next_batch(2)] == ["slot0@0", "slot1@1"]
    again = sources.get("trajectory_slots")(seed=1)
    again.load_state_dict(source.state_dict())
    assert [item.id for item in again.next_batch(2)] == ["slot0@2", "slot1@3"]


def test_a_batch_fills_the_places(make, url, tmp_path):
    push(url, 1, 2, inference_logprobs=None)
    sample, stats = generate(make(), 3, url, tmp_path)
    assert sample.ids == ("slot0@6", "slot1@7")
    assert sample.seqlens["packed_input_ids"] == [[4, 4], [4, 4]]
    assert set(sample["packed_logprobs"].tolist()) == {-7.0}
    assert stats["n_rescored"] == 4 and stats["n_sequences"] == 4 and stats["redelivered"] == 0
    # Pushed before anybody had said a version: they count as of the weights that were current when
    # they came.
    assert (stats["server_step"], stats["staleness_min"], stats["staleness_max"]) == (3, 3, 3)
    assert stats["episodes"] == [
        "step 3, sample slot0@6\n4 tokens",
        "step 3, sample slot1@7\n4 tokens",
    ]
    with TrajectoryClient(url) as client:
        assert client.run_names() == {"group": "mine", "project": "a b"}
    assert [lease["owner"] for lease in leases(url)] == ["mine/a%20b"]


def test_a_lease_ends_with_the_checkpoint_that_holds_its_batch(make, url, tmp_path):
    push(url, *range(6))
    interface = make()
    generate(interface, 0, url, tmp_path)
    generate(interface, 1, url, tmp_path)
    saved = interface.state_dict()
    assert len(saved["leases"]) == 2
    generate(interface, 2, url, tmp_path)
    assert len(leases(url)) == 3
    interface.committed()
    [left] = leases(url)
    assert left["lease_id"] not in saved["leases"] and left["step"] == 2


def test_a_batch_that_was_not_trained_on_when_the_run_stopped_comes_again(make, url, tmp_path):
    """A checkpoint within a step held its lease as if it had been trained on, and the batch was
    lost."""
    push(url, *range(6))
    first = make()
    generate(first, 0, url, tmp_path)
    lost, _ = generate(first, 1, url, tmp_path)
    MODEL.engine.version = 1  # as before the training of step 1
    saved = first.state_dict()
    assert len(saved["leases"]) == 1
    first.committed()
    first.close()
    second = make()
    second.load_state_dict(saved)
    again, stats = generate(second, 1, url, tmp_path)
    assert torch.equal(again["packed_input_ids"], lost["packed_input_ids"])
    assert stats["redelivered"] == 1 and stats["server_step"] == 1
    MODEL.engine.version = 2
    assert len(second.state_dict()["leases"]) == 1, "trained on by now"


def test_after_a_crash_what_no_checkpoint_holds_comes_again(make, url, tmp_path):
    push(url, *range(6))
    first = make()
    generate(first, 0, url, tmp_path)
    saved = first.state_dict()
    lost, _ = generate(first, 1, url, tmp_path)
    first.close()  # killed between the end of the checkpoint and ``committed``
    second = make()
    second.load_state_dict(saved)
    again, stats = generate(second, 1, url, tmp_path)
    assert torch.equal(again["packed_input_ids"], lost["packed_input_ids"])
    assert stats["redelivered"] == 1 and stats["server_step"] == 1
    assert [lease["step"] for lease in leases(url)] == [1]
    _, stats = generate(second, 2, url, tmp_path)
    assert stats["redelivered"] == 0 and stats["server_step"] == 2


@pytest.mark.slow
def test_a_fresh_run_begins_anew_and_another_size_is_another_run(make, url, tmp_path):
    for changed in ({"fresh": True}, {"batch_size": 2}, {"project": "other"}):
        httpx.get(f"{url}/reset_data")
        push(url, 1, 2)
        generate(make(), 0, url, tmp_path)
        with pytest.raises(NoBatchYet):
            generate(make(wait_s=0.0, **changed), 0, url, tmp_path)
        assert leases(url) == []


@pytest.mark.slow
def test_a_run_that_goes_on_for_longer_tells_its_producers(make, url, tmp_path):
    for steps in (9, 12, 10):
        push(url, 1, 2)
        generate(make(num_steps=steps), 0, url, tmp_path)
    with TrajectoryClient(url) as client:
        assert client.register_env("aws", group_size=2, max_token_length=16).num_steps == 12


@pytest.mark.nightly
def test_a_long_step_keeps_its_batch(tmp_path):
    with running_server(lease_timeout_s=4.0) as url:
        interface = TrajectoryStreamInterface(**RUN)
        try:
            push(url, 1, 2)
            generate(interface, 0, url, tmp_path)
            with TrajectoryClient(url, trainer_id="other") as other:
                deadline = time.monotonic() + 6.0
                while time.monotonic() < deadline:
                    with pytest.raises(NoBatchYet):
                        other.pull(0)
                    time.sleep(0.1)
            interface.close()
            with TrajectoryClient(url, trainer_id="other") as other:
                assert other.pull(60).redelivered
        finally:
            interface.close()


def test_a_lease_that_is_lost_is_said_and_forgotten(make, url, tmp_path, caplog):
    with TrajectoryClient(url) as client:
        client.run(renew_lease, "unknown")
    assert "train on a batch of ours" in caplog.text and "unknown lease" in caplog.text
    push(url, 1, 2)
    interface = make()
    generate(interface, 0, url, tmp_path)
    interface.state_dict()
    httpx.get(f"{url}/reset_data")
    interface.committed()
    assert "may be trained on twice" in caplog.text


@pytest.mark.slow
def test_a_token_comes_from_a_file(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with running_server(token="secret") as url:
        with pytest.raises(Denied):
            generate(TrajectoryStreamInterface(**RUN), 0, url, tmp_path)
        interface = TrajectoryStreamInterface(**RUN, token_file=str(tmp_path / "token"), url=url)
        with pytest.raises(NoBatchYet, match="empty"):
            interface.wait_s = 0.0
            generate(interface, 0, "http://127.0.0.1:9", tmp_path)
        interface.close()


@pytest.mark.slow
def test_a_strict_server_that_serves_another_run(make, tmp_path):
    with running_server(strict="all") as url:
        with TrajectoryClient(url) as client:
            client.register(batch_size=64, max_token_len=1, num_steps=1, wandb_group="theirs")
        with pytest.raises(NotRegistered, match=r"'theirs'.*batches of 64 sequences"):
            generate(make(), 0, url, tmp_path)


@pytest.mark.slow
def test_no_server_at_all(tmp_path):
    context = CallContext(0, 1, MicroBatchSpec(), tmp_path, {})
    with pytest.raises(RuntimeError, match="no trajectory server is registered"):
        TrajectoryStreamInterface(**RUN).generate(MODEL, SequenceSample(["a"], {}, {}, {}), context)
