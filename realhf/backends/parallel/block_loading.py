"""Loads a model that is cut over ranks block by block, so that no rank ever holds all of it.

The model is built without memory for its parameters; its buffers, which are computed, are real. Before a block is cut,
its parameters are read from the folder, on every rank; what a rank does not keep of them is gone before the next block.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from realhf.backends.training.tokenizer_loading import ModelLoadError, check_folder
from realhf.backends.training.torch_backend import attention_for, odd_logits

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_log = logging.getLogger(__name__)


class FolderWeights:
    """Knows where the parameters of a model without memory, and its persistent buffers, are in a folder. It is made
    before the model is wrapped or changed, while parameters have the names of the folder."""

    def __init__(self, model: Any, folder: Path, *, with_head: bool) -> None:
        """Raises ValueError where the folder does not hold every tensor under its name, in its shape; without
        ``with_head`` the projection to the vocabulary may be missing."""
        self._files = _files_of(folder)
        self._names: dict[int, str] = {}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._buffers: dict[int, str] = {}
        self._kept: list[nn.Parameter] = []  # An id is good as long as its object lives.
        head = None if with_head else model.get_output_embeddings()
        inner = f"{model.base_model_prefix}."
        aliases: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    aliases.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
                    self._owners.setdefault(id(parameter), []).append((module, name))
                    self._kept.append(parameter)
        shapes = {id(parameter): tuple(parameter.shape) for parameter in self._kept}
        unwanted = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        for key, names in aliases.items():
            found = next((n for name in names for n in (name, name.removeprefix(inner)) if n in self._files), None)
            if found is None and key in unwanted and len(names) == 1:
                continue
            if found is None:
                raise ValueError(f"it holds no tensor {names[0]}")
            if (held := self._shape(found)) != shapes[key]:
                raise ValueError(f"{found} has the shape {held}, in the model {shapes[key]}")
            self._names[key] = found
        state = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in state and name in self._files:
                self._buffers[id(buffer)] = name

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Give the parameters of ``module`` that have no memory theirs, on ``device``; tied ones stay one."""
        for parameter in list(module.parameters()):
            if not parameter.is_meta:
                continue
            if (name := self._names.get(id(parameter))) is None:
                raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} is not one of the folder's")
            real = nn.Parameter(self._read(name).to(device=device, dtype=dtype), requires_grad=parameter.requires_grad)
            for owner, attribute in self._owners[id(parameter)]:
                owner._parameters[attribute] = real
        for buffer in module.buffers():
            if (name := self._buffers.get(id(buffer))) is not None:
                buffer.copy_(self._read(name))

    def _read(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())


@dataclass(frozen=True)
class Filling:
    """Gives the parts of a model their weights, on ``device``; ``what`` is what errors call the model."""

    weights: FolderWeights
    device: torch.device
    dtype: torch.dtype
    what: str

    def fill(self, module: nn.Module) -> None:
        """Read the parameters of a module that have no memory."""
        self.weights.fill(module, self.device, self.dtype)

    def prove(self, model: Any) -> None:
        """Raise ModelLoadError for a model that cannot be trained, as where it is loaded whole."""
        if problem := odd_logits(model):
            raise ModelLoadError(f"{self.what}: {problem}")


def build_without_memory(
    path: str, role: str, dtype: torch.dtype, *, with_head: bool = True
) -> tuple[Any, FolderWeights] | None:
    """Return the model of a folder without memory for its parameters, in evaluation mode, and where they are. None,
    with a message, where the folder has no such form: then the model is loaded whole, which also says what is wrong
    with it. Raises ModelLoadError."""
    check_folder(path, role)
    kernel = attention_for(path, role)
    config = AutoConfig.from_pretrained(path)
    try:
        if get_checkpoint_conversion_mapping(config.model_type) is not None:
            raise ValueError(f"transformers converts tensors of {config.model_type}")
        with _parameters_without_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)
        weights = FolderWeights(model, Path(path), with_head=with_head)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        _log.warning("%s.path=%s is loaded whole on each worker before it is cut: %s", role, path, error)
        return None
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval(), weights


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Put every parameter that a module gets within the block on the device ``meta``."""

    def drop(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(drop)
    try:
        yield
    finally:
        handle.remove()


def _files_of(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor. Raises ValueError where there are no safetensors files."""
    if (folder / INDEX).is_file():
        listed: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        # A name in the index is no path: it may not lead out of the folder.
        return {name: folder / Path(file).name for name, file in listed.items()}
    if not (folder / WHOLE).is_file():
        raise ValueError("it has no safetensors files")
    with safe_open(folder / WHOLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WHOLE)
