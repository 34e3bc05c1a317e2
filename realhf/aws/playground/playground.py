"""Gives the playground's session to one visitor at a time; after ten idle minutes, or half a minute after the
visitor's page was closed, others may play (docs/reference/environment.md 11).

Who plays is decided on the event loop; the session runs on one thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, TypeVar

from realhf.aws.playground.playground_session import NoEpisode, PlaygroundSession
from realhf.env.server.access import Refused

T = TypeVar("T")
IDLE_RELEASE_S = 600.0
AWAY_RELEASE_S = 30.0
"""Time for a page that is loaded anew to ask again."""
_LOG = logging.getLogger(__name__)


class Playground:
    """Serves the playground's session to one visitor at a time. ``idle_release_s``: seconds without a request of the
    player after which others may play; ``away_release_s``: the same once the player's page was
    closed. Call all coroutines on one event loop; ``close`` from any thread. Raises
    ``Refused`` for a request that it does not serve."""

    def __init__(
        self,
        session: PlaygroundSession,
        idle_release_s: float = IDLE_RELEASE_S,
        away_release_s: float = AWAY_RELEASE_S,
    ) -> None:
        self._session = session
        self._idle_release_s = idle_release_s
        self._away_release_s = away_release_s
        self._away = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="playground")
        self._player: str | None = None
        self._last_used = 0.0
        self._in_flight = 0
        self._watch: asyncio.TimerHandle | None = None

    async def reset(self, visitor: str, order: dict[str, Any]) -> dict[str, Any]:
        """Start an episode and return its log; the visitor is the player from now on, if nobody else is."""
        self._refuse_others(visitor)
        newcomer, self._player = self._player is None, visitor
        begun = False
        try:
            log = await self._play(lambda: self._session.reset(order))
            begun = True
            return log
        except (OSError, RuntimeError) as error:
            _LOG.warning("the playground's simulator did not start: %s", error)
            why = error.strerror or str(error) if isinstance(error, OSError) else "the server's log tells why"
            raise Refused(503, "NO_SIMULATOR", f"the simulator did not start ({why}); try again") from None
        finally:
            if newcomer and not begun and not self._in_flight:
                self._player = None

    async def step(self, visitor: str, command: str) -> dict[str, Any]:
        """Run a command and return its entry in the log."""
        self._refuse_idlers(visitor)
        return await self._play(lambda: self._session.step(command))

    async def solution(self, visitor: str) -> dict[str, Any]:
        """Return the next canonical command."""
        self._refuse_idlers(visitor)
        return await self._play(self._session.solution)

    async def state(self, visitor: str) -> dict[str, Any]:
        """Return ``busy``: somebody else plays; ``free_in_s`` at the latest; ``log`` of the visitor's own episode."""
        if self._player == visitor:
            return {"busy": False, "log": await self._play(lambda: self._session.log)}
        return {"busy": self._player is not None, "free_in_s": self._free_in_s(), "log": None}

    async def away(self, visitor: str) -> None:
        """Note that the visitor's page was closed; the next request of the visitor takes that back."""
        if self._player != visitor:
            return
        self._away = True
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.get_running_loop().call_later(self._free_in_s(), self._look)

    async def leave(self, visitor: str) -> None:
        """Make room for others, when the visitor is the player."""
        if self._player == visitor:
            await self._release()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the simulator; a command in flight is killed. Idempotent."""
        self._session.kill()
        try:
            self._thread.submit(self._session.close).result(timeout_s)
        except NoAnswer:
            _LOG.error("the playground's simulator did not end within %g s", timeout_s)
        except RuntimeError:
            return
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _refuse_others(self, visitor: str) -> None:
        if self._player not in (None, visitor):
            wait = self._free_in_s()
            text = f"busy: somebody else is playing; free in {wait:.0f} s at the latest"
            raise Refused(409, "BUSY", text, free_in_s=wait)

    def _refuse_idlers(self, visitor: str) -> None:
        self._refuse_others(visitor)
        if self._player is None:
            raise Refused(409, "NO_EPISODE", "no episode is running here; start one")

    def _free_in_s(self) -> float:
        if self._player is None:
            return 0.0
        idle = asyncio.get_running_loop().time() - self._last_used
        allowed = min(self._away_release_s, self._idle_release_s) if self._away else self._idle_release_s
        return max(0.0, allowed - idle)

    async def _play(self, action: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        self._in_flight += 1
        self._away = False
        self._last_used = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(self._idle_release_s, self._look)
        try:
            return await loop.run_in_executor(self._thread, action)
        except NoEpisode:
            raise Refused(409, "NO_EPISODE", "the episode is over; start another") from None
        finally:
            self._in_flight -= 1
            self._last_used = loop.time()

    def _look(self) -> None:
        """Release the idle player, or look again when the time may have come; the timer calls this."""
        self._watch = None
        if self._player is None:
            return
        loop, rest = asyncio.get_running_loop(), self._free_in_s()
        if rest > 0 or self._in_flight:
            self._watch = loop.call_later(max(rest, 0.05), self._look)
        else:
            self._player = None
            loop.run_in_executor(self._thread, self._released)

    async def _release(self) -> None:
        self._player = None
        await asyncio.get_running_loop().run_in_executor(self._thread, self._released)

    def _released(self) -> None:
        try:
            self._session.release()
        except (OSError, RuntimeError, ValueError) as error:
            _LOG.warning("the playground's account was not emptied: %s", error)
