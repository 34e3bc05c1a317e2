"""A host agent by hand: it says what a test wants it to say, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from realhf.cluster.cluster_keys import HostKey, KnownHosts
from realhf.cluster.control_endpoint import ControlEndpoint
from realhf.cluster.messages import (
    OF_LAUNCHER,
    HostHello,
    Message,
    Welcome,
    pack_message,
    unpack_message,
)
from realhf.cluster.own_host import installed_versions
from realhf.transport.envelope import pack_header, pack_payload, unpack_header
from realhf.transport.network import connect_encrypted
from realhf.transport.sockets import collect_versions
from tests.cluster.key_ring import KeyRing

ANSWER_S = 60.0
M = TypeVar("M", bound=Message)


class StrangeAgent:
    """Has the key of a host and a connection to the endpoint."""

    def __init__(
        self,
        door: str,
        keys: KeyRing | HostKey,
        name: str = "a",
        *,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self.name, self.session = name, os.urandom(16)
        self._key = keys.of(name) if isinstance(keys, KeyRing) else keys
        self._door, self._context = door, context or zmq.Context.instance()
        self.connect()

    def connect(self) -> None:
        """Connect to the endpoint, as the same agent when this is done again."""
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        connect_encrypted(self.socket, self._door, self._key.server_public, self._key.own)

    def say(self, kind: str, message: Message | None = None, **fields: object) -> None:
        """Send a message of the protocol."""
        self.socket.send_multipart(pack_message(kind, self.session, message, **fields))

    def babble(self, kind: str, payload: Any) -> None:
        """Send something that has the header of a message."""
        self.socket.send_multipart(
            [pack_header(kind, "control", self.session), pack_payload(payload)]
        )

    def hello(
        self,
        *,
        wants: Mapping[str, int] = {},
        gpus: int | Sequence[str] = 0,
        versions: Mapping[str, str] = {},
        unlike: Mapping[str, str] = {},
    ) -> None:
        """Say hello, without waiting for the welcome. ``gpus``: so many that no other host has, or
        their names."""
        names = (
            [f"machine of {self.name}/{number}" for number in range(gpus)]
            if isinstance(gpus, int)
            else [*gpus]
        )
        here = HostHello(
            self.name,
            2,
            1.0,
            names,
            "127.0.0.1",
            "m",
            time.time(),
            "/nowhere",
            dict(wants),
            {**installed_versions(), **unlike},
        )
        self.say("hello", here, versions={**collect_versions(), **versions}, node="its-node")

    def join(self, **given: Any) -> StrangeAgent:
        """Register, and wait for the welcome."""
        self.hello(**given)
        self.hears(Welcome)
        return self

    def heard(self) -> tuple[str, Message] | None:
        """The next message; None when there is none now."""
        if not self.socket.poll(0):
            return None
        frame, *payload = self.socket.recv_multipart()
        kind = unpack_header(frame)["kind"]
        return kind, unpack_message(kind, payload, OF_LAUNCHER)

    def next(self) -> tuple[str, Message]:
        """Wait for the next message."""
        assert self.socket.poll(1000 * ANSWER_S), f"{self.name} heard nothing"
        found = self.heard()
        assert found is not None
        return found

    def hears(self, form: type[M]) -> M:
        """Wait for a message of this form; others are passed over."""
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            if isinstance(message := self.next()[1], form):
                return message
        raise AssertionError(f"{self.name} heard no {form.__name__}")

    def close(self) -> None:
        """Say nothing any more."""
        self.socket.close(0)


class OpenEndpoint:
    """A control endpoint on the loopback, and agents by hand."""

    def __init__(self, folder: Path, dead_after_s: float = 40.0) -> None:
        self.ring = KeyRing(folder / "cluster.key")
        self.known = KnownHosts(self.ring.file)
        self.control = ControlEndpoint(self.known, "tcp://127.0.0.1:0", dead_after_s)
        self.agents: list[StrangeAgent] = []

    def agent(self, name: str, key: HostKey | None = None) -> StrangeAgent:
        """An agent with the key of its name, or with another one."""
        self.agents.append(StrangeAgent(self.control.endpoint, key or self.ring, name))
        return self.agents[-1]

    def __enter__(self) -> OpenEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.close()
        self.control.close()
