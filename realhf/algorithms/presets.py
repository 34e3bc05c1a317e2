"""Algorithms as rows of a table (dataflow spec section 10). No torch: the launcher resolves options too."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from realhf.api.config import PPOConfig
from realhf.api.registry import advantage_estimators, policy_losses


@dataclass(frozen=True)
class Preset:
    """One row. ``None``: the option does not exist for this algorithm."""

    adv_estimator: str
    ratio: str | None
    loss: str
    eps_clip: float | None
    eps_clip_higher: float | None
    loss_agg: str
    c_clip: float | None = None
    kl_ctl: float = 0.0
    kl_loss_coef: float = 0.0


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset("grpo", "token", "ppo", 0.2, 0.2, "seq_mean_token_mean"),
        "drgrpo": Preset("grpo_nostd", "token", "ppo", 0.2, 0.2, "constant"),
        "dapo": Preset("grpo", "token", "ppo", 0.2, 0.28, "token_mean"),
        "gspo": Preset("grpo", "sequence", "ppo", 3e-4, 4e-4, "seq_mean_token_mean"),
        "cispo": Preset("grpo", "token", "cispo", 1.0, 4.0, "token_mean"),
        "rloo": Preset("rloo", None, "reinforce", None, None, "token_mean"),
        "reinforce": Preset("reinforce", None, "reinforce", None, None, "token_mean"),
    }
)
"""``dapo`` is its loss: clip-higher and token mean. ``rloo`` takes its KL in the reward: set ``kl_ctl``."""

LOSS_AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3")
_RATIOS = ("token", "sequence")
_CLIP_OPTIONS = ("eps_clip", "eps_clip_higher", "c_clip", "ratio")
_HAS_NO_EFFECT = MappingProxyType({"reinforce": _CLIP_OPTIONS, "cispo": ("c_clip",)})
"""Loss -> options that it does not read."""


@dataclass(frozen=True)
class ResolvedPPO:
    """Every option with its value. ``loss_scale_len`` is the divisor of ``loss_agg=constant``."""

    algo: str
    group_size: int
    adv_estimator: str
    loss: str
    ratio: str
    loss_agg: str
    eps_clip: float
    eps_clip_higher: float
    c_clip: float | None
    kl_loss_coef: float
    kl_ctl: float
    kl_estimator: str
    entropy_coef: float
    adv_norm: bool
    ppo_n_minibatches: int
    mask_too_long: bool
    max_nonfinite_steps: int
    loss_scale_len: int

    @property
    def needs_reference(self) -> bool:
        """Whether ``packed_ref_logprobs`` is an input, hence ``ref_inf`` in the graph."""
        return self.kl_loss_coef != 0 or self.kl_ctl != 0


def ppo_config(options: PPOConfig | Mapping[str, Any]) -> PPOConfig:
    """Options from plain data. Raises ValueError that names an unknown option and a close one."""
    if isinstance(options, PPOConfig):
        return options
    known = [field.name for field in fields(PPOConfig)]
    for name in options:
        if name not in known:
            raise ValueError(f"ppo.{name} is not an option{_close(str(name), known)}")
    return PPOConfig(**dict(options))


def resolve(config: PPOConfig | Mapping[str, Any], *, loss_scale_len: int = 1024) -> ResolvedPPO:
    """Fill in the preset of ``config.algo``. Raises ValueError naming the option that is unknown, out of
    range, or without effect."""
    config = ppo_config(config)
    if config.algo not in PRESETS:
        raise ValueError(
            f"ppo.algo={config.algo!r} is not known{_close(config.algo, list(PRESETS))}; "
            f"known: {', '.join(sorted(PRESETS))}"
        )
    row = PRESETS[config.algo]
    chosen = {f.name: getattr(config, f.name) for f in fields(Preset)}
    value = {name: getattr(row, name) if given is None else given for name, given in chosen.items()}
    _check_names(value, config)
    _check_effect(chosen, value, config)
    _check_ranges(value, config, loss_scale_len)
    return ResolvedPPO(
        algo=config.algo,
        group_size=config.group_size,
        adv_estimator=value["adv_estimator"],
        loss=value["loss"],
        ratio=value["ratio"] or "token",
        loss_agg=value["loss_agg"],
        eps_clip=0.2 if value["eps_clip"] is None else value["eps_clip"],
        eps_clip_higher=_first(value["eps_clip_higher"], value["eps_clip"], 0.2),
        c_clip=value["c_clip"],
        kl_loss_coef=value["kl_loss_coef"],
        kl_ctl=value["kl_ctl"],
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        adv_norm=config.adv_norm,
        ppo_n_minibatches=config.ppo_n_minibatches,
        mask_too_long=config.mask_too_long,
        max_nonfinite_steps=config.max_nonfinite_steps,
        loss_scale_len=loss_scale_len,
    )


def _first(*values: float | None) -> float:
    return next(v for v in values if v is not None)


def _close(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_names(value: Mapping[str, Any], config: PPOConfig) -> None:
    choices: dict[str, tuple[Any, list[str]]] = {
        "adv_estimator": (value["adv_estimator"], list(advantage_estimators)),
        "loss": (value["loss"], list(policy_losses)),
        "ratio": (value["ratio"] or "token", list(_RATIOS)),
        "loss_agg": (value["loss_agg"], list(LOSS_AGGREGATIONS)),
        "kl_estimator": (config.kl_estimator, list(KL_ESTIMATORS)),
    }
    for name, (given, known) in choices.items():
        if given not in known:
            raise ValueError(
                f"ppo.{name}={given!r} is not known{_close(given, known)}; known: {', '.join(known)}"
            )


def _check_effect(chosen: Mapping[str, Any], value: Mapping[str, Any], config: PPOConfig) -> None:
    for name in _HAS_NO_EFFECT.get(value["loss"], ()):
        if chosen[name] is not None:
            raise ValueError(f"ppo.{name} has no effect with loss {value['loss']!r}: remove it")
    if config.kl_estimator != "k3" and value["kl_ctl"] == 0 and value["kl_loss_coef"] == 0:
        raise ValueError("ppo.kl_estimator has no effect while kl_ctl and kl_loss_coef are 0: remove it")
    if config.kl_estimator == "k1" and value["kl_loss_coef"] != 0:
        raise ValueError(
            "ppo.kl_estimator=k1 has zero expected gradient in the loss: use k2 or k3, or kl_ctl"
        )


def _check_ranges(value: Mapping[str, Any], config: PPOConfig, loss_scale_len: int) -> None:
    if config.group_size < 1:
        raise ValueError(f"ppo.group_size must be at least 1, got {config.group_size}")
    if config.group_size < 2 and value["adv_estimator"] in ("grpo", "grpo_nostd", "rloo"):
        raise ValueError(f"ppo.group_size must be at least 2 for adv_estimator {value['adv_estimator']!r}")
    for name in ("ppo_n_minibatches", "max_nonfinite_steps"):
        if getattr(config, name) < 1:
            raise ValueError(f"ppo.{name} must be at least 1, got {getattr(config, name)}")
    for name in ("eps_clip", "eps_clip_higher", "kl_ctl", "kl_loss_coef"):
        if value[name] is not None and value[name] < 0:
            raise ValueError(f"ppo.{name} must not be negative, got {value[name]}")
    if value["c_clip"] is not None and value["c_clip"] <= 1:
        raise ValueError(f"ppo.c_clip must be above 1, got {value['c_clip']}")
    if loss_scale_len < 1:
        raise ValueError(f"loss_scale_len must be at least 1, got {loss_scale_len}")
