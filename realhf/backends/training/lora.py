"""Trains a model by low-rank adapters of peft: puts them on, merges them for generation, and scores
without them.

What generates is a second skeleton over the same tensors. Only layers with adapters have weights of
their own, and those only from ``merge`` to ``drop``. A merge is proven: rounding a sum is off by at
most half the distance of neighbouring numbers, so whatever is further off was computed wrongly,
however small the adapters are.
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
from realhf.backends.embedded.kernels import OneDnnLinear, adapted_product
from realhf.base.installation import install_command


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of the blocks by their names: a block has a number, which embeddings
    and the head have not."""
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


def side_product(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the factors of what the adapter of a layer adds to the layer's product with ``hidden``
    (m, in), fp32 (m, rank) and (out, rank); None while adapters are off."""
    if layer.disable_adapters:
        return None
    down = layer.lora_A[_NAME].weight
    up = layer.lora_B[_NAME].weight
    return functional.linear(hidden.float(), down) * layer.scaling[_NAME], up


def chosen_layers(
    model: nn.Module, targets: Sequence[str], role: str, *, head: bool = False
) -> list[str]:
    """Return the names of the layers that ``targets`` name, or end the names of; all without
    targets. Only with ``head`` is the language-model head one of them. Raises ValueError that names
    a target without a layer, and what there is."""
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
            there = sorted({name.rpartition(".")[2] for name in layers})
            raise ValueError(
                f"{role}.lora.targets: no linear layer of the blocks is called {target!r} (there "
                f"are "
                f"{', '.join(there)})"
            )
    return [name for name in layers if any(is_named(name, target) for target in targets)]


def is_named(name: str, target: str) -> bool:
    """Whether ``target`` is the dotted name of a layer, or its end."""
    return name == target or name.endswith(f".{target}")


def short_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return last parts of ``names`` where these, as ends of names, mean the same layers among all
    modules of the model; else ``names``. It is what a file says that others read."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    meant = {name for name, _ in model.named_modules() if any(is_named(name, end) for end in ends)}
    return ends if meant == {*names} else list(names)


def weight_of(model: Any, name: str) -> nn.Parameter:
    """Return the weight of the layer of this name."""
    return model.get_submodule(name).weight


_CHUNK = 1 << 20
"""Elements that are looked at together."""
_CLOSELY = 4096
"""Elements of a chunk that differ, of which so many, evenly spread, are computed again in fp64: of
a wrong merge most differ, of a right one those between two numbers."""


def worst_element(
    merged: Tensor, base: Tensor, up: Tensor, down: Tensor, scale: float
) -> tuple[float, float]:
    """Compare ``merged`` with ``base`` + ``scale`` * ``up`` @ ``down``; (out, in) each, of one
    type, and (out, rank) and (rank, in). Return how far the worst element is off, as a multiple of
    what rounding allows (1 and less is right), and as a multiple of what the adapters add there.
    Not a number counts as infinitely wrong."""
    rows = max(1, _CHUNK // max(1, merged.shape[1]))
    found = [(0.0, 0.0)]
    for first in range(0, len(merged), rows):
        part = slice(first, first + rows)
        found.append(_worst(merged[part], base[part], up[part].float(), down.float(), scale))
    return max(found)


def _worst(
    merged: Tensor, base: Tensor, up: Tensor, down: Tensor, scale: float
) -> tuple[float, float]:
    again = base.float().addmm(up, down, alpha=scale).to(merged.dtype)
    differs = (merged != again).nonzero()
    if not len(differs):
        return 0.0, 0.0
    row, column = differs[:: -(-len(differs) // _CLOSELY)].unbind(1)
    terms = scale * up.double()[row] * down.double()[:, column].T
    added = terms.sum(1)
    start = base[row, column].double()
    wanted = start + added
    off = (merged[row, column].double() - wanted).abs()
    # One rounding to the type of the weights, two of sums in fp32, and those of the product of the
    # adapters.
    allowed = _half_step(wanted, merged.dtype) + 2 * _half_step(wanted, torch.float32)
    allowed += (len(down) + 2) * torch.finfo(torch.float32).eps * terms.abs().sum(1)
    times = torch.nan_to_num(off / allowed, nan=float("inf"))
    worst = int(times.argmax())
    return float(times[worst]), float(off[worst] / added[worst].abs().clamp(min=1e-300))


def _half_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the distance of neighbouring numbers of ``dtype`` at ``x`` f64 (n,)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps / 4), exponent)


_PROBE_TOKENS = 8
_MISSED = 0.2
"""Distance of the merged model from the one with adapters, as a share of how far the adapters move
it, in types that are narrower than fp32: they round the weights of one model and the sums of the
other. A layer whose adapters are lost is near 1; how much of them is merged is told by the weights
themselves (``check_weights``)."""
_ROUNDINGS = 256
"""So many roundings of fp32 the two models may be apart after one layer."""
Adapter = tuple[Tensor, Tensor, float]
"""What is trained of an adapter: (out, rank), (rank, in), and how often their product counts."""


class MergeDiffers(RuntimeError):
    """The merged weights do not compute what the model with its adapters computes."""


@torch.no_grad()
def check_weights(
    plain: Any, base: Mapping[str, Tensor], adapter: Callable[[str], Adapter]
) -> None:
    """Raise MergeDiffers unless the weight of each layer of ``plain`` is that of ``base`` and what
    its ``adapter`` adds, rounded once. Weights whose shape is not (out, in) lie the other way
    round."""
    for name, before in base.items():
        up, down, scale = adapter(name)
        weight: Tensor = plain.get_submodule(name).weight
        pair = (
            (weight, before)
            if isinstance(plain.get_submodule(name), nn.Linear)
            else (weight.T, before.T)
        )
        times, share = worst_element(*pair, up, down, scale)
        if times > 1:
            kind = str(weight.dtype).removeprefix("torch.")
            raise MergeDiffers(
                f"the merged weights are not those of the model with its adapters: {name}.weight "
                f"is {times:.3g} times "
                f"as far off as rounding to {kind} explains, by {share:.1%} of what its adapter "
                f"adds there; what "
                "generates would not be what trains"
            )


@torch.no_grad()
def check_merge(adapted: Any, plain: Any, off: Callable[[], Any]) -> None:
    """Raise MergeDiffers unless ``plain`` computes what ``adapted`` does, up to rounding: an
    adapter that is not in the merged weights would train and never reach what generates. ``off``
    makes a context without adapters. Three passes over a few tokens."""
    config = adapted.config.get_text_config()
    ids = ((torch.arange(_PROBE_TOKENS) * 7919 + 3) % config.vocab_size)[None].to(adapted.device)
    was_training = adapted.training
    adapted.eval()
    try:
        wanted = _hidden(adapted, ids)
        found = _hidden(plain, ids)
        with off():
            base = _hidden(adapted, ids)
    finally:
        adapted.train(was_training)
    scale = wanted.norm().clamp(min=1e-6)
    missed = float((found - wanted).norm() / scale)
    moved = float((base - wanted).norm() / scale)
    if not missed <= _rounding(adapted.dtype, int(config.num_hidden_layers), moved):
        raise MergeDiffers(
            f"the merged weights are not those of the model with its adapters: hidden states are "
            f"{missed:.1e} off, and "
            f"the adapters move them by {moved:.1e}; what generates would not be what trains"
        )


def _hidden(model: Any, ids: Tensor) -> Tensor:
    return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.double()


def _rounding(dtype: torch.dtype, layers: int, moved: float) -> float:
    """Return how far two ways of computing the same model may be apart, of which adapters move one
    by ``moved``."""
    steps = max(1, layers) ** 0.5
    if dtype in (torch.float32, torch.float64):
        return _ROUNDINGS * torch.finfo(dtype).eps * steps
    return max(_MISSED * moved, 4 * torch.finfo(dtype).eps * steps)


ADAPTER = "adapter"
"""Folder of the adapters, in the format of peft, in a checkpoint and in an exported policy."""
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_NAME = "default"
_MUST_AGREE = ("r", "lora_alpha", "target_modules")


class LoraAdapters:
    """Holds the adapters of ``model`` (transformers, of any dtype; changed in place), which are
    fp32, start at 0 and are the only weights of it that train. ``role`` is for errors, ``path`` is
    where the weights of the model came from.

    ``merged()`` is the same model as a plain one, for what generates, is published and exported; it
    is proven against the model with its adapters whenever it is made. With ``head`` a target may be
    the language-model head, which then has a weight of its own in the merged model, also where it
    shares that of the embedding. Raises ValueError for targets that the model has not, ConfigError
    without peft.
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
        names = chosen_layers(model, options.targets, role, head=head)
        base = {name: weight_of(model, name) for name in names}
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        plain = copy.deepcopy(model, shared).eval()  # The same modules over the same tensors.
        if head and head_name(model) in names:
            plain.config.get_text_config().tie_word_embeddings = (
                plain.config.tie_word_embeddings
            ) = False
        self._options = peft.LoraConfig(
            r=options.rank,
            lora_alpha=int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,
            lora_dropout=options.dropout,
            target_modules=short_names(model, names),
            task_type="CAUSAL_LM",
            fan_in_fan_out=not all(
                isinstance(model.get_submodule(name), nn.Linear) for name in names
            ),
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # It asks the model things that transformers calls by other names now.
            self._peft = peft.get_peft_model(model, self._options)
        self._options.base_model_name_or_path = path or None
        self._model = model
        model.eval()
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        for layer in self._layers.values():
            layer.__class__ = _few_passes(type(layer))
        self._stirred: list[tuple[str, Tensor, Tensor | None]] = []
        self.skeleton = plain  # Its weights are ``merged()`` only after that was called.
        self._base = base
        self._held = False
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
        """Return the plain model with merged weights, up to ``changed``. Raises MergeDiffers where
        it is not the model with its adapters."""
        if not self._held:
            self._merge()
            try:
                self._prove()
            except BaseException:
                self.changed()  # Nobody may find them there and believe them.
                raise
        return self.skeleton

    def changed(self) -> None:
        """Forget the merged weights: the adapters have changed, or their memory is wanted. The
        layers of the plain model have base weights meanwhile."""
        if self._held:
            for name, weight in self._base.items():
                self._place(name, weight)
        self._held = False

    def _merge(self) -> None:
        for name, base in self._base.items():
            with torch.inference_mode(False):
                self._place(
                    name, nn.Parameter(self._merged(name).to(base.dtype), requires_grad=False)
                )
        self._held = True

    def _merged(self, name: str) -> Tensor:
        """Return the weight of one layer, as it lies there, and what its adapter adds to it, summed
        up in fp32."""
        # Tensors made in inference mode could not be written to later.
        with torch.inference_mode(False), torch.no_grad():
            base = self._base[name]
            delta = self._layers[name].get_delta_weight(_NAME)
            return base + delta if base.dtype == torch.float32 else base.float().add_(delta.float())

    def _place(self, name: str, weight: nn.Parameter) -> None:
        self.skeleton.get_submodule(name)._parameters["weight"] = weight

    def _prove(self) -> None:
        with torch.inference_mode(False):
            check_weights(self.skeleton, self._base, self._adapter)
            check_merge(self._model, self.skeleton, self.off)

    def _adapter(self, name: str) -> Adapter:
        """Return what trains of a layer, and how often it counts by the options, whatever peft
        makes of it."""
        layer = self._layers[name]
        return (
            layer.lora_B[_NAME].weight,
            layer.lora_A[_NAME].weight,
            self._options.lora_alpha / self._options.r,
        )

    def _prove_by_other_values(self) -> None:
        """Adapters start at 0, which proves nothing: try merging with others."""
        self._merge()
        self.disturb(self.names)
        try:
            self._prove()
        finally:
            self.restore()
            self.changed()

    # ---- the self-test of weight updates

    @torch.no_grad()
    def disturb(self, names: Iterable[str]) -> None:
        """Give the adapters of these weights other values, and merge them in place; ``restore``
        undoes it."""
        generator = torch.Generator().manual_seed(0)
        for name in sorted(names):
            layer_name = name.removesuffix(".weight")
            layer = self._layers[layer_name]
            down = layer.lora_A[_NAME].weight
            up = layer.lora_B[_NAME].weight
            before = up.detach().clone()
            # The product is then about as large as the weight that it is added to.
            size = layer.get_base_layer().weight.float().std() / (
                down.std().clamp(min=1e-6) * self._options.r**0.5 * layer.scaling[_NAME]
            )
            up.copy_(torch.randn(up.shape, generator=generator).to(up.device) * size)
            merged = self._rewritten(layer_name, self._merged(layer_name)) if self._held else None
            self._stirred.append((layer_name, before, merged))

    def _rewritten(self, name: str, new: Tensor) -> Tensor:
        """Write the merged weight of one layer in its place; return a copy of the one before."""
        with torch.inference_mode(False), torch.no_grad():
            weight = weight_of(self.skeleton, name)
            before = weight.detach().clone()
            weight.copy_(new)
        return before

    @torch.no_grad()
    def restore(self) -> None:
        """Undo ``disturb`` to the bit."""
        while self._stirred:
            name, before, merged = self._stirred.pop()
            self._layers[name].lora_B[_NAME].weight.copy_(before)
            if merged is not None and self._held:
                self._rewritten(name, merged)

    # ---- files

    def save(self, folder: Path) -> None:
        """Write the adapters for ``peft.PeftModel.from_pretrained``; ``folder`` is made if
        missing."""
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
        """Restore what ``save`` wrote. Raises FileNotFoundError, or ValueError that says how the
        saved adapters differ; then nothing has changed."""
        if not (folder / WEIGHTS).is_file():
            raise FileNotFoundError(f"no adapters in {folder}")
        self._check_options(folder)
        try:
            saved = load_file(folder / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is no safetensors file: {error}") from None
        own = self.tensors()
        if other := sorted(saved.keys() ^ own.keys()):
            raise ValueError(
                f"adapters in {folder} are on other layers: {other[0]} and {len(other) - 1} more"
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
        self.changed()

    def _check_options(self, folder: Path) -> None:
        """An adapter of another rank has other shapes; one with another alpha only computes
        something else."""
        try:
            said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder / CONFIG} does not say what the adapters are: {error}"
            ) from None
        own = self._options.to_dict()
        for name in _MUST_AGREE:
            found = said.get(name)
            wanted = own[name]
            if isinstance(wanted, (set, list)):
                found = sorted(found or ())
                wanted = sorted(wanted)
            if found != wanted:
                raise ValueError(
                    f"adapters in {folder} were trained with {name}={found}, here it is {wanted}: "
                    f"continue with the "
                    "same options actor.lora"
                )


@functools.cache
def _few_passes(kind: Any) -> Any:
    """Return ``kind``, a layer of peft, with a forward pass by ``adapted_product`` where that is
    the same."""

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
            return adapted_product(x, base.weight, base.bias, down, up, self.scaling[_NAME])

    return FewPassAdapter


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"actor.lora.rank: adapters need the package peft, which is not here ({error}): "
            f"{install_command('lora')}"
        ) from None
    return peft


class BaseEngine:
    """Implements ``Engine`` for a frozen role: ``engine`` with its ``adapters`` off, that is with
    the weights that it was loaded with. It only scores; ``version`` is its own."""

    def __init__(self, engine: Forwards, adapters: LoraAdapters, tokenizer: Any) -> None:
        self._engine = engine
        self._adapters = adapters
        self.tokenizer = tokenizer
        self.version = 0

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.forward``."""
        with self._adapters.off():
            return self._engine.forward(sample, post_fn, mb_spec=mb_spec)

    def logprobs(
        self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.logprobs``."""
        return logprobs_by(self, sample, temperature=temperature, mb_spec=mb_spec)

    def _refuse(self, what: str, *_given: Any, **_named: Any) -> NoReturn:
        raise RuntimeError(
            f"a model with its adapters off does not {what}: it is the frozen base of another role"
        )

    train_batch, generator = partialmethod(_refuse, "train"), partialmethod(_refuse, "generate")
    weights, export_hf = partialmethod(_refuse, "publish weights"), partialmethod(_refuse, "export")
    save_checkpoint, load_checkpoint = (
        partialmethod(_refuse, "save"),
        partialmethod(_refuse, "load"),
    )
