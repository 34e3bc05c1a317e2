"""Joins the publisher and some receivers in a gloo group for one broadcast. Torch's default group is not touched.

The members' addresses travel over the control links and not through a ``TCPStore``: that resolves names even for
numeric addresses, which takes seconds where the name server does not answer, and does not report who is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from realhf.transport.weights.flat_buffer import Buffer

JOIN_S = 5.0
"""How long the members of a group may take to come together."""

Exchange = Callable[[bytes], Sequence[bytes]]
"""Takes the own address and returns the addresses of all members by rank. Raises RuntimeError when a member was
lost."""


class GlooGroup:
    """Is one member's end of a gloo group. Raises RuntimeError when the members do not come together."""

    def __init__(self, rank: int, size: int, host: str, exchange: Exchange) -> None:
        import torch.distributed

        distributed: Any = torch.distributed
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=JOIN_S)
        self._store = _address_store(exchange)
        self._group = distributed.ProcessGroupGloo(self._store, rank, size, options)

    def broadcast(self, buffer: Buffer, timeout_s: float) -> None:
        """Copy the buffer of rank 0 into the buffers of all others. Raises RuntimeError when the broadcast breaks."""
        import torch
        from torch.distributed import BroadcastOptions

        options: Any = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        self._group.broadcast([torch.from_numpy(buffer)], options).wait()


def _address_store(exchange: Exchange) -> Any:
    """Make the key-value store that gloo asks for: every member sets ``<prefix>/<rank>`` once and reads those of
    all."""
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    class AddressStore(Store):
        own = b""
        addresses: Sequence[bytes] = ()

        def set(self, key: str, value: bytes) -> None:
            """Keep the address of this member."""
            del key
            self.own = bytes(value)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            """Exchange addresses, once."""
            del keys, timeout
            if not self.addresses:
                self.addresses = exchange(self.own)

        def get(self, key: str) -> bytes:
            """Return the address of a member."""
            return self.addresses[int(key.rpartition("/")[2])]

    return AddressStore()
