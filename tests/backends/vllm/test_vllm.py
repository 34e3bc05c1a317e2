"""What of the vLLM engine can be tested without vLLM: weights on their way, through a file and
through memory of a GPU, the guard, what a wrong server is told.

A worker stands in for vLLM's: it has the methods of its transfer, and finds a buffer by its handle
where CUDA would.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.api.keys import dtype_tag
from realhf.backends.vllm import device_transfer, generation
from realhf.backends.vllm import guard as vllm_guard
from realhf.backends.vllm.api import VllmError, position_seed
from realhf.backends.vllm.device_transfer import (
    ServerGpu,
    describe_chunk,
    fill_buffer,
    find_common_gpus,
    from_json,
    split_chunks,
    to_json,
    transfer_calls,
)
from realhf.backends.vllm.extension import WeightExtension
from realhf.backends.vllm.generation import (
    EXTENSION,
    VllmGenerator,
    check_tensors,
    file_in_memory,
    folder_on_disk,
    parse_server_digests,
)
from realhf.backends.vllm.server import VllmServer
from realhf.base.hf_config import tensor_shapes
from realhf.base.tensor_digest import digest_tensors
from realhf.dataflow.weight_proof import EngineWeightDigests
from tests.process_family import gone

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.tensor([1, -2], dtype=torch.bfloat16),
}


class FakeServer:
    """Answers GET and POST from ``answers``, path -> (status, JSON), and 404 to anything else.
    Calls of its workers reach ``workers``, if there are any."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, object]] = started()
        self.workers: list[Any] = []
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}"
                )
                path = self.path.partition("?")[0]
                status, answer = told.answers.get(path, (404, {"detail": "Not Found"}))
                if path == "/collective_rpc" and told.workers:
                    results = [
                        getattr(worker, body["method"])(**body["kwargs"]) for worker in told.workers
                    ]
                    status = 200
                    answer = {"results": results}
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def started(
    mode: str = "processed_logprobs",
    chunked: bool = False,
    device: str = "cpu",
    extension: str = "",
) -> dict[str, tuple[int, object]]:
    """What a server answers that was started so; by default as it must be."""
    config = {
        "model_config": {"logprobs_mode": mode},
        "device_config": {"device": device},
        "parallel_config": {"worker_extension_cls": extension},
        "scheduler_config": {"enable_chunked_prefill": chunked},
    }
    done = ("/inference/v1/abort_requests", "/resume", "/pause", "/update_weight_version")
    return {
        "/v1/models": (200, {"data": [{"root": "org/model", "max_model_len": 32}]}),
        "/server_info": (200, {"vllm_config": config}),
        **dict.fromkeys(done, (200, {})),
    }


@pytest.fixture
def served() -> Iterator[FakeServer]:
    with closing(FakeServer()) as server:
        yield server


@pytest.mark.parametrize(
    "path, answer, word",
    [
        ("/server_info", None, "VLLM_SERVER_DEV_MODE=1"),
        (
            "/server_info",
            started("raw_logprobs")["/server_info"],
            "--logprobs-mode processed_logprobs",
        ),
        ("/server_info", started(chunked=True)["/server_info"], "--no-enable-chunked-prefill"),
        (
            "/inference/v1/abort_requests",
            (403, {"error": "--enable-scale-out"}),
            "--enable-scale-out",
        ),
    ],
)
def test_a_server_that_was_started_wrongly_is_told_what_it_lacks(
    served: FakeServer, path: str, answer: object, word: str
):
    if answer is None:
        del served.answers[path]
    else:
        served.answers[path] = answer
    with pytest.raises(VllmError, match=word):
        VllmGenerator(served.url)


def test_nobody_there():
    with pytest.raises(VllmError, match=r"127\.0\.0\.1:9/"):
        VllmGenerator("http://127.0.0.1:9")


def test_a_tied_head_is_not_left_to_a_server_without_our_extension(served: FakeServer):
    with closing(VllmGenerator(served.url)) as generator:
        with pytest.raises(VllmError, match="--worker-extension-cls realhf"):
            generator.load_weights(1, TENSORS)
        assert generator.version == -1


def test_weights_that_may_be_mixed_are_never_used(served: FakeServer):
    served.answers["/collective_rpc"] = (500, {"error": "half way"})
    with closing(VllmGenerator(served.url)) as generator:
        for said in ("half way", "two versions"):
            with pytest.raises(VllmError, match=said):
                generator.load_weights(1, {**TENSORS, "lm_head.weight": torch.ones(1)})


def test_weights_are_checked_by_name_and_shape(tmp_path: Path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    expected = tensor_shapes(tmp_path)
    assert expected == {"a": (2, 3), "b.weight": (2,)} and tensor_shapes(tmp_path / "none") == {}
    strided = torch.zeros(3, 2).t()
    given = check_tensors({**TENSORS, "a": strided, "lm_head.weight": torch.ones(9)}, expected)
    assert given.keys() == expected.keys() and given["a"].is_contiguous()
    for wrong, word in (
        ({"a": TENSORS["a"]}, "b.weight"),
        ({**TENSORS, "c": strided}, "unknown.*c"),
        ({**TENSORS, "a": TENSORS["a"].t()}, r"a has shape \(3, 2\)"),
    ):
        with pytest.raises(ValueError, match=word):
            check_tensors(wrong, expected)


def test_weights_can_be_read_while_they_are_offered_and_not_after():
    with file_in_memory(TENSORS) as path:
        read = subprocess.run(
            [sys.executable, "-c", "import sys; print(len(open(sys.argv[1], 'rb').read()))", path],
            capture_output=True,
            text=True,
            check=True,
        )
        found = load_file(path)
        assert int(read.stdout) > 28
    assert (
        all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        and not Path(path).exists()
    )
    with folder_on_disk(TENSORS) as folder:
        assert load_file(Path(folder) / "model.safetensors").keys() == TENSORS.keys()
    assert not Path(folder).exists()


def test_a_turn_does_not_repeat_the_random_numbers_of_the_turn_before():
    seeds = {position_seed(seed, position) for seed in range(30) for position in range(30)}
    assert len(seeds) == 900 and all(0 <= seed < 2**63 for seed in seeds)
    assert position_seed(3, 5) == position_seed(3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_the_guard_ends_a_whole_session_when_its_owner_goes(number: signal.Signals | None):
    script = "sleep 300 & echo $$ $!; wait"
    guard = subprocess.Popen(
        [sys.executable, vllm_guard.__file__, "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdin is not None and guard.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in guard.stdout.readline().split()]
    if number is None:
        guard.stdin.close()
    else:
        guard.send_signal(number)
    guard.wait(60)
    assert gone(processes, 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("echo no such model: $2 >&2; exit 7", RuntimeError, r"code 7\): no such model: org/model"),
        (
            "echo 'ValueError: No available memory for the cache blocks.'; exit 1",
            RuntimeError,
            r"cache blocks\.\s+; engine\.gpu_memory_utilization is its share",
        ),
        ("exec sleep 300", TimeoutError, r"within 0\.5 s"),
    ],
    ids=["ends", "no memory", "does not come up"],
)
def test_a_server_that_does_not_serve_is_stopped_and_told_with_its_words(
    tmp_path: Path, script: str, error: type[Exception], said: str
) -> None:
    executable = tmp_path / "vllm"
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    server = VllmServer("org/model", executable=executable, log=tmp_path / "run" / "log.txt")
    assert (
        tmp_path / "run" / "vllm_imports" / "realhf" / "backends" / "vllm" / "extension.py"
    ).exists()
    with pytest.raises(error, match=said):
        server.wait_until_up(0.5 if error is TimeoutError else 60)
    assert server.process.poll() is not None


CPU = torch.device("cpu")
HANDLE = (
    torch.Tensor, torch.Size([64]), (1,), 0, torch.storage.UntypedStorage, torch.uint8, 0,
    b"\x00handle\xff", 64, 0, False, b"counter", 3, b"event", True,
)  # fmt: skip


def test_a_handle_is_the_same_after_its_way_as_json() -> None:
    """What ``torch.multiprocessing`` gives for a tensor of CUDA, by its source: three classes of
    parts, no pickle."""
    text = json.dumps(to_json(HANDLE))
    assert from_json(json.loads(text)) == HANDLE
    assert from_json(to_json((torch.device("cuda", 2), None))) == (2, None)
    with pytest.raises(TypeError, match="with a SimpleNamespace"):
        to_json((SimpleNamespace(),))


@pytest.mark.parametrize(
    "parts",
    [
        "a text", {"class": "Tensor"}, [{"class": "__import__"}], [{"class": ["Tensor"]}],
        [{"dtype": "save"}], [{"dtype": "nn"}], [{"bytes": "no base64!"}], [{"bytes": "A" * 5000}],
        [{"sizes": ["1"]}], [{"sizes": 3}], [{"class": "Tensor", "dtype": "uint8"}],
        [["nested"]], [1.5], ["text"], [0] * 33, [{"device": "cpu"}],
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
    parts = split_chunks(given, most)
    assert sorted(name for part in parts for name in part) == sorted(given)
    for part in parts:
        sizes = [given[name].nbytes for name in part]
        assert sum(sizes) <= most or len(part) == 1
        buffer = torch.full((sum(sizes),), 255, dtype=torch.uint8)
        fill_buffer(buffer, part, given)
        told = describe_chunk(part, given)
        assert told["tensor_sizes"] == sizes
        pieces = zip(
            buffer.split(told["tensor_sizes"]),
            told["dtype_names"],
            told["shapes"],
            part,
            strict=True,
        )
        for piece, dtype, shape, name in pieces:
            assert torch.equal(piece.view(getattr(torch, dtype)).view(shape), given[name]), (
                "as the server reads it"
            )
    assert split_chunks({}) == []


class Model(torch.nn.Module):
    """Has the tensors of ``tensors``, but for the one it has under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        for name in ("norm", "gate", "up", "thin"):
            own = "router" if name == "gate" else name
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(
                torch.zeros_like(tensors()[f"{name}.weight"]).contiguous()
            )
            self.add_module(own, layer)


class Worker(WeightExtension):
    """Has what vLLM's worker has for its transfer; ``broken``: the chunk that it cannot load."""

    def __init__(self) -> None:
        self.model = Model()
        self.opened = dict[bytes, Tensor]()
        self.calls = list[str]()
        self.broken = -1
        self.weight_transfer_engine = SimpleNamespace(
            config=SimpleNamespace(backend="ipc"), shutdown=self.opened.clear
        )
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

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights_iterator:
            if (target := own.get(name.replace("gate", "router"))) is not None:
                target.data.copy_(tensor)


def exporting(worker: Worker) -> Callable[[Tensor], Sequence[Any]]:
    def export(buffer: Tensor) -> Sequence[Any]:
        worker.opened[b"handle"] = buffer
        return (b"handle",)

    return export


@pytest.mark.slow
def test_a_worker_takes_the_chunks_and_says_what_it_holds() -> None:
    worker = Worker()
    given = tensors()
    with transfer_calls(
        4, given, [ServerGpu(CPU, "GPU-1")], max_bytes=40, export=exporting(worker)
    ) as made:
        for method, arguments in made:
            answer = getattr(worker, method)(**json.loads(json.dumps(arguments)))
            assert answer["ok"], answer
    assert answer == {"ok": True, "version": 4}
    assert worker.calls == ["init", "start", *["update"] * len(split_chunks(given, 40)), "finish"]
    told = worker.weight_digests()
    expected = {
        n: d
        for n, d in digest_tensors({n: t.contiguous() for n, t in given.items()}).items()
        if n[-6:] == "weight"
    }
    assert {n: row[1] for n, row in told["held"].items() if n in given} == {
        name: digest for name, digest in expected.items() if name != "gate.weight"
    }
    assert sorted(told["unproven"]) == ["count", "gate.weight"]


def test_a_worker_that_fails_half_way_says_so_and_can_begin_anew() -> None:
    worker = Worker()
    worker.broken = 2
    with transfer_calls(
        4, tensors(), [ServerGpu(CPU, "GPU-1")], max_bytes=40, export=exporting(worker)
    ) as made:
        found = [
            getattr(worker, method)(**arguments) for method, arguments in itertools.islice(made, 3)
        ]
    assert [answer["ok"] for answer in found] == [True, True, False]
    assert found[2] == {"ok": False, "error": "RuntimeError: no such memory", "touched": True}
    assert not worker.take_chunk([], [], [], [], {"GPU-1": [{"class": "os"}]})["ok"], (
        "handles are read, not run"
    )
    worker.broken = -1
    with transfer_calls(5, tensors(), [ServerGpu(CPU, "GPU-1")], export=exporting(worker)) as made:
        assert all(getattr(worker, method)(**arguments)["ok"] for method, arguments in made)


@pytest.mark.parametrize("how", ["refused", "unfilled", "cut off", "left"])
def test_a_transfer_that_breaks_off_gives_its_buffer_back_at_once(how: str) -> None:
    """The last buffer stayed with the calls that nobody made any more, with the traceback of what
    went wrong, and open in the server."""
    worker, given = Worker(), tensors()
    worker.broken = 2 if how == "refused" else -1
    buffers = list[weakref.ref[Tensor]]()

    def export(buffer: Tensor) -> Sequence[Any]:
        buffers.append(weakref.ref(buffer))
        return exporting(worker)(buffer)

    calls: list[Iterator[device_transfer.WorkerCall]] = []
    failures: list[BaseException] = []
    try:
        with transfer_calls(
            4, given, [ServerGpu(CPU, "GPU-1")], max_bytes=40, export=export
        ) as made:
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
    here = {"uuid": "b", "backend": "ipc"}
    assert find_common_gpus([here]) == [], "no GPU"
    assert WeightExtension().place() == {"uuid": None, "backend": "", "workers": 0, "replicas": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ab"[index])
    )
    assert find_common_gpus([here]) == [ServerGpu(torch.device("cuda", 1), "b")]
    assert [
        place.uuid for place in find_common_gpus([here, {"uuid": "a", "backend": "ipc"}, here])
    ] == ["b", "a"]
    for other in ({"uuid": "c", "backend": "ipc"}, {"uuid": "b", "backend": "nccl"}, None, {}):
        assert find_common_gpus([here, other]) == []
    assert find_common_gpus([]) == []


@pytest.mark.slow
def test_a_tensor_that_no_layer_has_under_its_name_is_not_said_to_be_held(tmp_path: Path) -> None:
    worker, given = Worker(), {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(given, tmp_path / "weights")
    assert worker.take_weights(str(tmp_path / "weights"), "4") == {"ok": True, "version": 4}
    told = worker.weight_digests()
    names = ["norm.weight", "gate.weight"]
    assert "gate.weight" not in told["held"] and sorted(told["unproven"]) == [
        "count",
        "gate.weight",
    ]
    found = parse_server_digests([told], names)
    assert [found[name].proven for name in names] == [True, False]
    assert found["norm.weight"].digest == digest_tensors(given)["norm.weight"]
    assert parse_server_digests([told, told], names) == {}

    asked = SimpleNamespace(
        weight_digests=lambda names: parse_server_digests([worker.weight_digests()], names)
    )
    held = EngineWeightDigests(asked)  # pyright: ignore[reportArgumentType]
    slots = tuple(
        TensorSlot(name, dtype_tag(given[name].dtype), (2,), 0, 8, digest_tensors(given)[name])
        for name in names
    )
    assert (
        held.digest_after_load(
            WeightsManifest(4, "shm", "here", 16, "", slots), {name: given[name] for name in names}
        )
        == found
    )
    assert held.find_changed() == []
    with torch.no_grad():
        worker.model.router.weight.add_(1.0)
        assert held.find_changed() == [], "nobody can tell"
        worker.model.norm.weight.add_(1.0)
    assert [tensor.name for tensor in held.find_changed()] == ["norm.weight"]


@pytest.mark.slow
def test_an_engine_on_the_servers_gpu_sends_no_file(
    served: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    served.answers |= started(device="cuda", extension=EXTENSION)
    served.workers = [worker]
    monkeypatch.setattr(generation, "find_common_gpus", lambda asked: [ServerGpu(CPU, "GPU-1")])
    monkeypatch.setattr(device_transfer, "_export", exporting(worker))
    monkeypatch.setattr(generation, "file_in_memory", None)
    with closing(VllmGenerator(served.url)) as engine:
        engine.load_weights(3, tensors())
        assert engine.version == 3 and worker.calls[-1] == "finish"
        held = engine.weight_digests(["norm.weight", "gate.weight"])
        assert (
            held["norm.weight"].digest == digest_tensors(tensors())["norm.weight"]
            and not held["gate.weight"].proven
        )
        worker.broken = worker.calls.count("update") + 1
        with pytest.raises(VllmError, match="did not take version 4: RuntimeError: no such memory"):
            engine.load_weights(4, tensors())
        with pytest.raises(VllmError, match="weights of two versions"):
            engine.load_weights(5, tensors())
    monkeypatch.setattr(generation, "find_common_gpus", lambda asked: [])
    VllmGenerator(served.url).close()
    assert "weights go through the host's memory" in caplog.text
