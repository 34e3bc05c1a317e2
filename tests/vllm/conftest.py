"""Tests against a real vLLM server: ``make test-vllm`` installs one and runs them; a plain run
skips them."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from realhf.api.config import BuiltinModelConfig, GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.builtin_policy import build_model, train_tokenizer
from realhf.backends.vllm.generation import VllmGenerator
from realhf.backends.vllm.server import VllmOptions, VllmServer

HERE = Path(__file__).resolve().parent
EXECUTABLE = HERE.parents[1] / ".venv-vllm" / "bin" / "vllm"
WHEEL_ONLY = ("test_facts",)
"""Test files that need no server if they are given a wheel."""
START_S = 600.0
"""A server starts in half a minute on quiet cores, and in many on busy ones."""
CONFIG = BuiltinModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    intermediate_size=128,
    max_positions=2048,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-vllm", action="store_true", help="run the tests that start a real vLLM server"
    )
    parser.addoption(
        "--vllm-wheel",
        action="append",
        default=[],
        help="wheel of vLLM whose sources test_facts.py reads (repeatable)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = None
    if not config.getoption("--run-vllm", default=False):
        reason = "starts a real vLLM server; `make test-vllm` installs one and runs this"
    elif not EXECUTABLE.exists():
        reason = "no vLLM beside us; `make test-vllm` installs one"
    if reason is not None:
        reads_wheel = bool(config.getoption("--vllm-wheel", default=[]))
        for item in items:
            if item.path.is_relative_to(HERE) and not (
                reads_wheel and item.path.stem in WHEEL_ONLY
            ):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def models() -> list:
    """Three sets of weights of one architecture, far from uniform so that they disagree."""
    torch.set_num_threads(1)
    made = [build_model(CONFIG, CONFIG.vocab_size, 3, 0, seed) for seed in range(3)]
    for model in made:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(3.0)
        model.eval()
    return made


@pytest.fixture(scope="session")
def folder(models: list, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    words = [f"aws s3api create-bucket --bucket fox-{n}" for n in range(50)]
    models[0].save_pretrained(path)
    train_tokenizer(words, CONFIG.vocab_size, CONFIG.max_positions).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with serving(folder, tmp_path_factory.mktemp("vllm") / "server.txt") as running:
        yield running


@contextmanager
def serving(folder: Path, log: Path, *arguments: str) -> Iterator[VllmServer]:
    """A server that is up."""
    server = VllmServer(
        folder, executable=EXECUTABLE, log=log, options=VllmOptions(arguments=arguments)
    )
    try:
        server.wait_until_up(START_S)
        yield server
    finally:
        server.stop()


LIMIT_S = 600.0
"""A token takes one or two milliseconds on quiet cores, and 300 where others keep them busy."""
PROMPT = [5, 9, 200, 41, 77, 130, 12, 300, 8, 33]
LONG = GenConfig(max_new_tokens=1600)
"""Enough to be in play while weights are replaced twice, which may take two seconds each on a busy
machine."""


class Asked:
    """Submits requests and waits for their outputs by slot."""

    def __init__(self, generator: VllmGenerator) -> None:
        self.generator = generator
        self._done: queue.Queue[tuple[int, GenOutput | Exception]] = queue.Queue()

    def submit(
        self,
        slot: int,
        tokens: list[int],
        config: GenConfig,
        stop_ids: tuple[int, ...] = (),
        **more: Any,
    ) -> None:
        request = GenRequest(slot, tokens, **more)
        self.generator.submit(
            request, config, stop_ids, lambda output: self._done.put((slot, output))
        )

    def outcomes(self, count: int = 1) -> dict[int, GenOutput | Exception]:
        return dict(self._done.get(timeout=LIMIT_S) for _ in range(count))

    def output(self) -> GenOutput:
        ((_, outcome),) = self.outcomes().items()
        assert isinstance(outcome, GenOutput), outcome
        return outcome

    def nothing_for(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self._done.empty()


def sampled_tokens(server: VllmServer) -> float:
    """Number of tokens that a server has sampled since its start."""
    text = httpx.get(f"{server.url}/metrics", timeout=LIMIT_S).text
    counts = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert counts, "the server does not count its tokens"
    return sum(map(float, counts))


def wait_for_tokens(server: VllmServer, ask: Asked, count: int) -> None:
    """Wait until the server has sampled so many tokens more, while no request ends."""
    before = sampled_tokens(server)
    deadline = time.monotonic() + LIMIT_S
    while sampled_tokens(server) < before + count:
        assert ask.nothing_for(0), "a request ended before its weights were replaced"
        assert time.monotonic() < deadline, f"no {count} tokens within {LIMIT_S:.0f} s"
        time.sleep(0.02)


def logprobs_of(
    model: Any, prefix: list[int], tokens: list[int], temperature: float
) -> torch.Tensor:
    """What a trainer computes for ``tokens`` after ``prefix``, fp32."""
    with torch.inference_mode():
        logits = model(torch.tensor([prefix + tokens])).logits[0, len(prefix) - 1 : -1].float()
    rows = torch.log_softmax(logits / (temperature or 1.0), -1)
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
