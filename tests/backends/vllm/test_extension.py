"""The extension in a worker without vLLM: what it says of layers that have a checkpoint's names, and of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.backends.vllm.extension import WeightExtension
from realhf.backends.vllm.generation import held_by_server
from realhf.base.tensor_digest import digests
from realhf.dataflow.weight_proof import HeldWeights

NAMES = ["norm.weight", "gate.weight"]


class Model(torch.nn.Module):
    """Has ``norm.weight`` under its name and ``gate.weight`` under another."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.norm = torch.nn.LayerNorm(3, bias=False)
        self.router = torch.nn.Linear(2, 2, bias=False)


class Worker(WeightExtension):
    def __init__(self) -> None:
        self.model = Model()
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        for name, tensor in weights_iterator:
            own[name.replace("gate", "router")].copy_(tensor)


class Engine:
    """Asks the worker as the engine of a server does."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def weight_digests(self, names: list[str]):
        return held_by_server([self.worker.weight_digests()], names)


def test_a_tensor_that_no_layer_has_under_its_name_is_not_said_to_be_held(tmp_path: Path) -> None:
    given = {"norm.weight": torch.tensor([1.0, 2.0, 3.0]), "gate.weight": torch.eye(2)}
    save_file(given, tmp_path / "weights")
    worker = Worker()
    assert worker.take_weights(str(tmp_path / "weights"), "4") == {"ok": True, "version": 4}
    told = worker.weight_digests()
    assert (told["held"].keys() & given.keys(), told["unproven"]) == ({"norm.weight"}, ["gate.weight"])

    found = held_by_server([told], NAMES)
    assert [found[name].proven for name in NAMES] == [True, False]
    assert found["norm.weight"].digest == digests(given)["norm.weight"]
    assert held_by_server([told, told], NAMES) == {}

    held = HeldWeights(Engine(worker))  # pyright: ignore[reportArgumentType]
    slots = tuple(TensorSlot(name, "f32", (2,), 0, 8, digest) for name, digest in digests(given).items())
    assert held.after(WeightsManifest(4, "shm", "here", 16, "", slots), given) == found
    assert held.changed() == []
    with torch.no_grad():
        worker.model.router.weight.add_(1.0)
        assert held.changed() == [], "nobody can tell"
        worker.model.norm.weight.add_(1.0)
    assert [tensor.name for tensor in held.changed()] == ["norm.weight"]
