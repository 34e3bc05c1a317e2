"""Serves operators of a running job: who takes part, more workers on a host, a host that is to leave."""

from __future__ import annotations

import time

from realhf.cluster.cluster_keys import KnownHosts
from realhf.cluster.control_endpoint import ControlEndpoint, FromOperator
from realhf.cluster.host_table import HostTable
from realhf.cluster.messages import EndWorker, Order, Report
from realhf.cluster.options import ELASTIC
from realhf.cluster.placement import PACKED, kind_of
from realhf.scheduler.base import BeginAgain, WorkerEvent, WorkerExit, WorkersWanted
from realhf.transport.errors import NetworkError

GRACE_S, LEAVE_S = 4.0, 12.0
"""How long the workers of a host that is removed may unwind, and how long it may take to say that they have ended."""
REMOVED = -15
"""Exit code of a worker that did not begin."""


class OperatorDesk:
    """Answers one request. ``running``: whether there is a run, ``elastic``: whether workers could join it."""

    def __init__(
        self, control: ControlEndpoint, table: HostTable, known: KnownHosts, *, running: bool, elastic: bool
    ) -> None:
        self._control, self._table, self._known, self._running, self._elastic = control, table, known, running, elastic

    def serve(self, asked: FromOperator) -> list[WorkerEvent]:
        """Answer, and return what follows for the run."""
        events: list[WorkerEvent] = []
        if asked.kind == "status" or not isinstance(asked.message, Order):
            report = Report([*self._table.lines(self._control.endpoint)])
        elif refusal := self._refusal(asked.kind, asked.message):
            report = Report([refusal], failed=True)
        elif asked.kind == "add":
            order = asked.message
            events = [WorkersWanted(order.host, order.kind, order.count)]
            report = Report([f"{order.count} {order.kind} are started on {order.host}"])
        else:
            report, events = self._remove(asked.message)
        self._control.answer(asked.sender, report)
        return events

    def _refusal(self, kind: str, order: Order) -> str:
        if order.host not in self._table.hosts:
            return f"no host {order.host}; there are {', '.join(sorted(self._table.hosts)) or 'none'}"
        if not self._running:
            return "no run has begun yet"
        if kind == "add":
            if not self._elastic:
                return "this run is synchronous: it takes no more workers while it goes on"
            return "" if order.kind in ELASTIC else f"{order.kind!r} cannot be added, only {' and '.join(ELASTIC)}"
        if order.new_keys:
            return "" if self._elastic else "this run is synchronous: stop it; the same command goes on with new keys"
        held = sorted(name for name in self._table.on(order.host) if kind_of(name) in PACKED)
        return f"{order.host} holds {', '.join(held)}, which the run cannot do without" if held else ""

    def _remove(self, order: Order) -> tuple[Report, list[WorkerEvent]]:
        """Let a host leave: its key is taken away, it gets no more workers, those that it has end, and those that wait
        for files do not begin. With new keys, it leaves at once, and the run begins again."""
        host = order.host
        lines, workers = self._without_key(host), sorted(self._table.on(host))
        if order.new_keys:
            self._control.send_away(host)
            self._table.take(host)
            lines = [f"{host} leaves, and the run begins again with new keys", *lines]
            return Report(lines), [BeginAgain(f"host {host} was removed, and the run gets new keys")]
        self._table.hosts[host].leave_by = time.monotonic() + LEAVE_S
        waiting = [self._table.workers.pop(name) for name in self._table.hosts[host].dock.withdraw()]
        for name in self._table.on(host):
            self._control.send(host, "end", EndWorker(name, GRACE_S))
        if not self._table.on(host):
            self._control.send_away(host)
            self._table.take(host)
        cause = f"removed with its host {host}"
        ends = [WorkerExit(each.spec.name, REMOVED, each.spec.log, 0, cause) for each in waiting]
        return Report([f"{host} leaves; its workers end: {', '.join(workers) or 'none'}", *lines]), [*ends]

    def _without_key(self, host: str) -> list[str]:
        """Take the key of a host away, and return what a person should know of that."""
        try:
            self._known.let_leave(host)
        except (OSError, NetworkError) as error:
            return [f"its key stays in {self._known.file}, for later launches: {error}"]
        return []
