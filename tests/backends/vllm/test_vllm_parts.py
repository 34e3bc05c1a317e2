"""What of the vLLM engine can be tested without vLLM: weights on their way, the guard, what a wrong server is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from realhf.backends.vllm import guard as vllm_guard
from realhf.backends.vllm.api import VllmError, position_seed
from realhf.backends.vllm.generation import VllmGenerator, checked, file_in_memory, folder_on_disk, folder_shapes
from realhf.backends.vllm.server import VllmServer
from tests.process_family import gone

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b.weight": torch.tensor([1, -2], dtype=torch.bfloat16)}


class FakeServer:
    """Answers GET and POST from a table of path -> (status, JSON); anything else is 404."""

    def __init__(self, answers: dict[str, tuple[int, object]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answers.get(self.path.partition("?")[0], (404, {"detail": "Not Found"}))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"] or 0))
                self.do_GET()

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


def answers(mode: str = "processed_logprobs", chunked: bool = False) -> dict[str, tuple[int, object]]:
    config = {
        "model_config": {"logprobs_mode": mode},
        "device_config": {"device": "cpu"},
        "parallel_config": {"worker_extension_cls": ""},
        "scheduler_config": {"enable_chunked_prefill": chunked},
    }
    return {
        "/v1/models": (200, {"data": [{"root": "org/model", "max_model_len": 32}]}),
        "/server_info": (200, {"vllm_config": config}),
        "/inference/v1/abort_requests": (200, {}),
        "/resume": (200, {}),
        "/pause": (200, {}),
        "/update_weight_version": (200, {}),
    }


@pytest.fixture
def served() -> Iterator[dict[str, tuple[int, object]]]:
    """The table of a server that is as it must be; ``url`` under ''."""
    table = answers()
    server = FakeServer(table)
    table[""] = (0, server.url)
    yield table
    server.close()


@pytest.mark.parametrize(
    "path, answer, word",
    [
        ("/server_info", None, "VLLM_SERVER_DEV_MODE=1"),
        ("/server_info", answers("raw_logprobs")["/server_info"], "--logprobs-mode processed_logprobs"),
        ("/server_info", answers(chunked=True)["/server_info"], "--no-enable-chunked-prefill"),
        ("/inference/v1/abort_requests", (403, {"error": "--enable-scale-out"}), "--enable-scale-out"),
    ],
)
def test_a_server_that_was_started_wrongly_is_told_what_it_lacks(served: dict, path: str, answer: object, word: str):
    if answer is None:
        del served[path]
    else:
        served[path] = answer
    with pytest.raises(VllmError, match=word):
        VllmGenerator(served[""][1])


def test_nobody_there():
    with pytest.raises(VllmError, match=r"127\.0\.0\.1:9/"):
        VllmGenerator("http://127.0.0.1:9")


def test_a_tied_head_is_not_left_to_a_server_without_our_extension(served: dict):
    generator = VllmGenerator(served[""][1])
    try:
        with pytest.raises(VllmError, match="--worker-extension-cls realhf"):
            generator.load_weights(1, TENSORS)
        assert generator.version == -1
    finally:
        generator.close()


def test_weights_that_may_be_mixed_are_never_used(served: dict):
    served["/collective_rpc"] = (500, {"error": "half way"})
    generator = VllmGenerator(served[""][1])
    try:
        with pytest.raises(VllmError, match="half way"):
            generator.load_weights(1, {**TENSORS, "lm_head.weight": torch.ones(1)})
        with pytest.raises(VllmError, match="two versions"):
            generator.load_weights(1, {**TENSORS, "lm_head.weight": torch.ones(1)})
    finally:
        generator.close()


def test_weights_are_checked_by_name_and_shape(tmp_path: Path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    expected = folder_shapes(tmp_path)
    assert expected == {"a": (2, 3), "b.weight": (2,)} and folder_shapes(tmp_path / "none") is None
    strided = torch.zeros(3, 2).t()
    given = checked({**TENSORS, "a": strided, "lm_head.weight": torch.ones(9)}, expected)
    assert given.keys() == expected.keys() and given["a"].is_contiguous()
    for wrong, word in (
        ({"a": TENSORS["a"]}, "b.weight"),
        ({**TENSORS, "c": strided}, "unknown.*c"),
        ({**TENSORS, "a": TENSORS["a"].t()}, r"a has shape \(3, 2\)"),
    ):
        with pytest.raises(ValueError, match=word):
            checked(wrong, expected)


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
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items()) and not Path(path).exists()
    with folder_on_disk(TENSORS) as folder:
        assert load_file(Path(folder) / "model.safetensors").keys() == TENSORS.keys()
    assert not Path(folder).exists()


def test_a_turn_does_not_repeat_the_random_numbers_of_the_turn_before():
    seeds = {position_seed(seed, position) for seed in range(30) for position in range(30)}
    assert len(seeds) == 900 and all(0 <= seed < 2**63 for seed in seeds)
    assert position_seed(3, 5) == position_seed(3, 5)


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


def test_a_server_that_ends_is_told_with_its_words(tmp_path: Path):
    executable = tmp_path / "vllm"
    executable.write_text("#!/bin/sh\necho no such model: $2 >&2\nexit 7\n")
    executable.chmod(0o755)
    server = VllmServer("org/model", executable=executable, log=tmp_path / "run" / "log.txt")
    with pytest.raises(RuntimeError, match=r"code 7\): no such model: org/model"):
        server.wait_until_up(60)
    assert (tmp_path / "run" / "vllm_imports" / "realhf" / "backends" / "vllm" / "extension.py").exists()


def test_a_server_without_memory_names_our_option(tmp_path: Path):
    executable = tmp_path / "vllm"
    executable.write_text("#!/bin/sh\necho 'ValueError: No available memory for the cache blocks.'\nexit 1\n")
    executable.chmod(0o755)
    server = VllmServer("org/model", executable=executable, log=tmp_path / "log.txt")
    with pytest.raises(RuntimeError, match=r"cache blocks\.\s+; engine\.gpu_memory_utilization is its share"):
        server.wait_until_up(60)


def test_a_server_that_does_not_come_up_is_stopped(tmp_path: Path):
    executable = tmp_path / "vllm"
    executable.write_text("#!/bin/sh\nexec sleep 300\n")
    executable.chmod(0o755)
    server = VllmServer("org/model", executable=executable, log=tmp_path / "log.txt")
    with pytest.raises(TimeoutError, match=r"within 0\.5 s"):
        server.wait_until_up(0.5)
    assert server.process.poll() is not None
