"""The trainer's end of broadcasts: offers a version, and sends it to groups of servers while the
trainer does not change it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realhf.backends.vllm.broadcast.nccl import BroadcastGroup, NcclGroup, find_nccl_problem
from realhf.backends.vllm.broadcast.payloads import (
    PACK_BYTES,
    BroadcastError,
    cut_packs,
    describe_tensors,
    fill_pack,
)

_log = logging.getLogger(__name__)
_STOP_S = 10.0
"""Seconds that a broadcast has to end after its group was aborted."""
MakeGroup = Callable[[torch.device], tuple[BroadcastGroup, bytes]]
"""Makes the trainer's end of a new group, and the unique id with which the others join."""


def make_nccl_group(device: torch.device, interface: str = "lo") -> tuple[BroadcastGroup, bytes]:
    """See ``MakeGroup``. The ranks meet at the network interface ``interface``. Raises
    BroadcastError if this process has no NCCL."""
    if problem := find_nccl_problem():
        raise BroadcastError(problem)
    # NCCL prefers an interface to other machines, and authenticates nobody who connects.
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    group = NcclGroup(device)
    return group, group.unique_id


@dataclass
class _Offer:
    """A version that may be sent now."""

    version: int
    """Policy version."""
    trial: int
    """Step of a self-test; 0 outside of one."""
    tensors: Mapping[str, Tensor]
    """The trainer's own tensors."""


@dataclass
class _Sending:
    """A broadcast that has begun."""

    thread: threading.Thread
    """Thread that sends."""
    deadline: float
    """Time of ``time.monotonic`` at which it gives up."""
    failed: str = ""
    """Why the weights did not arrive; "" if they did, or may yet."""


@dataclass
class _OpenGroup:
    """A group that was used, or is being joined."""

    members: tuple[str, ...]
    """Its servers, in the order of their ranks."""
    end: BroadcastGroup
    """Rank 0."""
    joined: bool = field(default=False)
    """Whether all ranks have joined."""


class WeightSender:
    """Rank 0 of broadcasts of one policy. Thread-safe.

    The tensors are the trainer's own: nothing is copied but the pack that is being sent. So
    ``withdraw`` must be called before they change, and waits until they were sent. ``device`` is
    that of the packs.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        make_group: MakeGroup = make_nccl_group,
        pack_bytes: int = PACK_BYTES,
    ) -> None:
        self.pack_bytes = pack_bytes
        self._device = device
        self._make_group = make_group
        self._lock = threading.Lock()
        self._offer: _Offer | None = None
        self._group: _OpenGroup | None = None
        self._sending: _Sending | None = None

    def offer(self, version: int, trial: int, tensors: Mapping[str, Tensor]) -> None:
        """Let servers take these tensors from now on, instead of those offered before."""
        self.withdraw()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._lock:
            self._offer = _Offer(version, trial, tensors)

    def withdraw(self) -> None:
        """End the offer, and wait until a broadcast that has begun is over. Raises BroadcastError
        if it does not end after its deadline, because the tensors may not change before."""
        with self._lock:
            self._offer = None
            sending = self._sending
        if sending is None:
            return
        sending.thread.join(max(0.0, sending.deadline - time.monotonic()) + _STOP_S)
        if sending.thread.is_alive():
            raise BroadcastError(
                "a broadcast of weights did not end at its deadline; async_rl.weights=shm sends "
                "them through the host's memory"
            )

    def start(
        self,
        version: int,
        trial: int,
        members: Sequence[str],
        world_size: int,
        timeout_s: float,
    ) -> bytes | None:
        """Start to send a version to ``members``, whose workers and this process are ``world_size``
        ranks.

        Return the unique id with which they join a new group, b"" if they have joined before, and
        None if the version is not offered any more. Raises BroadcastError while another broadcast
        is in progress, or if there can be no group.
        """
        with self._lock:
            offer = self._offer
            if offer is None or (offer.version, offer.trial) != (version, trial):
                return None
            if self._sending is not None and self._sending.thread.is_alive():
                raise BroadcastError("another broadcast of weights is in progress")
            unique_id = b""
            if self._group is None or self._group.members != tuple(members):
                self._drop_group()
                end, unique_id = self._make_group(self._device)
                self._group = _OpenGroup(tuple(members), end)
            deadline = time.monotonic() + timeout_s
            thread = threading.Thread(
                target=self._send,
                args=(self._group, offer.tensors, world_size, deadline),
                name="send-weights",
                daemon=True,
            )
            self._sending = _Sending(thread, deadline)
            thread.start()
            return unique_id

    def stop(self) -> str:
        """End the group, and with it a broadcast that is in progress. Return why the last one did
        not arrive; "" if nothing was noticed."""
        with self._lock:
            self._drop_group()
            sending = self._sending
        if sending is None:
            return ""
        sending.thread.join(_STOP_S)
        return sending.failed

    def close(self) -> None:
        """End the offer and the group."""
        with self._lock:
            self._offer = None
        self.stop()

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.end.abort()
            self._group = None

    def _send(
        self, group: _OpenGroup, tensors: Mapping[str, Tensor], world_size: int, deadline: float
    ) -> None:
        """Join the group if it is new, and send all packs."""
        sending = self._sending
        assert sending is not None
        try:
            if not group.joined:
                group.end.join(world_size, deadline)
                group.joined = True
            ordered = [tensors[name] for name, _, _ in describe_tensors(tensors)]
            for pack in cut_packs((tensor.nbytes for tensor in ordered), self.pack_bytes):
                # At most two packs exist at a time: the one being filled and the one being sent.
                filled = fill_pack([ordered[index] for index in pack]).to(self._device)
                group.end.finish(deadline)
                group.end.broadcast(filled, deadline)
            group.end.finish(deadline)
        except Exception as error:
            group.end.abort()
            with self._lock:
                if self._group is group:
                    self._group = None
            sending.failed = f"{error}"
            _log.warning("weights were not sent to %s: %s", ", ".join(group.members), error)
