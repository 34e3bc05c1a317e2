"""Tokens from several generation workers, which are real services here: where a request goes, and
what happens when one of them dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from realhf.api.calls import GENERATE
from realhf.api.generation import GenerationFailed
from realhf.api.model import GenOutput, GenRequest
from realhf.base.messages import MessageError
from realhf.rollout import generation_client
from realhf.rollout.generation_client import (
    ConstrainedTokens,
    GenerationClient,
    build_answer,
    build_request,
)
from realhf.transport.service import ServiceRequest, ServiceServer
from tests.transport.fixed_port import At


class FakeEngine:
    """A generation worker that answers with its own number, once ``open`` is set; or with
    ``error``."""

    def __init__(self, number: int, endpoint: str = "") -> None:
        self.number = number
        self.open = True
        self.error: Exception | None = None
        self.asked: list[Any] = []
        self.freed: list[int] = []
        self.methods: list[str] = []
        self.arrived = threading.Event()
        self.server = ServiceServer(
            f"generation/{number}", "run", self._answer, network=At(endpoint=endpoint)
        )
        self.endpoint = self.server.endpoint

    def _answer(self, request: ServiceRequest) -> None:
        self.methods.append(request.method)
        if request.method == "free":
            self.freed += request.payload[0]
            request.reply({})
            return
        self.asked.append(request.payload)
        self.arrived.set()
        if self.error is not None:
            raise self.error
        if self.open:
            request.reply([[self.number], [-1.0], [0], "stop"])


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    made = [FakeEngine(0), FakeEngine(1)]
    yield made
    for engine in made:
        engine.server.close()


@pytest.fixture
async def client(engines: list[FakeEngine]) -> Any:
    made = GenerationClient("rollout_worker/0:1", "run", timeout_s=60)
    made.update({f"generation/{engine.number}": engine.endpoint for engine in engines})
    yield made
    made.close()


async def all_asked(engines: list[FakeEngine], count: int) -> None:
    async with asyncio.timeout(60):
        while sum(len(engine.asked) for engine in engines) < count:
            await asyncio.sleep(0.01)


async def test_a_slot_stays_where_its_rows_are_until_it_is_freed(
    client: Any, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.open = False
    tasks = [asyncio.create_task(client.generate(GenRequest(slot, [1] * 10))) for slot in range(6)]
    await all_asked(engines, 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    homes = {payload[0]: engine.number for engine in engines for payload in engine.asked}
    assert sorted(homes.values()) == [0, 0, 0, 1, 1, 1], (
        "new slots go to the worker with the fewest tokens in hand"
    )
    for engine in engines:
        engine.open = True
    for slot, home in homes.items():
        assert (await client.generate(GenRequest(slot, [1, 2]))).token_ids == [home]
    client.free(range(6))
    await asyncio.gather(*client._freeing)
    assert {slot: engine.number for engine in engines for slot in engine.freed} == homes


async def test_what_an_episode_asks_for_is_not_forgotten_with_the_one_before(
    engines: list[FakeEngine],
) -> None:
    """The first request of an episode that was played again came before ``free``, which ended it:
    nothing waits between the two where an environment answers at once."""
    client = GenerationClient("me", "run", timeout_s=60)
    client.update({"generation/0": engines[0].endpoint})
    for _ in range(2):
        await client.generate(GenRequest(0, [1]))
        client.free([0])
    await asyncio.gather(*client._freeing)
    assert engines[0].methods == ["generate", "free", "generate", "free"]
    client.close()


async def test_requests_of_a_worker_that_dies_go_to_another(
    client: Any, engines: list[FakeEngine]
) -> None:
    engines[0].open = engines[1].open = False
    tasks = [
        asyncio.create_task(client.generate(GenRequest(slot, [1] * 4, seed=9))) for slot in range(4)
    ]
    await all_asked(engines, 4)
    dying, living = engines if client._home[0] == engines[0].endpoint else engines[::-1]
    living.open = True
    await asyncio.to_thread(dying.server.close)
    moved = await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 60)
    assert [output.token_ids for output in moved] == [[living.number]] * 2 and client.rerouted == 2
    assert living.asked[-1][1:] == [[1] * 4, 0, 9, -1, -1, False, 0, ""], (
        "with everything that the request holds"
    )
    for task in tasks:
        task.cancel()


async def test_an_evaluation_asks_only_those_who_keep_its_weights(
    client: Any, engines: list[FakeEngine]
) -> None:
    """And fails at once when none of them is left."""
    pinned = ConstrainedTokens(client, ["generation/1"], pinned_version=4, greedy=True)
    for slot in range(4):
        assert (await pinned.generate(GenRequest(slot, [1, 2]))).token_ids == [1]
    assert not engines[0].asked and {tuple(payload[5:]) for payload in engines[1].asked} == {
        (4, True, 0, "")
    }
    client.update({"generation/0": engines[0].endpoint})
    with pytest.raises(
        GenerationFailed,
        match="no generation worker that keeps these weights is left of generation/1",
    ):
        await asyncio.wait_for(pinned.generate(GenRequest(0, [1, 2])), 60)


async def test_a_request_that_loses_one_worker_after_another_is_given_up() -> None:
    client = GenerationClient("me", "run", timeout_s=60)
    asking = asyncio.create_task(client.generate(GenRequest(0, [1])))
    for number in range(4):
        engine = FakeEngine(number)
        engine.open = False
        client.update({"generation/0": engine.endpoint})
        assert await asyncio.to_thread(engine.arrived.wait, 60)
        await asyncio.to_thread(engine.server.close)
    with pytest.raises(GenerationFailed, match="4 generation workers died while they had it"):
        await asyncio.wait_for(asking, 60)
    client.close()


async def test_without_a_worker_a_request_waits_for_one_to_join(engines: list[FakeEngine]) -> None:
    client = GenerationClient("me", "run", timeout_s=60)
    waiting = asyncio.create_task(client.generate(GenRequest(0, [1])))
    await asyncio.sleep(0)
    client.update({"generation/1": engines[1].endpoint})
    assert (await waiting).token_ids == [1]
    client.close()
    nobody = GenerationClient("me", "run", timeout_s=0.05)
    with pytest.raises(GenerationFailed, match=r"no generation worker was there for 0\.05 s"):
        await nobody.generate(GenRequest(0, [1]))


async def test_a_living_worker_whose_connection_broke_is_tried_again(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_client, "_RECONNECT_S", 0.05)
    client = GenerationClient("me", "run", timeout_s=60)
    client.update({"generation/0": engines[0].endpoint})
    await client.generate(GenRequest(0, [1]))
    await asyncio.to_thread(engines[0].server.close)
    waiting = asyncio.create_task(client.generate(GenRequest(0, [1])))
    await asyncio.sleep(0.1)
    engines[0] = FakeEngine(7, engines[0].endpoint)
    assert (await asyncio.wait_for(waiting, 60)).token_ids == [7]
    client.close()


async def test_a_connection_that_is_lost_late_does_not_cost_the_new_one(
    client: Any, engines: list[FakeEngine]
) -> None:
    endpoint = engines[0].endpoint
    old = client._workers[endpoint]
    client._drop(endpoint, old)
    client._connect(endpoint)
    new = client._workers[endpoint]
    client._drop(endpoint, old)
    assert client._workers[endpoint] is new is not old


async def test_errors_and_deadlines_end_a_request(client: Any, engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.error = ValueError("no such token")
    with pytest.raises(GenerationFailed, match="ValueError: no such token"):
        await client.generate(GenRequest(0, [1]))
    assert sum(len(engine.asked) for engine in engines) == 3
    for engine in engines:
        engine.error = None
        engine.open = False
    client._timeout_s = 0.05
    with pytest.raises(GenerationFailed, match="did not answer generate"):
        await client.generate(GenRequest(0, [1]))


async def test_closing_ends_requests_at_once_and_later_news_change_nothing(
    client: Any, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.open = False
    waiting = [asyncio.create_task(client.generate(GenRequest(slot, [1]))) for slot in range(2)]
    for engine in engines:
        assert await asyncio.to_thread(engine.arrived.wait, 60)
    client.close()
    ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert [str(end) for end in ends] == ["the client of the generation workers is closed"] * 2
    client.update({"generation/1": engines[1].endpoint})
    assert client._workers == {}
    with pytest.raises(GenerationFailed, match="closed"):
        await client.generate(GenRequest(1, [1]))


def test_an_aborted_turn_is_one_to_go_on_with() -> None:
    assert build_answer(GenOutput([1], [-1.0], [2], "aborted")).finish_reason == "interrupted"
    assert build_answer(GenOutput([1], [-1.0], [2], "length")).finish_reason == "length"


def test_a_request_that_makes_no_sense_is_refused() -> None:
    request = build_request(GENERATE.unpack([3, [1, 2], 1, 7, 5]), slot=12)
    assert request == GenRequest(12, [1, 2], 1, 7, 5)
    for fields in (
        [3, [1, -2], 0, None, -1],
        [3, ["a"], 0, None, -1],
        [3, [1]],
        [3, 5, 0, None, -1],
        [3, [1], 0, None, None],
    ):
        with pytest.raises(MessageError, match="message generate"):
            GENERATE.unpack(fields)
