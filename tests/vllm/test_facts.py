"""What we rely on in vLLM, looked up in the sources of the version that we install and of the next
one, which is downloaded and read but never installed.

``--vllm-wheel PATH`` names a wheel, which is then read instead of those, without a server or a
network.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.vllm.conftest import EXECUTABLE
from tests.vllm.facts import Fact, list_facts
from tests.vllm.sources import VllmSources, download, version_of

FACTS = {fact.name: fact for fact in list_facts(Path())}
NEXT = "0.33.0"
DOWNLOAD_S = 900.0


@pytest.fixture(scope="session", params=["0.32", "0.33"])
def sources(request: pytest.FixtureRequest) -> VllmSources:
    wheels = [Path(path) for path in request.config.getoption("--vllm-wheel") or []]
    named = [wheel for wheel in wheels if version_of(wheel) == request.param]
    if wheels:
        if not named:
            pytest.skip(f"--vllm-wheel names no vLLM {request.param}")
        return VllmSources(named[0])
    if request.param == "0.32":
        (place,) = (EXECUTABLE.parents[1] / "lib").glob("python3*/site-packages")
        return VllmSources(place)
    wheel = download(NEXT, EXECUTABLE.parents[1] / "wheels", DOWNLOAD_S)
    if isinstance(wheel, str):
        pytest.skip(f"{wheel}; --vllm-wheel PATH reads one that is there")
    return VllmSources(wheel)


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_holds(sources: VllmSources, name: str) -> None:
    fact = FACTS[name]
    problem = fact.find_problem(sources)
    assert not problem, f"{problem} ({sources.place.name}), and {fact.needed_by} needs it"


class Edited(VllmSources):
    """Sources in which a word was replaced everywhere."""

    def __init__(self, place: Path, old: str, new: str) -> None:
        super().__init__(place)
        self._old = old
        self._new = new

    def _load(self, name: str) -> str:
        return re.sub(rf"\b{self._old}\b", self._new, super()._load(name))


CHANGES = {
    "enable_scale_out": "--enable-scale-out",
    "VLLM_CPU_KVCACHE_SPACE": "VLLM_CPU_KVCACHE_SPACE",
    "collective_rpc": "/collective_rpc",
    "use_v2_model_runner": "a worker knows its runner",
    "head_dtype": "head_dtype is an override of the model's configuration",
    "weights_iterator": "reload_weights of v1/worker/gpu_model_runner.py",
    "tensor_sizes": "fields of a chunk over CUDA IPC",
    "update_info": "update_weights of a worker",
}
"""Words that another vLLM might call otherwise, and the fact that would break."""


@pytest.mark.parametrize("word", CHANGES)
def test_a_renamed_word_is_found(sources: VllmSources, word: str) -> None:
    fact: Fact = FACTS[CHANGES[word]]
    assert fact.find_problem(Edited(sources.place, word, "renamed"))
