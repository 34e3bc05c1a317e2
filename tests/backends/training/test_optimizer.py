"""Moments that rest elsewhere change no bit; a checkpoint is read into the same model only, and
never code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from realhf.api.config import OptimizerConfig
from realhf.backends.training import optimizer as resting_moments
from realhf.backends.training.checkpoint import (
    INDEX,
    load_shards,
    load_state,
    save_shards,
    save_state,
)
from realhf.backends.training.optimizer import HostMemory, PolicyOptimizer

PIECE = 2 * 4 * 200
SHAPES = [(16, 8), (8, 16), (4,), (32, 4), (4,), (64,)]


class Elsewhere:
    """A memory of its own on the CPU, whose copies are made as soon as they may be, or as late as
    they must. A room is not-a-number until its piece is in."""

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self.rooms = [0, 0]
        self.coming: dict[int, tuple[Tensor, Tensor]] = {}
        self.going: dict[int, tuple[Tensor, Tensor]] = {}
        self.log: list[str] = []

    def allocate(self, nbytes: int) -> Tensor:
        self.held = torch.zeros(nbytes, dtype=torch.uint8)
        return self.held

    def fetch(self, number: int, held: Tensor, room: Tensor) -> None:
        self.log.append(f"fetch {number}")
        self._store(number % 2)
        self.rooms[number % 2] = len(room)
        room.fill_(255)
        self.coming[number] = held, room
        if not self.late:
            self._come(number)

    def _come(self, number: int) -> None:
        held, room = self.coming.pop(number)
        room[: len(held)] = held

    def wait_for_piece(self, number: int) -> None:
        self.log.append(f"await {number}")
        if self.late:
            self._come(number)

    def store(self, number: int, held: Tensor, room: Tensor) -> None:
        self.log.append(f"store {number}")
        self.going[number % 2] = held, room
        if not self.late:
            self._store(number % 2)

    def _store(self, place: int) -> None:
        if place in self.going:
            held, room = self.going.pop(place)
            held.copy_(room[: len(held)])

    def finish(self) -> None:
        self.coming.clear()
        for place in (0, 1):
            self._store(place)


def module_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES])


def trained(optimizer: PolicyOptimizer, module: nn.Module, steps: range) -> list[Tensor]:
    """Some steps; the fifth parameter has no gradient in the first of them."""
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        for number, parameter in enumerate(module.parameters()):
            gradient = torch.randn(parameter.shape).to(parameter.dtype)
            if step or number != 4:
                parameter.backward(gradient)
        optimizer.step(step, optimizer.gradient_norm())
    return [parameter.detach().clone() for parameter in module.parameters()]


def pair(
    dtype: torch.dtype = torch.float32, memory: Any = None
) -> tuple[PolicyOptimizer, nn.Module]:
    module = module_of(dtype)
    return PolicyOptimizer(
        module, OptimizerConfig(lr=1e-2, offload=memory is not None), 10, memory=memory
    ), module


@pytest.mark.parametrize("late", [False, True], ids=["early copies", "late copies"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_differs_and_two_pieces_are_there_at_a_time(
    dtype: torch.dtype, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However early or late the copies are made. The next piece comes while one is computed and the
    last one goes."""
    monkeypatch.setattr(resting_moments.OffloadedMoments.__init__, "__defaults__", (PIECE,))
    memory = Elsewhere(late)
    resting = pair(dtype, memory)
    plain = pair(dtype)
    for one, other in zip(trained(*resting, range(4)), trained(*plain, range(4)), strict=True):
        assert torch.equal(one, other)
    steps = " ".join(memory.log).split("fetch 0 ")[1:]
    assert len(steps) == 4
    assert (
        steps[-1].strip()
        == "fetch 1 await 0 store 0 fetch 2 await 1 store 1 fetch 3 await 2 store 2 await 3 store 3"
    )
    assert max(memory.rooms) <= PIECE


def test_one_slab_holds_the_moments_of_a_parameter_beside_each_other_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinned one by one, each was rounded up to a power of two."""
    monkeypatch.setattr(resting_moments.OffloadedMoments.__init__, "__defaults__", (PIECE,))
    memory = Elsewhere()
    resting, module = pair(memory=memory)
    trained(resting, module, range(2))
    names = {p: str(number) for number, p in enumerate(module.parameters())}
    held = resting.tensors(names)
    moments = sorted(
        (t.data_ptr() - memory.held.data_ptr(), name)
        for name, t in held.items()
        if "exp_avg" in name
    )
    assert moments[0][0] == 0 and all(place % 256 == 0 for place, _ in moments)
    order = [name.partition("/") for _, name in moments]
    assert [kind for kind, _, _ in order] == ["exp_avg", "exp_avg_sq"] * len(SHAPES)
    assert [number for _, _, number in order[::2]] == ["0", "1", "3", "2", "4", "5"], (
        "as the optimizer has them"
    )
    assert len(memory.held) == 2 * sum(-(-4 * p.numel() // 256) * 256 for p in module.parameters())


def test_saved_moments_are_read_with_and_without(tmp_path: Path) -> None:
    """What was loaded rests before the first step, and a state goes from a plain optimizer to a
    resting one. The device has none of them meanwhile: a run that fits by offloading did not fit
    when it was continued."""
    plain, module = pair()
    trained(plain, module, range(2))
    save_state(tmp_path, module, plain, 2)
    expected = trained(plain, module, range(2, 4))
    memory = Elsewhere()
    resting, again = pair(memory=memory)
    assert load_state(tmp_path, again, resting) == 2
    names = {p: str(number) for number, p in enumerate(again.parameters())}

    def rests() -> bool:
        place = memory.held.untyped_storage().data_ptr()
        held = resting.tensors(names)
        moments = [tensor for name, tensor in held.items() if name.startswith("exp_avg")]
        return len(moments) == 2 * len(SHAPES) and all(
            t.untyped_storage().data_ptr() == place for t in moments
        )

    assert rests() and not memory.log
    assert all(
        torch.equal(a, b)
        for a, b in zip(trained(resting, again, range(2, 4)), expected, strict=True)
    )
    assert rests() and resting.tensors(names)["exp_avg_sq/0"].any()
    resting.reset_moments(again.parameters())  # type: ignore[arg-type]
    assert rests() and not resting.tensors(names)["exp_avg_sq/0"].any()


def test_a_step_that_fails_leaves_the_moments_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the values that they had: where memory is short the engine says so and goes on."""
    monkeypatch.setattr(resting_moments.OffloadedMoments.__init__, "__defaults__", (PIECE,))
    memory = Elsewhere(late=True)
    resting, module = pair(memory=memory)
    trained(resting, module, range(1))
    before = memory.held.clone()
    monkeypatch.setattr(resting._adamw, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained(resting, module, range(1, 2))
    assert torch.equal(memory.held, before)
    place = memory.held.untyped_storage().data_ptr()
    held = resting.tensors({p: str(number) for number, p in enumerate(module.parameters())})
    assert all(
        t.untyped_storage().data_ptr() == place
        for name, t in held.items()
        if name.startswith("exp_avg")
    )


def test_the_memory_of_the_host_is_refused_where_it_is_that_of_the_device() -> None:
    with pytest.raises(ValueError, match="has no effect on the device cpu"):
        PolicyOptimizer(module_of(), OptimizerConfig(offload=True), 1)
    assert HostMemory(torch.device("cuda", 0))


def layers(
    depth: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[nn.Module, PolicyOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth))).to(dtype)
    return model, PolicyOptimizer(model, OptimizerConfig(lr=1e-2), 10)


def test_a_deeper_model_is_not_read_into_a_shallower_one(tmp_path: Path) -> None:
    save_state(tmp_path, *layers(3), 2)
    with pytest.raises(
        ValueError, match=r"is of another model: it has weights/2\.bias, weights/2\.weight, which"
    ):
        load_state(tmp_path, *layers(2))
    with pytest.raises(ValueError, match=r"has no tensor weights/3\."):
        load_state(tmp_path, *layers(4))
    model, optimizer = layers(3, seed=1)
    assert load_state(tmp_path, model, optimizer) == 2


def test_a_weight_in_fp32_is_read_from_the_master_weight(tmp_path: Path) -> None:
    model, optimizer = layers(1, torch.bfloat16)
    with torch.no_grad():
        optimizer.masters[0].add_(1e-5)  # lost in bf16
    save_state(tmp_path, model, optimizer, 1)
    wide, own = layers(1, seed=1)
    load_state(tmp_path, wide, own)
    for master, parameter in zip(optimizer.masters, wide.parameters(), strict=True):
        assert torch.equal(master, parameter)


class Opens:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, {"x": torch.ones(2)})
    (tmp_path / INDEX).write_bytes(pickle.dumps(Opens(str(tmp_path / "made"))))
    with pytest.raises(
        ValueError, match=r"\.metadata is not the index of a checkpoint: it names posix\.mkdir"
    ):
        load_shards(tmp_path, {"x": torch.zeros(2)})
    assert not (tmp_path / "made").exists()
    (tmp_path / INDEX).write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(ValueError, match="it holds a dict"):
        load_shards(tmp_path, {"x": torch.zeros(2)})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_every_type_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    save_shards(tmp_path, {"x": torch.ones(2, dtype=dtype)})
    read = torch.zeros(2, dtype=dtype)
    load_shards(tmp_path, {"x": read})
    assert bool((read == 1).all())
