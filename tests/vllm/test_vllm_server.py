"""The server as a child: its failures are told, it leaves nothing behind, and one without our
extension will do."""

from __future__ import annotations

import copy
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.vllm.api import VllmError
from realhf.backends.vllm.generation import VllmGenerator
from realhf.backends.vllm.server import VllmServer
from tests.process_family import gone
from tests.vllm.conftest import EXECUTABLE, LONG, PROMPT, Asked, logprobs_of, serving

OWNER = """
import sys, time
from pathlib import Path
from realhf.backends.vllm.server import VllmServer
server = VllmServer(sys.argv[1], executable=Path(sys.argv[2]), log=Path(sys.argv[3]))
server.wait_until_up()
print(server.url, server.process.pid, flush=True)
time.sleep(600)
"""


def of_server(port: str) -> list[psutil.Process]:
    """The processes of the session of the server on this port."""
    argument = f"--port {port} "
    found = [
        p for p in psutil.process_iter(["cmdline"]) if argument in " ".join(p.info["cmdline"] or [])
    ]
    sessions = {_session(p) for p in found} - {-1}
    everyone = [p for p in psutil.process_iter() if p.is_running()]
    return [p for p in everyone if _session(p) in sessions]


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1


@pytest.fixture(scope="module")
def untied(models: list, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied model's folder with a head of its own, as most larger models have."""
    path = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(folder, path)
    untie(copy.deepcopy(models[0])).save_pretrained(path)
    return path


def untie(model: torch.nn.Module) -> torch.nn.Module:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone() * 1.5)
    model.config.tie_word_embeddings = False
    return model


@pytest.fixture(scope="module")
def bare_url(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that somebody else has started, without our extension."""
    with serving(
        untied, tmp_path_factory.mktemp("bare") / "server.txt", "--worker-extension-cls", ""
    ) as server:
        yield server.url


def test_a_server_without_our_extension_reloads_from_a_folder(bare_url: str, models: list):
    with closing(VllmGenerator(bare_url)) as generator:
        ask = Asked(generator)
        other = untie(copy.deepcopy(models[1])).eval()
        generator.load_weights(4, other.state_dict())
        ask.submit(1, PROMPT, GenConfig(max_new_tokens=40), seed=1)
        output = ask.output()
        assert output.versions == [4] * 40
        expected = logprobs_of(other, PROMPT, output.token_ids, 1.0)
        assert (torch.tensor(output.logprobs) - expected).abs().max() < 1e-3


def test_a_server_describes_itself_and_goes_on(server: VllmServer, folder: Path):
    with closing(VllmGenerator(server.url, version=0)) as generator:
        known = generator.describe_server()
        assert known.pop("vllm").startswith("0.") and known.pop("torch").startswith("2.")
        assert known == {
            "url": server.url,
            "model": str(folder),
            "device": "cpu",
            "runner": "v1",
            "dtype": "float32",
            "head_dtype": "float32",
            "kv_cache_bytes": known["kv_cache_bytes"],
            "tensor_parallel_size": 1,
        }
        outputs: queue.Queue[GenOutput | Exception] = queue.Queue()
        generator.submit(GenRequest(1, PROMPT), GenConfig(max_new_tokens=3), (), outputs.put)
        output = outputs.get(timeout=60)
        assert isinstance(output, GenOutput) and len(output.token_ids) == 3


def test_a_server_that_was_killed_is_told_and_leaves_nothing(
    folder: Path, models: list, tmp_path: Path
):
    command = [sys.executable, "-c", OWNER, str(folder), str(EXECUTABLE), str(tmp_path / "log.txt")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        url = owner.stdout.readline().split()[0]
        processes = of_server(url.rpartition(":")[2])
        segments = {
            m.path for p in processes for m in p.memory_maps() if m.path.startswith("/dev/shm/psm_")
        }
        assert len(processes) >= 2 and segments
        generator = VllmGenerator(url, version=0)
        outputs: queue.Queue[GenOutput | Exception] = queue.Queue()
        generator.submit(GenRequest(1, PROMPT), LONG, (), outputs.put)
        time.sleep(0.3)
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        assert gone(processes, 30)
        assert not [path for path in segments if Path(path).exists()]
        failure = outputs.get(timeout=30)
        assert isinstance(failure, VllmError) and url in str(failure)
        with pytest.raises(VllmError, match=url):
            generator.load_weights(1, models[1].state_dict())
        generator.close()
        with pytest.raises(VllmError, match=url):
            VllmGenerator(url)
    finally:
        owner.kill()


def test_a_server_that_cannot_start_tells_why(tmp_path: Path):
    server = VllmServer(tmp_path / "nothing", executable=EXECUTABLE, log=tmp_path / "log.txt")
    with pytest.raises(RuntimeError, match=r"ended \(code \d+\)(.|\n)*nothing"):
        server.wait_until_up(120)
    assert server.describe_failure() is not None
    server.stop()
    with pytest.raises(FileNotFoundError, match="make test-vllm"):
        VllmServer(tmp_path, executable=tmp_path / "vllm", log=tmp_path / "log.txt")
