"""Training with low-rank adapters (LoRA) of peft: adding them to a model, merging them for
generation, and scoring with them disabled.

The model that generates is a second module tree over the same tensors. Only layers with adapters
have their own weights there, and only between ``merged_model`` and ``drop_merged``. Every merge is
checked: rounding a sum is off by at most half the distance between neighbouring numbers, so a
larger difference means that the merge is wrong, however small the adapters are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partialmethod
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from realhf.api.config import ConfigError, LoraConfig
from realhf.api.model import Forwards, PostFn, logprobs_by
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.kernels import OneDnnLinear, lora_linear
from realhf.base.installation import install_command


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of the decoder blocks by name. Blocks are recognised by a number in
    the layer's name, which the embeddings and the head do not have."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and any(part.isdigit() for part in name.split("."))
    }


def head_name(model: Any) -> str:
    """Return the name of the language-model head."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def compute_adapter_factors(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the two factors of the product that an adapter adds to its layer's output for
    ``hidden`` (m, in): fp32 (m, rank) and (out, rank). None while adapters are disabled."""
    if layer.disable_adapters:
        return None
    down = layer.lora_A[_NAME].weight
    up = layer.lora_B[_NAME].weight
    return functional.linear(hidden.float(), down) * layer.scaling[_NAME], up


def select_layers(
    model: nn.Module, targets: Sequence[str], role: str, *, head: bool = False
) -> list[str]:
    """Return the names of the layers that ``targets`` select by full dotted name or by its end.
    Without targets, all linear layers of the blocks are selected. The language-model head can be
    selected only with ``head``.

    Raises ValueError for a target that matches no layer; the message lists the existing names.
    """
    layers = linear_layers(model)
    if head:
        layers[head_name(model)] = model.get_output_embeddings()  # type: ignore[operator]
    if not layers:
        raise ValueError(
            f"{role}.lora.rank: {type(model).__name__} has no linear layers in its blocks"
        )
    if not targets:
        return list(layers)
    for target in targets:
        if not any(is_named(name, target) for name in layers):
            existing = sorted({name.rpartition(".")[2] for name in layers})
            raise ValueError(
                f"{role}.lora.targets: no linear layer of the blocks is called {target!r} (there "
                f"are "
                f"{', '.join(existing)})"
            )
    return [name for name in layers if any(is_named(name, target) for target in targets)]


def is_named(name: str, target: str) -> bool:
    """Return whether ``target`` is the dotted name of a layer, or the last parts of it."""
    return name == target or name.endswith(f".{target}")


def shorten_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return only the last parts of ``names`` if these select exactly the same modules of the
    model, and otherwise ``names`` unchanged. Other programs read these names in the adapter's
    files."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    selected = {
        name for name, _ in model.named_modules() if any(is_named(name, end) for end in ends)
    }
    return ends if selected == {*names} else list(names)


def get_weight(model: Any, name: str) -> nn.Parameter:
    """Return the weight of the layer with this name."""
    return model.get_submodule(name).weight


_CHUNK = 1 << 20
"""Number of elements that are compared at a time."""
_MAX_RECHECKED = 4096
"""Maximum number of differing elements per chunk, evenly spaced, that are recomputed in fp64. In a
wrong merge most elements differ; in a correct one only those that lie halfway between two
numbers."""


def find_worst_element(
    merged: Tensor, base: Tensor, up: Tensor, down: Tensor, scale: float
) -> tuple[float, float]:
    """Compare ``merged`` with ``base`` + ``scale`` * ``up`` @ ``down`` and return the error of the
    worst element.

    Args:
        merged, base: (out, in), of the same dtype.
        up: (out, rank).
        down: (rank, in).

    Returns:
        The error as a multiple of what rounding allows (at most 1 is correct), and as a multiple
        of what the adapters add to that element. NaN counts as infinitely wrong.
    """
    rows = max(1, _CHUNK // max(1, merged.shape[1]))
    errors = [(0.0, 0.0)]
    for first in range(0, len(merged), rows):
        part = slice(first, first + rows)
        errors.append(_find_worst(merged[part], base[part], up[part].float(), down.float(), scale))
    return max(errors)


def _find_worst(
    merged: Tensor, base: Tensor, up: Tensor, down: Tensor, scale: float
) -> tuple[float, float]:
    """Return the two results of ``find_worst_element`` for a chunk of rows."""
    recomputed = base.float().addmm(up, down, alpha=scale).to(merged.dtype)
    differs = (merged != recomputed).nonzero()
    if not len(differs):
        return 0.0, 0.0
    row, column = differs[:: -(-len(differs) // _MAX_RECHECKED)].unbind(1)
    terms = scale * up.double()[row] * down.double()[:, column].T
    added = terms.sum(1)
    start = base[row, column].double()
    expected = start + added
    error = (merged[row, column].double() - expected).abs()
    # Allowed: one rounding to the dtype of the weights, two of sums in fp32, and the roundings in
    # the product of the adapters.
    allowed = _half_step(expected, merged.dtype) + 2 * _half_step(expected, torch.float32)
    allowed += (len(down) + 2) * torch.finfo(torch.float32).eps * terms.abs().sum(1)
    ratios = torch.nan_to_num(error / allowed, nan=float("inf"))
    worst = int(ratios.argmax())
    return float(ratios[worst]), float(error[worst] / added[worst].abs().clamp(min=1e-300))


def _half_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the distance between neighbouring numbers of ``dtype`` at each element of ``x``,
    fp64 (n,)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps / 4), exponent)


_PROBE_TOKENS = 8
"""Number of tokens in the sequence with which a merge is checked."""
_MAX_SHARE = 0.2
"""Maximum distance between the hidden states of the merged model and of the model with adapters, as
a fraction of the distance by which the adapters move them. It applies to dtypes narrower than fp32,
in which the merged model rounds weights and the model with adapters rounds sums. If a layer's
adapters are lost, the fraction is near 1; ``check_weights`` detects adapters that are merged only
in part."""
_ROUNDINGS = 256
"""Maximum distance between the two models after one layer, as a multiple of the fp32 epsilon."""
Adapter = tuple[Tensor, Tensor, float]
"""Trained tensors of one adapter: up (out, rank), down (rank, in), and the factor of their
product."""


class MergeDiffers(RuntimeError):
    """Error: the merged weights do not compute what the model with its adapters computes."""


@torch.no_grad()
def check_weights(
    plain: Any, base: Mapping[str, Tensor], adapter: Callable[[str], Adapter]
) -> None:
    """Raise MergeDiffers unless each layer's weight in ``plain`` equals its weight in ``base`` plus
    the product of its ``adapter``, rounded once. Weights of layers that are not an ``nn.Linear``
    are transposed: (in, out)."""
    for name, before in base.items():
        up, down, scale = adapter(name)
        weight: Tensor = plain.get_submodule(name).weight
        pair = (
            (weight, before)
            if isinstance(plain.get_submodule(name), nn.Linear)
            else (weight.T, before.T)
        )
        ratio, share = find_worst_element(*pair, up, down, scale)
        if ratio > 1:
            kind = str(weight.dtype).removeprefix("torch.")
            raise MergeDiffers(
                f"the merged weights are not those of the model with its adapters: {name}.weight "
                f"is {ratio:.3g} times "
                f"as far off as rounding to {kind} explains, by {share:.1%} of what its adapter "
                f"adds there; what "
                "generates would not be what trains"
            )


@torch.no_grad()
def check_merge(adapted: Any, plain: Any, disable_adapters: Callable[[], Any]) -> None:
    """Raise MergeDiffers unless ``plain`` computes the same hidden states as ``adapted``, up to
    rounding. Without this check, an adapter missing from the merged weights would train without any
    effect on generation.

    ``disable_adapters`` returns a context manager that disables the adapters. The check runs three
    forward passes over a few tokens.
    """
    config = adapted.config.get_text_config()
    ids = ((torch.arange(_PROBE_TOKENS) * 7919 + 3) % config.vocab_size)[None].to(adapted.device)
    was_training = adapted.training
    adapted.eval()
    try:
        expected = _compute_hidden(adapted, ids)
        actual = _compute_hidden(plain, ids)
        with disable_adapters():
            base = _compute_hidden(adapted, ids)
    finally:
        adapted.train(was_training)
    scale = expected.norm().clamp(min=1e-6)
    distance = float((actual - expected).norm() / scale)
    shift = float((base - expected).norm() / scale)
    if not distance <= _max_distance(adapted.dtype, int(config.num_hidden_layers), shift):
        raise MergeDiffers(
            f"the merged weights are not those of the model with its adapters: hidden states are "
            f"{distance:.1e} off, and "
            f"the adapters move them by {shift:.1e}; what generates would not be what trains"
        )


def _compute_hidden(model: Any, ids: Tensor) -> Tensor:
    """Return the last hidden states of the decoder, fp64 (1, tokens, width)."""
    return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.double()


def _max_distance(dtype: torch.dtype, layers: int, shift: float) -> float:
    """Return the maximum relative distance between the hidden states of two ways of computing the
    same model, given that its adapters move the hidden states by ``shift``."""
    steps = max(1, layers) ** 0.5
    if dtype in (torch.float32, torch.float64):
        return _ROUNDINGS * torch.finfo(dtype).eps * steps
    return max(_MAX_SHARE * shift, 4 * torch.finfo(dtype).eps * steps)


ADAPTER = "adapter"
"""Folder with the adapters in peft's format, in a checkpoint and in an exported policy."""
WEIGHTS = "adapter_model.safetensors"
"""File with the adapters' weights in that folder."""
CONFIG = "adapter_config.json"
"""File with the adapters' options in that folder."""
_NAME = "default"
"""Name of the adapter in peft, which supports several adapters per layer."""
_MUST_AGREE = ("r", "lora_alpha", "target_modules")
"""Options that a checkpoint and the run that loads it must have in common."""


class LoraAdapters:
    """LoRA adapters of ``model``, a transformers model of any dtype, which is changed in place.

    Adapters are fp32, start at 0, and are the only weights of the model that train.
    ``merged_model()`` returns the same model with plain layers, for generation, publishing and
    export; each merge is checked against the model with its adapters.

    Args:
        role: Name of the role in error messages.
        path: Where the model's weights were loaded from.
        head: Whether a target may be the language-model head. It then has a separate weight in the
            merged model, even if it shares the weight of the embedding.

    Raises ValueError for targets that the model does not have, and ConfigError if peft is not
    installed.
    """

    def __init__(
        self,
        model: Any,
        options: LoraConfig,
        *,
        role: str = "actor",
        path: str = "",
        head: bool = False,
    ) -> None:
        peft = _peft()
        names = select_layers(model, options.targets, role, head=head)
        base = {name: get_weight(model, name) for name in names}
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        plain = copy.deepcopy(model, shared).eval()  # copies of the modules over the same tensors
        if head and head_name(model) in names:
            plain.config.get_text_config().tie_word_embeddings = (
                plain.config.tie_word_embeddings
            ) = False
        self._options = peft.LoraConfig(
            r=options.rank,
            lora_alpha=int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,
            lora_dropout=options.dropout,
            target_modules=shorten_names(model, names),
            task_type="CAUSAL_LM",
            fan_in_fan_out=not all(
                isinstance(model.get_submodule(name), nn.Linear) for name in names
            ),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft uses names of transformers that are deprecated
            self._peft = peft.get_peft_model(model, self._options)
        self._options.base_model_name_or_path = path or None
        self._model = model
        model.eval()
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        for layer in self._layers.values():
            layer.__class__ = _few_pass_class(type(layer))
        self._disturbed: list[tuple[str, Tensor, Tensor | None]] = []
        self.skeleton = plain  # has merged weights only after ``merged_model()``
        self._base = base
        self._has_merged = False
        self._check_with_random_adapters()

    @property
    def names(self) -> frozenset[str]:
        """Names of those weights of the merged model that have adapters."""
        return frozenset(f"{name}.weight" for name in self._layers)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapters' tensors (not copies), keyed by their names in peft's files."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self._peft, save_embedding_layers=False)

    # ---- passes

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Context manager that disables the adapters, so that the model computes as before
        training."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, on: bool) -> None:
        """Turn all adapters on or off."""
        for layer in self._layers.values():
            layer.enable_adapters(on)

    def set_training(self, on: bool) -> None:
        """Turn the dropout of the adapters' inputs on or off."""
        for layer in self._layers.values():
            layer.lora_dropout.train(on)

    # ---- merged weights

    def merged_model(self) -> Any:
        """Return the plain model with merged weights, which are kept until ``drop_merged``. Raises
        MergeDiffers if it does not compute the same as the model with its adapters."""
        if not self._has_merged:
            self._merge()
            try:
                self._check_merged()
            except BaseException:
                self.drop_merged()  # never keep weights that failed the check
                raise
        return self.skeleton

    def drop_merged(self) -> None:
        """Drop the merged weights, because the adapters have changed or the memory is needed. Until
        the next merge the plain model has the base weights."""
        if self._has_merged:
            for name, weight in self._base.items():
                self._set_weight(name, weight)
        self._has_merged = False

    def _merge(self) -> None:
        """Replace the plain model's weights with merged ones, without checking them."""
        for name, base in self._base.items():
            with torch.inference_mode(False):
                self._set_weight(
                    name,
                    nn.Parameter(self._compute_merged(name).to(base.dtype), requires_grad=False),
                )
        self._has_merged = True

    def _compute_merged(self, name: str) -> Tensor:
        """Return one layer's weight plus the product of its adapter, summed in fp32, in the memory
        layout of the layer's weight."""
        # A tensor created in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            base = self._base[name]
            delta = self._layers[name].get_delta_weight(_NAME)
            return base + delta if base.dtype == torch.float32 else base.float().add_(delta.float())

    def _set_weight(self, name: str, weight: nn.Parameter) -> None:
        """Set the weight of one layer of the plain model."""
        self.skeleton.get_submodule(name)._parameters["weight"] = weight

    def _check_merged(self) -> None:
        """Raise MergeDiffers unless the merged weights are correct."""
        with torch.inference_mode(False):
            check_weights(self.skeleton, self._base, self._get_adapter)
            check_merge(self._model, self.skeleton, self.disable)

    def _get_adapter(self, name: str) -> Adapter:
        """Return the trained tensors of a layer's adapter and their factor. The factor is computed
        from the options, independently of the one that peft uses."""
        layer = self._layers[name]
        return (
            layer.lora_B[_NAME].weight,
            layer.lora_A[_NAME].weight,
            self._options.lora_alpha / self._options.r,
        )

    def _check_with_random_adapters(self) -> None:
        """Check a merge with random adapters: adapters start at 0, with which the check would prove
        nothing."""
        self._merge()
        self.disturb(self.names)
        try:
            self._check_merged()
        finally:
            self.restore()
            self.drop_merged()

    # ---- the self-test of weight updates

    @torch.no_grad()
    def disturb(self, names: Iterable[str]) -> None:
        """Replace the adapters of these weights with random ones and merge them in place;
        ``restore`` undoes this."""
        generator = torch.Generator().manual_seed(0)
        for name in sorted(names):
            layer_name = name.removesuffix(".weight")
            layer = self._layers[layer_name]
            down = layer.lora_A[_NAME].weight
            up = layer.lora_B[_NAME].weight
            before = up.detach().clone()
            # Scale the product to about the size of the weight that it is added to.
            size = layer.get_base_layer().weight.float().std() / (
                down.std().clamp(min=1e-6) * self._options.r**0.5 * layer.scaling[_NAME]
            )
            up.copy_(torch.randn(up.shape, generator=generator).to(up.device) * size)
            merged = (
                self._overwrite_merged(layer_name, self._compute_merged(layer_name))
                if self._has_merged
                else None
            )
            self._disturbed.append((layer_name, before, merged))

    def _overwrite_merged(self, name: str, new: Tensor) -> Tensor:
        """Overwrite the merged weight of one layer in place; return a copy of the previous one."""
        with torch.inference_mode(False), torch.no_grad():
            weight = get_weight(self.skeleton, name)
            before = weight.detach().clone()
            weight.copy_(new)
        return before

    @torch.no_grad()
    def restore(self) -> None:
        """Undo ``disturb``, bit by bit."""
        while self._disturbed:
            name, before, merged = self._disturbed.pop()
            self._layers[name].lora_B[_NAME].weight.copy_(before)
            if merged is not None and self._has_merged:
                self._overwrite_merged(name, merged)

    # ---- files

    def save(self, folder: Path) -> None:
        """Write the adapters in the format of ``peft.PeftModel.from_pretrained``; create ``folder``
        if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()},
            folder / WEIGHTS,
            metadata={"format": "pt"},
        )
        training = self._options.inference_mode
        self._options.inference_mode = True
        try:
            self._options.save_pretrained(str(folder))
        finally:
            self._options.inference_mode = training

    def load(self, folder: Path) -> None:
        """Load adapters written by ``save``.

        Raises FileNotFoundError if there are none, and ValueError if they do not fit this model;
        the current adapters are then unchanged.
        """
        if not (folder / WEIGHTS).is_file():
            raise FileNotFoundError(f"no adapters in {folder}")
        self._check_options(folder)
        try:
            saved = load_file(folder / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is not a safetensors file: {error}") from None
        own = self.tensors()
        if differing := sorted(saved.keys() ^ own.keys()):
            raise ValueError(
                f"adapters in {folder} are on other layers: {differing[0]} and "
                f"{len(differing) - 1} more"
            )
        for name, tensor in saved.items():
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"adapters in {folder}: {name} has shape {tuple(tensor.shape)}, here "
                    f"{tuple(own[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in saved.items():
                own[name].copy_(tensor)
        self.drop_merged()

    def _check_options(self, folder: Path) -> None:
        """Raise ValueError if the saved options differ. A different rank would be noticed by the
        shapes, but a different alpha would only change the results."""
        try:
            saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder / CONFIG} cannot be read as the options of adapters: {error}"
            ) from None
        own = self._options.to_dict()
        for name in _MUST_AGREE:
            saved_value = saved.get(name)
            own_value = own[name]
            if isinstance(own_value, (set, list)):
                saved_value = sorted(saved_value or ())
                own_value = sorted(own_value)
            if saved_value != own_value:
                raise ValueError(
                    f"adapters in {folder} were trained with {name}={saved_value}, here it is "
                    f"{own_value}: "
                    f"continue with the "
                    "same options actor.lora"
                )


@functools.cache
def _few_pass_class(kind: Any) -> Any:
    """Return a subclass of ``kind``, one of peft's layer classes, whose forward pass uses
    ``lora_linear`` where that gives the same result: fp32 on a CPU, without hooks, active dropout
    or compilation."""

    class FewPassAdapter(kind):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            base = self.base_layer
            dropout = self.lora_dropout[_NAME]
            plain = type(base) in (nn.Linear, OneDnnLinear) and x.device.type == "cpu"
            plain = plain and not (base._forward_hooks or base._forward_pre_hooks)
            plain = (
                plain
                and x.dtype == base.weight.dtype == torch.float32
                and not self.disable_adapters
            )
            drops = dropout.training and not isinstance(dropout, nn.Identity)
            if args or kwargs or drops or not plain or torch.compiler.is_compiling():
                return super().forward(x, *args, **kwargs)
            down = self.lora_A[_NAME].weight
            up = self.lora_B[_NAME].weight
            return lora_linear(x, base.weight, base.bias, down, up, self.scaling[_NAME])

    return FewPassAdapter


def _peft() -> Any:
    """Import peft. Raises ConfigError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"actor.lora.rank: adapters need the package peft, which is not installed ({error}): "
            f"{install_command('lora')}"
        ) from None
    return peft


class BaseEngine:
    """``Engine`` of a frozen role that shares the model of ``engine`` with the ``adapters``
    disabled, so it uses the weights that the model was loaded with. It only scores and has its own
    version."""

    def __init__(self, engine: Forwards, adapters: LoraAdapters, tokenizer: Any) -> None:
        self._engine = engine
        self._adapters = adapters
        self.tokenizer = tokenizer
        self.version = 0

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.forward``."""
        with self._adapters.disable():
            return self._engine.forward(sample, post_fn, mb_spec=mb_spec)

    def logprobs(
        self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.logprobs``."""
        return logprobs_by(self, sample, temperature=temperature, mb_spec=mb_spec)

    def _refuse(self, what: str, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"a model with its adapters off does not {what}: it is the frozen base of another role"
        )

    train_batch, generator = partialmethod(_refuse, "train"), partialmethod(_refuse, "generate")
    weights, export_hf = partialmethod(_refuse, "publish weights"), partialmethod(_refuse, "export")
    save_checkpoint, load_checkpoint = (
        partialmethod(_refuse, "save"),
        partialmethod(_refuse, "load"),
    )
