"""Options of the policy gradient (section ``ppo``), as given and as resolved by
``resolution.resolve``.

This module imports no torch.
"""

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
from realhf.base.plugin import absolute_reference
from realhf.registry import advantage_estimators, policy_losses

KL_ESTIMATORS = ("k1", "k2", "k3")
"""KL estimators of Schulman 2020 (``policy_loss.kl_estimate``)."""
PROXIMAL_METHODS = ("actor_inf", "recompute", "loglinear")
"""Methods of computing the proximal log-probabilities."""
WEIGHT_MODES = ("mask", "truncate", "none")
"""What to do with a behaviour weight outside its bounds."""
CREDITS = ("episode", "turn", "state")
"""Units to which rewards are credited."""
COUNTS = ("rollout", "row")
"""Units that count once in groups, baselines and means: rollouts or their sequences (rows)."""
LEVELS = ("token", "sequence")
"""Levels at which the policy ratio is computed."""
WEIGHT_LEVELS = (*LEVELS, "product")
"""Levels at which the behaviour weight is computed; ``sequence`` is the geometric mean over a
sequence, ``product`` the product."""
ALL, EXTREMES = PAIRINGS = ("all", "extremes")
"""Choices of the pairs formed in a group (``preference.pairing``): all pairs of rollouts with
different rewards, or only the best and the worst."""
PASS_AT_K = "pass_at_k"
"""Estimator that compares subsets of ``ppo.pass_at_k`` responses."""
GAE = "gae"
"""Estimator that uses the values of a critic."""
RETURN_TO_GO = ("reinforce_pp", "reinforce_pp_baseline")
"""Estimators that compute a return-to-go for each token; the others give one advantage per
response."""
OF_STATES = ("grpo", "grpo_nostd", "rloo")
"""Estimators that ``ppo.credit=state`` supports, both for episodes and for turns."""
OF_SUCCESS = ("maxrl", PASS_AT_K)
"""Estimators that interpret the reward of an episode as its success."""
_NO_KL = "there is no KL term (ppo.kl_ctl, ppo.kl_loss_coef)"
_NO_KL_REWARD = "there is no KL term in the reward (ppo.kl_ctl)"


@dataclass
class PolicyGradientOptions:
    """Options of the policy gradient. ``algo`` names a preset (docs/algorithms.md), which sets
    every option without a value.

    Off-policy tokens (docs/reference/dataflow.md 10): with ``use_decoupled_loss`` the ratio is
    clipped against the proximal policy, the weights at the start of the train step, and every token
    is weighted by its proximal over its behaviour probability. Alternatively, ``recompute_logprob``
    replaces the behaviour log-probabilities with the proximal ones. That is the default for a
    sequence ratio (gspo), whose clip range is narrower than the mismatch between the
    log-probabilities of generator and trainer. If these differ by more than rounding (older
    weights, another program, bfloat16), the decoupled objective is the default: with one update per
    step it costs no forward pass."""

    algo: str = option(
        "grpo",
        "Preset that sets every option without a value, or a custom algorithm, FILE.py:NAME.",
        choices=tuple(PRESETS),
        reference=True,
    )
    group_size: int = option(8, "Number of rollouts per task, which form a group.", at_least=1)
    adv_estimator: str | None = option(
        None,
        "Advantage estimator applied to the rewards of a group.",
        registry="advantage_estimators",
    )
    pass_at_k: int | None = option(
        None,
        "k of adv_estimator=pass_at_k: number of attempts at a task of which the best one counts.",
        at_least=2,
        unused_because="only adv_estimator=pass_at_k compares sets of attempts",
    )
    loss: str | None = option(None, "Policy loss of a token.", registry="policy_losses")
    ratio: str | None = option(
        None, "Level of the policy ratio: per token or per sequence.", choices=LEVELS
    )
    loss_agg: str | None = option(
        None,
        "Aggregation of the token losses into the loss of a minibatch.",
        choices=tuple(AGGREGATIONS),
    )
    eps_clip: float | None = option(
        None,
        "Lower clip range: the policy ratio is clipped to at least 1 minus this value. A ratio "
        "against the weights at "
        "the start of the step is 1 in the first update.",
        at_least=0,
    )
    eps_clip_higher: float | None = option(
        None,
        "Upper clip range: the policy ratio is clipped to at most 1 plus this value.",
        at_least=0,
    )
    c_clip: float | None = option(
        None, "Dual-clip constant: bound of the loss in multiples of a negative advantage.", above=1
    )
    kl_loss_coef: float | None = option(
        None, "Coefficient of the KL to the reference in the loss.", at_least=0
    )
    kl_ctl: float | None = option(None, "Coefficient of the KL penalty in the reward.", at_least=0)
    kl_target: float | None = option(
        None,
        "Target of the adaptive KL controller, which adjusts ppo.kl_ctl, in nats per rollout. "
        "Without it ppo.kl_ctl is "
        "constant.",
        above=0,
        unused_because=_NO_KL_REWARD,
    )
    kl_horizon: float = option(
        10000.0,
        "Horizon of the adaptive KL controller (ppo.kl_target): number of rollouts after which "
        "ppo.kl_ctl has changed "
        "by about its own size times the relative error.",
        above=0,
        unused_because="there is no ppo.kl_target",
    )
    kl_estimator: str | None = option(
        None,
        "KL estimator (Schulman 2020), for the KL in the reward and in the loss.",
        choices=KL_ESTIMATORS,
        unused_because=_NO_KL,
    )
    rl_weight: float | None = option(
        None,
        "Weight of the advantage from rewards in the advantage of a token; by default 1, with "
        "algo=opd and sdpo 0.",
        at_least=0,
    )
    distill_weight: float | None = option(
        None,
        "Weight of the distillation advantage, the teacher's log-probability minus the policy's "
        "(on-policy "
        "distillation, section teacher, or ppo.feedback); by default 0, with algo=opd and sdpo 1.",
        at_least=0,
    )
    feedback: str | None = option(
        None,
        "Feedback in the prompt with which the policy is its own teacher: the environment's errors "
        "in a failed "
        "rollout (errors), another rollout of the group that solved the task (solved), or solved "
        "and otherwise errors "
        "(any). With none, the default, the teacher is another model (section teacher); with "
        "algo=sdpo the default is "
        "any.",
        choices=FEEDBACKS,
    )
    feedback_tokens: int | None = option(
        None,
        "Maximum number of tokens that feedback adds to a prompt, within rollout.max_total_tokens; "
        "by default 256.",
        at_least=16,
        unused_because="there is no feedback (ppo.feedback)",
    )
    entropy_coef: float = option(0.0, "Coefficient of the entropy bonus in the loss.", at_least=0)
    adv_norm: bool | None = option(None, "Normalise the advantages over the batch.")
    count: str = option(
        "rollout",
        "Unit that groups, baselines and means count: the rollout, or each of its rows, of which "
        "dropped reasoning or "
        "the branches of an agent make several.",
        choices=COUNTS,
    )
    credit: str | None = option(
        None,
        "Credit assignment: the advantage of a token is that of its episode (episode), that of the "
        "return from its "
        "turn on (turn), or the sum of the former and that of its turn among the turns of the "
        "group that started in "
        "the same state (state).",
        choices=CREDITS,
    )
    step_advantage_weight: float | None = option(
        None,
        "Weight of the step-level advantage with ppo.credit=state, by default 1.",
        above=0,
        unused_because="only ppo.credit=state compares turns by their states",
    )
    discount: float | None = option(
        None,
        "Discount factor, per sampled token (gae, reinforce_pp) or per turn (ppo.credit=turn, "
        "state); by default 1, "
        "with algo=gigpo 0.95.",
        above=0,
        at_most=1,
    )
    gae_lambda: float = option(
        1.0,
        "Lambda of adv_estimator=gae: 1 uses the whole return, 0 only the next value.",
        at_least=0,
        at_most=1,
        unused_because="only adv_estimator=gae has values",
    )
    use_decoupled_loss: bool | None = option(
        None,
        "Use the decoupled objective: the ratio is against the proximal policy, and a behaviour "
        "weight multiplies the "
        "loss of each token. It is the default if sampler and trainer differ: in asynchronous "
        "runs, with tokens of "
        "external samplers, and in bfloat16.",
    )
    correction: str | None = option(
        None,
        "Published off-policy correction (docs/algorithms.md) that sets every ppo.behav_imp option "
        "without a value; "
        "by default decoupled if sampler and trainer differ, otherwise none.",
        choices=tuple(CORRECTIONS),
    )
    recompute_logprob: bool | None = option(
        None,
        "Use the proximal log-probabilities instead of the generator's as the behaviour policy.",
    )
    prox_logp_method: str | None = option(
        None,
        "Source of the proximal log-probabilities: the call actor_inf, a forward pass in the train "
        "call (recompute), "
        "or interpolation by weight versions without a forward pass (loglinear).",
        choices=PROXIMAL_METHODS,
    )
    behav_imp_weight_mode: str | None = option(
        None,
        "Treatment of a behaviour weight outside its bounds: set it to 0 (mask, the default), clip "
        "it (truncate), or "
        "use no weights (none).",
        choices=WEIGHT_MODES,
    )
    behav_imp_weight_cap: float | None = option(
        None, "Upper bound of a behaviour weight, by default 5.", above=0
    )
    behav_imp_weight_floor: float | None = option(
        None, "Lower bound of a behaviour weight.", above=0
    )
    behav_imp_weight_level: str | None = option(
        None,
        "Level of the behaviour weight: per token, the geometric mean of a sequence (sequence), or "
        "the product over a "
        "sequence (product); by default as ppo.ratio.",
        choices=WEIGHT_LEVELS,
    )
    behav_imp_sequence_cap: float | None = option(
        None,
        "Maximum geometric mean of the behaviour weights of a sequence; others get weight 0.",
        above=0,
    )
    behav_imp_sequence_floor: float | None = option(
        None,
        "Minimum geometric mean of the behaviour weights of a sequence; others get weight 0.",
        above=0,
    )
    loss_scale_len: int | None = option(
        None,
        "Divisor of loss_agg=constant; by default the maximum number of tokens that the policy can "
        "sample in an "
        "episode.",
        at_least=1,
    )
    ppo_n_minibatches: int = option(
        1, "Number of minibatches (updates) per pass over the batch.", at_least=1
    )
    sample_reuse: int = option(1, "Number of passes over the batch per train step.", at_least=1)
    reward_scaling: float = option(1.0, "Factor that rewards are multiplied by, after the bias.")
    reward_bias: float = option(0.0, "Bias added to every reward.")
    max_reward_clip: float = option(
        20.0, "Rewards are clipped to plus or minus this value.", above=0
    )
    dynamic_sampling: float | None = option(
        None,
        "Replace groups whose rewards are all equal with additional groups before the step trains: "
        "maximum number of "
        "additional groups, in multiples of the groups of a step. 0 keeps all groups.",
        at_least=0,
        at_most=100,
    )
    overlong_buffer: float | None = option(
        None,
        "Fraction of ppo.overlong_length over which the length penalty grows from 0 to 1, whatever "
        "the reward. 0 "
        "disables the penalty.",
        at_least=0,
        at_most=1,
    )
    overlong_length: int | None = option(
        None,
        "Number of sampled tokens from which a rollout gets the full length penalty "
        "(ppo.overlong_buffer); by default "
        "the maximum number of tokens that the policy can sample in an episode.",
        at_least=1,
    )
    mask_too_long: bool = option(
        False,
        "Exclude sequences that were cut off by a token limit (not by a turn limit) from the loss.",
    )
    max_nonfinite_steps: int = option(
        3,
        "Number of consecutive updates without a finite gradient after which the run ends.",
        at_least=1,
        on_resume="free",
    )


class ResolvedOptions(PolicyGradientOptions):
    """Options with the preset applied. The options declared below are never None.

    ``loss_scale_len`` is None unless ``loss_agg`` is ``constant``, ``prox_logp_method`` is None if
    no proximal log-probabilities are used, and ``behav_imp_weight_mode`` is ``none`` if the
    objective is not decoupled.
    """

    algorithm: Algorithm | None = None
    """The custom algorithm that ``algo`` names, None for a preset."""
    own: Any = None
    """Options of the custom algorithm, an instance of its own options class."""

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

    def to_plain_values(self, config: PolicyGradientOptions) -> dict[str, Any]:
        """Return the options ``config`` as plain values, with those filled in that depend on how
        tokens are sampled.

        Resolving the result in another process gives the same options, without knowledge of the
        sampler.
        """
        resolved = {
            name: getattr(self, name)
            for name in (
                "use_decoupled_loss",
                "prox_logp_method",
                "overlong_buffer",
                "overlong_length",
                "dynamic_sampling",
            )
        }
        resolved["algo"] = absolute_reference(config.algo)
        return {
            **{item.name: getattr(config, item.name) for item in fields(config)},
            **resolved,
        }

    def token_loss(self) -> Callable[..., Any]:
        """Return the policy loss, a function of a microbatch's ``LossTerms`` and these options."""
        if (
            self.algorithm is not None
            and self.algorithm.loss is not None
            and self.loss == self.algo
        ):
            return partial(_call_with_options, self.algorithm.loss, self.own)
        return policy_losses.get(self.loss)

    def estimator(self) -> Callable[..., Any]:
        """Return the advantage estimator, a function of ``scores``, ``valid`` and ``group``."""
        if (
            self.algorithm is not None
            and self.algorithm.advantages is not None
            and self.adv_estimator == self.algo
        ):
            return partial(_call_with_options, self.algorithm.advantages, self.own)
        return advantage_estimators.get(self.adv_estimator)

    @property
    def n_updates(self) -> int:
        """Number of updates of a train step if no minibatch is empty."""
        return self.ppo_n_minibatches * self.sample_reuse

    @property
    def needs_reference(self) -> bool:
        """Whether ``packed_ref_logprobs`` is an input, so that the graph needs ``ref_inf``."""
        return self.kl_loss_coef != 0 or self.kl_ctl != 0

    @property
    def needs_teacher(self) -> bool:
        """Whether ``teacher_logprobs`` is an input, so that the graph needs ``teacher_inf``."""
        return self.distill_weight != 0 and self.feedback == NONE

    @property
    def needs_feedback(self) -> bool:
        """Whether ``feedback_logratios`` is an input, so that the graph needs ``feedback_inf``."""
        return self.distill_weight != 0 and self.feedback != NONE

    @property
    def needs_actor_inf(self) -> bool:
        """Whether ``proximal_logprobs`` is an input, so that the graph needs ``actor_inf``."""
        return self.prox_logp_method == "actor_inf"

    @property
    def needs_values(self) -> bool:
        """Whether ``values`` is an input, so that the graph needs a critic."""
        return self.adv_estimator == GAE

    @property
    def turn_keys(self) -> tuple[str, ...]:
        """Inputs of the train call that rollouts include only if requested."""
        if self.credit != "episode":
            return TURN_KEYS if self.credit == "state" else TURN_KEYS[:2]
        return (TURN_IDS,) if AGGREGATIONS[self.loss_agg].by_turn else ()

    @property
    def scored_keys(self) -> tuple[str, ...]:
        """Inputs of the train call that other calls compute.

        These calls are ``ref_inf``, ``teacher_inf``, ``feedback_inf``, ``critic_inf`` and
        ``actor_inf``.
        """
        needed_of = {
            "packed_ref_logprobs": self.needs_reference,
            "teacher_logprobs": self.needs_teacher,
            FEEDBACK_RATIOS: self.needs_feedback,
            "values": self.needs_values,
            "proximal_logprobs": self.needs_actor_inf,
        }
        return tuple(key for key, needed in needed_of.items() if needed)


def _call_with_options(function: Callable[..., Any], options: Any, *args: Any) -> Any:
    """Call ``function`` with the given arguments, followed by the options of the custom
    algorithm."""
    return function(*args, options)


def batch_problems(ppo: PolicyGradientOptions, config: ExperimentConfig) -> Iterator[str]:
    """Yield an error text for each conflict between the options of groups and minibatches and those
    of rollouts and batches."""
    if config.rollout.min_group_size > ppo.group_size:
        yield (
            f"rollout.min_group_size={config.rollout.min_group_size}: larger than "
            f"ppo.group_size={ppo.group_size}"
        )
    if ppo.dynamic_sampling and ppo.dynamic_sampling * config.dataset.train_bs_n_seqs < 1:
        yield (
            f"ppo.dynamic_sampling={ppo.dynamic_sampling:g}: less than one group of a step, which "
            f"has "
            f"dataset.train_bs_n_seqs={config.dataset.train_bs_n_seqs} of them"
        )
    sequences = config.dataset.train_bs_n_seqs * ppo.group_size
    if ppo.ppo_n_minibatches > sequences:
        yield (
            f"ppo.ppo_n_minibatches={ppo.ppo_n_minibatches}: a step has dataset.train_bs_n_seqs "
            f"times "
            f"ppo.group_size = {sequences} sequences"
        )
    if ppo.kl_target is not None and ppo.kl_horizon < sequences:
        yield (
            f"ppo.kl_horizon={ppo.kl_horizon:g}: shorter than a step, which has "
            f"dataset.train_bs_n_seqs times "
            f"ppo.group_size = {sequences} sequences"
        )


def policy_gradient_options(
    options: PolicyGradientOptions | Mapping[str, Any],
) -> PolicyGradientOptions:
    """Return the options built from plain values.

    Raises ValueError for an unknown option, naming it and the closest known one.
    """
    if isinstance(options, PolicyGradientOptions):
        return options
    known = [item.name for item in fields(PolicyGradientOptions)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            raise ValueError(
                f"ppo.{name} is not an option" + (f"; did you mean {close[0]!r}?" if close else "")
            )
    return PolicyGradientOptions(**dict(options))
