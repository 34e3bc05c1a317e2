"""Calls an environment's methods, each with a deadline; whatever goes wrong becomes one failure with its line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from realhf.api.environment import Environment, EnvironmentFailure
from realhf.env.check.finding import alike, quoted
from realhf.env.check.user_code import UserCode
from realhf.env.check.watchdog import CALL
from realhf.env.doors.checks import BrokenContract

_CANCELLED_S = 1.0
"""How long a call that was cancelled may take to end, in seconds."""


class CallFailed(Exception):
    """A call raised or gave no answer. ``what`` is a sentence, ``kind`` what it shares with others about
    the same fault, ``where`` the line of the environment's code; ``hung`` tells the second from the first, and
    ``shape`` is set when a door refused what the environment returned."""

    def __init__(self, what: str, where: str, kind: str, *, hung: bool = False, shape: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.kind = kind
        self.hung = hung
        self.shape = shape


class _Ended(Exception):
    """The environment raised what would end the interpreter."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Caller:
    """Calls environments. ``timeout_s``: seconds until an answer must be there; ``announce`` is told what begins and
    which task it concerns, so that whoever watches this process knows what it was doing when it died."""

    def __init__(self, code: UserCode, timeout_s: float, announce: Callable[[str, str], None]) -> None:
        self._code = code
        self._timeout_s = timeout_s
        self._announce = announce

    async def call(self, name: str, task: str, method: Callable[[], Awaitable[Any]], place: str = "") -> Any:
        """Await ``method()``, the call of ``name`` (``reset``, ``step``, ``close``), which is defined at ``place``.
        Raises CallFailed."""
        self._announce(name, task)
        running = asyncio.create_task(_guarded(method), name=f"{CALL}{place}")
        done, _ = await asyncio.wait({running}, timeout=self._timeout_s)
        if done:
            try:
                return running.result()
            except (Exception, asyncio.CancelledError) as error:
                raise self._raised(name, error) from None
        where = self._code.of_awaitable(running)
        running.cancel()
        await asyncio.wait({running}, timeout=_CANCELLED_S)
        stubborn = "" if running.done() else " and cannot be cancelled"
        if running.done() and not running.cancelled():
            running.exception()
        raise CallFailed(f"{name} gave no answer within {self._timeout_s:g} s{stubborn}", where, "hung", hung=True)

    def make(self, make: Callable[[str], Environment], address: str) -> Environment:
        """Return a new instance. Raises CallFailed."""
        self._announce("make", "")
        try:
            return make(address)
        except (Exception, SystemExit) as error:
            raise self._raised("make", error) from None

    def _raised(self, name: str, error: BaseException) -> CallFailed:
        error = error.error if isinstance(error, _Ended) else error
        where = self._code.of_exception(error)
        if isinstance(error, EnvironmentFailure) and error.kind == "internal":
            # A door says what an author's code raised as the cause, and what broke the contract without one.
            refused = error.__context__ if isinstance(error.__context__, BrokenContract) else None
            error = error.__cause__ or refused or error
        if isinstance(error, BrokenContract):
            what = f"{name} breaks the contract: {quoted(error)}"
            return CallFailed(what, where, alike(what), shape=True)
        return CallFailed(f"{name} raised {described(error)}", where, type(error).__name__)


def described(error: BaseException) -> str:
    """Return the type and the text of an exception in one line; of a failure also its kind."""
    text = quoted(error)
    if isinstance(error, EnvironmentFailure):
        return f"EnvironmentFailure({error.kind!r}): {text}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def _guarded(method: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await method()
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # These would leave the event loop past everybody who waits for this call.
        raise _Ended(error) from error
