"""How the two sides of a broadcast meet: a store that the publisher opens per version, and gloo groups over it.

A receiver takes a ticket (``ticket/<n>``, consecutive, so that the publisher can wait for the next one). The publisher
calls the tickets that it wants in one group (``call/<n>``); a receiver that is alive answers (``ready/<n>``) and gets
its seat (``seat/<n>``: group, rank, size). When the group's broadcast is over it says how it went (``end/<n>``).
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

STOP = "stop"
"""A ticket by which the publisher's serving thread is woken to end."""

POLL_S = 0.003
JOIN_S = 5.0
BASE_S = 10.0
SLOWEST_BYTES_PER_S = 20e6


def transfer_s(nbytes: int) -> float:
    """Seconds after which a broadcast of this size counts as stuck."""
    return BASE_S + nbytes / SLOWEST_BYTES_PER_S


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_store(host: str) -> tuple[TCPStore, int]:
    """A store that listens on one address only, and its port. Raises OSError."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(128)
        port = int(listener.getsockname()[1])
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def take_ticket(store: Store, value: str) -> int:
    """The number of the first free ticket, which now carries this value. Values must be unique."""
    number = 1
    while store.compare_set(f"ticket/{number}", "", value) != value.encode():
        number += 1
    return number


def wait_for(store: Store, key: str, timeout_s: float) -> bytes | None:
    """The value under a key once it is there; None when it does not come in time."""
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
    except DistStoreError:
        return None
    return store.get(key)


def poll_for(store: Store, key: str, timeout_s: float) -> bytes | None:
    """``wait_for`` for a short time that may well pass: the store would print a warning about that."""
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    return store.get(key)


def join_group(store: Store, seat: Any, host: str) -> Any:
    """A gloo group of its own: the process's default group, if it has one, is not touched. Raises RuntimeError when
    not all members connect within ``JOIN_S``."""
    import torch.distributed

    number, rank, size = seat
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=JOIN_S)
    return distributed.ProcessGroupGloo(distributed.PrefixStore(f"group/{number}", store), rank, size, options)


def ticket_value(name: str, token: str) -> str:
    return json.dumps([name, token])


def ticket_name(value: bytes) -> str:
    """Who took a ticket; whatever was written there by something else is shown as it is."""
    try:
        name, _ = json.loads(value)
        return str(name)
    except (ValueError, TypeError):
        return repr(value[:40])
