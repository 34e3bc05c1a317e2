"""Operator requests to the launcher of a running job: show its status, add workers, remove a
host."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from realhf.base import process_clock
from realhf.cluster.cluster_keys import KnownHosts, LauncherKeys
from realhf.cluster.control_endpoint import ControlEndpoint, OperatorRequest
from realhf.cluster.host_table import HostTable
from realhf.cluster.messages import (
    OF_LAUNCHER,
    EndWorker,
    Message,
    NoContent,
    OperatorOrder,
    OperatorReport,
    pack_message,
    unpack_message,
)
from realhf.cluster.options import ELASTIC
from realhf.cluster.placement import PACKED, kind_of
from realhf.scheduler.base import RestartRequest, WorkerEvent, WorkerExit, WorkersWanted
from realhf.transport.envelope import field, unpack_header
from realhf.transport.errors import NetworkError, ProtocolError
from realhf.transport.network import connect_encrypted, parse_host
from realhf.transport.sockets import (
    REACHED_WITHIN_S,
    HandshakeWatch,
    describe_unreached,
    open_dealer,
)

ANSWER_S = 30.0
"""Seconds within which the launcher must answer a request."""
POLL_MS = 100


def ask_launcher(
    launcher: str, key_file: Path, kind: str, message: Message | None = None
) -> OperatorReport:
    """Send a request of ``kind`` to the launcher at ``launcher`` (tcp://HOST:PORT); return its
    answer.

    key_file: the launcher's key file. Raises NetworkError if the launcher is not reached or refuses
    the keys, and ProtocolError if it does not answer within ``ANSWER_S``.
    """
    parse_host(launcher)
    key = LauncherKeys.read(key_file.expanduser()).operator_key
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_dealer(context)
    watch = HandshakeWatch(socket)
    session = os.urandom(16)
    began = process_clock.now()
    try:
        connect_encrypted(socket, launcher, key.server_public, key.own)
        socket.send_multipart(pack_message(kind, session, message or NoContent()))
        while not socket.poll(POLL_MS):
            watch.process_events()
            if watch.refusal:
                raise NetworkError(f"the launcher at {launcher} {watch.refusal}")
            if not watch.reached and process_clock.now() - began > REACHED_WITHIN_S:
                raise NetworkError(f"the launcher at {launcher} {describe_unreached()}")
            if process_clock.now() - began > ANSWER_S:
                raise ProtocolError(
                    f"the launcher at {launcher} did not answer within {ANSWER_S:g} s"
                )
        frame, *payload = socket.recv_multipart()
        answer = unpack_message(field(unpack_header(frame), "kind", str), payload, OF_LAUNCHER)
        if not isinstance(answer, OperatorReport):
            raise ProtocolError(f"the launcher at {launcher} answered with {type(answer).__name__}")
        return answer
    finally:
        watch.close()
        context.destroy(0)


GRACE_S = 4.0
"""Seconds between SIGTERM and SIGKILL for the workers of a removed host."""
REMOVAL_TIMEOUT_S = 12.0
"""Seconds within which a removed host must report the exits of its workers."""
REMOVED = -15
"""Exit code that is reported for a worker of a removed host that never started."""


def serve_operator(
    request: OperatorRequest,
    control: ControlEndpoint,
    table: HostTable,
    known: KnownHosts,
    *,
    running: bool,
    elastic: bool,
) -> list[WorkerEvent]:
    """Execute and answer an operator's request; return the worker events that it causes.

    running: whether a run is in progress. elastic: whether workers can join and leave that run.
    """
    events: list[WorkerEvent] = []
    if request.kind == "status" or not isinstance(request.message, OperatorOrder):
        report = OperatorReport([*table.lines(control.endpoint)])
    elif refusal := _refusal_reason(
        request.kind, request.message, table, running=running, elastic=elastic
    ):
        report = OperatorReport([refusal], failed=True)
    elif request.kind == "add":
        order = request.message
        events = [WorkersWanted(order.host, order.kind, order.count)]
        report = OperatorReport([f"{order.count} {order.kind} are started on {order.host}"])
    else:
        report, events = _remove_host(request.message, control, table, known)
    control.answer(request.sender, report)
    return events


def _refusal_reason(
    kind: str, order: OperatorOrder, table: HostTable, *, running: bool, elastic: bool
) -> str:
    if order.host not in table.hosts:
        return f"no host {order.host}; there are {', '.join(sorted(table.hosts)) or 'none'}"
    if not running:
        return "no run has started yet"
    if kind == "add":
        if not elastic:
            return "this run is synchronous: it cannot get more workers while it runs"
        return (
            ""
            if order.kind in ELASTIC
            else f"{order.kind!r} cannot be added, only {' and '.join(ELASTIC)}"
        )
    if order.new_keys:
        return (
            ""
            if elastic
            else "this run is synchronous: stop it and start it again; it then continues with new keys"
        )
    trainers = sorted(name for name in table.workers_on(order.host) if kind_of(name) in PACKED)
    return (
        f"{order.host} holds {', '.join(trainers)}, which the run cannot continue without"
        if trainers
        else ""
    )


def _remove_host(
    order: OperatorOrder, control: ControlEndpoint, table: HostTable, known: KnownHosts
) -> tuple[OperatorReport, list[WorkerEvent]]:
    """Remove a host: revoke its key, end its workers, and cancel those that still wait for files.
    Return the answer for the operator and the resulting events.

    With ``new_keys`` the host is removed at once, without waiting for its workers, and the run
    restarts.
    """
    host = order.host
    lines: list[str] = []
    try:
        known.begin_removal(host)
    except (OSError, NetworkError) as error:
        lines = [f"its key stays in {known.file}, for later launches: {error}"]
    workers = sorted(table.workers_on(host))
    if order.new_keys:
        control.dismiss(host)
        table.remove_host(host)
        lines = [f"{host} is removed, and the run restarts with new keys", *lines]
        return OperatorReport(lines), [
            RestartRequest(f"host {host} was removed, and the run gets new keys")
        ]
    table.hosts[host].leave_by = process_clock.now() + REMOVAL_TIMEOUT_S
    waiting = [table.workers.pop(name) for name in table.hosts[host].transfers.withdraw()]
    for name in table.workers_on(host):
        control.send(host, "end", EndWorker(name, GRACE_S))
    if not table.workers_on(host):
        control.dismiss(host)
        table.remove_host(host)
    cause = f"removed with its host {host}"
    ends = [WorkerExit(each.spec.name, REMOVED, each.spec.log, 0, cause) for each in waiting]
    return OperatorReport(
        [f"{host} is removed; its workers end: {', '.join(workers) or 'none'}", *lines]
    ), [*ends]
