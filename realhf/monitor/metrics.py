"""Catalogue of a step's metrics and their public names.

Synchronous and asynchronous runs use the same names. ``docs/metrics.md`` is generated from these
tables: ``python -m realhf.monitor.metrics`` prints it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

POLICY_CALL = "actor_train"
ROLLOUT_CALL = "actor_gen"
CRITIC_CALL = "critic_train"
OVERALL = "overall"
"""Name for the results of all groups together, as in evaluation reports."""


@dataclass(frozen=True)
class Metric:
    """Description of a metric."""

    name: str
    """Public name, in which ``<..>`` is a placeholder, for example for a group, a kind or a
    call."""
    unit: str
    meaning: str
    sources: tuple[str, ...] = ()
    """Names under which calls or parts of the master report the number; () if they use the public
    name."""


@dataclass(frozen=True)
class Section:
    """Metrics of one subject, which form a section of the page."""

    title: str
    introduction: str
    metrics: tuple[Metric, ...]


def _rollout_metric(name: str, unit: str, meaning: str, own: str) -> Metric:
    """Return a metric of rollouts. It is reported by the call that plays them or, in an
    asynchronous run, for the samples of a step."""
    return Metric(name, unit, meaning, (f"{ROLLOUT_CALL}/{own}", f"rollout/{own}"))


def _policy_metric(name: str, unit: str, meaning: str, own: str = "") -> Metric:
    return Metric(name, unit, meaning, (f"{POLICY_CALL}/{own or name.partition('/')[2]}",))


def _critic_metric(name: str, unit: str, meaning: str, own: str = "") -> Metric:
    return Metric(name, unit, meaning, (f"{CRITIC_CALL}/{own or name.partition('/')[2]}",))


REWARDS = Section(
    "Reward and success",
    "Means over the valid rollouts played for the step; a failed rollout has no reward and enters "
    "none of them.",
    (
        _rollout_metric(
            "reward/mean",
            "reward",
            "mean reward of a rollout as the environment gave it; of a run without rollouts of its "
            "own "
            "(`grpo_stream_http`) the same as `reward/trained_mean`",
            "reward",
        ),
        _rollout_metric(
            "reward/mean/<environment>",
            "reward",
            "the same for one environment of a mixture (`env.mix`)",
            "reward_of/<environment>",
        ),
        _policy_metric(
            "reward/std",
            "reward",
            "standard deviation of the rewards that were trained on",
            "reward_std",
        ),
        _policy_metric(
            "reward/trained_mean",
            "reward",
            "mean reward of a rollout that was trained on: scaled, shifted, clipped",
            "reward_mean",
        ),
        _rollout_metric(
            "reward/part/<name>", "reward", "mean of a named part of the reward", "reward/<name>"
        ),
        _rollout_metric(
            f"success/{OVERALL}", "fraction", "rollouts that reached the goal", "success"
        ),
        _rollout_metric(
            "success/<group>",
            "fraction",
            "the same for one group of tasks, in a mixture (`env.mix`) `success/<environment>/<group>`",
            "success/<group>",
        ),
        Metric("success/<environment>", "fraction", "the same for one environment of a mixture"),
        _rollout_metric(
            "environment/<name>",
            "its own",
            "mean of a metric that the environment reports",
            "metric/<name>",
        ),
        _policy_metric(
            "groups/with_signal",
            "count",
            "groups with an advantage other than 0: the others teach nothing",
            "groups_with_signal",
        ),
        _policy_metric(
            "groups/shared_states",
            "fraction",
            "turns that began in a state in which another turn of their group did, with "
            "`ppo.credit=state` only: the "
            "others have no step-level advantage",
            "shared_states",
        ),
        _policy_metric("groups/total", "count", "groups that the step trained on", "n_groups"),
        _rollout_metric(
            "groups/dropped",
            "count",
            "with `ppo.dynamic_sampling`: groups with all rewards equal that gave way to others, "
            "each of which was "
            "played in addition; they are in all means of this section but `reward/trained_mean` "
            "and `reward/std`",
            "n_dropped_groups",
        ),
        _rollout_metric(
            "groups/flat",
            "count",
            "with `ppo.dynamic_sampling`: such groups that were trained on, because its bound was "
            "reached",
            "n_groups_without_signal",
        ),
        _rollout_metric(
            "groups/extra_rounds",
            "count",
            "rounds of play that they cost (synchronous)",
            "n_resample_rounds",
        ),
        _rollout_metric("groups/extra_s", "seconds", "time of these rounds", "resample_seconds"),
    ),
)
LENGTHS = Section(
    "Length",
    "Tokens that the policy sampled in one trained rollout; observations do not count.",
    (
        _policy_metric("length/mean", "tokens", "mean", "response_tokens_mean"),
        _policy_metric("length/max", "tokens", "longest", "response_tokens_max"),
        _policy_metric(
            "length/overlong",
            "fraction",
            "rollouts whose reward `ppo.overlong_buffer` made smaller for their length",
            "overlong_fraction",
        ),
        _policy_metric(
            "length/truncated", "fraction", "rollouts that a token limit ended", "too_long_fraction"
        ),
        _rollout_metric("length/turns", "turns", "mean number of turns of a rollout", "turns"),
        _rollout_metric(
            "length/turns/<environment>",
            "turns",
            "the same for one environment of a mixture",
            "turns_of/<environment>",
        ),
        _rollout_metric(
            "length/out_of_turns",
            "fraction",
            "rollouts that `rollout.max_turns` ended before they succeeded, where their task would "
            "have allowed "
            "another turn",
            "out_of_turns",
        ),
    ),
)
ROLLOUTS = Section(
    "Rollouts and failures",
    "Of the step's samples alone, in both kinds of runs.",
    (
        _rollout_metric(
            "rollouts/played",
            "count",
            "rollouts of the step's samples, failed ones included",
            "rollouts",
        ),
        _rollout_metric(
            "rollouts/played/<environment>",
            "count",
            "the same for one environment of a mixture",
            "n_rollouts_of/<environment>",
        ),
        _rollout_metric(
            "rollouts/failed",
            "count",
            "those without a result; they are not trained on",
            "failed_rollouts",
        ),
        Metric(
            "rollouts/tokens",
            "tokens",
            "tokens sampled for the step",
            (f"{ROLLOUT_CALL}/generated_tokens", "rollout/tokens"),
        ),
        _rollout_metric(
            "rollouts/broken_rules",
            "fraction",
            "turns of a black-box agent whose answer was not what the request asked for "
            "(`tool_choice`, `parallel_tool_calls`, `response_format`, `strict`), of the turns "
            "whose request asked for something; mean over rollouts",
            "broken_rules",
        ),
        Metric(
            "failures/<kind>",
            "count",
            "rollouts that failed, by kind",
            (f"{ROLLOUT_CALL}/failed/<kind>",),
        ),
        Metric(
            "retries/<kind>",
            "count",
            "rollouts that failed and were played again, by kind",
            (f"{ROLLOUT_CALL}/retried/<kind>",),
        ),
    ),
)
POLICY = Section(
    "Policy",
    f"What `{POLICY_CALL}`, or the only train call of an experiment of one's own, returns. Means "
    f"over trained tokens.",
    (
        _policy_metric("policy/loss", "", "loss, averaged over the updates of the step"),
        _policy_metric(
            "policy/loss_<component>",
            "",
            "what a component (`ce`) adds to that",
            "loss_<component>",
        ),
        _policy_metric("policy/nll", "nats", "negative log-likelihood of a token (supervised)"),
        _policy_metric(
            "policy/entropy",
            "nats",
            "entropy of a token's distribution, **estimated**: the mean of -log p of the sampled "
            "tokens under the "
            "policy that sampled them, over all valid sequences",
            "entropy_estimate",
        ),
        _policy_metric(
            "policy/entropy_exact",
            "nats",
            "entropy over the whole vocabulary under the weights that train, with "
            "`ppo.entropy_coef` only",
            "entropy",
        ),
        _policy_metric(
            "policy/kl_ref",
            "nats",
            "KL divergence from the reference (k3 estimate), with a reference only",
        ),
        _policy_metric(
            "policy/kl_ref_clamped_fraction",
            "fraction",
            "tokens that lie further off and enter that mean with 10 nats",
        ),
        _policy_metric(
            "policy/kl_teacher",
            "nats",
            "KL divergence of the policy that sampled from the teacher (with `ppo.feedback` "
            "itself, told what became "
            "of its rollouts), a token (k3 estimate), with `ppo.distill_weight` only",
        ),
        _policy_metric(
            "policy/kl_sequence",
            "nats",
            "KL term of the reward, a rollout, with `ppo.kl_ctl`",
            "kl_of_sequence",
        ),
        _policy_metric(
            "policy/kl_coefficient",
            "",
            "weight of the KL term in the reward at this step",
            "kl_ctl",
        ),
        _policy_metric("policy/ratio_mean", "", "mean ratio of new to old probability"),
        _policy_metric("policy/ratio_max", "", "largest ratio"),
        _policy_metric("policy/clip_fraction", "fraction", "tokens whose ratio the clip decided"),
        _policy_metric(
            "policy/dual_clip_fraction", "fraction", "tokens that the dual clip decided"
        ),
        _policy_metric(
            "policy/clamped_exponents",
            "count",
            "tokens whose log-ratio was beyond +-20 and was cut",
        ),
        _policy_metric(
            "policy/behaviour_weight_mean",
            "",
            "mean weight that corrects for the behaviour policy, as used",
            "behav_weight_mean",
        ),
        _policy_metric(
            "policy/behaviour_weight_max",
            "",
            "largest such weight before any bound",
            "behav_weight_max",
        ),
        _policy_metric(
            "policy/rejected_fraction",
            "fraction",
            "tokens left out because that weight was beyond a bound",
        ),
        _policy_metric(
            "policy/rejected_sequences", "fraction", "sequences that bounds left out whole"
        ),
        _policy_metric(
            "policy/truncated_fraction", "fraction", "tokens whose weight was cut to its bound"
        ),
        _policy_metric(
            "policy/effective_sample_size",
            "fraction",
            "of the weights as used, over tokens, or sequences where `ppo.behav_imp_weight_level` "
            "is theirs: "
            "(sum w)^2 / (n sum w^2)",
        ),
        _policy_metric(
            "policy/grad_norm",
            "",
            "norm of the gradient before clipping, averaged over the updates",
        ),
        _policy_metric("policy/lr", "", "learning rate"),
        _policy_metric("policy/updates", "count", "optimizer steps that were made", "n_updates"),
        _policy_metric(
            "policy/skipped", "count", "optimizer steps left out: loss or gradient was not finite"
        ),
    ),
)
PREFERENCE = Section(
    "Pairs of episodes",
    "Of `experiment=dpo` and `experiment=reward_model`, before the update of the step; every group "
    "counts as much as "
    "every other one. Held-out groups train nothing (`preference.held_out`). A draw counts half.",
    (
        _policy_metric(
            "preference/accuracy",
            "fraction",
            "training pairs whose better episode scores higher",
            "pair_accuracy",
        ),
        _policy_metric(
            "preference/margin",
            "reward",
            "by how much it does; of a policy the score is beta times log pi - log reference",
            "pair_margin",
        ),
        _policy_metric("preference/pairs", "count", "training pairs", "n_pairs"),
        _policy_metric(
            "preference/held_out_accuracy",
            "fraction",
            "held-out pairs whose better episode scores higher",
            "held_out_pair_accuracy",
        ),
        _policy_metric(
            "preference/held_out_margin", "reward", "by how much it does", "held_out_pair_margin"
        ),
        _policy_metric("preference/held_out_pairs", "count", "held-out pairs", "held_out_n_pairs"),
        Metric(
            "reward_inf/model_reward_mean",
            "reward",
            "mean of the reward model's part, before its weight",
        ),
        Metric(
            "reward_inf/pair_accuracy",
            "fraction",
            "pairs of a group that it orders as the verifier does",
        ),
        Metric(
            "reward_inf/pair_margin", "reward", "by how much the better one of these scores higher"
        ),
        Metric("reward_inf/n_pairs", "count", "these pairs"),
    ),
)
OFF_POLICY = Section(
    "Mismatch and staleness",
    "The mismatch compares the log-probabilities of the engine that sampled, without token "
    "masks, with those of the "
    "trainer before its first "
    "update. Of fresh samples it is the error of the engine; of older ones the policy has moved as "
    "well.",
    (
        _policy_metric(
            "mismatch/kl",
            "nats",
            "KL divergence of engine and trainer (k3 estimate)",
            "mismatch_kl",
        ),
        _policy_metric(
            "mismatch/abs_mean",
            "nats",
            "mean absolute difference of a token's log-probability",
            "mismatch_abs",
        ),
        _policy_metric("mismatch/abs_p50", "nats", "its median", "mismatch/abs_p50"),
        _policy_metric("mismatch/abs_p99", "nats", "its 99th percentile", "mismatch/abs_p99"),
        _policy_metric("mismatch/abs_max", "nats", "its maximum", "mismatch/abs_max"),
        Metric(
            "staleness/mean",
            "versions",
            "versions between the weights that sampled a rollout's oldest token and those that "
            "train: mean",
            ("staleness/head_mean",),
        ),
        Metric("staleness/max", "versions", "the same: maximum", ("staleness/head_max",)),
        Metric("staleness/tail_mean", "versions", "of a rollout's newest token: mean"),
        Metric(
            "staleness/hist_<lag>", "fraction", "rollouts by the staleness of their oldest token"
        ),
    ),
)
BATCH = Section(
    "Batch",
    "What the train step was made of.",
    (
        _policy_metric("batch/rollouts", "count", "rollouts", "n_rollouts"),
        _policy_metric(
            "batch/sequences",
            "count",
            "sequences: rows of rollouts, mostly one of each",
            "n_sequences",
        ),
        _policy_metric(
            "batch/invalid", "count", "sequences of failed rollouts: masked", "n_invalid"
        ),
        _policy_metric(
            "batch/trainable", "count", "sequences with at least one trainable token", "n_trainable"
        ),
        _policy_metric(
            "batch/trainable_rollouts",
            "count",
            "rollouts with such a sequence",
            "n_trainable_rollouts",
        ),
        _policy_metric("batch/tokens", "tokens", "trainable tokens", "n_tokens"),
        _policy_metric(
            "batch/trained_tokens", "tokens", "tokens of all updates together", "n_trained_tokens"
        ),
        _policy_metric(
            "batch/positions_per_token",
            "",
            "positions computed for each trainable token",
            "positions_per_token",
        ),
    ),
)
CRITIC = Section(
    "Critic",
    f"What `{CRITIC_CALL}` returns, in units of rewards unless it says otherwise.",
    (
        _critic_metric("critic/loss", "", "half the mean squared error in the critic's own units"),
        _critic_metric(
            "critic/explained_variance",
            "",
            "1 - Var(return - value) / Var(return); 1 is perfect, below 0 useless",
        ),
        _critic_metric("critic/value_mean", "reward", "mean value"),
        _critic_metric(
            "critic/value_error", "reward", "root of the mean squared error of the values"
        ),
        _critic_metric("critic/return_mean", "reward", "mean return"),
        _critic_metric("critic/return_std", "reward", "standard deviation of the returns"),
        _critic_metric(
            "critic/return_running_mean", "reward", "mean that values are normalised with"
        ),
        _critic_metric(
            "critic/return_running_std",
            "reward",
            "standard deviation that values are normalised with",
        ),
        _critic_metric(
            "critic/clip_fraction",
            "fraction",
            "values whose loss the clip decided",
            "value_clip_fraction",
        ),
        _critic_metric("critic/grad_norm", "", "norm of the gradient before clipping"),
        _critic_metric("critic/lr", "", "learning rate"),
        _critic_metric("critic/values", "count", "tokens with a value", "n_values"),
        _critic_metric("critic/updates", "count", "optimizer steps that were made", "n_updates"),
        _critic_metric(
            "critic/skipped", "count", "optimizer steps left out: loss or gradient was not finite"
        ),
    ),
)
TIME = Section(
    "Time and throughput",
    "Calls of a step overlap, so their times may add up to more than the step.",
    (
        Metric("time/step", "seconds", "the whole step", ("step_seconds",)),
        Metric(
            "time/<call>",
            "seconds",
            "a model function call computes; of several workers the longest",
            ("seconds/<call>",),
        ),
        Metric(
            "time/fetch/<call>",
            "seconds",
            "it waits for data of other workers",
            ("fetch_seconds/<call>",),
        ),
        Metric("time/queue/<call>", "seconds", "it waits for its batch", ("queue_seconds/<call>",)),
        Metric(
            "time/part/<call>/generation",
            "seconds",
            "playing: the model samples",
            ("<call>/generation_seconds",),
        ),
        Metric(
            "time/part/<call>/environment",
            "seconds",
            "playing: the environment works",
            ("<call>/env_seconds",),
        ),
        Metric(
            "time/part/<call>/rollouts",
            "seconds",
            "playing, altogether",
            ("<call>/rollout_seconds",),
        ),
        Metric(
            "time/episode/p50",
            "seconds",
            "an episode, median (asynchronous)",
            ("rollout/episode_s_p50",),
        ),
        Metric(
            "time/episode/p99",
            "seconds",
            "an episode, 99th percentile (asynchronous)",
            ("rollout/episode_s_p99",),
        ),
        _rollout_metric(
            "time/weights",
            "seconds",
            "an update of the sampling engine's weights, with its digests: of an asynchronous run "
            "the last one, from publishing to loading, while others sample; absent where the "
            "trainer samples itself",
            "weights_seconds",
        ),
        Metric(
            "throughput/tokens",
            "tokens",
            "tokens sampled for the step; trained ones where none are sampled",
            ("tokens",),
        ),
        Metric(
            "throughput/tokens_per_second",
            "tokens/s",
            "those by the time of the step",
            ("tokens_per_second",),
        ),
        Metric(
            "throughput/tokens_per_second_per_gpu",
            "tokens/s",
            "the same by the number of GPUs on which the run's workers compute; absent without "
            "GPUs and where other hosts assign them",
            ("tokens_per_second_per_gpu",),
        ),
    ),
)
DEVICES = Section(
    "Devices",
    "Of a train call, on each worker's device: a GPU, or the cores of the worker.",
    (
        Metric(
            "device/<call>/tokens_per_second",
            "tokens/s",
            "tokens of the sequences that a worker trained, each pass counted, by the time of the "
            "call; mean over workers",
            ("<call>/device_rate",),
        ),
        Metric(
            "device/<call>/utilisation",
            "fraction",
            "model FLOPs utilisation: operations of forward and backward passes over every "
            "sequence on its own, without recomputation, by the time of the call and the bf16 peak "
            "of the data sheet; of bf16 models on GPUs whose data sheet is known "
            "(`realhf/backends/training/device_use.py`), and not of mixtures of experts",
            ("<call>/device_utilisation",),
        ),
        Metric(
            "device/<call>/peak_bytes",
            "bytes",
            "most memory that tensors had in the call, of the worker with the most; on a CPU the "
            "largest resident memory of the worker so far",
            ("<call>/device_peak_bytes",),
        ),
        Metric(
            "device/<call>/reserved_bytes",
            "bytes",
            "most memory that torch held on the GPU in the call, of the worker with the most",
            ("<call>/device_reserved_bytes",),
        ),
    ),
)
HOSTS = Section(
    "Hosts",
    "Of the whole machine, whoever uses it, since the step before; of several hosts each, by the "
    "name it calls itself.",
    (
        Metric("host/<name>/cpu", "fraction", "its cores that worked, mean"),
        Metric(
            "host/<name>/memory", "fraction", "its memory that is in use, at the end of the step"
        ),
    ),
)
ASYNCHRONOUS = Section(
    "Asynchronous runs",
    "Counters of admission count from the start of the run (`accepted`, `consumed`) or its last "
    "resumption. Between "
    "steps the display also has `failures_total/<kind>` and `retries_total/<kind>`, counted since "
    "the last resumption.",
    (
        Metric("admission/running", "samples", "in play"),
        Metric("admission/accepted", "samples", "finished and accepted"),
        Metric("admission/consumed", "samples", "trained"),
        Metric("admission/rejected", "samples", "ended without a sample"),
        Metric("admission/dropped", "samples", "accepted and discarded later"),
        Metric("admission/admitted", "samples", "given to rollout workers"),
        Metric(
            "admission/version", "version", "the lowest version that a living generation worker has"
        ),
        Metric("admission/capacity", "samples", "may be admitted now"),
        Metric("admission/staged", "samples", "finished, waiting for the trainer"),
        Metric("admission/waiting", "samples", "given back, waiting to be played again"),
        Metric("admission/lost_attempts", "count", "attempts lost with a worker"),
        Metric("admission/given_up", "samples", "given up after too many attempts or deaths"),
        Metric("admission/refused", "samples", "refused as too old or malformed"),
        Metric(
            "generation/occupancy", "fraction", "time in which the generation workers were busy"
        ),
        Metric("generation/tokens_per_second", "tokens/s", "tokens that all of them sampled"),
        Metric("generation/running", "count", "requests being sampled"),
        Metric("generation/waiting", "count", "requests that wait for a place"),
        Metric(
            "generation/weight_<part>_ms",
            "ms",
            "the last update of weights: publishing, staging, pause, digest",
        ),
        Metric("training/occupancy", "fraction", "time in which the train calls computed"),
    ),
)
STREAM = Section(
    "Batches of a trajectory server",
    "Of the call that draws them (`stream_gen`); versions are compared with those that producers "
    "name.",
    (
        Metric("stream_gen/n_groups", "count", "groups of the batch"),
        Metric("stream_gen/n_sequences", "count", "sequences of the batch"),
        Metric("stream_gen/server_step", "step", "the server's number of the batch"),
        Metric("stream_gen/wait_seconds", "seconds", "the call waited for the batch"),
        Metric("stream_gen/redelivered", "count", "1 where the batch was delivered before"),
        Metric("stream_gen/n_rescored", "count", "sequences that came without log-probabilities"),
        Metric("stream_gen/staleness_max", "versions", "of the oldest sequence"),
        Metric("stream_gen/staleness_min", "versions", "of the newest sequence"),
        Metric(
            "stream_gen/n_<problem>", "count", "sequences that cannot be trained on, by problem"
        ),
    ),
)
OTHERS = Section(
    "Other",
    "Where data come from, and calls that have no names of their own above.",
    (
        Metric("buffer/resident", "samples", "most samples in the master's buffer at once"),
        Metric("source/<name>", "its own", "what the data source or the curriculum reports"),
        Metric(
            "source/<name>/<environment>",
            "its own",
            "the same for the curriculum of one environment of a mixture; `share` is the "
            "environment's fraction of all groups so far",
        ),
        Metric("<call>/n_tokens", "tokens", "tokens of the sequences that the call scored"),
        Metric("<call>/n_scored", "count", "sequences that got a reward"),
        Metric(
            "<call>/told",
            "fraction",
            "trainable sequences that the policy judged with feedback (`feedback_inf`)",
        ),
        Metric("<call>/reward_mean", "reward", "their mean reward"),
        Metric(
            "<call>/<name>",
            "its own",
            "any other number that a call returns: see [extend/metric.md](extend/metric.md)",
        ),
    ),
)
EVALUATIONS = Section(
    "Evaluations",
    "Of held-out episodes or rows, kept in `evaluations.json` and sent to the trackers; they are in "
    "no row of "
    "`metrics.jsonl`. `<split>` is `heldout` in the experiments that ship, `<way>` is `sampled` or "
    "`greedy`, `<group>` "
    "is `overall`, a group of tasks or, in a mixture, an environment. Those of `rows` are of a file "
    "(`dataset.held_out`).",
    (
        Metric("eval/<split>/<way>/success/<group>", "fraction", "episodes that reached the goal"),
        Metric(
            "eval/<split>/<way>/success_low/<group>",
            "fraction",
            "lower end of its 95 % Wilson interval",
        ),
        Metric("eval/<split>/<way>/success_high/<group>", "fraction", "upper end"),
        Metric("eval/<split>/<way>/reward/<group>", "reward", "mean reward"),
        Metric("eval/<split>/<way>/turns/<group>", "turns", "mean number of turns"),
        Metric(
            "eval/<split>/<way>/out_of_turns/<group>",
            "fraction",
            "episodes that `rollout.max_turns` ended",
        ),
        Metric(
            "eval/<split>/<way>/failed/<group>", "count", "episodes that failed and are in no mean"
        ),
        Metric(
            "eval/<split>/rows/loss/<group>",
            "nats",
            "negative log-likelihood per trained token; for pairs the loss of DPO",
        ),
        Metric(
            "eval/<split>/rows/token_accuracy/<group>",
            "fraction",
            "trained tokens that are the most likely ones",
        ),
        Metric(
            "eval/<split>/rows/reward_accuracy/<group>",
            "fraction",
            "pairs whose chosen answer has the higher reward; a tie counts half",
        ),
        Metric(
            "eval/<split>/rows/reward_margin/<group>",
            "reward",
            "mean difference between the rewards of a pair's answers",
        ),
    ),
)
SECTIONS = (
    REWARDS,
    LENGTHS,
    ROLLOUTS,
    POLICY,
    PREFERENCE,
    OFF_POLICY,
    BATCH,
    CRITIC,
    TIME,
    DEVICES,
    HOSTS,
    ASYNCHRONOUS,
    EVALUATIONS,
    STREAM,
    OTHERS,
)


_PLACEHOLDER = re.compile(r"<(\w+)>")
_ONE_PART = ("call", "split", "way", "part", "lag", "component")
"""Placeholders whose value does not contain a slash. A group, a kind or a name may contain
slashes."""
REWARD = "reward/mean"
TRAINED_REWARD = "reward/trained_mean"


def public_names(
    row: Mapping[str, Any], *, policy_call: str = POLICY_CALL, rollout_call: str = ROLLOUT_CALL
) -> dict[str, Any]:
    """Return a row with its names replaced by public names, in the same order.

    policy_call, rollout_call: names of the calls that report the statistics of the policy and of
    the rollouts. Numbers without a public name keep their names, so a row with public names is not
    changed. If two numbers have the same public name, the first one is used.
    """
    aliases = {policy_call: POLICY_CALL, rollout_call: ROLLOUT_CALL}
    public: dict[str, Any] = {}
    for name, value in row.items():
        call, slash, own = name.partition("/")
        known = public_name(f"{aliases[call]}/{own}" if slash and call in aliases else name)
        # Names of the parts of a call's time contain the name of the call itself.
        if known is None or known.startswith(("time/part/", "device/")):
            known = public_name(name)
        public.setdefault(known or name, value)
    if REWARD not in public and TRAINED_REWARD in public:
        public[REWARD] = public[TRAINED_REWARD]
    return public


def choose_calls(train_calls: Sequence[str], generate_calls: Sequence[str]) -> dict[str, str]:
    """Return the arguments ``policy_call`` and ``rollout_call`` of ``public_names`` for a graph
    with these calls.

    Each is the only call of its kind, not counting the critic's. If there are several, it is the
    name that the built-in experiments use.
    """
    return {
        "policy_call": _choose_call(
            [name for name in train_calls if name != CRITIC_CALL], POLICY_CALL
        ),
        "rollout_call": _choose_call(generate_calls, ROLLOUT_CALL),
    }


def _choose_call(calls: Sequence[str], usual: str) -> str:
    return calls[0] if len(calls) == 1 else usual


def public_name(name: str) -> str | None:
    """Return the public name of a number that is reported as ``name``; None if it has no separate
    public name."""
    exact, patterns = _index_sources()
    if name in exact:
        return exact[name]
    for pattern, public in patterns:
        if match := pattern.fullmatch(name):
            return _PLACEHOLDER.sub(lambda place: match[place[1]], public)
    return None


ROW_RESULTS = ("loss", "token_accuracy", "reward_accuracy", "reward_margin")
"""Results of an evaluation on held-out rows of a file."""


def evaluation_metrics(
    report: Mapping[str, Mapping[str, Mapping[str, Any]]], split: str
) -> dict[str, float]:
    """Return the numbers of an evaluation report (``realhf.api.evaluation.Report``) by public
    name."""
    names = {"success": "success", "low": "success_low", "high": "success_high"}
    names |= {name: name for name in ("reward", "turns", "out_of_turns", "failed")}
    names |= {name: name for name in ROW_RESULTS}
    return {
        f"eval/{split}/{way}/{names[name]}/{group}": float(value)
        for way, groups in report.items()
        for group, entry in groups.items()
        for name, value in entry.items()
        if name in names and isinstance(value, (int, float))
    }


def success_by_group(row: Mapping[str, Any]) -> dict[str, float]:
    """Return {group: success} of a step's rollouts, without the entry for all groups together."""
    start = "success/"
    success = {
        name.removeprefix(start): value for name, value in row.items() if name.startswith(start)
    }
    return {group: value for group, value in success.items() if group != OVERALL}


def _compile_pattern(name: str) -> re.Pattern[str]:
    words = _PLACEHOLDER.split(name)[1::2]
    parts = _PLACEHOLDER.split(name)[::2]
    inner = [f"(?P<{word}>{'[^/]+' if word in _ONE_PART else '.+'})" for word in words]
    return re.compile(
        "".join(
            re.escape(part) + (inner[at] if at < len(inner) else "")
            for at, part in enumerate(parts)
        )
    )


@cache
def _index_sources() -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]]]:
    pairs = [
        (source, metric.name)
        for section in SECTIONS
        for metric in section.metrics
        for source in metric.sources
    ]
    exact = {source: name for source, name in pairs if "<" not in source}
    return exact, [(_compile_pattern(source), name) for source, name in pairs if "<" in source]


_HEAD = """# Metrics

Every step of a run adds a row to `metrics.jsonl` in the run folder: one JSON map of names and numbers, with `step`,
which counts from 1. The same names stand in the live display, `report.html` and the trackers. Synchronous
and asynchronous runs use one scheme; a name is absent where a run has nothing to report under it. A number that is not
finite is written as `NaN` or `Infinity`.

`<..>` stands for what differs: a group of tasks, a kind of failure, a model function call. A fraction lies between 0
and 1. `python -m realhf.monitor.metrics` prints this page; how to add a metric is described in
[extend/metric.md](extend/metric.md).
"""


def render_page() -> str:
    """Return ``docs/metrics.md`` as Markdown."""
    parts = [_HEAD]
    for section in SECTIONS:
        rows = [
            f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in section.metrics
        ]
        parts += [
            f"## {section.title}",
            section.introduction,
            "",
            "| name | unit | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render_page())
