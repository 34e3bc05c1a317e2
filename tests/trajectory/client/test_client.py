"""The clients: what they send, how they wait, and that nothing is lost or doubled when connections
break."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from realhf.trajectory.client import (
    AsyncTrajectoryClient,
    BadAnswer,
    BadGroup,
    Batch,
    Denied,
    LeaseLost,
    NoBatchYet,
    NotRegistered,
    Refused,
    StaleEpoch,
    TrajectoryClient,
    Unreachable,
    trajectory_client,
)
from realhf.trajectory.client.encoding import choose_compression, decode_batch, encode_groups
from realhf.trajectory.client.protocol import (
    EnvRegistration,
    EnvStatus,
    pace,
    retry_after_s,
)
from realhf.trajectory.wire import encode
from realhf.trajectory.wire.encode import to_json
from realhf.trajectory.wire.json_groups import read_group as read_json
from realhf.trajectory.wire.msgpack_groups import read_group as read_msgpack
from realhf.web.bodies import gunzip, unzstd
from tests.trajectory.conftest import running_server
from tests.trajectory.cutting_relay import cutting_relay
from tests.trajectory.groups import EVERYTHING, group

TRAINER: dict[str, Any] = {"batch_size": 4, "max_token_len": 64, "num_steps": 100}


@pytest.fixture
def clients(api: httpx.Client, url: str) -> Iterator[tuple[TrajectoryClient, TrajectoryClient]]:
    """A producer and a trainer of a server that was just reset."""
    with (
        TrajectoryClient(url, retry_for_s=60) as producer,
        TrajectoryClient(url, retry_for_s=60) as trainer,
    ):
        yield producer, trainer


def started(trainer: TrajectoryClient, **changed: Any) -> None:
    trainer.register(**(TRAINER | changed))
    with pytest.raises(NoBatchYet, match="empty"):
        trainer.pull(0)


def plain(pulled: Batch) -> list[dict[str, Any]]:
    """Groups with lists for arrays and without the keys that nobody sent."""
    lists = [
        {
            name: [row.tolist() for row in value]
            if name in ("tokens", "masks", "inference_logprobs")
            else value
            for name, value in item.items()
            if value is not None
        }
        for item in pulled.groups
    ]
    return [{name: value for name, value in item.items() if name != "env_id"} for item in lists]


# ---- what is sent


def test_both_forms_say_the_same_and_the_server_reads_them():
    sent = {name: value for name, value in EVERYTHING.items() if name != "group_overrides"} | {
        "policy_version": 3
    }
    body, headers = encode_groups([sent], listed=False, binary=False, compression="none")
    assert headers == {"Content-Type": "application/json"}
    assert json.loads(body) == sent
    found = read_json(body)
    assert found is not None and (found.size, found.env_id, found.policy_version) == (3, 3, 3)
    body, headers = encode_groups([sent], listed=False, binary=True, compression="none")
    assert headers == {"Content-Type": "application/msgpack"}
    packed = read_msgpack(body, ["body"])
    assert json.loads(to_json(packed.present, packed.data)) == sent


def test_arrays_keep_their_precision():
    logprobs = np.float32([[-0.1, 1.0], [-3.3, 1.0]])
    sent = {
        "tokens": np.int64([[1, 2], [3, 2**40]]),
        "masks": [np.int16([-100, 2]), np.array([], np.int8)],
        "scores": np.float64([0.1, 0.2]),
        "inference_logprobs": logprobs,
    }
    body, _ = encode_groups([sent], listed=False, binary=True, compression="none")
    kinds = {
        name: tensor["dtype"]
        for name, tensor in msgspec.msgpack.decode(body).items()
        if name != "scores"
    }
    assert kinds == {"tokens": "i8", "masks": "i4", "inference_logprobs": "f4"}
    packed = read_msgpack(body, ["body"])
    answer = b"".join(encode.msgpack_pieces([(packed.present, packed.data)]))
    [back] = decode_batch(answer, "application/msgpack", "url")["batch"]
    assert [row.tolist() for row in back["tokens"]] == [[1, 2], [3, 2**40]]
    assert [row.tolist() for row in back["masks"]] == [[-100, 2], []]
    assert all((a == b).all() for a, b in zip(back["inference_logprobs"], logprobs, strict=True))
    assert back["scores"] == [0.1, 0.2] and back["advantages"] is None
    body, _ = encode_groups([sent], listed=False, binary=False, compression="none")
    assert json.loads(body)["inference_logprobs"] == logprobs.tolist()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("changed", "said"), [
    ({"tokens": [[1.5]]}, "tokens"), ({"tokens": [[[1]]]}, "tokens"), ({"tokens": [[2**63]]}, "tokens"),
    ({"scores": [float("nan")]}, "scores"), ({"inference_logprobs": [[float("inf")]]}, "inference_logprobs"),
    ({"masks": None}, "masks"), ({"logprobs": [[1.0]]}, "logprobs"),
    ({"group_overrides": {"a": float("nan")}}, "group_overrides"), ({"images": object()}, "images"),
    ({"tokens": [["a"]]}, "tokens"), ({"tokens": 7}, "tokens"),
    ({"inference_logprobs": [np.array([np.longdouble("1e400")])]}, "inference_logprobs"),
])  # fmt: skip
def test_a_bad_group_is_found_before_it_is_sent(binary, changed, said):
    with pytest.raises(BadGroup, match=said):
        encode_groups([group() | changed], listed=True, binary=binary, compression="none")


def test_compression_where_it_pays():
    assert choose_compression("auto", "http://127.0.0.1:8000", binary=True) == "none"
    assert choose_compression("auto", "http://[::1]:8000", binary=True) == "none"
    assert choose_compression("auto", "http://queue.example:8000", binary=True) == "zstd"
    assert choose_compression("auto", "http://queue.example:8000", binary=False) == "gzip"
    with pytest.raises(ValueError, match="binary wire"):
        choose_compression("zstd", "http://localhost", binary=False)
    with pytest.raises(ValueError, match="auto, none"):
        choose_compression("brotli", "http://localhost", binary=True)
    large = group(4, 400)
    small = group(1, 2)
    for binary, coding, inflate in ((True, "zstd", unzstd), (False, "gzip", gunzip)):
        body, headers = encode_groups([large], listed=True, binary=binary, compression=coding)
        assert headers["Content-Encoding"] == coding
        assert (
            inflate(body, 1 << 20)
            == encode_groups([large], listed=True, binary=binary, compression="none")[0]
        )
        assert (
            "Content-Encoding"
            not in encode_groups([small], listed=False, binary=binary, compression=coding)[1]
        )
    noise = group() | {
        "tokens": np.random.default_rng(1).integers(-(2**63), 2**63 - 1, size=(1, 500))
    }
    assert (
        "Content-Encoding"
        not in encode_groups([noise], listed=False, binary=True, compression="zstd")[1]
    )


# ---- how it waits


async def drive(monkeypatch, outcomes, seconds) -> tuple[dict[str, Any], list[float]]:
    """The status by a client to whom these answers (or their errors) come, and the pauses it made
    by its clock."""
    pauses: list[float] = []

    async def pause(wait_s):
        pauses.append(wait_s)

    def answer(request):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(trajectory_client, "sleep", pause)
    monkeypatch.setattr(
        trajectory_client, "process_clock", SimpleNamespace(now=lambda: sum(pauses))
    )
    async with AsyncTrajectoryClient("http://server", retry_for_s=seconds) as client:
        client._http = httpx.AsyncClient(base_url=client.url, transport=httpx.MockTransport(answer))
        return await client.status(), pauses


async def test_failures_are_retried_with_growing_pauses(monkeypatch):
    failures = [httpx.ConnectError("refused"), httpx.Response(502), httpx.ReadTimeout("")]
    result, pauses = await drive(
        monkeypatch, [*failures, httpx.Response(200, json={"current_step": 1})], 60
    )
    assert result == {"current_step": 1}
    assert len(pauses) == 3 and 0.08 <= pauses[0] <= 0.12 and pauses[0] < pauses[1] < pauses[2]


async def test_a_full_queue_is_asked_again_when_it_says(monkeypatch):
    full = httpx.Response(503, headers={"Retry-After": "3"}, text="full")
    _, pauses = await drive(monkeypatch, [full, httpx.Response(200, json={})], 60)
    assert 2.4 <= pauses[0] <= 3.6
    assert retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT", lambda: 90.0) == 10.0
    assert retry_after_s("soon") == retry_after_s(None) == 0.0


async def test_the_deadline_ends_it_with_the_cause(monkeypatch):
    failures = [httpx.ConnectError("[Errno 111] Connection refused") for _ in range(99)]
    with pytest.raises(
        Unreachable, match=r"http://server: GET /status: ConnectError: .*refused; gave up after"
    ):
        await drive(monkeypatch, failures, 5)
    assert len(failures) > 90


async def test_a_client_error_is_not_retried(monkeypatch):
    with pytest.raises(Refused, match="422"):
        await drive(monkeypatch, [httpx.Response(422)], 60)


def test_pacing_follows_the_reference():
    env = EnvRegistration(
        0, "a_0", "c", 10, 0, 100, batch_size=64, group_size=4, min_batch_allocation=0.25, epoch=1
    )
    status = EnvStatus(
        current_step=5,
        queue_size=8,
        self_queue_size=3,
        max_group_size=4,
        unallocated_fraction=0.5,
        env_weight=1.0,
    )
    now = pace(status, env)
    assert (now.pause, now.workers, now.done) == (False, 3 * 48 // 4 - 8, False)
    assert pace(EnvStatus(5, 48, 3, 4, 0.5, 1.0), env).pause
    assert pace(EnvStatus(99, 32, 3, 4, 0.5, 1.0), env).done
    assert pace(EnvStatus(5, 400, 3, 4, 0.5, 1.0), env).workers == 0


# ---- against a server


@pytest.mark.parametrize(("binary", "coding"), [
    (True, "none"), (True, "gzip"), (True, "zstd"), (True, "auto"), (False, "none"), (False, "gzip"),
    (False, "auto"),
])  # fmt: skip
def test_groups_come_back_as_they_were_sent(api, url, binary, coding):
    sent = [group(2, 300, seed=seed) for seed in range(2)]
    with TrajectoryClient(url, binary=binary, compression=coding) as client:
        started(client)
        receipt = client.push_many(sent, policy_version=7)
        assert (receipt.groups, receipt.buffered, receipt.quarantined, receipt.replayed) == (
            2,
            0,
            (),
            False,
        )
        batch = client.pull(60)
        assert batch.n_sequences == 4 and (batch.step, batch.min_version, batch.max_version) == (
            0,
            7,
            7,
        )
        if not binary:
            assert [{name: item[name] for name in sent[0]} for item in batch.groups] == sent
        else:
            assert plain(batch) == sent
        assert client.push_many([]).groups == 0


@pytest.mark.slow
def test_an_environment_waits_for_the_trainer(clients):
    producer, trainer = clients
    with pytest.raises(NotRegistered, match="wait for trainer to start"):
        producer.register_env("aws", group_size=2, max_token_length=64, wait_s=0)
    timer = threading.Timer(0.3, started, (trainer,))
    timer.start()
    env = producer.register_env("aws", group_size=2, max_token_length=64, wait_s=20)
    timer.join()
    assert (env.env_id, env.wandb_name, env.batch_size, env.num_steps) == (0, "aws_0", 4, 100)
    for _ in range(6):
        producer.push(group(2))
    assert producer.push(group(1)).buffered == 1
    assert producer.push(group(3)).quarantined == ("larger_than_env_group_size",)
    assert producer.status() == {"current_step": 0, "queue_size": 6}
    now = producer.wait_for_room(0.3)
    assert now.pause and not now.done and now.status.self_queue_size == 6
    assert [item["env_id"] for item in trainer.pull(60).groups] == [0, 0]
    assert not producer.wait_for_room(5).pause
    producer.disconnect()
    with pytest.raises(NotRegistered, match="call register_env first"):
        producer.pace()


def test_leases_end_when_they_are_told_to(clients, url):
    producer, _ = clients
    with TrajectoryClient(url, explicit_acks=True, trainer_id="me") as trainer:
        started(trainer)
        producer.push_many([group(2, seed=seed) for seed in range(6)])
        one = trainer.pull(60)
        two = trainer.pull(60)
        assert (one.step, two.step) == (0, 1)
        assert {lease["owner"] for lease in trainer.leases()} == {"me"} and len(
            trainer.leases()
        ) == 2
        trainer.nack(one.lease_id)
        again = trainer.pull(60)
        assert again.redelivered and again.step == 0 and plain(again) == plain(one)
        assert 0 < trainer.renew(again.lease_id) <= 600
        trainer.ack(again.lease_id)
        trainer.ack(again.lease_id)
        with pytest.raises(LeaseLost, match="already acknowledged"):
            trainer.nack(again.lease_id)
        with pytest.raises(LeaseLost, match="unknown lease"):
            trainer.renew("nothing")
        three = trainer.pull(5, acknowledges=two)
        assert [lease["lease_id"] for lease in trainer.leases()] == [three.lease_id]


def test_without_explicit_acks_the_next_pull_acknowledges(clients):
    producer, trainer = clients
    started(trainer)
    producer.push_many([group(2), group(2)])
    trainer.pull(60)
    with pytest.raises(NoBatchYet):
        trainer.pull(0)
    assert trainer.leases() == []
    trainer.set_policy_version(9)
    producer.push_many([group(4)])
    batch = trainer.pull(60)
    assert batch.min_version == 9
    trainer.nack(batch.lease_id)
    again = trainer.pull(60)
    assert again.redelivered and plain(again) == plain(batch), (
        "what was given back is not acknowledged"
    )


@pytest.mark.slow
def test_a_batch_that_went_to_another_trainer_meanwhile_stops_nobody(caplog):
    with (
        running_server(lease_timeout_s=3.0) as url,
        TrajectoryClient(url) as slow,
        TrajectoryClient(url) as other,
    ):
        started(slow)
        slow.push_many([group(4, seed=1), group(4, seed=2)])
        first = slow.pull(60)
        while True:
            taken = other.pull(60)
            if taken.redelivered:
                break
        assert plain(taken) == plain(first)
        other.ack(taken.lease_id)
        slow.push(group(4, seed=3))
        assert slow.pull(60).step > first.step
        assert "redelivered to another trainer" in caplog.text


def test_an_ended_run_fences_its_producers(clients):
    producer, trainer = clients
    started(trainer)
    producer.register_env("aws", group_size=2, max_token_length=64)
    assert trainer.register(**TRAINER, join=True).epoch == producer.env.epoch  # type: ignore[union-attr]
    assert trainer.register(**TRAINER).epoch == producer.env.epoch, "the same run goes on"  # type: ignore[union-attr]
    started(trainer, reset=True)
    with pytest.raises(StaleEpoch, match="has ended"):
        producer.push(group(2))
    producer.register_env("aws", group_size=2, max_token_length=64)
    producer.push(group(2))
    assert trainer.info()["batch_size"] == 4 and trainer.run_names() == {"group": "", "project": ""}


def test_nobody_registered(clients):
    with pytest.raises(NotRegistered, match="Trainer not registered"):
        clients[1].pull(60)


@pytest.mark.slow
def test_a_token_is_needed_and_named_in_no_error():
    with running_server(token="secret-1") as url:
        with TrajectoryClient(url) as client, pytest.raises(Denied, match="401"):
            client.status()
        with TrajectoryClient(url, token="secret-2") as client, pytest.raises(Denied) as caught:
            client.push(group())
        assert "secret" not in str(caught.value)
        with TrajectoryClient(url, token="secret-1") as client:
            assert client.push(group()).groups == 1


def test_a_refusal_says_what_is_wrong(clients):
    with pytest.raises(Refused, match=r"422: body\.batch_size: Input should be a valid integer"):
        clients[1].register(**(TRAINER | {"batch_size": "many"}))
    with pytest.raises(Refused, match="used for another request"):
        clients[0].push(group(1), idempotency_key="k")
        clients[0].push(group(2), idempotency_key="k")


@pytest.mark.slow
def test_no_server_and_the_wrong_server(tmp_path):
    with TrajectoryClient("http://127.0.0.1:9", retry_for_s=0.3) as client:
        with pytest.raises(
            Unreachable, match=r"http://127\.0\.0\.1:9: POST /scored_data: ConnectError"
        ):
            client.push(group())
        with pytest.raises(Unreachable, match="GET /batch"):
            client.pull(1)
    with pytest.raises(BadAnswer, match="cannot be read"):
        decode_batch(b"\xc1", "application/msgpack", "url")
    with pytest.raises(BadAnswer, match="cannot be read"):
        decode_batch(b"<html>", "text/html", "url")


# ---- when connections break


@pytest.mark.slow
def test_a_push_whose_answer_was_lost_counts_once(clients, url):
    with cutting_relay(url) as relay, TrajectoryClient(relay.url, retry_for_s=60) as producer:
        relay.cut_answers(0, 20)
        receipt = producer.push_many([group(2), group(2)])
        assert receipt.replayed and receipt.groups == 2
        assert relay.cut == 2
        assert producer.status()["queue_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [True, False])
def test_a_batch_that_broke_off_comes_again(clients, url, explicit):
    """The server sent all of it and would take the next pull of the same trainer for its
    acknowledgement."""
    producer, _ = clients
    with (
        cutting_relay(url) as relay,
        TrajectoryClient(relay.url, retry_for_s=60, explicit_acks=explicit) as trainer,
    ):
        started(trainer)
        sent = [group(2, 20, seed=seed) for seed in range(4)]
        producer.push_many(sent)
        relay.cut_answers(900)
        first = trainer.pull(60)
        second = trainer.pull(60)
        assert relay.cut == 1
        assert first.redelivered and (first.step, second.step) == (0, 1)
        assert plain(first) + plain(second) == sent


@pytest.mark.slow
def test_a_batch_of_which_nothing_arrived_is_not_acknowledged_by_the_next_pull():
    """Not even the name of its lease did; it comes again when the lease has expired."""
    with (
        running_server(lease_timeout_s=3.0) as url,
        cutting_relay(url) as relay,
        TrajectoryClient(url) as producer,
        TrajectoryClient(relay.url, retry_for_s=60) as trainer,
    ):
        started(trainer)
        sent = [group(2, 20, seed=seed) for seed in range(4)]
        producer.push_many(sent)
        relay.cut_answers(0)
        batches = [trainer.pull(60), trainer.pull(60)]
        assert relay.cut == 1
        batches.sort(key=lambda batch: batch.step)
        assert [(batch.step, batch.redelivered) for batch in batches] == [(0, True), (1, False)]
        assert plain(batches[0]) + plain(batches[1]) == sent
        with pytest.raises(NoBatchYet):
            trainer.pull(0)
        assert trainer.leases() == []


@pytest.mark.slow
async def test_a_pull_that_was_cancelled_is_not_acknowledged_by_the_next():
    """Whenever it is cancelled: what it did not return comes again."""
    with running_server(lease_timeout_s=3.0) as url:
        async with AsyncTrajectoryClient(url) as trainer:
            await trainer.register(**TRAINER)
            with pytest.raises(NoBatchYet):
                await trainer.pull(0)
            sent = [group(4, 20, seed=seed) for seed in range(8)]
            await trainer.push_many(sent)
            got = []
            for wait_s in [0.001 * number for number in range(12)] + [60.0] * len(sent):
                with contextlib.suppress(asyncio.TimeoutError, NoBatchYet):
                    got += plain(
                        await asyncio.wait_for(trainer.pull(50 if wait_s == 60.0 else 0), wait_s)
                    )
                if len(got) == len(sent):
                    break
            assert sorted(map(str, got)) == sorted(map(str, sent))


# ---- the other client


def test_the_async_client_is_the_same():
    def methods(kind: type) -> set[str]:
        return {
            name
            for name, item in inspect.getmembers(kind)
            if callable(item) and not name.startswith("_")
        }

    assert methods(AsyncTrajectoryClient) == methods(TrajectoryClient) - {"run"}
    assert inspect.signature(AsyncTrajectoryClient) == inspect.signature(TrajectoryClient)
    assert inspect.signature(AsyncTrajectoryClient.pull) == inspect.signature(TrajectoryClient.pull)


def test_threads_and_children_of_one_blocking_client(api, url, monkeypatch):
    with TrajectoryClient(url) as client:
        with ThreadPoolExecutor(4) as threads:
            receipts = list(threads.map(lambda seed: client.push(group(1, seed=seed)), range(8)))
        assert [receipt.groups for receipt in receipts] == [1] * 8 and client.status()[
            "queue_size"
        ] == 8
        with monkeypatch.context() as forked, pytest.raises(RuntimeError, match="forked child"):
            forked.setattr(client.thread, "pid", os.getppid())
            client.status()
    with pytest.raises(RuntimeError, match="has been closed"):
        client.status()


@pytest.mark.slow
async def test_a_blocking_client_works_where_a_loop_runs(api, url):
    """As in the cell of a notebook."""
    with TrajectoryClient(url) as client:
        assert client.status() == {"current_step": 0, "queue_size": 0}


@pytest.mark.slow
async def test_coroutines_share_one_client(api, url):
    async with AsyncTrajectoryClient(url) as client:
        await client.register(**TRAINER)
        with pytest.raises(NoBatchYet):
            await client.pull(0)
        env = await client.register_env("aws", group_size=2, max_token_length=64)
        waiting = asyncio.create_task(client.pull(60))
        receipts = await asyncio.gather(*(client.push(group(2, seed=seed)) for seed in range(4)))
        assert [receipt.groups for receipt in receipts] == [1] * 4
        batch = await waiting
        assert [item["env_id"] for item in batch.groups] == [env.env_id] * 2
        assert await client.renew(batch.lease_id) > 0
        await client.ack(batch.lease_id)
        assert (await client.wait_for_room(1)).status.current_step == 1
        await client.disconnect()
