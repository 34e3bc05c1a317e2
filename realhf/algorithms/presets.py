"""Lists what ``ppo.algo`` may be, with formula, source and costs; run as a program, it prints the tables of
``docs/algorithms.md``.

They are the tables that the code itself reads. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from realhf.algorithms.aggregation import AGGREGATIONS, LETTERS
from realhf.api.keys import ANY, NONE

COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "adv_estimator": "grpo",
        "ratio": "token",
        "loss": "ppo",
        "eps_clip": 0.2,
        "eps_clip_higher": 0.2,
        "loss_agg": "seq_mean_token_mean",
        "kl_ctl": 0.0,
        "kl_loss_coef": 0.0,
        "kl_estimator": "k3",
        "adv_norm": False,
        "credit": "episode",
        "discount": 1.0,
        "step_advantage_weight": 1.0,
        "rl_weight": 1.0,
        "distill_weight": 0.0,
        "feedback": NONE,
        "feedback_tokens": 256,
        "dynamic_sampling": 0.0,
        "overlong_buffer": 0.0,
    }
)
"""What an option that is None becomes, unless the preset says otherwise."""


@dataclass(frozen=True)
class Preset:
    """Describes a published algorithm. ``options`` are those of the section ``ppo`` that it sets beside ``COMMON``;
    ``costs`` says what a step needs beside rollouts and one train pass."""

    formula: str
    source: str
    costs: str
    when: str
    options: Mapping[str, Any] = field(default_factory=dict)


_NO_CLIPPING = {"loss": "reinforce", "loss_agg": "token_mean", "eps_clip_higher": None}
"""With another loss, ``eps_clip_higher`` is ``eps_clip``."""
_CLIPPED = "max(-A rho, -A clip(rho))"
_NORMED = "A = (R - mean_G) / std_G"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset(
            f"{_NORMED}; {_CLIPPED}", "Shao et al. 2024", "nothing", "first of all: no critic, one number a rollout"
        ),
        "drgrpo": Preset(
            f"A = R - mean_G; {_CLIPPED}",
            "Liu et al. 2025",
            "nothing",
            "wrong rollouts grow longer: no division by length or spread",
            {"adv_estimator": "grpo_nostd", "loss_agg": "constant"},
        ),
        "gigpo": Preset(
            "A = A_E + omega A_S, each (R - mean) / std: R of the episode in its group, and the discounted return from "
            f"the turn on among the turns of the group that began in the same state; {_CLIPPED}",
            "Feng et al. 2025",
            "nothing",
            "rollouts of a group meet in the same states: it tells good turns from bad ones",
            {"credit": "state", "discount": 0.95},
        ),
        "dapo": Preset(
            f"{_NORMED}; {_CLIPPED} with a higher upper bound; groups without signal give way to others; R falls by up "
            "to 1 over the last fifth of the longest rollout",
            "Yu et al. 2025",
            "up to as many groups again as a step has (`ppo.dynamic_sampling`)",
            "many groups all succeed or all fail, entropy falls too early, rollouts run into their limit",
            {"eps_clip_higher": 0.28, "loss_agg": "token_mean", "dynamic_sampling": 1.0, "overlong_buffer": 0.2},
        ),
        "gspo": Preset(
            f"{_NORMED}; {_CLIPPED}, rho the geometric mean over a sequence",
            "Zheng et al. 2025",
            "a forward pass with several updates a step",
            "mixtures of experts, long sequences: ratios of tokens are noise",
            {"ratio": "sequence", "eps_clip": 3e-4, "eps_clip_higher": 4e-4},
        ),
        "cispo": Preset(
            f"{_NORMED}; -sg(clip(rho)) A lp",
            "MiniMax-M1 2025",
            "nothing",
            "several updates a step: no token loses its gradient",
            {"loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 4.0, "loss_agg": "token_mean"},
        ),
        "rloo": Preset(
            "A = R - mean of the others of the group; -A lp",
            "Ahmadian et al. 2024",
            "with `kl_ctl` a reference pass",
            "one update a step: an unbiased gradient; its KL is in the reward, set `kl_ctl`",
            {**_NO_CLIPPING, "adv_estimator": "rloo"},
        ),
        "reinforce": Preset(
            "A = R - mean of the batch; -A lp",
            "Williams 1992",
            "nothing",
            "as a baseline, or with groups of one",
            {**_NO_CLIPPING, "adv_estimator": "reinforce"},
        ),
        "reinforce_pp": Preset(
            f"A = return to go of R - kl_ctl KL, normalised over the batch; {_CLIPPED}",
            "Hu 2025, REINFORCE++",
            "a reference pass",
            "groups are small or of one",
            {
                "adv_estimator": "reinforce_pp",
                "loss_agg": "token_mean",
                "kl_ctl": 0.01,
                "kl_estimator": "k1",
                "adv_norm": True,
            },
        ),
        "opd": Preset(
            f"A = log p of the teacher - log p of the policy, of the sampled token; {_CLIPPED}",
            "Agarwal et al. 2024, GKD; Lu 2025, On-Policy Distillation",
            "a pass of the teacher (`teacher.path` or `teacher.url`)",
            "there is a better model with the same tokenizer; `rl_weight=1` adds the reward",
            {"rl_weight": 0.0, "distill_weight": 1.0, "loss_agg": "token_mean"},
        ),
        "sdpo": Preset(
            f"A = log p of the policy that was told what became of the rollout - log p of the policy; {_CLIPPED}",
            "Hübotter et al. 2026, SDPO (of the sampled token, the policy of now as teacher)",
            "two passes over the rollouts that were told something",
            "the environment says what is wrong, or some rollouts of a group succeed; `rl_weight=1` adds the reward",
            {"rl_weight": 0.0, "distill_weight": 1.0, "feedback": ANY, "loss_agg": "token_mean"},
        ),
        "ppo": Preset(
            f"A = sum of (discount gae_lambda)^k delta_(t+k), normalised over the batch; {_CLIPPED}",
            "Schulman et al. 2017",
            "a critic to score and to train, a reference pass",
            "episodes are long and a token's share in the reward matters (`experiment=ppo`)",
            {
                "adv_estimator": "gae",
                "loss_agg": "token_mean",
                "kl_ctl": 0.01,
                "kl_estimator": "k1",
                "adv_norm": True,
            },
        ),
    }
)

_PASS = "a forward pass with several updates a step"

CORRECTIONS: Mapping[str, Preset] = MappingProxyType(
    {
        "none": Preset(
            "w = 1, rho against the sampler",
            "Schulman et al. 2017",
            "nothing",
            "sampler and trainer are the same program with the same weights",
        ),
        "decoupled": Preset(
            "w = r where r <= 5, else 0",
            "Hilton et al. 2021; Fu et al. 2025, AReaL",
            _PASS,
            "samples are stale: the default of asynchronous runs",
            {"behav_imp_weight_mode": "mask", "behav_imp_weight_cap": 5.0},
        ),
        "tis": Preset(
            "w = min(r, 2)",
            "Yao et al. 2025, truncated importance sampling",
            _PASS,
            "another engine samples, or another precision: a small bias, no token lost",
            {"behav_imp_weight_mode": "truncate", "behav_imp_weight_cap": 2.0, "behav_imp_weight_level": "token"},
        ),
        "seq_tis": Preset(
            "w = min(product of r, 2)",
            "Liu et al. 2025, When speed kills stability",
            _PASS,
            "short answers: without the bias of single tokens, but its variance grows with the length",
            {"behav_imp_weight_mode": "truncate", "behav_imp_weight_cap": 2.0, "behav_imp_weight_level": "product"},
        ),
        "seq_mis": Preset(
            "w = product of r where it lies in [0.5, 2], else 0",
            "Liu et al. 2025, masked importance sampling",
            _PASS,
            "short answers with a few sequences that lie far off",
            {
                "behav_imp_weight_mode": "mask",
                "behav_imp_weight_cap": 2.0,
                "behav_imp_weight_floor": 0.5,
                "behav_imp_weight_level": "product",
            },
        ),
        "mis": Preset(
            "w = min(r, 2) where the geometric mean of r over the sequence lies in [0.999, 1.001], else 0",
            "Liu et al. 2025, part 3 (Geo-RS-Token-TIS)",
            _PASS,
            "long sequences: the bounds of a mean do not depend on the length; widen them for stale samples",
            {
                "behav_imp_weight_mode": "truncate",
                "behav_imp_weight_cap": 2.0,
                "behav_imp_weight_level": "token",
                "behav_imp_sequence_floor": 0.999,
                "behav_imp_sequence_cap": 1.001,
            },
        ),
        "icepop": Preset(
            "w = r where it lies in [0.5, 5], else 0",
            "Ling Team 2025, IcePop",
            _PASS,
            "mixtures of experts: tokens on which the engines disagree are left out on both sides",
            {
                "behav_imp_weight_mode": "mask",
                "behav_imp_weight_cap": 5.0,
                "behav_imp_weight_floor": 0.5,
                "behav_imp_weight_level": "token",
            },
        ),
    }
)
"""What ``ppo.correction`` may be. All but ``none`` set ``use_decoupled_loss``."""


@dataclass(frozen=True)
class Table:
    """Is a section of the page: what is chosen by ``option``, and a row for each of its values."""

    title: str
    option: str
    says: str
    columns: tuple[str, ...]
    rows: Mapping[str, Sequence[str]]

    def text(self) -> list[str]:
        """The lines of the section in Markdown."""
        head = (f"`{self.option}`", *self.columns)
        lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in self.rows.items()]
        return [f"## {self.title}", self.says, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines, ""]


def options_text(options: Mapping[str, Any]) -> str:
    """Return options as a command line has them, without the section: ``eps_clip=0.2 ...``."""
    given = {name: value for name, value in options.items() if value is not None}
    return " ".join(f"`{name}={str(value).lower() if value is True else value}`" for name, value in given.items())


def _used_by(option: str, value: str) -> str:
    """The presets that have this value of an option, as cells of the page have them."""
    default = {"adv_estimator": "grpo", "loss": "ppo"}[option]
    return " ".join(f"`{name}`" for name, row in PRESETS.items() if row.options.get(option, default) == value) or "none"


ESTIMATORS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "grpo": ("(R - mean_G) / std_G", "Shao et al. 2024", "first of all"),
        "grpo_nostd": (
            "R - mean_G",
            "Liu et al. 2025, Dr. GRPO",
            "tasks that nearly all or nearly no rollout solves shall not count more than others",
        ),
        "rloo": ("R - mean of the others of the group", "Ahmadian et al. 2024", "an unbiased gradient is wanted"),
        "maxrl": (
            "(R - mean_G) / mean_G, of rewards from 0 on",
            "Tajwar et al. 2026, MaxRL",
            "hard tasks shall count more: it is the gradient of the log-likelihood of success",
        ),
        "pass_at_k": (
            "(M_i - M) / S: M mean and S std of the best reward over all subsets of `ppo.pass_at_k` rollouts of the "
            "group, M_i the mean over those with rollout i",
            "Chen et al. 2025, Pass@k Training; Walder & Karkhanis 2025",
            "the best of k attempts is what counts",
        ),
        "reinforce": ("R - mean of the batch", "Williams 1992", "as a baseline, or with groups of one"),
        "reinforce_pp": ("return to go of R - kl_ctl KL", "Hu 2025, REINFORCE++", "groups are small or of one"),
        "reinforce_pp_baseline": (
            "the same with mean_G subtracted from R first",
            "Hu 2025, REINFORCE++",
            "the KL term belongs to the reward, and there are groups",
        ),
        "gae": (
            "sum of (discount gae_lambda)^k delta_(t+k), with the values of a critic",
            "Schulman et al. 2016",
            "episodes are long and a token's share in the reward matters (`experiment=ppo`)",
        ),
    }
)
"""Formula, source and use of every registered advantage estimator, also of those that no preset takes."""
LOSSES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "ppo": (_CLIPPED, "Schulman et al. 2017", "several updates a step, or samples that are stale"),
        "cispo": ("-sg(clip(rho)) A lp", "MiniMax-M1 2025", "no token shall lose its gradient"),
        "reinforce": ("-A lp", "Williams 1992", "one update a step"),
    }
)
"""Formula, source and use of every registered policy loss."""

TABLES = (
    Table(
        "Presets",
        "ppo.algo",
        "A preset sets options of the section `ppo`; every one of them may be overridden. R is the reward of a "
        "rollout, G its group, rho the ratio of new to old probability, lp the log-probability. Every loss is of one "
        "token; which weight it has follows below.",
        ("per token", "source", "sets", "costs", "take it when"),
        {
            name: (row.formula, row.source, options_text(row.options) or "the defaults", row.costs, row.when)
            for name, row in PRESETS.items()
        },
    ),
    Table(
        "Advantage estimators",
        "ppo.adv_estimator",
        "How the reward of a rollout becomes its advantage. A preset sets one; those without a preset are set beside "
        "one, as in `ppo.algo=grpo ppo.adv_estimator=maxrl`.",
        ("advantage", "source", "take it when", "presets with it"),
        {name: (*cells, _used_by("adv_estimator", name)) for name, cells in ESTIMATORS.items()},
    ),
    Table(
        "Policy losses",
        "ppo.loss",
        "What a token with advantage A adds to the loss.",
        ("per token", "source", "take it when", "presets with it"),
        {name: (*cells, _used_by("loss", name)) for name, cells in LOSSES.items()},
    ),
    Table(
        "Off-policy corrections",
        "ppo.correction",
        "The loss of a token is multiplied by w, without gradient; r is its proximal over its behaviour probability, "
        "and rho is then taken against the proximal policy, that of the weights at the start of the train step. A "
        "token that is left out still counts in the aggregation. `policy/rejected_fraction`, "
        "`policy/rejected_sequences`, `policy/truncated_fraction` and `policy/effective_sample_size` say what a "
        "correction did.",
        ("weight", "source", "sets", "costs", "take it when"),
        {
            name: (row.formula, row.source, options_text(row.options) or "", row.costs, row.when)
            for name, row in CORRECTIONS.items()
        },
    ),
    Table(
        "Aggregations",
        "ppo.loss_agg",
        f"The loss is the sum over tokens of weight times loss. {LETTERS}.",
        ("weight of a token", "source", "what it means"),
        {name: (f"`{row.formula}`", row.source, row.when) for name, row in AGGREGATIONS.items()},
    ),
    Table(
        "Pairs of episodes",
        "experiment",
        "Two rollouts of a group whose rewards differ are a pair, w the better and l the worse one; the mean is over "
        "the pairs of a group, then over groups. See [reference/preference.md](reference/preference.md).",
        ("loss of a pair", "source", "costs", "take it when"),
        {
            "dpo": (
                "-log sigmoid(s_w - s_l), s = preference.beta times the sum of lp - lp_ref over the policy's tokens",
                "Rafailov et al. 2023",
                "a reference pass, a pass that scores",
                "there are good and bad episodes of a task and the policy shall stay near the first one",
            ),
            "reward_model": (
                "-log sigmoid(s_w - s_l) + preference.center (s_w + s_l)^2, s of a value head behind the last token",
                "Bradley and Terry 1952; Ouyang et al. 2022",
                "a pass that scores; later `reward_model.path` scores every rollout",
                "the verifier says too little: equal rewards of unequal episodes, or none for most",
            ),
        },
    ),
)

_HEAD = """# Algorithms

What may be chosen in the section `ppo`, with the formula, where it was published, what it costs and when to take it.
Advantages, masks and numerics are in [reference/dataflow.md](reference/dataflow.md#10-algorithms), all options with
their bounds in [reference/options.md](reference/options.md), a loss or an estimator of one's own in
[extend/policy_loss.md](extend/policy_loss.md), a whole algorithm of one's own in
[extend/algorithm.md](extend/algorithm.md).

`python -m realhf.algorithms.presets` prints this page from the tables that the code reads, up to
[what they learn](#what-they-learn), which was measured.
"""


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([_HEAD, *(line for table in TABLES for line in table.text())])


if __name__ == "__main__":
    sys.stdout.write(page())
