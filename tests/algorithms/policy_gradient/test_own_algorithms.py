"""Algorithms in one file of their author's: the examples against plain loops, and what is refused
before a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.algorithms.options import policy_gradient_options
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.policy_loss import LossTerms
from realhf.algorithms.resolution import resolve
from realhf.algorithms.train_step import PredictedTokens, token_weights
from realhf.api.algorithm import Algorithm
from realhf.base.installation import PACKAGE
from realhf.launch.__main__ import main
from tests.algorithms.tiny_policy import (
    GROUPS,
    OUTCOME,
    REWARDS,
    context,
    on_policy,
    tiny_actor,
    weights,
)

EXAMPLES = PACKAGE.parent / "docs" / "extend" / "examples"
SAPO, GMPO, W_REINFORCE = (
    f"{EXAMPLES / file}.py:{file.upper()}" for file in ("sapo", "gmpo", "w_reinforce")
)
LENGTHS = [5, 1, 7, 3]
"""Predicted tokens of each sequence; the second has none that trains."""


def ragged(seed: int, junk: float) -> tuple[LossTerms, list[list[int]]]:
    """Terms in float64 with ``junk`` outside the mask, and the positions of each sequence inside
    it."""
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    mask = torch.rand(n, generator=g) < 0.7
    mask[0], mask[LENGTHS[0]] = True, False
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -3 * torch.rand(n, generator=g, dtype=torch.float64)
    current = old + 0.8 * torch.randn(n, generator=g, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=g, dtype=torch.float64)[sequence]
    spoilt = [torch.where(mask, values, junk) for values in (current, old, advantages)]
    terms = LossTerms(
        spoilt[0].requires_grad_(), spoilt[1], spoilt[2], mask, sequence, len(LENGTHS)
    )
    return terms, [
        torch.nonzero(mask & (sequence == i)).flatten().tolist() for i in range(len(LENGTHS))
    ]


def sapo_by_hand(
    lp: list[float], old: list[float], a: float, *, positive: float, negative: float
) -> float:
    """The mean over tokens of minus the gated advantage."""
    tau = positive if a > 0 else negative
    return -sum(
        a * 4 / tau / (1 + math.exp(-tau * (math.exp(x - y) - 1)))
        for x, y in zip(lp, old, strict=True)
    ) / len(lp)


def gmpo_by_hand(lp: list[float], old: list[float], a: float, *, width: float) -> float:
    """Minus A times the geometric mean of ratios, each bounded on the side to which A pushes."""
    product = 1.0
    for x, y in zip(lp, old, strict=True):
        ratio = math.exp(x - y)
        product *= min(ratio, math.exp(width)) if a >= 0 else max(ratio, math.exp(-width))
    return -a * product ** (1 / len(lp))


CASES = {
    "sapo": (
        SAPO,
        {"tau_positive": 0.7, "tau_negative": 1.4},
        sapo_by_hand,
        {"positive": 0.7, "negative": 1.4},
    ),
    "gmpo": (GMPO, {"width": 0.5}, gmpo_by_hand, {"width": 0.5}),
}


def loop_of(case: str, terms: LossTerms, places: list[list[int]]) -> Callable[[int, float], float]:
    """The mean over sequences of the loss by hand, as a function of a position and what is added
    there."""
    _, _, by_hand, arguments = CASES[case]
    current, old, advantages = (
        values.tolist() for values in (terms.logprobs, terms.old, terms.advantages)
    )
    rows = [row for row in places if row]

    def loop(at: int, step: float) -> float:
        moved = [value + step * (t == at) for t, value in enumerate(current)]
        losses = [
            by_hand([moved[t] for t in row], [old[t] for t in row], advantages[row[0]], **arguments)
            for row in rows
        ]
        return sum(losses) / len(rows)

    return loop


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("junk", [math.nan, -1e30])
def test_the_loss_of_an_example_is_that_of_its_paper(case: str, junk: float) -> None:
    """Value and gradient of the mean over sequences; the gradient by differences of the plain
    loop."""
    options = resolve({"algo": CASES[case][0]}, own=CASES[case][1])
    for seed in range(8):
        terms, places = ragged(seed, junk)
        found = options.token_loss()(terms, options)
        rows = torch.arange(len(LENGTHS))
        tokens = PredictedTokens(terms.mask, terms.sequence, rows, rows)
        weight = token_weights(tokens, options.loss_agg).double()
        total = (found.loss * weight).sum()
        (slope,) = torch.autograd.grad(total, terms.logprobs)
        loop = loop_of(case, terms, places)
        assert total.item() == pytest.approx(loop(0, 0.0), rel=1e-6)
        inside = [t for row in places for t in row]
        for t in inside:
            assert float(slope[t]) == pytest.approx(
                (loop(t, 1e-6) - loop(t, -1e-6)) / 2e-6, rel=1e-4, abs=1e-8
            )
        assert set(torch.nonzero(slope).flatten().tolist()) <= set(inside)
        assert bool((found.ratio[~terms.mask] == 1).all()) and not bool(
            found.clipped[~terms.mask].any()
        )


def test_what_succeeded_counts_a_little_and_what_failed_in_full() -> None:
    scores = torch.tensor([1.0, 0.5, 0.49, 0.0, math.nan, 1.0])
    valid = torch.tensor([True, True, True, True, False, True])
    options = resolve({"algo": W_REINFORCE, "group_size": 1}, own={"positive_weight": 0.25})
    found = options.estimator()(scores, valid, torch.zeros(6, dtype=torch.int64))
    assert found.tolist() == [0.25, 0.25, -1.0, -1.0, 0.0, 0.25]
    assert (options.loss, options.loss_agg) == ("reinforce", "token_mean")


@pytest.mark.parametrize("reference", [SAPO, GMPO, W_REINFORCE])
def test_an_example_trains_a_step_with_failed_rollouts(
    reference: str, rollout_batch: Any, tmp_path: Path
) -> None:
    actor = tiny_actor()
    before = weights(actor)
    batch = on_policy(actor, rollout_batch(GROUPS, REWARDS, OUTCOME), tmp_path)
    stats = PolicyGradientInterface({"algo": reference}).train_step(actor, batch, context(tmp_path))
    assert stats["n_invalid"] == sum(code > 0 for code in OUTCOME) and stats["n_updates"] == 1
    assert not torch.equal(weights(actor), before)


def test_its_preset_may_name_a_correction(tmp_path: Path) -> None:
    """A preset's correction, divisor and length used to be left out without a word, because only
    what people set was looked at. Whoever resolves again what was chosen gets the same; a
    correction that was chosen has no part of it."""
    file = tmp_path / "mine.py"
    preset = {
        "correction": "tis",
        "behav_imp_weight_cap": 3.0,
        "loss_agg": "constant",
        "loss_scale_len": 7,
    }
    file.write_text(
        f"from realhf.api.algorithm import Algorithm\n\nMINE = Algorithm(preset={preset})\n"
    )
    algo = f"{file}:MINE"
    for made in (
        resolve({"algo": algo}),
        resolve({"algo": algo}, sampler_differs=True, loss_scale_len=99),
    ):
        for found in (made, resolve(made.to_plain_values(policy_gradient_options({"algo": algo})))):
            assert (found.behav_imp_weight_mode, found.behav_imp_weight_cap) == ("truncate", 3.0)
            assert (found.use_decoupled_loss, found.loss_scale_len) == (True, 7)
    other = resolve({"algo": algo, "correction": "icepop"})
    assert (other.behav_imp_weight_mode, other.behav_imp_weight_cap) == ("mask", 5.0)
    assert not resolve({"algo": algo, "use_decoupled_loss": False}).use_decoupled_loss
    other_file = tmp_path / "theirs.py"
    text = (
        "from realhf.api.algorithm import Algorithm\n\nMINE = "
        "Algorithm(preset={'recompute_logprob': True})\n"
    )
    other_file.write_text(text)
    given = {"algo": f"{other_file}:MINE"}
    kept = resolve(given, sampler_differs=True)
    assert (
        kept.recompute_logprob
        and resolve(kept.to_plain_values(policy_gradient_options(given))).recompute_logprob
    )


def test_a_registered_part_may_stand_in_the_place_of_one_of_its_own() -> None:
    """One at a time; here the loss is its own still."""
    given = resolve({"algo": GMPO, "adv_estimator": "rloo", "loss_agg": "token_mean"})
    assert (given.loss, given.adv_estimator, given.loss_agg) == (GMPO, "rloo", "token_mean")


@pytest.mark.parametrize(
    ("ppo", "own", "said"),
    [
        (
            {"algo": GMPO, "eps_clip": 0.1},
            {},
            "ppo.eps_clip has no effect with the loss of GMPO: remove it",
        ),
        (
            {"algo": GMPO, "loss": "ppo"},
            {},
            r"ppo.algo=.*: nothing of it that has options is left with ppo.loss=ppo",
        ),
        ({"algo": GMPO}, {"width": -1.0}, r"algorithm.width=-1.0: must be positive"),
        ({"algo": GMPO}, {"widht": 1.0}, r"algorithm.widht is not an option; did you mean 'width'"),
        (
            {"algo": f"{EXAMPLES / 'gmpo.py'}:GMP0"},
            {},
            r"ppo.algo=.*: .*defines no 'GMP0'; did you mean 'GMPO'",
        ),
        (
            {"algo": f"{EXAMPLES / 'gmpo.py'}"},
            {},
            r"ppo.algo=.*gmpo.py: name the algorithm in it, .*gmpo.py:NAME",
        ),
        (
            {"algo": f"{EXAMPLES / 'gmpo.py'}:GmpoOptions"},
            {},
            r"is the class GmpoOptions, expected an Algorithm",
        ),
        ({"algo": "nowhere.py:A"}, {}, r"ppo.algo=nowhere.py:A: there is no file"),
        (
            {"algo": "grop"},
            {},
            r"ppo.algo=grop: unknown .*; did you mean 'grpo'\?; one of your own is FILE.py:NAME",
        ),
    ],
)
def test_nonsense_is_refused(ppo: dict[str, Any], own: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve(ppo, own=own)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "Algorithm(preset={'eps_clp': 1})",
            "its preset: ppo.eps_clp is not an option; did you mean 'eps_clip'",
        ),
        (
            "Algorithm(preset={'eps_clip': -1.0})",
            "its preset: ppo.eps_clip=-1.0: must be at least 0",
        ),
        (
            "Algorithm(preset={'entropy_coef': 0.1})",
            "its preset: ppo.entropy_coef has a value without a preset",
        ),
        (
            "Algorithm(preset={'algo': 'dapo'})",
            "preset: must not contain algo",
        ),
        ("Algorithm(loss=lambda terms: 0)", r"loss: must be a function of \(terms, ppo, own\)"),
        (
            "Algorithm(advantages=3)",
            r"advantages: must be a function of \(scores, valid, group, own\)",
        ),
        (
            "Algorithm(loss=f, preset={'loss': 'ppo'})",
            "preset: loss=ppo conflicts with the algorithm's own function",
        ),
        ("Algorithm(loss=f, clip_options=('eps',))", "clip_options: 'eps' is not one of eps_clip"),
        ("Algorithm(clip_options=('ratio',))", "clip_options: need a loss"),
        ("Algorithm(options=int)", "options: must be a dataclass"),
        ("Algorithm(options=Empty)", "options: they have no effect without a loss or advantages"),
        ("Algorithm(loss=f, options=Open)", "options: every field of Open needs a default"),
        (
            "Algorithm(advantages=f, clip_options=())",
            "ppo.group_size must be at least 2 for the advantages",
        ),
    ],
)
def test_a_description_that_contradicts_itself_is_refused_with_its_line(
    body: str, said: str, tmp_path: Path
) -> None:
    head = (
        "from dataclasses import dataclass\nfrom realhf.api.algorithm import Algorithm\n"
        "@dataclass\nclass Empty:\n    pass\n@dataclass\nclass Open:\n    x: int\n"
        "def f(a, b, c, d=None):\n    return a\n"
    )
    (tmp_path / "mine.py").write_text(f"{head}MINE = {body}\n")
    with pytest.raises(ValueError, match=said) as refused:
        resolve(
            {"algo": f"{tmp_path / 'mine.py'}:MINE", "group_size": 1 if "group_size" in said else 8}
        )
    assert "\n" not in str(refused.value)
    if said.startswith(("loss:", "clip", "options:", "preset: ")):
        assert "mine.py, line 11)" in str(refused.value)


SINGLE = ("ppo.group_size=1", "rollout.min_group_size=1")
COMMON = ("experiment=grpo", "env=countdown", "mode=check", "actor.path=builtin_tiny")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            (f"ppo.algo={GMPO}", "algorithm.width=0"),
            "algorithm.width=0.0: must be positive and at most 20. Log ratios",
        ),
        (
            (f"ppo.algo={GMPO}", "algorithm.widht=1"),
            "unknown option 'algorithm.widht'; did you mean 'algorithm.width'?",
        ),
        (("algorithm.width=1",), "unknown option 'algorithm.width'"),
        (
            (f"ppo.algo={GMPO}", "ppo.c_clip=3"),
            "ppo.c_clip has no effect with the loss of GMPO: remove it",
        ),
        ((f"ppo.algo={EXAMPLES / 'gmpo.py'}:GMP",), "defines no 'GMP'; did you mean 'GMPO'?"),
    ],
)
def test_the_launcher_refuses_before_a_process_starts(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*COMMON, f"fileroot={tmp_path}", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("config error: ") and said in line


@pytest.mark.slow
def test_its_own_options_are_in_the_help_and_in_the_arguments_of_the_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "experiment=grpo",
                "env=countdown",
                f"ppo.algo={GMPO}",
                "algorithm.width=0.3",
                "--help",
            ]
        )
        == 0
    )
    assert (
        "  algorithm.width=0.3 " in (shown := capsys.readouterr().out) and "FILE.py:NAME]" in shown
    )
    assert (
        main(["experiment=grpo", "env=countdown", f"ppo.algo={W_REINFORCE}", *SINGLE, "mode=graph"])
        == 0
    )


@pytest.mark.slow
def test_an_algorithm_without_options_adds_no_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A preset in a file is enough; the built-in parts that it names are found by their names."""
    (tmp_path / "mine.py").write_text(
        "from realhf.api.algorithm import Algorithm\nMINE = Algorithm(preset={'loss': 'cispo', "
        "'eps_clip': 1.0})\n"
    )
    own = f"ppo.algo={tmp_path / 'mine.py'}:MINE"
    assert main([*COMMON, f"fileroot={tmp_path}", own, "rollout.min_group_size=1"]) == 0
    assert main(["experiment=grpo", "env=countdown", own, "--help"]) == 0
    assert "  algorithm." not in capsys.readouterr().out
    resolved = resolve({"algo": own.partition("=")[2]})
    assert (resolved.loss, resolved.eps_clip, resolved.adv_estimator) == ("cispo", 1.0, "grpo")
    assert resolved.algorithm == Algorithm(preset={"loss": "cispo", "eps_clip": 1.0})


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("reference", [SAPO, GMPO, W_REINFORCE])
def test_an_example_trains_in_a_run(reference: str, tiny_policy: Path, tmp_path: Path) -> None:
    """Launched from its file alone, in processes that only know its reference."""
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        "experiment=grpo",
        "env=countdown",
        f"ppo.algo={reference}",
    ]
    command += [
        f"fileroot={tmp_path}",
        "trial_name=t",
        f"actor.path={tiny_policy}",
        "total_train_steps=2",
    ]
    command += ["ppo.group_size=4", "dataset.train_bs_n_seqs=2", "evaluation.episodes_per_task=0"]
    command += [
        "evaluation.greedy_episodes_per_task=0",
        "torch_threads=1",
        "ppo.ppo_n_minibatches=2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    run = tmp_path / "grpo" / "t"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(math.isfinite(step["policy/loss"]) for step in steps)
    calls = {
        call["name"]: call for call in json.loads((run / "plan.json").read_text())["spec"]["mfcs"]
    }
    assert calls["actor_train"]["interface_args"]["ppo"]["algo"] == reference
    assert calls["actor_train"]["interface_args"]["algorithm"]
