"""Puts low-rank adapters on a model by peft: they train, and the weights that they stand beside do not."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from realhf.api.config import ConfigError, LoraConfig
from realhf.backends.adapters.merged import Adapter, MergedWeights, check_merge, check_weights, plain_copy
from realhf.backends.adapters.targets import chosen_layers, short_names, weight_of
from realhf.base.extras import install_command

ADAPTER = "adapter"
"""Folder of the adapters, in the format of peft, in a checkpoint and in an exported policy."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NAME = "default"
_MUST_AGREE = ("r", "lora_alpha", "target_modules")


class LoraAdapters:
    """Holds the adapters of ``model`` (transformers, of any dtype; changed in place), which are fp32, start at 0 and
    are the only weights of it that train. ``role`` is for errors, ``path`` is where the weights of the model came from.

    ``merged()`` is the same model as a plain one, for what generates, is published and exported; it is proven against
    the model with its adapters whenever it is made. Raises ValueError for targets that the model has not, ConfigError
    without peft.
    """

    def __init__(self, model: Any, options: LoraConfig, *, role: str = "actor", path: str = "") -> None:
        peft = _peft()
        names = chosen_layers(model, options.targets, role)
        base = {name: weight_of(model, name) for name in names}
        plain = plain_copy(model).eval()
        self._options = peft.LoraConfig(
            r=options.rank,
            lora_alpha=int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,
            lora_dropout=options.dropout,
            target_modules=short_names(model, names),
            task_type="CAUSAL_LM",
            fan_in_fan_out=not all(isinstance(model.get_submodule(name), nn.Linear) for name in names),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It asks the model things that transformers calls by other names now.
            self._peft = peft.get_peft_model(model, self._options)
        self._options.base_model_name_or_path = path or None
        self._model = model
        model.eval()
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        self._stirred: list[tuple[str, Tensor, Tensor | None]] = []
        self._merged = MergedWeights(plain, base, lambda name: self._layers[name].get_delta_weight(_NAME))
        self._prove_by_other_values()

    @property
    def names(self) -> frozenset[str]:
        """The weights with adapters, by their names in the merged model."""
        return frozenset(f"{name}.weight" for name in self._layers)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapters' tensors, themselves, by the names that they have in peft's files."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self._peft, save_embedding_layers=False)

    # ---- passes

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute without adapters inside: what the model was before it trained."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, on: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(on)

    def training(self, on: bool) -> None:
        """Let adapters drop inputs, or no longer."""
        for layer in self._layers.values():
            layer.lora_dropout.train(on)

    # ---- merged weights

    def merged(self) -> Any:
        """Return the plain model with merged weights, up to ``changed``. Raises MergeDiffers where it is not the model
        with its adapters."""
        if not self._merged.held:
            self._merged.merge()
            try:
                self._prove()
            except BaseException:
                self._merged.drop()  # Nobody may find them there and believe them.
                raise
        return self._merged.plain

    @property
    def skeleton(self) -> Any:
        """The plain model; its weights are ``merged()`` only after that was called."""
        return self._merged.plain

    def changed(self) -> None:
        """Forget the merged weights: the adapters have changed, or their memory is wanted."""
        self._merged.drop()

    def _prove(self) -> None:
        with torch.inference_mode(False):
            check_weights(self._merged.plain, self._merged.base, self._adapter)
            check_merge(self._model, self._merged.plain, self.off)

    def _adapter(self, name: str) -> Adapter:
        """Return what trains of a layer, and how often it counts by the options, whatever peft makes of it."""
        layer = self._layers[name]
        return layer.lora_B[_NAME].weight, layer.lora_A[_NAME].weight, self._options.lora_alpha / self._options.r

    def _prove_by_other_values(self) -> None:
        """Adapters start at 0, which proves nothing: try merging with others."""
        self._merged.merge()
        self.disturb(self.names)
        try:
            self._prove()
        finally:
            self.restore()
            self._merged.drop()

    # ---- the self-test of weight updates

    @torch.no_grad()
    def disturb(self, names: Iterable[str]) -> None:
        """Give the adapters of these weights other values, and merge them in place; ``restore`` undoes it."""
        generator = torch.Generator().manual_seed(0)
        for name in sorted(names):
            layer_name = name.removesuffix(".weight")
            layer = self._layers[layer_name]
            down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
            before = up.detach().clone()
            # The product is then about as large as the weight that it is added to.
            size = layer.get_base_layer().weight.float().std() / (
                down.std().clamp(min=1e-6) * self._options.r**0.5 * layer.scaling[_NAME]
            )
            up.copy_(torch.randn(up.shape, generator=generator).to(up.device) * size)
            merged = self._merged.merge_again(layer_name) if self._merged.held else None
            self._stirred.append((layer_name, before, merged))

    @torch.no_grad()
    def restore(self) -> None:
        """Undo ``disturb`` to the bit."""
        while self._stirred:
            name, before, merged = self._stirred.pop()
            self._layers[name].lora_B[_NAME].weight.copy_(before)
            if merged is not None and self._merged.held:
                self._merged.put_back(name, merged)

    # ---- files

    def save(self, folder: Path) -> None:
        """Write the adapters for ``peft.PeftModel.from_pretrained``; ``folder`` is made if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()},
            folder / WEIGHTS,
            metadata={"format": "pt"},
        )
        training, self._options.inference_mode = self._options.inference_mode, True
        try:
            self._options.save_pretrained(str(folder))
        finally:
            self._options.inference_mode = training

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote. Raises FileNotFoundError, or ValueError that says how the saved adapters differ;
        then nothing has changed."""
        if not (folder / WEIGHTS).is_file():
            raise FileNotFoundError(f"no adapters in {folder}")
        self._check_options(folder)
        try:
            saved = load_file(folder / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is no safetensors file: {error}") from None
        own = self.tensors()
        if other := sorted(saved.keys() ^ own.keys()):
            raise ValueError(f"adapters in {folder} are on other layers: {other[0]} and {len(other) - 1} more")
        for name, tensor in saved.items():
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"adapters in {folder}: {name} has shape {tuple(tensor.shape)}, here {tuple(own[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in saved.items():
                own[name].copy_(tensor)
        self.changed()

    def _check_options(self, folder: Path) -> None:
        """An adapter of another rank has other shapes; one with another alpha only computes something else."""
        try:
            said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder / CONFIG} does not say what the adapters are: {error}") from None
        own = self._options.to_dict()
        for name in _MUST_AGREE:
            found, wanted = said.get(name), own[name]
            if isinstance(wanted, (set, list)):
                found, wanted = sorted(found or ()), sorted(wanted)
            if found != wanted:
                raise ValueError(
                    f"adapters in {folder} were trained with {name}={found}, here it is {wanted}: continue with the "
                    "same options actor.lora"
                )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"actor.lora.rank: adapters need the package peft, which is not here ({error}): {install_command('lora')}"
        ) from None
    return peft
