"""Learning from pairs against plain formulas in float64, gradients included, and what is refused
before a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.policy_gradient import build_reward_calls, config_class, policy_options
from realhf.algorithms.inference import LogprobInterface, OutcomeRewardInterface
from realhf.algorithms.options import PolicyGradientOptions
from realhf.algorithms.preference import (
    DPOInterface,
    Pairs,
    RewardModelInterface,
    build_pairs,
    held_out_groups,
    pair_loss,
    truncate_after_policy,
)
from realhf.algorithms.train_step import PredictedTokens
from realhf.api.config import ConfigError
from realhf.api.model import CallContext, Model, TrainResult
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.base.hf_config import VALUE_HEAD_FILE
from realhf.launch.__main__ import main
from tests.algorithms.tiny_policy import context, tiny_actor, tiny_critic, weights

GROUPS = [[9, 4, 6, 1], [5, 5, 12], [8, 7], [6, 11, 4]]
ROLLOUTS = [0, 0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 1]
"""The first rollout of the first group and the second of the last one have two rows."""
REWARDS = [1.0, 1.0, 0.0, 1.0, 0.25, 0.25, math.nan, 0.5, 0.5, 0.2, 0.8, 0.8]
OUTCOME = [0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0]


def batch(seed: int = 0) -> SequenceSample:
    g = torch.Generator().manual_seed(seed)
    lengths = [n for group in GROUPS for n in group]
    total = sum(lengths)
    n = len(lengths)
    shifted = [[m - 1 for m in group] for group in GROUPS]
    single = [[1] * len(group) for group in GROUPS]
    mask = torch.rand(total, generator=g) < 0.6
    tensors = {
        "packed_input_ids": torch.randint(3, 50, (total,), generator=g),
        "loss_mask": mask,
        "rewards": torch.tensor(REWARDS),
        "verifier_rewards": torch.tensor(REWARDS),
        "outcome": torch.tensor(OUTCOME, dtype=torch.uint8),
        "rollout_index": torch.tensor(ROLLOUTS, dtype=torch.int32),
        "packed_ref_logprobs": -3 * torch.rand(total - n, generator=g),
    }
    seqlens = {"packed_input_ids": GROUPS, "loss_mask": GROUPS, "packed_ref_logprobs": shifted}
    return SequenceSample.from_tensors(
        list("abcd"), tensors, {**dict.fromkeys(tensors, single), **seqlens}
    )


class Linear:
    """An engine whose log-probabilities and values are sums of parameters in float64: one for each
    token, and one for each position. It keeps the gradient of its only update."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(3)
        self.table = torch.randn(50, generator=g, dtype=torch.float64).requires_grad_()
        self.gradient = torch.zeros(50, dtype=torch.float64)

    def positions(self, sample: SequenceSample) -> Tensor:
        """What a position sees: the mean of the parameters of all tokens before the predicted one,
        and its own."""
        rows = sample["packed_input_ids"].split(sample.lengths("packed_input_ids").values.tolist())
        found = [
            self.table[row].cumsum(0)[:-1] / torch.arange(1, len(row)) + 0.5 * self.table[row[1:]]
            for row in rows
        ]
        return torch.cat(found)

    def behind(self, sample: SequenceSample) -> Tensor:
        """The same without the predicted token."""
        rows = sample["packed_input_ids"].split(sample.lengths("packed_input_ids").values.tolist())
        return torch.cat(
            [self.table[row].cumsum(0)[:-1] / torch.arange(1, len(row)) for row in rows]
        )

    def outputs(self, sample: SequenceSample) -> Any:
        logprobs = lambda temperature=1.0: (self.positions(sample) / temperature, None)
        return SimpleNamespace(logprobs=logprobs, values=lambda: self.behind(sample))

    def logprobs(
        self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
    ) -> Tensor:
        mask = PredictedTokens.from_sample(sample).mask
        return torch.where(mask, self.outputs(sample).logprobs(temperature)[0], 0.0).detach()

    def forward(self, sample: SequenceSample, post_fn: Any, *, mb_spec: MicroBatchSpec) -> Tensor:
        return post_fn(self.outputs(sample), sample).detach()

    def train_batch(
        self, sample: SequenceSample, loss_fn: Any, *, mb_spec: MicroBatchSpec
    ) -> TrainResult:
        loss, stats = loss_fn(self.outputs(sample), sample)
        (self.gradient,) = torch.autograd.grad(loss, self.table)
        return TrainResult(
            {**stats, "loss": float(loss.detach())}, float(self.gradient.norm()), skipped=False
        )


def rollouts_by_hand(sample: SequenceSample) -> list[dict[str, Any]]:
    """Rollouts of the batch with group, reward and the rows (ids, mask, reference) that have a
    token of the policy."""
    lengths = [n for group in GROUPS for n in group]
    ids = sample["packed_input_ids"].split(lengths)
    masks = sample["loss_mask"].split(lengths)
    refs = sample["packed_ref_logprobs"].split([n - 1 for n in lengths])
    found: dict[tuple[int, int], dict[str, Any]] = {}
    row = 0
    for group, inner in enumerate(GROUPS):
        for _ in inner:
            one = found.setdefault(
                (group, ROLLOUTS[row]), {"group": group, "rewards": [], "rows": []}
            )
            if OUTCOME[row] == 0 and bool(masks[row][1:].any()):
                one["rewards"].append(REWARDS[row])
                one["rows"].append((ids[row], masks[row], refs[row]))
            row += 1
    return list(found.values())


def loss_by_hand(
    sample: SequenceSample, score: Any, *, smoothing: float = 0.0, center: float = 0.0
) -> Tensor:
    """The mean over groups of the mean over their pairs, straight from the formulas."""
    one_each = [(one, score(one["rows"])) for one in rollouts_by_hand(sample) if one["rows"]]
    groups = []
    for number in range(len(GROUPS)):
        own = [
            (sum(one["rewards"]) / len(one["rewards"]), s)
            for one, s in one_each
            if one["group"] == number
        ]
        terms = []
        for reward, s in own:
            for other, t in own:
                if reward > other:
                    p = 1 / (1 + torch.exp(-(s - t)))
                    terms.append(
                        -(1 - smoothing) * p.log()
                        - smoothing * (1 - p).log()
                        + center * (s + t) ** 2
                    )
        if terms:
            groups.append(sum(terms) / len(terms))
    assert len(groups) >= 2
    return sum(groups) / len(groups)  # type: ignore[return-value]


def model_of(engine: Any) -> Model:
    return Model("actor", engine, SimpleNamespace(eos_token_id=2))


def at(tmp_path: Path) -> CallContext:
    return CallContext(0, 1, MicroBatchSpec(), tmp_path)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_dpo_has_the_loss_and_the_gradient_of_its_formula(
    smoothing: float, seed: int, tmp_path: Path
) -> None:
    """-log sigmoid(beta (log pi/ref of the better - log pi/ref of the worse)), of the policy's tokens alone; ragged
    pairs, several rows a rollout, failed rollouts whose reward is NaN."""
    sample, engine = batch(seed), Linear()
    got = DPOInterface(beta=0.3, temperature=0.7, smoothing=smoothing).train_step(
        model_of(engine), sample, at(tmp_path)
    )

    def score(rows: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for ids, mask, ref in rows:
            for t in range(1, len(ids)):
                if mask[t]:
                    seen = engine.table[ids[:t]].mean() + 0.5 * engine.table[ids[t]]
                    total = total + 0.3 * (seen / 0.7 - ref[t - 1].double())
        return total

    expected = loss_by_hand(sample, score, smoothing=smoothing)
    (gradient,) = torch.autograd.grad(expected, engine.table)
    assert got["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    # the factors are fp32
    torch.testing.assert_close(engine.gradient, gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("center", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_a_reward_model_has_the_loss_and_the_gradient_of_bradley_and_terry(
    center: float, seed: int, tmp_path: Path
) -> None:
    """The score of a row is that of the state behind the policy's last token, whatever follows
    it."""
    sample, engine = batch(seed), Linear()
    got = RewardModelInterface(center=center).train_step(model_of(engine), sample, at(tmp_path))

    def score(rows: Any) -> Tensor:
        ends = [max(t for t in range(1, len(ids)) if mask[t]) for ids, mask, _ in rows]
        states = [
            engine.table[ids[: end + 1]].mean() for (ids, _, _), end in zip(rows, ends, strict=True)
        ]
        return sum(states) / len(states)  # type: ignore[return-value]

    expected = loss_by_hand(sample, score, center=center)
    (gradient,) = torch.autograd.grad(expected, engine.table)
    assert got["loss"] == pytest.approx(float(expected.detach()), rel=1e-9)
    torch.testing.assert_close(engine.gradient, gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_a_real_engine_finds_the_better_ones_in_micro_batches_of_any_size(
    kind: str, tmp_path: Path
) -> None:
    """The two episodes of a pair may be in different passes; the first update is the same, and
    pairs are learnt."""
    found = []
    for tokens in (None, 12):
        model = tiny_actor()
        interface = DPOInterface(beta=1.0)
        sample = batch()
        if kind == "dpo":
            scored = LogprobInterface().inference(model, sample, context(tmp_path))[0]
            sample = sample.select(sample.keys - {"packed_ref_logprobs"}).update(scored)
        else:
            model = tiny_critic()
            interface = RewardModelInterface(center=0.01)
        spec = context(tmp_path, max_tokens_per_mb=tokens)
        steps = [interface.train_step(model, sample, spec) for _ in range(12)]
        found.append((weights(model), steps))
    first = found[1][1][0]
    last = found[1][1][-1]
    assert first["grad_norm"] == pytest.approx(found[0][1][0]["grad_norm"], rel=1e-3)
    assert (
        last["pair_accuracy"] == 1.0
        and last["loss"] < 0.8 * first["loss"]
        and last["n_updates"] == 1
    )
    assert first["pair_accuracy"] == 0.5 or kind == "dpo", "the value head starts at 0"
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_groups_that_are_held_out_measure_and_train_nothing(tmp_path: Path) -> None:
    sample = batch()
    engine = Linear()
    assert held_out_groups(["a@1", "b@1"], 0.0).tolist() == [False, False]
    many = held_out_groups([f"task@{n}" for n in range(2000)], 0.2)
    assert 0.17 < float(many.double().mean()) < 0.23
    chosen = held_out_groups(sample.ids, 0.6)
    assert 0 < int(chosen.sum()) < len(chosen)
    kept = [i for i, out in enumerate(chosen.tolist()) if not out]
    DPOInterface(held_out=0.6).train_step(model_of(engine), sample, at(tmp_path))
    alone = Linear()
    got = DPOInterface().train_step(model_of(alone), sample.select_ids(kept), at(tmp_path))
    assert got["n_pairs"] > 0
    torch.testing.assert_close(engine.gradient, alone.gradient)


def test_pairs_are_those_of_a_group_whose_rewards_differ() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, math.nan, 0.2, 0.2], dtype=torch.float64)
    usable = torch.tensor([True, True, True, False, True, True])
    group = torch.tensor([0, 0, 0, 0, 1, 1])

    def found(**options: Any) -> list[tuple[int, int]]:
        pairs = build_pairs(rewards, usable, group, **options)
        assert len(pairs) == 0 or float(pairs.weight.sum()) == pytest.approx(1.0)
        return sorted(zip(pairs.better.tolist(), pairs.worse.tolist(), strict=True))

    assert found() == [(0, 1), (0, 2), (2, 1)]
    assert found(pairing="extremes") == [(0, 1)]
    assert found(min_gap=0.5) == [(0, 1)] and found(min_gap=1.0) == []
    assert isinstance(build_pairs(rewards, ~usable & False, group), Pairs)


def test_the_loss_of_a_margin_is_stable_and_its_slope_is_its_derivative() -> None:
    margin = torch.tensor([-800.0, -1.0, 0.0, 2.0, 800.0], dtype=torch.float64, requires_grad=True)
    for smoothing in (0.0, 0.1):
        loss, slope = pair_loss(margin, smoothing)
        (gradient,) = torch.autograd.grad(loss.sum(), margin)
        torch.testing.assert_close(slope.detach(), gradient)
        assert bool(torch.isfinite(loss).all())


def test_a_batch_without_a_pair_changes_nothing(tmp_path: Path) -> None:
    model = tiny_actor()
    before = weights(model)
    sample = batch()
    single = [[1] * len(group) for group in GROUPS]
    same = SequenceSample.from_tensors(
        list("abcd"), {"rewards": torch.zeros(12)}, {"rewards": single}
    )
    equal = sample.select(sample.keys - {"rewards"}).update(same)
    got = DPOInterface().train_step(model, equal, context(tmp_path))
    assert torch.equal(before, weights(model)) and got == {
        "n_pairs": 0.0, "held_out_n_pairs": 0.0, "n_updates": 0.0, "skipped": 0.0,
    }  # fmt: skip


def test_a_row_ends_behind_the_last_token_of_the_policy() -> None:
    sample = batch()
    ended = truncate_after_policy(sample, SimpleNamespace(eos_token_id=2))
    sizes = iter(ended.lengths("packed_input_ids").values.tolist())
    ids = iter(ended["packed_input_ids"].tolist())
    mask = iter(ended["loss_mask"].tolist())
    given = iter(sample["packed_input_ids"].tolist())
    trained = iter(sample["loss_mask"].tolist())
    for length in (n for group in GROUPS for n in group):
        row = [next(given) for _ in range(length)]
        train = [next(trained) for _ in range(length)]
        last = max((t for t in range(1, length) if train[t]), default=0)
        size = next(sizes)
        assert [next(ids) for _ in range(size)] == [*row[: last + 1], 2]
        assert [next(mask) for _ in range(size)] == [False] * (last + 1) + [last > 0]


def test_the_rewards_of_a_verifier_are_mixed_with_the_model_s(tmp_path: Path) -> None:
    sample = batch()
    engine = Linear()
    got, stats = RewardModelInterface(weight=0.25).inference(model_of(engine), sample, at(tmp_path))
    rewards = got["rewards"].tolist()
    by_rollout: dict[tuple[int, int], list[float]] = {}
    ends = {}
    lengths = [n for group in GROUPS for n in group]
    ids = sample["packed_input_ids"].split(lengths)
    masks = sample["loss_mask"].split(lengths)
    owner = [
        (group, ROLLOUTS[row])
        for row, group in enumerate(g for g, inner in enumerate(GROUPS) for _ in inner)
    ]
    for row, key in enumerate(owner):
        ends[row] = max((t for t in range(1, lengths[row]) if masks[row][t]), default=0)
        if ends[row] and OUTCOME[row] == 0:
            state = engine.table[ids[row][: ends[row] + 1]].mean()
            by_rollout.setdefault(key, []).append(float(state.detach()))
    for row, key in enumerate(owner):
        if math.isnan(REWARDS[row]):
            assert math.isnan(rewards[row])
            continue
        scores = by_rollout.get(key)
        expected = REWARDS[row]
        if scores:
            expected = 0.75 * REWARDS[row] + 0.25 / (1 + math.exp(-sum(scores) / len(scores)))
        assert rewards[row] == pytest.approx(expected, rel=1e-6)
    assert 0 <= stats["pair_accuracy"] <= 1 and stats["n_scored"] > 0


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_the_penalty_for_length_has_no_weight(weight: float, tmp_path: Path) -> None:
    """It was mixed as a part of the verifier's rewards: half of it was left, or nothing, and two
    rollouts that the verifier judges alike were a pair for the model to order."""
    (tmp_path / VALUE_HEAD_FILE).touch()
    ppo = PolicyGradientOptions(overlong_length=8, overlong_buffer=0.5)
    config = config_class("countdown")(experiment="grpo", ppo=ppo)
    config.reward_model.path = str(tmp_path)
    config.reward_model.weight = weight
    verify, mix = build_reward_calls(config, policy_options(config), "")[1]
    tensors = {
        "packed_input_ids": torch.full((14,), 5),
        "loss_mask": torch.tensor([False] + [True] * 3 + [False] + [True] * 9),
        "env_rewards": torch.ones(2),
        "outcome": torch.zeros(2, dtype=torch.uint8),
    }
    single = [[1, 1]]
    whole = [[4, 10]]
    seqlens = {
        "packed_input_ids": whole,
        "loss_mask": whole,
        "env_rewards": single,
        "outcome": single,
    }
    sample = SequenceSample.from_tensors(["a"], tensors, seqlens)
    model = model_of(Linear())
    context = at(tmp_path)
    [key] = verify.output_keys
    tensors[key] = OutcomeRewardInterface(**verify.interface_args).inference(
        model, sample, context
    )[0][key]
    sample = SequenceSample.from_tensors(["a"], tensors, {**seqlens, key: single})
    got, stats = RewardModelInterface(**mix.interface_args).inference(model, sample, context)
    short, long = got["rewards"].tolist()
    assert short - long == pytest.approx(1, abs=1e-6) and stats["n_pairs"] == 0


def test_options_of_the_verifier_are_refused_where_it_has_no_part(tmp_path: Path) -> None:
    (tmp_path / VALUE_HEAD_FILE).touch()
    for name, value in (("reward_scaling", 2.0), ("reward_bias", 1.0), ("max_reward_clip", 3.0)):
        ppo = PolicyGradientOptions(**{name: value})
        config = config_class("countdown")(experiment="grpo", ppo=ppo)
        config.reward_model.path = str(tmp_path)
        assert (
            build_reward_calls(config, policy_options(config), "")[1][0].interface_args[name]
            == value
        )
        config.reward_model.weight = 1.0
        with pytest.raises(
            ConfigError, match=rf"ppo.{name} has no effect with reward_model.weight=1"
        ):
            build_reward_calls(config, policy_options(config), "")


COMMON = ("env=countdown", "actor.path=builtin_tiny", "mode=check")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("experiment=dpo", "preference.beta=0"), "preference.beta=0.0: must be positive"),
        (
            ("experiment=dpo", "preference.smoothing=0.5"),
            "preference.smoothing=0.5: must be between 0 and 0.49",
        ),
        (
            ("experiment=dpo", "preference.held_out=1"),
            "preference.held_out=1.0: must be between 0 and 0.9",
        ),
        (
            ("experiment=dpo", "preference.pairing=some"),
            "preference.pairing=some: unknown (known: all, extremes)",
        ),
        (
            ("experiment=dpo", "preference.min_gap=40"),
            "preference.min_gap=40.0: rewards lie within +-",
        ),
        (
            ("experiment=dpo", "ppo.group_size=1", "rollout.min_group_size=1"),
            "ppo.group_size=1: a pair needs two",
        ),
        (
            ("experiment=dpo", "ppo.eps_clip=0.1"),
            "option ppo.eps_clip has no effect in experiment dpo",
        ),
        (
            ("experiment=dpo", "preference.center=1"),
            "preference.center has no effect in experiment dpo",
        ),
        (
            ("experiment=dpo", "async_rl.enabled=true"),
            "async_rl.enabled=true: dpo plays and trains in turns",
        ),
        (
            ("experiment=dpo", "actor.lora.rank=2", "preference.player=first"),
            "preference.player=first: with adapters",
        ),
        (
            ("experiment=reward_model", "preference.beta=1"),
            "preference.beta has no effect in experiment reward_model",
        ),
        (
            ("experiment=reward_model", "preference.center=-1"),
            "preference.center=-1.0: must be at least 0",
        ),
        (
            ("experiment=reward_model", "reward_model.weight=0.1"),
            "option reward_model.weight has no effect",
        ),
        (
            ("experiment=reward_model", "evaluation.every_steps=2"),
            "option evaluation.every_steps has no effect",
        ),
        (("experiment=reward_model", "actor.lora.rank=2"), "actor.lora.rank has no effect"),
        (
            ("experiment=grpo", "reward_model.weight=0.1"),
            "option reward_model.weight has no effect in experiment grpo",
        ),
        (
            ("experiment=grpo", "reward_model.optimizer.lr=0.1"),
            "option reward_model.optimizer.lr has no effect",
        ),
        (
            ("experiment=grpo", "reward_model.path=/nowhere"),
            "reward_model.path=/nowhere: no such folder",
        ),
        (
            ("experiment=grpo", "reward_model.path={policy}"),
            "not the folder of a reward model, value_head.safetensors is missing",
        ),
        (
            ("experiment=grpo", "reward_model.path={policy}", "reward_model.weight=2"),
            "reward_model.weight=2.0: must be",
        ),
    ],
)
def test_nonsense_is_refused_before_a_process_starts(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 260}))
    (folder / "model.safetensors").write_bytes(b"")
    given = [text.format(policy=folder) for text in options]
    assert main([*COMMON, f"fileroot={tmp_path}", *given]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(said in line for line in lines) and all(
        line.startswith("config error: ") for line in lines
    ), lines


LOW = (
    "def tasks(split):\n    for number in range(40):\n        yield {'prompt': f'Question "
    "{number}'}\n\n\n"
    "def reward(completion, **row):\n    return sum(ord(c) < 64 for c in completion) / max(1, "
    "len(completion))\n"
)
"""An environment in which an untaught policy earns more or less, by the letters that it happens to
say."""
SMALL = (
    "actor.path=builtin_tiny", "trial_name=t", "torch_threads=1", "gen.max_new_tokens=16", "rollout.max_turns=1",
    "builtin.num_layers=2", "builtin.hidden_size=64", "builtin.intermediate_size=128",
)  # fmt: skip
FEW = (
    "ppo.group_size=4", "dataset.train_bs_n_seqs=4", "total_train_steps=2", "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
)  # fmt: skip


def launched(root: Path, experiment: str, *options: str) -> tuple[Path, list[dict[str, Any]]]:
    """Train, and return the folder of the run with the metrics of its steps."""
    (root / "low.py").write_text(LOW)
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        f"experiment={experiment}",
        f"env.path={root / 'low.py'}:reward",
    ]
    command += [f"fileroot={root}", *SMALL, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    run = root / experiment / "t"
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trained_reward_model_finds_better_episodes_and_has_a_part_in_the_rewards(
    tmp_path: Path,
) -> None:
    """Held-out groups, which it never trains on, are told apart better than by chance; then a
    policy trains on rewards that are half its own, streamed or not."""
    sizes = (
        "ppo.group_size=8",
        "dataset.train_bs_n_seqs=12",
        "total_train_steps=30",
        "preference.held_out=0.3",
    )
    run, steps = launched(tmp_path, "reward_model", *sizes)
    later = [step for step in steps[-10:] if step["preference/held_out_pairs"]]
    counts = [step["preference/held_out_pairs"] for step in later]
    right = [
        n * step["preference/held_out_accuracy"] for n, step in zip(counts, later, strict=True)
    ]
    assert steps[0]["preference/held_out_accuracy"] == 0.5 and sum(right) / sum(counts) > 0.6
    for name in ("value_head.safetensors", "weight_digests.json", "tokenizer.json"):
        assert (run / "policy" / name).is_file()
    for experiment, more in (("grpo", ()), ("grpo_async", ("rollout.sessions=8",))):
        path = f"reward_model.path={run / 'policy'}"
        for step in launched(tmp_path, experiment, *FEW, *more, path)[1]:
            halves = (step["reward/mean"] + step["reward_inf/model_reward_mean"]) / 2
            assert step["reward/trained_mean"] == pytest.approx(halves, abs=1e-3)
            assert step["reward_inf/pair_accuracy"] > 0.5


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("player", ["first", "current"])
def test_dpo_trains_a_policy_on_what_it_played(player: str, tmp_path: Path) -> None:
    run, steps = launched(tmp_path, "dpo", *FEW, f"preference.player={player}")
    assert steps[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-3), (
        "the policy starts as its reference"
    )
    assert all(step["policy/updates"] == 1 and step["preference/pairs"] for step in steps)
    assert steps[1]["preference/margin"] != 0 and (run / "policy" / "config.json").is_file()
