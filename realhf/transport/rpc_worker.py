"""A worker's end of the request-reply protocol (docs/reference/dataflow.md 6).

Ordered handlers run on the thread that calls ``run``, which owns the ordered lane's socket: no
thread lies between the wire and the computation. Immediate handlers, roster announcements and
cancellations share a separate socket and thread, and heartbeats have another one, so they work
while a computation runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zmq

from realhf.base import process_clock
from realhf.base.process import host_token, start_time
from realhf.transport import envelope
from realhf.transport.envelope import pack_header, pack_payload, unpack_header, unpack_payload
from realhf.transport.errors import LOST_MASTER, CallCancelled, MasterLost, ProtocolError
from realhf.transport.heartbeat import HeartbeatClient
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.roster import WorkerInfo
from realhf.transport.sockets import Waker, collect_versions, open_dealer, say_hello

_log = logging.getLogger(__name__)

Handler = Callable[[Any], Any]
"""Function from a payload to a result, both plain data for msgpack."""
BYE_TIMEOUT_S = 2.0
"""Seconds that a leaving worker waits for the master's answer."""
LINGER_MS = 1000
"""Milliseconds for which a closed socket still tries to send queued messages."""


class RpcWorker:
    """Server of the master's calls in a worker process.

    Args:
        ordered: Handlers that run one after another, in the order of the master's calls.
        immediate: Handlers that run at any time on a separate thread.
        on_roster: Called with every new roster, on the control lane's thread.
        leave_within_s: Seconds after the master's bye within which the process must end; otherwise
            it is killed, for instance in a handler that hangs (None: no limit).

    An exception in a handler reaches the caller as RemoteError, and the worker continues.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        index: int,
        run_id: str,
        master_endpoint: str,
        *,
        ordered: Mapping[str, Handler],
        immediate: Mapping[str, Handler] | None = None,
        data_endpoint: str = "",
        endpoints: Mapping[str, str] | None = None,
        network: Network = LOOPBACK,
        connect_timeout_s: float = 60.0,
        master_lost_after_s: float = 10.0,
        on_roster: Callable[[Mapping[str, WorkerInfo]], None] | None = None,
        leave_within_s: float | None = None,
    ) -> None:
        self._info = WorkerInfo(
            name,
            kind,
            index,
            os.uname().nodename,
            os.getpid(),
            data_endpoint,
            dict(endpoints or {}),
            host_token(),
            start_time(os.getpid()),
        )
        self._run_id = run_id
        self._endpoint = master_endpoint
        self._network = network
        self._ordered = dict(ordered)
        self._immediate = dict(immediate or {})
        both = sorted(set(self._ordered) & set(self._immediate))
        if both:
            raise ValueError(f"handlers {both} are both ordered and immediate")
        self._connect_timeout_s = connect_timeout_s
        self._master_lost_after_s = master_lost_after_s
        self._session = os.urandom(16)
        self._waker = Waker()
        self._control_waker = Waker()
        self._stopping = threading.Event()
        self._lost = ""
        self._control_failure: BaseException | None = None
        self._last_number = 0
        # Guards the start of a call against its cancellation: a cancelled call either never starts
        # or sees ``is_running_call_cancelled``.
        self._begin_lock = threading.Lock()
        self._running: tuple[bytes, str, float] | None = None
        self._cancelled: set[bytes] = set()
        self._cancelled_running: bytes | None = None
        self._roster: dict[str, WorkerInfo] = {}
        self._roster_version = -1
        self._on_roster = on_roster
        self._leave_within_s = leave_within_s
        self.dropped_messages = 0

    @property
    def roster(self) -> dict[str, WorkerInfo]:
        """Workers announced by the master, by name. A worker without services sees only those that
        have services."""
        return dict(self._roster)

    def is_running_call_cancelled(self) -> bool:
        """Return whether the master has cancelled the ordered call that is being executed.
        Thread-safe."""
        with self._begin_lock:
            return self._running is not None and self._running[0] == self._cancelled_running

    def stop(self) -> None:
        """Make ``run`` return after the current handler. May be called from any thread or signal
        handler."""
        self._stopping.set()
        self._waker.wake()
        self._control_waker.wake()

    def run(self) -> None:
        """Register and serve until the master's bye or ``stop``.

        Raises MasterLost, RpcTimeout if the master does not answer the registration, ProtocolError
        if it refuses the worker or breaks the call order, and NetworkError if it is unreachable or
        refuses the keys.
        """
        context = zmq.Context(io_threads=1)
        try:
            ordered = self._open_socket(context)
            control = self._open_socket(context)
            self._say_hello(ordered, lane="ordered")
            welcome = self._say_hello(
                control,
                lane="control",
                info=self._info.to_map(),
                lanes={h: "ordered" for h in self._ordered}
                | {h: "immediate" for h in self._immediate},
            )
            self._serve_lanes(context, ordered, control, welcome)
        finally:
            context.destroy(LINGER_MS)
            self._waker.close()
            self._control_waker.close()

    def _serve_lanes(
        self,
        context: zmq.Context[Any],
        ordered: zmq.Socket[bytes],
        control: zmq.Socket[bytes],
        welcome: dict[str, Any],
    ) -> None:
        pid, started, host = envelope.field(welcome, "master", list)
        heartbeat = HeartbeatClient(
            self._run_id,
            self._session,
            context,
            envelope.field(welcome, "heartbeat", str),
            self._network,
            interval_s=float(welcome["heartbeat_s"]),
            lost_after_s=self._master_lost_after_s,
            master=(pid, started, host),
            state=self._state,
            on_lost=self._on_master_lost,
        )
        thread = threading.Thread(
            target=self._run_control, args=(control,), name="control", daemon=True
        )
        thread.start()
        try:
            self._serve_ordered(ordered)
        finally:
            self.stop()
            thread.join(timeout=BYE_TIMEOUT_S + 1)
            heartbeat.close()
        if self._control_failure is not None:
            raise self._control_failure
        if self._lost:
            raise MasterLost(
                f"worker {self._info.name!r} {LOST_MASTER} {self._endpoint}: {self._lost}"
            )

    # ---- connecting

    def _open_socket(self, context: zmq.Context[Any]) -> zmq.Socket[bytes]:
        socket = open_dealer(context, linger_ms=LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        return socket

    def _say_hello(self, socket: zmq.Socket[bytes], **fields: Any) -> dict[str, Any]:
        """Connect, send a hello and return the master's answer."""
        hello = pack_header(
            "hello",
            self._run_id,
            self._session,
            versions=collect_versions(),
            node=self._info.host,
            **fields,
        )
        try:
            frames = say_hello(
                self._network,
                socket,
                self._endpoint,
                hello,
                self._info.name,
                self._connect_timeout_s,
            )
            header = unpack_header(frames[0])
        except ProtocolError as error:
            raise ProtocolError(
                f"worker {self._info.name!r} and the master at {self._endpoint}: {error}"
            ) from None
        if header["kind"] == "refused":
            raise ProtocolError(
                f"the master refused worker {self._info.name!r}: {header.get('reason')}"
            )
        return header

    def _on_master_lost(self, reason: str) -> None:
        self._lost = reason
        self.stop()

    def _state(self) -> str:
        running = self._running
        return f"in {running[1]} for {time.monotonic() - running[2]:.1f} s" if running else "idle"

    # ---- lanes

    def _messages(
        self, socket: zmq.Socket[bytes], waker: Waker
    ) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """Yield the header and payload of each message for this process until the worker stops."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(waker.fileno(), zmq.POLLIN)
        while not self._stopping.is_set():
            if socket in dict(poller.poll(int(self._master_lost_after_s * 1000))):
                frames = socket.recv_multipart()
                if (header := self._accept(frames)) is not None:
                    yield header, frames[1:]

    def _serve_ordered(self, socket: zmq.Socket[bytes]) -> None:
        for header, payload in self._messages(socket, self._waker):
            if header["kind"] != "request":
                continue
            if header["no"] != self._last_number + 1:
                error = ProtocolError(f"call {header['no']} arrived after call {self._last_number}")
                self._reply_error(socket, header, error)
                raise error
            if not self._begin(header):
                # The master starts the deadlines of later calls at this answer.
                self._reply_error(socket, header, CallCancelled("cancelled before it had begun"))
                continue
            try:
                self._execute(socket, header, payload, self._ordered)
            finally:
                self._running = None

    def _begin(self, header: dict[str, Any]) -> bool:
        """Mark this call as running; return False if it has been cancelled."""
        with self._begin_lock:
            self._last_number = header["no"]
            if header["id"] in self._cancelled:
                self._cancelled.discard(header["id"])
                return False
            self._running = (header["id"], header["handler"], time.monotonic())
            return True

    def _run_control(self, socket: zmq.Socket[bytes]) -> None:
        try:
            self._serve_control(socket)
        except BaseException as error:
            self._control_failure = error
            self.stop()

    def _serve_control(self, socket: zmq.Socket[bytes]) -> None:
        for header, payload in self._messages(socket, self._control_waker):
            if header["kind"] == "bye":
                socket.send(pack_header("bye", self._run_id, self._session))
                self.stop()
                if self._leave_within_s is not None:
                    threading.Thread(
                        target=_exit_after, args=(self._leave_within_s,), daemon=True
                    ).start()
                return
            self._control_message(socket, header, payload)
        if not self._lost:
            self._say_bye(socket)

    def _control_message(
        self, socket: zmq.Socket[bytes], header: dict[str, Any], payload: list[bytes]
    ) -> None:
        kind = header["kind"]
        if kind == "request":
            self._execute(socket, header, payload, self._immediate)
        elif kind == "roster":
            self._apply_announcement(header["version"], unpack_payload(payload))
        elif kind == "cancel":
            self._cancel(header["id"], header["no"])

    def _apply_announcement(self, version: int, news: dict[str, Any]) -> None:
        """Apply the changes since the previous announcement to the roster."""
        if version > self._roster_version:
            joined = [WorkerInfo.from_map(worker) for worker in news["workers"]]
            remaining = {
                name: info for name, info in self._roster.items() if name not in news["gone"]
            }
            self._roster_version = version
            self._roster = remaining | {info.name: info for info in joined}
            if self._on_roster is not None:
                self._on_roster(self._roster)

    def _cancel(self, request_id: bytes, number: int) -> None:
        with self._begin_lock:
            if number > self._last_number:
                self._cancelled.add(request_id)
            running = self._running
            if running and running[0] == request_id:
                self._cancelled_running = request_id
        if running and running[0] == request_id and sys.__stderr__ is not None:
            _log.warning("the master cancelled %s; stacks of the threads:", running[1])
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(file=sys.__stderr__)

    def _say_bye(self, socket: zmq.Socket[bytes]) -> None:
        """Say bye and wait up to BYE_TIMEOUT_S for the answer, so that the master does not report a
        death."""
        socket.send(pack_header("bye", self._run_id, self._session))
        deadline = process_clock.now() + BYE_TIMEOUT_S
        while process_clock.wait(
            lambda left_s: socket.poll(int(left_s * 1000)), deadline - process_clock.now()
        ):
            header = self._accept(socket.recv_multipart())
            if header is not None and header["kind"] == "bye":
                return

    def _accept(self, frames: list[bytes]) -> dict[str, Any] | None:
        """Return the header of a message for this process. Any other message is counted and logged,
        and None is returned."""
        try:
            header = unpack_header(frames[0])
            if header.get("run") != self._run_id or header.get("session") != self._session:
                raise ProtocolError("message for another run or a previous process")
            if header["kind"] == "request":
                for name, kind in (("id", bytes), ("no", int), ("handler", str)):
                    envelope.field(header, name, kind)
        except (ProtocolError, KeyError) as error:
            self.dropped_messages += 1
            _log.warning("message dropped: %s", error)
            return None
        return header

    # ---- handlers

    def _execute(
        self,
        socket: zmq.Socket[bytes],
        header: dict[str, Any],
        payload: list[bytes],
        handlers: dict[str, Handler],
    ) -> None:
        try:
            handler = handlers.get(header["handler"])
            if handler is None:
                raise ProtocolError(f"no handler {header['handler']!r} on this lane")
            result = pack_payload(handler(unpack_payload(payload)))
        except Exception as error:
            self._reply_error(socket, header, error)
            return
        except BaseException as error:
            self._reply_error(socket, header, error)
            raise
        socket.send_multipart([self._answer_header("reply", header), result])

    def _answer_header(self, kind: str, header: dict[str, Any]) -> bytes:
        return pack_header(kind, self._run_id, self._session, id=header["id"])

    def _reply_error(
        self, socket: zmq.Socket[bytes], header: dict[str, Any], error: BaseException
    ) -> None:
        trace = "".join(traceback.format_exception(error))[-100_000:]
        fields = {
            "type": type(error).__name__,
            "message": str(error)[-10_000:],
            "traceback": trace,
            "protocol": isinstance(error, ProtocolError),
        }
        socket.send_multipart([self._answer_header("error", header), pack_payload(fields)])


def _exit_after(after_s: float) -> None:
    time.sleep(after_s)
    _log.error("the process did not end within %g s of the master's bye", after_s)
    os._exit(1)
