"""An environment on the OpenEnv wire: guess a number from 1 to 100 with commands such as ``guess 50``."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from realhf.env.server.config import ServerConfig
from realhf.env.server.server import EnvServer, listen

TASK = "Guess a number from 1 to 100. Say 'guess N'; the answer is 'higher', 'lower' or 'right'."
MAX_STEPS = 10

Result = tuple[dict[str, Any], float | None, bool]


class GuessingPlayer:
    """The blocking side of one session (``Player`` in realhf/env/server/session.py)."""

    def __init__(self, slot: int) -> None:
        del slot
        self._secret, self._steps = 0, 0

    def reset(self, data: dict[str, Any]) -> Result:
        """Begin an episode. The server has checked ``data``: ``seed``, ``task`` and the like, if they were sent."""
        self._secret, self._steps = random.Random(data.get("seed") or 0).randint(1, 100), 0
        return self._observation("", True), None, False

    def step(self, command: str) -> Result:
        """Run one command. What the agent did wrong is an answer for it to read, and not an exception."""
        self._steps += 1
        word, _, number = command.partition(" ")
        if word != "guess" or not number.isdigit():
            return self._observation("", False, error="say 'guess N'"), 0.0, self._steps >= MAX_STEPS
        right = int(number) == self._secret
        answer = "right" if right else "higher" if int(number) < self._secret else "lower"
        seen = self._observation(answer, True, achieved=right)
        return seen, 1.0 if right else 0.0, right or self._steps >= MAX_STEPS

    def state(self) -> dict[str, Any]:
        """Return a cheap view of the session, which must not give the solution away."""
        return {"step_count": self._steps}

    def kill(self) -> None:
        """Break off a step that takes too long; ours are short."""

    def _observation(self, output: str, success: bool, *, error: str = "", achieved: bool = False) -> dict[str, Any]:
        return {
            "task": {"task_id": 1, "difficulty": "warmup", "description": TASK},
            "command_success": success,
            "command_output": output,
            "error": error,
            "task_achieved": achieved,
            "partial_progress": float(achieved),
            "step_count": self._steps,
        }


class Slots:
    """What sessions need one each of (``SlotPool`` in realhf/env/server/capacity.py): here just a number."""

    def __init__(self, size: int) -> None:
        self._free, self._lock = list(range(size)), threading.Lock()

    def acquire(self) -> int:
        """Take a slot. Raises RuntimeError when none is free."""
        with self._lock:
            if not self._free:
                raise RuntimeError("all slots are taken")
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back; whatever an episode left in it must be gone afterwards."""
        with self._lock:
            self._free.append(slot)

    @property
    def free_count(self) -> int:
        """How many sessions could begin now."""
        return len(self._free)

    def metrics(self) -> dict[str, Any]:
        """Return numbers for the page ``/metrics``."""
        return {"free": self.free_count}


@contextmanager
def serving(port: int = 8000, sessions: int = 8) -> Iterator[EnvServer]:
    """Serve the game inside the block; port 0 is any free one."""
    config = ServerConfig(port=port, pool_size=sessions)
    server = EnvServer(Slots(sessions), GuessingPlayer, config, listen(config.host, port))
    server.start()
    try:
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    with serving() as server:
        print(f"serving at {server.url}", flush=True)
        server.ended.wait()
