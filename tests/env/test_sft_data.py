"""Scripts of demonstrations, and rows played on real simulators."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from realhf.env.episode import Episode
from realhf.env.pool import MiniStackPool
from realhf.env.sft_data import Script, main, play, play_all, with_short_names, write_scripts
from realhf.env.tasks import instantiate, load_templates


def test_scripts_hold_the_wanted_mix() -> None:
    scripts = write_scripts(10, 3, recovery_fraction=0.3, habit_fraction=0.2)
    assert Counter(script.kind for script in scripts) == {"canonical": 5 * 39, "recovery": 3 * 39, "habit": 2 * 39}
    assert set(Counter(script.task.task_id for script in scripts).values()) == {10}
    for script in scripts:
        assert (script.commands == script.task.solution) == (script.kind == "canonical")
        solved_at_the_end = script.commands[-len(script.task.solution) :] == script.task.solution
        assert not (script.kind == "habit" and solved_at_the_end)
        assert script.kind != "habit" or len(script.commands) >= 3


def test_short_names_lose_their_last_word_everywhere() -> None:
    task = instantiate(203, seed=5)
    name = task.params["name"]
    short = with_short_names(task)
    assert len(short) == len(task.solution) == 3
    assert all(name not in command and name.rpartition("-")[0] in command for command in short)


def test_scripts_are_decided_by_the_seed() -> None:
    assert write_scripts(10, 3) == write_scripts(10, 3) != write_scripts(10, 4)
    assert write_scripts(2, 0, ["warmup"])[0].task.tier == "warmup"


@pytest.mark.parametrize("fractions", [(-0.1, 0.0), (0.6, 0.6)])
def test_impossible_fractions(fractions: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="fractions"):
        write_scripts(10, 0, recovery_fraction=fractions[0], habit_fraction=fractions[1])


@pytest.mark.sim
def test_a_row_is_what_really_happened(episode: Episode) -> None:
    task = instantiate(201, 4)
    create, enable = task.solution
    row = play(episode, Script(task, "recovery", (enable, create, enable, "aws never sent")))
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user"] + ["assistant", "tool"] * 3
    assert row["messages"][0]["content"] == task.description
    assert [m["content"] for m in row["messages"] if m["role"] == "assistant"] == [enable, create, enable]
    error = row["messages"][2]
    assert "NoSuchBucket" in error["content"] and error["observation"]["error"] == error["content"]
    assert row["messages"][-1]["observation"]["task_achieved"] and row["achieved"] and row["reward"] == 1.0
    assert (row["task_id"], row["tier"], row["seed"], row["kind"]) == (201, "intermediate", 4, "recovery")


@pytest.mark.sim
def test_parallel_play_keeps_order_and_content(pool: MiniStackPool) -> None:
    scripts = write_scripts(2, 5, recovery_fraction=0.5)
    random.Random(0).shuffle(scripts)
    rows = list(play_all(scripts[:40], pool))
    assert [row["seed"] for row in rows] == [script.task.seed for script in scripts[:40]]
    assert all(row["achieved"] and row["reward"] == 1.0 for row in rows)
    free = pool.free_count
    assert free == pool.size, "every slot is given back"


@pytest.mark.sim
def test_a_mislabelled_episode_is_an_error(pool: MiniStackPool) -> None:
    task = instantiate(101, 0)
    with pytest.raises(RuntimeError, match="s3-create-bucket"):
        list(play_all([Script(task, "habit", task.solution)], pool))
    assert pool.free_count == pool.size


@pytest.mark.sim
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--out", str(out), "--episodes-per-task", "1", "--tiers", "warmup", "--pool-size", "2"]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["template"] for row in rows} == {template.name for template in load_templates(["warmup"])}
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    with pytest.raises(SystemExit):
        main([*arguments, "--recovery-fraction", "2"])
    assert "fractions" in capsys.readouterr().err
