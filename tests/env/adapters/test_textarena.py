"""The adapter of textarena without the package; tests/interop/test_textarena.py plays its games."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest

from realhf.api.environment import AssistantMessage, EnvironmentFailure, Turn
from realhf.env.adapters.textarena import TextArenaEnvironment
from realhf.env.loader.load import build_environment
from realhf.env.loader.threads import Threads


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ValueError, match=r"pip install .*\[textarena\]") as caught:
        build_environment("textarena", {"game": "TicTacToe-v0"})
    assert "\n" not in str(caught.value)


class Blocking:
    """A game whose moves last until an event, or for some seconds."""

    def __init__(self, event: threading.Event | None = None, seconds: float = 0.0) -> None:
        self.event = event
        self.seconds = seconds

    def read(self) -> str:
        return "Your turn."

    def play(self, text: str) -> Turn:
        time.sleep(self.seconds)
        if self.event is not None:
            self.event.wait(20)
        return Turn([{"role": "user", "content": text}])


async def started(name: str, game: Any, timeout_s: float) -> TextArenaEnvironment:
    env = TextArenaEnvironment(name, lambda _: game, Threads(name), timeout_s)
    await env.reset({}, seed=0)
    return env


async def test_a_game_that_does_not_return_is_named_by_all_others_at_once() -> None:
    event = threading.Event()
    stuck = await started("Stuck-v0", Blocking(event), 0.3)
    other = await started("Other-v0", Blocking(), 5.0)
    try:
        with pytest.raises(EnvironmentFailure, match="no answer") as caught:
            await stuck.step(AssistantMessage("x"))
        assert caught.value.kind == "timeout"
        began = time.monotonic()
        with pytest.raises(EnvironmentFailure, match=r"a call of Stuck-v0 does not return"):
            await other.step(AssistantMessage("x"))
        assert time.monotonic() - began < 2
    finally:
        event.set()
    for _ in range(100):
        try:
            assert (await other.step(AssistantMessage("again"))).messages[0]["content"] == "again"
            break
        except EnvironmentFailure:
            await asyncio.sleep(0.05)
    else:
        pytest.fail("games are not played again after the stuck one has returned")


async def test_waiting_for_other_games_does_not_use_up_a_games_time() -> None:
    games = [await started(f"Game{n}-v0", Blocking(seconds=1.8), 3.0) for n in range(2)]
    turns = [asyncio.create_task(game.step(AssistantMessage("x"))) for game in games]
    assert len(await asyncio.gather(*turns)) == 2
