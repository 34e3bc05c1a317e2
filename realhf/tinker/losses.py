"""The losses that a client may name, as its documentation defines them: sums over tokens, without a mean.

Every function gets tensors of one length, position by position: ``logprobs`` f32 (n,) of the targets, which carries the
gradient, what the client sent (``inputs``), and ``sequence`` i64 (n,), which datum a position belongs to; it returns
the loss of each position, f32 (n,). Cross-entropy also takes (n, K), K targets a position.

Sources: importance sampling, https://tinker-docs.thinkingmachines.ai/losses; PPO, Schulman et al. 2017
(arXiv:1707.06347), equation 7; CISPO, MiniMax 2025 (arXiv:2506.13585), equation 4; DRO, Richemond et al. 2024
(arXiv:2405.19107), with a given advantage; GSPO-token, Zheng et al. 2025 (arXiv:2507.18071), equations 13 and 14.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
SEQUENCE_MASK = "sequence_ratio_mask"


def cross_entropy(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return -weight * log p. A weight may be negative: the second pass of a custom loss sends its slope."""
    del sequence, settings
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return -p / q * advantage; log q is ``inputs["logprobs"]``."""
    del sequence, settings
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return the negative of the smaller one of ratio times advantage and clipped ratio times advantage."""
    del sequence
    return _clipped((logprobs - inputs["logprobs"]).exp(), inputs, settings)


def cispo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return -log p times advantage times the clipped ratio, through which no gradient goes."""
    del sequence
    ratio = (logprobs.detach() - inputs["logprobs"]).exp()
    return -_within(ratio, inputs, settings) * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return -(log p * advantage - beta / 2 * (log p - log q)^2)."""
    del sequence
    apart = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * apart.square())


def gspo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return PPO's loss with one ratio for a sequence, the geometric mean over the positions that
    ``sequence_ratio_mask`` marks, whose gradient at a position is that of its own log-probability. A sequence without a
    marked position has the ratio 1."""
    marked = (inputs[SEQUENCE_MASK] != 0).to(logprobs.dtype)
    apart = torch.where(marked > 0, logprobs.detach() - inputs["logprobs"], torch.zeros_like(marked))
    sums = torch.zeros(int(sequence.max()) + 1, dtype=logprobs.dtype, device=logprobs.device)
    counts = sums.index_add(0, sequence, marked).clamp(min=1)
    mean = (sums.index_add(0, sequence, apart) / counts)[sequence]
    return _clipped((mean + logprobs - logprobs.detach()).exp(), inputs, settings)


def _clipped(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _within(ratio, inputs, settings) * advantages)


def _within(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Clip by the thresholds of each position if the client sent them, else by those of the request."""
    low, high = inputs.get(LOW), inputs.get(HIGH)
    low = torch.full_like(ratio, settings[LOW]) if low is None else low
    high = torch.full_like(ratio, settings[HIGH]) if high is None else high
    return torch.minimum(torch.maximum(ratio, low), high)


@dataclass(frozen=True)
class TokenLoss:
    """A loss that a client may name."""

    compute: Callable[[Tensor, Inputs, Tensor, Settings], Tensor]
    """Returns the loss of each position."""
    needs: tuple[str, ...]
    """Tensors that every datum must have."""
    takes: tuple[str, ...] = ()
    """Tensors that a datum may have: clip thresholds of single positions."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings with their defaults."""


_POLICY = ("logprobs", "advantages")
_THRESHOLDS = {LOW: 0.8, HIGH: 1.2}
LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(cross_entropy, ("weights",)),
    "importance_sampling": TokenLoss(importance_sampling, _POLICY),
    "ppo": TokenLoss(ppo, _POLICY, (LOW, HIGH), _THRESHOLDS),
    "cispo": TokenLoss(cispo, _POLICY, (LOW, HIGH), {LOW: 0.0, HIGH: 4.0}),
    "dro": TokenLoss(dro, _POLICY, (), {"beta": 0.05}),
    "gspo": TokenLoss(gspo, (*_POLICY, SEQUENCE_MASK), (LOW, HIGH), {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}),
}
"""The supported losses, by the names of the client's ``LossFnType``. Defaults of CISPO and GSPO are those of
their papers: no lower bound, and 3e-4 and 4e-4."""
_NOT_CARRIED = {
    "stable_reinforce": "its formula is not public; importance_sampling, ppo, cispo and gspo train on the same data",
    "custom": "losses are not traced here; forward_backward_custom computes them in the client instead",
}


def loss_named(name: str, config: Mapping[str, float | str]) -> tuple[TokenLoss, dict[str, float]]:
    """Return the loss of a name, and its settings. Raises ValueError for a loss that is not supported, and for a
    setting that it does not have or that is not a finite number."""
    if name not in LOSSES:
        why = _NOT_CARRIED.get(name, f"there are {', '.join(LOSSES)}")
        raise ValueError(f"loss_fn {name!r} is not carried by this server: {why}")
    loss = LOSSES[name]
    for key, value in config.items():
        if key not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise ValueError(f"loss_fn_config: {name} has no setting {key!r} (settings: {known})")
        if isinstance(value, str) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config: {key} must be a finite number, got {value!r}")
    settings = {**loss.settings, **{key: float(value) for key, value in config.items()}}
    if LOW in settings and not 0 <= settings[LOW] <= settings[HIGH]:
        raise ValueError(f"loss_fn_config: {LOW} {settings[LOW]:g} must be from 0 to {HIGH} {settings[HIGH]:g}")
    return loss, settings
