"""Composition of the configuration: what is right composes, what is wrong is one line that names
it."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.policy_gradient import config_class
from realhf.api.config import ConfigError, ExperimentConfig, LRSchedule
from realhf.api.environment import SPLITS
from realhf.api.experiment import RolloutOptions
from realhf.aws.tasks.loader import load_templates
from realhf.base.installation import CONFIGS
from realhf.env.curriculum import TaskSource
from realhf.env.loader.load import build_environment
from realhf.launch.__main__ import main
from realhf.launch.build import build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import Schema, compose_config, list_choices
from realhf.registry import environments

UNSOLVED = Path(__file__).resolve().parents[2] / "examples" / "your_environment.py"


def errors(capsys, *arguments):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    lines = captured.err.splitlines()
    assert all(line.startswith("config error: ") for line in lines)
    return "\n".join(line.removeprefix("config error: ") for line in lines)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["experiment=grpo_awz"], "unknown experiment 'grpo_awz'; did you mean 'grpo_aws'?"),
        (["experiment=nothing"], "unknown experiment 'nothing' (known: dpo, grpo, "),
        (["seed=1"], "experiment=NAME is missing"),
        (["experiment=grpo_aws", "sede=2"], "unknown option 'sede'; did you mean 'seed'?"),
        (
            ["experiment=grpo_aws", "ppo.group_siz=2"],
            "unknown option 'ppo.group_siz'; did you mean 'ppo.group_size'?",
        ),
        (["experiment=grpo_aws", "lr=0.1"], "did you mean 'actor.optimizer.lr'?"),
        (["experiment=grpo_aws", "+ppo.extra=2"], "options cannot be added"),
        (
            ["experiment=grpo_aws", "seed=abc"],
            "seed=abc: Value 'abc' of type 'str' could not be converted to Integer",
        ),
        (
            ["experiment=grpo_aws", "mode=fly"],
            "mode=fly: Invalid value 'fly', expected one of [run, check, graph, show]",
        ),
        (["experiment=grpo_aws", "actor.workers=[0,x]"], "actor.workers[1]"),
        (["experiment=grpo_aws", "actor.optimizer=3"], "actor.optimizer is a section"),
        (
            ["experiment=grpo_aws", "env=fils"],
            "env=fils: unknown choice 'fils'; did you mean 'files'?",
        ),
        (
            ["experiment=grpo_aws", "env=sql"],
            "env=sql: experiment grpo_aws has the environment aws; type experiment=grpo env=sql",
        ),
        (
            ["experiment=grpo_aws_async", "env.path=mine.py:Mine"],
            "the environment aws; type experiment=grpo_async env.path=mine.py:Mine",
        ),
        (["experiment=grpo_aws", "env.tiers=[warmup"], "env.tiers=[warmup: not a value"),
        (["experiment=grpo_aws", "seed"], "argument 'seed' is not of the form key=value"),
        (["experiment=grpo_aws", "seed=1,2"], "seed=1,2"),
        (["+experiment_path=/nowhere/x.py"], "experiment_path: no such Python file: /nowhere/x.py"),
    ],
)
def test_mistakes_in_names_and_types(capsys, arguments, expected):
    assert expected in errors(capsys, *arguments)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mistakes",
    [
        {
            "total_train_steps=0": "total_train_steps=0: must be at least 1",
            "gen.temperature=0": "gen.temperature=0.0: must be positive",
            "rpc.heartbeat_s=10": "rpc.heartbeat_s=10: must be less than rpc.dead_after_s=8",
            "env.port=70000": "env.port=70000: must be between 0 and 65535",
            "async_rl.niceness=20": "async_rl.niceness=20: must be between 0 and 19",
            "env.fault_rate=2": "env.fault_rate=2.0: must be between 0 and 1",
            "env.tiers=[warmup,hard]": "env.tiers=hard: unknown (known: warmup, beginner,",
            "rollout.on_failure=ignore": "on_failure=ignore: unknown (known: minimum_group, retry, "
            "fail_fast)",
            "async_rl.weights=broadcast": "async_rl.weights=broadcast: is no longer supported; fetch reaches the "
            "same hosts",
            "dataset.curriculum=random": "dataset.curriculum=random: unknown (known: learnability, "
            "priority, uniform)",
            "dataset.untried_share=0": "dataset.untried_share=0.0: must be positive and at most 1",
            "actor.path=/nowhere/model": "actor.path=/nowhere/model: no such folder",
            "trial_name=a/b": "trial_name='a/b'",
            f"seed={2**64}": f"seed={2**64}: must be between 0 and {2**63 - 1}",
            f"env.fault_seed={2**70}": f"env.fault_seed={2**70}: must be between 0 and {2**63 - 1}",
            "ppo.sample_reuse=0": "ppo.sample_reuse=0: must be at least 1",
            "ppo.algo=grop": "ppo.algo=grop: unknown (known: grpo, drgrpo, ",
            "stream.max_staleness=-1": "stream.max_staleness=-1: must be at least 0",
            "stream.port=70000": "stream.port=70000: must be between 0 and 65535",
        },
        {
            "dataset.curriculum=priority "
            "dataset.untried_share=0.5": "dataset.untried_share=0.5: has no effect with "
            "dataset.curriculum=priority",
            "env.fault_seed=2": "env.fault_kinds, env.fault_seed: no effect without env.fault_rate",
            "env.tiers=[advanced] "
            "env.tags=[starter]": "the tier 'advanced' has no template with the tags starter",
            "actor.workers=[0,0]": "actor.workers=[0, 0]",
            "rollout.max_total_tokens=4096": "builtin.max_positions=1024",
            "recover_mode=resume "
            "fileroot=/tmp/does-not-exist": "recover_mode=resume: no checkpoint in",
            "ppo.kl_loss_coef=0 ppo.kl_ctl=0.1 ppo.kl_target=6 "
            "ppo.kl_horizon=127": "ppo.kl_horizon=127: shorter "
            "than a step, which has dataset.train_bs_n_seqs times ppo.group_size = 128",
        },
        {
            "recover_mode=resume": "recover_mode=resume: no checkpoint in",
            f"trial_name={'t' * 300}": "trial_name=ttttttttttttttttttttttttttttttttttttt...: a "
            "name "
            "of 300 bytes; the file system of",
        },
        {f"experiment_name='{'é' * 200}'": "a name of 400 bytes; the file system of"},
        {
            f"fileroot=/tmp/{'f' * 300}": "fileroot=fffffffffffffffffffffffffffffffffffff...: a "
            "name of 300 bytes"
        },
        {f"fileroot=/tmp/{'/'.join(['f' * 200] * 20)}": "the run folder's path has more than"},
        {
            "env.tags=[no-such-tag]": "unknown tag 'no-such-tag'",
            "actor.path=model": "actor.path=model: no such folder",
        },
        {"gen.top_p=1.5": "gen.top_p=1.5: "},
        {
            "actor.parallel.tp=2": "actor.parallel.tp=2: no backend cuts layers; set 1, and cut "
            "the model with fsdp"
        },
        {
            "actor.workers=[0,1]": "actor.workers=[0, 1]: backend torch trains on one worker; set "
            "actor.backend=ddp"
        },
        {"rollout.min_group_size=9": "larger than ppo.group_size=8"},
        {
            "ppo.ppo_n_minibatches=129": "ppo.ppo_n_minibatches=129: a step has "
            "dataset.train_bs_n_seqs times"
        },
        {"ref.workers=[2]": "[1] of 0..2 have no model"},
        {"stream.url=localhost:8000": "stream.url=localhost:8000: give http://host:port"},
        {"stream.token_file=/nowhere/token": "stream.token_file=/nowhere/token: no such file"},
        {
            "engine.name=vllm engine.vllm_executable=sh actor.backend=ddp "
            "actor.workers=[0,1]": "engine.name=vllm: a "
            "synchronous run serves actor on one worker, but actor.workers=[0, 1]"
        },
    ],
)
def test_mistakes_across_options(capsys, mistakes):
    """What can be found together is told together, one line each."""
    arguments = [argument for text in mistakes for argument in text.split()]
    lines = errors(capsys, "experiment=grpo_aws", *arguments).splitlines()
    assert [
        expected for expected in mistakes.values() if not any(expected in line for line in lines)
    ] == []
    assert [
        line for line in lines if not any(expected in line for expected in mistakes.values())
    ] == []


TEXTS = ("1e5", "8e12345", "9e54321", "1_0", "007", "inf", "nan", "true", "10", "a.b", "'1e5'")


@pytest.mark.nightly
@pytest.mark.slow
def test_texts_of_the_command_line_stay_what_was_typed():
    for text in TEXTS:
        arguments = [
            f"trial_name={text}",
            f"stream.token_file={text}",
            f"actor.lora.targets=[q_proj, {text},{text}]",
        ]
        config = compose_config(["experiment=grpo_aws", *arguments]).config
        typed = text.strip("'")
        assert config.trial_name == config.stream.token_file == typed
        assert config.actor.lora.targets == ["q_proj", typed, typed]
    assert (
        compose_config(["experiment=grpo_aws", "stream.token_file=null"]).config.stream.token_file
        is None
    )


REFUSED = "trial_name: 1_0 is 10 in YAML and the option is a text; put it in quotes: '1_0'"


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "line", "expected"),
    [
        ("user", "trial_name: 7", "7"),
        ("user", "trial_name: '1_0'", "1_0"),
        ("user", "trial_name: 1_0", REFUSED),
        (
            "user",
            "trial_name: 2026-01-02",
            "trial_name: 2026-01-02 is datetime.date(2026, 1, 2) in YAML",
        ),
        ("user", "monitor: {trackers: [wandb, 0x10]}", "monitor.trackers: 0x10 is 16 in YAML"),
        ("tree", "trial_name: 7", "7"),
        ("tree", "trial_name: 1_0", REFUSED),
        ("tree", "stream: {token_file: 1e5}", "stream.token_file: 1e5 is 100000.0 in YAML"),
    ],
)
def test_texts_of_a_yaml_file_stay_what_was_written_or_are_refused(where, line, expected, tmp_path):
    """Both the file beside an experiment of the user, and one of the tree that another one builds
    on, which Hydra reads."""
    arguments = ["experiment=child"]
    folder = CONFIGS
    if where == "user":
        (tmp_path / "own.py").write_text("def build(config):\n    raise NotImplementedError\n")
        written = tmp_path / "own.yaml"
        arguments = [f"experiment_path={tmp_path / 'own.py'}"]
    else:
        folder = tmp_path / "configs"
        shutil.copytree(CONFIGS, folder)
        written = folder / "experiment" / "own.yaml"
        (folder / "experiment" / "child.yaml").write_text(
            "# @package _global_\ndefaults: [own, _self_]\n"
        )
    base = "defaults: [sft_aws, _self_]\n" if where == "tree" else ""
    written.write_text(f"# @package _global_\n{base}{line}\n")
    if "in YAML" not in expected:
        assert compose_config(arguments, folder).config.trial_name == expected
        return
    with pytest.raises(ConfigError) as error:
        compose_config(arguments, folder)
    assert str(error.value).startswith(f"{written}: {expected}") and "\n" not in str(error.value)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [
                *(
                    "experiment=grpo_aws",
                    "actor.path=owner/name",
                    "ppo.kl_loss_coef=0",
                    "ref.workers=[0]",
                ),
                *("warm_start.train_steps=3", "builtin.hidden_size=64", "stream.wait_s=9"),
            ],
            [
                "option ref.workers has no effect",
                "option warm_start.train_steps has no effect in experiment grpo_aws: "
                "only actor.path=builtin (in environments with a scripted solver) and "
                "actor.warm_start=true have a "
                "warm start",
                "option builtin.hidden_size has no",
                "option stream.wait_s has no effect in experiment grpo_aws",
            ],
        ),
        (
            ["experiment=sft_aws", "ppo.group_size=4"],
            ["option ppo.group_size has no effect in experiment sft_aws"],
        ),
        (["experiment=reinforce_aws", "ref.workers=[0]"], ["option ref.workers has no effect"]),
        (
            [
                "experiment=grpo_stream_http",
                "evaluation.every_steps=2",
                "stream.url=http://a:1",
                "stream.port=2",
            ],
            [
                "option evaluation.every_steps has no effect",
                "option stream.port has no effect in experiment grpo_stream_http: this run starts "
                "no trajectory server",
            ],
        ),
        (
            ["experiment=grpo_stream_http", "env.pool_size=17", "env.chaos=true", "env.path=aws"],
            [
                "option env.pool_size has no effect in experiment grpo_stream_http: it plays no "
                "episodes",
                "option env.chaos has no effect in experiment grpo_stream_http: it plays no "
                "episodes",
            ],
        ),
        (
            ["experiment=sft_aws", "env.fault_rate=0.5"],
            ["option env.fault_rate has no effect in experiment sft_aws"],
        ),
        (
            ["experiment=grpo_stream_http", "stream.wait_s=1800"],
            ["stream.wait_s=1800.0: must be shorter than rpc.call_tim"],
        ),
    ],
)
def test_options_without_effect(capsys, arguments, expected):
    lines = errors(capsys, *arguments, "mode=check").splitlines()
    assert [text for text in expected if not any(text in line for line in lines)] == []
    assert len(lines) == len(expected)


@pytest.mark.slow
def test_options_with_effect(capsys):
    """Every one that is set has to be read."""
    options = [
        "actor.optimizer.lr=0.01",
        "warm_start.optimizer.lr=0.01",
        "env.max_steps=9",
        "ppo.entropy_coef=0.1",
    ]
    arguments = ["experiment=grpo_aws", *options, "actor.optimizer.beta1=0.8", "mode=check"]
    assert main(arguments) == 0, capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["grpo_aws", "grpo_aws_async"])
def test_what_a_failed_rollout_means_is_one_option_for_all_runs(experiment, capsys):
    for arguments in (
        ["rollout.on_failure=retry", "rollout.retries=5"],
        ["rollout.on_failure=fail_fast"],
    ):
        spec = build_experiment(compose_config([f"experiment={experiment}", *arguments])).spec
        played = (
            spec.rollout.episodes
            if spec.rollout
            else RolloutOptions.from_args(spec.mfcs[0].interface_args)
        )
        assert arguments[0] == f"rollout.on_failure={played.on_failure}"
    said = errors(
        capsys, f"experiment={experiment}", "rollout.on_failure=fail_fast", "rollout.retries=5"
    )
    assert "rollout.retries=5: no effect with rollout.on_failure=fail_fast" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "experiment=grpo: choose an environment with env=NAME (known: aws, "),
        (["env=countdwn"], "env=countdwn: unknown choice 'countdwn'; did you mean 'countdown'"),
        (
            ["env.path=countdwn"],
            "env.path=countdwn: unknown environment 'countdwn'; did you mean 'countdown'",
        ),
        (
            ["env.path=/nowhere/mine.py:Mine"],
            "env.path=/nowhere/mine.py:Mine: /nowhere/mine.py:Mine: there is no file",
        ),
        (["env=countdown", "env.pool_size=3"], "env.pool_size"),
    ],
)
def test_an_environment_that_cannot_be_had_is_told(arguments, expected, capsys):
    assert expected in errors(capsys, "experiment=grpo", *arguments, "mode=check")


@pytest.mark.slow
def test_the_general_experiment_on_aws_is_the_experiment_on_aws():
    general, own = (
        build_experiment(compose_config([*arguments, "trial_name=one", "experiment_name=one"])).spec
        for arguments in (["experiment=grpo", "env=aws"], ["experiment=grpo_aws"])
    )
    assert replace(general, name="grpo_aws") == own


@pytest.mark.slow
def test_a_reference_on_two_workers_is_no_mistake():
    assert main(["experiment=grpo_aws", "ref.workers=[0,1]", "mode=check"]) == 0


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("tiers", [["advanced"], ["expert"], ["warmup", "advanced"]])
def test_every_tier_can_be_trained_on(tiers):
    composed = compose_config(["experiment=grpo_aws", f"env.tiers=[{','.join(tiers)}]"])
    check_config(composed.config)
    spec = build_experiment(composed).spec
    every = {template.task_id for template in load_templates(tiers, split="train")}
    source = TaskSource(1, spec.source.args["environment"], spec.source.args["options"])
    drawn = source.next_batch(8 * len(every))
    assert {item.metadata["group"] for item in drawn} == set(tiers)
    assert {int(item.metadata["template"]) for item in drawn} == every


@pytest.mark.slow
def test_without_tags_the_starter_tasks_are_trained_on_where_every_tier_has_some():
    spec = build_experiment(compose_config(["experiment=grpo_aws"])).spec
    played = build_environment(spec.source.args["environment"], spec.source.args["options"])
    for split in SPLITS:
        assert len(played.tasks(split).group_of) == 39


@pytest.mark.slow
def test_all_problems_are_listed_at_once(capsys):
    text = errors(
        capsys, "experiment=grpo_aws", "total_train_steps=0", "gen.top_p=0.9", "actor.dtype=float8"
    )
    assert [line.partition("=")[0] for line in text.splitlines()] == [
        "total_train_steps",
        "actor.dtype",
        "gen.top_p",
    ]


@pytest.mark.slow
def test_a_folder_without_model_or_chat_template_names_the_option(capsys, tmp_path):
    assert "has no config.json" in errors(capsys, "experiment=grpo_aws", f"actor.path={tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert f"actor.path={tmp_path}: the tokenizer has no chat template" in errors(
        capsys, "experiment=grpo_aws", f"actor.path={tmp_path}"
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    said = errors(capsys, "experiment=grpo_aws", f"actor.path={tmp_path}", "mode=check")
    assert said == f"actor.path={tmp_path}: the folder has no weights (*.safetensors)"
    (tmp_path / "model-1.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    said = errors(capsys, "experiment=grpo_aws", f"actor.path={tmp_path}", "mode=check")
    assert (
        said
        == f"actor.path={tmp_path}: 1 of 2 files of its weights are missing: model-2.safetensors"
    )
    (tmp_path / "model-2.safetensors").touch()
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"a": "pytorch_model-1.bin"}}'
    )
    assert main(["experiment=grpo_aws", f"actor.path={tmp_path}", "mode=check"]) == 0, (
        "of a format that is not read"
    )


@pytest.mark.slow
def test_what_is_not_installed_or_cannot_be_written_is_told_at_the_check(capsys, tmp_path):
    """mode=check used to pass, and the run to end after its warm start."""
    (tmp_path / "file").touch()
    trackers = [name for name in ("wandb", "trackio") if importlib.util.find_spec(name) is None]
    lines = errors(
        capsys,
        *(
            "experiment=grpo_aws",
            "mode=check",
            f"fileroot={tmp_path / 'file' / 'runs'}",
            "engine.name=vllm",
        ),
        *(
            f"engine.vllm_executable={tmp_path / 'none'}",
            f"monitor.trackers=[tensorboard,{','.join(trackers)}]",
        ),
    ).splitlines()
    assert lines == [
        f"engine.vllm_executable={tmp_path / 'none'}: no such program on this machine, so "
        "engine.name=vllm cannot start a server; "
        "install vLLM in an environment of its own (`make vllm-cuda`, without a GPU `make test-vllm`) "
        "and name its program here, or name a running server with engine.vllm_url",
        *(
            f"monitor.trackers: {name} is not installed: pip install -e '.[{name}]'"
            for name in trackers
        ),
        f"fileroot: cannot write to {tmp_path / 'file'}: Not a directory",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    elsewhere = ("scheduler=join", "scheduler.hosts=[a]", "network.bind=10.0.0.1")
    there = compose_config(
        ["experiment=grpo_aws_async", "engine.name=vllm", "engine.vllm_executable=none", *elsewhere]
    )
    check_config(there.config)


@pytest.mark.nightly
def test_a_folder_of_somebody_else_cannot_be_written_and_nothing_is_made_there():
    """A root that is no folder of this user's, or does not exist below one that is not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        user = os.geteuid()
        (folder / "theirs").mkdir()
        folder.chmod(0o755), (folder / "theirs").chmod(0o555)
        for root in (folder / "theirs", folder / "theirs" / "runs"):
            config = compose_config(
                ["experiment=grpo", "env=sql", "mode=check", f"fileroot={root}"]
            ).config
            if user == 0:
                os.seteuid(65534)  # root writes anywhere
            try:
                with pytest.raises(
                    ConfigError, match=f"fileroot: cannot write to {folder / 'theirs'}: Permission"
                ):
                    check_config(config)
            finally:
                os.seteuid(user)
        assert not [*(folder / "theirs").iterdir()]


@pytest.mark.slow
def test_choices_win_over_the_experiment_and_the_command_line_over_both():
    config = compose_config(
        ["experiment=grpo_aws", "model=qwen3_0_6b", "gen.max_new_tokens=7"]
    ).config
    assert (config.actor.path, config.actor.dtype, config.gen.max_new_tokens) == (
        "Qwen/Qwen3-0.6B",
        "bfloat16",
        7,
    )
    assert config.experiment_name == "grpo_aws"


@pytest.mark.nightly
@pytest.mark.slow
def test_learning_rates_of_the_built_in_policy_are_not_those_of_other_models(tiny_policy, capsys):
    """They used to stand in the experiments, where any actor.path trained 300 times too fast.
    mode=check prints both rates, and warns of one that is large for a pretrained model."""

    def rates(*arguments):
        config = compose_config(arguments).config
        return config.actor.optimizer.lr, config.warm_start.optimizer.lr

    small = (3e-4, 2.5e-3)
    usual = (1e-6, 1e-5)
    for chosen in (
        "seed=1",
        "model=builtin",
        "model=builtin_tiny",
        "actor.path=builtin",
        f"actor.path={tiny_policy}",
    ):
        assert rates("experiment=grpo_aws", chosen) == small, chosen
    hub = ("experiment=grpo_aws", "actor.path=owner/name", "actor.warm_start=true")
    for given in (hub, ("experiment=grpo", "env=aws", "model=qwen3_0_6b"), (*hub, "model=builtin")):
        assert rates(*given) == usual, given
    assert rates("experiment=sft_aws") == (2.5e-3, 2.5e-3)
    assert rates("experiment=sft_aws", "actor.path=owner/name") == (1e-5, 1e-5)
    assert rates(*hub, "actor.optimizer.lr=2e-5") == (2e-5, 1e-5)

    assert main([*hub, "mode=check"]) == 0
    said, warned = capsys.readouterr()
    assert (
        "learning rate 1e-05)" in said and "actor with learning rate 1e-06" in said and not warned
    )
    assert (
        main([*hub, "actor.optimizer.lr=3e-4", "warm_start.optimizer.lr=2.5e-3", "mode=check"]) == 0
    )
    said = capsys.readouterr().err
    assert (
        "warning: actor.optimizer.lr=0.0003 is large" in said
        and "warning: warm_start.optimizer.lr=0.0025" in said
    )


@pytest.mark.slow
def test_values_arrive_with_their_types():
    composed = compose_config(
        ["experiment=sft_aws", "env.tiers=[warmup]", "seed=3", "warm_start.cache_dir=null"]
    )
    config = composed.config
    assert isinstance(config, ExperimentConfig)
    assert (config.env.tiers, config.seed, config.warm_start.cache_dir) == (["warmup"], 3, None)
    assert config.actor.optimizer.lr_scheduler_type is LRSchedule.cosine
    assert composed.overridden == ("env.tiers", "seed", "warm_start.cache_dir")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("group", "choice"), [(g, c) for g in ("model", "env", "scheduler") for c in list_choices(g)]
)
def test_every_choice_of_every_group_is_valid(group, choice, tiny_policy):
    """A model that a command has to make first is stood in for by another one."""
    experiment = "grpo" if group == "env" else "grpo_aws"
    made = [f"actor.path={tiny_policy}"] if choice.startswith("smollm2_135m") else []
    check_config(compose_config([f"experiment={experiment}", f"{group}={choice}", *made]).config)


@pytest.mark.slow
def test_a_model_that_was_not_made_names_the_command(tmp_path, monkeypatch):
    """The folder is looked for where the run is started."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"actor\.path=models/smollm2_135m: no such folder; run `make model` to create it",
    ):
        check_config(compose_config(["experiment=grpo_aws", "model=smollm2_135m"]).config)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_registered_environment_is_a_choice():
    """One without a file of settings, such as an adapter, is chosen by its name as well;
    ``env=aws`` says nothing new to an experiment about it."""
    chosen = {
        name: compose_config(["experiment=grpo", f"env={name}"]).config for name in environments
    }
    assert {name: config.env.path for name, config in chosen.items()} == {
        name: name for name in environments
    }
    assert compose_config(["experiment=grpo", "env=gymnasium", "env.id=Mine-v0"]).overridden == (
        "env.id",
    )
    assert (
        compose_config(["experiment=grpo_aws", "env=aws", "env.pool_size=3"]).config.env.pool_size
        == 3
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model", [[], ["model=builtin"], ["model=builtin_tiny"], ["actor.path=builtin_tiny"]]
)
def test_an_environment_without_a_solver_starts_untrained(model, capsys):
    """Whatever is asked for of the built-in policy. It is said unless the untrained one was named;
    what needs demonstrations says what works."""
    arguments = ["experiment=grpo", f"env.path={UNSOLVED}:Lock", "mode=check", *model]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert told.err.startswith("warning: the environment Lock has no scripted solver") == (
        "actor.path" not in str(model)
    )
    assert "warm_start (" not in told.out and "/bytes-" in told.out
    assert main(["experiment=sft", *arguments[1:]]) == 2
    [refused] = capsys.readouterr().err.splitlines()
    assert (
        "has no scripted solver, so there are no demonstrations" in refused
        and "experiment=grpo" in refused
    )


@pytest.mark.slow
def test_a_model_wins_over_an_environment():
    """An environment's lengths and rates are those of the built-in policy; whoever names a model
    gets the model's."""
    for order in (["model=builtin_tiny", "env=countdown"], ["env=countdown", "model=builtin_tiny"]):
        config = compose_config(["experiment=grpo", *order]).config
        assert isinstance(config, ExperimentConfig)
        assert config.warm_start.train_steps == 5
        assert config.rollout.max_turns == 1 and config.env.partial_credit == 0


@pytest.mark.slow
def test_an_experiment_file_of_the_user_brings_its_yaml_and_its_mistakes(tmp_path):
    (tmp_path / "mine.py").write_text("def build(config):\n    return config.nothing\n")
    (tmp_path / "mine.yaml").write_text("dataset: {train_bs_n_seqs: 2}\n")
    assert (
        compose_config([f"+experiment_path={tmp_path / 'mine.py'}"]).config.dataset.train_bs_n_seqs
        == 2
    )
    (tmp_path / "mine.yaml").write_text("sed: 3\n")
    with pytest.raises(ConfigError, match="unknown option 'sed'; did you mean 'seed'"):
        compose_config([f"experiment_path={tmp_path / 'mine.py'}"])


@pytest.mark.slow
def test_an_error_in_an_experiment_file_shows_its_line(tmp_path, capsys):
    (tmp_path / "wrong.py").write_text("\ndef build(config):\n    return config.nothing\n")
    assert "wrong.py, line 3" in errors(capsys, f"+experiment_path={tmp_path / 'wrong.py'}")
    (tmp_path / "empty.py").write_text("")
    assert "defines no build(config)" in errors(capsys, f"+experiment_path={tmp_path / 'empty.py'}")


@pytest.mark.nightly
@pytest.mark.slow
def test_help_names_every_option_and_neither_help_nor_an_error_imports_torch():
    code = (
        "import sys\nfrom realhf.launch.__main__ import main\ncode = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\nsys.exit(code)"
    )

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    help_ = run("--help")
    assert help_.returncode == 0, help_.stderr
    assert all(
        f"  {name}=" in help_.stdout
        for name in [*Schema().options, *Schema(config_class("aws")).options]
    )
    assert run("experiment=grpo_aws", "seed=x").returncode == 2
    assert run("experiment=grpo_aws", "mode=check", "ref.workers=[3]").returncode == 2
    assert run("experiment=grpo_aws", "mode=graph").returncode == 0
