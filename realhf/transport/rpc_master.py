"""The master's end of the request-reply protocol (docs/reference/dataflow.md 6).

One ROUTER socket lives on the event loop's thread; there is no polling and no thread between a call
and the wire. ``call`` enqueues before it returns, so every worker receives calls in the order in
which the code makes them.

A worker serves the calls of a lane strictly one after another. The timeout of a call therefore
starts when the calls before it are finished, not when it is sent: a short call behind a long one
does not time out because the other is long. Its wait is still bounded, because each call before it
has a timeout, and the death of a worker ends all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import zmq

from realhf.base import process_clock
from realhf.base.host_resources import HostLoad
from realhf.base.process import host_token, start_time
from realhf.transport import envelope
from realhf.transport.envelope import pack_header, pack_payload, unpack_payload
from realhf.transport.errors import (
    AddressTaken,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeout,
    WorkerDied,
)
from realhf.transport.heartbeat import HeartbeatServer
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.roster import RosterAnnouncer, WorkerInfo
from realhf.transport.sockets import LoopListener, describe_version_differences


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request that has not been answered.

    If its caller cancels it, ``future`` is done, but the request keeps its place in the lane until
    the worker answers, because the worker may be executing it.
    """

    id: bytes
    worker: str
    handler: str
    mfc: str
    """Name of the model function call to which it belongs; "" for other calls."""
    step: int
    no: int
    """Number of the call on the ordered lane; 0 on the immediate lane."""
    timeout_s: float
    future: asyncio.Future[Any]
    timer: asyncio.TimerHandle | None = None
    """Timer of the timeout; None until the call is first in its lane."""


class CallLane:
    """Queue of a lane's calls, with a timeout for the first one.

    When the first call has been first for its ``timeout_s``, it is removed and ``expire(call)`` is
    called.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, expire: Callable[[PendingCall], None]
    ) -> None:
        self._loop = loop
        self._expire = expire
        self._calls: dict[bytes, PendingCall] = {}

    def add(self, call: PendingCall) -> None:
        """Append a call that has been sent."""
        self._calls[call.id] = call
        self._begin_next()

    def remove(self, call: PendingCall) -> None:
        """Remove a call that the worker has answered or will never answer; start the timeout of the
        next one."""
        if call.timer is not None:
            call.timer.cancel()
        if self._calls.pop(call.id, None) is not None:
            self._begin_next()

    def clear(self) -> list[PendingCall]:
        """Remove and return all calls, in order, because the worker is gone."""
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            if call.timer is not None:
                call.timer.cancel()
        return calls

    def _begin_next(self) -> None:
        call = next(iter(self._calls.values()), None)
        if call is not None and call.timer is None:
            call.timer = self._loop.call_later(call.timeout_s, self._on_timeout, call)

    def _on_timeout(self, call: PendingCall) -> None:
        self.remove(call)
        self._expire(call)


def build_remote_error(call: PendingCall, value: Any) -> RpcError:
    """Return the exception for an error that a worker has answered to this call."""
    if not isinstance(value, dict):
        return ProtocolError(f"worker {call.worker!r} sent a malformed error")
    message = str(value.get("message", ""))
    if value.get("protocol"):
        return ProtocolError(f"worker {call.worker!r}: {message}")
    return RemoteError(
        worker=call.worker,
        handler=call.handler,
        mfc=call.mfc,
        step=call.step,
        kind=str(value.get("type", "")),
        message=message,
        remote_traceback=str(value.get("traceback", "")),
    )


_log = logging.getLogger(__name__)

BYE_TIMEOUT_S = 3.0
"""Seconds that ``close`` waits for the workers to answer its bye."""
BROKEN_S = 1.0
"""Seconds after which a worker with a broken connection counts as dead. If its process has ended,
the kernel reports that earlier, with a better reason."""


@dataclass
class _Peer:
    """A registered worker."""

    info: WorkerInfo
    session: bytes
    """Random number of the worker's process."""
    control: bytes
    """ZeroMQ identity of its control connection."""
    ordered: bytes
    """ZeroMQ identity of its ordered connection."""
    lanes: dict[str, str]
    """Lane of each handler, ordered or immediate."""
    calls: dict[str, CallLane]
    """Unanswered calls by lane."""
    next_no: int = 1
    """Number of the next call on the ordered lane."""

    def lane(self, call: PendingCall) -> CallLane:
        """Return the lane that a call is in."""
        return self.calls["ordered" if call.no else "immediate"]


class RpcMaster:
    """The master's side of the calls to workers. All methods must be called on the event loop's
    thread.

    A worker is dead when its process on this host ends, or after ``dead_after_s`` seconds without a
    heartbeat; all its calls then fail with WorkerDied. Callbacks run on the loop:

    - on_death(name, reason): a worker has died;
    - on_join(worker): a worker has registered;
    - on_left(name, reason): a worker has left by itself before ``close``.
    """

    def __init__(
        self,
        run_id: str,
        *,
        network: Network = LOOPBACK,
        heartbeat_s: float = 2.0,
        dead_after_s: float = 8.0,
        on_death: Callable[[str, str], None] | None = None,
        on_join: Callable[[WorkerInfo], None] | None = None,
        on_left: Callable[[str, str], None] | None = None,
    ) -> None:
        self._run_id = run_id
        self._network = network
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._on_death = on_death
        self._on_join = on_join
        self._on_left = on_left
        self._peers: dict[str, _Peer] = {}
        self._names: dict[bytes, str] = {}
        self._ordered_lanes: dict[bytes, bytes] = {}
        self._pending: dict[bytes, PendingCall] = {}
        self._dead: dict[str, str] = {}
        self._unlisted: set[str] = set()
        self._joined = asyncio.Event()
        self._left = asyncio.Event()
        self._closing = False
        self.roster: dict[str, WorkerInfo] = {}
        self.announcer = RosterAnnouncer(self.roster, self._unlisted, self._send_announcement)
        self.endpoint = ""

    async def start(self) -> None:
        """Bind the sockets.

        Raises RpcError if the address is taken, NetworkError if it does not belong to this host. No
        socket is left open then.
        """
        self._loop = asyncio.get_running_loop()
        context = self._network.context()
        try:
            # The heartbeat comes first: if it cannot listen, no socket is registered with the loop
            # yet.
            self._heartbeat = HeartbeatServer(
                self._run_id,
                context,
                self._network,
                interval_s=self._heartbeat_s,
                dead_after_s=self._dead_after_s,
                on_death=self._on_worker_death,
            )
            try:
                self._listener = LoopListener(
                    "the master",
                    context,
                    self._network.listen,
                    self._dispatch,
                    self._refuse_other_protocol,
                    mandatory=True,
                )
            except BaseException:
                self._heartbeat.close()
                raise
        except BaseException as error:
            context.destroy(0)
            if isinstance(error, AddressTaken):
                raise RpcError(f"the master: {error}") from None
            raise
        self.endpoint = self._listener.endpoint

    @property
    def dropped_messages(self) -> int:
        """Number of messages that were malformed, or answered a call that is no longer pending."""
        return self._listener.dropped_messages

    async def wait_for(self, names: Iterable[str], timeout_s: float) -> None:
        """Wait until all these workers have registered.

        Raises RpcTimeout naming the missing ones, or WorkerDied if one of them dies.
        """
        required = list(names)
        deadline = process_clock.now() + timeout_s
        while missing := [name for name in required if name not in self.roster]:
            for name in missing:
                if name in self._dead:
                    raise WorkerDied(name, self._dead[name])
            self._joined.clear()
            left = deadline - process_clock.now()
            try:
                await asyncio.wait_for(self._joined.wait(), max(left, 0))
            except TimeoutError:
                raise RpcTimeout(
                    f"workers {missing} did not register within {timeout_s:g} s"
                ) from None

    def call(
        self,
        worker: str,
        handler: str,
        payload: Any = None,
        *,
        timeout_s: float,
        step: int = -1,
        mfc: str = "",
    ) -> asyncio.Future[Any]:
        """Send a request at once; return a future for the handler's result.

        ``timeout_s`` counts from the moment at which all earlier calls of the handler's lane are
        finished. The future fails with RpcTimeout, WorkerDied, RemoteError or ProtocolError.
        Cancelling it cancels the call if the worker has not begun it.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        try:
            self._send_call(future, worker, handler, payload, timeout_s, step, mfc)
        except RpcError as error:
            self._fail(future, error)
        return future

    async def close(self) -> None:
        """Say bye to every worker, wait up to BYE_TIMEOUT_S for the answers, and release all ports.
        Calls in flight fail."""
        if self._closing or not self.endpoint:
            return
        self._closing = True
        deadline = process_clock.now() + BYE_TIMEOUT_S
        for peer in list(self._peers.values()):
            self._send_control(peer.control, peer.session, "bye")
        while self._peers and process_clock.now() < deadline:
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), deadline - process_clock.now())
        for name in list(self._peers):
            self._remove(name, "the master is closing")
        self.announcer.close()
        self._heartbeat.close()
        await self._listener.close()

    def fail_worker(self, name: str, reason: str) -> None:
        """Declare a worker dead, for example because its supervisor has seen it exit.

        For a worker that has not registered, the only effect is that ``wait_for`` fails.
        """
        self._dead[name] = reason
        self._joined.set()
        if name in self._peers:
            self._remove(name, reason)
            _log.error("worker %r died: %s", name, reason)
            if self._on_death is not None:
                self._on_death(name, reason)

    def dismiss(self, worker: str, reason: str) -> None:
        """Tell a worker to leave, and treat it as dead from now on. A successor may use its
        name."""
        peer = self._peers.get(worker)
        if peer is not None:
            self._send_control(peer.control, peer.session, "bye")
            self.fail_worker(worker, reason)

    def list_services(self, worker: str, listed: bool) -> None:
        """Set whether announcements to workers contain the addresses of this worker's services.

        Initially they do, unless ``on_join`` has called this. ``roster`` always has the addresses.
        """
        if worker not in self._peers or listed == (worker not in self._unlisted):
            return
        (self._unlisted.discard if listed else self._unlisted.add)(worker)
        self.announcer.announce_later(self.roster[worker])

    def loads(self) -> list[tuple[str, str, HostLoad]]:
        """Return host name, ``host_token`` and load for each worker that reports its load, which
        are those on other hosts."""
        reports = [(peer.info, self._heartbeat.load(peer.session)) for peer in self._peers.values()]
        return [(info.host, info.machine, load) for info, load in reports if load is not None]

    def expect(self, name: str) -> None:
        """Forget that a worker died, because a new process is being started under its name."""
        self._dead.pop(name, None)

    # ---- sending

    def _send_call(
        self,
        future: asyncio.Future[Any],
        worker: str,
        handler: str,
        payload: Any,
        timeout_s: float,
        step: int,
        mfc: str,
    ) -> None:
        peer = self._peers.get(worker)
        if peer is None or self._closing:
            raise WorkerDied(worker, self._dead.get(worker, "it is not registered"))
        lane = peer.lanes.get(handler)
        if lane is None:
            raise ProtocolError(
                f"worker {worker!r} has no handler {handler!r}; it has {sorted(peer.lanes)}"
            )
        self.announcer.announce(worker)
        request_id = os.urandom(16)
        no = peer.next_no if lane == "ordered" else 0
        fields = {
            "handler": handler,
            "mfc": mfc,
            "step": step,
            "deadline_ms": int(timeout_s * 1000),
        }
        header = pack_header("request", self._run_id, peer.session, id=request_id, no=no, **fields)
        identity = peer.ordered if no else peer.control
        try:
            self._listener.send(identity, header, pack_payload(payload))
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                # ZeroMQ may reconnect under a new identity while the worker lives on, but messages
                # to this identity never arrive: the worker counts as dead.
                self._loop.call_later(
                    BROKEN_S, self._confirm_death, worker, peer.session, "its connection broke"
                )
            raise WorkerDied(worker, f"its connection is gone or full ({error})") from None
        if no:
            peer.next_no += 1
        entry = PendingCall(request_id, worker, handler, mfc, step, no, timeout_s, future)
        self._pending[request_id] = entry
        peer.lane(entry).add(entry)
        future.add_done_callback(lambda done: self._cancel(entry) if done.cancelled() else None)

    def _send_control(
        self, identity: bytes, session: bytes, kind: str, *payload: bytes, **fields: Any
    ) -> None:
        """Send a control message, ignoring errors: the heartbeat detects a peer that is gone."""
        header = pack_header(kind, self._run_id, session, **fields)
        with contextlib.suppress(zmq.ZMQError):
            self._listener.send(identity, header, *payload)

    # ---- receiving

    def _refuse_other_protocol(self, identity: bytes, header: dict[str, Any]) -> None:
        """Refuse a worker with another protocol version, which can at least read the version in the
        answer."""
        session = header.get("session")
        if header.get("kind") == "hello" and isinstance(session, bytes):
            different = describe_version_differences(
                header.get("versions"), str(header.get("node", "its host"))
            )
            self._send_control(identity, session, "refused", reason=f"versions differ: {different}")

    def _dispatch(self, identity: bytes, header: dict[str, Any], payload: list[bytes]) -> None:
        kind = header.get("kind")
        session = envelope.field(header, "session", bytes)
        if kind == "hello":
            self._hello(identity, header, session)
            return
        if header.get("run") != self._run_id:
            raise ProtocolError(f"{kind} of run {header.get('run')!r}, this is {self._run_id!r}")
        if kind in ("reply", "error"):
            self._answer(header, session, payload)
        elif kind == "bye":
            name = self._names.get(session)
            self._send_control(identity, session, "bye")
            if name is not None:
                self._remove(name, "it left")
                if self._on_left is not None and not self._closing:
                    self._on_left(name, "it left")
        else:
            raise ProtocolError(f"unknown message kind {kind!r}")

    def _answer(self, header: dict[str, Any], session: bytes, payload: list[bytes]) -> None:
        entry = self._pending.get(envelope.field(header, "id", bytes))
        if entry is None:
            self._listener.dropped_messages += 1
            return
        if self._peers[entry.worker].session != session:
            raise ProtocolError(f"reply for worker {entry.worker!r} from a previous process")
        del self._pending[entry.id]
        self._peers[entry.worker].lane(entry).remove(entry)
        if entry.future.done():
            return
        try:
            value = unpack_payload(payload)
            if header["kind"] == "reply":
                entry.future.set_result(value)
            else:
                self._fail(entry.future, build_remote_error(entry, value))
        except ProtocolError as error:
            self._fail(entry.future, error)

    # ---- registration

    def _hello(self, identity: bytes, header: dict[str, Any], session: bytes) -> None:
        if header.get("run") != self._run_id:
            reason = f"this is run {self._run_id!r}, the worker belongs to {header.get('run')!r}"
            self._send_control(identity, session, "refused", reason=reason)
            return
        ordered = header.get("lane") == "ordered"
        info = None if ordered else WorkerInfo.from_map(header.get("info"))
        if different := describe_version_differences(
            header.get("versions"), str(header.get("node", "its host"))
        ):
            self._send_control(identity, session, "refused", reason=f"versions differ: {different}")
            return
        if info is None:
            self._ordered_lanes[session] = identity
            self._send_control(identity, session, "hello_ack")
            return
        reason = self._register(identity, header, session, info)
        if reason:
            self._send_control(identity, session, "refused", reason=reason)
            return
        self._send_control(
            identity,
            session,
            "hello_ack",
            heartbeat=self._heartbeat.endpoint,
            heartbeat_s=self._heartbeat_s,
            master=[os.getpid(), start_time(os.getpid()), host_token()],
        )
        if self._on_join is not None:
            self._on_join(info)
        self.announcer.announce_later(info)
        self._joined.set()

    def _register(
        self, identity: bytes, header: dict[str, Any], session: bytes, info: WorkerInfo
    ) -> str:
        """Add the worker to the roster; return the reason if it is refused, "" otherwise."""
        ordered = self._ordered_lanes.pop(session, None)
        if ordered is None:
            return "its ordered lane is not connected"
        # The launcher reuses a name only if its previous process has ended or is unreachable.
        self.dismiss(info.name, "its successor has registered")
        lanes = envelope.field(header, "lanes", dict)
        try:
            self._heartbeat.watch(
                info.name, session, pid=info.pid, started=info.started, host=info.machine
            )
        except ProcessLookupError:
            return "its process ended"
        calls = {lane: CallLane(self._loop, self._expire) for lane in ("ordered", "immediate")}
        self._peers[info.name] = _Peer(info, session, identity, ordered, lanes, calls)
        self._names[session] = info.name
        self._dead.pop(info.name, None)
        self.roster[info.name] = info
        return ""

    def _send_announcement(self, name: str, version: int, announcement: bytes) -> None:
        peer = self._peers[name]
        self._send_control(peer.control, peer.session, "roster", announcement, version=version)

    # ---- ends

    def _expire(self, entry: PendingCall) -> None:
        del self._pending[entry.id]
        state = self._heartbeat.state(self._peers[entry.worker].session)
        self._cancel(entry)
        self._fail(
            entry.future,
            RpcTimeout(
                f"{entry.handler} of worker {entry.worker!r} {entry.mfc} did not answer within "
                f"{entry.timeout_s:g} s;"
                f" {state}"
            ),
        )

    def _cancel(self, entry: PendingCall) -> None:
        """Tell the worker to cancel a call."""
        if entry.worker in self._peers:
            peer = self._peers[entry.worker]
            self._send_control(peer.control, peer.session, "cancel", id=entry.id, no=entry.no)

    def _on_worker_death(self, name: str, session: bytes, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._confirm_death, name, session, reason)

    def _confirm_death(self, name: str, session: bytes, reason: str) -> None:
        self._listener.drain()
        if name in self._peers and self._peers[name].session == session and not self._closing:
            self.fail_worker(name, reason)

    def _remove(self, name: str, reason: str) -> None:
        peer = self._peers[name]
        for entry in [call for lane in peer.calls.values() for call in lane.clear()]:
            del self._pending[entry.id]
            self._fail(entry.future, WorkerDied(name, reason))
        del self._peers[name], self._names[peer.session], self.roster[name]
        self._unlisted.discard(name)
        self._heartbeat.forget(peer.session)
        self._left.set()
        if not self._closing:
            self.announcer.announce_later(peer.info)

    @staticmethod
    def _fail(future: asyncio.Future[Any], error: Exception) -> None:
        if not future.done():
            future.set_exception(error)
            # Marks the exception as retrieved. The death of the worker is reported elsewhere, so
            # asyncio need not warn of a future that was never awaited.
            future.exception()
