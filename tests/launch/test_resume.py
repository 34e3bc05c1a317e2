"""A run that goes on knows the options that it had: what may change, what is said of it, and what
is refused."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from realhf.api.config import ConfigError, RecoverMode, run_folder
from realhf.api.experiment import Launch
from realhf.api.option import walk
from realhf.base.installation import PACKAGE
from realhf.dataflow.checkpoint import CheckpointStore
from realhf.launch.__main__ import main
from realhf.launch.build import build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config
from realhf.launch.resume import check_resume, plain_options, resume_command
from realhf.launch.run import RUN_FILES, find_removable_files, find_unknown_files
from realhf.monitor.provenance import describe_changes, read_launches, record_launch
from realhf.registry import registered_names
from tests.dataflow.checkpoints import save

NUMBER_OF_CHANGES = 200
TOY = Path(__file__).with_name("toy_experiment.py")
WHERE = ("experiment_name", "trial_name", "fileroot", "recover_mode")
"""Another value of these is about another folder, or about no recovery."""
BASES = (
    ["experiment=grpo_aws_async", "actor.path=owner/name"],
    ["experiment=grpo_stream_http", "actor.path=owner/name"],
    ["experiment=ppo", "env=sql", "actor.path=owner/name"],
)


def saved(config, step=5, options=None):
    """A run folder with a checkpoint, as far as options go."""
    folder = run_folder(config)
    state = {"options": plain_options(config) if options is None else options}
    save(CheckpointStore(folder / "checkpoints"), step, lambda draft: None, state)
    return folder


def other_value(random, found):
    """Another value of an option, one that may stand there as far as its field says."""
    _, about, now = found
    names = [*about.choices] or ([*registered_names(about.registry)] if about.registry else [])
    if isinstance(now, bool):
        return not now
    if isinstance(now, Enum):
        return random.choice([value for value in type(now) if value != now])
    if isinstance(now, list):
        return (
            [random.choice(names)]
            if names
            else [*now, 1 if now and isinstance(now[0], int) else "other"]
        )
    if isinstance(now, dict):
        return {**now, "other": 1}
    if names:
        return random.choice([value for value in names if value != now] or names)
    if isinstance(now, str) or (now is None and random.random() < 0.3):
        return f"{now or ''}other"
    low = (
        about.at_least
        if about.at_least is not None
        else (about.above or 0) + 0.01
        if about.above is not None
        else 0
    )
    high = about.at_most if about.at_most is not None else max(4.0 * (now or 1), low + 8)
    drawn = random.uniform(low, high)
    return round(drawn) if isinstance(now, int) else drawn


def with_option(composed, name, value):
    config = copy.deepcopy(composed.config)
    section, _, leaf = name.rpartition(".")
    part: Any = config
    for key in section.split(".") if section else ():
        part = getattr(part, key)
    setattr(part, leaf, value)
    return composed._replace(config=config, overridden=(name,), written={})


@pytest.mark.nightly
@pytest.mark.slow
def test_random_changes_are_free_told_or_refused_as_their_fields_say(tmp_path):
    """Whatever could be launched into an empty folder is tried on one that has made five steps with
    other options."""
    random = Random(11)
    seen = Counter()
    bases = [
        compose_config([*base, f"fileroot={tmp_path / str(i)}", "trial_name=t"])
        for i, base in enumerate(BASES)
    ]
    options = [
        (base, option) for base in bases for option in walk(base.config) if option.name not in WHERE
    ]
    for base in bases:
        saved(base.config)
    while seen.total() < NUMBER_OF_CHANGES:
        base, found = random.choice(options)
        changed = with_option(base, found.name, value := other_value(random, found))
        try:
            check_config(changed.config)
            if found.option.on_resume != "refuses":
                build_experiment(changed)
        except (ConfigError, TypeError, ValueError):
            continue  # not a launch that anybody could make
        if value == found.value:
            continue
        seen[found.option.on_resume] += 1
        if found.option.on_resume == "refuses":
            with pytest.raises(ConfigError) as refused:
                check_resume(changed.config)
            told = str(refused.value)
            assert f" {found.name}=" in told and " -> " in told and "\n" not in told
            assert "another trial_name" in told and "recover_mode=disabled" in told
            continue
        resumption = check_resume(changed.config)
        assert resumption is not None and resumption.completed_steps == 5
        told = describe_changes(resumption.values)
        assert (f"{found.name}=" in told) == (found.option.on_resume == "warns"), found.name
        assert [change.name for change in resumption.changed] == ([found.name] if told else [])
    assert set(seen) == {"free", "warns", "refuses"} and min(seen.values()) >= 5, seen


@pytest.mark.slow
def test_a_refused_launch_names_the_options_and_changes_nothing(tmp_path, capsys):
    """It used to report the old run as if it were the new one, and to write the new options into
    its folder."""
    where = [f"fileroot={tmp_path}", "trial_name=z"]
    first = ["experiment=grpo", "env=countdown", "actor.path=owner/name", *where]
    composed = compose_config(first)
    folder = saved(composed.config, 14)
    record_launch(folder, _launched("first", composed.config), 0)
    before = {
        path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in folder.rglob("*")
    }
    assert (
        main(
            [
                *first,
                "ppo.algo=drgrpo",
                "actor.optimizer.lr=0.01",
                "gen.temperature=0.5",
                "torch_threads=1",
            ]
        )
        == 2
    )
    (told,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")
    ]
    assert told.startswith(
        f"config error: trial_name=z: {folder} has a run that has trained 14 steps"
    )
    for text in ("ppo.algo=grpo -> drgrpo", "gen.temperature=1.0 -> 0.5"):
        assert text in told
    assert "torch_threads" not in told and "actor.optimizer.lr" not in told, (
        "they would have been taken"
    )
    other = [text if text != "env=countdown" else "env=sql" for text in first]
    assert main([*other, "mode=check"]) == 2, "another environment is another experiment"
    told = capsys.readouterr().err
    assert "env.path=countdown -> sql" in told and "env.max_statements" not in told, (
        "its own options are no changes"
    )
    assert main([*first, "mode=check"]) == 0
    after = {
        path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in folder.rglob("*")
    }
    assert after == before


@pytest.mark.nightly
def test_a_second_launch_with_another_learning_rate_never_reports_the_first_ones_result(
    tmp_path, capsys
):
    """A complete run has nothing left to train with it, and is not shown as if it had been trained
    so; one that is not complete takes it from its next step on, and says so. Of the warm start it
    would come too late in any case."""
    options = [
        "experiment=ppo",
        "env=sql",
        "actor.path=owner/name",
        f"fileroot={tmp_path}",
        "trial_name=z",
    ]
    composed = compose_config([*options, "total_train_steps=14"])
    saved(composed.config, 14)
    rates = ["actor.optimizer.lr=0.01", "critic.optimizer.lr=0.02"]
    assert main([*options, "total_train_steps=14", *rates]) == 2
    told = capsys.readouterr().err
    assert "is complete with 14 steps, so other options have no effect: actor.optimizer.lr=" in told
    resumption = check_resume(compose_config([*options, "total_train_steps=20", *rates]).config)
    assert resumption and resumption.completed_steps == 14
    said = describe_changes(resumption.values)
    assert "-> 0.01" in said and "critic.optimizer.lr=null -> 0.02" in said
    with pytest.raises(ConfigError, match=r"other options: warm_start\.optimizer\.lr="):
        check_resume(
            compose_config(
                [*options, "total_train_steps=20", "warm_start.optimizer.lr=0.01"]
            ).config
        )


@pytest.mark.slow
def test_options_that_come_too_late_are_refused_and_more_steps_are_not(tmp_path):
    config = compose_config(
        ["experiment=grpo", "env=sql", "actor.path=owner/name", f"fileroot={tmp_path}"]
    ).config
    saved(config, config.total_train_steps)
    config.evaluation.templates += 1
    with pytest.raises(
        ConfigError, match=r"is complete with \d+ steps.*evaluation\.templates=200 -> 201"
    ):
        check_resume(config)
    config.total_train_steps += 5
    resumption = check_resume(config)
    assert resumption and "total_train_steps=" in describe_changes(resumption.values)
    config.warm_start.optimizer.lr *= 2
    with pytest.raises(ConfigError, match=r"warm_start\.optimizer\.lr="):
        check_resume(config)
    others = [name for name in plain_options(config) if not name.startswith("warm_start.")]
    assert check_resume(config, others), (
        "an option that does nothing makes no other run, and could not be set back"
    )
    config.recover_mode = RecoverMode.disabled
    assert check_resume(config) is None, "it begins anew"


@pytest.mark.slow
def test_options_are_known_from_the_configuration_before_the_first_checkpoint(tmp_path):
    """A run that was killed before its first checkpoint has samples in its journal all the same."""
    options = [
        "experiment=grpo_aws_async",
        "actor.path=owner/name",
        f"fileroot={tmp_path}",
        "trial_name=t",
    ]
    config = compose_config(options).config
    folder = run_folder(config)
    folder.mkdir(parents=True)
    record_launch(folder, _launched("first", config), 0)
    config.ppo.group_size = 4  # type: ignore[attr-defined]
    assert check_resume(config) is None, "it has nothing that the new options could not go on from"
    (folder / "journal").mkdir()
    (folder / "journal" / "journal-000001.log").write_bytes(b"samples")
    with pytest.raises(ConfigError, match=r"ppo\.group_size=8 -> 4"):
        check_resume(config)
    (folder / "config.yaml").unlink()
    resumption = check_resume(config)
    assert resumption and "it is not known which options" in "".join(resumption.warnings())


@pytest.mark.slow
def test_options_of_an_earlier_version_had_their_defaults_and_paths_may_be_written_otherwise(
    tmp_path,
):
    config = compose_config(
        ["experiment=grpo", "env=sql", f"fileroot={tmp_path}", "trial_name=t"]
    ).config
    (tmp_path / "model").mkdir()
    config.actor.path = str(tmp_path / "model")
    before = {**plain_options(config), "actor.path": f"{tmp_path}/./model", "gone": 1}
    del before["actor.lora.rank"], before["gen.temperature"]
    saved(config, 5, before)
    assert check_resume(config)
    config.gen.temperature = 0.5
    with pytest.raises(ConfigError, match=r"gen\.temperature=1\.0 -> 0\.5"):
        check_resume(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_aws_async", "grpo_aws"])
def test_runs_from_before_the_switch_go_on_as_asynchronously_as_they_began(tmp_path, name):
    config = compose_config([f"experiment={name}", f"fileroot={tmp_path}", "trial_name=t"]).config
    before = plain_options(config)
    streamed = before.pop("async_rl.enabled")
    saved(config, 5, before)
    resumption = check_resume(config)
    assert resumption and resumption.changed == ()
    config.async_rl.enabled = not streamed
    with pytest.raises(ConfigError, match=r"async_rl\.enabled="):
        check_resume(config)


@pytest.mark.nightly
def test_a_run_without_a_name_is_a_new_one_and_says_how_to_go_on(tmp_path):
    arguments = ["experiment=grpo", "env=sql", f"fileroot={tmp_path}", "recover_mode=disabled"]
    names = {compose_config(arguments).config.trial_name for _ in range(3)}
    assert len(names) == 3 and all(name.startswith(time.strftime("%Y%m")) for name in names)
    line = resume_command(arguments, "20260101-000000-abcd")
    assert line.startswith("python -m realhf.launch experiment=grpo env=sql ")
    assert line.endswith(" trial_name=20260101-000000-abcd") and "recover_mode" not in line


@pytest.mark.slow
def test_a_resume_without_a_checkpoint_names_the_runs_that_have_one(tmp_path):
    arguments = ["experiment=grpo", "env=sql", "actor.path=owner/name", f"fileroot={tmp_path}"]
    saved(compose_config([*arguments, "trial_name=mine"]).config)
    config = compose_config([*arguments, "recover_mode=resume"]).config
    with pytest.raises(
        ConfigError, match=r"no checkpoint in .*; give the trial_name of a run: mine"
    ):
        check_config(config)


def test_the_history_of_a_run_is_kept(tmp_path):
    for name, steps in (("a", 0), ("b", 5), ("b", 5)):
        launch = Launch(
            name,
            f"seed: {steps}\n",
            {},
            {"seed": [0, steps]},
            {"git": {"commit": "c"}, "arguments": [name]},
        )
        record_launch(tmp_path, launch, steps)
    assert [(entry["at"], entry["completed_steps"]) for entry in read_launches(tmp_path)] == [
        ("a", 0),
        ("b", 5),
    ]
    assert read_launches(tmp_path)[1]["changed"] == {"seed": [0, 5]}
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 5}
    assert json.loads((tmp_path / "provenance.json").read_text())["arguments"] == ["b"]


def test_what_a_run_wrote_goes_when_it_begins_anew_and_nothing_else(tmp_path):
    """``weights.jsonl`` used to stay, so that the proof of the weights held two histories."""
    made = [file.name.replace("*", "x") for file in RUN_FILES] + [
        "notes.txt",
        "metrics.jsonl.partial",
    ]
    made += [".policy.7.old", ".policy.7.tmp"]
    for name in made:
        (tmp_path / name).touch()
    assert find_unknown_files(tmp_path) == [
        ".policy.7.old",
        ".policy.7.tmp",
        "metrics.jsonl.partial",
        "notes.txt",
    ]
    gone = {path.name for path in find_removable_files(tmp_path)}
    assert (
        set(made) - gone == {"notes.txt", "note.json", ".lock", ".keys-x", "warm_start-x"}
        and "weights.jsonl" in gone
    )


def test_every_file_of_a_run_is_in_the_docs():
    page = (PACKAGE.parent / "docs" / "running.md").read_text(encoding="utf-8")
    assert [file.name for file in RUN_FILES if f"`{file.name.rstrip('*')}" not in page] == []


def _launched(at, config):
    from omegaconf import OmegaConf

    text = OmegaConf.to_yaml(OmegaConf.structured(config))
    return Launch(at, text, plain_options(config), {}, {"git": {"commit": ""}, "arguments": []})
