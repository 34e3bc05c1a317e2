"""A server in a process of its own that stands in for vLLM's, with its transfer of weights over
gloo instead of NCCL. Its workers have our own extension. What it has of vLLM's (fields, states,
ranks, packs) is compared with vLLM's sources in ``tests/vllm/test_facts.py``.

Like NCCL, a group does not notice that a rank has died, and one that was left takes nothing and
reports no error.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from realhf.backends.vllm.broadcast.payloads import UNIQUE_ID_BYTES, BroadcastError
from realhf.backends.vllm.extension import WeightExtension

HOST = "127.0.0.1"
LONG = datetime.timedelta(seconds=120)
FIELDS = {"names": list, "dtype_names": list, "shapes": list}
"""Fields of vLLM's NCCLWeightTransferUpdateInfo."""
INIT_FIELDS = {
    "nccl_unique_id_b64": str,
    "rank_offset": int,
    "world_size": int,
    "packed": bool,
    "packed_buffer_size_bytes": int,
    "packed_num_buffers": int,
}
"""Fields of vLLM's NCCLWeightTransferInitInfo that a trainer with a unique id sends."""


_GROUPS: list[dist.ProcessGroupGloo] = []
"""All groups that were joined: the end of one would wait for what it has not received."""


class _GlooRank:
    """One rank of a group over gloo."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = LONG
        self._group = dist.ProcessGroupGloo(store, rank, world_size, options)
        self.left = False
        _GROUPS.append(self._group)

    def broadcast(self, tensor: Tensor, check: Callable[[], None]) -> None:
        """Send or receive a tensor of rank 0; calls ``check`` until then. Nothing happens in a
        group that was left."""
        if self.left:
            return
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([tensor], options)  # pyright: ignore
        while not self.left and not work.is_completed():
            check()
            time.sleep(0.002)
        # NCCL would wait for a dead rank instead of saying so.
        try:
            if not self.left:
                work.wait()
        except RuntimeError:
            while not self.left:
                check()
                time.sleep(0.002)


def _connect(unique_id: bytes) -> Store:
    host, _, port = unique_id.rstrip(b"\0").decode().rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=LONG)


class GlooEnd:
    """``BroadcastGroup`` over gloo; see ``realhf.backends.vllm.broadcast.nccl``."""

    def __init__(self) -> None:
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=LONG)
        self.unique_id = f"{HOST}:{self._store.port}".encode().ljust(UNIQUE_ID_BYTES, b"\0")
        self._rank: _GlooRank | None = None
        self._aborted = False
        self.packs: list[int] = []
        """Sizes of the packs that were sent."""

    def join(self, world_size: int, deadline: float) -> None:
        made: list[_GlooRank] = []
        threading.Thread(
            target=lambda: made.append(_GlooRank(self._store, 0, world_size)), daemon=True
        ).start()
        while not made:
            self._check(deadline, "join")
            time.sleep(0.002)
        self._rank = made[0]

    def broadcast(self, pack: Tensor, deadline: float) -> None:
        assert self._rank is not None
        self.packs.append(pack.nbytes)
        self._rank.broadcast(pack, lambda: self._check(deadline, "receive"))

    def finish(self, deadline: float) -> None:
        self._check(deadline, "receive")

    def abort(self) -> None:
        self._aborted = True

    def _check(self, deadline: float, what: str) -> None:
        if self._aborted:
            raise BroadcastError(f"the group was ended before all servers could {what}")
        if time.monotonic() > deadline:
            self.abort()
            raise BroadcastError(f"not all servers could {what} in time")


def make_gloo_group(device: torch.device) -> tuple[GlooEnd, bytes]:
    """``MakeGroup`` over gloo."""
    assert device.type == "cpu"
    end = GlooEnd()
    return end, end.unique_id


def receive_packs(
    infos: Iterator[tuple[str, list[int], torch.dtype]],
    receive: Callable[[Tensor], None],
    load: Callable[[list[tuple[str, Tensor]]], None],
    pack_bytes: int,
) -> None:
    """What vLLM's ``packed_nccl_broadcast_consumer`` does."""
    names: list[tuple[str, list[int], torch.dtype, int]] = []
    total = 0

    def take() -> None:
        packed = torch.empty(total, dtype=torch.uint8)
        receive(packed)
        pieces = packed.split([size for *_, size in names])
        rows = zip(names, pieces, strict=True)
        load([(name, piece.view(dtype).view(shape)) for (name, shape, dtype, _), piece in rows])

    for name, shape, dtype in infos:
        size = math.prod(shape) * dtype.itemsize
        names.append((name, shape, dtype, size))
        total += size
        if total > pack_bytes:
            take()
            names = []
            total = 0
    if names:
        take()


class Engine:
    """vLLM's NCCLWeightTransferEngine, over gloo."""

    def __init__(self, rank: int, load: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        self.config = SimpleNamespace(backend="nccl")
        self.model_update_group: _GlooRank | None = None
        self._rank = rank
        self._load = load
        self._pack_bytes = 0
        self.packs_left = -1
        """Packs after which the process kills itself; -1: never."""

    def init_transfer_engine(self, info: dict[str, Any]) -> None:
        assert {name: type(value) for name, value in info.items()} == INIT_FIELDS, info
        assert info["packed"] and info["packed_num_buffers"] == 1
        unique_id = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        assert len(unique_id) == UNIQUE_ID_BYTES
        self._pack_bytes = info["packed_buffer_size_bytes"]
        rank = info["rank_offset"] + self._rank
        self.model_update_group = _GlooRank(_connect(unique_id), rank, info["world_size"])

    def receive_weights(self, info: dict[str, Any]) -> None:
        assert {name: type(value) for name, value in info.items()} == FIELDS, info
        assert len(info["names"]) == len(info["dtype_names"]) == len(info["shapes"])
        group = self.model_update_group
        if group is None:
            raise RuntimeError("NCCL weight transfer not initialized.")

        def receive(packed: Tensor) -> None:
            if self.packs_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.packs_left -= 1
            group.broadcast(packed, lambda: None)

        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        infos = zip(info["names"], info["shapes"], dtypes, strict=True)
        receive_packs(infos, receive, self._load, self._pack_bytes)

    def shutdown(self) -> None:
        if self.model_update_group is not None:
            self.model_update_group.left = True
            self.model_update_group = None


PARTS = ("q_proj", "k_proj", "v_proj")
"""Tensors of which a layer is made that vLLM keeps as one."""


class Model(torch.nn.Module):
    """A norm, and two layers of three tensors each that are kept as one."""

    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": list(PARTS)}
        self.config = SimpleNamespace()
        self.norm = _layer(torch.zeros(5))
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            fused = _layer(torch.zeros(9, 5, dtype=torch.bfloat16))
            fused.output_partition_sizes = [3, 3, 3]  # pyright: ignore[reportArgumentType]
            block = torch.nn.Module()
            block.qkv_proj = fused
            self.layers.append(block)


def _layer(weight: Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight)
    return layer


def make_tensors(seed: int) -> dict[str, Tensor]:
    """Tensors of a checkpoint of ``Model``."""
    draw = torch.Generator().manual_seed(seed)
    named = {
        f"layers.{index}.{part}.weight": torch.randn(3, 5, generator=draw).bfloat16()
        for index in range(2)
        for part in PARTS
    }
    return {**named, "norm.weight": torch.randn(5, generator=draw)}


class Worker(WeightExtension):
    """What vLLM's worker has for its transfer. A fused layer is loaded when as many elements have
    arrived as it has, as in vLLM's layerwise reload."""

    def __init__(self, rank: int, workers: int) -> None:
        self.model = Model()
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.weight_transfer_engine = Engine(rank, self._load)
        self.calls: list[str] = []
        """Calls to this worker and its server, in their order."""
        self._workers = workers
        self._active = False
        self._arrived: dict[str, list[tuple[str, Tensor]]] = {}
        self.flips = False
        """Whether a bit is flipped in what was loaded."""

    def place(self) -> dict[str, Any]:
        return {"uuid": "GPU-9", "backend": "nccl", "workers": self._workers, "replicas": 1}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("join")
        self.weight_transfer_engine.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.calls.append("start")
        if self._active:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active."
            )
        self._active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        if not self._active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.weight_transfer_engine.receive_weights(update_info)
        except BaseException:
            self._active = False
            raise

    def finish_weight_update(self) -> None:
        self.calls.append("finish")
        if not self._active:
            raise RuntimeError("finish_weight_update called without a start_weight_update.")
        for layer in list(self._arrived):
            self._process(layer)
        self._active = False
        if self.flips:
            self.model.norm.weight.data.view(torch.uint8)[0] ^= 1  # pyright: ignore

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.calls.append("reload")
        self._load(list(weights_iterator))

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            layer = name.removesuffix(".weight").replace(name.split(".")[-2], "qkv_proj")
            if name == "norm.weight":
                self.model.norm.weight.data.copy_(tensor)  # pyright: ignore
                continue
            rows = self._arrived.setdefault(layer, [])
            rows.append((name, tensor))
            if sum(each.numel() for _, each in rows) >= 45:
                self._process(layer)

    def _process(self, layer: str) -> None:
        weight = self.model.get_submodule(layer).weight
        for name, tensor in self._arrived.pop(layer):
            at = 3 * PARTS.index(name.split(".")[-2])
            weight.data[at : at + 3].copy_(tensor)  # pyright: ignore


class StandIn:
    """The server's HTTP side."""

    def __init__(self, workers: int) -> None:
        self.workers = [Worker(rank, workers) for rank in range(workers)]
        self._pool = ThreadPoolExecutor(workers)
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}"
                try:
                    answer: Any = told.answer(self.path.partition("?")[0], json.loads(raw))
                    status = 200
                except Exception as error:
                    status = 500
                    answer = {"error": f"{type(error).__name__}: {error}"}
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self._http.server_port}"

    def serve(self) -> None:
        self._http.serve_forever(0.05)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"root": "org/model", "max_model_len": 32}]}
        if path == "/server_info":
            config = {
                "model_config": {"logprobs_mode": "processed_logprobs"},
                "device_config": {"device": "cuda"},
                "parallel_config": {
                    "worker_extension_cls": "realhf.backends.vllm.extension.WeightExtension"
                },
                "scheduler_config": {"enable_chunked_prefill": True},
            }
            return {"vllm_config": config}
        if path == "/collective_rpc":
            calls = [
                self._pool.submit(getattr(worker, body["method"]), **body.get("kwargs", {}))
                for worker in self.workers
            ]
            return {"results": [call.result() for call in calls]}
        if path == "/test":
            for worker in self.workers:
                worker.flips = body.get("flips", worker.flips)
                engine = worker.weight_transfer_engine
                engine.packs_left = body.get("packs_left", engine.packs_left)
            return [worker.calls for worker in self.workers]
        name = path.strip("/").replace("update_weight_version", "version")
        for worker in self.workers:
            worker.calls.append(name)
        return {}


def serve(workers: int, told: Connection) -> None:
    """Run a server, and send its address."""
    torch.set_num_threads(1)
    server = StandIn(workers)
    told.send(server.url)
    server.serve()
