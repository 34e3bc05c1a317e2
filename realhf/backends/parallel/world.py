"""Brings the workers of a run that train together into one *world*, and makes a process group for each role.

They meet at a store that the first of them serves on the loopback, as all sockets of a run do: it carries no
authentication, and nothing outside this machine reaches it.
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
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from realhf.api.parallel import CollectiveBroken
from realhf.backends.parallel.sockets import Sockets

_log = logging.getLogger(__name__)

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"


class Meeting:
    """Serves the store at which the workers of a world meet; ``address`` is host:port. It lives as long as the
    object."""

    def __init__(self, size: int, timeout_s: float) -> None:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind((LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        self.address = f"{LOOPBACK}:{port}"
        self._store = TCPStore(
            LOOPBACK,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


class World:
    """This worker's membership in a world. ``workers`` are the indices of all its workers, ``worker`` is the own one.
    ``join_s`` bounds how long they may take to come together, ``timeout_s`` how long a rank waits for another in a
    collective."""

    def __init__(self, address: str, worker: int, workers: Sequence[int], *, join_s: float, timeout_s: float) -> None:
        """Raises CollectiveBroken when the workers do not come together."""
        host, _, port = address.rpartition(":")
        self._workers = tuple(workers)
        size = len(workers)
        self._timeout = timedelta(seconds=timeout_s)
        self._sockets = Sockets()
        self._groups: list[Any] = []
        self._aborted = ""
        self.cuda = torch.cuda.is_available()
        # Gloo looks up the name of the machine unless it is told an interface, and names may lead anywhere.
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
        try:
            joining = timedelta(seconds=join_s)
            store = TCPStore(host, int(port), size, is_master=False, timeout=joining, wait_for_workers=False)
            with self._sockets.recording():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if self.cuda else "gloo",
                    store=store,
                    rank=self._workers.index(worker),
                    world_size=size,
                    timeout=joining,
                )
        except (RuntimeError, ValueError) as error:
            raise CollectiveBroken(f"{size} workers did not come together within {join_s:g} s: {error}") from None

    def group(self, workers: Sequence[int]) -> Any:
        """Return the process group of these workers, ranks in ascending order; all of them call this. Raises
        CollectiveBroken."""
        places = self.places(workers)
        try:
            with self._sockets.recording():
                group = dist.new_group(places, timeout=self._timeout, use_local_synchronization=True)
        except (RuntimeError, ValueError) as error:
            raise CollectiveBroken(f"no group of the workers {list(workers)}: {error}") from None
        self._groups.append(group)
        return group

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
        if self.cuda:
            for group in self._groups:
                group.abort()
        count = self._sockets.shut()
        _log.warning("collectives are broken off (%s); %d connections closed", self._aborted, count)

    def close(self) -> None:
        """Leave the world."""
        if dist.is_initialized():
            dist.destroy_process_group()
