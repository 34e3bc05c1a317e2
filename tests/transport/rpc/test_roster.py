"""Every worker is told what it has yet to know of the others, and those that serve nobody hear less."""

from __future__ import annotations

import asyncio
from typing import Any

from realhf.transport.envelope import unpack_payload
from realhf.transport.roster import RosterNews, WorkerInfo


class Told:
    """What workers have been sent."""

    def __init__(self) -> None:
        self.roster: dict[str, WorkerInfo] = {}
        self.unlisted: set[str] = set()
        self.sent: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.news = RosterNews(self.roster, self.unlisted, self._send)

    def _send(self, name: str, version: int, payload: bytes) -> None:
        self.sent.setdefault(name, []).append((version, unpack_payload([payload])))

    def join(self, name: str, **addresses: Any) -> None:
        """Let a worker take part."""
        self.roster[name] = WorkerInfo(name, "kind", 0, "host", 1, **addresses)
        self.news.changed(self.roster[name])

    def leave(self, name: str) -> None:
        """Let it go."""
        self.news.changed(self.roster.pop(name))

    def knows(self, name: str) -> list[str]:
        """The workers that one knows of, by what it was sent."""
        known: dict[str, Any] = {}
        for _, news in self.sent.get(name, []):
            known = {other: info for other, info in known.items() if other not in news["gone"]}
            known |= {worker["name"]: worker for worker in news["workers"]}
        return sorted(known)


async def pause(told: Told) -> None:
    """Until everybody was told."""
    async with asyncio.timeout(60):
        while told.news._timer is not None:
            await asyncio.sleep(0.001)


async def test_changes_that_come_together_are_told_together() -> None:
    told = Told()
    for name in ("engine", "trainer"):
        told.join(name, data_endpoint="tcp://here")
    for number in range(20):
        told.join(f"player/{number}")
    await pause(told)
    assert [len(sent) for sent in told.sent.values()] == [1] * 22, "one message for each"
    assert len(told.knows("engine")) == 22
    assert told.knows("player/3") == ["engine", "trainer"], "players do not hear of each other"
    told.leave("player/3")
    await pause(told)
    assert len(told.sent["player/4"]) == 1, "for them nothing has changed"
    assert "player/3" not in told.knows("engine")
    told.leave("trainer")
    await pause(told)
    assert told.knows("player/4") == ["engine"]


async def test_what_is_called_next_is_told_at_once_and_once() -> None:
    told = Told()
    told.join("engine", endpoints={"generation": "tcp://here"})
    told.join("player")
    told.news.tell("player")
    assert told.knows("player") == ["engine"]
    await pause(told)
    assert len(told.sent["player"]) == 1
    told.unlisted.add("engine")
    told.news.changed(told.roster["engine"])
    told.news.tell("player")
    assert told.sent["player"][-1][1]["workers"][0]["endpoints"] == {}, "its services are not shown any more"
    told.news.close()


async def test_a_successor_is_told_everything() -> None:
    told = Told()
    told.join("engine", data_endpoint="tcp://here")
    told.join("player")
    await pause(told)
    told.leave("player")
    told.sent.pop("player")
    told.join("player")
    await pause(told)
    assert told.knows("player") == ["engine"]
