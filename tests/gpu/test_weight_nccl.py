"""The trainer's end of broadcasts on NCCL: alone, which one GPU can run, and with a receiver that
calls NCCL as vLLM does, where there are two GPUs."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import pytest
import torch

from realhf.backends.vllm.broadcast.nccl import LIBRARY, NcclGroup, _UniqueId
from realhf.backends.vllm.broadcast.payloads import BroadcastError
from realhf.backends.vllm.broadcast.sender import WeightSender
from realhf.scheduler.gpus import VISIBLE, visible_gpus

pytestmark = pytest.mark.cuda_only
LIMIT_S = 60.0


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_group_of_one_sends_to_itself(gpu: torch.device) -> None:
    """All functions of the library are called."""
    group = NcclGroup(gpu)
    deadline = time.monotonic() + LIMIT_S
    group.join(1, deadline)
    for _ in range(3):
        pack = torch.arange(200, dtype=torch.uint8, device=gpu)
        group.broadcast(pack, deadline)
        group.finish(deadline)
        assert pack.tolist() == list(range(200))
    group.abort()
    group.abort()
    with pytest.raises(BroadcastError, match="was ended"):
        group.finish(deadline)


@pytest.mark.parametrize("how", ["deadline", "abort"])
def test_a_group_that_nobody_joins_can_be_left(gpu: torch.device, how: str) -> None:
    sender = WeightSender(gpu)
    sender.offer(0, 0, {"a": torch.ones(5, device=gpu)})
    began = time.monotonic()
    assert sender.start(0, 0, ["nobody"], 2, 2.0 if how == "deadline" else LIMIT_S)
    if how == "deadline":
        sender.withdraw()
    assert "join" in sender.stop()
    assert time.monotonic() - began < 20.0
    assert torch.ones(5, device=gpu).sum() == 5, "the GPU computes on"


def _receive(gpu: str, pipe: Connection) -> None:
    """Rank 1: joins, sums one element and receives packs, as vLLM's communicator does."""
    os.environ[VISIBLE] = gpu
    nccl = ctypes.CDLL(LIBRARY)
    unique_id = _UniqueId.from_buffer_copy(pipe.recv())
    comm = ctypes.c_void_p()
    torch.cuda.set_device(0)
    assert nccl.ncclCommInitRank(ctypes.byref(comm), 2, unique_id, 1) == 0
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    one = torch.zeros(1, device="cuda")
    at = ctypes.c_void_p(one.data_ptr())
    assert nccl.ncclAllReduce(at, at, ctypes.c_size_t(1), 7, 0, comm, stream) == 0
    torch.cuda.synchronize()
    for size in iter(pipe.recv, 0):
        pack = torch.zeros(size, dtype=torch.uint8, device="cuda")
        at = ctypes.c_void_p(pack.data_ptr())
        sending = ctypes.c_void_p()
        assert nccl.ncclBroadcast(sending, at, ctypes.c_size_t(size), 1, 0, comm, stream) == 0
        torch.cuda.synchronize()
        pipe.send(digest(pack))


def digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes, which is small enough for a pipe that nobody reads yet."""
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes()).hexdigest()


def test_another_gpu_gets_every_byte(gpu: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=_receive, args=(visible_gpus()[1], other), daemon=True)
    process.start()
    draw = torch.Generator().manual_seed(1)
    tensors = {
        "a": torch.randn(1000, 33, generator=draw).to(gpu),
        "b": torch.randn(70, generator=draw).bfloat16().to(gpu),
        "c": torch.randn(50, 50, generator=draw).bfloat16().to(gpu),
    }
    sender = WeightSender(gpu, pack_bytes=64)
    try:
        for version in range(2):
            sender.offer(version, 0, tensors)
            unique_id = sender.start(version, 0, ["other"], 2, LIMIT_S)
            assert bool(unique_id) == (version == 0), "the group is used again"
            if unique_id:
                own.send(unique_id)
            # Each tensor is a pack, and the one with the wider elements is the first.
            for tensor in tensors.values():
                own.send(tensor.nbytes)
            sender.withdraw()
            for name, tensor in tensors.items():
                assert own.poll(LIMIT_S), f"{name} did not arrive"
                assert own.recv() == digest(tensor), name
        own.send(0)
        assert sender.stop() == ""
    finally:
        process.kill()
        process.join()
