"""Which class an experiment is configured with, what is said about a file that does not tell, and
of options without effect."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.api.config import ConfigError, ExperimentConfig
from realhf.base.installation import CONFIGS, PACKAGE
from realhf.launch.__main__ import main
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config, experiment_names, list_choices
from realhf.launch.help import help_text, options_reference, scheduler_schemas
from realhf.launch.plugins import load_experiment

HEAD = """from __future__ import annotations
from dataclasses import dataclass
from realhf.api.config import ExperimentConfig
from realhf.api.option import option
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(HEAD + text)
    return file


@pytest.mark.slow
def test_the_annotation_of_the_first_parameter_names_the_class(tmp_path: Path):
    file = written(
        tmp_path,
        "@dataclass\nclass Mine(ExperimentConfig):\n    extra: int = option(3, 'An extra.')\n"
        "def build(given: Mine) -> NotImportedHere: ...\n",
    )
    found = load_experiment(CONFIGS, "mine", file)
    assert found.config_class.__name__ == "Mine" and found.plugin == str(file)
    assert compose_config([f"+experiment_path={file}", "extra=5"]).config.extra == 5  # type: ignore[attr-defined]


def test_without_an_annotation_there_are_the_common_sections_only(tmp_path: Path):
    assert load_experiment(
        CONFIGS, "mine", written(tmp_path, "def build(config): ...\n")
    ).config_class is (ExperimentConfig)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(config: Missing): ...\n", "name 'Missing' is not defined"),
        ("def build(config: int): ...\n", "must take an ExperimentConfig"),
        (
            "@dataclass(kw_only=True)\nclass Mine(ExperimentConfig):\n    extra: int\ndef "
            "build(config: Mine): ...\n",
            "every option of Mine needs a default",
        ),
        (
            "class Mine(ExperimentConfig):\n    extra: int = option(1, 'More.')\ndef build(config: "
            "Mine): ...\n",
            "the class Mine lacks @dataclass",
        ),
        (
            "@dataclass\nclass Mine(ExperimentConfig):\n    loss: str = option('a', 'A loss.', "
            "registry='lossy')\n"
            "def build(config: Mine): ...\n",
            "option loss: no registry 'lossy' .known: interfaces, ",
        ),
        ("nothing = 1\n", "defines no build"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load_experiment(CONFIGS, "mine", written(tmp_path, text))


def test_a_type_that_no_option_can_have_is_named(tmp_path: Path):
    text = (
        "@dataclass\nclass Mine(ExperimentConfig):\n    word: object = option(dict, 'A class.')\n"
    )
    file = written(tmp_path, text + "def build(config: Mine): ...\n")
    with pytest.raises(
        ConfigError, match=r"the option 'word' of Mine cannot be declared so: Unexpected type"
    ):
        compose_config([f"+experiment_path={file}"])


def test_a_yaml_names_the_experiment_that_it_varies_or_builds_on_one_that_does(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    for name, text in (
        ("named", "experiment: sft\n"),
        ("built", "defaults: [named, _self_]\nseed: 2\n"),
        ("named_anew", "defaults: [built, _self_]\nexperiment: named_anew\n"),
    ):
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
        assert load_experiment(tmp_path, name, None).plugin == "experiments.sft"


def test_a_choice_about_a_section_that_the_experiment_lacks_is_refused(tmp_path: Path):
    file = written(tmp_path, "def build(config): ...\n")
    with pytest.raises(
        ConfigError, match="env=sql has no effect in experiment mine: it has no section env"
    ):
        compose_config([f"+experiment_path={file}", "env=sql"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: 5\n", "defaults must be a list"),
        ("- seed\n", "must contain options .name: value., not a list"),
    ],
)
def test_a_yaml_of_another_shape_is_named(tmp_path: Path, text: str, said: str):
    file = written(tmp_path, "def build(config): ...\n")
    file.with_suffix(".yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        compose_config([f"+experiment_path={file}"])


def test_yaml_files_that_build_on_each_other_end(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    for name, base in (("one", "other"), ("other", "one")):
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"defaults: [{base}, _self_]\n")
    with pytest.raises(ConfigError, match="experiment=one"):
        load_experiment(tmp_path, "one", None)


PAGE = PACKAGE.parent / "docs" / "reference" / "options.md"


@pytest.mark.slow
def test_the_reference_is_what_the_fields_say():
    """In a process of its own: other tests register names, which are allowed values then."""
    done = subprocess.run(
        [sys.executable, "-m", "realhf.launch", "--options-reference"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text(encoding="utf-8"), (
        f"make it anew: python -m realhf.launch --options-reference > {PAGE}"
    )
    assert (
        "| `ppo.group_size` | `8` |" in done.stdout and "| `env.pool_size` | `16` |" in done.stdout
    )


@pytest.mark.slow
def test_the_help_of_an_experiment_shows_its_own_values_and_sections(capsys):
    assert main(["experiment=sft_aws", "seed=7", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("sft_aws: Supervised fine-tuning")
    assert (
        "  total_train_steps=600 " in shown
        and "  seed=7 " in shown
        and "  env.pool_size=16 " in shown
    )
    assert "ppo." not in shown.replace("(ppo.", ""), "it does not train with a policy gradient"


def test_a_mistake_beside_help_is_told(capsys):
    assert main(["experiment=sft_awz", "--help"]) == 2
    assert "did you mean 'sft_aws'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_general_help_says_whose_the_other_sections_are(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    at = shown.index(
        "Of dpo, grpo, grpo_async, grpo_aws, grpo_aws_async, grpo_stream_http, policy_gradient, "
        "ppo, ppo_async, "
        "reinforce, reinforce_aws, reward_model:"
    )
    assert shown.index("  ppo.algo=grpo ") > at
    assert "Number of rollouts per task, which form a group. [at least 1]" in shown


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


@pytest.mark.slow
def test_in_the_yaml_of_an_experiment_of_the_house(configs):
    write(configs, "sft", "rollout:\n  max_turns: 3\nstream: {port: 8000}\n")
    with pytest.raises(ConfigError) as refused:
        build(configs, "experiment=sft", "env.path=aws", "async_rl.enabled=true")
    assert str(refused.value).splitlines() == [
        "option async_rl.enabled has no effect in experiment sft: no rollouts can run while it "
        "trains",
        "option rollout.max_turns has no effect in experiment sft (set in sft.yaml)",
        "option stream.port has no effect in experiment sft: this run starts no trajectory server "
        "(set in sft.yaml)",
    ]


@pytest.mark.slow
def test_in_the_yaml_beside_a_file_of_ones_own(tmp_path, capsys):
    shutil.copy(TOY, tmp_path / "mine.py")
    (tmp_path / "mine.yaml").write_text(
        TOY.with_suffix(".yaml").read_text().replace("toy_experiment", "mine")
        + "rollout: {max_turns: 4}\n"
    )
    arguments = [f"+experiment_path={tmp_path / 'mine.py'}", "mode=check"]
    assert main(arguments) == 2
    assert (
        "option rollout.max_turns has no effect in experiment mine (set in mine.yaml)"
        in capsys.readouterr().err
    )
    assert main([*arguments, "rollout.max_turns=6"]) == 0, (
        "the command line sets it back to the library's value"
    )


@pytest.mark.slow
def test_in_a_yaml_that_it_builds_on_unless_it_is_set_back(configs):
    write(configs, "reinforce_aws", "")
    (configs / "experiment" / "reinforce_aws.yaml").write_text(
        "# @package _global_\ndefaults: [grpo_aws, _self_]\nexperiment: reinforce_aws\nppo: {algo: "
        "rloo}\n"
        "stream: {wait_s: 9}\n"
    )
    with pytest.raises(ConfigError) as refused:
        build(configs, "experiment=reinforce_aws", "ppo.kl_loss_coef=null")
    said = (
        "option stream.wait_s has no effect in experiment reinforce_aws (set in reinforce_aws.yaml)"
    )
    assert str(refused.value) == said
    (configs / "experiment" / "other.yaml").write_text("# @package _global_\nstream: {wait_s: 9}\n")
    text = "# @package _global_\ndefaults: [other, _self_]\nexperiment: sft\nenv: {path: aws}\n"
    (configs / "experiment" / "sft.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"stream\.wait_s has no effect .* \(set in what sft.yaml builds on\)"
    ):
        build(configs, "experiment=sft")
    (configs / "experiment" / "sft.yaml").write_text(text + "stream: {wait_s: 900.0}\n")
    build(configs, "experiment=sft")


@pytest.mark.slow
def test_a_choice_of_which_nothing_is_read(configs):
    (configs / "model" / "streamed.yaml").write_text("# @package _global_\nstream: {wait_s: 9}\n")
    with pytest.raises(
        ConfigError, match=r"^model=streamed has no effect .*: it reads none of stream"
    ):
        build(configs, "experiment=sft_aws", "model=streamed")


@pytest.mark.slow
def test_a_choice_about_one_section_of_which_nothing_is_read(configs):
    (configs / "env" / "aws.yaml").write_text("pool_size: 4\ntiers: [warmup]\n")
    with pytest.raises(
        ConfigError,
        match=r"^env=aws has no effect .*: it reads none of env\.pool_size, env\.tiers$",
    ):
        build(configs, "experiment=grpo_stream_http", "actor.path=owner/name", "env=aws")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("experiment", experiment_names())
def test_what_is_shipped_has_effect(experiment):
    environment = [] if "aws" in experiment or "stream" in experiment else ["env.path=countdown"]
    build(CONFIGS, f"experiment={experiment}", *environment)
    for model in list_choices("model"):
        build(CONFIGS, f"experiment={experiment}", f"model={model}", *environment)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [path.stem for path in sorted((CONFIGS / "env").glob("*.yaml"))]
)
def test_the_settings_of_an_environment_have_effect(environment):
    for experiment in ("grpo", "grpo_async", "reinforce", "sft"):
        build(CONFIGS, f"experiment={experiment}", f"env={environment}")


@pytest.mark.slow
def test_the_help_shows_the_defaults_of_the_section_that_an_option_stands_in():
    assert (
        "  warm_start.optimizer.lr=1e-05" in help_text()
        and "  actor.optimizer.lr=1e-06" in help_text()
    )


@pytest.mark.slow
def test_the_help_has_the_options_of_every_scheduler():
    """They stood in their own page alone, and neither in the help nor in the reference."""
    texts = help_text(), options_reference()
    for name, schema in scheduler_schemas().items():
        own = [
            option
            for option in schema.options
            if option.startswith("scheduler.") and option != "scheduler.path"
        ]
        assert (
            own
            and f"Of the scheduler {name} " in texts[0]
            and f"Of the scheduler `{name}`." in texts[1]
        )
        assert not [
            option
            for option in own
            if f"  {option}=" not in texts[0] or f"| `{option}` |" not in texts[1]
        ]
    assert {"join", "ray", "slurm"} <= scheduler_schemas().keys()
    assert texts[0].count("  scheduler.path=") == 1


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["grpo", "sft"])
def test_an_experiment_is_described_without_an_environment(experiment, capsys):
    """The help was refused for want of an environment, whose options are a few of many."""
    assert main([f"experiment={experiment}", "gen.max_new_tokens=77", "--help"]) == 0
    said = capsys.readouterr().out
    assert (
        "choose an environment with env=NAME (aws, countdown," in said
        and "  gen.max_new_tokens=77" in said
    )
    assert "  env." not in said
    assert main([f"experiment={experiment}", "env=sql", "--help"]) == 0
    assert "  env.max_statements=8" in capsys.readouterr().out
    assert main([f"experiment={experiment}", "mode=check"]) == 2
