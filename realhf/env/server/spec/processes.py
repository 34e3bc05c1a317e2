"""Keeps an environment in processes of its own: what ends one of them ends its sessions, and not
the server.

A session stays in the process in which its first episode began, as long as that lives. A process
that died, or does not answer, is replaced when a session needs it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import select
import signal
import socket
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from realhf.base import process_clock
from realhf.env.containment.fork_server import ForkedProcess, ForkServer
from realhf.env.containment.frames import BadFrame, frame, receive_frame
from realhf.env.server import wire
from realhf.env.server.interfaces import Reply
from realhf.env.server.spec.child import CLOSE, DATAGRAM, FIRST, KILL, OPEN, RESET, STEP, STUCK
from realhf.env.server.spec.messages import SpecState
from realhf.env.server.spec.player import Facts
from realhf.env.server.spec.slots import CLOSE_S, GRACE_S, SessionSlots
from realhf.env.server.wire import WireError

_MODULE = "realhf.env.server.spec.child"
_ZYGOTE_S = 60.0
_LOAD_S = 300.0
"""How long the environment may take to load: it may import much."""
_LATE_S = 2 * GRACE_S + CLOSE_S + 3.0
"""How much longer than a call may take its answer is waited for: the process itself ends the call
in this time."""
_SEND_S = 5.0
_GONE_S = 1.0
"""A process that crashes closes its channels a moment before it is gone."""
_CRASH = re.compile(r"^Fatal Python error: (.+)$", re.M)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
_LOG = logging.getLogger(__name__)


class _Process:
    """Is one process, as the server sees it. ``session``: the one of the kernel that it and what it
    forks are in; ``sessions``: how many have a channel to it; ``counted``: its death is."""

    def __init__(
        self, forked: ForkedProcess, control: socket.socket, crash: int, session: int
    ) -> None:
        self.forked = forked
        self._control = control
        self._crash = crash
        self._lock = threading.Lock()
        self._stuck = 0
        self._numbers = itertools.count()
        self._session = session
        self._ready: Facts | str | None = None
        self.sessions = 0
        self.counted = False

    def facts(self) -> Facts:
        """Wait until the environment is loaded, and return what it says of itself. Raises
        ValueError with what is wrong with it."""
        with self._lock:
            if self._ready is None:
                self._ready = self._greeted()
        if isinstance(self._ready, str):
            self.end()  # so that no other session is sent to it
            raise ValueError(self._ready)
        return self._ready

    def open(self) -> tuple[int, socket.socket]:
        """Return number and channel of a new session. Raises OSError for a process that ended, or
        has read nothing for so long that it takes no more."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno()]))]
                self._control.sendmsg(
                    [json.dumps([OPEN, number]).encode()], sent, socket.MSG_DONTWAIT
                )
        except BaseException:
            ours.close()
            raise
        return number, ours

    def break_off(self, number: int) -> None:
        """Have the call of a session end. Waits for nobody: it is called on the server's event
        loop."""
        with suppress(OSError):
            self._control.send(json.dumps([KILL, number]).encode(), socket.MSG_DONTWAIT)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.forked.alive()

    @property
    def stuck(self) -> int:
        """How many threads it has left behind in the environment's code, by what it has said last.
        One at a time asks."""
        if self._ready is None or not self.alive:
            return 0
        with suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # nothing there; or what the environment's code wrote
            while data := self._control.recv(DATAGRAM, socket.MSG_DONTWAIT):
                self._stuck = int(json.loads(data)[STUCK])
        return self._stuck

    def death(self) -> str:
        """Say how it ended, with the line where it crashed, as far as it is known."""
        text = os.pread(self._crash, 1 << 16, 0).decode(errors="replace")
        cause = _CRASH.search(text)
        if cause is None:
            return "its process has ended"
        frames = _FRAME.findall(text)
        own = [
            each
            for each in frames
            if "/lib/python" not in each[0] and "/site-packages/" not in each[0]
        ]
        where = " ({}, line {}, in {})".format(*own[0]) if own else ""
        return f"its process has crashed: {cause[1]}{where}"

    def end(self) -> None:
        """Kill it and whatever it forked, and wait until it is gone. What the server holds of it
        stays: a session may be waiting at its descriptor."""
        if self.alive or self._has_left():
            with suppress(OSError):
                os.killpg(self.forked.pid, signal.SIGKILL)
        self.gone(_SEND_S)

    def gone(self, within_s: float) -> bool:
        """Return whether it has ended, or does within so many seconds."""
        poll = select.poll()
        poll.register(self.forked.pidfd, select.POLLIN)
        return bool(process_clock.wait(lambda left_s: poll.poll(left_s * 1000), within_s))

    def close(self) -> None:
        """Let go of a process that ended and that no session is in."""
        self.end()
        self.forked.kill()
        self._control.close()
        os.close(self._crash)

    def _has_left(self) -> bool:
        """Return whether a process that has ended left others in its group. They are known by the
        session, too: where none is left, the number may be that of a stranger."""
        for each in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                _, _, group, session, *_ = each.read_bytes().rpartition(b")")[2].split()
                if int(group) == self.forked.pid and int(session) == self._session:
                    return True
        return False

    def _greeted(self) -> Facts | str:
        poll = select.poll()
        for descriptor in (self._control.fileno(), self.forked.pidfd):
            poll.register(descriptor, select.POLLIN)
        ready = {
            descriptor
            for descriptor, _ in process_clock.wait(
                lambda left_s: poll.poll(left_s * 1000), _LOAD_S
            )
        }
        data = self._control.recv(DATAGRAM) if self._control.fileno() in ready else b""
        if not data:
            return (
                f"while it was loaded, {self.death()}"
                if ready
                else f"it was not loaded within {_LOAD_S:g} s"
            )
        found = json.loads(data)
        return Facts(**found[FIRST]) if FIRST in found else str(found["error"])


class Processes(SessionSlots):
    """Keeps the processes; a slot is the player of a session. ``count`` processes at most hold at
    most ``size`` sessions together. Raises ValueError with what is wrong with the environment,
    RuntimeError when no process can be started."""

    def __init__(
        self,
        reference: str,
        options: Mapping[str, Any],
        count: int,
        size: int,
        timeout_s: float,
        *,
        info: bool,
    ) -> None:
        super().__init__(size)
        self._request = {
            "reference": reference,
            "options": dict(options),
            "timeout_s": timeout_s,
            "info": info,
        }
        self._request["size"] = size
        self._count = count
        self.limit_s = timeout_s + _LATE_S
        self._choosing = threading.Lock()
        self._processes: list[_Process] = []
        self._deaths = 0
        self._numbers = itertools.count()
        self._over = False
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        self._log = os.fdopen(os.dup(2), "wb")
        self._zygote = ForkServer(_MODULE, self._log, {**os.environ, "PYTHONPATH": path})
        try:
            self._zygote.start()
            self._zygote.wait_ready(_ZYGOTE_S)
            self.facts = self._started().facts()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all processes, and with them every call."""
        with self._lock:
            self._over = True
            processes = [*self._processes]
        for process in processes:
            process.counted = True
            process.end()
            with self._lock:
                if not process.sessions and process in self._processes:
                    self._forget(process)
        self._zygote.stop()
        self._log.close()

    @property
    def name(self) -> str:
        """The environment's."""
        return self.facts.name

    @property
    def stuck(self) -> int:
        """How many threads were left behind in the environment's code, in all processes."""
        with self._lock:
            return sum(process.stuck for process in self._processes)

    def metrics(self) -> dict[str, Any]:
        """Return numbers for ``/metrics``, with those of the processes and of deaths of them."""
        with self._lock:
            alive = sum(process.alive for process in self._processes)
            return super().metrics() | {"processes": alive, "process_deaths": self._deaths}

    def _new_slot(self) -> ProcessPlayer:
        return ProcessPlayer(self)

    def next_number(self) -> int:
        """Return the seed of a reset that names nothing: the next of all sessions together."""
        return next(self._numbers)

    def opened(self) -> tuple[_Process, int, socket.socket]:
        """Return a channel for a session, with its process and number: the process with the fewest
        sessions, or a new one while there are fewer than there may be. Raises RuntimeError or
        ValueError when there is none."""
        for _ in range(2):  # a process may end just now
            process = self._chosen()
            try:
                process.facts()
                return process, *process.open()
            except OSError:
                self.left(process)
            except BaseException:
                self.left(process)
                raise
        raise RuntimeError("no process of it stays alive, or takes a session")

    def _chosen(self) -> _Process:
        """Return a process that counts one more session. One at a time chooses: sessions that begin
        at once would each start a process."""
        with self._choosing:
            with self._lock:
                for ended in [
                    each for each in self._processes if not each.alive and not each.sessions
                ]:
                    self._forget(ended)
                living = [each for each in self._processes if each.alive]
                process = min(living, key=lambda each: each.sessions, default=None)
            if process is None or (process.sessions and len(living) < self._count):
                process = self._started()
            with self._lock:
                process.sessions += 1
            return process

    def left(self, process: _Process) -> None:
        """Forget a session of a process; one that has ended is let go with its last."""
        with self._lock:
            process.sessions -= 1
            if not process.sessions and not process.alive and process in self._processes:
                self._forget(process)

    def died(self, process: _Process) -> None:
        """Count and log a process that ended, once."""
        with self._lock:
            self._count_death(process)

    def _count_death(self, process: _Process) -> None:
        if not process.counted:
            process.counted = True
            self._deaths += 1
            _LOG.error(
                "environment %s: %s; sessions in it: %d",
                self.name,
                process.death(),
                process.sessions,
            )

    def _forget(self, process: _Process) -> None:
        self._count_death(process)
        self._processes.remove(process)
        process.close()

    def _started(self) -> _Process:
        """Fork a process, which loads the environment by itself."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        crash = os.memfd_create("crash")
        try:
            with theirs:
                forked = self._zygote.fork(
                    self._request, [theirs.fileno(), crash], "an environment's process"
                )
        except BaseException:
            ours.close()
            os.close(crash)
            raise
        ours.settimeout(None)
        process = _Process(forked, ours, crash, self._zygote.pid)
        with self._lock:
            if not self._over:
                self._processes.append(process)
                return process
        process.end()
        process.close()
        raise RuntimeError("the server ends")


class ProcessPlayer:
    """Implements ``realhf.env.server.interfaces.Player`` by a process's ``SpecPlayer``. Use it from
    one thread at a time, except ``kill``."""

    def __init__(self, pool: Processes) -> None:
        self._pool = pool
        self._seat: tuple[_Process, int, socket.socket] | None = None
        self._state: dict[str, Any] = SpecState().model_dump(exclude_none=True)
        self._tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode of the task that ``data`` mean; one that is open is given up. Raises
        WireError."""
        if not data.keys() & {"seed", "task_id", "task"}:
            data = data | {"seed": self._pool.next_number()}
        reply = self._asked(RESET, data)
        self._tools = reply[0]["tools"]
        return reply

    def step(self, action: dict[str, Any]) -> Reply:
        """Take a turn of the policy. Raises WireError."""
        self._check_playing()
        return self._asked(STEP, action)

    def state(self) -> dict[str, Any]:
        """Return what ``SpecState`` describes."""
        return dict(self._state)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools of the episode. Raises WireError when none is open."""
        self._check_playing()
        return self._tools

    def kill(self) -> None:
        """Break off the call in flight."""
        if (seat := self._seat) is not None:
            seat[0].break_off(seat[1])

    def close(self) -> None:
        """End the session, and the instance of the environment with it."""
        if self._seat is not None:
            with suppress(WireError):
                self._exchanged({"what": CLOSE}, CLOSE)
        self._leave()

    def _check_playing(self) -> None:
        if not self._state["playing"]:
            raise WireError(wire.VALIDATION_ERROR, "no episode is open; send a reset", field="type")

    def _asked(self, what: str, data: dict[str, Any]) -> Reply:
        answer = self._exchanged({"what": what, "data": data}, what)
        self._state = answer["state"]
        if "failed" in answer:
            raise RuntimeError(f"environment {self._pool.name}: {what}: {answer['failed']}")
        if (error := answer.get("error")) is not None:
            if error["kind"]:
                self._pool.count(error["kind"])
            raise WireError(**error)
        observation, reward, done = answer["reply"]
        return observation, reward, done

    def _exchanged(self, request: dict[str, Any], what: str) -> dict[str, Any]:
        """Send a frame and return the one that answers it. Raises WireError for a process that
        cannot be had, ended, or does not answer, which is ended then."""
        if self._seat is None:
            try:
                self._seat = self._pool.opened()
            except (OSError, RuntimeError, ValueError) as error:
                raise self._failure("capacity", what, str(error)) from None
        process, _, channel = self._seat
        deadline = process_clock.now() + self._pool.limit_s
        try:
            channel.settimeout(_SEND_S)
            channel.sendall(frame(request))
            _wait_readable(channel, process.forked.pidfd, self._pool.limit_s)
            return receive_frame(channel, max(0.1, deadline - process_clock.now()))
        except (TimeoutError, OSError, BadFrame) as error:
            silent = isinstance(error, TimeoutError)
            ended = not silent and process.gone(_GONE_S)
            process.end()
            self._pool.died(process)
            why = f"its process did not answer for {self._pool.limit_s:g} s and was ended"
            why = why if silent else process.death() if ended else f"its process was ended: {error}"
            others = process.sessions - 1
            self._leave()
            also = (
                f"; with it {others} other session{'s' if others > 1 else ''} ended"
                if others > 0
                else ""
            )
            raise self._failure("timeout" if silent else "lost", what, f"{why}{also}") from None

    def _failure(self, kind: str, what: str, why: str) -> WireError:
        self._state["playing"] = False
        self._pool.count(kind)
        text = f"environment {self._pool.name}: {what}: {why}"
        if "seed" in self._state:
            task = self._state["task_id"] or "without an id"
            text = f"{text} (task {task}, seed {self._state['seed']})"
        return WireError(wire.EXECUTION_ERROR, text, kind=kind)

    def _leave(self) -> None:
        seat = self._seat
        self._seat = None
        if seat is not None:
            seat[2].close()
            self._pool.left(seat[0])


def _wait_readable(channel: socket.socket, pidfd: int, timeout_s: float) -> None:
    """Wait for an answer, or the end of the process: what it forked may hold its end of the channel
    open. Raises TimeoutError, BadFrame."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    ready = {
        descriptor
        for descriptor, _ in process_clock.wait(lambda left_s: poll.poll(left_s * 1000), timeout_s)
    }
    if not ready:
        raise TimeoutError
    if channel.fileno() not in ready:
        raise BadFrame("the process has ended")
