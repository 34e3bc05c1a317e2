"""Weights that travel through memory of a GPU: what can be known of it without one.

A worker stands in for vLLM's: it has the methods of its transfer, and finds a buffer by its handle where CUDA would.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.backends.vllm import device_transfer, generation
from realhf.backends.vllm.api import VllmError
from realhf.backends.vllm.device_transfer import (
    Place,
    chunks,
    common_places,
    described,
    fill,
    from_json,
    steps,
    to_json,
)
from realhf.backends.vllm.extension import WeightExtension
from realhf.backends.vllm.generation import EXTENSION, VllmGenerator
from realhf.base.tensor_digest import digests

CPU = torch.device("cpu")
HANDLE = (
    torch.Tensor, torch.Size([64]), (1,), 0, torch.storage.UntypedStorage, torch.uint8, 0, b"\x00handle\xff", 64, 0,
    False, b"counter", 3, b"event", True,
)  # fmt: skip


def test_a_handle_is_the_same_after_its_way_as_json() -> None:
    """What ``torch.multiprocessing`` gives for a tensor of CUDA, by its source: three classes of parts, no pickle."""
    text = json.dumps(to_json(HANDLE))
    assert from_json(json.loads(text)) == HANDLE
    assert from_json(to_json((torch.device("cuda", 2), None))) == (2, None)
    with pytest.raises(TypeError, match="with a SimpleNamespace"):
        to_json((SimpleNamespace(),))


@pytest.mark.parametrize(
    "parts",
    [
        "a text", {"class": "Tensor"}, [{"class": "__import__"}], [{"class": ["Tensor"]}], [{"dtype": "save"}],
        [{"dtype": "nn"}], [{"bytes": "no base64!"}], [{"bytes": "A" * 5000}], [{"sizes": ["1"]}], [{"sizes": 3}],
        [{"class": "Tensor", "dtype": "uint8"}], [["nested"]], [1.5], ["text"], [0] * 33, [{"device": "cpu"}],
    ],
)  # fmt: skip
def test_what_is_no_handle_is_refused(parts: Any) -> None:
    with pytest.raises(ValueError):
        from_json(parts)


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "norm.weight": torch.randn(3, generator=draw, dtype=torch.float32).bfloat16(),
        "gate.weight": torch.randn(5, 3, generator=draw),
        "up.weight": torch.randn(3, 5, generator=draw).t(),
        "count": torch.tensor([7], dtype=torch.int64),
        "thin.weight": torch.randn(9, generator=draw).bfloat16(),
    }


@pytest.mark.parametrize("most", [1, 64, 100, 1 << 20])
def test_chunks_fit_the_buffer_and_every_tensor_its_alignment(most: int) -> None:
    given = tensors()
    parts = chunks(given, most)
    assert sorted(name for part in parts for name in part) == sorted(given)
    for part in parts:
        sizes = [given[name].nbytes for name in part]
        assert sum(sizes) <= most or len(part) == 1
        buffer = torch.full((sum(sizes),), 255, dtype=torch.uint8)
        fill(buffer, part, given)
        told = described(part, given)
        assert told["tensor_sizes"] == sizes
        pieces = zip(buffer.split(told["tensor_sizes"]), told["dtype_names"], told["shapes"], part, strict=True)
        for piece, dtype, shape, name in pieces:
            assert torch.equal(piece.view(getattr(torch, dtype)).view(shape), given[name]), "as the server reads it"
    assert chunks({}) == []


class Model(torch.nn.Module):
    """Has the tensors of ``tensors``, but for the one it has under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        for name in ("norm", "gate", "up", "thin"):
            own = "router" if name == "gate" else name
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(torch.zeros_like(tensors()[f"{name}.weight"]).contiguous())
            self.add_module(own, layer)


class Worker(WeightExtension):
    """Has what vLLM's worker has for its transfer; ``broken``: the chunk that it cannot load."""

    def __init__(self) -> None:
        self.model, self.opened, self.calls, self.broken = Model(), dict[bytes, Tensor](), list[str](), -1
        self.weight_transfer_engine = SimpleNamespace(config=SimpleNamespace(backend="ipc"), shutdown=self.opened.clear)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert init_info == {"packed": True}
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update: dict[str, Any]) -> None:
        self.calls.append("update")
        if self.calls.count("update") == self.broken:
            raise RuntimeError("no such memory")
        (handle,) = update["ipc_handles"].values()
        pieces = self.opened[handle[0]][: sum(update["tensor_sizes"])].split(update["tensor_sizes"])
        own = dict(self.model.named_parameters())
        rows = zip(update["names"], pieces, update["dtype_names"], update["shapes"], strict=True)
        for name, piece, dtype, shape in rows:
            target = own.get(name.replace("gate", "router"))
            if target is not None:
                target.data.copy_(piece.view(getattr(torch, dtype)).view(shape))

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def exporting(worker: Worker) -> Callable[[Tensor], Sequence[Any]]:
    def export(buffer: Tensor) -> Sequence[Any]:
        worker.opened[b"handle"] = buffer
        return (b"handle",)

    return export


def test_a_worker_takes_the_chunks_and_says_what_it_holds() -> None:
    worker, given = Worker(), tensors()
    with steps(4, given, [Place(CPU, "GPU-1")], most=40, export=exporting(worker)) as made:
        for method, arguments in made:
            answer = getattr(worker, method)(**json.loads(json.dumps(arguments)))
            assert answer["ok"], answer
    assert answer == {"ok": True, "version": 4}
    assert worker.calls == ["init", "start", *["update"] * len(chunks(given, 40)), "finish"]
    told = worker.weight_digests()
    expected = {n: d for n, d in digests({n: t.contiguous() for n, t in given.items()}).items() if n[-6:] == "weight"}
    assert {n: row[1] for n, row in told["held"].items() if n in given} == {
        name: digest for name, digest in expected.items() if name != "gate.weight"
    }
    assert sorted(told["unproven"]) == ["count", "gate.weight"]


def test_a_worker_that_fails_half_way_says_so_and_can_begin_anew() -> None:
    worker = Worker()
    worker.broken = 2
    with steps(4, tensors(), [Place(CPU, "GPU-1")], most=40, export=exporting(worker)) as made:
        found = [getattr(worker, method)(**arguments) for method, arguments in itertools.islice(made, 3)]
    assert [answer["ok"] for answer in found] == [True, True, False]
    assert found[2] == {"ok": False, "error": "RuntimeError: no such memory", "touched": True}
    assert not worker.take_chunk([], [], [], [], {"GPU-1": [{"class": "os"}]})["ok"], "handles are read, not run"
    worker.broken = -1
    with steps(5, tensors(), [Place(CPU, "GPU-1")], export=exporting(worker)) as made:
        assert all(getattr(worker, method)(**arguments)["ok"] for method, arguments in made)


@pytest.mark.parametrize("how", ["refused", "unfilled", "cut off", "left"])
def test_a_transfer_that_breaks_off_gives_its_buffer_back_at_once(how: str) -> None:
    """The last buffer stayed with the calls that nobody made any more, with the traceback of what went wrong, and open
    in the server."""
    worker, given = Worker(), tensors()
    worker.broken = 2 if how == "refused" else -1
    buffers = list[weakref.ref[Tensor]]()

    def export(buffer: Tensor) -> Sequence[Any]:
        buffers.append(weakref.ref(buffer))
        return exporting(worker)(buffer)

    calls: list[Iterator[device_transfer.Step]] = []
    failures: list[BaseException] = []
    try:
        with steps(4, given, [Place(CPU, "GPU-1")], most=40, export=export) as made:
            calls.append(made)
            next(made)
            assert not buffers, "nothing is handed out before the server has agreed"
            worker.take_chunk(**next(made)[1])
            if how == "unfilled":
                given.update(dict.fromkeys(given, None))  # type: ignore[arg-type]
            if how == "cut off":
                raise TimeoutError("no answer")
            if how != "left":
                assert not worker.take_chunk(**next(made)[1])["ok"]
                raise RuntimeError("the server did not take it")
    except (AttributeError, RuntimeError, TimeoutError) as error:
        failures.append(error)
    assert len(failures) == (how != "left") and len(calls) == len(buffers) == 1
    if how != "refused":
        assert worker.opened, "the server has it until the next transfer begins"
        worker.begin_transfer()
    assert not worker.opened and buffers[0]() is None


def test_a_server_is_on_our_gpus_or_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"uuid": "b", "transfer": True}
    assert common_places([here]) == [], "no GPU"
    assert WeightExtension().place() == {"uuid": None, "transfer": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ab"[index]))
    assert common_places([here]) == [Place(torch.device("cuda", 1), "b")]
    assert [place.uuid for place in common_places([here, {"uuid": "a", "transfer": True}, here])] == ["b", "a"]
    for other in ({"uuid": "c", "transfer": True}, {"uuid": "b", "transfer": False}, None, {}):
        assert common_places([here, other]) == []
    assert common_places([]) == []


@pytest.fixture
def served() -> Iterator[tuple[str, Worker]]:
    """A server with one such worker, which says that it computes on a GPU."""
    worker = Worker()
    config = {
        "model_config": {"logprobs_mode": "processed_logprobs"},
        "device_config": {"device": "cuda"},
        "parallel_config": {"worker_extension_cls": EXTENSION},
        "scheduler_config": {"enable_chunked_prefill": True},
    }
    fixed: dict[str, Any] = {
        "/v1/models": {"data": [{"root": "org/model", "max_model_len": 32}]},
        "/server_info": {"vllm_config": config},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
            answer = fixed.get(self.path.partition("?")[0], {})
            if self.path == "/collective_rpc":
                answer = {"results": [getattr(worker, body["method"])(**body["kwargs"])]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", worker
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_engine_on_the_servers_gpu_sends_no_file(
    served: tuple[str, Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, worker = served
    monkeypatch.setattr(generation, "common_places", lambda asked: [Place(CPU, "GPU-1")])
    monkeypatch.setattr(device_transfer, "_exported", exporting(worker))
    monkeypatch.setattr(generation, "file_in_memory", None)
    engine = VllmGenerator(url)
    try:
        engine.load_weights(3, tensors())
        assert engine.version == 3 and worker.calls[-1] == "finish"
        held = engine.weight_digests(["norm.weight", "gate.weight"])
        assert held["norm.weight"].digest == digests(tensors())["norm.weight"] and not held["gate.weight"].proven
        worker.broken = worker.calls.count("update") + 1
        with pytest.raises(VllmError, match="did not take version 4: RuntimeError: no such memory"):
            engine.load_weights(4, tensors())
        with pytest.raises(VllmError, match="weights of two versions"):
            engine.load_weights(5, tensors())
    finally:
        engine.close()
    monkeypatch.setattr(generation, "common_places", lambda asked: [])
    VllmGenerator(url).close()
    assert "weights go through the host's memory" in caplog.text
