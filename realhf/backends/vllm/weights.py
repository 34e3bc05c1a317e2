"""Hands new weights to a vLLM server of the same host: checks them and keeps them readable by name as long as needed.

They are a safetensors file in memory that only this process holds: the server opens it through /proc, and nothing is
left behind however either of them ends. A server without our extension needs a folder: it gets a temporary one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from realhf.api.generation import HeldTensor
from realhf.api.keys import dtype_tag

TIED_HEAD = "lm_head.weight"
"""Name of a tensor that a model with tied embeddings may lack."""

Shapes = dict[str, tuple[int, ...]]


def folder_shapes(folder: Path) -> Shapes | None:
    """Return names and shapes of the safetensors files of a model's folder; None where there are none."""
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes or None


def checked(tensors: Mapping[str, Tensor], expected: Shapes, *, on_host: bool = True) -> dict[str, Tensor]:
    """Return the tensors that the server knows, contiguous, and on the CPU if wanted ``on_host``. A head that is tied
    to the embedding is left out.

    Raises ValueError naming a tensor that is missing, unknown or of another shape.
    """
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys() - {TIED_HEAD})
    if missing or unknown:
        raise ValueError(f"weights do not fit the server's model: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"weights: {name} has shape {tuple(tensors[name].shape)}, the server's model {shape}")
    known = {name: tensors[name].detach() for name in expected}
    return {name: (tensor.cpu() if on_host else tensor).contiguous() for name, tensor in known.items()}


def held_by_server(answers: Sequence[Any], names: Sequence[str]) -> dict[str, HeldTensor]:
    """Return what the single worker of a server holds under these names, without a digest what it has elsewhere;
    nothing for several workers."""
    if len(answers) != 1:
        return {}
    held, unproven = answers[0]["held"], frozenset(answers[0].get("unproven", ()))
    told = {name: HeldTensor(dtype_tag(held[name][0]), held[name][1]) for name in names if name in held}
    return told | {name: HeldTensor("", "") for name in names if name in unproven and name not in held}


@contextlib.contextmanager
def file_in_memory(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yield the path of a safetensors file that other processes of this user on this host can open meanwhile."""
    descriptor = os.memfd_create("realhf-weights", os.MFD_CLOEXEC)
    try:
        view, done = memoryview(save(tensors)), 0
        while done < len(view):
            done += os.write(descriptor, view[done:])
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_on_disk(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yield a folder with ``model.safetensors``; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="realhf-weights-") as folder:
        (Path(folder) / "model.safetensors").write_bytes(save(tensors))
        yield folder
