"""Scripts of demonstrations, and rows played on real simulators."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from realhf.api.environment import EnvironmentFailure
from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.policy import check_command
from realhf.aws.messages import HINT_COMMAND, observation_text
from realhf.aws.scripts import (
    _REMOVALS,
    Line,
    Script,
    _required_options,
    number_lines,
    removal_of,
    shorten_names,
    slip,
    write_script,
    write_scripts,
)
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.loader import TEN, instantiate, load_templates
from realhf.aws.tasks.task import Task
from realhf.aws.training.sft_data import main, play_all
from realhf.base.text import shorten

STARTER = {"tags": ["starter"]}
LOOKED_UP = {507, 509}
"""No text of these tasks tells the ids of a network, a group and a key that their solutions
need."""


def commands(script: Script) -> tuple[str, ...]:
    return tuple(line.command for line in script.lines)


def test_scripts_hold_the_wanted_mix() -> None:
    scripts = write_scripts(10, 3, **STARTER, mix={"recovery": 0.3, "habit": 0.2})
    assert Counter(script.kind for script in scripts) == {
        "canonical": 5 * 39,
        "recovery": 3 * 39,
        "habit": 2 * 39,
    }
    assert set(Counter(script.task.task_id for script in scripts).values()) == {10}
    for script in scripts:
        assert (commands(script) == script.task.solution) == (script.kind == "canonical")
        solved_at_the_end = commands(script)[-len(script.task.solution) :] == script.task.solution
        assert not (script.kind == "habit" and solved_at_the_end)
        assert script.kind != "habit" or len(commands(script)) >= 3


def test_what_is_to_be_learned() -> None:
    task = instantiate(203, seed=5)
    rng = random.Random(0)
    recovery = write_script(task, "recovery", rng)
    learned = [line.learned for line in recovery.lines]
    assert learned == sorted(learned) and set(learned) == {False, True}
    assert all(
        line.learned for line in write_script(task, "recovery", rng, learn_mistakes=True).lines
    )
    assert all(line.learned for line in write_script(task, "habit", rng).lines)
    continuation = write_script(task, "continuation", rng)
    learned = [line.learned for line in continuation.lines]
    assert (
        commands(continuation) == task.solution
        and learned == sorted(learned)
        and set(learned) == {False, True}
    )
    hint = write_script(task, "hint", rng)
    assert commands(hint) == (HINT_COMMAND, *task.solution)
    look = write_script(task, "verification", rng)
    assert commands(look) == (*task.solution[:-1], "aws sns list-subscriptions", task.solution[-1])


def test_a_kind_that_a_task_does_not_allow_becomes_canonical() -> None:
    one_step = instantiate(101, 0)
    assert write_script(one_step, "continuation", random.Random(0)).kind == "canonical"


def test_rows_are_split_by_template() -> None:
    train = {script.task.task_id for script in write_scripts(1, 0)}
    heldout = {script.task.task_id for script in write_scripts(1, 0, split="heldout")}
    assert train and not train & heldout
    assert train | heldout == {template.task_id for template in load_templates()} - LOOKED_UP


def test_short_names_lose_their_last_word_everywhere() -> None:
    task = instantiate(203, seed=5)
    name = task.params["name"]
    short = shorten_names(task)
    assert len(short) == len(task.solution) == 3
    assert all(name not in command and name.rpartition("-")[0] in command for command in short)


def test_short_names_are_never_the_solution() -> None:
    """Also where the solution uses identifiers and no drawn name, as that of a drifted firewall
    does for some seeds."""
    for template in load_templates():
        for seed in (5, 1634821429):
            task = instantiate(template.task_id, seed)
            assert shorten_names(task) != task.solution


@pytest.mark.sim
def test_what_a_mistake_made_is_removed_again(pool: MiniStackPool) -> None:
    """Of each operation that a removal is known for, one first command under a shortened name, and
    what removes it."""
    wrong: dict[str, tuple[Task, str]] = {}
    for template in load_templates(split="train") + load_templates(split="heldout"):
        task = instantiate(template.task_id, 3)
        command = shorten_names(task)[0]
        wrong.setdefault(" ".join(command.split(" ")[1:3]), (task, command))
    removals = {
        name: removal for name, (_, command) in wrong.items() if (removal := removal_of(command))
    }
    assert set(removals) == set(_REMOVALS)
    scripts = [
        Script(wrong[name][0], "habit", number_lines((wrong[name][1], removals[name])))
        for name in removals
    ]
    failed = {}
    for row in play_all(scripts, pool):
        (_, made, removed) = [
            message["observation"] for message in row["messages"] if message["role"] == "user"
        ]
        if not (made["command_success"] and removed["command_success"]):
            failed[row["task_id"]] = (made["error"], removed["error"])
    assert not failed


@pytest.mark.nightly
@pytest.mark.sim
def test_every_task_is_solved_after_a_mistake(pool: MiniStackPool) -> None:
    """What a mistake leaves behind is not damage to what the account held before: else the way back
    could not pay."""
    scripts = write_scripts(3, 2, mix={"recovery": 1.0}) + write_scripts(
        3, 2, mix={"recovery": 1.0}, split="heldout"
    )
    assert (
        len(list(play_all(scripts, pool)))
        == len(scripts)
        == 3 * (len(load_templates()) - len(LOOKED_UP))
    )


@pytest.mark.slow
def test_a_slip_is_wrong_and_is_never_imitated() -> None:
    """It is another command than the right one: without one of its options, whose quotes stay
    whole, or of an operation that there is not, and then the operations of the service are looked
    up."""
    rng = random.Random(1)
    seen = set()
    for template in load_templates():
        for command in instantiate(template.task_id, 3).solution:
            wrong, *help_line = slip(command, rng, 400)
            service, operation = command.split()[1:3]
            assert not wrong.learned and wrong.number == 0 and wrong.command != command
            seen.add(bool(help_line))
            if operation not in shorten(
                check_command(f"aws {service} help").answer or "", 400
            ).split("\n"):
                assert not help_line, "what is not read there is not looked for there"
            elif help_line:
                assert help_line == [Line(f"aws {service} help")]
            if wrong.command.split()[2] != operation:
                assert (
                    wrong.command.split()[2] not in ALLOWED[service]
                    and wrong.command.split()[1] == service
                )
            else:
                left = wrong.command.split(" --")
                all_of = command.split(" --")
                [out] = [text for text in all_of if text not in left]
                assert len(left) == len(all_of) - 1 and out.split()[0] in _required_options(
                    service, operation
                )
    assert seen == {False, True}
    assert not _required_options("efs", "create-file-system"), (
        "the command line makes up its token by itself"
    )
    assert not _required_options("s3", "cp") and not _required_options("nowhere", "get-thing")


@pytest.mark.slow
def test_slips_are_what_recoveries_are_from() -> None:
    scripts = write_scripts(
        4, 1, ["intermediate"], mix={"recovery": 0.5}, learn_mistakes=True, slips=True
    )
    recoveries = [script for script in scripts if script.kind == "recovery"]
    assert len(recoveries) == len(scripts) / 2
    for script in recoveries:
        learned = [
            line.command
            for line in script.lines
            if line.learned and not line.command.endswith(" help")
        ]
        assert learned == list(script.task.solution) and not all(
            line.learned for line in script.lines
        )


@pytest.mark.sim
def test_what_a_slip_is_told_names_what_is_missing(pool: MiniStackPool) -> None:
    """The error of a left-out option names it, that of an unknown operation is followed by those
    that there are; both episodes are solved then."""
    task = instantiate(3, 4)
    solution = number_lines(task.solution)
    told = {}
    for seed in range(6):
        wrong = slip(task.solution[0], random.Random(seed), 400)
        [row] = play_all([Script(task, "recovery", wrong + solution)], pool, observation_chars=400)
        assert row["achieved"] and row["messages"][1]["train"] is False
        told[len(wrong)] = [message["content"] for message in row["messages"][2::2]]
    assert "the following arguments are required" in told[1][0]
    assert "is not available here" in told[2][0] and task.solution[0].split()[2] in told[2][1]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.sim
def test_what_a_solution_takes_from_an_answer_can_be_read_there(pool: MiniStackPool) -> None:
    """With the options of env=aws_all_tiers, and not with 200 characters and words in place of
    ids."""
    tasks = [instantiate(template.task_id, 5) for template in load_templates(split="all_but_ten")]
    tasks = [task for task in tasks if any("${step" in command for command in task.solution)]
    scripts = [Script(task, "canonical", number_lines(task.solution)) for task in tasks]

    def unread(**read: Any) -> set[str]:
        found = set()
        for task, row in zip(tasks, play_all(scripts, pool, **read), strict=True):
            answers = [message for message in row["messages"][1:] if message["role"] == "user"]
            outputs = [answer["observation"]["command_output"] for answer in answers]
            for place, command in enumerate(task.solution):
                taken = [resolve(text, outputs) for text in re.findall(r"\$\{step[^}]*\}", command)]
                seen = "".join(answer["content"] for answer in answers[:place])
                found |= {task.template for value in taken if value not in seen}
        return found

    assert unread(observation_chars=400, show_ids=True) == set()
    assert {"kms-key-with-alias", "volumes-nobody-uses"} <= unread()


def test_all_but_ten_templates_are_demonstrated_where_no_id_would_be_made_up() -> None:
    written = {script.task.task_id for script in write_scripts(1, 0, split="all_but_ten")}
    assert written == {template.task_id for template in load_templates()} - set(TEN) - LOOKED_UP


@pytest.mark.slow
def test_scripts_are_decided_by_the_seed() -> None:
    assert write_scripts(10, 3) == write_scripts(10, 3) != write_scripts(10, 4)
    assert write_scripts(2, 0, ["warmup"])[0].task.tier == "warmup"


@pytest.mark.parametrize(
    "mix", [{"recovery": -0.1}, {"recovery": 0.6, "habit": 0.6}, {"daydream": 0.1}]
)
def test_impossible_mixes(mix: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="mix"):
        write_scripts(10, 0, mix=mix)


@pytest.mark.sim
def test_a_row_is_what_really_happened(pool: MiniStackPool) -> None:
    task = instantiate(201, 4)
    create, enable = task.solution
    [row] = play_all(
        [Script(task, "recovery", number_lines((enable, create, enable, "aws never sent")))], pool
    )
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user"] + ["assistant", "user"] * 3
    assert row["messages"][0]["content"] == task.description
    assert [m["content"] for m in row["messages"] if m["role"] == "assistant"] == [
        enable,
        create,
        enable,
    ]
    error = row["messages"][2]
    assert "NoSuchBucket" in error["content"] and error["content"] == observation_text(
        error["observation"]
    )
    assert (
        row["messages"][-1]["observation"]["task_achieved"]
        and row["achieved"]
        and row["reward"] == 1.0
    )
    assert (row["task_id"], row["tier"], row["seed"], row["kind"]) == (
        201,
        "intermediate",
        4,
        "recovery",
    )


@pytest.mark.sim
def test_parallel_play_keeps_order_and_content(pool: MiniStackPool) -> None:
    scripts = write_scripts(
        5, 5, **STARTER, mix={"recovery": 0.4, "verification": 0.2, "continuation": 0.2}
    )
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
        list(play_all([Script(task, "habit", number_lines(task.solution))], pool))
    assert pool.free_count == pool.size


class BrokenPool:
    """A pool of one slot that nobody gets."""

    size = free_count = 1

    def __init__(self) -> None:
        self.asked = 0

    def acquire(self) -> Slot:
        self.asked += 1
        raise EnvironmentFailure("internal", "broken")


def test_the_first_episode_that_fails_for_good_ends_the_others() -> None:
    pool, task, rows = BrokenPool(), instantiate(101, 0), list[int]()
    scripts = [Script(task, "canonical", number_lines(task.solution))] * 5
    with pytest.raises(RuntimeError, match=r"the episode .* failed \(.*\): .*broken"):
        play_all(scripts, cast(MiniStackPool, pool), lambda: rows.append(1))
    assert pool.asked == 2, "it was played twice, the others were not begun"
    assert rows == []


@pytest.mark.nightly
@pytest.mark.sim
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = [
        "--out",
        str(out),
        "--episodes-per-task",
        "1",
        "--pool-size",
        "2",
        "--tiers",
        "warmup",
    ]
    arguments += ["--tags", "starter"]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {template.name for template in load_templates(["warmup"], tags=["starter"])}
    assert {row["template"] for row in rows} == names
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rows.jsonl",
        "rows.jsonl.stats.json",
    ]
    assert sum(
        group["rows"] for group in json.loads((tmp_path / "rows.jsonl.stats.json").read_text())
    ) == len(rows)
    with pytest.raises(SystemExit):
        main([*arguments, "--mix", "recovery=2"])
    assert "mix" in capsys.readouterr().err
