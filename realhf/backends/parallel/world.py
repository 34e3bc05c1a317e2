"""Brings the workers of a run that train together into one *world*, and makes a process group for each role.

They meet at a store that the first of them serves on the loopback, as all sockets of a run do: nothing outside this
machine reaches it. Where they are on several hosts, of a network that the user trusts, it is served at the address at
which this host reaches the master, and each connects and listens at its own such address alone. Their keys begin with a
token of the run, so that another process does not meet them by chance or plant an address that it guessed. The store
itself asks nobody who he is: a process that reaches it can list its keys.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from realhf.api.parallel import CollectiveBroken
from realhf.backends.parallel.sockets import Sockets

_log = logging.getLogger(__name__)

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"


class Meeting:
    """Serves the store at which the workers of a world meet, at an own address; ``address`` is host:port. It lives as
    long as the object."""

    def __init__(self, size: int, timeout_s: float, host: str = LOOPBACK) -> None:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store = TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


class World:
    """This worker's membership in a world. ``workers`` are the indices of all its workers, ``worker`` is the own one.
    ``join_s`` bounds how long they may take to come together, in the world and in each group, ``timeout_s`` how long a
    rank waits for another in a collective. Only workers with the same ``token`` meet. The others reach this one at its
    address ``own``, which ``interface`` has."""

    def __init__(
        self,
        address: str,
        worker: int,
        workers: Sequence[int],
        *,
        join_s: float,
        timeout_s: float,
        token: str = "",
        own: str = LOOPBACK,
        interface: str = LOOPBACK_INTERFACE,
    ) -> None:
        """Raises CollectiveBroken when the workers do not come together, or torch listens at another address."""
        host, _, port = address.rpartition(":")
        self._workers = tuple(workers)
        size = len(workers)
        self._worker, self._join_s = worker, join_s
        self._timeout = timedelta(seconds=timeout_s)
        self._own, self._interface = own, interface
        self._sockets = Sockets()
        self._groups: list[Any] = []
        self._founded = 0
        self._waiting: dict[tuple[int, ...], list[tuple[int, Any]]] = {}
        self._aborted = ""
        self.cuda = torch.cuda.is_available()
        # Gloo looks up the name of the machine unless it is told an interface, and names may lead anywhere; NCCL takes
        # an interface that leads out of the machine.
        os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"] = interface, f"={interface}"
        try:
            joining = timedelta(seconds=join_s)
            server = TCPStore(host, int(port), size, is_master=False, timeout=joining, wait_for_workers=False)
            self._store = PrefixStore(token, server) if token else server
            self._compare_devices(joining)
            with self._sockets.recording():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if self.cuda else "gloo",
                    store=self._store,
                    rank=self._workers.index(worker),
                    world_size=size,
                    timeout=joining,
                )
        except CollectiveBroken:
            raise
        except (RuntimeError, ValueError) as error:
            raise CollectiveBroken(
                f"the workers {list(workers)} did not come together in {join_s:g} s (rpc.connect_timeout_s): {error}"
            ) from None

        self._check_listeners()

    def _compare_devices(self, joining: timedelta) -> None:
        """Those without a GPU cannot take part in what the others compute on theirs, which torch says late and badly.
        Raises CollectiveBroken, and RuntimeError when not all come."""
        self._store.set(f"device/{self._worker}", "GPU" if self.cuda else "CPU")
        keys = {worker: f"device/{worker}" for worker in self._workers}
        self._store.wait([*keys.values()], joining)
        without = [worker for worker, key in keys.items() if self._store.get(key) != b"GPU"]
        if 0 < len(without) < len(keys):
            raise CollectiveBroken(
                f"of the workers {list(keys)} that train together {without} see no GPU, and the others do: place them "
                "on hosts with GPUs (scheduler.placement), or hide those (CUDA_VISIBLE_DEVICES=)"
            )

    def _check_listeners(self) -> None:
        """An interface may have several addresses, of which gloo takes the first."""
        if strays := sorted(self._sockets.listening() - {self._own}):
            self.close()
            raise CollectiveBroken(
                f"torch.distributed listens at {', '.join(strays)} of the interface {self._interface}, and not at "
                f"{self._own}, from where this host reaches the master: make that the first address of the interface"
            )

    def found(self, groups: Sequence[Sequence[int]]) -> None:
        """Make process groups of these workers each, for ``group``. All workers of the world call this with the same
        groups in the same order, members or not: torch names a group by how many there were before. Raises
        CollectiveBroken."""
        for workers in groups:
            places = self.places(workers)
            number, self._founded = self._founded, self._founded + 1
            try:
                with self._sockets.recording():
                    group = dist.new_group(places, timeout=self._timeout)
            except (RuntimeError, ValueError) as error:
                raise CollectiveBroken(f"no group of the workers {sorted(workers)}: {error}") from None
            self._check_listeners()
            if self._worker in workers:
                self._groups.append(group)
                self._waiting.setdefault(tuple(places), []).append((number, group))

    def group(self, workers: Sequence[int]) -> Any:
        """Return the process group of these workers, ranks in ascending order, the first that was founded and not yet
        asked for. All of them call this; each waits ``join_s`` for the others. Raises CollectiveBroken naming those
        that did not come, or RuntimeError where no such group is left."""
        found = self._waiting.get(tuple(self.places(workers)))
        if not found:
            raise RuntimeError(f"no group of the workers {sorted(workers)} was founded for worker {self._worker}")
        number, group = found.pop(0)
        self._await(number, sorted(workers))
        return group

    def _await(self, number: int, workers: Sequence[int]) -> None:
        """Wait until all members of a group have asked for it."""
        keys = {worker: f"group/{number}/{worker}" for worker in workers}
        missing: Sequence[int] = workers
        try:
            self._store.set(keys[self._worker], "here")
            try:
                self._store.wait([*keys.values()], timedelta(seconds=self._join_s))
            except RuntimeError:
                missing = [worker for worker in workers if not self._store.check([keys[worker]])]
                raise
        except RuntimeError as error:
            raise CollectiveBroken(
                f"worker {self._worker} waited {self._join_s:g} s (rpc.connect_timeout_s) for the workers "
                f"{list(missing)} to load what they train with {workers}: {error}"
            ) from None

    def places(self, workers: Sequence[int]) -> list[int]:
        """Return the numbers of these workers in the world, ascending."""
        return sorted(self._workers.index(worker) for worker in workers)

    @property
    def aborted(self) -> str:
        """Why the world was broken off; empty while it stands."""
        return self._aborted

    def abort(self, reason: str) -> None:
        """Break off every collective of this worker, for good. From any thread; a second call does nothing."""
        if self._aborted:
            return
        self._aborted = reason or "broken off"
        count = self._sockets.shut()
        for group in self._groups if self.cuda else ():
            try:
                group.abort()
            except RuntimeError as error:  # The others have to hear of it all the same.
                _log.warning("a group of NCCL does not break off: %s", error)
        _log.warning("collectives are broken off (%s); %d connections closed", self._aborted, count)

    def close(self) -> None:
        """Leave the world. What a thread still computes with others fails: it would hold up the end."""
        self._sockets.shut()
        self._groups.clear()
        self._waiting.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
