"""A call of an environment ends by its deadline and never raises anything but a failure with its line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from realhf.api.environment import EnvironmentFailure
from realhf.env.check import calls
from realhf.env.check.calls import Caller, CallFailed, UserCode
from realhf.env.loader.validation import BrokenContract

HERE = Path(__file__).name


def failed(method: Callable[[], Awaitable[Any]], timeout_s: float = 5.0) -> CallFailed:
    async def call() -> None:
        await Caller(UserCode(), timeout_s, lambda name, task: None).call("step", "t", method)

    with pytest.raises(CallFailed) as raised:
        asyncio.run(call())
    return raised.value


async def exits() -> None:
    sys.exit("enough")


async def cancels_itself() -> None:
    raise asyncio.CancelledError


async def has_no_capacity() -> None:
    raise EnvironmentFailure("capacity", "all sessions are taken")


async def is_refused_by_a_door() -> None:
    try:
        raise BrokenContract("the reward must be a finite number, not nan")
    except BrokenContract:
        raise EnvironmentFailure("internal", "Game.step: ...") from None


async def waits() -> None:
    await asyncio.Event().wait()


async def holds_on() -> None:
    """Until it is cancelled once more, with the loop."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("method", "what"),
    [
        (exits, "step raised SystemExit: enough"),
        (cancels_itself, "step raised CancelledError"),
        (has_no_capacity, "step raised EnvironmentFailure('capacity'): all sessions are taken"),
        (is_refused_by_a_door, "step breaks the contract: the reward must be a finite number, not nan"),
    ],
)
def test_whatever_is_raised_is_a_sentence_with_a_line(method: Callable[[], Awaitable[Any]], what: str) -> None:
    """Also what would end the interpreter or the event loop."""
    error = failed(method)
    assert error.what == what and f"{HERE}:" in error.where and f" in {method.__name__}" in error.where
    assert not error.hung and error.shape is (method is is_refused_by_a_door)


def test_a_call_that_waits_is_given_up_and_placed() -> None:
    error = failed(waits, 0.05)
    assert error.hung and error.what == "step gave no answer within 0.05 s" and " in waits" in error.where


def test_a_call_that_cannot_be_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_CANCELLED_S", 0.05)
    error = failed(holds_on, 0.05)
    assert error.what == "step gave no answer within 0.05 s and cannot be cancelled" and " in holds_on" in error.where
