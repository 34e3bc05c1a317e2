"""Holds a model with adapters as a plain one, in whose weights the adapters are merged: what generates and is exported.

It is a second skeleton over the same tensors. Only layers with adapters have weights of their own, and those only from
``merge`` to ``drop``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from realhf.backends.adapters.rounding import worst_element

_PROBE_TOKENS = 8
_MISSED = 0.2
"""Distance of the merged model from the one with adapters, as a share of how far the adapters move it, in types that
are narrower than fp32: they round the weights of one model and the sums of the other. A layer whose adapters are lost
is near 1; how much of them is merged is told by the weights themselves (``check_weights``)."""
_ROUNDINGS = 256
"""So many roundings of fp32 the two models may be apart after one layer."""
Adapter = tuple[Tensor, Tensor, float]
"""What is trained of an adapter: (out, rank), (rank, in), and how often their product counts."""


class MergeDiffers(RuntimeError):
    """The merged weights do not compute what the model with its adapters computes."""


def plain_copy(model: nn.Module) -> Any:
    """Return a model of the same modules that shares all parameters and buffers with ``model``."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


class MergedWeights:
    """Gives ``plain``, a ``plain_copy``, weights of its own in some layers: ``base`` of a layer and what ``delta`` says
    that its adapter adds to it, (out, in) or as the weight lies, added in fp32 and rounded once."""

    def __init__(self, plain: Any, base: Mapping[str, nn.Parameter], delta: Callable[[str], Tensor]) -> None:
        self.plain, self._base, self._delta = plain, dict(base), delta
        self._held = False

    @property
    def base(self) -> Mapping[str, Tensor]:
        """The weights that adapters stand beside, by layer."""
        return self._base

    @property
    def held(self) -> bool:
        """Whether the merged weights are there."""
        return self._held

    def merge(self) -> None:
        """Compute the merged weights of all layers."""
        for name in self._base:
            self._set(name, self._merged(name))
        self._held = True

    def merge_again(self, name: str) -> Tensor:
        """Compute the merged weight of one layer anew, in its place; return a copy of the one before."""
        with torch.inference_mode(False), torch.no_grad():
            weight = self.plain.get_submodule(name).weight
            before = weight.detach().clone()
            weight.copy_(self._merged(name))
        return before

    def put_back(self, name: str, before: Tensor) -> None:
        """Restore the merged weight of one layer, in its place, to the bit."""
        with torch.inference_mode(False), torch.no_grad():
            self.plain.get_submodule(name).weight.copy_(before)

    def drop(self) -> None:
        """Give the memory of the merged weights back; the layers of the plain model have base weights meanwhile."""
        if self._held:
            for name, weight in self._base.items():
                self._place(name, weight)
        self._held = False

    def _merged(self, name: str) -> Tensor:
        # Tensors made in inference mode could not be written to later.
        with torch.inference_mode(False), torch.no_grad():
            base = self._base[name]
            return (
                base.float().add_(self._delta(name).float())
                if base.dtype != torch.float32
                else (base + self._delta(name))
            )

    def _set(self, name: str, weight: Tensor) -> None:
        with torch.inference_mode(False):
            self._place(name, nn.Parameter(weight.to(self._base[name].dtype), requires_grad=False))

    def _place(self, name: str, weight: nn.Parameter) -> None:
        self.plain.get_submodule(name)._parameters["weight"] = weight


@torch.no_grad()
def check_weights(plain: Any, base: Mapping[str, Tensor], adapter: Callable[[str], Adapter]) -> None:
    """Raise MergeDiffers unless the weight of each layer of ``plain`` is that of ``base`` and what its ``adapter``
    adds, rounded once. Weights whose shape is not (out, in) lie the other way round."""
    for name, before in base.items():
        up, down, scale = adapter(name)
        weight: Tensor = plain.get_submodule(name).weight
        pair = (weight, before) if isinstance(plain.get_submodule(name), nn.Linear) else (weight.T, before.T)
        times, share = worst_element(*pair, up, down, scale)
        if times > 1:
            kind = str(weight.dtype).removeprefix("torch.")
            raise MergeDiffers(
                f"the merged weights are not those of the model with its adapters: {name}.weight is {times:.3g} times "
                f"as far off as rounding to {kind} explains, by {share:.1%} of what its adapter adds there; what "
                "generates would not be what trains"
            )


@torch.no_grad()
def check_merge(adapted: Any, plain: Any, off: Callable[[], Any]) -> None:
    """Raise MergeDiffers unless ``plain`` computes what ``adapted`` does, up to rounding: an adapter that is not in the
    merged weights would train and never reach what generates. ``off`` makes a context without adapters. Three passes
    over a few tokens."""
    config = adapted.config.get_text_config()
    ids = ((torch.arange(_PROBE_TOKENS) * 7919 + 3) % config.vocab_size)[None].to(adapted.device)
    was_training = adapted.training
    adapted.eval()
    try:
        wanted, found = _hidden(adapted, ids), _hidden(plain, ids)
        with off():
            base = _hidden(adapted, ids)
    finally:
        adapted.train(was_training)
    scale = wanted.norm().clamp(min=1e-6)
    missed, moved = float((found - wanted).norm() / scale), float((base - wanted).norm() / scale)
    if not missed <= _rounding(adapted.dtype, int(config.num_hidden_layers), moved):
        raise MergeDiffers(
            f"the merged weights are not those of the model with its adapters: hidden states are {missed:.1e} off, and "
            f"the adapters move them by {moved:.1e}; what generates would not be what trains"
        )


def _hidden(model: Any, ids: Tensor) -> Tensor:
    return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.double()


def _rounding(dtype: torch.dtype, layers: int, moved: float) -> float:
    """Return how far two ways of computing the same model may be apart, of which adapters move one by ``moved``."""
    steps = max(1, layers) ** 0.5
    if dtype in (torch.float32, torch.float64):
        return _ROUNDINGS * torch.finfo(dtype).eps * steps
    return max(_MISSED * moved, 4 * torch.finfo(dtype).eps * steps)
