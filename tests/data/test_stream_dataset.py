"""From rollout workers into the tensor store: once, durable, told to the master before the producer
may forget."""

from __future__ import annotations

import asyncio
import math
import threading
from random import Random

import pytest
import torch

from realhf.algorithms.inference import OutcomeRewardInterface
from realhf.api.calls import ACCEPTED, DUPLICATE, REFUSED, Arrival
from realhf.api.keys import key_spec
from realhf.api.rollout import RolloutOutcome
from realhf.api.sample import SequenceSample
from realhf.data.payload_log import PayloadLog
from realhf.data.stream_dataset import SampleLimits, StreamDataset
from realhf.rollout.rollout_sample import outcomes_to_sample
from realhf.transport.codec import decode_sample, encode_sample
from realhf.transport.errors import CodecError
from realhf.transport.network import LOOPBACK
from realhf.transport.push_stream import StreamFailed, StreamProducer
from realhf.transport.tensor_store import TensorStore
from tests.transport.fixed_port import At

KEYS = tuple(map(key_spec, ("packed_input_ids", "loss_mask", "packed_logprobs", "rewards")))
LIMITS = SampleLimits(KEYS, max_sequences=4, max_tokens=50, max_bytes=1 << 20)


def group(id, lengths=(3, 5), seed=0, **changes):
    random = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    count = len(lengths)
    tensors = {
        "packed_input_ids": torch.randint(0, 1000, (total,), generator=random),
        "loss_mask": torch.ones(total, dtype=torch.bool),
        "packed_logprobs": -torch.rand(total - count, generator=random),
        "rewards": torch.rand(count, generator=random),
    }
    tensors |= changes
    rows = {"L": [list(lengths)], "L-1": [[n - 1 for n in lengths]], "1": [[1] * count]}
    seqlens = {spec.name: rows[spec.rule] for spec in KEYS}
    return SequenceSample.from_tensors([id], tensors, seqlens, {"achieved": [f"[{seed}]"]})


class FakeMaster:
    """Answers arrivals from a table, by id and attempt; the second time an accepted one is a
    duplicate."""

    def __init__(self):
        self.arrivals: list[Arrival] = []
        self.answers: dict[tuple[str, int], str] = {}
        self.accepted: dict[tuple[str, int], Arrival] = {}
        self.troubles: list[Exception] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def notify(self, arrivals):
        self.may_answer.wait(60)
        out = [self.answer(arrival) for arrival in arrivals]
        self.arrivals += arrivals
        if self.troubles:
            raise self.troubles.pop(0)
        return out

    def answer(self, arrival):
        key = (arrival.id, arrival.attempt)
        if key in self.accepted:
            return DUPLICATE
        if arrival.error or self.answers.get(key, ACCEPTED) == REFUSED:
            return REFUSED
        self.accepted[key] = arrival
        return ACCEPTED


class Bench:
    def __init__(self, folder):
        self.folder, self.store, self.master = folder, TensorStore(), FakeMaster()
        self.dataset = self.open(LOOPBACK)
        self.producers: list[StreamProducer] = []

    def open(self, network, segment_bytes=1):
        return StreamDataset(
            "run",
            self.folder,
            self.store,
            self.master.notify,
            credits=8,
            limits=LIMITS,
            network=network,
            segment_bytes=segment_bytes,
        )

    def reopen(self):
        """As after a death of the model worker."""
        self.dataset.close()
        self.store = TensorStore()
        self.dataset = self.open(At(endpoint=self.dataset.endpoint))

    def logged(self, ref):
        return decode_sample(PayloadLog(self.folder).read(ref))

    def producer(self, name="w0"):
        self.producers.append(StreamProducer([self.dataset.endpoint], name, "run"))
        return self.producers[-1]

    async def push(self, *samples, attempt=0):
        producer = self.producer()
        for sample in samples:
            await producer.push(sample.ids[0], attempt, encode_sample(sample), timeout_s=60)
        assert await producer.drain(60)

    def get(self, id):
        return self.store.get([id], [spec.name for spec in KEYS])


@pytest.fixture
async def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.master.may_answer.set()
    for producer in made.producers:
        producer.close()
    made.dataset.close()


async def test_a_sample_is_logged_stored_told_and_acked(bench):
    samples = [group(f"s{n}", (3, 5, 2 + n), seed=n) for n in range(6)]
    await bench.push(*samples, attempt=2)
    assert [(a.id, a.attempt, a.producer, a.error) for a in bench.master.arrivals] == [
        (f"s{n}", 2, "w0", "") for n in range(6)
    ]
    for sample, arrival in zip(samples, bench.master.arrivals, strict=True):
        assert all(torch.equal(bench.get(sample.ids[0])[key], sample[key]) for key in sample.keys)
        assert decode_sample(arrival.meta) == sample.meta()
        assert bench.logged(arrival.ref) == sample
    assert (
        bench.dataset.counts.total() == bench.dataset.counts["accepted"] == 6
        and len(bench.dataset._stored) == 6
    )
    bench.store.clear()
    assert not bench.dataset._stored


async def test_restore_brings_back_what_was_accepted(bench):
    samples = [group(f"s{n}", seed=n) for n in range(3)]
    await bench.push(*samples)
    refs = [(a.id, a.attempt, a.ref) for a in bench.master.arrivals]
    bench.reopen()
    restored = bench.dataset.restore(refs)
    assert [(a.id, a.ref, a.error) for a in restored] == [(i, ref, "") for i, _, ref in refs]
    assert [decode_sample(a.meta) for a in restored] == [sample.meta() for sample in samples]
    assert all(torch.equal(bench.get(s.ids[0])[key], s[key]) for s in samples for key in s.keys)
    await bench.push(samples[0])
    assert len(bench.master.arrivals) == 3, "known already: the master is not asked again"
    assert bench.dataset.counts["duplicate"] == 1


async def test_malformed_samples_are_told_and_acked(bench):
    good = group("good")
    bad = {
        "junk": [b"\xc1"],
        "ids": encode_sample(group("another")),
        "meta": encode_sample(group("meta").meta()),
        "keys": encode_sample(group("keys").select(["packed_input_ids", "rewards"])),
        "many": encode_sample(group("many", (2,) * 5)),
        "long": encode_sample(group("long", (51,))),
        "nan": encode_sample(group("nan", rewards=torch.tensor([1.0, float("nan")]))),
        "inf": encode_sample(
            group("inf", packed_logprobs=torch.tensor([0, -torch.inf, 0, 0, 0, 0]))
        ),
        "dtype": encode_sample(group("dtype", loss_mask=torch.ones(8, dtype=torch.uint8))),
        "rule": encode_sample(
            SequenceSample.from_tensors(
                ["rule"], group("rule").data or {}, {**group("rule").seqlens, "loss_mask": [[4, 4]]}
            )
        ),
        "torn": [frame[:-1] for frame in encode_sample(group("torn"))],
    }
    producer = bench.producer()
    for id, frames in bad.items():
        await producer.push(id, 0, frames, timeout_s=60)
    await producer.push("good", 0, encode_sample(good), timeout_s=60)
    assert await producer.drain(60)
    told = {a.id: a for a in bench.master.arrivals}
    assert [id for id, a in told.items() if a.error] == list(bad)
    assert "not finite" in told["nan"].error and "not finite" in told["inf"].error
    assert "[4, 4] do not fit" in told["rule"].error and "u8" in told["dtype"].error
    assert "'another'" in told["ids"].error and "loss_mask" in told["keys"].error
    assert all(not a.ref and not a.meta for id, a in told.items() if id != "good")
    assert bench.dataset.counts["malformed"] == len(bad)
    assert len(bench.store) == 1


async def test_refused_attempts_leave_no_tensors(bench):
    bench.master.answers[("s", 0)] = REFUSED
    await bench.push(group("s", seed=1), attempt=0)
    assert len(bench.store) == 0 and bench.dataset.counts["refused"] == 1
    await bench.push(group("s", seed=2), attempt=1)
    bench.master.answers[("s", 2)] = REFUSED
    await bench.push(group("s", seed=3), attempt=2)
    assert torch.equal(bench.get("s")["rewards"], group("s", seed=2)["rewards"])


async def test_what_calls_computed_of_a_sample_stays_when_it_came_here_for_nothing(bench):
    """It was accepted through another receiver, and its reference log-probabilities were computed
    here."""
    output = SequenceSample.from_tensors(
        ["s"], {"packed_ref_logprobs": torch.ones(6)}, {"packed_ref_logprobs": [[6]]}
    )
    bench.store.put(output, producer="ref_inf@3")
    bench.master.answers[("s", 0)] = REFUSED
    await bench.push(group("s"))
    assert torch.equal(
        bench.store.get(["s"], ["packed_ref_logprobs"])["packed_ref_logprobs"], torch.ones(6)
    )
    assert not bench.store.has("s", "packed_input_ids") and not bench.dataset._stored


@pytest.mark.slow
async def test_trouble_with_the_master_is_tried_again(bench):
    bench.master.troubles = [TimeoutError("late"), TimeoutError("later")]
    await bench.push(group("s"))
    assert len(bench.master.arrivals) == 3
    assert len(bench.store) == 1, "accepted the first time, though that answer was lost"
    assert bench.dataset.counts["notify_retries"] == 2


@pytest.mark.slow
async def test_an_unexpected_error_surfaces(bench):
    bench.master.troubles = [KeyError("what")]
    producer = bench.producer()
    await producer.push("s", 0, encode_sample(group("s")), timeout_s=60)
    assert not await producer.drain(0.2)
    with pytest.raises(StreamFailed, match="what"):
        bench.dataset.check()


async def test_prune_keeps_what_came_after_the_list_was_made(bench):
    for n in range(5):
        await bench.push(group(f"s{n}"))
    refs = [a.ref for a in bench.master.arrivals]
    assert [ref[0] for ref in refs] == [0, 1, 2, 3, 4]
    assert bench.dataset.prune([refs[0]], newest=refs[2]) == [1]
    assert bench.dataset.prune([], newest=refs[4]) == [0, 2, 3]
    damaged = bench.dataset.restore([("s0", 0, refs[0])])
    assert "cannot be read" in damaged[0].error


async def test_the_first_rank_prunes_what_ranks_left_that_are_no_more(bench):
    left = PayloadLog(bench.folder, rank=2, segment_bytes=1)
    old = [left.append([encode_sample(group(f"old{n}"))])[0] for n in range(3)]
    left.close()
    await bench.push(group("s"))
    (ref,) = [a.ref for a in bench.master.arrivals]
    assert bench.dataset.prune([old[1]], newest=ref, ranks=2) == []
    kept, *gone = bench.dataset.restore(
        [("old1", 0, old[1]), ("old0", 0, old[0]), ("old2", 0, old[2])]
    )
    assert (kept.error, kept.ref) == ("", old[1]) and all(
        "cannot be read" in arrival.error for arrival in gone
    )
    assert len(bench.dataset._stored) == 2


async def test_a_restored_sample_stays_when_its_arrival_turns_out_a_duplicate(bench):
    """It was accepted before a death, and comes in again before the restore."""
    await bench.push(group("s", seed=1))
    (arrival,) = bench.master.arrivals
    bench.reopen()
    bench.master.may_answer.clear()
    producer = bench.producer()
    await producer.push("s", 0, encode_sample(group("s", seed=1)), timeout_s=60)
    async with asyncio.timeout(60):
        while not bench.dataset._stored:
            await asyncio.sleep(0.005)
    assert [a.error for a in bench.dataset.restore([("s", 0, arrival.ref)])] == [""]
    bench.master.may_answer.set()
    assert await producer.drain(60)
    assert bench.dataset.counts["duplicate"] == 1
    assert torch.equal(bench.get("s")["rewards"], group("s", seed=1)["rewards"])


async def test_two_attempts_that_arrive_together_are_answered_one_after_the_other(bench):
    bench.master.may_answer.clear()
    bench.master.answers[("s", 0)] = REFUSED
    producer = bench.producer()
    for attempt in range(2):
        await producer.push("s", attempt, encode_sample(group("s", seed=attempt)), timeout_s=60)
    bench.master.may_answer.set()
    assert await producer.drain(60)
    assert [(a.id, a.attempt) for a in bench.master.arrivals] == [("s", 0), ("s", 1)]
    assert torch.equal(bench.get("s")["rewards"], group("s", seed=1)["rewards"])


async def test_close_does_not_wait_for_a_master_that_is_gone(bench):
    bench.master.troubles = [TimeoutError("gone")] * 1000
    producer = bench.producer()
    await producer.push("s", 0, encode_sample(group("s")), timeout_s=60)
    async with asyncio.timeout(60):
        while not bench.dataset.counts["notify_retries"]:
            await asyncio.sleep(0.005)
    await asyncio.to_thread(bench.dataset.close)
    assert producer.unacked == 1
    with pytest.raises(StreamFailed, match="closed"):
        bench.dataset.check()


class Crash(Exception):
    """The model worker dies while it talks to the master."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_deaths_at_any_point_lose_nothing_and_accept_nothing_twice(bench, seed):
    random = Random(seed)
    told = bench.master.notify

    def notify(arrivals):
        if not bench.master.arrivals or random.random() < 0.3:
            bench.master.arrivals += arrivals
            raise Crash("before the master knew")
        answers = told(arrivals)
        if random.random() < 0.3:
            raise Crash("after the master knew")
        return answers

    bench.master.notify = notify
    bench.reopen()
    samples = [group(f"s{n}", seed=n) for n in range(40)]
    producers = [bench.producer(name) for name in ("w0", "w1")]

    async def work(producer, mine):
        for sample in mine:
            await producer.push(sample.ids[0], 0, encode_sample(sample), timeout_s=60)
        assert await producer.drain(20)

    working = asyncio.gather(
        *(work(producer, samples[n::2]) for n, producer in enumerate(producers))
    )
    deaths = 0
    while not working.done():
        await asyncio.sleep(0.01)
        try:
            bench.dataset.check()
        except StreamFailed:
            deaths += 1
            await asyncio.to_thread(bench.reopen)
            accepted = list(bench.master.accepted.values())
            assert not [
                a.error
                for a in bench.dataset.restore((a.id, a.attempt, a.ref) for a in accepted)
                if a.error
            ]
    await working
    assert deaths
    assert sorted(bench.master.accepted) == sorted((sample.ids[0], 0) for sample in samples)
    for sample in samples:
        assert bench.logged(bench.master.accepted[(sample.ids[0], 0)].ref) == sample
        assert all(torch.equal(bench.get(sample.ids[0])[key], sample[key]) for key in sample.keys)


NAMES = (
    "packed_input_ids prompt_mask loss_mask packed_logprobs packed_versions env_rewards "
    "seq_no_eos_mask outcome"
)
ROLLOUT_KEYS = tuple(map(key_spec, (NAMES + " rewards rollout_index").split()))


def rollout(status, reward):
    return RolloutOutcome(
        status=status,
        prompt_ids=[1, 2],
        completion_ids=[3, 4],
        logprobs=[-0.1, -0.2],
        versions=[0, 0],
        loss_mask=[True, True],
        reward=reward,
        achieved=status == "achieved",
        progress=0.0,
        turns=(),
        task_id=1,
        group="warmup",
        seed=1,
    )


def finished(statuses):
    """A group as a rollout worker streams it, its rewards computed."""
    sample = outcomes_to_sample(
        ["s"], [[rollout(status, reward) for status, reward in statuses.items()]]
    )
    rewards, _ = OutcomeRewardInterface().inference(None, sample, None)
    return sample.update(rewards)


def test_a_failed_rollout_has_no_reward_and_its_group_is_taken():
    sample = finished({"achieved": 1.0, "internal": None, "max_turns": 0.25})
    rewards = SampleLimits(ROLLOUT_KEYS).read("s", encode_sample(sample))["rewards"]
    assert rewards[0] == 1.0 and math.isnan(rewards[1]) and rewards[2] == 0.25


@pytest.mark.parametrize("key", ["rewards", "packed_logprobs", "env_rewards"])
def test_what_is_not_finite_without_a_failure_is_refused(key):
    sample = finished({"achieved": 1.0, "internal": None})
    broken = sample[key].clone()
    broken[0] = math.inf
    tensors = {**{name: sample[name] for name in sample.keys}, key: broken}
    whole = SequenceSample.from_tensors(["s"], tensors, sample.seqlens)
    with pytest.raises(CodecError, match=f"{key}.*not finite"):
        SampleLimits(ROLLOUT_KEYS).read("s", encode_sample(whole))


def test_an_outcome_of_another_length_is_refused():
    sample = finished({"achieved": 1.0, "internal": None})
    tensors = {name: sample[name] for name in sample.keys} | {
        "outcome": torch.zeros(1, dtype=torch.uint8)
    }
    whole = SequenceSample.from_tensors(["s"], tensors, {**sample.seqlens, "outcome": [[1]]})
    with pytest.raises(CodecError):
        SampleLimits(ROLLOUT_KEYS).read("s", encode_sample(whole))
