"""Training on the rows of a file: what is built, what is refused before anything starts, and whole
runs."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import row_file
from realhf.api.config import ConfigError
from realhf.data.row_formats import check_rows
from realhf.launch.__main__ import main
from realhf.launch.build import BuiltExperiment, build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config


def ask(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{number}+2?"}


ASK = ask(2)


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    files: dict[str, list[Any]] = {
        "sft": [{"messages": [ASK, say("4" * (n + 1))]} for n in range(12)],
        "dpo": [
            {"prompt": [ask(n)], "chosen": [say("4" * (n + 1))], "rejected": [say("5")]}
            for n in range(12)
        ],
        "bad": [{"messages": [ASK, say("4")]}, {"messages": [ASK, {"role": "assistant"}]}],
    }
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {name: folder / f"{name}.jsonl" for name in files}


def built(*arguments: str) -> BuiltExperiment:
    composed = compose_config(arguments)
    check_config(composed.config)
    return build_experiment(composed)


@pytest.mark.slow
def test_rows_are_tokenised_before_a_supervised_graph(rows: dict[str, Path]):
    options = ("experiment=sft", f"dataset.path={rows['sft']}")
    made = built(*options)
    assert made.graph.topological_levels() == [["actor_train"]]
    assert [job.name for job in made.spec.jobs] == ["builtin_policy", "rows"]
    assert made.spec.evaluation is None and made.spec.environment is None
    made = built(
        *options, "model=builtin_tiny", "dataset.held_out=0.25", "evaluation.every_steps=2"
    )
    assert made.spec.evaluation is not None
    assert (made.spec.evaluation.every_steps, made.spec.evaluation.generates) == (2, False)


def test_pairs_of_a_file_need_a_reference_and_no_episodes(rows: dict[str, Path]):
    made = built("experiment=dpo", f"dataset.path={rows['dpo']}", "preference.beta=0.3")
    assert made.graph.topological_levels() == [["ref_inf"], ["actor_train"]]
    assert made.spec.mfcs[1].interface_args["beta"] == 0.3
    assert [job.name for job in made.spec.jobs] == ["builtin_policy", "rows"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_an_environment_evaluates_and_trains_nothing(rows: dict[str, Path], name: str):
    options = (f"experiment={name}", f"dataset.path={rows[name]}", "env=countdown")
    made = built(*options, "evaluation.episodes_per_task=3")
    evaluation = made.spec.evaluation
    assert evaluation is not None and not evaluation.also
    assert (evaluation.interface, evaluation.args["episodes_per_task"]) == ("env_rollout", 3)
    assert "actor_train" in made.graph.topological_levels()[-1]
    assert all(call.interface != "env_rollout" for call in made.spec.mfcs)
    evaluation = built(*options, "dataset.held_out=0.25").spec.evaluation
    assert evaluation is not None
    assert [each.interface for each in evaluation.also] == ["rows_evaluation"]


@pytest.mark.nightly
@pytest.mark.slow
def test_tokens_are_kept_for_the_same_file_options_and_tokenizer(rows: dict[str, Path]):
    options = ("experiment=sft", f"dataset.path={rows['sft']}")
    artifacts = [
        built(*options, *more).spec.jobs[-1].artifact.name
        for more in ((), ("total_train_steps=3",), ("dataset.train_on=all",), ("seed=2",))
    ]
    assert artifacts[0] == artifacts[1] and len({*artifacts}) == 3


@pytest.mark.slow
def test_a_file_is_read_once_however_often_its_experiment_is_built(
    rows: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The experiment is built once more for each option of the environment that is set."""
    read: list[Path] = []

    def check(file: Path, kind: str) -> int:
        read.append(file)
        return check_rows(file, kind)

    monkeypatch.setattr(row_file, "check_rows", check)
    file = tmp_path / "own.jsonl"
    file.write_bytes(rows["sft"].read_bytes())
    options = ("experiment=sft", f"dataset.path={file}", f"fileroot={tmp_path}", "env=countdown")
    levels = ("env.levels=[two-small]", "env.partial_credit=0.5")
    made = built(*options, *levels)
    assert read == [file]
    assert built(*options).spec.jobs == made.spec.jobs and read == [file]
    with file.open("a") as more:
        more.write(rows["sft"].read_text())
    changed = built(*options)
    assert changed.spec.jobs != made.spec.jobs and read == [file] * 2
    with file.open("a") as more:
        more.write("{}\n")
    with pytest.raises(ConfigError, match=r"own\.jsonl, line 25: the row has neither"):
        built(*options)
    # What was tokenised before, by another launch, is not read.
    file.write_bytes(rows["sft"].read_bytes())
    artifact = made.spec.jobs[-1].artifact
    artifact.mkdir(parents=True)
    (artifact / "rows.json").touch()
    assert built(*options).spec.jobs == made.spec.jobs and len(read) == 3


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "experiment=sft dataset.path={bad}",
            r"dataset\.path: \S+bad\.jsonl, line 2: messages\[1\] has no content",
        ),
        (
            "experiment=dpo dataset.path={sft}",
            r"dataset\.path: \S+sft\.jsonl, line 1: chosen: missing \(the row has 'messages'\)",
        ),
        ("experiment=sft dataset.path=/no/rows.jsonl", r"/no/rows\.jsonl: there is no such file"),
        ("experiment=sft", r"choose an environment .* with dataset\.path=FILE\.jsonl"),
        (
            "experiment=sft dataset.path=null",
            r"choose an environment .* with dataset\.path=FILE\.jsonl",
        ),
        ("experiment=grpo env.mix=[,]", r"env\.mix=\[,\]: name at least two environments"),
        (
            "experiment=grpo env=countdown dataset.path={sft}",
            r"option dataset\.path has no effect in experiment grpo: only sft and dpo train on a",
        ),
        (
            "experiment=sft env=countdown dataset.held_out=0.1",
            r"option dataset\.held_out has no effect in experiment sft: it applies to rows of a",
        ),
        (
            "experiment=dpo dataset.path={dpo} preference.held_out=0.1",
            r"option preference\.held_out has no effect in experiment dpo: .*dataset\.held_out",
        ),
        (
            "experiment=dpo dataset.path={dpo} gen.temperature=0.5",
            r"option gen\.temperature has no effect in experiment dpo",
        ),
        (
            "experiment=sft dataset.path={sft} dataset.held_out=0.5 actor.backend=fsdp2 "
            "actor.workers=[0,1]",
            r"dataset\.held_out=0\.5: rows are evaluated by one worker",
        ),
        (
            "experiment=sft dataset.path={sft} dataset.held_out=0.5 exp_ctrl.keep_best=true",
            r"exp_ctrl\.keep_best=true: experiment sft has no held-out evaluation",
        ),
        (
            "experiment=sft dataset.path={sft} env.mix=[sql,countdown] env.weights=[2,1]",
            r"option env\.weights has no effect in experiment sft",
        ),
        ("experiment=sft env=countdown mode=show", r"mode=show: experiment sft trains on no file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    rows: dict[str, Path], capsys: pytest.CaptureFixture[str], arguments: str, message: str
):
    words = arguments.format(**{name: str(path) for name, path in rows.items()}).split()
    mode = [] if "mode=show" in words else ["mode=check"]
    assert main([*words, *mode]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("config error: ") and re.search(message, line), line


@pytest.mark.parametrize("option", ["preference: {held_out: 0.3}", "gen: {temperature: 0.5}"])
def test_options_of_ones_own_file_that_have_no_effect_are_refused(
    rows: dict[str, Path], tmp_path: Path, option: str
):
    (tmp_path / "mine.py").write_text("from experiments.dpo import *\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(f"defaults: [dpo]\n{option}\n", encoding="utf-8")
    name = option.replace(": {", ".").partition(":")[0]
    composed = compose_config(
        [f"experiment_path={tmp_path / 'mine.py'}", f"dataset.path={rows['dpo']}"]
    )
    with pytest.raises(ConfigError, match=rf"{name} has no effect .* \(set in mine\.yaml\)"):
        build_experiment(composed)


@pytest.mark.slow
def test_a_file_of_ones_own_experiment_on_episodes_is_refused(
    rows: dict[str, Path], tmp_path: Path
):
    (tmp_path / "mine.py").write_text(
        "from experiments.policy_gradient import *\n", encoding="utf-8"
    )
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [grpo]\ndataset: {{path: {rows['sft']}}}\n", encoding="utf-8"
    )
    composed = compose_config([f"experiment_path={tmp_path / 'mine.py'}", "env=countdown"])
    assert composed.config.actor.path == "builtin"
    with pytest.raises(ConfigError, match=r"dataset\.path has no effect .* \(set in mine\.yaml"):
        build_experiment(composed)


# ---- whole runs

TINY = (
    "model=builtin_tiny",
    "total_train_steps=2",
    "dataset.train_bs_n_seqs=3",
    "dataset.held_out=0.25",
    "dataset.shown=1",
    "actor.optimizer.lr=0.01",
    "torch_threads=1",
    "monitor.trackers=[]",
    "monitor.progress=false",
)


def launch(root: Path, name: str, path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = (f"experiment={name}", f"dataset.path={path}", f"fileroot={root}", "trial_name=a")
    return subprocess.run(
        [sys.executable, "-m", "realhf.launch", *words, *TINY, *more],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_trains_on_a_file_shows_it_and_evaluates(rows: dict[str, Path], tmp_path: Path):
    run = tmp_path / "sft" / "a"
    shown = launch(tmp_path, "sft", rows["sft"], "mode=show")
    assert shown.returncode == 0, shown.stderr
    assert not run.exists() and not [*(tmp_path / "warm_start").glob(".logs-*")]
    assert "9 rows to train on, 3 held out" in shown.stdout
    assert "<|user|>|2|+|2|?|<|assistant|>" in shown.stdout and "4|<|end|>" in shown.stdout
    done = launch(tmp_path, "sft", rows["sft"])
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    assert "9 rows to train on, 3 held out" in done.stdout and "rows: found" in done.stdout
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    summary = json.loads((run / "summary.json").read_text())
    before = summary["heldout_rows_before"]
    after = summary["heldout_rows_after"]
    assert before["rows"] == after["rows"] == 3 and before["loss"] > after["loss"] > 0
    assert "held-out rows after training: loss " in done.stdout
    assert (run / "policy" / "config.json").is_file()
    more = launch(tmp_path, "sft", rows["sft"], "total_train_steps=3")
    assert more.returncode == 0 and "resumed after step 2" in more.stdout, more.stderr
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = launch(tmp_path, "sft", rows["sft"], "mode=show")
    assert shown.returncode == 0, "a run that uses the folder does not matter"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_trains_on_a_parquet_file(rows: dict[str, Path], tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
    parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    content = [json.loads(line) for line in rows["sft"].read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(content), tmp_path / "rows.parquet")
    done = launch(tmp_path, "sft", tmp_path / "rows.parquet")
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    assert "rows.parquet: 9 rows to train on, 3 held out" in done.stdout
    summary = json.loads((tmp_path / "sft" / "a" / "summary.json").read_text())
    assert summary["heldout_rows_before"]["loss"] > summary["heldout_rows_after"]["loss"] > 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_episodes_and_rows_are_evaluated_in_one_run(rows: dict[str, Path], tmp_path: Path):
    options = ("env=countdown", "evaluation.episodes_per_task=1", "evaluation.templates=2")
    options += ("evaluation.greedy_episodes_per_task=0", "gen.max_new_tokens=8")
    done = launch(tmp_path, "sft", rows["sft"], *options)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    summary = json.loads((tmp_path / "sft" / "a" / "summary.json").read_text())
    assert summary["heldout_rows_after"]["rows"] == 3 and summary["heldout_episodes"] == 2


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_learns_the_preferences_of_a_file(rows: dict[str, Path], tmp_path: Path):
    done = launch(tmp_path, "dpo", rows["dpo"], "total_train_steps=3")
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    summary = json.loads((tmp_path / "dpo" / "a" / "summary.json").read_text())
    before = summary["heldout_rows_before"]
    assert (before["reward_accuracy"], before["reward_margin"]) == (0.5, 0.0)
    assert summary["heldout_rows_after"]["reward_margin"] > 0
    rows_of_steps = (tmp_path / "dpo" / "a" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows_of_steps[0])["preference/pairs"] == 3
