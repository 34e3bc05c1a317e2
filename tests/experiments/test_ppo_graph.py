"""The graph of PPO with a critic, and what of its options is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from experiments import policy_gradient
from realhf.algorithms.critic import CriticInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.api.config import ConfigError
from realhf.api.keys import TURN_KEYS
from realhf.backends.builtin_policy import SPECIAL_TOKENS
from realhf.launch.build import BuiltExperiment, build_experiment, print_check
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config

pytestmark = pytest.mark.slow

SIX = [["actor_gen"], ["critic_inf", "ref_inf", "rew_inf"], ["actor_train", "critic_train"]]


@cache
def built(*arguments: str) -> BuiltExperiment:
    """Some tests look at the same experiment; none changes what it gets."""
    composed = compose_config(list(arguments))
    check_config(composed.config)
    return build_experiment(composed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("environment", ["aws", "countdown"])
def test_six_calls_of_which_three_and_two_may_overlap(environment: str) -> None:
    made = built("experiment=ppo", f"env={environment}", "critic.workers=[1]", "ref.workers=[2]")
    assert made.graph.topological_levels() == SIX and made.spec.n_model_workers == 3
    critic = made.spec.models["critic"]
    actor = made.spec.models["actor"]
    assert (critic.head, critic.path, critic.trainable, critic.workers) == (
        "value",
        actor.path,
        True,
        (1,),
    )
    assert actor.head == made.spec.models["ref"].head == "lm" and made.spec.export_role == "actor"


def test_without_a_kl_term_there_is_no_reference_and_the_critic_reads_no_log_probabilities() -> (
    None
):
    made = built("experiment=ppo", "env=countdown", "ppo.kl_ctl=0")
    assert made.graph.topological_levels() == [["actor_gen"], ["critic_inf", "rew_inf"], SIX[2]]
    assert not {key for key in made.graph.inputs("critic_train") if "logprobs" in key}


def test_both_train_calls_are_told_the_same() -> None:
    options = (
        "ppo.gae_lambda=0.9",
        "ppo.credit=turn",
        "ppo.kl_target=3",
        "critic.warmup_steps=4",
        "critic.path=owner/x",
    )
    made = built("experiment=ppo", "env=countdown", *options)
    actor = PolicyGradientInterface(**made.graph["actor_train"].interface_args)
    critic = CriticInterface(**made.graph["critic_train"].interface_args)
    assert actor.options == critic.options and actor.options.gae_lambda == 0.9
    assert made.spec.models["critic"].tokens_of == made.spec.models["actor"].path, (
        "a hub id is looked into at last"
    )
    assert not built("experiment=ppo", "env=countdown").spec.models["critic"].tokens_of
    assert made.graph["actor_train"].interface_args["first_step"] == 4
    assert made.graph["critic_inf"].interface_args == made.graph["critic_train"].interface_args
    assert all(
        set(TURN_KEYS[:2]) <= set(made.graph.inputs(call))
        for call in ("actor_train", "critic_train")
    )
    assert made.spec.models["critic"].path == "owner/x"


@pytest.mark.nightly
def test_what_the_critic_cannot_recompute_a_call_computes() -> None:
    """The KL part of the reward is that of the proximal policy, which only the actor knows."""
    made = built("experiment=ppo", "env=countdown", "ppo.ratio=sequence")
    assert "proximal_logprobs" in made.graph.inputs("critic_train") and "actor_inf" in {
        m.name for m in made.graph.mfcs
    }
    with pytest.raises(ConfigError, match=r"prox_logp_method=recompute: .* use actor_inf"):
        built(
            "experiment=ppo",
            "env=countdown",
            "ppo.recompute_logprob=true",
            "ppo.prox_logp_method=recompute",
        )


def test_asynchronously_the_critic_stays_at_the_trainer() -> None:
    made = built("experiment=ppo_async", "env=countdown")
    assert made.graph.topological_levels() == [
        ["critic_inf", "ref_inf"],
        ["actor_train", "critic_train"],
    ]
    assert made.spec.rollout is not None and "values" not in made.spec.rollout.keys
    options = PolicyGradientInterface(**made.graph["actor_train"].interface_args).options
    assert options.use_decoupled_loss and options.prox_logp_method == "recompute"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("experiment=grpo", "critic.warmup_steps=1"),
            "critic.warmup_steps has no effect in experiment grpo: only advantages that take "
            "values have a critic",
        ),
        (
            ("experiment=ppo", "ppo.algo=grpo"),
            "critic.warmup_steps has no effect in experiment ppo: only advantages",
        ),
        (("experiment=ppo", "critic.path=/nowhere"), "critic.path=/nowhere: no such folder"),
        (
            ("experiment=ppo", "critic.path=builtin"),
            "critic.path=builtin: .*critic.path=actor takes it",
        ),
        (
            ("experiment=ppo", "critic.workers=[1,1]"),
            r"critic.workers=\[1, 1\]: give different indices",
        ),
        (("experiment=ppo", "critic.workers=[2]"), r"\[1\] of 0..2 have no model .*critic.workers"),
        (
            ("experiment=ppo", "total_train_steps=55", "critic.warmup_steps=55"),
            "critic.warmup_steps=55: the actor would never train",
        ),
        (
            ("experiment=ppo", "critic.chat_template_kwargs={a: 1}"),
            "critic.chat_template_kwargs has no effect",
        ),
        (
            ("experiment=ppo", "critic.value_clip=0.2"),
            "critic.value_clip has no effect .* the critic makes one",
        ),
        (("experiment=ppo", "critic.value_clip=null"), "critic.value_clip has no effect"),
        (
            (
                "experiment=ppo",
                "critic.n_minibatches=1",
                "ppo.sample_reuse=2",
                "critic.sample_reuse=1",
                "critic.value_clip=0.3",
            ),
            "critic.value_clip has no effect",
        ),
        (("experiment=ppo", "critic.value_clip=0"), "critic.value_clip=0.0: must be positive"),
        (
            ("experiment=ppo", "critic.value_norm=false", "critic.value_norm_decay=0.5"),
            "critic.value_norm_decay=0.5: has no effect without critic.value_norm",
        ),
    ],
)
def test_mistakes_are_named_before_anything_starts(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        built(*arguments, "env=countdown")


@pytest.mark.parametrize(
    "option", ["ppo.ppo_n_minibatches=2", "ppo.sample_reuse=2", "critic.n_minibatches=2"]
)
def test_a_clip_of_values_acts_from_the_second_update_of_a_step_on(option: str) -> None:
    found = built("experiment=ppo", "env=countdown", "critic.value_clip=0.3", option).spec
    assert [
        mfc.interface_args["critic"]["value_clip"]
        for mfc in found.mfcs
        if mfc.interface == "critic"
    ] == [0.3] * 2
    alone = built("experiment=ppo", "env=countdown").spec
    assert {
        mfc.interface_args["critic"]["value_clip"]
        for mfc in alone.mfcs
        if mfc.interface == "critic"
    } == {None}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("experiment", "arguments", "rate"),
    [
        ("ppo", (), 1e-3),
        ("ppo_async", (), 1e-3),
        ("ppo", ("model=builtin_tiny",), 1e-3),
        ("ppo", ("actor.optimizer.lr=2e-4", "critic.optimizer.lr=5e-4"), 5e-4),
        ("ppo", ("actor.path=owner/name", "actor.optimizer.lr=3e-5"), 3e-5),
        ("ppo_async", ("actor.path=owner/name", "actor.optimizer.lr=3e-5"), 3e-5),
        ("ppo", ("actor.path=owner/name", "critic.optimizer.lr=5e-4"), 5e-4),
        ("ppo_async", ("model=qwen3_0_6b",), 1e-6),
    ],
)
def test_a_large_critic_learns_at_the_actors_rate(
    experiment: str, arguments: tuple[str, ...], rate: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the built-in policy's critic is for a million parameters. The check prints what is
    used."""
    found = built(f"experiment={experiment}", "env=countdown", *arguments)
    critic = found.spec.models["critic"]
    assert critic.optimizer is not None and critic.optimizer.lr == rate
    assert print_check(found) == 0
    assert (
        f"trains: critic with learning rate {rate:g} in float32, from {critic.path}\n"
        in capsys.readouterr().out
    )


def test_a_critic_without_a_value_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an experiment of one's own may have it."""
    with_head = policy_gradient.critic_model
    monkeypatch.setattr(
        policy_gradient, "critic_model", lambda *given: replace(with_head(*given), head="lm")
    )
    with pytest.raises(ConfigError, match=r"critic.head=lm: the call critic_inf asks for values"):
        built.__wrapped__("experiment=ppo", "env=countdown")


def folder(path: Path, config: dict[str, object], template: str = "{{ messages }}") -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").touch()
    if template:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


def test_a_critic_reads_the_actors_tokens(tmp_path: Path) -> None:
    """It needs no chat template, but a context and a vocabulary that fit."""
    actor = folder(tmp_path / "actor", {"vocab_size": 100, "max_position_embeddings": 2048})
    fitting = folder(
        tmp_path / "fitting", {"vocab_size": 100, "max_position_embeddings": 2048}, template=""
    )
    other = folder(
        tmp_path / "other", {"text_config": {"vocab_size": 90}, "max_position_embeddings": 2048}, ""
    )
    short = folder(tmp_path / "short", {"vocab_size": 100, "max_position_embeddings": 32})
    arguments = ("experiment=ppo", "env=countdown", f"actor.path={actor}")
    assert built(*arguments, f"critic.path={fitting}").spec.models["critic"].path == str(fitting)
    with pytest.raises(
        ConfigError,
        match=r"critic.path=.*other: its vocabulary has 90 tokens, that of actor.path.* 100",
    ):
        built(*arguments, f"critic.path={other}")
    with pytest.raises(ConfigError, match=r"the context length of .*short is 32 tokens"):
        built(*arguments, f"critic.path={short}")


@pytest.mark.parametrize(
    ("model", "size"), [("builtin", 832), ("builtin_tiny", len(SPECIAL_TOKENS) + 256)]
)
def test_a_critic_reads_the_tokens_of_the_builtin_policy(
    tmp_path: Path, model: str, size: int
) -> None:
    """Which is not made yet, but the number of its tokens is known."""
    arguments = ("experiment=ppo", "env=sql", f"actor.path={model}")
    fitting = folder(tmp_path / "fitting", {"vocab_size": size, "max_position_embeddings": 2048})
    other = folder(tmp_path / "other", {"vocab_size": size + 1, "max_position_embeddings": 2048})
    assert built(*arguments, f"critic.path={fitting}").spec.models["critic"].path == str(fitting)
    with pytest.raises(
        ConfigError,
        match=rf"critic.path=.*other: .* {size + 1} tokens, .*actor.path={model} has {size};",
    ):
        built(*arguments, f"critic.path={other}")


TOKENIZER = {
    "model": {"vocab": {"a": 0, "b": 1, "c": 2}},
    "added_tokens": [{"id": 3, "content": "<end>"}],
}


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (TOKENIZER, ""),
        ({**TOKENIZER, "added_tokens": []}, ""),
        ({**TOKENIZER, "added_tokens": [{"id": 4, "content": "<pad>"}]}, ""),
        ({"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}}, ""),
        (
            {"model": {"vocab": {"b": 0, "a": 1, "c": 2}}},
            "its tokenizer gives 'b' the id 0, not 1 as that of act",
        ),
        (
            {"model": {"vocab": {"a": 0, "b": 1, "x": 2}}},
            "its tokenizer gives the id 2 to 'x', not to 'c' as that of act",
        ),
        (
            {**TOKENIZER, "added_tokens": [{"id": 4, "content": "<end>"}]},
            "gives '<end>' the id 4, not 3 as that",
        ),
        ({"model": {"vocab": {"a": "0"}}, "added_tokens": [{}, 7]}, ""),
        ({"model": {"vocab": [[["a"], 0.0], 3, []]}, "added_tokens": {}}, ""),
    ],
)
def test_a_critic_has_the_ids_of_the_actors_tokenizer(
    tmp_path: Path, tokenizer: dict[str, object], says: str
) -> None:
    """It makes no text to tokens itself, so tokens that were only added to one of both do no
    harm."""
    described = {"vocab_size": 100, "max_position_embeddings": 2048}
    actor = folder(tmp_path / "actor", described)
    critic = folder(tmp_path / "critic", described)
    (actor / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (critic / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = built("experiment=ppo", "env=countdown").config
    assert isinstance(config, policy_gradient.Config)
    config = replace(
        config,
        actor=replace(config.actor, path=str(actor)),
        critic=replace(config.critic, path=str(critic)),
    )
    if not says:
        check_config(config)
        return
    with pytest.raises(ConfigError, match=f"critic.path=.*critic: .*{says}"):
        check_config(config)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (("experiment=grpo",), None),
        (("experiment=grpo", "actor.dtype=bfloat16", "ppo.algo=gspo"), "sequence"),
        (("experiment=reinforce", "actor.dtype=bfloat16"), "token"),
        (("experiment=grpo_async",), "token"),
        (("experiment=grpo_async", "ppo.use_decoupled_loss=false"), None),
        (("experiment=grpo_stream_http", "ppo.algo=gspo"), "sequence"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_tokens_are_corrected_for_where_sampler_and_trainer_differ(
    arguments: tuple[str, ...], level: str | None
) -> None:
    """By the token's own weight where the ratio is a token's, and by the sequence's where it is a
    sequence's; without another call."""
    made = built(*arguments, *(() if "stream" in arguments[0] else ("env=countdown",)))
    assert "actor_inf" not in {mfc.name for mfc in made.graph.mfcs}
    options = PolicyGradientInterface(**made.graph["actor_train"].interface_args).options
    assert options.use_decoupled_loss == (level is not None)
    assert options.behav_imp_weight_mode == ("none" if level is None else "mask")
    if level is not None:
        assert (options.behav_imp_weight_level, options.prox_logp_method) == (level, "recompute")
