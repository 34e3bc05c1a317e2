"""The trainer's end of broadcasts: what it offers and until when, and groups that it keeps."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.backends.vllm.broadcast import sender as sender_module
from realhf.backends.vllm.broadcast.nccl import NcclGroup, find_nccl_problem
from realhf.backends.vllm.broadcast.payloads import BroadcastError
from realhf.backends.vllm.broadcast.sender import WeightSender

TENSORS = {"a": torch.arange(6.0), "b": torch.ones(3).bfloat16()}
LIMIT_S = 20.0


class Ends:
    """Makes ends of groups that note what they are asked. Receivers wait for ``reached``."""

    def __init__(self) -> None:
        self.made: list[End] = []
        self.reached = threading.Event()
        self.reached.set()

    def __call__(self, device: torch.device) -> tuple[End, bytes]:
        self.made.append(End(self.reached))
        return self.made[-1], bytes([len(self.made)]) * 128


class End:
    def __init__(self, reached: threading.Event) -> None:
        self.ranks = 0
        self.packs: list[Tensor] = []
        self.aborted = False
        self._reached = reached

    def join(self, world_size: int, deadline: float) -> None:
        self.ranks = world_size

    def broadcast(self, pack: Tensor, deadline: float) -> None:
        self.packs.append(pack.clone())

    def finish(self, deadline: float) -> None:
        while not self._reached.wait(0.005):
            if self.aborted or time.monotonic() > deadline:
                raise BroadcastError("not all servers could receive in time")

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def sender(ends: Ends) -> WeightSender:
    return WeightSender(torch.device("cpu"), make_group=ends, pack_bytes=16)


def test_only_what_is_offered_is_sent(ends: Ends, sender: WeightSender) -> None:
    assert sender.start(0, 0, ["x"], 2, LIMIT_S) is None, "nothing was offered"
    sender.offer(3, 0, TENSORS)
    for other in ((2, 0), (3, 1)):
        assert sender.start(*other, ["x"], 2, LIMIT_S) is None
    assert sender.start(3, 0, ["x"], 2, LIMIT_S) == b"\1" * 128
    sender.withdraw()
    assert sender.start(3, 0, ["x"], 2, LIMIT_S) is None
    (end,) = ends.made
    assert end.ranks == 2
    sent = [pack.view(torch.float32 if pack.nbytes == 24 else torch.bfloat16) for pack in end.packs]
    assert [each.tolist() for each in sent] == [TENSORS["a"].tolist(), TENSORS["b"].tolist()]


def test_a_group_is_kept_while_its_members_are_the_same(ends: Ends, sender: WeightSender) -> None:
    ids = []
    for version, members in enumerate((["x", "y"], ["x", "y"], ["y"], ["x", "y"])):
        sender.offer(version, 0, TENSORS)
        ids.append(sender.start(version, 0, members, 1 + len(members), LIMIT_S))
    sender.withdraw()
    assert ids == [b"\1" * 128, b"", b"\2" * 128, b"\3" * 128]
    assert [end.aborted for end in ends.made] == [True, True, False], "an old group is ended"
    assert sender.stop() == "" and ends.made[-1].aborted
    sender.offer(4, 0, TENSORS)
    assert sender.start(4, 0, ["x", "y"], 3, LIMIT_S) == b"\4" * 128, "a new one after an end"


def test_tensors_do_not_change_before_they_were_sent(ends: Ends, sender: WeightSender) -> None:
    ends.reached.clear()
    tensors = {"a": torch.zeros(4)}
    sender.offer(0, 0, tensors)
    sender.start(0, 0, ["x"], 2, LIMIT_S)
    with pytest.raises(BroadcastError, match=r"another broadcast .* in progress"):
        sender.start(0, 0, ["x"], 2, LIMIT_S)

    def train() -> None:
        sender.withdraw()
        tensors["a"].add_(1)

    training = threading.Thread(target=train)
    training.start()
    training.join(0.05)
    assert training.is_alive() and tensors["a"].sum() == 0
    ends.reached.set()
    training.join(LIMIT_S)
    assert tensors["a"].sum() == 4
    assert all(pack.sum() == 0 for pack in ends.made[0].packs)


def test_a_broadcast_that_does_not_arrive_ends_its_group(ends: Ends, sender: WeightSender) -> None:
    ends.reached.clear()
    sender.offer(0, 0, TENSORS)
    sender.start(0, 0, ["x"], 2, 0.02)
    sender.withdraw()
    assert ends.made[0].aborted
    assert sender.stop() == "not all servers could receive in time"
    sender.offer(1, 0, TENSORS)
    sender.start(1, 0, ["x"], 2, LIMIT_S)
    assert sender.stop() == "not all servers could receive in time", "the master ended this one"
    assert len(ends.made) == 2 and ends.made[1].aborted


def test_tensors_are_not_changed_under_a_broadcast_that_does_not_end(
    ends: Ends, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of NCCL that never returns must not stop the trainer without a word."""
    monkeypatch.setattr(sender_module, "_STOP_S", 0.05)
    stuck = threading.Event()
    monkeypatch.setattr(End, "finish", lambda end, deadline: stuck.wait())
    sender.offer(0, 0, TENSORS)
    sender.start(0, 0, ["x"], 2, 0.02)
    with pytest.raises(BroadcastError, match=r"did not end .*async_rl\.weights=shm"):
        sender.withdraw()
    stuck.set()
    sender.withdraw()
    sender.close()


class Library:
    """The functions of NCCL that a group calls until it is joined. Counts communicators, and uses
    of one that ``ncclCommAbort`` has freed."""

    def __init__(self) -> None:
        self.alive = 0
        self.used_after_end = 0
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def ncclCommInitRankConfig(self, comm: Any, *more: object) -> int:
        self.entered.set()
        self.go_on.wait(LIMIT_S)
        ctypes.cast(comm, ctypes.POINTER(ctypes.c_void_p))[0] = 9
        self.alive += 1
        return 0

    def ncclCommGetAsyncError(self, *more: object) -> int:
        self.used_after_end += not self.alive
        return 0  # leaves "in progress", as if a rank were missing

    def ncclCommAbort(self, comm: object) -> int:
        self.alive -= 1
        return 0


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_end_leaves_no_communicator(when: str) -> None:
    """Whenever it comes, also while another thread makes the communicator."""
    library = Library()
    group = NcclGroup.__new__(NcclGroup)
    group._device = -1  # type: ignore[assignment]  # torch does nothing for this one
    group._nccl = library  # type: ignore[assignment]
    group._comm = ctypes.c_void_p()
    group._id = None  # type: ignore[assignment]
    group._lock = threading.Lock()
    group._aborted = False
    if when == "before":
        group.abort()
    errors: list[str] = []

    def join() -> None:
        try:
            group.join(2, time.monotonic() + LIMIT_S)
        except BroadcastError as error:
            errors.append(str(error))

    joining = threading.Thread(target=join)
    joining.start()
    if when != "before":
        assert library.entered.wait(LIMIT_S)
        if when == "after":
            library.go_on.set()
            time.sleep(0.05)
        ending = threading.Thread(target=group.abort)
        ending.start()
        time.sleep(0.05)
        library.go_on.set()
        ending.join(LIMIT_S)
    joining.join(LIMIT_S)
    assert errors == ["the group was ended before all servers could join"]
    assert library.alive == 0 and library.used_after_end == 0


def test_ranks_meet_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reads the interface when it makes the id at which they meet."""
    seen: list[str] = []

    def make(device: torch.device) -> Any:
        seen.append(os.environ["NCCL_SOCKET_IFNAME"])
        return SimpleNamespace(unique_id=b"id")

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(sender_module, "find_nccl_problem", lambda: "")
    monkeypatch.setattr(sender_module, "NcclGroup", make)
    cpu = torch.device("cpu")
    assert sender_module.make_nccl_group(cpu)[1] == b"id"
    sender_module.make_nccl_group(cpu, interface="eth1")
    assert seen == ["=lo", "=eth1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_says_why_it_cannot_be() -> None:
    assert find_nccl_problem() == "no GPU of CUDA is visible to the trainer"
    sender = WeightSender(torch.device("cpu"))
    sender.offer(0, 0, TENSORS)
    with pytest.raises(BroadcastError, match=r"no GPU of CUDA"):
        sender.start(0, 0, ["x"], 2, LIMIT_S)
