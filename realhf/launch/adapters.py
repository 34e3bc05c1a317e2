"""What speaks against adapters on a model, found without torch before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from realhf.api.config import ModelConfig
from realhf.api.parallel import SHARDED
from realhf.base.extras import install_command
from realhf.base.model_size import is_block_matrix, tensor_shapes
from realhf.launch.model import BUILTIN_PATHS

_PACKAGE = "peft"
_BUILTIN_LAYERS = tuple(
    f"{part}.{name}_proj" for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))) for name in names
)
"""Linear layers of a block of the built-in policy."""


def adapter_problems(role: str, model: ModelConfig) -> Iterator[str]:
    """Adapters need peft, a backend that knows them, and layers with the names of their targets, as far as the files of
    the model say what it has."""
    lora = model.lora
    if not lora.rank:
        return
    if find_spec(_PACKAGE) is None:
        yield f"{role}.lora.rank={lora.rank}: adapters need the package {_PACKAGE}: {install_command('lora')}"
    if model.backend == SHARDED:
        yield (
            f"{role}.lora.rank={lora.rank}: backend {SHARDED} cuts a model of which all weights train; adapters train "
            "with torch on one worker, and with ddp on several"
        )
    layers = _BUILTIN_LAYERS if model.path in BUILTIN_PATHS else _matrices(Path(model.path).expanduser())
    for target in lora.targets:
        if layers and not any(name == target or name.endswith(f".{target}") for name in layers):
            there = sorted({name.rpartition(".")[2] for name in layers})
            yield (
                f"{role}.lora.targets: no linear layer of the blocks of {model.path} is called {target!r} (there are "
                f"{', '.join(there)})"
            )


def _matrices(folder: Path) -> list[str]:
    """Names of the matrices in the blocks of a model. Empty where that cannot be said."""
    shapes = tensor_shapes(folder)
    return [name.removesuffix(".weight") for name, shape in shapes.items() if is_block_matrix(name, shape)]
