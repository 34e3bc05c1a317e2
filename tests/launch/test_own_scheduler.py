"""A scheduler with options of its own, in a folder outside the package: found, checked, and in
charge of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.api.config import ConfigError, ExperimentConfig
from realhf.base.installation import CONFIGS
from realhf.launch.__main__ import main
from realhf.launch.compose import compose_config
from realhf.launch.plugins import load_scheduler, make_scheduler, with_scheduler
from realhf.scheduler.local import LocalScheduler

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scheduler and an experiment whose YAML chooses it, as somebody would have them."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copy(HERE / "own_scheduler.py", folder / "diary.py")
    shutil.copy(HERE / "toy_experiment.py", folder / "toy.py")
    chosen = f"{{path: '{folder / 'diary.py'}:DIARY', file: '{folder / 'diary.txt'}', copies: 2}}"
    (folder / "toy.yaml").write_text(
        f"total_train_steps: 1\ntorch_threads: 1\nscheduler: {chosen}\n"
    )
    # What is refused is refused before the experiment is built; the toy registers parts and is for
    # other processes.
    (folder / "mine.py").write_text("def build(config):\n    raise NotImplementedError\n")
    shutil.copy(folder / "toy.yaml", folder / "mine.yaml")
    return folder


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    return [
        f"+experiment_path={folder / name}",
        f"fileroot={folder / 'runs'}",
        "dataset.train_bs_n_seqs=2",
        *more,
    ]


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    capsys.readouterr()
    assert main(given) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("config error: ")


@pytest.mark.nightly
@pytest.mark.slow
def test_it_starts_the_processes_of_a_run_as_its_options_say(folder: Path):
    command = [sys.executable, "-m", "realhf.launch", *arguments(folder, "toy.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert sorted((folder / "diary.txt").read_text().split()) == [
        "master",
        "master",
        "model_worker/0",
        "model_worker/0",
    ]
    (run,) = (folder / "runs" / "toy").iterdir()
    assert json.loads((run / "summary.json").read_text())["steps"] == 1
    assert "copies: 2" in (run / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "scheduler.copis=1",
            "unknown option 'scheduler.copis'; did you mean 'scheduler.copies'? Every name is",
        ),
        (
            "scheduler.copies=4",
            "scheduler.copies=4: must be between 1 and 3. Every name is written this many times.",
        ),
        ("scheduler.copies=many", "scheduler.copies=many: Value 'many' of type 'str' could not be"),
    ],
)
def test_a_mistake_is_refused_with_the_text_of_the_option(
    folder: Path, capsys, option: str, said: str
):
    assert refused(capsys, *arguments(folder, "mine.py", "mode=check", option)).startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{path: PATH, copies: 0}", "scheduler.copies=0: must be between 1 and 3."),
        (
            "{path: PATH, copis: 2}",
            "unknown option 'scheduler.copis'; did you mean 'scheduler.copies'?",
        ),
        ("{copies: 2}", "unknown option 'scheduler.copies'"),
        ("local", "str is not a subclass of SchedulerConfig. value: local"),
    ],
)
def test_a_mistake_in_a_yaml_is_refused_too(
    folder: Path, tmp_path: Path, capsys, text: str, said: str
):
    """The options of a scheduler that was not chosen are unknown; its name alone is no section."""
    (tmp_path / "mine.py").write_text("def build(config):\n    raise NotImplementedError\n")
    path = f"{folder / 'diary.py'}:DIARY"
    (tmp_path / "mine.yaml").write_text(f"scheduler: {text.replace('PATH', repr(path))}\n")
    assert said in refused(capsys, f"+experiment_path={tmp_path / 'mine.py'}", "mode=check")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_choice_on_the_command_line_wins_over_the_yaml(folder: Path, capsys):
    """Then the options that the YAML gives to its own scheduler are unknown, and the launch says
    so."""
    path = f"scheduler.path={folder / 'diary.py'}:DIARY"
    assert (
        main(["experiment=sft_aws", "mode=check", "scheduler=local", path, "scheduler.copies=3"])
        == 0
    )
    assert refused(
        capsys, *arguments(folder, "mine.py", "mode=check", "scheduler=local")
    ).startswith("unknown option 'scheduler.")


@pytest.mark.slow
def test_what_a_yaml_builds_on_may_choose_and_another_choice_may_not(folder: Path, tmp_path: Path):
    """A scheduler is looked for in the experiment's own YAML and those that it builds on; one that
    comes with a model is refused."""
    shutil.copytree(
        CONFIGS, tmp_path / "configs", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    base = tmp_path / "configs" / "experiment" / "base.yaml"
    own = tmp_path / "mine.yaml"
    base.write_text(f"# @package _global_\nscheduler: {{path: '{folder / 'diary.py'}:DIARY'}}\n")
    (tmp_path / "mine.py").write_text("def build(config):\n    raise NotImplementedError\n")
    own.write_text("defaults: [base, _self_]\n")
    chosen = compose_config(
        [f"+experiment_path={tmp_path / 'mine.py'}"], tmp_path / "configs"
    ).config.scheduler
    assert chosen.path.endswith("diary.py:DIARY") and hasattr(chosen, "copies")
    own.write_text("seed: 2\n")
    (tmp_path / "configs" / "model" / "far.yaml").write_text(
        "# @package _global_\nscheduler: {path: slurm}\n"
    )
    with pytest.raises(
        ConfigError, match=r"scheduler.path=slurm: set it in mine.yaml or on the command line"
    ):
        compose_config(
            [f"+experiment_path={tmp_path / 'mine.py'}", "model=far"], tmp_path / "configs"
        )


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (
            "locl",
            "unknown scheduler 'locl'; did you mean 'local'? (known: join, local, ray, slurm); one "
            "of your own",
        ),
        ("FOLDER/diary.py", "FOLDER/diary.py: name the scheduler in it, FOLDER/diary.py:NAME"),
        ("/nowhere/diary.py:DIARY", "/nowhere/diary.py:DIARY: there is no file /nowhere/diary.py"),
        (
            "no_such_module:DIARY",
            "no_such_module:DIARY: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("FOLDER/diary.py:DIRAY", "defines no 'DIRAY'; did you mean 'DIARY'?"),
        ("FOLDER/diary.py:Diary", "found the class Diary, expected a SchedulerDefinition"),
    ],
)
def test_what_is_no_scheduler_is_refused(folder: Path, capsys, reference: str, said: str):
    path, said = (text.replace("FOLDER", str(folder)) for text in (reference, said))
    line = refused(capsys, "experiment=sft_aws", "mode=check", f"scheduler.path={path}")
    assert line.startswith("scheduler.path: ") and said in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NO_DIARY", "make returned a DiaryOptions without start, wait, kill, stop"),
        ("BROKEN", "ZeroDivisionError: "),
    ],
)
def test_one_that_cannot_be_made_is_named_with_the_line(folder: Path, name: str, said: str):
    kind = with_scheduler(ExperimentConfig, f"{folder / 'diary.py'}:{name}")
    with pytest.raises(ValueError, match=said) as error:
        make_scheduler(kind().scheduler)
    assert f"{folder / 'diary.py'}" in str(error.value)


def test_options_that_cannot_be_a_section_are_refused(tmp_path: Path):
    cases = {
        "1": "options must be a dataclass, not 1",
        "make_dataclass('O', [('path', str, '')])": "O.path: this name is reserved",
        "make_dataclass('O', ['size'])": "O: TypeError: ",
        "make_dataclass('O', [('size', int, 1)], frozen=True)": "O: TypeError: cannot inherit",
    }
    for number, (options, said) in enumerate(cases.items()):
        file = tmp_path / f"bad{number}.py"
        file.write_text(
            "from dataclasses import make_dataclass\nfrom realhf.scheduler.base import "
            "SchedulerDefinition\n"
            f"BAD = SchedulerDefinition({options}, print)\n"
        )
        with pytest.raises(ValueError, match=said):
            with_scheduler(ExperimentConfig, f"{file}:BAD")


def test_the_scheduler_of_this_machine_is_the_default():
    chosen = ExperimentConfig().scheduler
    assert chosen.path == "local" and isinstance(make_scheduler(chosen), LocalScheduler)
    assert (
        make_scheduler(with_scheduler(ExperimentConfig, "local")().scheduler).__class__
        is LocalScheduler
    )
    assert load_scheduler("local") is load_scheduler("realhf.scheduler.local:DEFINITION")
