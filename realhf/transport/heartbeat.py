"""Heartbeats between master and workers.

Workers send pings and the master answers. Both do so on separate threads, so that a busy event loop
or a long computation delays neither. On one host each side also holds a process descriptor of the
other, so the end of a process is noticed at once; between hosts, silence counts as death after a
limit. Time in which the listening process itself was suspended does not count as silence
(``process_clock``).
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from realhf.base import process_clock
from realhf.base.host_resources import HostLoad
from realhf.base.process import host_token, open_process
from realhf.transport.envelope import field, pack_header
from realhf.transport.errors import MasterLost
from realhf.transport.network import Network
from realhf.transport.sockets import Listener, Waker, open_dealer

_log = logging.getLogger(__name__)


@dataclass
class _WatchedWorker:
    """A worker whose heartbeats the master expects."""

    name: str
    last_seen: float
    """Time of the last ping (``process_clock.now``)."""
    process: int | None
    """Process descriptor (pidfd) of a worker on this host; None for a worker on another host."""
    state: str = "starting"
    """The activity that the worker last reported."""
    suspected: bool = False
    """Whether a warning about its silence has been logged."""
    load: HostLoad | None = None


class HeartbeatServer:
    """Master's side of the heartbeats. ``on_death(name, session, reason)`` is called on the
    heartbeat thread."""

    def __init__(
        self,
        run_id: str,
        context: zmq.Context[Any],
        network: Network,
        *,
        interval_s: float,
        dead_after_s: float,
        on_death: Callable[[str, bytes, str], None],
    ) -> None:
        self._run_id = run_id
        self._interval_s = interval_s
        self._dead_after_s = dead_after_s
        self._on_death = on_death
        # First, so that an address that cannot be listened on leaves nothing to release.
        self._listener = Listener(
            "heartbeat",
            context,
            network.listen,
            self._answer_ping,
            after=self._check_workers,
            every_s=interval_s / 2,
            owned=False,
            linger_ms=0,
        )
        self.endpoint = self._listener.endpoint
        self._watched: dict[bytes, _WatchedWorker] = {}
        self._processes = select.epoll()
        self._sessions: dict[int, bytes] = {}
        self._next_check = 0.0
        self._lock = threading.Lock()
        self._listener.also = (self._processes.fileno(),)
        self._listener.start()

    def watch(self, name: str, session: bytes, *, pid: int, started: int, host: str) -> None:
        """Start watching a worker. Raises ProcessLookupError if its process has ended."""
        process = open_process(pid, started) if host and host == host_token() and started else None
        with self._lock:
            self._watched[session] = _WatchedWorker(name, process_clock.now(), process)
            if process is not None:
                self._sessions[process] = session
                self._processes.register(process, select.EPOLLIN)

    def forget(self, session: bytes) -> None:
        """Stop watching a worker. Has no effect on an unknown session."""
        with self._lock:
            watched = self._watched.pop(session, None)
            if watched and watched.process is not None:
                del self._sessions[watched.process]
                self._processes.unregister(watched.process)
                os.close(watched.process)

    def state(self, session: bytes) -> str:
        """Return a description of the activity that the worker last reported, and how long ago."""
        with self._lock:
            watched = self._watched.get(session)
            if watched is None:
                return "it is not connected"
            return f"{process_clock.now() - watched.last_seen:.1f} s ago it was {watched.state}"

    def load(self, session: bytes) -> HostLoad | None:
        """Return the load of the worker's host from its last heartbeat; None for a worker on this
        host."""
        with self._lock:
            watched = self._watched.get(session)
            return watched.load if watched else None

    def close(self) -> None:
        """Stop the thread and release the socket and all descriptors."""
        self._listener.close()
        for session in list(self._watched):
            self.forget(session)
        self._processes.close()

    def _check_workers(self) -> None:
        if self._listener.drained:
            self._check_silence(process_clock.now())
        self._report_ended_processes()

    def _report_ended_processes(self) -> None:
        """Report workers whose process has ended."""
        # Polled under the lock: a descriptor that is no longer watched may have been reused.
        with self._lock:
            ended = [
                self._sessions[process]
                for process, _ in self._processes.poll(0)
                if process in self._sessions
            ]
        for session in ended:
            self._declare_dead(session, "its process ended")

    def _answer_ping(self, identity: bytes, header: dict[str, Any], payload: list[bytes]) -> None:
        del payload
        session = field(header, "session", bytes)
        state = field(header, "state", str)
        with self._lock:
            watched = self._watched.get(session)
            if watched is None or header.get("run") != self._run_id:
                return
            watched.last_seen = process_clock.now()
            watched.state = state
            watched.suspected = False
            watched.load = HostLoad.from_list(header.get("load"))
        self._listener.send(identity, pack_header("pong", self._run_id, session))

    def _check_silence(self, now: float) -> None:
        if now < self._next_check:
            return
        self._next_check = now + self._interval_s / 4
        late: list[tuple[bytes, float]] = []
        with self._lock:
            for session, watched in self._watched.items():
                silent = now - watched.last_seen
                if silent > self._dead_after_s:
                    late.append((session, silent))
                elif silent > 3 * self._interval_s and not watched.suspected:
                    watched.suspected = True
                    _log.warning(
                        "worker %r is silent for %.1f s (%s)", watched.name, silent, watched.state
                    )
        for session, silent in late:
            self._declare_dead(session, f"no heartbeat for {silent:.1f} s")

    def _declare_dead(self, session: bytes, reason: str) -> None:
        with self._lock:
            watched = self._watched.get(session)
        if watched is not None:
            self.forget(session)
            self._on_death(watched.name, session, f"{reason} (was {watched.state})")


class HeartbeatClient:
    """Worker's side of the heartbeats. If the master is on another host, pings contain the load of
    this host.

    master: Pid, start time and host of the master. ``on_lost(reason)`` is called at most once, on
    the heartbeat thread. Raises MasterLost if the master's process has already ended.
    """

    def __init__(
        self,
        run_id: str,
        session: bytes,
        context: zmq.Context[Any],
        endpoint: str,
        network: Network,
        *,
        interval_s: float,
        lost_after_s: float,
        master: tuple[int, int, str],
        state: Callable[[], str],
        on_lost: Callable[[str], None],
    ) -> None:
        self._run_id = run_id
        self._session = session
        self._interval_s = interval_s
        self._lost_after_s = lost_after_s
        self._state = state
        self._on_lost = on_lost
        self._endpoint = endpoint
        self._network = network
        self._context = context
        pid, started, host = master
        self._elsewhere = not host or host != host_token()
        try:
            self._process = (
                open_process(pid, started) if host and host == host_token() and started else None
            )
        except ProcessLookupError:
            raise MasterLost("the master's process ended during registration") from None
        self._waker = Waker()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and release its descriptors."""
        self._stopping = True
        self._waker.wake()
        self._thread.join(timeout=5)
        if self._process is not None:
            os.close(self._process)
        self._waker.close()

    def _run(self) -> None:
        with open_dealer(self._context) as socket:
            self._network.connect(socket, self._endpoint)
            self._run_beat_loop(socket)

    def _run_beat_loop(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for source in (socket, self._waker.fileno(), self._process):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        last_answer = process_clock.now()
        next_ping = last_answer
        while not self._stopping:
            now = process_clock.now()
            if now >= next_ping:
                next_ping = now + self._interval_s
                load = {"load": HostLoad.read().to_list()} if self._elsewhere else {}
                ping = pack_header("ping", self._run_id, self._session, state=self._state(), **load)
                if socket.poll(0, zmq.POLLOUT):
                    socket.send(ping, zmq.NOBLOCK)
            ready = dict(poller.poll(int(max(0.0, next_ping - process_clock.now()) * 1000) + 1))
            if socket in ready:
                last_answer = process_clock.now()
                while socket.poll(0):
                    socket.recv_multipart()
            if self._process in ready:
                return self._on_lost("its process ended")
            if process_clock.now() - last_answer > self._lost_after_s:
                return self._on_lost(f"no answer for {self._lost_after_s:.1f} s")
