"""Rank 0 of a group of NCCL, through the library that torch has loaded.

torch's own process groups exchange the unique id in a way that vLLM does not know, and end the
process when a rank dies; ``torch.cuda.nccl`` cannot abort. vLLM calls the library in the same way.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from realhf.backends.vllm.broadcast.payloads import UNIQUE_ID_BYTES, BroadcastError

LIBRARY = "libnccl.so.2"
_POLL_S = 0.002
"""Seconds between two looks at a group that is being joined."""
_SUCCESS = 0
_IN_PROGRESS = 7
_UINT8 = 1
_FLOAT32 = 7
_SUM = 0
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400
"""Version 2.14 of the configuration of a group, which newer libraries read as well."""


class BroadcastGroup(Protocol):
    """The trainer's end of a group. ``abort`` may be called from any thread."""

    def join(self, world_size: int, deadline: float) -> None:
        """Wait until all ranks have joined. Raises BroadcastError after ``deadline``, a time of
        ``time.monotonic``."""
        ...

    def broadcast(self, pack: Tensor, deadline: float) -> None:
        """Start to send the bytes of a tensor to all ranks, in the order of the calls. Raises
        BroadcastError like ``finish``."""
        ...

    def finish(self, deadline: float) -> None:
        """Wait until everything was received. Raises BroadcastError after ``deadline`` or
        ``abort``."""
        ...

    def abort(self) -> None:
        """End the group, also during ``join`` and ``finish``. A second call does nothing."""
        ...


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as of version 2.14."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


def find_nccl_problem() -> str:
    """Return why this process cannot use NCCL; "" if it can."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no GPU of CUDA is visible to the trainer"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"{LIBRARY} cannot be loaded: {error}"
    return ""


class NcclGroup:
    """``Group`` on a GPU of this process. ``unique_id`` is what the other ranks join with.

    Raises BroadcastError if NCCL cannot make an id.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nccl = ctypes.CDLL(LIBRARY)
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._id = _UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(self._id)))
        self.unique_id = ctypes.string_at(ctypes.byref(self._id), UNIQUE_ID_BYTES)
        self._comm = ctypes.c_void_p()
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._aborted = False

    def join(self, world_size: int, deadline: float) -> None:
        """See ``Group``."""
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        with torch.cuda.device(self._device):
            self._call(
                "join",
                self._nccl.ncclCommInitRankConfig,
                ctypes.byref(self._comm),
                world_size,
                self._id,
                0,
                ctypes.byref(config),
            )
            self._wait(deadline, "join")
            # vLLM sums one element when it has joined, and waits for all ranks.
            warm_up = torch.zeros(1, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._call(
                "join",
                self._nccl.ncclAllReduce,
                ctypes.c_void_p(warm_up.data_ptr()),
                ctypes.c_void_p(warm_up.data_ptr()),
                ctypes.c_size_t(1),
                _FLOAT32,
                _SUM,
                self._comm,
                ctypes.c_void_p(self._stream.cuda_stream),
            )
        self.finish(deadline)

    def broadcast(self, pack: Tensor, deadline: float) -> None:
        """See ``Group``."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            pack.record_stream(self._stream)
            address = ctypes.c_void_p(pack.data_ptr())
            self._call(
                "receive",
                self._nccl.ncclBroadcast,
                address,
                address,
                ctypes.c_size_t(pack.nbytes),
                _UINT8,
                0,
                self._comm,
                ctypes.c_void_p(self._stream.cuda_stream),
            )
        # Until NCCL has accepted a call it takes no other one.
        self._wait(deadline, "receive")

    def finish(self, deadline: float) -> None:
        """See ``Group``."""
        self._wait(deadline, "receive")
        done = torch.cuda.Event()
        done.record(self._stream)
        while not done.query():
            self._check_alive(deadline, "receive")
            time.sleep(_POLL_S)
        self._check_alive(deadline, "receive")

    def abort(self) -> None:
        """See ``Group``."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            if self._comm:
                with torch.cuda.device(self._device):
                    self._nccl.ncclCommAbort(self._comm)

    def _call(self, what: str, function: Callable[..., int], *arguments: object) -> None:
        """Call NCCL unless the group was ended; ``what`` the servers then could not do.

        ``abort`` frees the communicator from another thread, so the two exclude each other. The
        calls do not block (``_Config.blocking`` is 0).
        """
        with self._lock:
            self._check_not_ended(what)
            self._check(function(*arguments))

    def _wait(self, deadline: float, what: str) -> None:
        """Wait until the group has accepted all calls, which do not block."""
        state = ctypes.c_int(_IN_PROGRESS)
        while True:
            self._check_alive(deadline, what)
            asked = self._nccl.ncclCommGetAsyncError
            self._call(what, asked, self._comm, ctypes.byref(state))
            if state.value != _IN_PROGRESS:
                break
            time.sleep(_POLL_S)
        self._check(state.value)

    def _check_alive(self, deadline: float, what: str) -> None:
        self._check_not_ended(what)
        if time.monotonic() > deadline:
            self.abort()
            raise BroadcastError(f"not all servers could {what} in time")

    def _check_not_ended(self, what: str) -> None:
        if self._aborted:
            raise BroadcastError(f"the group was ended before all servers could {what}")

    def _check(self, result: int) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise BroadcastError(f"NCCL: {self._nccl.ncclGetErrorString(result).decode()}")
