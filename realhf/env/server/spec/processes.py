"""Pool of processes in which an environment runs, so that a crash ends only the sessions of one
process and not the server.

A session stays in the process in which its first episode began, as long as that process lives. A
process that died or does not answer is replaced when a session needs one.
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
from realhf.env.containment.frames import BadFrame, encode_frame, receive_frame
from realhf.env.server import wire
from realhf.env.server.interfaces import Reply
from realhf.env.server.spec.child import CLOSE, DATAGRAM, FIRST, KILL, OPEN, RESET, STEP, STUCK
from realhf.env.server.spec.messages import SpecState
from realhf.env.server.spec.player import EnvironmentFacts
from realhf.env.server.spec.slots import CLOSE_S, GRACE_S, SessionSlots
from realhf.env.server.wire import WireError

_MODULE = "realhf.env.server.spec.child"
"""Module that is run as the zygote."""
_ZYGOTE_S = 60.0
"""Timeout in seconds of starting the zygote."""
_LOAD_S = 300.0
"""Timeout in seconds of loading the environment, which may import large packages."""
_LATE_S = 2 * GRACE_S + CLOSE_S + 3.0
"""Seconds to wait for an answer beyond the time limit of a call; within this time the process
should itself end the call."""
_SEND_S = 5.0
"""Timeout in seconds of sending a request; also of waiting for a killed process to exit."""
_GONE_S = 1.0
"""Seconds to wait for a process to exit after its channel has closed. A crashing process closes its
channels shortly before it exits."""
_CRASH = re.compile(r"^Fatal Python error: (.+)$", re.M)
"""Cause of a crash in the output of faulthandler."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
"""File, line number and function of a stack frame in the output of faulthandler."""
_LOG = logging.getLogger(__name__)


class _Process:
    """The server's view of one process of the environment.

    control: the control socket. crash: file to which faulthandler writes the stack of a crash.
    session: id of the kernel session to which the process and its own children belong.
    ``sessions``: number of sessions with a channel to the process. ``counted``: whether its death
    has been counted.
    """

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
        self._ready: EnvironmentFacts | str | None = None
        self.sessions = 0
        self.counted = False

    def facts(self) -> EnvironmentFacts:
        """Wait until the environment is loaded, and return its description. Raises ValueError with
        the reason if it cannot be loaded."""
        with self._lock:
            if self._ready is None:
                self._ready = self._wait_for_facts()
        if isinstance(self._ready, str):
            self.end()  # so that it gets no other session
            raise ValueError(self._ready)
        return self._ready

    def open(self) -> tuple[int, socket.socket]:
        """Open a session; return (its number, its channel).

        Raises OSError if the process has exited, or has not read its control socket for so long
        that the socket is full.
        """
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno()]))]
                self._control.sendmsg(
                    [json.dumps([OPEN, number]).encode()], ancillary, socket.MSG_DONTWAIT
                )
        except BaseException:
            ours.close()
            raise
        return number, ours

    def cancel_call(self, number: int) -> None:
        """Cancel a session's call. Never blocks, because it is called on the server's event
        loop."""
        with suppress(OSError):
            self._control.send(json.dumps([KILL, number]).encode(), socket.MSG_DONTWAIT)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.forked.alive()

    @property
    def stuck(self) -> int:
        """Number of threads stuck in the environment's code, as last reported by the process. Not
        thread-safe."""
        if self._ready is None or not self.alive:
            return 0
        # There is no message, or one that the environment's code wrote.
        with suppress(OSError, ValueError, KeyError, TypeError):
            while data := self._control.recv(DATAGRAM, socket.MSG_DONTWAIT):
                self._stuck = int(json.loads(data)[STUCK])
        return self._stuck

    def describe_death(self) -> str:
        """Return a description of how the process ended, with the line at which it crashed, as far
        as known."""
        text = os.pread(self._crash, 1 << 16, 0).decode(errors="replace")
        cause = _CRASH.search(text)
        if cause is None:
            return "its process has ended"
        frames = _FRAME.findall(text)
        own_frames = [
            each
            for each in frames
            if "/lib/python" not in each[0] and "/site-packages/" not in each[0]
        ]
        where = " ({}, line {}, in {})".format(*own_frames[0]) if own_frames else ""
        return f"its process has crashed: {cause[1]}{where}"

    def end(self) -> None:
        """Kill the process and all processes that it forked, and wait for its exit. Its descriptors
        stay open, because a session may be waiting on them."""
        if self.alive or self._has_orphans():
            with suppress(OSError):
                os.killpg(self.forked.pid, signal.SIGKILL)
        self.wait_gone(_SEND_S)

    def wait_gone(self, within_s: float) -> bool:
        """Wait up to ``within_s`` seconds for the process to exit; return whether it has."""
        poll = select.poll()
        poll.register(self.forked.pidfd, select.POLLIN)
        return bool(process_clock.wait(lambda left_s: poll.poll(left_s * 1000), within_s))

    def close(self) -> None:
        """Release the descriptors of a process that no session uses any more; kill it if it still
        runs."""
        self.end()
        self.forked.kill()
        self._control.close()
        os.close(self._crash)

    def _has_orphans(self) -> bool:
        """Return whether a process that has exited left others in its process group. They must also
        be in the process's kernel session; otherwise the group's number may have been reused by an
        unrelated process."""
        for each in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                _, _, group, session, *_ = each.read_bytes().rpartition(b")")[2].split()
                if int(group) == self.forked.pid and int(session) == self._session:
                    return True
        return False

    def _wait_for_facts(self) -> EnvironmentFacts | str:
        """Wait for the first message on the control socket. Return the environment's description,
        or a string that says why it was not loaded."""
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
                f"while it was loaded, {self.describe_death()}"
                if ready
                else f"it was not loaded within {_LOAD_S:g} s"
            )
        greeting = json.loads(data)
        return EnvironmentFacts(**greeting[FIRST]) if FIRST in greeting else str(greeting["error"])


class Processes(SessionSlots):
    """Pool of at most ``count`` processes with at most ``size`` sessions in total. A slot is the
    player of one session.

    reference, options: the environment and its options. timeout_s: time limit of one call of the
    environment, in seconds. info: whether observations contain the environment's ``info``. Raises
    ValueError with the reason if the environment cannot be loaded, and RuntimeError if no process
    can be started.
    """

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
        self._is_stopped = False
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        self._log = os.fdopen(os.dup(2), "wb")
        self._zygote = ForkServer(_MODULE, self._log, {**os.environ, "PYTHONPATH": path})
        try:
            self._zygote.start()
            self._zygote.wait_ready(_ZYGOTE_S)
            self.facts = self._start_process().facts()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all processes; this also ends every call."""
        with self._lock:
            self._is_stopped = True
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
        """Name of the environment."""
        return self.facts.name

    @property
    def stuck(self) -> int:
        """Number of threads stuck in the environment's code, in all processes."""
        with self._lock:
            return sum(process.stuck for process in self._processes)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics for ``/metrics``, including the numbers of living and of dead
        processes."""
        with self._lock:
            alive = sum(process.alive for process in self._processes)
            return super().metrics() | {"processes": alive, "process_deaths": self._deaths}

    def _new_slot(self) -> ProcessPlayer:
        return ProcessPlayer(self)

    def next_number(self) -> int:
        """Return the next seed for a reset that names neither seed nor task. All sessions share one
        count."""
        return next(self._numbers)

    def open_session(self) -> tuple[_Process, int, socket.socket]:
        """Open a session; return (its process, number, channel).

        Uses the process with the fewest sessions, but starts a new one if every process already has
        sessions and there are fewer than ``count``. Raises RuntimeError or ValueError if there is
        no process.
        """
        for _ in range(2):  # the chosen process may exit at this moment
            process = self._choose_process()
            try:
                process.facts()
                return process, *process.open()
            except OSError:
                self.leave(process)
            except BaseException:
                self.leave(process)
                raise
        raise RuntimeError("no process of it stays alive, or takes a session")

    def _choose_process(self) -> _Process:
        """Choose or start a process and count one more session for it. A lock serialises this,
        because otherwise sessions that begin at the same time would each start a process."""
        with self._choosing:
            with self._lock:
                for exited in [
                    each for each in self._processes if not each.alive and not each.sessions
                ]:
                    self._forget(exited)
                living = [each for each in self._processes if each.alive]
                process = min(living, key=lambda each: each.sessions, default=None)
            if process is None or (process.sessions and len(living) < self._count):
                process = self._start_process()
            with self._lock:
                process.sessions += 1
            return process

    def leave(self, process: _Process) -> None:
        """Count one session less for a process. If the process has exited, its last session
        releases it."""
        with self._lock:
            process.sessions -= 1
            if not process.sessions and not process.alive and process in self._processes:
                self._forget(process)

    def record_death(self, process: _Process) -> None:
        """Count and log the death of a process; only the first call for a process has an effect."""
        with self._lock:
            self._count_death(process)

    def _count_death(self, process: _Process) -> None:
        """Like ``record_death``, but the caller must hold the lock."""
        if not process.counted:
            process.counted = True
            self._deaths += 1
            _LOG.error(
                "environment %s: %s; sessions in it: %d",
                self.name,
                process.describe_death(),
                process.sessions,
            )

    def _forget(self, process: _Process) -> None:
        """Remove a process that has exited from the pool. The caller must hold the lock."""
        self._count_death(process)
        self._processes.remove(process)
        process.close()

    def _start_process(self) -> _Process:
        """Fork a process, which then loads the environment. Raises TimeoutError or RuntimeError,
        also when the server stops."""
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
            if not self._is_stopped:
                self._processes.append(process)
                return process
        process.end()
        process.close()
        raise RuntimeError("the server ends")


class ProcessPlayer:
    """Implementation of ``realhf.env.server.interfaces.Player`` that forwards to the ``SpecPlayer``
    in a process. Only one thread may use it at a time, except that any thread may call ``kill``."""

    def __init__(self, pool: Processes) -> None:
        self._pool = pool
        self._seat: tuple[_Process, int, socket.socket] | None = None
        self._state: dict[str, Any] = SpecState().model_dump(exclude_none=True)
        self._tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode of the task that ``data`` selects; an unfinished episode is abandoned.
        Raises WireError."""
        if not data.keys() & {"seed", "task_id", "task"}:
            data = data | {"seed": self._pool.next_number()}
        reply = self._send_request(RESET, data)
        self._tools = reply[0]["tools"]
        return reply

    def step(self, action: dict[str, Any]) -> Reply:
        """Take a turn of the policy. Raises WireError."""
        self._check_playing()
        return self._send_request(STEP, action)

    def state(self) -> dict[str, Any]:
        """Return the fields of ``SpecState``."""
        return dict(self._state)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools of the episode. Raises WireError if none is open."""
        self._check_playing()
        return self._tools

    def kill(self) -> None:
        """Cancel the running call. May be called from any thread."""
        if (seat := self._seat) is not None:
            seat[0].cancel_call(seat[1])

    def close(self) -> None:
        """End the session, which closes the environment's instance."""
        if self._seat is not None:
            with suppress(WireError):
                self._exchange({"what": CLOSE}, CLOSE)
        self._leave_process()

    def _check_playing(self) -> None:
        """Raise WireError if no episode is open."""
        if not self._state["playing"]:
            raise WireError(wire.VALIDATION_ERROR, "no episode is open; send a reset", field="type")

    def _send_request(self, call_name: str, data: dict[str, Any]) -> Reply:
        """Send a request and return the reply. Raises WireError for an error that the process
        reports, and RuntimeError if it failed unexpectedly."""
        answer = self._exchange({"what": call_name, "data": data}, call_name)
        self._state = answer["state"]
        if "failed" in answer:
            raise RuntimeError(f"environment {self._pool.name}: {call_name}: {answer['failed']}")
        if (error := answer.get("error")) is not None:
            if error["kind"]:
                self._pool.count(error["kind"])
            raise WireError(**error)
        observation, reward, done = answer["reply"]
        return observation, reward, done

    def _exchange(self, request: dict[str, Any], call_name: str) -> dict[str, Any]:
        """Send a frame and return the answer frame.

        Raises WireError if no process is available, or if the process has exited or does not
        answer; the process is then killed.
        """
        if self._seat is None:
            try:
                self._seat = self._pool.open_session()
            except (OSError, RuntimeError, ValueError) as error:
                raise self._failure("capacity", call_name, str(error)) from None
        process, _, channel = self._seat
        deadline = process_clock.now() + self._pool.limit_s
        try:
            channel.settimeout(_SEND_S)
            channel.sendall(encode_frame(request))
            _wait_readable(channel, process.forked.pidfd, self._pool.limit_s)
            return receive_frame(channel, max(0.1, deadline - process_clock.now()))
        except (TimeoutError, OSError, BadFrame) as error:
            silent = isinstance(error, TimeoutError)
            ended = not silent and process.wait_gone(_GONE_S)
            process.end()
            self._pool.record_death(process)
            reason = f"its process did not answer for {self._pool.limit_s:g} s and was ended"
            if not silent:
                reason = process.describe_death() if ended else f"its process was ended: {error}"
            other_sessions = process.sessions - 1
            self._leave_process()
            others_text = (
                f"; with it {other_sessions} other session{'s' if other_sessions > 1 else ''} ended"
                if other_sessions > 0
                else ""
            )
            raise self._failure(
                "timeout" if silent else "lost", call_name, f"{reason}{others_text}"
            ) from None

    def _failure(self, kind: str, call_name: str, reason: str) -> WireError:
        """Count a failure, end the episode, and return the WireError for the client."""
        self._state["playing"] = False
        self._pool.count(kind)
        text = f"environment {self._pool.name}: {call_name}: {reason}"
        if "seed" in self._state:
            task = self._state["task_id"] or "without an id"
            text = f"{text} (task {task}, seed {self._state['seed']})"
        return WireError(wire.EXECUTION_ERROR, text, kind=kind)

    def _leave_process(self) -> None:
        """Close the channel and end the session's use of its process."""
        seat = self._seat
        self._seat = None
        if seat is not None:
            seat[2].close()
            self._pool.leave(seat[0])


def _wait_readable(channel: socket.socket, pidfd: int, timeout_s: float) -> None:
    """Wait until the channel has data or the process exits. The process is watched too, because
    children that it forked may keep its end of the channel open. Raises TimeoutError, and BadFrame
    if the process has exited."""
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
