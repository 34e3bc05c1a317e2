"""A real environment server over slots and players that are fakes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from websockets.sync.client import ClientConnection, connect

from realhf.aws.server.program import AwsServed
from realhf.aws.server_config import AwsServerConfig
from realhf.env.server.server import EnvServer, listen


def ask(session: ClientConnection, message: Any) -> dict[str, Any]:
    """Send a frame, or what is one as JSON, and return the answer."""
    session.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return json.loads(session.recv(timeout=300))


class FakePool:
    """Slots without simulators; a released slot is back after ``scrub_s``, and not before
    ``scrubbed`` is set."""

    def __init__(self, size: int, scrub_s: float = 0.0) -> None:
        self.scrub_s = scrub_s
        self.scrubbed = threading.Event()
        self.scrubbed.set()
        self.released: list[float] = []
        self._free = list(range(size))

    def acquire(self) -> int:
        if not self._free:
            raise RuntimeError("MiniStack pool exhausted")
        return self._free.pop(0)

    def release(self, slot: int) -> None:
        time.sleep(self.scrub_s)
        self.scrubbed.wait(60)
        self.released.append(time.monotonic())
        self._free.append(slot)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def metrics(self) -> dict[str, Any]:
        return {"free": len(self._free)}


class FakeBlockingPlayer:
    """A step blocks until it is killed or ``finish`` is set; the command "quick" does not block."""

    def __init__(self) -> None:
        self.finish = threading.Event()
        self.started = threading.Event()
        self.ended = threading.Event()
        self.kills = 0

    def reset(self, data: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        return {}, 0.0, False

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        command = action["command"]
        self.started.set()
        if command != "quick":
            self.finish.wait(60)
        self.ended.set()
        return {"command_output": command, "task_achieved": False}, 0.0, False

    def state(self) -> dict[str, Any]:
        return {}

    def kill(self) -> None:
        self.kills += 1
        if self.kills >= 2:
            self.finish.set()


class Stage:
    """A served application over fakes. ``make`` returns the player of a session."""

    def __init__(
        self,
        size: int = 1,
        scrub_s: float = 0.0,
        make: Callable[[], FakeBlockingPlayer] = FakeBlockingPlayer,
        **settings: Any,
    ) -> None:
        self.pool = FakePool(size, scrub_s)
        self.players: list[FakeBlockingPlayer] = []
        self._make = make
        config = AwsServerConfig(port=0, pool_size=size, **settings)
        self.server = EnvServer(
            AwsServed(config, self.pool, self._player), config, listen("127.0.0.1", 0)
        )
        self.server.start()

    def _player(self, slot: int) -> FakeBlockingPlayer:
        self.players.append(self._make())
        return self.players[-1]

    def open(self) -> ClientConnection:
        return connect(self.server.url.replace("http", "ws") + "/ws", compression=None, proxy=None)

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < limit_s, "condition not reached"
            time.sleep(0.01)
