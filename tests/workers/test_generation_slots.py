"""Cache rows of many clients on one engine, and what happens to those of clients that are gone."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.api.calls import Nothing, PinAnswer
from realhf.api.config import GenConfig
from realhf.api.model import GenOutput
from realhf.base.messages import MessageError
from realhf.transport.roster import WorkerInfo
from workers.generation_worker import GenerationWorker, PinnedWeights, SlotTable, VersionGate


def test_rows_of_different_clients_are_different_and_never_used_again():
    table = SlotTable()
    numbers = [table.assign(client, slot) for client in "ab" for slot in range(3)]
    assert sorted(set(numbers)) == sorted(numbers) and table.assign("a", 2) == numbers[2]
    assert (
        table.release("a", [0, 2, 9]) == [numbers[0], numbers[2]] and table.release("a", [0]) == []
    )
    assert table.assign("a", 0) not in numbers
    assert sorted(table.release_all_but({"a"})) == sorted(numbers[3:])
    assert table.assign("a", 1) == numbers[1]


class FakeStreamingEngine:
    """Keeps requests and what it was told."""

    def __init__(self):
        self.version = 3
        self.told: list[tuple[str, Any]] = []
        self.done: list[Any] = []
        self.configs: list[Any] = []
        self.closed = False

    def close(self):
        self.closed = True

    def submit(self, request, config, stop_ids, done):
        self.configs.append(config)
        self.told.append(("submit", request.slot))
        self.done.append(done)

    def abort(self, slots):
        self.told.append(("abort", list(slots)))

    def free(self, slots):
        self.told.append(("free", list(slots)))


class FakeRequest:
    def __init__(self, client, method, payload):
        self.client = client
        self.method = method
        self.payload = payload
        self.answers: list[Any] = []

    def reply(self, value):
        self.answers.append(value)

    def fail(self, error):
        self.answers.append(error)


@pytest.fixture
def worker():
    """A generation worker without its process: only what answers requests."""
    made = GenerationWorker.__new__(GenerationWorker)
    made._slots, made._gen, made._stop_ids = SlotTable(), None, ()  # pyright: ignore[reportAttributeAccessIssue]
    made._engine = FakeStreamingEngine()  # pyright: ignore[reportAttributeAccessIssue]
    made._gate = VersionGate(lambda: made._engine.version)
    made._pinned = PinnedWeights(made._engine)
    return made


def ask(worker, client, method, payload):
    request = FakeRequest(client, method, payload)
    worker._on_request(request)
    return request


def test_answers_go_to_who_asked_and_an_aborted_turn_is_to_be_gone_on_with(worker):
    first = ask(worker, "a:1", "generate", [0, [5], 0, 7, -1])
    second = ask(worker, "b:2", "generate", [0, [5], 0, None, -1])
    worker._engine.done[1](GenOutput([9], [-1.0], [0], "aborted"))
    worker._engine.done[0](ValueError("slot in play"))
    assert (
        second.answers == [[[9], [-1.0], [0], "interrupted", None, False]]
        and str(first.answers[0]) == "slot in play"
    )
    assert [slot for _, slot in worker._engine.told] == [0, 1]


def test_an_episode_that_is_given_up_ends_its_turn_and_its_row(worker):
    ask(worker, "a:1", "generate", [3, [5], 0, 7, -1])
    assert ask(worker, "a:1", "free", [[3, 4]]).answers == [{}]
    ask(worker, "a:1", "generate", [3, [5], 0, 7, -1])
    assert worker._engine.told == [("submit", 0), ("abort", [0]), ("free", [0]), ("submit", 1)]


def test_a_request_for_newer_weights_waits_until_the_engine_has_them(worker):
    later, latest = (
        ask(worker, "a:1", "generate", [slot, [5], 0, None, 4 + slot]) for slot in (0, 1)
    )
    ask(worker, "a:1", "generate", [2, [5], 0, None, 3])
    assert worker._engine.told == [("submit", 2)]
    worker._engine.version = 4
    worker._gate.open()
    assert worker._engine.told[1:] == [("submit", 0)] and latest.answers == []
    ask(worker, "a:1", "free", [[1]])
    assert latest.answers == [[[], [], [], "interrupted", None, False]], (
        "nobody waits for it any more"
    )
    worker._engine.version = 9
    worker._gate.open()
    assert later.answers == [] and worker._engine.told[2:] == [("abort", [1]), ("free", [1])]


def test_what_belonged_to_a_dead_client_is_ended_but_not_its_successors(worker):
    for client in ("rollout_worker/0:11", "rollout_worker/0:12", "rollout_worker/1:13"):
        ask(worker, client, "generate", [0, [5], 0, None, -1])
    roster = [
        WorkerInfo("rollout_worker/0", "rollout_worker", 0, "here", 12),
        WorkerInfo("rollout_worker/1", "rollout_worker", 1, "here", 13),
    ]
    worker._on_roster({info.name: info for info in roster})
    assert worker._engine.told[3:] == [("abort", [0]), ("free", [0])]
    worker._on_roster({info.name: info for info in roster})
    assert len(worker._engine.told) == 5


@pytest.mark.parametrize(
    "payload", [None, [], [0], [0, [-1], 0, None, -1], ["x", [1], 0, None, -1], [0, [1], 0, None]]
)
def test_a_request_that_makes_no_sense_is_an_error_and_nothing_more(worker, payload):
    with pytest.raises(MessageError, match=r"message generate \(GenerateRequest\)"):
        ask(worker, "a:1", "generate", payload)
    with pytest.raises(ValueError, match="no_such"):
        ask(worker, "a:1", "no_such", [])
    assert worker._engine.told == []


def test_weights_that_are_kept_answer_for_their_version_alone(worker):
    """Whatever is loaded meanwhile, until they are not needed any more."""
    worker._gen = GenConfig(temperature=0.7)
    live, replica = worker._engine, FakeStreamingEngine()
    live.replica = lambda: replica
    assert ask(worker, "a:1", "generate", [0, [5], 0, None, -1, 3, False]).answers == [], (
        "the engine has them"
    )
    assert worker._pinned.pin(Nothing()) == PinAnswer(3, True)
    live.version = 8
    ask(worker, "a:1", "generate", [1, [5], 0, None, -1, 3, True])
    assert [
        (slot, config.temperature)
        for (_, slot), config in zip(replica.told, replica.configs, strict=True)
    ] == [(1, 0.0)]
    with pytest.raises(ValueError, match="weights of version 8 are not kept here"):
        ask(worker, "a:1", "generate", [2, [5], 0, None, -1, 8, False])
    ask(worker, "a:1", "generate", [3, [5], 0, None, 8])
    assert live.told == [("submit", 0), ("submit", 3)] and live.configs[0].temperature == 0.7
    assert ask(worker, "a:1", "free", [[1]]).answers == [{}] and replica.told[1:] == [
        ("abort", [1]),
        ("free", [1]),
    ]
    worker._pinned.unpin(Nothing())
    assert replica.closed
    with pytest.raises(ValueError, match="weights of version 3"):
        ask(worker, "a:1", "generate", [4, [5], 0, None, -1, 3, False])


@pytest.mark.slow
def test_where_no_second_engine_can_be_the_version_is_there_until_the_next(worker):
    worker._gen = GenConfig()
    worker._engine.replica = lambda: None
    assert worker._pinned.pin(Nothing()) == PinAnswer(3, False)
    ask(worker, "a:1", "generate", [0, [5], 0, None, -1, 3, False])
    assert worker._engine.told == [("submit", 0)]
    worker._engine.version = 4
    with pytest.raises(ValueError, match="weights of version 3 are not kept here"):
        ask(worker, "a:1", "generate", [1, [5], 0, None, -1, 3, False])
