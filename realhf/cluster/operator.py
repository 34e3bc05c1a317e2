"""Asks the launcher of a running job for a person, and answers there: who takes part, more workers, a host that
leaves."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from realhf.base import process_clock
from realhf.cluster.cluster_keys import KnownHosts, LauncherKeys
from realhf.cluster.control_endpoint import ControlEndpoint, FromOperator
from realhf.cluster.host_table import HostTable
from realhf.cluster.messages import OF_LAUNCHER, EndWorker, Message, Nothing, Order, Report, packed, unpacked
from realhf.cluster.options import ELASTIC
from realhf.cluster.placement import PACKED, kind_of
from realhf.scheduler.base import BeginAgain, WorkerEvent, WorkerExit, WorkersWanted
from realhf.transport.envelope import field, unpack_header
from realhf.transport.errors import NetworkError, ProtocolError
from realhf.transport.network import connect_encrypted, host_of
from realhf.transport.sockets import REACHED_WITHIN_S, HandshakeWatch, dealer, describe_unreached

ANSWER_S = 30.0
LOOK_MS = 100


def asked(launcher: str, key_file: Path, kind: str, message: Message | None = None) -> Report:
    """Return the answer of the launcher at ``launcher``, whose own file of keys is ``key_file``. Raises NetworkError
    when it is not reached or refuses the keys, and ProtocolError when it does not answer within ``ANSWER_S``."""
    host_of(launcher)
    key = LauncherKeys.read(key_file.expanduser()).of_operator
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = dealer(context)
    watch = HandshakeWatch(socket)
    session, began = os.urandom(16), process_clock.now()
    try:
        connect_encrypted(socket, launcher, key.server_public, key.own)
        socket.send_multipart(packed(kind, session, message or Nothing()))
        while not socket.poll(LOOK_MS):
            watch.look()
            if watch.refused:
                raise NetworkError(f"the launcher at {launcher} {watch.refused}")
            if not watch.reached and process_clock.now() - began > REACHED_WITHIN_S:
                raise NetworkError(f"the launcher at {launcher} {describe_unreached()}")
            if process_clock.now() - began > ANSWER_S:
                raise ProtocolError(f"the launcher at {launcher} did not answer within {ANSWER_S:g} s")
        frame, *payload = socket.recv_multipart()
        found = unpacked(field(unpack_header(frame), "kind", str), payload, OF_LAUNCHER)
        if not isinstance(found, Report):
            raise ProtocolError(f"the launcher at {launcher} answered with {type(found).__name__}")
        return found
    finally:
        watch.close()
        context.destroy(0)


GRACE_S, LEAVE_S = 4.0, 12.0
"""How long the workers of a host that is removed may unwind, and how long it may take to say that they have ended."""
REMOVED = -15
"""Exit code of a worker that did not begin."""


def serve_operator(
    asked: FromOperator, control: ControlEndpoint, table: HostTable, known: KnownHosts, *, running: bool, elastic: bool
) -> list[WorkerEvent]:
    """Answer one request, and return what follows for the run. ``running``: whether there is a run, ``elastic``:
    whether workers could join it."""
    events: list[WorkerEvent] = []
    if asked.kind == "status" or not isinstance(asked.message, Order):
        report = Report([*table.lines(control.endpoint)])
    elif refusal := _refusal(asked.kind, asked.message, table, running=running, elastic=elastic):
        report = Report([refusal], failed=True)
    elif asked.kind == "add":
        order = asked.message
        events = [WorkersWanted(order.host, order.kind, order.count)]
        report = Report([f"{order.count} {order.kind} are started on {order.host}"])
    else:
        report, events = _remove(asked.message, control, table, known)
    control.answer(asked.sender, report)
    return events


def _refusal(kind: str, order: Order, table: HostTable, *, running: bool, elastic: bool) -> str:
    if order.host not in table.hosts:
        return f"no host {order.host}; there are {', '.join(sorted(table.hosts)) or 'none'}"
    if not running:
        return "no run has begun yet"
    if kind == "add":
        if not elastic:
            return "this run is synchronous: it takes no more workers while it goes on"
        return "" if order.kind in ELASTIC else f"{order.kind!r} cannot be added, only {' and '.join(ELASTIC)}"
    if order.new_keys:
        return "" if elastic else "this run is synchronous: stop it; the same command goes on with new keys"
    held = sorted(name for name in table.on(order.host) if kind_of(name) in PACKED)
    return f"{order.host} holds {', '.join(held)}, which the run cannot do without" if held else ""


def _remove(
    order: Order, control: ControlEndpoint, table: HostTable, known: KnownHosts
) -> tuple[Report, list[WorkerEvent]]:
    """Let a host leave: its key is taken away, it gets no more workers, those that it has end, and those that wait for
    files do not begin. With new keys, it leaves at once, and the run begins again."""
    host = order.host
    lines: list[str] = []
    try:
        known.let_leave(host)
    except (OSError, NetworkError) as error:
        lines = [f"its key stays in {known.file}, for later launches: {error}"]
    workers = sorted(table.on(host))
    if order.new_keys:
        control.send_away(host)
        table.take(host)
        lines = [f"{host} leaves, and the run begins again with new keys", *lines]
        return Report(lines), [BeginAgain(f"host {host} was removed, and the run gets new keys")]
    table.hosts[host].leave_by = process_clock.now() + LEAVE_S
    waiting = [table.workers.pop(name) for name in table.hosts[host].transfers.withdraw()]
    for name in table.on(host):
        control.send(host, "end", EndWorker(name, GRACE_S))
    if not table.on(host):
        control.send_away(host)
        table.take(host)
    cause = f"removed with its host {host}"
    ends = [WorkerExit(each.spec.name, REMOVED, each.spec.log, 0, cause) for each in waiting]
    return Report([f"{host} leaves; its workers end: {', '.join(workers) or 'none'}", *lines]), [*ends]
