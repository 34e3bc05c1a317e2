"""Algorithms as rows of a table (docs/reference/dataflow.md 10). No torch: the launcher resolves options too."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from realhf.algorithms.policy_gradient.preset_checks import DEFAULT_CAP, check_options
from realhf.api.config import PPOConfig


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
    kl_estimator: str = "k3"
    adv_norm: bool = False


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset("grpo", "token", "ppo", 0.2, 0.2, "seq_mean_token_mean"),
        "drgrpo": Preset("grpo_nostd", "token", "ppo", 0.2, 0.2, "constant"),
        "dapo": Preset("grpo", "token", "ppo", 0.2, 0.28, "token_mean"),
        "gspo": Preset("grpo", "sequence", "ppo", 3e-4, 4e-4, "seq_mean_token_mean"),
        "cispo": Preset("grpo", "token", "cispo", 1.0, 4.0, "token_mean"),
        "rloo": Preset("rloo", None, "reinforce", None, None, "token_mean"),
        "reinforce": Preset("reinforce", None, "reinforce", None, None, "token_mean"),
        "reinforce_pp": Preset(
            "reinforce_pp", "token", "ppo", 0.2, 0.2, "token_mean", kl_ctl=0.01, kl_estimator="k1", adv_norm=True
        ),
    }
)
"""``dapo`` is its loss: clip-higher and token mean. ``rloo`` takes its KL in the reward: set ``kl_ctl``."""


@dataclass(frozen=True)
class ResolvedPPO:
    """Every option with its value. ``loss_scale_len`` is the divisor of ``loss_agg=constant`` (None with another
    aggregation); ``prox_logp_method`` is None when no proximal log-probabilities are used, ``behav_imp_weight_mode``
    none when the objective is not decoupled."""

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
    discount: float
    use_decoupled_loss: bool
    recompute_logprob: bool
    prox_logp_method: str | None
    behav_imp_weight_mode: str
    behav_imp_weight_cap: float
    behav_imp_weight_floor: float
    behav_imp_weight_level: str
    ppo_n_minibatches: int
    sample_reuse: int
    mask_too_long: bool
    max_nonfinite_steps: int
    loss_scale_len: int | None

    @property
    def n_updates(self) -> int:
        """Optimizer steps of one train step, if every minibatch has something to train on."""
        return self.ppo_n_minibatches * self.sample_reuse

    @property
    def needs_reference(self) -> bool:
        """Whether ``packed_ref_logprobs`` is an input, hence ``ref_inf`` in the graph."""
        return self.kl_loss_coef != 0 or self.kl_ctl != 0

    @property
    def needs_actor_inf(self) -> bool:
        """Whether ``proximal_logprobs`` is an input, hence ``actor_inf`` in the graph."""
        return self.prox_logp_method == "actor_inf"

    @property
    def scored_keys(self) -> tuple[str, ...]:
        """Inputs of the train call that ``ref_inf`` and ``actor_inf`` make."""
        reference = ("packed_ref_logprobs",) if self.needs_reference else ()
        return (*reference, "proximal_logprobs") if self.needs_actor_inf else reference


def ppo_config(options: PPOConfig | Mapping[str, Any]) -> PPOConfig:
    """Options from plain data. Raises ValueError that names an unknown option and a close one."""
    if isinstance(options, PPOConfig):
        return options
    known = [field.name for field in fields(PPOConfig)]
    for name in options:
        if name not in known:
            raise ValueError(f"ppo.{name} is not an option{_close(str(name), known)}")
    return PPOConfig(**dict(options))


def resolve(config: PPOConfig | Mapping[str, Any], *, loss_scale_len: int | None = None) -> ResolvedPPO:
    """Fill in the preset of ``config.algo``. ``loss_scale_len`` is the divisor of ``loss_agg=constant`` where the
    option of that name is not set. Raises ValueError naming the option that is missing, unknown, out of range, or
    without effect."""
    config = ppo_config(config)
    if config.algo not in PRESETS:
        raise ValueError(
            f"ppo.algo={config.algo!r} is not known{_close(config.algo, list(PRESETS))}; "
            f"known: {', '.join(sorted(PRESETS))}"
        )
    row = PRESETS[config.algo]
    chosen = {f.name: getattr(config, f.name) for f in fields(Preset)}
    value = {name: getattr(row, name) if given is None else given for name, given in chosen.items()}
    value["recompute_logprob"] = _recomputes(config, value)
    check_options(config, value)
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
        kl_estimator=value["kl_estimator"],
        entropy_coef=config.entropy_coef,
        adv_norm=value["adv_norm"],
        discount=config.discount,
        ppo_n_minibatches=config.ppo_n_minibatches,
        sample_reuse=config.sample_reuse,
        mask_too_long=config.mask_too_long,
        max_nonfinite_steps=config.max_nonfinite_steps,
        loss_scale_len=_divisor(config, value, loss_scale_len),
        **_off_policy(config, value),
    )


def _divisor(config: PPOConfig, value: Mapping[str, Any], default: int | None) -> int | None:
    """The same number for whoever validates and whoever trains; there is no silent one."""
    if value["loss_agg"] != "constant":
        return None
    divisor = default if config.loss_scale_len is None else config.loss_scale_len
    if divisor is None:
        raise ValueError(
            "ppo.loss_agg=constant divides by ppo.loss_scale_len: set it, for example to the most tokens "
            "that the policy can sample in an episode"
        )
    if divisor < 1:
        raise ValueError(f"ppo.loss_scale_len must be at least 1, got {divisor}")
    return divisor


def _recomputes(config: PPOConfig, value: Mapping[str, Any]) -> bool:
    """Whether the ratio is taken against recomputed log-probabilities in place of the generator's.

    The ratio of a sequence is clipped within 3e-4 or so, less than what rounding makes of the same weights in two
    programs: against the generator's own numbers a third of the sequences would be clipped by chance."""
    if config.recompute_logprob is not None:
        return config.recompute_logprob
    return value["ratio"] == "sequence" and value["loss"] != "reinforce" and not config.use_decoupled_loss


def _off_policy(config: PPOConfig, value: Mapping[str, Any]) -> dict[str, Any]:
    """The options about the proximal policy and the behaviour weight, with their defaults."""
    proximal = config.use_decoupled_loss or value["recompute_logprob"]
    chosen = config.use_decoupled_loss or config.recompute_logprob is not None
    # What nobody chose does not change the graph: the train call recomputes.
    method = config.prox_logp_method or ("actor_inf" if chosen else "recompute")
    mode = (config.behav_imp_weight_mode or "mask") if config.use_decoupled_loss else "none"
    return {
        "use_decoupled_loss": config.use_decoupled_loss,
        "recompute_logprob": value["recompute_logprob"],
        "prox_logp_method": method if proximal else None,
        "behav_imp_weight_mode": mode,
        "behav_imp_weight_cap": _first(config.behav_imp_weight_cap, DEFAULT_CAP),
        "behav_imp_weight_floor": _first(config.behav_imp_weight_floor, 0.0),
        "behav_imp_weight_level": config.behav_imp_weight_level or "token",
    }


def _first(*values: float | None) -> float:
    return next(v for v in values if v is not None)


def _close(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
