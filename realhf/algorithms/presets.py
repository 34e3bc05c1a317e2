"""Presets of ``ppo.algo`` and tables of the other choices, with formula, source, costs and use.

``python -m realhf.algorithms.presets`` prints them as docs/algorithms.md. The options of the
presets are the ones that ``resolution.resolve`` applies. This module imports no torch.
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
"""Values for options that are None and not set by the preset."""


@dataclass(frozen=True)
class Preset:
    """A published algorithm or correction: its options and its row in docs/algorithms.md."""

    formula: str
    """Formula of the loss or the advantage per token."""
    source: str
    """Publication."""
    costs: str
    """Costs of a step besides rollouts and one train pass."""
    when: str
    """When to choose the preset."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the section ``ppo`` that the preset sets in addition to ``COMMON``."""


_NO_CLIPPING = {"loss": "reinforce", "loss_agg": "token_mean", "eps_clip_higher": None}
"""Options of presets without clipping. With another loss, ``eps_clip_higher=None`` is
``eps_clip``."""
_CLIPPED = "max(-A rho, -A clip(rho))"
"""Formula of the clipped surrogate loss."""
_NORMED = "A = (R - mean_G) / std_G"
"""Formula of the group-normalised advantage."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset(
            f"{_NORMED}; {_CLIPPED}",
            "Shao et al. 2024",
            "nothing",
            "the default: no critic, one advantage per rollout",
        ),
        "drgrpo": Preset(
            f"A = R - mean_G; {_CLIPPED}",
            "Liu et al. 2025",
            "nothing",
            "wrong rollouts grow longer: no division by length or standard deviation",
            {"adv_estimator": "grpo_nostd", "loss_agg": "constant"},
        ),
        "gigpo": Preset(
            "A = A_E + omega A_S, each (R - mean) / std: R of the episode in its group, and the "
            "discounted return from "
            f"the turn on among the turns of the group that started in the same state; {_CLIPPED}",
            "Feng et al. 2025",
            "nothing",
            "rollouts of a group visit the same states: it separates good turns from bad ones",
            {"credit": "state", "discount": 0.95},
        ),
        "dapo": Preset(
            f"{_NORMED}; {_CLIPPED} with a higher upper bound; groups without signal are replaced; "
            f"R falls by up to 1 "
            "over the last fifth of the maximum rollout length",
            "Yu et al. 2025",
            "up to twice the groups of a step (`ppo.dynamic_sampling`)",
            "in many groups all rollouts succeed or all fail, entropy falls too early, rollouts "
            "reach the length limit",
            {
                "eps_clip_higher": 0.28,
                "loss_agg": "token_mean",
                "dynamic_sampling": 1.0,
                "overlong_buffer": 0.2,
            },
        ),
        "gspo": Preset(
            f"{_NORMED}; {_CLIPPED}, rho the geometric mean over a sequence",
            "Zheng et al. 2025",
            "a forward pass with several updates per step",
            "mixtures of experts, long sequences: token ratios are noisy",
            {"ratio": "sequence", "eps_clip": 3e-4, "eps_clip_higher": 4e-4},
        ),
        "cispo": Preset(
            f"{_NORMED}; -sg(clip(rho)) A lp",
            "MiniMax-M1 2025",
            "nothing",
            "several updates per step: no token loses its gradient",
            {"loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 4.0, "loss_agg": "token_mean"},
        ),
        "rloo": Preset(
            "A = R - mean of the others of the group; -A lp",
            "Ahmadian et al. 2024",
            "with `kl_ctl` a reference pass",
            "one update per step: an unbiased gradient; for a KL penalty in the reward set "
            "`kl_ctl`",
            {**_NO_CLIPPING, "adv_estimator": "rloo"},
        ),
        "reinforce": Preset(
            "A = R - mean of the batch; -A lp",
            "Williams 1992",
            "nothing",
            "as a baseline, or with groups of one rollout",
            {**_NO_CLIPPING, "adv_estimator": "reinforce"},
        ),
        "reinforce_pp": Preset(
            f"A = return to go of R - kl_ctl KL, normalised over the batch; {_CLIPPED}",
            "Hu 2025, REINFORCE++",
            "a reference pass",
            "groups are small or have one rollout",
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
            "a better model with the same tokenizer exists; `rl_weight=1` adds the reward",
            {"rl_weight": 0.0, "distill_weight": 1.0, "loss_agg": "token_mean"},
        ),
        "sdpo": Preset(
            f"A = log p of the policy with feedback in its prompt - log p of the policy; "
            f"{_CLIPPED}",
            "Hübotter et al. 2026, SDPO (for the sampled token, with the current policy as "
            "teacher)",
            "two passes over the rollouts with feedback",
            "the environment reports errors, or some rollouts of a group succeed; `rl_weight=1` "
            "adds the reward",
            {"rl_weight": 0.0, "distill_weight": 1.0, "feedback": ANY, "loss_agg": "token_mean"},
        ),
        "ppo": Preset(
            f"A = sum of (discount gae_lambda)^k delta_(t+k), normalised over the batch; "
            f"{_CLIPPED}",
            "Schulman et al. 2017",
            "inference and training of a critic, a reference pass",
            "episodes are long and credit per token matters (`experiment=ppo`)",
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
"""Choices of ``ppo.algo``."""

_PASS = "a forward pass with several updates per step"

CORRECTIONS: Mapping[str, Preset] = MappingProxyType(
    {
        "none": Preset(
            "w = 1, rho against the sampler",
            "Schulman et al. 2017",
            "nothing",
            "sampler and trainer are the same program with the same weights",
        ),
        "decoupled": Preset(
            "w = r if r <= 5, else 0",
            "Hilton et al. 2021; Fu et al. 2025, AReaL",
            _PASS,
            "samples are stale: the default of asynchronous runs",
            {"behav_imp_weight_mode": "mask", "behav_imp_weight_cap": 5.0},
        ),
        "tis": Preset(
            "w = min(r, 2)",
            "Yao et al. 2025, truncated importance sampling",
            _PASS,
            "another engine or precision samples: a small bias, no token is excluded",
            {
                "behav_imp_weight_mode": "truncate",
                "behav_imp_weight_cap": 2.0,
                "behav_imp_weight_level": "token",
            },
        ),
        "seq_tis": Preset(
            "w = min(product of r, 2)",
            "Liu et al. 2025, When speed kills stability",
            _PASS,
            "short responses: no bias of token weights, but a variance that grows with the length",
            {
                "behav_imp_weight_mode": "truncate",
                "behav_imp_weight_cap": 2.0,
                "behav_imp_weight_level": "product",
            },
        ),
        "seq_mis": Preset(
            "w = product of r if it is in [0.5, 2], else 0",
            "Liu et al. 2025, masked importance sampling",
            _PASS,
            "short responses with a few outlier sequences",
            {
                "behav_imp_weight_mode": "mask",
                "behav_imp_weight_cap": 2.0,
                "behav_imp_weight_floor": 0.5,
                "behav_imp_weight_level": "product",
            },
        ),
        "mis": Preset(
            "w = min(r, 2) if the geometric mean of r over the sequence is in [0.999, 1.001], else "
            "0",
            "Liu et al. 2025, part 3 (Geo-RS-Token-TIS)",
            _PASS,
            "long sequences: the bounds of a mean do not depend on the length; widen them for "
            "stale samples",
            {
                "behav_imp_weight_mode": "truncate",
                "behav_imp_weight_cap": 2.0,
                "behav_imp_weight_level": "token",
                "behav_imp_sequence_floor": 0.999,
                "behav_imp_sequence_cap": 1.001,
            },
        ),
        "icepop": Preset(
            "w = r if it is in [0.5, 5], else 0",
            "Ling Team 2025, IcePop",
            _PASS,
            "mixtures of experts: tokens on which the engines disagree are excluded on both sides",
            {
                "behav_imp_weight_mode": "mask",
                "behav_imp_weight_cap": 5.0,
                "behav_imp_weight_floor": 0.5,
                "behav_imp_weight_level": "token",
            },
        ),
    }
)
"""Choices of ``ppo.correction``. All but ``none`` set ``use_decoupled_loss``."""


@dataclass(frozen=True)
class PresetTable:
    """Section of docs/algorithms.md with a table of an option's values."""

    title: str
    """Heading."""
    option: str
    """Option whose values are the rows of the table."""
    introduction: str
    """Paragraph above the table."""
    columns: tuple[str, ...]
    """Headings of the columns after the first, which holds the option's value."""
    rows: Mapping[str, Sequence[str]]
    """Table cells for each value of the option."""

    def text(self) -> list[str]:
        """Return the lines of the section in Markdown."""
        head = (f"`{self.option}`", *self.columns)
        lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in self.rows.items()]
        return [
            f"## {self.title}",
            self.introduction,
            "",
            f"| {' | '.join(head)} |",
            "|---" * len(head) + "|",
            *lines,
            "",
        ]


def options_text(options: Mapping[str, Any]) -> str:
    """Return options as Markdown in the form used on the command line, without the section
    (eps_clip=0.2)."""
    set_options = {name: value for name, value in options.items() if value is not None}
    return " ".join(
        f"`{name}={str(value).lower() if value is True else value}`"
        for name, value in set_options.items()
    )


def _list_presets_with(option: str, value: str) -> str:
    """Return a table cell listing the presets that set an option to this value."""
    default = {"adv_estimator": "grpo", "loss": "ppo"}[option]
    return (
        " ".join(
            f"`{name}`"
            for name, row in PRESETS.items()
            if row.options.get(option, default) == value
        )
        or "none"
    )


ESTIMATORS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "grpo": ("(R - mean_G) / std_G", "Shao et al. 2024", "the default"),
        "grpo_nostd": (
            "R - mean_G",
            "Liu et al. 2025, Dr. GRPO",
            "tasks that nearly all or nearly no rollouts solve should not have more weight than "
            "others",
        ),
        "rloo": (
            "R - mean of the others of the group",
            "Ahmadian et al. 2024",
            "the gradient has to be unbiased",
        ),
        "maxrl": (
            "(R - mean_G) / mean_G, for rewards of at least 0",
            "Tajwar et al. 2026, MaxRL",
            "hard tasks should have more weight: it is the gradient of the log-likelihood of "
            "success",
        ),
        "pass_at_k": (
            "(M_i - M) / S: M mean and S std of the best reward over all subsets of "
            "`ppo.pass_at_k` rollouts of the "
            "group, M_i the mean over those with rollout i",
            "Chen et al. 2025, Pass@k Training; Walder & Karkhanis 2025",
            "the best of k attempts counts",
        ),
        "reinforce": (
            "R - mean of the batch",
            "Williams 1992",
            "as a baseline, or with groups of one rollout",
        ),
        "reinforce_pp": (
            "return to go of R - kl_ctl KL",
            "Hu 2025, REINFORCE++",
            "groups are small or have one rollout",
        ),
        "reinforce_pp_baseline": (
            "the same with mean_G subtracted from R first",
            "Hu 2025, REINFORCE++",
            "the KL term is in the reward, and there are groups",
        ),
        "gae": (
            "sum of (discount gae_lambda)^k delta_(t+k), with the values of a critic",
            "Schulman et al. 2016",
            "episodes are long and credit per token matters (`experiment=ppo`)",
        ),
    }
)
"""Formula, source and use of every registered advantage estimator."""
LOSSES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "ppo": (_CLIPPED, "Schulman et al. 2017", "several updates per step, or stale samples"),
        "cispo": ("-sg(clip(rho)) A lp", "MiniMax-M1 2025", "no token should lose its gradient"),
        "reinforce": ("-A lp", "Williams 1992", "one update per step"),
    }
)
"""Formula, source and use of every registered policy loss."""

TABLES = (
    PresetTable(
        "Presets",
        "ppo.algo",
        "A preset sets options of the section `ppo`, each of which can be overridden. R is the "
        "reward of a rollout, G "
        "its group, rho the ratio of new to old probability, lp the log-probability. Losses are "
        "per token; the weight "
        "of a token is below.",
        ("per token", "source", "sets", "costs", "use it when"),
        {
            name: (
                row.formula,
                row.source,
                options_text(row.options) or "the defaults",
                row.costs,
                row.when,
            )
            for name, row in PRESETS.items()
        },
    ),
    PresetTable(
        "Advantage estimators",
        "ppo.adv_estimator",
        "The advantage of a rollout from its reward. A preset sets one; any of them can be "
        "combined with a preset, as "
        "in `ppo.algo=grpo ppo.adv_estimator=maxrl`.",
        ("advantage", "source", "use it when", "presets with it"),
        {
            name: (*cells, _list_presets_with("adv_estimator", name))
            for name, cells in ESTIMATORS.items()
        },
    ),
    PresetTable(
        "Policy losses",
        "ppo.loss",
        "Loss of a token with advantage A.",
        ("per token", "source", "use it when", "presets with it"),
        {name: (*cells, _list_presets_with("loss", name)) for name, cells in LOSSES.items()},
    ),
    PresetTable(
        "Off-policy corrections",
        "ppo.correction",
        "The loss of a token is multiplied by w, without gradient; r is its proximal over its "
        "behaviour probability, "
        "and rho is the ratio to the proximal policy, the weights at the start of the train step. "
        "A token with weight "
        "0 still counts in the aggregation. `policy/rejected_fraction`, "
        "`policy/rejected_sequences`, "
        "`policy/truncated_fraction` and `policy/effective_sample_size` measure the effect of a "
        "correction.",
        ("weight", "source", "sets", "costs", "use it when"),
        {
            name: (row.formula, row.source, options_text(row.options) or "", row.costs, row.when)
            for name, row in CORRECTIONS.items()
        },
    ),
    PresetTable(
        "Aggregations",
        "ppo.loss_agg",
        f"The loss is the sum over tokens of weight times loss. {LETTERS}.",
        ("weight of a token", "source", "effect"),
        {name: (f"`{row.formula}`", row.source, row.when) for name, row in AGGREGATIONS.items()},
    ),
    PresetTable(
        "Pairs of episodes",
        "experiment",
        "Two rollouts of a group with different rewards form a pair, w the better and l the worse "
        "one; the mean is "
        "over the pairs of a group, then over groups. See "
        "[reference/preference.md](reference/preference.md).",
        ("loss of a pair", "source", "costs", "use it when"),
        {
            "dpo": (
                "-log sigmoid(s_w - s_l), s = preference.beta times the sum of lp - lp_ref over "
                "the policy's tokens",
                "Rafailov et al. 2023",
                "a reference pass, a scoring pass",
                "there are good and bad episodes of a task, and the policy should stay near the "
                "initial one",
            ),
            "reward_model": (
                "-log sigmoid(s_w - s_l) + preference.center (s_w + s_l)^2, s of a value head "
                "after the last token",
                "Bradley and Terry 1952; Ouyang et al. 2022",
                "a scoring pass; later `reward_model.path` scores every rollout",
                "the verifier discriminates too little: equal rewards for different episodes, or "
                "no reward for most",
            ),
        },
    ),
)

_HEAD = """# Algorithms

Choices of the section `ppo`, with formula, publication, costs and use.
Advantages, masks and numerics are in [reference/dataflow.md](reference/dataflow.md#10-algorithms), all options with
their bounds in [reference/options.md](reference/options.md), custom losses and estimators in
[extend/policy_loss.md](extend/policy_loss.md), custom algorithms in [extend/algorithm.md](extend/algorithm.md).

`python -m realhf.algorithms.presets` prints this page from the tables that the code uses, up to
[what they learn](#what-they-learn), which was measured.
"""


def page() -> str:
    """Return docs/algorithms.md without its measured part, as Markdown."""
    return "\n".join([_HEAD, *(line for table in TABLES for line in table.text())])


if __name__ == "__main__":
    sys.stdout.write(page())
