"""The playground: visitors play episodes in the browser, one visitor at a time, on a simulator of
its own.

``Playground`` decides on the event loop which visitor plays, and runs the ``PlaygroundSession`` on
a dedicated thread. The session must be used from a single, long-lived thread, because the
simulator's processes die with the thread that started them. Source: docs/reference/environment.md
11.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from realhf.aws.episode.player import EpisodePlayer
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.captures import CaptureError, resolve
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.aws.tasks.task import Task
from realhf.env.server.wire import VALIDATION_ERROR, WireError
from realhf.web.refusal import Refusal

LOG_FORMAT = "realhf-episode-1"
"""Format id of a downloaded episode."""
_LOGGED_FIELDS = (
    "command_output", "error", "command_success", "refusal", "hint_text", "hints_used", "partial_progress",
    "task_achieved", "truncated", "steps_left",
)  # fmt: skip
"""Observation fields that the log of a step contains."""


def no_episode() -> Refusal:
    """Return the refusal for a visitor without an episode."""
    return Refusal(409, "no episode is running here; start one", code="NO_EPISODE")


class PlaygroundSession:
    """The playground's simulator and the episode that is played on it.

    ``make_pool`` builds the simulator, a pool of size one, when the first episode starts; if that
    fails, the next episode tries again. ``make_player`` returns the player for the pool's slot.
    ``summed``: whether the score is the sum of the rewards instead of the last reward (see
    ``RewardMeter``).
    """

    def __init__(
        self,
        make_pool: Callable[[], MiniStackPool],
        make_player: Callable[[Slot], EpisodePlayer],
        *,
        summed: bool,
    ) -> None:
        self._make_pool = make_pool
        self._make_player = make_player
        self._summed = summed
        self._pool: MiniStackPool | None = None
        self._slot: Slot | None = None
        self._player: EpisodePlayer | None = None
        self._solution: list[str] = []
        self._reference_outputs: list[str] = []
        self._random = random.Random()
        self.log: dict[str, Any] | None = None
        """Log of the episode so far, in the format of the download; None before the first
        episode."""

    def reset(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start an episode and return its log. Keys of ``order``, all optional:

        - ``task_id``: the template; default: a random one
        - ``tier``: tier from which the random template is chosen; default: all
        - ``seed``: default: random
        - ``split``: which resource names are drawn, ``train`` (default) or ``heldout``
        - ``chaos``: whether the episode may be perturbed

        Raises WireError, and the errors of ``MiniStackPool.start``.
        """
        task = self._choose_task(order)
        if self._player is None:
            self._player = self._make_player(self._lease())
        self._clear_episode()
        observation, _, _ = self._player.reset(
            {"task": task.to_json(), "chaos": order.get("chaos")}
        )
        with suppress(CaptureError):
            self._solution = self._player.fill(task.solution)
        self.log = {
            "format": LOG_FORMAT,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "episode_id": observation["episode_id"],
            "task": observation["task"],
            "seed": task.seed,
            "names": _names_in_text(task, observation["task"]["description"]),
            "max_steps": observation["steps_left"],
            "infra_state": self._player.state()["infra_state"],
            "steps": [],
        }
        return self.log

    def _clear_episode(self) -> None:
        self.log = None
        self._solution = []
        self._reference_outputs = []

    def step(self, command: str) -> dict[str, Any]:
        """Run a command and return its log entry. Raises Refusal if no episode is running, and
        WireError."""
        if self.log is None or self._player is None:
            raise no_episode()
        steps = self.log["steps"]
        began = time.perf_counter()
        if steps and steps[-1]["done"]:
            raise Refusal(409, "the episode is over; start another", code="NO_EPISODE")
        observation, reward, done = self._player.step({"command": command})
        spent = time.perf_counter() - began
        reward = reward or 0.0
        before = steps[-1]["score"] if steps and self._summed else 0.0
        entry = {
            "command": command,
            **{key: observation[key] for key in _LOGGED_FIELDS},
            "reward": reward,
            "score": before + reward,
            "done": done,
            "milliseconds": round(spent * 1000, 1),
            "infra_state": self._player.state()["infra_state"],
        }
        following = self._next_reference_command()
        if following is not None and following.split() == command.split():
            # later reference commands capture from it
            self._reference_outputs.append(observation["command_output"])
        steps.append(entry)
        return entry

    def _next_reference_command(self) -> str | None:
        done = len(self._reference_outputs)
        return (
            resolve(self._solution[done], self._reference_outputs)
            if done < len(self._solution)
            else None
        )

    def solution(self) -> dict[str, Any]:
        """Return the first command of the reference solution that the player has not run yet:
        ``command`` (None if all were run), ``position`` (from 1) and ``total``. Raises Refusal
        without an episode."""
        if self.log is None:
            raise no_episode()
        position = len(self._reference_outputs) + 1
        return {
            "command": self._next_reference_command(),
            "position": position,
            "total": len(self._solution),
        }

    def release(self) -> None:
        """End the episode and empty the account. The simulator keeps running for the next
        visitor."""
        self._clear_episode()
        self._player = None
        slot = self._slot
        self._slot = None
        if self._pool is not None and slot is not None:
            self._pool.release(slot)

    def kill(self) -> None:
        """Kill the running command. Thread-safe."""
        player = self._player
        if player is not None:
            player.kill()

    def close(self) -> None:
        """Stop the simulator and all its processes."""
        pool = self._pool
        self._pool = None
        self._clear_episode()
        self._player = self._slot = None
        if pool is not None:
            pool.stop()

    def _lease(self) -> Slot:
        if self._pool is None:
            pool = self._make_pool()
            pool.start()
            self._pool = pool
        if self._slot is None:
            self._slot = self._pool.acquire()
        return self._slot

    def _choose_task(self, order: dict[str, Any]) -> Task:
        task_id = order.get("task_id")
        tier = order.get("tier")
        seed = order.get("seed")
        split = order.get("split") or "train"
        try:
            if task_id is None:
                task_id = self._random.choice(
                    load_templates(None if tier is None else [tier])
                ).task_id
            return instantiate(
                int(task_id), self._random.randrange(10_000) if seed is None else seed, split
            )
        except ValueError as error:
            raise WireError(VALIDATION_ERROR, str(error)[:300]) from None
        except IndexError:
            raise WireError(VALIDATION_ERROR, f"no task has the tier {tier}") from None


def _names_in_text(task: Task, description: str) -> list[str]:
    """Return the resource names that the description contains, longest first. The page highlights
    them."""
    values = {str(value) for value in task.params.values()}
    names = sorted(name for name in values if len(name) > 2 and name in description)
    return sorted(names, key=len, reverse=True)


T = TypeVar("T")
IDLE_RELEASE_S = 600.0
"""Seconds without a request after which the player loses the session."""
AWAY_RELEASE_S = 30.0
"""The same limit after the player closed the page. If the page was only reloaded, it sends a
request within this time."""
_LOG = logging.getLogger(__name__)


class Playground:
    """Access to the playground's session for one visitor at a time, the player.

    After ``idle_release_s`` seconds without a request by the player, or ``away_release_s`` seconds
    if the player closed the page, the session is free for other visitors. Call all coroutines on
    one event loop; ``close`` is thread-safe. Requests that are not served raise ``Refusal``.
    """

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
        self._idle_timer: asyncio.TimerHandle | None = None

    async def reset(self, visitor: str, order: dict[str, Any]) -> dict[str, Any]:
        """Start an episode and return its log. If the session is free, the visitor becomes the
        player."""
        self._refuse_others(visitor)
        newcomer = self._player is None
        self._player = visitor
        begun = False
        try:
            log = await self._play(lambda: self._session.reset(order))
            begun = True
            return log
        except (OSError, RuntimeError) as error:
            _LOG.warning("the playground's simulator did not start: %s", error)
            why = (
                error.strerror or str(error)
                if isinstance(error, OSError)
                else "see the server's log for the reason"
            )
            raise Refusal(
                503, f"the simulator did not start ({why}); try again", code="NO_SIMULATOR"
            ) from None
        finally:
            if newcomer and not begun and not self._in_flight:
                self._player = None

    async def step(self, visitor: str, command: str) -> dict[str, Any]:
        """Run a command and return its log entry."""
        self._require_player(visitor)
        return await self._play(lambda: self._session.step(command))

    async def solution(self, visitor: str) -> dict[str, Any]:
        """Return the next command of the reference solution."""
        self._require_player(visitor)
        return await self._play(self._session.solution)

    async def state(self, visitor: str) -> dict[str, Any]:
        """Return ``busy`` (whether another visitor is playing), ``free_in_s`` (seconds until the
        session is free at the latest) and ``log`` of the visitor's own episode (None without
        one)."""
        if self._player == visitor:
            return {"busy": False, "log": await self._play(lambda: self._session.log)}
        return {"busy": self._player is not None, "free_in_s": self._free_in_s(), "log": None}

    async def away(self, visitor: str) -> None:
        """Record that the player closed the page. The player's next request cancels this. Other
        visitors are ignored."""
        if self._player != visitor:
            return
        self._away = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = asyncio.get_running_loop().call_later(
            self._free_in_s(), self._check_idle
        )

    async def leave(self, visitor: str) -> None:
        """Free the session if the visitor is the player."""
        if self._player == visitor:
            self._player = None
            await asyncio.get_running_loop().run_in_executor(self._thread, self._release)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the simulator and kill a running command. Idempotent."""
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
            raise Refusal(409, text, code="BUSY", free_in_s=wait)

    def _require_player(self, visitor: str) -> None:
        self._refuse_others(visitor)
        if self._player is None:
            raise no_episode()

    def _free_in_s(self) -> float:
        if self._player is None:
            return 0.0
        idle = asyncio.get_running_loop().time() - self._last_used
        allowed = (
            min(self._away_release_s, self._idle_release_s) if self._away else self._idle_release_s
        )
        return max(0.0, allowed - idle)

    async def _play(self, action: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        self._in_flight += 1
        self._away = False
        self._last_used = loop.time()
        if self._idle_timer is None:
            self._idle_timer = loop.call_later(self._idle_release_s, self._check_idle)
        try:
            return await loop.run_in_executor(self._thread, action)
        finally:
            self._in_flight -= 1
            self._last_used = loop.time()

    def _check_idle(self) -> None:
        """Timer callback: free the session of an idle player, or schedule the next check."""
        self._idle_timer = None
        if self._player is None:
            return
        loop = asyncio.get_running_loop()
        rest = self._free_in_s()
        if rest > 0 or self._in_flight:
            self._idle_timer = loop.call_later(max(rest, 0.05), self._check_idle)
        else:
            self._player = None
            loop.run_in_executor(self._thread, self._release)

    def _release(self) -> None:
        try:
            self._session.release()
        except (OSError, RuntimeError, ValueError) as error:
            _LOG.warning("the playground's account was not emptied: %s", error)
