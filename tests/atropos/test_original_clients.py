"""The real clients of atroposlib 0.4.0 and its own API tests against our server: ``make
test-atropos``."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.trajectory.conftest import running_server
from tests.trajectory.groups import group

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-atropos" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not (PYTHON.parent / "pytest").exists(),
    reason="atroposlib is not installed here: make test-atropos",
)

TRAINER = """
import importlib.util
import sys
import time
from types import ModuleType, SimpleNamespace

# The package and its configuration import torch, which its client of the API does not need.
package, config = ModuleType("example_trainer"), ModuleType("example_trainer.config")
package.__path__ = list(importlib.util.find_spec("example_trainer").submodule_search_locations)
config.TrainingConfig = object
sys.modules |= {"example_trainer": package, "example_trainer.config": config}
from example_trainer.api import check_atropos_api, get_batch, register_trainer

url = sys.argv[1]
assert check_atropos_api(url, timeout=5)
register_trainer(SimpleNamespace(
    atropos_url=url, training_steps=3, checkpoint_interval=0, wandb_group=None, wandb_project=None, batch_size=4,
    gradient_accumulation_steps=2, seq_len=64, save_path="trained"))
sizes = []
while len(sizes) < 3:
    batch = get_batch(url)["batch"]
    if batch is not None:
        sizes.append(sum(len(item["tokens"]) for item in batch))
print(sizes)
"""


def run(*command: str, cwd: Path, timeout: float = 120) -> str:
    done = subprocess.run(
        [str(PYTHON), *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_example_trainers_own_code_pulls_three_batches(tmp_path: Path):
    with running_server() as url:
        httpx.post(f"{url}/scored_data_list", json=[group(4, seed=number) for number in range(6)])
        assert "[8, 8, 8]" in run("-c", TRAINER, url, cwd=tmp_path)
        assert httpx.get(f"{url}/status").json() == {"current_step": 3, "queue_size": 0}


@pytest.fixture
def on_port_8000() -> Iterator[str]:
    """Our server at the address that the original's tests are written for, on IPv4; IPv6 is held by
    a closed door, so that the server which those tests start for themselves cannot be the one that
    answers."""
    with socket.socket(socket.AF_INET6) as door:
        try:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            door.bind(("::1", 8000))
        except OSError:
            pytest.skip("port 8000 of ::1 is taken")
        command = [
            sys.executable,
            "-m",
            "realhf.trajectory",
            "--port",
            "8000",
            "--store",
            "memory",
            "--strict",
        ]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                for _ in range(600):  # a refused connection answers at once
                    try:
                        httpx.get("http://127.0.0.1:8000/readyz").raise_for_status()
                        break
                    except httpx.HTTPError:
                        assert server.poll() is None, "port 8000 is taken"
                        time.sleep(0.1)
                yield "http://127.0.0.1:8000"
            finally:
                server.terminate()


def test_the_originals_api_tests_pass_on_our_server(on_port_8000: str, tmp_path: Path):
    tests = PYTHON.parent.parent / "lib" / "python3.11" / "site-packages" / "atroposlib" / "tests"
    files = [
        str(tests / f"test_api_{name}.py")
        for name in ("messages_handling", "compression", "legacy")
    ]
    text = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=tmp_path)
    assert " passed" in text
    assert "failed" not in text
    families = text_string_to_metric_families(httpx.get(f"{on_port_8000}/metrics").text)
    totals = {sample.name: sample.value for family in families for sample in family.samples}
    assert totals["trajectory_pushed_groups_total"] > 10, "it was our server that answered"
