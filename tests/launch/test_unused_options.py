"""Options without effect are refused wherever they are written: in the experiment's YAML, in one that it builds on, in
a choice of which nothing is read."""

import shutil
from pathlib import Path

import pytest

from realhf.api.config import ConfigError
from realhf.base.installation import CONFIGS
from realhf.launch.__main__ import main
from realhf.launch.build import build_experiment
from realhf.launch.compose import choices, compose_config, experiment_names
from realhf.launch.help import help_text

TOY = Path(__file__).with_name("toy_experiment.py")


@pytest.fixture
def configs(tmp_path):
    """A copy of the configurations, to be added to."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    return tmp_path / "configs"


def write(configs, experiment, text):
    path = configs / "experiment" / f"{experiment}.yaml"
    path.write_text((path.read_text() if path.exists() else "# @package _global_\n") + text)


def build(configs, *arguments):
    build_experiment(compose_config(list(arguments), configs))


def test_in_the_yaml_of_an_experiment_of_the_house(configs):
    write(configs, "sft", "rollout:\n  max_turns: 3\nstream: {port: 8000}\n")
    with pytest.raises(ConfigError) as refused:
        build(configs, "experiment=sft", "env.path=aws", "async_rl.enabled=true")
    assert str(refused.value).splitlines() == [
        "option async_rl.enabled has no effect in experiment sft: no episodes are played for it while it trains",
        "option rollout.max_turns has no effect in experiment sft (set in sft.yaml)",
        "option stream.port has no effect in experiment sft: this run starts no trajectory server (set in sft.yaml)",
    ]


def test_in_the_yaml_beside_a_file_of_ones_own(tmp_path, capsys):
    shutil.copy(TOY, tmp_path / "mine.py")
    (tmp_path / "mine.yaml").write_text(
        TOY.with_suffix(".yaml").read_text().replace("toy_experiment", "mine") + "rollout: {max_turns: 4}\n"
    )
    arguments = [f"+experiment_path={tmp_path / 'mine.py'}", "mode=check"]
    assert main(arguments) == 2
    assert "option rollout.max_turns has no effect in experiment mine (set in mine.yaml)" in capsys.readouterr().err
    assert main([*arguments, "rollout.max_turns=6"]) == 0, "the command line sets it back to the library's value"


@pytest.mark.slow
def test_in_a_yaml_that_it_builds_on_unless_it_is_set_back(configs):
    write(configs, "reinforce_aws", "")
    (configs / "experiment" / "reinforce_aws.yaml").write_text(
        "# @package _global_\ndefaults: [grpo_aws, _self_]\nexperiment: reinforce_aws\nppo: {algo: rloo}\n"
        "stream: {wait_s: 9}\n"
    )
    with pytest.raises(ConfigError) as refused:
        build(configs, "experiment=reinforce_aws", "ppo.kl_loss_coef=null")
    said = "option stream.wait_s has no effect in experiment reinforce_aws (set in reinforce_aws.yaml)"
    assert str(refused.value) == said
    (configs / "experiment" / "other.yaml").write_text("# @package _global_\nstream: {wait_s: 9}\n")
    text = "# @package _global_\ndefaults: [other, _self_]\nexperiment: sft\nenv: {path: aws}\n"
    (configs / "experiment" / "sft.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"stream\.wait_s has no effect .* \(set in what sft.yaml builds on\)"):
        build(configs, "experiment=sft")
    (configs / "experiment" / "sft.yaml").write_text(text + "stream: {wait_s: 900.0}\n")
    build(configs, "experiment=sft")


def test_a_choice_of_which_nothing_is_read(configs):
    (configs / "model" / "streamed.yaml").write_text("# @package _global_\nstream: {wait_s: 9}\n")
    with pytest.raises(ConfigError, match=r"^model=streamed has no effect .*: it reads none of stream"):
        build(configs, "experiment=sft_aws", "model=streamed")


def test_a_choice_about_one_section_of_which_nothing_is_read(configs):
    (configs / "env" / "aws.yaml").write_text("pool_size: 4\ntiers: [warmup]\n")
    with pytest.raises(ConfigError, match=r"^env=aws has no effect .*: it reads none of env\.pool_size, env\.tiers$"):
        build(configs, "experiment=grpo_stream_http", "actor.path=owner/name", "env=aws")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", experiment_names())
def test_what_is_shipped_has_effect(experiment):
    environment = [] if "aws" in experiment or "stream" in experiment else ["env.path=countdown"]
    build(CONFIGS, f"experiment={experiment}", *environment)
    for model in choices("model"):
        build(CONFIGS, f"experiment={experiment}", f"model={model}", *environment)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("environment", [path.stem for path in sorted((CONFIGS / "env").glob("*.yaml"))])
def test_the_settings_of_an_environment_have_effect(environment):
    for experiment in ("grpo", "grpo_async", "reinforce", "sft"):
        build(CONFIGS, f"experiment={experiment}", f"env={environment}")


def test_the_help_shows_the_defaults_of_the_section_that_an_option_stands_in():
    assert "  warm_start.optimizer.lr=1e-05" in help_text() and "  actor.optimizer.lr=1e-06" in help_text()
