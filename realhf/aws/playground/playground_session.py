"""Plays episodes on the playground's own simulator: its blocking side.

Use it from one thread only, and one that lives as long: the simulator's processes die with the thread that started
them. Source: docs/reference/environment.md 11.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from realhf.aws.episode.player import EpisodePlayer, Reply
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.captures import CaptureError, resolve
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.aws.tasks.task import Task
from realhf.env.server.wire import VALIDATION_ERROR, WireError

LOG_FORMAT = "realhf-episode-1"


class NoEpisode(Exception):
    """No episode is being played."""


class PlaygroundSession:
    """Plays one episode at a time. ``make_pool`` builds the simulator, a pool of one, when the first episode starts; a
    start that failed is tried again by the next one. ``make_player`` plays on its slot; ``summed``: the score is the
    sum of the rewards, not the last of them (see ``reward``)."""

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
        self._followed: list[str] = []
        self._random = random.Random()
        self.log: dict[str, Any] | None = None
        """What happened in the episode so far, as it is downloaded; None before the first."""

    def reset(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start an episode: the template ``task_id``, else one drawn from ``tier`` or from all; ``seed`` (none: a
        drawn one), ``split`` of the names, ``chaos``. Returns its log. Raises WireError, and what
        ``MiniStackPool.start`` raises."""
        task = self._draw(order)
        if self._player is None:
            self._player = self._make_player(self._lease())
        self._forget()
        first = self._player.reset({"task": task.to_json(), "chaos": order.get("chaos")})
        self._solution = self._filled(task)
        self.log = self._begin(task, first)
        return self.log

    def _forget(self) -> None:
        self.log, self._solution, self._followed = None, [], []

    def _filled(self, task: Task) -> list[str]:
        assert self._player is not None
        try:
            return self._player.fill(task.solution)
        except CaptureError:
            return []

    def _begin(self, task: Task, first: Reply) -> dict[str, Any]:
        observation = first[0]
        return {
            "format": LOG_FORMAT,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "episode_id": observation["episode_id"],
            "task": observation["task"],
            "seed": task.seed,
            "names": _names(task, observation["task"]["description"]),
            "max_steps": observation["steps_left"],
            "infra_state": self._infra_state(),
            "steps": [],
        }

    def step(self, command: str) -> dict[str, Any]:
        """Play a command; returns its entry in the log. Raises NoEpisode, WireError."""
        if self.log is None or self._player is None:
            raise NoEpisode
        steps, began = self.log["steps"], time.perf_counter()
        if steps and steps[-1]["done"]:
            raise NoEpisode
        observation, reward, done = self._player.step(command)
        spent, reward = time.perf_counter() - began, reward or 0.0
        before = steps[-1]["score"] if steps and self._summed else 0.0
        shown = (
            "command_output",
            "error",
            "command_success",
            "refusal",
            "hint_text",
            "hints_used",
            "partial_progress",
            "task_achieved",
            "truncated",
            "steps_left",
        )
        entry = {
            "command": command,
            **{key: observation[key] for key in shown},
            "reward": reward,
            "score": before + reward,
            "done": done,
            "milliseconds": round(spent * 1000, 1),
            "infra_state": self._infra_state(),
        }
        self._follow(command, observation["command_output"])
        steps.append(entry)
        return entry

    def _infra_state(self) -> dict[str, Any]:
        return self._player.state()["infra_state"] if self._player is not None else {}

    def _follow(self, command: str, output: str) -> None:
        """Keep the outputs of canonical commands: later ones capture from them."""
        following = self._next_canonical()
        if following is not None and following.split() == command.split():
            self._followed.append(output)

    def _next_canonical(self) -> str | None:
        done = len(self._followed)
        return resolve(self._solution[done], self._followed) if done < len(self._solution) else None

    def solution(self) -> dict[str, Any]:
        """Return the first canonical command that was not run yet: ``command`` (None: all were), its ``position`` from
        1, ``total``. Raises NoEpisode."""
        if self.log is None:
            raise NoEpisode
        position = len(self._followed) + 1
        return {"command": self._next_canonical(), "position": position, "total": len(self._solution)}

    def release(self) -> None:
        """End the episode and empty the account. The simulator stays warm for the next visitor."""
        self._forget()
        self._player = None
        slot, self._slot = self._slot, None
        if self._pool is not None and slot is not None:
            self._pool.release(slot)

    def kill(self) -> None:
        """End the command in flight; may be called from any thread."""
        player = self._player
        if player is not None:
            player.kill()

    def close(self) -> None:
        """End the simulator and all its processes."""
        pool, self._pool = self._pool, None
        self._forget()
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

    def _draw(self, order: dict[str, Any]) -> Task:
        task_id, tier, seed = order.get("task_id"), order.get("tier"), order.get("seed")
        split = order.get("split") or "train"
        try:
            if task_id is None:
                task_id = self._random.choice(load_templates(None if tier is None else [tier])).task_id
            return instantiate(int(task_id), self._random.randrange(10_000) if seed is None else seed, split)
        except ValueError as error:
            raise WireError(VALIDATION_ERROR, str(error)[:300]) from None
        except IndexError:
            raise WireError(VALIDATION_ERROR, f"no task has the tier {tier}") from None


def _names(task: Task, description: str) -> list[str]:
    """Return what the seed drew and the description names, longest first; a page sets it off from the prose."""
    drawn = {str(value) for value in task.params.values()}
    told = sorted(name for name in drawn if len(name) > 2 and name in description)
    return sorted(told, key=len, reverse=True)
