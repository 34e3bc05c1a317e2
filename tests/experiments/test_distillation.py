"""On-policy distillation in the graph: where the teacher stands, and what is refused before
anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realhf.api.config import BuiltinModelConfig, ConfigError
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.backends.training.tokenizer_loading import (
    ModelLoadError,
    check_same_tokens,
    load_tokenizer,
)
from realhf.launch.build import BuiltExperiment, build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config


def built(*arguments: str) -> BuiltExperiment:
    composed = compose_config(["env=countdown", *arguments])
    check_config(composed.config)
    return build_experiment(composed)


@pytest.mark.slow
def test_a_teacher_of_the_graph_has_workers_of_its_own(tiny_policy: Path) -> None:
    where = (f"actor.path={tiny_policy}", f"teacher.path={tiny_policy}", "teacher.workers=[1]")
    made = built("experiment=grpo", "ppo.algo=opd", "ppo.kl_loss_coef=0", *where)
    assert made.graph.topological_levels() == [
        ["actor_gen"],
        ["rew_inf", "teacher_inf"],
        ["actor_train"],
    ]
    teacher = made.spec.models["teacher"]
    assert (teacher.path, teacher.workers, teacher.trainable) == (str(tiny_policy), (1,), False)
    assert (
        teacher.tokens_of == made.spec.models["actor"].path
        and made.graph["teacher_inf"].model_role == "teacher"
    )
    streamed = built("experiment=grpo_async", "ppo.distill_weight=0.5", *where)
    assert "teacher_inf" in streamed.graph.topological_levels()[0], "it stays at the trainer"
    assert (
        streamed.spec.rollout is not None and "teacher_logprobs" not in streamed.spec.rollout.keys
    )


@pytest.mark.slow
def test_a_policy_that_was_told_what_became_of_its_rollouts_is_its_own_teacher(
    tiny_policy: Path,
) -> None:
    where = ("ppo.algo=sdpo", "ppo.kl_loss_coef=0", f"actor.path={tiny_policy}")
    made = built("experiment=grpo", "ppo.feedback=errors", "ppo.feedback_tokens=99", *where)
    assert made.graph.topological_levels() == [
        ["actor_gen"],
        ["feedback_inf", "rew_inf"],
        ["actor_train"],
    ]
    assert {*made.spec.models} == {"actor"} and made.graph["feedback_inf"].model_role == "actor"
    args = made.graph["actor_gen"].interface_args
    assert (args["feedback"], args["feedback_tokens"]) == ("errors", 99)
    streamed = built("experiment=grpo_async", *where)
    assert "feedback_inf" in streamed.graph.topological_levels()[0], "it stays at the trainer"
    assert streamed.spec.rollout is not None and "feedback_prompt_ids" in streamed.spec.rollout.keys
    assert streamed.spec.rollout.episodes.feedback == "any"
    with pytest.raises(ConfigError, match=r"rollout.agent=.*: it writes its own prompts"):
        built("experiment=grpo_async", "rollout.agent=experiments.openai_agent:rollout", *where)
    with pytest.raises(
        ConfigError, match=r"ppo.feedback=any \(ppo.algo=sdpo\): groups that producers push"
    ):
        build_experiment(compose_config(["experiment=grpo_stream_http", "ppo.algo=sdpo"]))


@pytest.mark.slow
def test_a_served_teacher_is_asked_by_the_worker_of_the_actor(tiny_policy: Path) -> None:
    made = built(
        "experiment=grpo",
        "ppo.algo=opd",
        f"actor.path={tiny_policy}",
        "teacher.url=http://h:1",
        "teacher.model=m",
    )
    asked = made.graph["teacher_inf"]
    assert (asked.model_role, asked.interface, "teacher" in made.spec.models) == (
        "actor",
        "served_logprob",
        False,
    )
    assert (
        asked.interface_args["served_model"] == "m"
        and asked.interface_args["timeout_s"] == asked.timeout_s
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["ppo.distill_weight=1"],
            r"ppo.distill_weight .*: there is no teacher; set teacher.path .* or teacher.url",
        ),
        (["teacher.path={policy}"], r"teacher.path has no effect .*: nothing is distilled"),
        (
            ["ppo.algo=opd", "teacher.path={policy}", "teacher.model=m"],
            r"teacher.model has no effect",
        ),
        (
            ["ppo.algo=opd", "teacher.url=http://h:1", "teacher.workers=[1]"],
            r"teacher.workers has no effect",
        ),
        (
            ["ppo.algo=opd", "teacher.url=http://h:1", "teacher.path={policy}"],
            r"there is one teacher",
        ),
        (["ppo.algo=opd", "teacher.url=h:1"], r"teacher.url=h:1: give http://host:port"),
        (
            ["ppo.algo=opd", "teacher.url=http://h:1", "gen.temperature=0.5"],
            r"needs gen.temperature=1",
        ),
        (
            ["ppo.algo=opd", "teacher.url=http://h:1", "teacher.token_file=/nowhere"],
            r"token_file=/nowhere: no such",
        ),
        (
            [
                "ppo.algo=opd",
                "teacher.url=http://h:1",
                "actor.backend=fsdp2",
                "actor.workers=[0,1]",
            ],
            r"actor.backend=fsdp2: all workers .* would query teacher.url",
        ),
        (
            ["ppo.algo=sdpo", "teacher.path={policy}"],
            r"teacher.path has no effect .*: .* the teacher is the policy",
        ),
        (
            ["ppo.algo=opd", "teacher.path=builtin"],
            r"teacher.path=builtin: the teacher is another model",
        ),
        (["ppo.algo=opd", "teacher.path=./nowhere"], r"teacher.path=./nowhere: no such folder"),
    ],
)
def test_what_contradicts_is_refused(tiny_policy: Path, options: list[str], told: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=told):
        built(
            "experiment=grpo",
            f"actor.path={tiny_policy}",
            *(each.format(policy=tiny_policy) for each in options),
        )


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    """By its size before anything starts; by its ids when its worker has loaded it, which is told
    what the first is."""
    talks = [
        {
            "messages": [
                {"role": "user", "content": "zzyx"},
                {"role": "assistant", "content": f"other {n}"},
            ]
        }
        for n in range(9)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    small = BuiltinModelConfig(
        vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32
    )
    build_builtin_policy(tmp_path / "talks.jsonl", tmp_path / "other", small, seed=1)
    with pytest.raises(ConfigError, match=r"teacher.path=.*other: its vocabulary has \d+ tokens"):
        built(
            "experiment=grpo",
            "ppo.algo=opd",
            f"actor.path={tiny_policy}",
            f"teacher.path={tmp_path / 'other'}",
        )
    other = load_tokenizer(str(tmp_path / "other"), "teacher")
    with pytest.raises(
        ModelLoadError, match=r"teacher.path=there: its tokenizer gives .* must have its tokenizer"
    ):
        check_same_tokens(other, "teacher", "there", str(tiny_policy))
    check_same_tokens(
        load_tokenizer(str(tiny_policy), "teacher"), "teacher", "there", str(tiny_policy)
    )
