"""Defines the sections ppo and critic, and how open options are resolved and refused; imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from realhf.algorithms.aggregation import AGGREGATIONS
from realhf.algorithms.presets import COMMON, CORRECTIONS, PRESETS
from realhf.api.algorithm import ADVANTAGES, CLIP_OPTIONS, LOSS, Algorithm, algorithm_of, is_own
from realhf.api.config import ExperimentConfig, LoraConfig, ModelConfig, OptimizerConfig
from realhf.api.keys import TURN_IDS, TURN_KEYS
from realhf.api.option import option, problems, section
from realhf.base.plugin import absolute
from realhf.registry import advantage_estimators, policy_losses, registered_names

KL_ESTIMATORS = ("k1", "k2", "k3")
PROXIMAL_METHODS = ("actor_inf", "recompute", "loglinear")
WEIGHT_MODES = ("mask", "truncate", "none")
CREDITS = ("episode", "turn", "state")
COUNTS = ("rollout", "row")
LEVELS = ("token", "sequence")
"""Levels at which the policy ratio is taken."""
WEIGHT_LEVELS = (*LEVELS, "product")
"""Levels at which the behaviour weight is taken: of a sequence the geometric mean or the product."""
PASS_AT_K = "pass_at_k"
"""The estimator that compares sets of ``ppo.pass_at_k`` responses."""
GAE = "gae"
"""The estimator whose advantages come from the values of a critic."""
_NO_KL = "there is no KL term (ppo.kl_ctl, ppo.kl_loss_coef)"
_NO_KL_REWARD = "there is no KL term in the reward (ppo.kl_ctl)"


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
    eps_clip: float | None = option(None, "The ratio is clipped this far below 1.", at_least=0)
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
        "0.",
        at_least=0,
    )
    distill_weight: float | None = option(
        None,
        "The advantage of a token contains the teacher's log-probability minus the policy's times this (on-policy "
        "distillation, section teacher); by default 0, with algo=opd 1.",
        at_least=0,
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
    max_reward_clip: float = option(20.0, "Rewards are clipped at this distance from 0.", at_least=0)
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
            for name in ("use_decoupled_loss", "prox_logp_method", "overlong_buffer", "overlong_length")
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
        return self.distill_weight != 0

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
        """Inputs of the train call that ``ref_inf``, ``teacher_inf``, ``critic_inf`` and ``actor_inf`` make."""
        made = {
            "packed_ref_logprobs": self.needs_reference,
            "teacher_logprobs": self.needs_teacher,
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


def resolve(
    config: PolicyGradientOptions | Mapping[str, Any],
    *,
    loss_scale_len: int | None = None,
    sampler_differs: bool = False,
    own: Any = None,
) -> ResolvedOptions:
    """Fill in the preset of ``config.algo``, or what an algorithm of somebody's own there sets, whose options are
    ``own``, a section or a mapping (None: their defaults). ``loss_scale_len`` is the divisor of ``loss_agg=constant``
    where the option of that name is not set; ``sampler_differs`` says that tokens are sampled by other weights or with
    another arithmetic than the trainer's, so that the objective is decoupled unless the options say otherwise. Raises
    ValueError naming the option that is missing, unknown, out of range, or without effect."""
    config = policy_gradient_options(config)
    if wrong := [*problems(config, "ppo", registered_names)]:
        raise ValueError("\n".join(wrong))
    algorithm = algorithm_of(config.algo) if is_own(config.algo) else None
    preset = PRESETS[config.algo].options if algorithm is None else _own_preset(config.algo, algorithm)
    config = _corrected(config)
    given = {every.name: getattr(config, every.name) for every in fields(config)}
    chosen = {name: item for name, item in given.items() if item is not None}
    value = {**COMMON, **preset, **chosen}
    if algorithm is not None and (wrong := [*_of_its_own(config, value, algorithm)]):
        raise ValueError("\n".join(f"ppo.{line}" for line in wrong))
    value["use_decoupled_loss"] = _decouples(config, sampler_differs)
    value["recompute_logprob"] = _recomputes(config, value)
    check_effects(config, value)
    if value["eps_clip_higher"] is None:
        value["eps_clip_higher"] = value["eps_clip"]
    value |= _dapo(config, value, loss_scale_len, algorithm)
    value["loss_scale_len"] = _divisor(config, value, loss_scale_len)
    resolved = ResolvedOptions(**{**value, **_off_policy(config, value)})
    if algorithm is not None:
        resolved.algorithm, resolved.own = algorithm, algorithm.own(own)
    return resolved


def _own_preset(reference: str, algorithm: Algorithm) -> Mapping[str, Any]:
    """Return what an algorithm sets in the section. Raises ValueError for an option that is unknown, has a default of
    its own, so that nobody could tell whether it was set, or cannot be what it is set to."""
    try:
        wrong = [*problems(policy_gradient_options(algorithm.preset), "ppo", registered_names)]
    except ValueError as error:
        wrong = [str(error)]
    for name in algorithm.preset:
        if not wrong and getattr(PolicyGradientOptions, name) is not None:
            wrong.append(f"ppo.{name} has a value without a preset; let people set it")
    if wrong:
        raise ValueError("\n".join(f"ppo.algo={reference}: its preset: {line}" for line in wrong))
    return algorithm.defaults(reference)


def _of_its_own(config: PolicyGradientOptions, value: Mapping[str, Any], algorithm: Algorithm) -> Iterator[str]:
    """Yield a line for every option that does nothing, or cannot be, beside an algorithm of somebody's own."""
    loss = algorithm.loss is not None and value[LOSS] == config.algo
    advantages = algorithm.advantages is not None and value[ADVANTAGES] == config.algo
    if loss:
        for name in CLIP_OPTIONS:
            if name not in algorithm.clip_options and getattr(config, name) is not None:
                yield f"{name} has no effect with the loss of ppo.algo={config.algo}: remove it"
    if advantages and algorithm.compares and config.group_size < 2:
        yield f"group_size must be at least 2 for the advantages of ppo.algo={config.algo}"
    if algorithm.options is not None and not loss and not advantages:
        replaced = [f"ppo.{name}={getattr(config, name)}" for name in (LOSS, ADVANTAGES) if getattr(config, name)]
        yield f"algo={config.algo}: nothing of it that has options is left with {' and '.join(replaced)}; take a preset"


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


def _dapo(
    config: PolicyGradientOptions, value: Mapping[str, Any], longest: int | None, algorithm: Algorithm | None
) -> dict[str, Any]:
    """Return the options of dynamic sampling and of the penalty for length. What a preset asks for is left out where it
    cannot be; what was set is an error there. Raises ValueError."""
    estimator, credit = value["adv_estimator"], value["credit"]
    compares = algorithm.compares if algorithm is not None and estimator == config.algo else estimator in _NEEDS_GROUPS
    of_what = f"credit={credit}" if credit != "episode" else f"adv_estimator {estimator!r}"
    distils = value["distill_weight"] != 0
    samples = compares and credit == "episode" and not distils
    graded = credit == "episode" and estimator != "maxrl"
    if config.dynamic_sampling and not samples:
        teacher = "a teacher" if distils else of_what
        raise ValueError(
            f"ppo.dynamic_sampling={config.dynamic_sampling:g}: with {teacher} a group of equal rewards teaches, too"
        )
    length = longest if config.overlong_length is None else config.overlong_length
    if config.overlong_buffer and not graded:
        why = "takes no reward below 0" if credit == "episode" else "reads the rewards of turns"
        raise ValueError(f"ppo.overlong_buffer={config.overlong_buffer:g}: {of_what} {why}")
    if config.overlong_buffer and length is None:
        raise ValueError(f"ppo.overlong_buffer={config.overlong_buffer:g}: needs ppo.overlong_length here")
    buffer = value["overlong_buffer"] if graded and length is not None else 0.0
    if config.overlong_length is not None and not buffer:
        raise ValueError("ppo.overlong_length has no effect without ppo.overlong_buffer: remove it")
    return {
        "dynamic_sampling": value["dynamic_sampling"] if samples else 0.0,
        "overlong_buffer": buffer,
        "overlong_length": length if buffer else None,
    }


def _divisor(config: PolicyGradientOptions, value: Mapping[str, Any], default: int | None) -> int | None:
    """Return the divisor: the same number for the part that validates and the part that trains. It never has a silent
    default."""
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


def _corrected(config: PolicyGradientOptions) -> PolicyGradientOptions:
    """Return the options with those of ``correction`` in the place of what is not set; without a weight it has no
    bounds. Raises ValueError where they contradict it."""
    corrects = None if config.correction is None else config.correction != "none"
    if None not in (corrects, config.use_decoupled_loss) and config.use_decoupled_loss != corrects:
        set_to = str(config.use_decoupled_loss).lower()
        raise ValueError(f"ppo.correction={config.correction}: contradicts use_decoupled_loss={set_to}, remove one")
    sets = CORRECTIONS[config.correction].options if config.correction is not None else {}
    idle = _WEIGHT_BOUNDS if config.behav_imp_weight_mode == "none" else ()
    open_ones = [name for name in sets if name not in idle and getattr(config, name) is None]
    return replace(config, **{name: sets[name] for name in open_ones})


def _decouples(config: PolicyGradientOptions, sampler_differs: bool) -> bool:
    """Return whether the ratio is taken against the proximal policy and tokens carry a behaviour weight.

    Where sampler and trainer differ, their ratio is off 1 before any update: the clip would act on this difference in
    place of the update, and nothing would correct for it.
    """
    if config.use_decoupled_loss is not None:
        return config.use_decoupled_loss
    if config.correction is not None:
        return config.correction != "none"
    return sampler_differs and not config.recompute_logprob


def _recomputes(config: PolicyGradientOptions, value: Mapping[str, Any]) -> bool:
    """Return whether the ratio is taken against recomputed log-probabilities in place of the generator's.

    The ratio of a sequence is clipped within about 3e-4, less than the rounding by which two programs differ for the
    same weights: against the generator's own numbers a third of the sequences would be clipped by chance.
    """
    if config.recompute_logprob is not None:
        return config.recompute_logprob
    return value["ratio"] == "sequence" and value["loss"] != "reinforce" and not value["use_decoupled_loss"]


def _off_policy(config: PolicyGradientOptions, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options about the proximal policy and the behaviour weight, with their defaults."""
    decoupled = value["use_decoupled_loss"]
    cap, floor = config.behav_imp_weight_cap, config.behav_imp_weight_floor
    return {
        "prox_logp_method": _method(config, value) if decoupled or value["recompute_logprob"] else None,
        "behav_imp_weight_mode": (config.behav_imp_weight_mode or "mask") if decoupled else "none",
        "behav_imp_weight_cap": DEFAULT_CAP if cap is None else cap,
        "behav_imp_weight_floor": 0.0 if floor is None else floor,
        # A clip of whole sequences leaves nothing for weights of single tokens to repair.
        "behav_imp_weight_level": config.behav_imp_weight_level or value["ratio"],
    }


def _method(config: PolicyGradientOptions, value: Mapping[str, Any]) -> str:
    """Return where the proximal log-probabilities come from. What nobody chose does not change the graph: the train
    call recomputes. A critic needs those of the reward too, and has no policy to recompute them with."""
    if config.prox_logp_method is not None:
        return config.prox_logp_method
    shared = value["adv_estimator"] == GAE and value["recompute_logprob"] and value["kl_ctl"] != 0
    return "actor_inf" if config.use_decoupled_loss or config.recompute_logprob is not None or shared else "recompute"


RETURN_TO_GO = ("reinforce_pp", "reinforce_pp_baseline")
"""Estimators whose advantage is what a token and those after it earn; the others give one number per response."""
DEFAULT_CAP = 5.0
"""Largest behaviour weight that is kept, where the options set no cap."""
OF_STATES = ("grpo", "grpo_nostd", "rloo")
"""Estimators that ``ppo.credit=state`` may have, for episodes and for turns alike."""
OF_SUCCESS = ("maxrl", PASS_AT_K)
"""Estimators that take the reward of an episode for its success."""
_NEEDS_GROUPS = ("grpo", "grpo_nostd", "rloo", "reinforce_pp_baseline", *OF_SUCCESS)
_HAS_NO_EFFECT = MappingProxyType({"reinforce": CLIP_OPTIONS, "cispo": ("c_clip",)})
"""For each loss, the options that it does not read."""
_OF_REWARDS = ("adv_estimator", "credit", "step_advantage_weight", "discount", "pass_at_k", "adv_norm", "kl_target")
"""Options about advantages by rewards."""
_WEIGHT_BOUNDS = ("behav_imp_weight_cap", "behav_imp_weight_floor", "behav_imp_weight_level")
_SEQUENCE_BOUNDS = ("behav_imp_sequence_cap", "behav_imp_sequence_floor")
_OF_WEIGHTS = ("behav_imp_weight_mode", *_WEIGHT_BOUNDS, *_SEQUENCE_BOUNDS)


def check_effects(config: PolicyGradientOptions, value: Mapping[str, Any]) -> None:
    """Check ``value``: the options of ``config`` with those of the preset filled in, and whether log-probabilities are
    recomputed. Raises ValueError naming the option."""
    for wrong in (*_without_effect(config, value), *_contradictions(config, value)):
        raise ValueError(f"ppo.{wrong}")


def _without_effect(config: PolicyGradientOptions, value: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every option that is set and that nothing reads."""
    loss, estimator = value["loss"], value["adv_estimator"]
    decoupled, recomputed = value["use_decoupled_loss"], value["recompute_logprob"]
    no_kl, credit = value["kl_ctl"] == 0, value["credit"]
    of_later = estimator in (*RETURN_TO_GO, GAE) or credit != "episode"
    rules = [
        *((name, True, f"with loss {loss!r}") for name in _HAS_NO_EFFECT.get(loss, ())),
        ("kl_estimator", no_kl and value["kl_loss_coef"] == 0, "while kl_ctl and kl_loss_coef are 0"),
        ("discount", not of_later, f"with adv_estimator {estimator!r}"),
        *((name, not value["rl_weight"], "with rl_weight 0") for name in _OF_REWARDS),
        ("step_advantage_weight", credit != "state", f"with credit {credit!r}"),
        ("gae_lambda", estimator != GAE, f"with adv_estimator {estimator!r}: remove it, or use gae"),
        ("pass_at_k", estimator != PASS_AT_K, f"with adv_estimator {estimator!r}: remove it, or use pass_at_k"),
        ("kl_target", no_kl, "while kl_ctl is 0: it is where the steering starts, set it"),
        ("kl_horizon", config.kl_target is None, "without ppo.kl_target"),
        ("loss_scale_len", value["loss_agg"] != "constant", f"with loss_agg {value['loss_agg']!r}"),
        ("prox_logp_method", not decoupled and not recomputed, "without use_decoupled_loss or recompute_logprob"),
        *((name, not decoupled, "without use_decoupled_loss") for name in _OF_WEIGHTS),
        *((name, config.behav_imp_weight_mode == "none", "with behav_imp_weight_mode=none") for name in _WEIGHT_BOUNDS),
    ]
    for name, idle, why in rules:
        if idle and getattr(config, name) != getattr(PolicyGradientOptions, name):
            yield f"{name} has no effect {why}" + ("" if ": " in why else ": remove it")
    if decoupled and recomputed:
        yield (
            "recompute_logprob has no effect with use_decoupled_loss, which clips against the recomputed policy "
            "already: remove it"
        )
    bounded = any(getattr(config, name) is not None for name in _SEQUENCE_BOUNDS)
    if loss == "reinforce" and decoupled and config.behav_imp_weight_mode == "none" and not bounded:
        yield "use_decoupled_loss has no effect with loss 'reinforce' and behav_imp_weight_mode=none"
    if loss == "reinforce" and recomputed and no_kl:
        yield "recompute_logprob has no effect with loss 'reinforce' and without kl_ctl: remove it"


def _contradictions(config: PolicyGradientOptions, value: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every option that cannot be beside the others."""
    estimator, recomputed = value["adv_estimator"], value["recompute_logprob"]
    if value["kl_estimator"] == "k1" and value["kl_loss_coef"] != 0:
        yield (
            f"kl_estimator=k1 has zero expected gradient in the loss (algo {config.algo!r}): use k2 or k3, or "
            "kl_loss_coef=0 and kl_ctl"
        )
    if value["credit"] == "turn" and estimator in (*RETURN_TO_GO, *OF_SUCCESS):
        has = "is about whole episodes" if estimator in OF_SUCCESS else "has a return-to-go of its own"
        yield f"credit=turn: adv_estimator {estimator!r} {has}; use grpo, grpo_nostd, rloo, reinforce or gae"
    if value["credit"] == "state" and estimator not in OF_STATES:
        yield (
            f"credit=state: adv_estimator {estimator!r} does not compare the members of a group; use "
            f"{', '.join(OF_STATES)}"
        )
    if estimator == PASS_AT_K and not 2 <= (config.pass_at_k or 0) < config.group_size:
        yield (
            f"pass_at_k={config.pass_at_k}: adv_estimator=pass_at_k compares sets of so many of the "
            f"group_size={config.group_size} rollouts: set it from 2 to {config.group_size - 1}"
        )
    if config.prox_logp_method == "loglinear" and recomputed:
        yield "prox_logp_method=loglinear recomputes nothing: with recompute_logprob use actor_inf or recompute"
    if estimator == GAE and recomputed and value["kl_ctl"] != 0 and config.prox_logp_method == "recompute":
        yield (
            "prox_logp_method=recompute: with recompute_logprob and kl_ctl the critic needs what it computes, too; use "
            "actor_inf"
        )
    if not value["rl_weight"] and not value["distill_weight"]:
        yield "rl_weight=0, distill_weight=0: nothing would be learned; set one of them"
    if not value["rl_weight"] and (estimator == GAE or value["kl_ctl"] != 0):
        yield (
            f"rl_weight=0: there is no reward to take the KL divergence off (kl_ctl={value['kl_ctl']:g}) or to predict "
            f"(adv_estimator {estimator!r}); use kl_loss_coef, or another algo than {config.algo}"
        )
    if value["rl_weight"] not in (0, 1) and not value["distill_weight"]:
        yield (
            f"rl_weight={value['rl_weight']:g}: it is a share beside ppo.distill_weight; without that set "
            "actor.optimizer.lr"
        )
    if config.group_size < 2 and value["rl_weight"] and estimator in _NEEDS_GROUPS:
        yield f"group_size must be at least 2 for adv_estimator {estimator!r}"
    low, high = config.behav_imp_sequence_floor, config.behav_imp_sequence_cap
    if low is not None and high is not None and low >= high:
        yield f"behav_imp_sequence_floor={low:g}: must be below behav_imp_sequence_cap={high:g}"
    floor = config.behav_imp_weight_floor
    cap = DEFAULT_CAP if config.behav_imp_weight_cap is None else config.behav_imp_weight_cap
    if floor is not None and floor >= cap:
        yield f"behav_imp_weight_floor must be above 0 and below the cap, got {floor}"


ACTOR = "actor"
"""The path of a critic that starts from the actor's first weights."""
BUILTIN_RATE = 1e-3
"""The learning rate of the built-in policy's critic, unless ``critic.optimizer.lr`` sets one."""


@dataclass
class CriticOptions:
    """How a critic learns to predict the return of every state that the policy samples in (docs/reference/ppo.md 3)."""

    value_norm: bool = option(True, "The critic predicts returns in units of their running mean and deviation.")
    value_norm_decay: float = option(
        0.99,
        "The running mean and deviation of returns keep this much of themselves in every train step.",
        at_least=0,
        at_most=0.99999,
    )
    value_clip: float | None = option(
        0.2,
        "A prediction moves at most this far in a train step before its loss stops to fall; in units of the running "
        "deviation with critic.value_norm. null never clips.",
        above=0,
        idle="a prediction has not moved yet in the first update of a step, and the critic makes no second one "
        "(critic.n_minibatches times critic.sample_reuse is 1)",
    )
    n_minibatches: int | None = option(
        None, "A pass of the critic makes this many updates, by default ppo.ppo_n_minibatches.", at_least=1
    )
    sample_reuse: int | None = option(
        None, "The critic makes this many passes over a batch, by default ppo.sample_reuse.", at_least=1
    )


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    """AdamW, with a learning rate that follows from the model unless it is set."""

    lr: float | None = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        None,
        f"The learning rate after the warm-up; by default {BUILTIN_RATE:g} for the critic of the built-in policy, and "
        "actor.optimizer.lr for every other one.",
        above=0,
        on_resume="warns",
    )

    def at(self, rate: float) -> OptimizerConfig:
        """The same optimizer with the learning rate ``rate``, unless it has one of its own."""
        given = {every.name: getattr(self, every.name) for every in fields(OptimizerConfig)}
        return OptimizerConfig(**{**given, "lr": rate if given["lr"] is None else given["lr"]})


@dataclass
class CriticConfig(CriticOptions, ModelConfig):
    """The critic: a model role of its own with a value head, and how it learns."""

    path: str = option(
        ACTOR,
        "The critic starts from these weights: 'actor' (the actor's first ones), a folder, or a hub id. A value head "
        "that is not in them starts at 0.",
    )
    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig)
    lora: LoraConfig = section(LoraConfig, idle="a critic trains all its weights, its value head with them")
    warmup_steps: int = option(0, "In this many first train steps the critic trains and the actor waits.", at_least=0)

    def learning(self, n_minibatches: int, sample_reuse: int) -> dict[str, Any]:
        """The options of ``CriticOptions`` as plain values, where the actor has ``n_minibatches`` and ``sample_reuse``.
        With one update a step there is no clip, and ``value_clip`` is not read."""
        once = (self.n_minibatches or n_minibatches) * (self.sample_reuse or sample_reuse) == 1
        idle = ("value_clip",) if once else ()
        read = {every.name: getattr(self, every.name) for every in fields(CriticOptions) if every.name not in idle}
        return {**dict.fromkeys(idle), **read}

    def problems(self, name: str) -> Iterator[str]:
        """Workers must be different ones, weights such as there are, and every option does something."""
        if not self.value_norm and self.value_norm_decay != CriticOptions.value_norm_decay:
            yield f"{name}.value_norm_decay={self.value_norm_decay}: has no effect without {name}.value_norm"
        if self.path in ("builtin", "builtin_tiny"):
            yield f"{name}.path={self.path}: the built-in policy is made for the actor; {name}.path={ACTOR} takes it"
        if not self.workers or len(set(self.workers)) < len(self.workers):
            yield f"{name}.workers={self.workers}: give different indices of model workers, from 0"
