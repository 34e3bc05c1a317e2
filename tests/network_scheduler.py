"""A scheduler that starts the master on one host and all other workers on another; hosts are
network namespaces."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.network.hosts import Host
from realhf.api.option import option
from realhf.scheduler.base import SchedulerDefinition, WorkerSpec
from realhf.scheduler.local import LocalScheduler


@dataclass
class Hosts:
    """The namespaces, by name."""

    first: str = option("", "The master runs here.")
    second: str = option("", "All other workers run here.")


class OnHosts(LocalScheduler):
    """``LocalScheduler`` for processes in namespaces."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(adopts_orphans=True)
        self._hosts = hosts

    def start(self, spec: WorkerSpec) -> None:
        """See ``Scheduler``."""
        name = self._hosts.first if spec.name == "master" else self._hosts.second
        with Host(name, "").entered():
            super().start(spec)


ON_HOSTS = SchedulerDefinition(Hosts, OnHosts)
