"""Defines the section ppo: the options of the policy gradient, and what they are once the open ones are filled in
(``resolution.resolve``). Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from realhf.algorithms.aggregation import AGGREGATIONS
from realhf.algorithms.presets import CORRECTIONS, PRESETS
from realhf.api.algorithm import Algorithm
from realhf.api.config import ExperimentConfig
from realhf.api.keys import FEEDBACK_RATIOS, FEEDBACKS, NONE, TURN_IDS, TURN_KEYS
from realhf.api.option import option
from realhf.base.plugin import absolute
from realhf.registry import advantage_estimators, policy_losses

KL_ESTIMATORS = ("k1", "k2", "k3")
PROXIMAL_METHODS = ("actor_inf", "recompute", "loglinear")
WEIGHT_MODES = ("mask", "truncate", "none")
CREDITS = ("episode", "turn", "state")
COUNTS = ("rollout", "row")
LEVELS = ("token", "sequence")
"""Levels at which the policy ratio is taken."""
WEIGHT_LEVELS = (*LEVELS, "product")
"""Levels at which the behaviour weight is taken: of a sequence the geometric mean or the product."""
ALL, EXTREMES = PAIRINGS = ("all", "extremes")
"""Pairs of a group (``preference.pairing``): every two rollouts whose rewards differ, or the best and the worst
alone."""
PASS_AT_K = "pass_at_k"
"""The estimator that compares sets of ``ppo.pass_at_k`` responses."""
GAE = "gae"
"""The estimator whose advantages come from the values of a critic."""
_NO_KL = "there is no KL term (ppo.kl_ctl, ppo.kl_loss_coef)"
_NO_KL_REWARD = "there is no KL term in the reward (ppo.kl_ctl)"
RETURN_TO_GO = ("reinforce_pp", "reinforce_pp_baseline")
"""Estimators whose advantage is what a token and those after it earn; the others give one number per response."""
OF_STATES = ("grpo", "grpo_nostd", "rloo")
"""Estimators that ``ppo.credit=state`` may have, for episodes and for turns alike."""
OF_SUCCESS = ("maxrl", PASS_AT_K)
"""Estimators that take the reward of an episode for its success."""


@dataclass
class PolicyGradientOptions:
    """Policy-gradient options. ``algo`` names a preset (docs/algorithms.md), which gives a
    value to every option without one.

    Off-policy tokens (docs/reference/dataflow.md 10): with ``use_decoupled_loss`` the ratio is clipped against the
    proximal policy, the weights at the start of the train step, and every token is weighed by its proximal over its
    behaviour probability; ``recompute_logprob`` puts the proximal in the place of the behaviour log-probabilities
    instead. That is the default where the ratio is that of a sequence (gspo): its clip range is narrower than the
    difference between the log-probabilities of generator and trainer. Where these differ by more than rounding (older
    weights, another program, bfloat16), the decoupled objective is the default: with one update a step it costs no
    forward pass."""

    algo: str = option(
        "grpo",
        "This preset fills in every option that is not set; or an algorithm of your own does, FILE.py:NAME.",
        choices=tuple(PRESETS),
        reference=True,
    )
    group_size: int = option(8, "Every task is played this many times, which makes a group.", at_least=1)
    adv_estimator: str | None = option(
        None, "This estimator makes advantages of a group's rewards.", registry="advantage_estimators"
    )
    pass_at_k: int | None = option(
        None,
        "adv_estimator=pass_at_k: this many attempts at a task count as solving it when the best of them does.",
        at_least=2,
        idle="only adv_estimator=pass_at_k compares sets of attempts",
    )
    loss: str | None = option(None, "This function is the loss of a token.", registry="policy_losses")
    ratio: str | None = option(None, "The policy ratio is that of a token or of a sequence.", choices=LEVELS)
    loss_agg: str | None = option(
        None, "The losses of tokens are put together in this way.", choices=tuple(AGGREGATIONS)
    )
    eps_clip: float | None = option(
        None,
        "The ratio is clipped this far below 1. Taken against the weights at the start of a step, it is 1 in the first "
        "update.",
        at_least=0,
    )
    eps_clip_higher: float | None = option(None, "The ratio is clipped this far above 1.", at_least=0)
    c_clip: float | None = option(
        None, "Dual clipping bounds the loss at this many times a negative advantage.", above=1
    )
    kl_loss_coef: float | None = option(
        None, "The loss contains the KL divergence from the reference times this.", at_least=0
    )
    kl_ctl: float | None = option(
        None, "The reward contains the KL divergence from the reference times minus this.", at_least=0
    )
    kl_target: float | None = option(
        None,
        "ppo.kl_ctl is steered to a KL divergence of this many nats a rollout; without it, it stays.",
        above=0,
        idle=_NO_KL_REWARD,
    )
    kl_horizon: float = option(
        10000.0,
        "ppo.kl_target: after this many rollouts ppo.kl_ctl has changed by about its own size times the error.",
        above=0,
        idle="there is no ppo.kl_target",
    )
    kl_estimator: str | None = option(
        None, "This estimator of the KL divergence is used.", choices=KL_ESTIMATORS, idle=_NO_KL
    )
    rl_weight: float | None = option(
        None,
        "The advantage of a token contains what the estimator makes of rewards times this; by default 1, with algo=opd "
        "and sdpo 0.",
        at_least=0,
    )
    distill_weight: float | None = option(
        None,
        "The advantage of a token contains the teacher's log-probability minus the policy's times this (on-policy "
        "distillation, section teacher, or ppo.feedback); by default 0, with algo=opd and sdpo 1.",
        at_least=0,
    )
    feedback: str | None = option(
        None,
        "The teacher is the policy itself, told the environment's errors in a rollout that failed (errors), what "
        "another rollout of the group said that solved the task (solved), or that and, where none did, the errors "
        "(any); none by default, which is another model (section teacher), with algo=sdpo any.",
        choices=FEEDBACKS,
    )
    feedback_tokens: int | None = option(
        None,
        "What the policy is told makes its prompt longer by at most this many tokens, and its sequence not longer than "
        "rollout.max_total_tokens; by default 256.",
        at_least=16,
        idle="the policy is told nothing (ppo.feedback)",
    )
    entropy_coef: float = option(0.0, "The loss contains the entropy times minus this.", at_least=0)
    adv_norm: bool | None = option(None, "Advantages are normalised over the batch.")
    count: str = option(
        "rollout",
        "Groups, baselines and means over sequences count each rollout once; or each of its rows, where dropped "
        "reasoning or the branches of an agent make several.",
        choices=COUNTS,
    )
    credit: str | None = option(
        None,
        "A token gets the advantage of its episode (episode), that of the return from its turn on (turn), or both, the "
        "latter among the turns of the group that began in the same state (state).",
        choices=CREDITS,
    )
    step_advantage_weight: float | None = option(
        None,
        "ppo.credit=state: the advantage of a turn among those that began in its state is added times this, by default "
        "1.",
        above=0,
        idle="only ppo.credit=state compares turns by their states",
    )
    discount: float | None = option(
        None,
        "What comes later is discounted by this, per sampled token (gae, reinforce_pp) or per turn (ppo.credit=turn, "
        "state); by default 1, with algo=gigpo 0.95.",
        above=0,
        at_most=1,
    )
    gae_lambda: float = option(
        1.0,
        "adv_estimator=gae mixes returns and values by this: 1 takes the whole return, 0 the next value.",
        at_least=0,
        at_most=1,
        idle="only adv_estimator=gae has values",
    )
    use_decoupled_loss: bool | None = option(
        None,
        "The ratio is taken against the proximal policy, and tokens carry a behaviour weight. It is the default where "
        "sampler and trainer differ: in asynchronous runs, with tokens of others, and in bfloat16.",
    )
    correction: str | None = option(
        None,
        "This published correction (docs/algorithms.md) fills in every ppo.behav_imp option that is not set; by "
        "default decoupled where sampler and trainer differ, else none.",
        choices=tuple(CORRECTIONS),
    )
    recompute_logprob: bool | None = option(
        None, "The proximal log-probabilities stand in the place of the generator's."
    )
    prox_logp_method: str | None = option(
        None,
        "The proximal log-probabilities come from the call actor_inf, are recomputed in the train call, or are "
        "interpolated from versions (loglinear) without a forward pass.",
        choices=PROXIMAL_METHODS,
    )
    behav_imp_weight_mode: str | None = option(
        None,
        "A behaviour weight outside its bounds is set to 0 (mask, the default), cut to them (truncate), or no weight "
        "is used (none).",
        choices=WEIGHT_MODES,
    )
    behav_imp_weight_cap: float | None = option(None, "A behaviour weight is at most this, by default 5.", above=0)
    behav_imp_weight_floor: float | None = option(None, "A behaviour weight is at least this.", above=0)
    behav_imp_weight_level: str | None = option(
        None,
        "A behaviour weight is that of a token, the geometric mean of a sequence, or the product of its tokens'; by "
        "default as ppo.ratio.",
        choices=WEIGHT_LEVELS,
    )
    behav_imp_sequence_cap: float | None = option(
        None, "A sequence is left out where the geometric mean of its behaviour weights is above this.", above=0
    )
    behav_imp_sequence_floor: float | None = option(
        None, "A sequence is left out where the geometric mean of its behaviour weights is below this.", above=0
    )
    loss_scale_len: int | None = option(
        None,
        "loss_agg=constant divides by this; by default the most tokens that the policy can sample in an episode.",
        at_least=1,
    )
    ppo_n_minibatches: int = option(1, "A pass over the batch makes this many updates.", at_least=1)
    sample_reuse: int = option(1, "A train step makes this many passes over its batch.", at_least=1)
    reward_scaling: float = option(1.0, "Rewards are multiplied by this, after the bias.")
    reward_bias: float = option(0.0, "This is added to every reward.")
    max_reward_clip: float = option(20.0, "Rewards are clipped at this distance from 0.", above=0)
    dynamic_sampling: float | None = option(
        None,
        "Groups whose rewards are all equal give way to others, which are played before the step trains: at most this "
        "many times the groups of a step. 0 keeps them all.",
        at_least=0,
        at_most=100,
    )
    overlong_buffer: float | None = option(
        None,
        "Over the last part of ppo.overlong_length, which is this fraction of it, the reward of a rollout falls by up "
        "to 1, however good it is. 0 leaves it.",
        at_least=0,
        at_most=1,
    )
    overlong_length: int | None = option(
        None,
        "A rollout that sampled so many tokens has the whole penalty of ppo.overlong_buffer; by default the most "
        "tokens that the policy can sample in an episode.",
        at_least=1,
    )
    mask_too_long: bool = option(
        False, "Sequences that a limit of tokens ended, not one of turns, are left out of the loss."
    )
    max_nonfinite_steps: int = option(
        3, "The run ends after this many updates in a row without a finite gradient.", at_least=1, on_resume="free"
    )


class ResolvedOptions(PolicyGradientOptions):
    """Holds the same options with the preset filled in: those below are never None. ``loss_scale_len`` is the divisor
    of ``loss_agg=constant`` (None with another aggregation), ``prox_logp_method`` is None when no proximal
    log-probabilities are used, ``behav_imp_weight_mode`` is ``none`` when the objective is not decoupled. Where
    ``algo`` is an algorithm of somebody's own, ``algorithm`` is that, and ``own`` an instance of its options."""

    algorithm: Algorithm | None = None
    own: Any = None

    adv_estimator: str
    loss: str
    ratio: str
    loss_agg: str
    eps_clip: float
    eps_clip_higher: float
    kl_loss_coef: float
    kl_ctl: float
    kl_estimator: str
    adv_norm: bool
    credit: str
    step_advantage_weight: float
    discount: float
    rl_weight: float
    distill_weight: float
    feedback: str
    feedback_tokens: int
    use_decoupled_loss: bool
    recompute_logprob: bool
    behav_imp_weight_mode: str
    behav_imp_weight_cap: float
    behav_imp_weight_floor: float
    behav_imp_weight_level: str
    dynamic_sampling: float
    overlong_buffer: float

    def chosen(self, given: PolicyGradientOptions) -> dict[str, Any]:
        """Return the options ``given`` as plain values, with what followed from how tokens are sampled: they resolve to
        these wherever they are resolved again."""
        own = {
            name: getattr(self, name)
            for name in (
                "use_decoupled_loss",
                "prox_logp_method",
                "overlong_buffer",
                "overlong_length",
                "dynamic_sampling",
            )
        }
        own["algo"] = absolute(given.algo)
        return {**{every.name: getattr(given, every.name) for every in fields(given)}, **own}

    def token_loss(self) -> Callable[..., Any]:
        """Return the loss of a micro-batch's tokens, a function of its ``LossTerms`` and these options."""
        if self.algorithm is not None and self.algorithm.loss is not None and self.loss == self.algo:
            return partial(_with_own, self.algorithm.loss, self.own)
        return policy_losses.get(self.loss)

    def estimator(self) -> Callable[..., Any]:
        """Return the function that makes advantages of scores, ``valid`` and ``group``."""
        if self.algorithm is not None and self.algorithm.advantages is not None and self.adv_estimator == self.algo:
            return partial(_with_own, self.algorithm.advantages, self.own)
        return advantage_estimators.get(self.adv_estimator)

    @property
    def n_updates(self) -> int:
        """Optimizer steps of one train step, if every minibatch has something to train on."""
        return self.ppo_n_minibatches * self.sample_reuse

    @property
    def needs_reference(self) -> bool:
        """Whether ``packed_ref_logprobs`` is an input, hence ``ref_inf`` in the graph."""
        return self.kl_loss_coef != 0 or self.kl_ctl != 0

    @property
    def needs_teacher(self) -> bool:
        """Whether ``teacher_logprobs`` is an input, hence ``teacher_inf`` in the graph."""
        return self.distill_weight != 0 and self.feedback == NONE

    @property
    def needs_feedback(self) -> bool:
        """Whether ``feedback_logratios`` is an input, hence ``feedback_inf`` in the graph."""
        return self.distill_weight != 0 and self.feedback != NONE

    @property
    def needs_actor_inf(self) -> bool:
        """Whether ``proximal_logprobs`` is an input, hence ``actor_inf`` in the graph."""
        return self.prox_logp_method == "actor_inf"

    @property
    def needs_values(self) -> bool:
        """Whether ``values`` is an input, hence a critic in the graph."""
        return self.adv_estimator == GAE

    @property
    def turn_keys(self) -> tuple[str, ...]:
        """Inputs of the train call that rollouts make only where they are asked for."""
        if self.credit != "episode":
            return TURN_KEYS if self.credit == "state" else TURN_KEYS[:2]
        return (TURN_IDS,) if AGGREGATIONS[self.loss_agg].by_turn else ()

    @property
    def scored_keys(self) -> tuple[str, ...]:
        """Inputs of the train call that other calls make: ``ref_inf``, ``teacher_inf``, ``feedback_inf``,
        ``critic_inf`` and ``actor_inf``."""
        made = {
            "packed_ref_logprobs": self.needs_reference,
            "teacher_logprobs": self.needs_teacher,
            FEEDBACK_RATIOS: self.needs_feedback,
            "values": self.needs_values,
            "proximal_logprobs": self.needs_actor_inf,
        }
        return tuple(key for key, needed in made.items() if needed)


def _with_own(function: Callable[..., Any], own: Any, *given: Any) -> Any:
    return function(*given, own)


def batch_problems(ppo: PolicyGradientOptions, config: ExperimentConfig) -> Iterator[str]:
    """Yield what is wrong with groups and minibatches beside the options of rollouts and batches."""
    if config.rollout.min_group_size > ppo.group_size:
        yield (f"rollout.min_group_size={config.rollout.min_group_size}: larger than ppo.group_size={ppo.group_size}")
    if ppo.dynamic_sampling and ppo.dynamic_sampling * config.dataset.train_bs_n_seqs < 1:
        yield (
            f"ppo.dynamic_sampling={ppo.dynamic_sampling:g}: less than one group of a step, which has "
            f"dataset.train_bs_n_seqs={config.dataset.train_bs_n_seqs} of them"
        )
    sequences = config.dataset.train_bs_n_seqs * ppo.group_size
    if ppo.ppo_n_minibatches > sequences:
        yield (
            f"ppo.ppo_n_minibatches={ppo.ppo_n_minibatches}: a step has dataset.train_bs_n_seqs times "
            f"ppo.group_size = {sequences} sequences"
        )
    if ppo.kl_target is not None and ppo.kl_horizon < sequences:
        yield (
            f"ppo.kl_horizon={ppo.kl_horizon:g}: shorter than a step, which has dataset.train_bs_n_seqs times "
            f"ppo.group_size = {sequences} sequences"
        )


def policy_gradient_options(options: PolicyGradientOptions | Mapping[str, Any]) -> PolicyGradientOptions:
    """Build options from plain data. Raises ValueError that names an unknown option and a close one."""
    if isinstance(options, PolicyGradientOptions):
        return options
    known = [every.name for every in fields(PolicyGradientOptions)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            raise ValueError(f"ppo.{name} is not an option" + (f"; did you mean {close[0]!r}?" if close else ""))
    return PolicyGradientOptions(**dict(options))
