"""The graphs of the experiments, what names their artifacts, and the policy that was not
trained."""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from experiments import dpo, policy_gradient, sft
from experiments.sft import Config, build_untrained_policy
from realhf.algorithms.options import PolicyGradientOptions
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.api.config import BuiltinModelConfig, ConfigError, RolloutConfig
from realhf.api.experiment import ExperimentSpec, RunPlan
from realhf.api.keys import TURN_KEYS
from realhf.api.option import problems
from realhf.api.rollout import MAX_BRANCHES
from realhf.aws import environment
from realhf.aws.tasks.loader import load_templates
from realhf.launch.build import BuiltExperiment, build_experiment
from realhf.launch.compose import compose_config

AGENT = Path(__file__).resolve().parents[2] / "examples" / "black_box_agent.py"


OWN = "warm_start.shipped=false"
"""The run makes its own warm start, although the package ships one that was made from the same
options."""


@cache
def built(*arguments: str) -> BuiltExperiment:
    """Many tests look at the same experiments; none changes what it gets."""
    return build_experiment(compose_config(list(arguments)))


def spec(*arguments: str) -> ExperimentSpec:
    return built(*arguments).spec


@pytest.mark.slow
def test_grpo_has_all_four_calls_and_two_may_overlap():
    levels = built("experiment=grpo_aws").graph.topological_levels()
    assert levels == [["actor_gen"], ["ref_inf", "rew_inf"], ["actor_train"]]


@pytest.mark.slow
def test_without_a_kl_term_the_reference_leaves_the_graph_and_the_workers():
    made = built("experiment=grpo_aws", "ppo.kl_loss_coef=0")
    assert made.graph.topological_levels() == [["actor_gen"], ["rew_inf"], ["actor_train"]]
    assert set(made.spec.models) == {"actor"}
    assert "packed_ref_logprobs" not in made.graph.inputs("actor_train")


@pytest.mark.nightly
@pytest.mark.slow
def test_workers_that_share_the_actor_share_the_sessions_of_the_environment():
    """Each opens all of its own before it plays: together they waited for more than there were,
    until they failed. Evaluation has the same ones. Rollout workers have sessions of their own
    number."""
    several = ("env.pool_size=16", "actor.workers=[0,1]", "actor.backend=ddp")
    shared = spec("experiment=grpo_aws", *several)
    assert shared.mfcs[0].interface_args["sessions"] == 8 and shared.evaluation is not None
    assert shared.evaluation.interface_args["sessions"] == 8
    streamed = spec("experiment=grpo_aws_async", "ref.workers=[0]", *several).rollout
    assert streamed is not None and streamed.sessions == 16 // streamed.options.n_rollout_workers


@pytest.mark.slow
def test_a_reference_that_plays_elsewhere_shares_the_sessions_with_the_evaluation() -> None:
    """Its workers had as many as there are, and the one that evaluates as many again."""
    config = dpo.config_class("aws")(experiment="dpo")
    config.ref.workers = [1, 2, 3]
    config.env.pool_size = 9
    made = dpo.build(config)
    assert made.evaluation is not None and made.mfcs[0].model_role == "ref"
    assert [
        made.mfcs[0].interface_args["sessions"],
        made.evaluation.interface_args["sessions"],
    ] == [2, 2]
    config.preference.player = "current"
    playing = dpo.build(config).mfcs[0]
    assert (playing.model_role, playing.interface_args["sessions"]) == ("actor", 9)


SCORES_AT_ITS_END = """
from functools import partial
from realhf.api.environment import EnvironmentSpec
from realhf.env.loader.tasks import SeedTaskSet
GAME = EnvironmentSpec("Game", lambda address: None, partial(SeedTaskSet, "Game"), max_turns=5)
"""


@pytest.mark.slow
def test_an_environment_that_would_be_cut_off_before_it_scores_is_refused(tmp_path: Path) -> None:
    """Its episodes would train as valid ones of the reward 0."""
    (tmp_path / "game.py").write_text(SCORES_AT_ITS_END)
    arguments = ["experiment=grpo", f"env.path={tmp_path / 'game.py'}:GAME"]
    said = r"^rollout\.max_turns=4 cuts episodes off before Game has ended .* up to 5 turns \(env\.max_turns\): raise"
    with pytest.raises(ConfigError, match=said):
        build_experiment(compose_config(arguments))
    made = build_experiment(compose_config([*arguments, "rollout.max_turns=5"]))
    assert made.spec.mfcs[0].interface_args["max_turns"] == 5


@pytest.mark.slow
def test_an_environment_that_may_answer_later_than_the_run_waits_is_refused(tmp_path: Path) -> None:
    """A policy could make its bad episodes fail without a reward."""
    (tmp_path / "game.py").write_text(
        SCORES_AT_ITS_END.replace("turns=5", "turns=4, longest_call_s=90.5")
    )
    arguments = ["experiment=grpo", f"env.path={tmp_path / 'game.py'}:GAME"]
    said = r"^rollout\.message_timeout_s=60: Game may take 90\.5 s .*: set it to 91 or more"
    with pytest.raises(ConfigError, match=said):
        build_experiment(compose_config([*arguments, "rollout.message_timeout_s=60"]))
    for words, waits_s in (([], 91.0), (["rollout.message_timeout_s=120"], 120.0)):
        made = build_experiment(compose_config([*arguments, *words]))
        assert made.spec.mfcs[0].interface_args["message_timeout_s"] == waits_s


@pytest.mark.parametrize(
    "options", [{"algo": "gigpo"}, {"loss_agg": "seq_mean_turn_mean"}, {"algo": "sdpo"}], ids=str
)
def test_evaluation_has_the_arguments_of_the_call_that_plays(options: dict[str, str]) -> None:
    """With others it played in sessions of its own, which it kept: training found none left."""
    ppo = PolicyGradientOptions(**options)  # type: ignore[arg-type]
    made = policy_gradient.build(
        policy_gradient.config_class("countdown")(experiment="grpo", ppo=ppo)
    )
    playing = made.mfcs[0].interface_args
    assert playing["turn_rewards"] or playing["feedback"]
    assert made.evaluation is not None and made.evaluation.interface_args == playing


@pytest.mark.slow
def test_a_kl_term_in_the_reward_keeps_it():
    assert "ref" in spec("experiment=grpo_aws", "ppo.kl_loss_coef=0", "ppo.kl_ctl=0.01").models


@pytest.mark.slow
def test_a_proximal_policy_is_scored_by_a_call_unless_the_train_call_does_it():
    for experiment in ("grpo_aws", "grpo_stream_http"):
        made = built(f"experiment={experiment}", "ppo.use_decoupled_loss=true")
        assert made.graph.topological_levels()[1:] == [
            ["actor_inf", "ref_inf", "rew_inf"],
            ["actor_train"],
        ]
    made = built(
        "experiment=grpo_aws", "ppo.use_decoupled_loss=true", "ppo.prox_logp_method=recompute"
    )
    assert made.graph.topological_levels()[1:] == [["ref_inf", "rew_inf"], ["actor_train"]]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "option", "read"),
    [
        ("grpo_aws", "ppo.algo=gigpo", TURN_KEYS),
        ("reinforce_aws", "ppo.credit=turn", TURN_KEYS[:2]),
    ],
)
def test_rewards_per_turn_are_made_where_the_train_call_asks_for_them(
    experiment: str, option: str, read: tuple[str, ...]
) -> None:
    plain = built(f"experiment={experiment}")
    asked = built(f"experiment={experiment}", option)
    assert not plain.graph["actor_gen"].interface_args["turn_rewards"]
    assert asked.graph["actor_gen"].interface_args["turn_rewards"]
    more = set(asked.graph["actor_gen"].output_keys) - set(plain.graph["actor_gen"].output_keys)
    assert more == set(TURN_KEYS)
    assert set(TURN_KEYS) & set(asked.graph["actor_train"].input_keys) == set(read)


@pytest.mark.nightly
@pytest.mark.slow
def test_rewards_per_turn_are_streamed_where_they_are_asked_for() -> None:
    rollout = spec("experiment=grpo_aws_async", "ppo.credit=state").rollout
    assert (
        rollout is not None
        and rollout.episodes.turn_rewards
        and set(TURN_KEYS) <= set(rollout.keys)
    )
    plain = spec("experiment=grpo_aws_async").rollout
    assert (
        plain is not None
        and not plain.episodes.turn_rewards
        and not set(TURN_KEYS) & set(plain.keys)
    )
    with pytest.raises(ConfigError, match=r"ppo.credit=turn"):
        built("experiment=grpo_stream_http", "ppo.credit=turn")


@pytest.mark.slow
def test_an_episode_has_one_row_unless_an_agent_or_dropped_reasoning_makes_more() -> None:
    """The trainer's stream refuses samples with more rows than there can be."""
    for option, most in (
        ("rollout.retries=1", 1),
        (f"rollout.agent={AGENT}:rollout", MAX_BRANCHES),
        ("rollout.keep_reasoning=false", 4),
    ):
        rollout = spec("experiment=grpo_aws_async", "rollout.max_turns=4", option).rollout
        assert rollout is not None and rollout.rows_per_episode == most, option
    with pytest.raises(ConfigError, match=r"rollout.agent=nowhere.py:rollout: there is no file /"):
        built("experiment=grpo_aws_async", "rollout.agent=nowhere.py:rollout")
    alone = RolloutConfig(agent="mine.py:rollout", keep_reasoning=False)
    assert any(
        "keep_reasoning=False: no effect with" in problem for problem in problems(alone, "rollout")
    )


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "divisor"),
    [("grpo_aws", 40 * 5), ("grpo_aws_async", 40 * 5), ("grpo_stream_http", 640)],
)
def test_the_train_call_divides_by_what_was_checked(experiment: str, divisor: int):
    def trained(*options: str) -> PolicyGradientInterface:
        made = built(f"experiment={experiment}", "ppo.algo=drgrpo", *options)
        return PolicyGradientInterface(**made.graph["actor_train"].interface_args)

    assert trained().options.loss_scale_len == divisor
    assert trained("ppo.loss_scale_len=99").options.loss_scale_len == 99
    with pytest.raises(ConfigError, match="loss_scale_len has no effect"):
        built(f"experiment={experiment}", "ppo.loss_scale_len=99")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["grpo_aws", "grpo_aws_async", "grpo_stream_http"])
def test_the_reference_scores_trainable_tokens_only(experiment: str):
    assert set(built(f"experiment={experiment}").graph["ref_inf"].input_keys) == {
        "packed_input_ids",
        "loss_mask",
    }


@pytest.mark.slow
def test_what_an_algorithm_needs_joins_the_graph_of_any_experiment_of_the_family() -> None:
    """Which calls there are follows from the options, not from the name of the experiment."""
    critic = built(
        "experiment=grpo", "env=countdown", "ppo.adv_estimator=gae", "critic.warmup_steps=1"
    )
    assert critic.graph.topological_levels()[1:] == [
        ["critic_inf", "ref_inf", "rew_inf"],
        ["actor_train", "critic_train"],
    ]
    proximal = built("experiment=reinforce_aws", "ppo.use_decoupled_loss=true")
    assert "actor_inf" in {call.name for call in proximal.graph.mfcs}
    streamed = built(
        "experiment=reinforce_aws", "async_rl.enabled=true", "gen.new_tokens_per_chunk=0"
    )
    assert streamed.spec.rollout is not None


@pytest.mark.slow
def test_reinforce_and_sft():
    assert built("experiment=reinforce_aws").graph.topological_levels() == [
        ["actor_gen"],
        ["rew_inf"],
        ["actor_train"],
    ]
    supervised = built("experiment=sft_aws")
    assert supervised.graph.topological_levels() == [["actor_train"]]
    assert supervised.graph.required_dataset_keys() == ["loss_mask", "packed_input_ids"]


def test_rows_count_only_where_a_rollout_can_have_several() -> None:
    config = policy_gradient.config_class("countdown")(
        experiment="grpo", ppo=PolicyGradientOptions(count="row")
    )
    with pytest.raises(
        ConfigError, match=r"ppo.count=row has no effect where each rollout trains as one sequence"
    ):
        policy_gradient.policy_options(config)
    config.rollout.keep_reasoning = False
    assert policy_gradient.policy_options(config).count == "row"
    config.rollout.keep_reasoning = True
    config.rollout.agent = "mine.py:rollout"
    config.async_rl.enabled = True
    assert policy_gradient.policy_options(config, streamed=True).count == "row"


@pytest.mark.slow
def test_the_stream_brings_groups_in_place_of_episodes_and_a_server_unless_there_is_one():
    made = built("experiment=grpo_stream_http")
    assert made.graph.topological_levels() == [
        ["stream_gen"],
        ["ref_inf", "rew_inf"],
        ["actor_train"],
    ]
    assert made.graph.required_dataset_keys() == []
    [service] = made.spec.services
    assert (
        service.module == "workers.trajectory_worker" and str(made.spec.run_dir) in service.argv[-1]
    )
    assert not made.spec.needs_env
    call = made.graph["stream_gen"]
    # 16 groups of 8, which may come as 64 groups of the least size that teaches anything.
    assert call.interface_args["batch_size"] == 128 and {mfc.n_seqs for mfc in made.graph.mfcs} == {
        64
    }
    assert spec("experiment=grpo_stream_http", "stream.url=http://queue:8000").services == ()
    assert set(spec("experiment=grpo_stream_http", "ppo.kl_loss_coef=0").models) == {"actor"}
    # Each rank would pull under one name, and train on what another one acknowledges.
    with pytest.raises(ConfigError, match=r"actor.workers=\[0, 1\]"):
        built("experiment=grpo_stream_http", "actor.workers=[0,1]", "actor.backend=ddp")
    with pytest.raises(
        ConfigError, match="takes the values of a critic, which grpo_stream_http does not have"
    ):
        built("experiment=grpo_stream_http", "ppo.adv_estimator=gae")


@pytest.mark.slow
def test_the_reference_and_the_actor_start_from_the_warm_start():
    made = spec("experiment=grpo_aws", "ref.workers=[1]")
    assert made.models["actor"].path == made.models["ref"].path == str(made.before[0].artifact)
    assert made.n_model_workers == 2
    assert not made.models["ref"].trainable


@pytest.mark.slow
def test_a_model_of_ones_own_needs_no_warm_start():
    made = spec("experiment=grpo_aws", "actor.path=owner/name")
    assert made.before == () and made.models["actor"].path == "owner/name"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_of_ones_own_is_trained_on_demonstrations_first_when_asked(tmp_path: Path):
    """What comes out is named by what is in the folder, not by where it lies."""

    def folder(name: str, weights: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "chat_template.jinja").write_text("{{ messages }}{{ enable_thinking }}")
        (tmp_path / name / "model.safetensors").write_text(weights)
        return f"actor.path={tmp_path / name}"

    def start(*arguments: str):
        made = spec("experiment=grpo_aws", "actor.warm_start=true", *arguments)
        [before] = made.before
        assert made.models["actor"].path == made.models["ref"].path == str(before.artifact)
        return before

    one = folder("one", "1")
    before = start(
        one, "warm_start.train_steps=7", "warm_start.batch_size=3", "warm_start.optimizer.lr=1e-4"
    )
    assert before.models["actor"].path == str(tmp_path / "one") and [
        job.name for job in before.jobs
    ] == ["demonstrations"]
    assert before.total_train_steps == 7 and before.n_seqs == 3
    assert (
        before.models["actor"].optimizer is not None and before.models["actor"].optimizer.lr == 1e-4
    )
    same = start(folder("two", "1")).artifact
    assert start(one).artifact == same != start(folder("three", "2")).artifact
    assert start(one, "actor.chat_template_kwargs={enable_thinking: false}").artifact != same
    assert start("actor.path=owner/name").artifact != start("actor.path=owner/other").artifact


@pytest.mark.slow
def test_the_pretrained_model_comes_with_lengths_rates_and_a_warm_start():
    made = spec(
        "experiment=grpo_aws", "model=smollm2_135m", "actor.path=owner/name", "ppo.kl_loss_coef=0"
    )
    [before] = made.before
    assert (before.total_train_steps, before.n_seqs, made.total_train_steps, made.n_seqs) == (
        68,
        8,
        12,
        8,
    )
    assert set(made.models) == {"actor"} and made.models["actor"].optimizer.lr == 5e-5
    assert before.models["actor"].optimizer.lr == 4e-4
    [demonstrations] = before.jobs
    told = " ".join(demonstrations.argv)
    assert "--episodes-per-task 14 " in told and "--mix recovery=0.0 habit=0.0" in told
    n_demonstrations = 14 * len(load_templates(tags=("starter",)))
    assert 68 * 8 <= n_demonstrations < 69 * 8, "almost each is used, once"


@pytest.mark.slow
def test_all_evaluations_but_the_last_play_a_share_of_the_episodes():
    """At least one of each way, and none of a way that is not played at all."""
    evaluation = spec(
        "experiment=grpo", "env=sql", "evaluation.greedy_episodes_per_task=0"
    ).evaluation
    assert evaluation is not None and evaluation.interim_args is not None
    for args, sampled in ((evaluation.args, 40), (evaluation.interim_args, 10)):
        assert (args["episodes_per_task"], args["greedy_episodes_per_task"]) == (sampled, 0)
    small = spec("experiment=grpo", "env=sql", "evaluation.episodes_per_task=1").evaluation
    assert (
        small is not None
        and small.interim_args is not None
        and small.interim_args["episodes_per_task"] == 1
    )


@pytest.mark.slow
def test_all_tiers_are_demonstrated_but_for_ten_templates_before_trial_and_judged_in_between():
    made = spec(
        *("experiment=grpo_aws", "env=aws_all_tiers", "model=smollm2_135m_all_tiers"),
        *("actor.path=owner/name", "ppo.kl_loss_coef=0"),
    )
    [before] = made.before
    [demonstrations] = before.jobs
    told = " ".join(demonstrations.argv)
    assert (
        "--mix recovery=0.1 habit=0.0" in told
        and "--split all_but_ten --observation-chars 400 --show-ids" in told
    )
    assert told.endswith("--slips --phrasings")
    assert made.evaluation is not None and 2 * made.evaluation.every_steps == made.total_train_steps
    assert before.source.dataset_args["max_tokens"] == 1792 and set(made.models) == {"actor"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, to be changed."""
    copy = tmp_path_factory.mktemp("copy") / "realhf"
    shutil.copytree(sft.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "static"))
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "demonstrations", "policy"),
    [
        ("aws/tasks/advanced/networking.yaml", True, True),
        ("aws/tasks/expert/tickets.yaml", True, True),
        ("aws/grading/grader.py", True, True),
        ("aws/cli/worker.py", True, True),
        ("aws/simulator/ministack_server.py", True, True),
        ("backends/training/torch_engine.py", False, True),
        ("algorithms/train_step.py", False, True),
        ("aws/playground/playground.py", False, False),
        ("aws/client/grpo_pool.py", False, False),
    ],
)
def test_what_is_made_from_a_file_is_made_anew_when_it_changes(
    file: str, demonstrations: bool, policy: bool, package: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (sft, environment):
        monkeypatch.setattr(module, "PACKAGE", package)
    config = built("experiment=grpo_aws", OWN).config
    assert isinstance(config, sft.Config)

    def artifacts() -> tuple[str, str]:
        made = sft.build_warm_start(config)
        assert made.artifact is not None
        return made.jobs[0].artifact.name, made.artifact.name

    before = artifacts()
    with (package / file).open("a") as changed:
        changed.write("\n# changed\n")
    assert [a != b for a, b in zip(before, artifacts(), strict=True)] == [demonstrations, policy]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_warm_start_is_named_by_what_it_is_made_from():
    def artifact(*arguments: str):
        return spec("experiment=grpo_aws", OWN, *arguments).before[0].artifact

    assert artifact() == artifact("ppo.group_size=4", "trial_name=other", "total_train_steps=3")
    changed = [
        artifact(option)
        for option in (
            "seed=2",
            "warm_start.train_steps=5",
            "builtin.num_layers=2",
            "warm_start.optimizer.lr=1",
            "env.tiers=[warmup]",
        )
    ]
    assert len({artifact(), *changed}) == 6


@pytest.mark.slow
def test_a_plan_survives_the_way_to_the_workers(tmp_path):
    made = built("experiment=grpo_aws", f"fileroot={tmp_path}")
    made.spec.run_dir.mkdir(parents=True)
    plan = made.plan(made.spec, started_at=1.5)
    plan.write()
    read = RunPlan.read(made.spec.run_dir)
    assert read.spec.mfcs == plan.spec.mfcs
    assert read.spec.models == plan.spec.models
    assert read.spec.environment == plan.spec.environment and read.spec.needs_env
    assert (read.rpc, read.recover_mode, read.started_at) == (plan.rpc, plan.recover_mode, 1.5)
    assert read.spec.before[0].jobs == plan.spec.before[0].jobs


TINY = BuiltinModelConfig(hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)


def test_the_job_makes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(fileroot=str(tmp_path), builtin=TINY, seed=3)
    job = build_untrained_policy(config)
    assert job.artifact.parent == tmp_path / "warm_start" and job == build_untrained_policy(config)
    others = (replace(config, seed=4), replace(config, builtin=replace(TINY, num_layers=2)))
    assert len({job.artifact, *(build_untrained_policy(other).artifact for other in others)}) == 3
    out = tmp_path / "made"
    argv = [str(out) if text == "{artifact}" else text for text in job.argv]
    monkeypatch.setattr(sys, "argv", [job.module, *argv])
    importlib.import_module(job.module).main()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in out.iterdir()
    }
