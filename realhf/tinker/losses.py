"""Losses of the training API, as the client's documentation defines them: sums over tokens, not
means.

Each loss function takes tensors of n packed positions: ``logprobs`` f32 (n,), the log-probabilities
of the targets under the trained model, which carry the gradient; ``inputs``, the tensors from the
client, f32 (n,) each; and ``sequence`` i64 (n,), the index of each position's datum. It returns the
loss of each position, f32 (n,). Cross-entropy also accepts tensors (n, K), for K targets per
position.

Notation: p is the probability of a target under the trained model, q under the model that sampled
it; ratio is p / q.

Sources: importance sampling, https://tinker-docs.thinkingmachines.ai/losses; PPO, Schulman et al.
2017 (arXiv:1707.06347), equation 7; CISPO, MiniMax 2025 (arXiv:2506.13585), equation 4; DRO,
Richemond et al. 2024 (arXiv:2405.19107), with a given advantage; GSPO-token, Zheng et al. 2025
(arXiv:2507.18071), equations 13 and 14.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
"""Loss inputs of all positions, by name."""
Settings = Mapping[str, float]
"""Settings of the loss by name."""
LOW = "clip_low_threshold"
"""Name of the lower clip threshold of the ratio, which is a setting of the request or an input with
one value per position."""
HIGH = "clip_high_threshold"
"""Name of the upper clip threshold of the ratio, likewise a setting or an input."""
SEQUENCE_MASK = "sequence_ratio_mask"
"""Name of the input that marks the positions over which GSPO averages a sequence's log-ratio."""


def cross_entropy(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return -weight * log p. A weight may be negative: for a custom loss, which the client
    evaluates, the second pass sends the derivative of the loss with respect to the log-probability
    as the weight."""
    del sequence, settings
    return -logprobs * inputs["weights"]


def importance_sampling(
    logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings
) -> Tensor:
    """Return -ratio * advantage; log q is ``inputs["logprobs"]``."""
    del sequence, settings
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return -min(ratio * advantage, clipped ratio * advantage)."""
    del sequence
    return _clipped_loss((logprobs - inputs["logprobs"]).exp(), inputs, settings)


def cispo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return -clipped ratio * log p * advantage. The ratio carries no gradient."""
    del sequence
    ratio = (logprobs.detach() - inputs["logprobs"]).exp()
    return -_clip_ratio(ratio, inputs, settings) * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return -(log p * advantage - beta / 2 * (log p - log q)^2)."""
    del sequence
    log_ratio = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * log_ratio.square())


def gspo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, settings: Settings) -> Tensor:
    """Return PPO's loss with one ratio per sequence: the geometric mean of the ratios at the
    positions that ``sequence_ratio_mask`` marks. The gradient at each position is that of the
    position's own log-probability. A sequence without marked positions has ratio 1."""
    marked = (inputs[SEQUENCE_MASK] != 0).to(logprobs.dtype)
    log_ratio = torch.where(
        marked > 0, logprobs.detach() - inputs["logprobs"], torch.zeros_like(marked)
    )
    zeros = torch.zeros(int(sequence.max()) + 1, dtype=logprobs.dtype, device=logprobs.device)
    counts = zeros.index_add(0, sequence, marked).clamp(min=1)
    mean = (zeros.index_add(0, sequence, log_ratio) / counts)[sequence]
    # logprobs - logprobs.detach() is zero, but carries the gradient of the position
    # (straight-through).
    return _clipped_loss((mean + logprobs - logprobs.detach()).exp(), inputs, settings)


def _clipped_loss(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip_ratio(ratio, inputs, settings) * advantages)


def _clip_ratio(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Clip the ratio to the thresholds of each position if the client sent them, otherwise to those
    of the request."""
    low = inputs.get(LOW)
    high = inputs.get(HIGH)
    low = torch.full_like(ratio, settings[LOW]) if low is None else low
    high = torch.full_like(ratio, settings[HIGH]) if high is None else high
    return torch.minimum(torch.maximum(ratio, low), high)


@dataclass(frozen=True)
class ClientLoss:
    """A loss that clients can request."""

    compute: Callable[[Tensor, Inputs, Tensor, Settings], Tensor]
    """Loss function (logprobs, inputs, sequence, settings) that returns the loss of each
    position."""
    needs: tuple[str, ...]
    """Required input tensors of each datum."""
    takes: tuple[str, ...] = ()
    """Optional input tensors: clip thresholds per position."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings with their default values."""


_POLICY = ("logprobs", "advantages")
_THRESHOLDS = {LOW: 0.8, HIGH: 1.2}
LOSSES: Mapping[str, ClientLoss] = {
    "cross_entropy": ClientLoss(cross_entropy, ("weights",)),
    "importance_sampling": ClientLoss(importance_sampling, _POLICY),
    "ppo": ClientLoss(ppo, _POLICY, (LOW, HIGH), _THRESHOLDS),
    "cispo": ClientLoss(cispo, _POLICY, (LOW, HIGH), {LOW: 0.0, HIGH: 4.0}),
    "dro": ClientLoss(dro, _POLICY, (), {"beta": 0.05}),
    "gspo": ClientLoss(
        gspo, (*_POLICY, SEQUENCE_MASK), (LOW, HIGH), {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}
    ),
}
"""Supported losses by their names in the client's ``LossFnType``. The defaults of CISPO and GSPO
are those of their papers: no lower bound for CISPO, 1 - 3e-4 and 1 + 4e-4 for GSPO."""
_UNSUPPORTED = {
    "stable_reinforce": "its formula is not public; importance_sampling, ppo, cispo and gspo train "
    "on the same data",
    "custom": "losses are not traced here; forward_backward_custom computes them in the client "
    "instead",
}
"""Losses of the client that this server does not support, with the reason."""


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[ClientLoss, dict[str, float]]:
    """Return the loss called ``name`` and its settings: the defaults, overridden by ``config``.
    Raises ValueError naming the unsupported loss, or the unknown or invalid setting."""
    if name not in LOSSES:
        why = _UNSUPPORTED.get(name, f"there are {', '.join(LOSSES)}")
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
        raise ValueError(
            f"loss_fn_config: {LOW} {settings[LOW]:g} must be from 0 to {HIGH} {settings[HIGH]:g}"
        )
    return loss, settings
