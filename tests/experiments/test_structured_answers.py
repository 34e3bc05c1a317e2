"""Composition of runs whose agents' answers are sampled under token masks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from realhf.api.config import ConfigError, RolloutConfig
from realhf.api.keys import UNMASKED_LOGPROBS
from realhf.api.option import problems
from tests.experiments.test_graphs import AGENT, built, spec

ASYNC = (
    "experiment=grpo_aws_async",
    f"rollout.agent={AGENT}:rollout",
    "rollout.agent_structured=constrain",
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra were there: composition only looks."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "experiments.policy_gradient.find_spec",
        lambda name: True if name == "llguidance" else find(name),
    )


@pytest.mark.slow
def test_both_log_probabilities_reach_the_calls_that_need_them() -> None:
    run = spec(*ASYNC, "ppo.algo=ppo", "ppo.kl_ctl=0.1", "ppo.kl_loss_coef=0")
    assert run.rollout is not None and UNMASKED_LOGPROBS in run.rollout.keys
    assert run.rollout.episodes.agent_structured == "constrain"
    for name in ("actor_train", "critic_train"):
        keys = next(call for call in run.mfcs if call.name == name).input_keys
        assert {"packed_logprobs", UNMASKED_LOGPROBS} <= set(keys)
    plain = spec(*ASYNC[:2])
    assert plain.rollout is not None and UNMASKED_LOGPROBS not in plain.rollout.keys
    assert plain.rollout.episodes.agent_structured == "check"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("ppo.correction=none",), r"nothing corrects for it; set ppo.correction"),
        (("ppo.use_decoupled_loss=false",), r"nothing corrects for it; set ppo.correction"),
        (("ppo.recompute_logprob=true",), r"nothing corrects for it; set ppo.correction"),
        (("ppo.behav_imp_weight_mode=none",), r"nothing corrects for it; set ppo.correction"),
        (
            ("ppo.correction=mis",),
            r"ppo.behav_imp_sequence_floor=0.999: .* would leave out the rows",
        ),
        (
            ("ppo.correction=seq_mis",),
            r"ppo.behav_imp_weight_floor=0.5: .* would leave out the rows",
        ),
        (("engine.name=vllm",), r"engine.name=vllm: .* only engine.name=embedded gives"),
    ],
    ids=str,
)
def test_what_could_not_be_corrected_is_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        built(*ASYNC, *options)
    assert "\n" not in str(refused.value) and "rollout.agent_structured=check" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["decoupled", "tis", "icepop"])
def test_every_correction_with_weights_is_taken(correction: str) -> None:
    built(*ASYNC, f"ppo.correction={correction}")


@pytest.mark.slow
def test_it_is_refused_where_nothing_asks_for_a_form() -> None:
    with pytest.raises(ConfigError, match=r"no effect without async_rl.enabled"):
        built("experiment=grpo_aws", *ASYNC[1:])
    alone: Any = RolloutConfig(agent_structured="constrain")
    assert [*problems(alone, "rollout")] == [
        "rollout.agent_structured=constrain: no effect without rollout.agent"
    ]


@pytest.mark.slow
def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.policy_gradient.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package llguidance, .*\[structured\]"):
        built(*ASYNC, "seed=3")
