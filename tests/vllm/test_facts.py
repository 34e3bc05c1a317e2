"""What we rely on in vLLM, looked up in the sources of the version that we install and of the next
one, which is downloaded and read but never installed.

``--vllm-wheel PATH`` names a wheel, which is then read instead of those, without a server or a
network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from realhf.backends.vllm.broadcast.payloads import cut_packs, describe_tensors, fill_pack
from tests.backends.vllm.broadcast.stand_in import make_tensors, receive_packs
from tests.backends.vllm.broadcast.test_payloads import TENSORS
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
    "nccl_unique_id_b64": "fields with which a group is joined",
    "packed_num_buffers": "fields with which a group is joined",
    "destroy": "a group is left by shutdown",
    "ncclCommAbort": "to leave a group aborts it from another thread",
    "load_numel": "a layer is loaded when as many elements have arrived as it has",
}
"""Words that another vLLM might call otherwise, and the fact that would break."""


@pytest.mark.parametrize("word", CHANGES)
def test_a_renamed_word_is_found(sources: VllmSources, word: str) -> None:
    fact: Fact = FACTS[CHANGES[word]]
    assert fact.find_problem(Edited(sources.place, word, "renamed"))


PACKED = "distributed/weight_transfer/packed_tensor.py"


class _Stream:
    """A stream or event of a CPU, where everything has happened already."""

    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object) -> None: ...


class _Plain(torch.Tensor):
    def record_stream(self, stream: object) -> None: ...


class _Torch(ModuleType):
    """torch without a GPU, as far as vLLM's receiver of packs needs one."""

    Event = _Stream
    accelerator = SimpleNamespace(current_device_index=lambda: 0, current_stream=_Stream)
    cuda = SimpleNamespace(stream=lambda stream: nullcontext(), current_stream=_Stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *sizes: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cpu"
        return torch.empty(*sizes, dtype=dtype).as_subclass(_Plain)


def _load_receiver(sources: VllmSources) -> Callable[..., None]:
    """vLLM's own receiver of packs, without the rest of vLLM."""
    names = ("unpack_tensor", "packed_nccl_broadcast_consumer")
    code = "\n".join(sources.source(PACKED, name) for name in names)
    space: dict[str, Any] = {
        "torch": _Torch("torch"),
        "math": math,
        "Any": Any,
        "Iterator": Iterator,
        "Callable": Callable,
        "DEFAULT_PACKED_BUFFER_SIZE_BYTES": 1 << 30,
        "DEFAULT_PACKED_NUM_BUFFERS": 2,
        "_get_streams": lambda device, count: tuple(_Stream() for _ in range(count)),
    }
    exec(compile(code, PACKED, "exec"), space)
    return space["packed_nccl_broadcast_consumer"]


@pytest.mark.parametrize("pack_bytes", [0, 7, 8, 33, 64, 90, 1 << 20])
def test_vllms_own_receiver_reads_our_packs(sources: VllmSources, pack_bytes: int) -> None:
    """And takes them as the stand-in of ``tests/backends/vllm/broadcast`` does."""
    tensors = {**make_tensors(3), **TENSORS}
    infos = describe_tensors(tensors)
    ordered = [tensors[name] for name, *_ in infos]
    packs = [
        fill_pack([ordered[index] for index in pack])
        for pack in cut_packs((tensor.nbytes for tensor in ordered), pack_bytes)
    ]
    received: list[dict[str, torch.Tensor]] = [{}, {}]
    sizes: list[list[int]] = [[], []]

    class Group:
        def __init__(self, index: int) -> None:
            self.index = index

        def broadcast(self, packed: torch.Tensor, src: int = 0) -> None:
            sizes[self.index].append(packed.nbytes)
            packed.copy_(packs[len(sizes[self.index]) - 1])

    rows = [(name, (list(shape), getattr(torch, dtype))) for name, dtype, shape in infos]
    _load_receiver(sources)(
        iterator=iter(rows),
        group=Group(0),
        src=0,
        post_unpack_func=received[0].update,
        buffer_size_bytes=pack_bytes,
        num_buffers=1,
        device="cpu",
    )
    flat = ((name, shape, dtype) for name, (shape, dtype) in rows)
    receive_packs(flat, Group(1).broadcast, received[1].update, pack_bytes)
    assert sizes == [[pack.nbytes for pack in packs]] * 2
    for name, tensor in tensors.items():
        assert all(torch.equal(each[name], tensor) for each in received), name
