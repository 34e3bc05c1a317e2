"""Weights go from GPU to GPU only if asked, and where trainer and servers have their own GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.api.config import AsyncConfig, ConfigError
from realhf.backends.streaming_engines import server_options
from realhf.launch.build import build_experiment, print_check
from tests.launch.test_machines import (  # noqa: F401 (a fixture)
    ASYNCHRONOUS,
    TWO_AND_TWO,
    composed_for,
    programs,
)

pytestmark = pytest.mark.slow
NAMED = "async_rl.weights=nccl"


def medium(count: int, *options: str) -> str:
    """Medium of a run on a machine with ``count`` GPUs."""
    rollout = build_experiment(composed_for(count, *ASYNCHRONOUS, *options)).spec.rollout
    assert rollout is not None
    return rollout.options.weights


def test_servers_with_gpus_of_their_own_get_weights_over_nccl_if_asked(
    programs: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert medium(2, NAMED) == medium(4, *TWO_AND_TWO, NAMED) == "nccl"
    assert medium(4, "engine.tensor_parallel_size=2", NAMED) == "nccl"
    url = ("engine.name=vllm", "engine.vllm_url=http://127.0.0.1:1")
    assert medium(2, *url, NAMED) == "nccl", "the user knows its GPUs"
    print_check(build_experiment(composed_for(4, *ASYNCHRONOUS, *TWO_AND_TWO, NAMED)))
    assert "weights: over NCCL, from GPU 0 to 2, 3\n" in capsys.readouterr().out


def test_weights_go_through_the_memory_of_the_host_otherwise(
    programs: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert medium(0, "engine.name=vllm") == medium(1) == medium(2) == "shm"
    assert medium(2, "engine.name=embedded") == medium(4, *TWO_AND_TWO) == "shm"
    assert medium(2, "async_rl.weights=fetch") == "fetch"
    print_check(build_experiment(composed_for(2, *ASYNCHRONOUS)))
    assert "over NCCL" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "options", "said"),
    [
        (0, ("engine.name=vllm",), "no GPU of CUDA is visible here"),
        (1, (), "the trainer and the servers share GPU 0"),
        (2, ("engine.name=embedded",), "engine.name=embedded has its weights in the generation"),
        (
            2,
            ("allocation.gpus=[1]", "allocation.share=true"),
            "model_worker/0 and generation/0 share GPU 1, and NCCL needs a GPU for each",
        ),
        (
            4,
            ("async_rl.n_generation_workers=4", "engine.gpu_memory_utilization=0.3"),
            "share GPU 1, and NCCL needs a GPU for each",
        ),
    ],
)
def test_nccl_is_refused_in_one_line_where_it_cannot_be(
    programs: Path,  # noqa: F811
    count: int,
    options: tuple[str, ...],
    said: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        medium(count, *options, NAMED)
    text = str(caught.value)
    assert text.startswith(f"{NAMED}: ") and said in text and "\n" not in text


def test_a_server_is_started_for_the_transfer(
    programs: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = build_experiment(composed_for(2, *ASYNCHRONOUS)).spec.models["actor"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (80 << 30, 80 << 30))
    over = AsyncConfig(weights="nccl")
    assert server_options(spec, over, shared=False).transfer == "nccl"
    assert server_options(spec, over, shared=True).transfer == "ipc", "a GPU is one rank at most"
    assert server_options(spec, AsyncConfig(), shared=False).transfer == "ipc"
