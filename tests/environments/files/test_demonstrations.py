"""What the scripted solver of files says: scripts that end as they claim, and mistakes that all
templates share."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from realhf.api.environment import Demonstration, DemonstrationRequest
from realhf.environments.files.definition import (
    PERSISTENCE,
    demonstration,
    demonstrations,
    draw_mistake,
    play,
    shorten_names,
)
from realhf.environments.files.tasks import (
    GROUPS,
    NAME,
    TEMPLATES,
    FilesCall,
    FilesTasks,
    choose_split,
)
from realhf.environments.files.workspace import FilesWorkspace

TASKS = FilesTasks(GROUPS, "train")
ASKED = DemonstrationRequest(20, 3, habit_fraction=0.35, recovery_fraction=0.15)


def calls(shown: Demonstration) -> list[FilesCall]:
    found = []
    for turn in shown.turns:
        assert turn.startswith("<tool_call>{") and turn.endswith("}</tool_call>")
        said = json.loads(turn.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert {*said} == {"name", "arguments"}
        found.append(FilesCall(said["name"], said["arguments"]))
    return found


def replay(shown: Demonstration) -> tuple[list[str], FilesWorkspace]:
    workspace = FilesWorkspace()
    workspace.reset(**shown.task.payload)
    return [play(workspace, call) for call in calls(shown)], workspace


@pytest.mark.slow
def test_every_script_ends_as_it_says():
    """Solutions and recoveries earn 1, and only with their last call; habits never succeed, and
    damage nothing."""
    for shown in demonstrations(TASKS, ASKED):
        said, workspace = replay(shown)
        assert (workspace.get_reward() == 1) == shown.succeeds
        assert workspace.get_reward() >= 0
        assert replay(Demonstration(shown.task, shown.turns[:-1]))[1].get_reward() < 1
        assert "you have answered" not in " ".join(said)
        assert len(shown.turns) <= 4


def test_a_recovery_goes_wrong_once_and_the_wrong_call_is_not_to_be_learned():
    seen = 0
    for shown in demonstrations(TASKS, ASKED):
        if shown.kind != "recovery":
            assert not shown.learned
            continue
        seen += 1
        said, _ = replay(shown)
        assert len(shown.learned) == len(shown.turns) and sum(shown.learned) == len(shown.turns) - 1
        wrong = shown.learned.index(False)
        failed = [number for number, line in enumerate(said) if line.startswith("error:")]
        assert failed == [wrong] or calls(shown)[wrong].tool == "write_file"
    assert seen > 30


def test_a_habit_repeats_the_call_that_fails():
    """Or does its task wrongly without ever seeing an error."""
    repeated = 0
    for shown in demonstrations(TASKS, ASKED):
        if shown.kind == "habit":
            said, _ = replay(shown)
            failed = [
                turn
                for turn, line in zip(shown.turns, said, strict=True)
                if line.startswith("error:")
            ]
            assert len({*failed}) <= 1
            if failed:
                assert len(shown.turns) == PERSISTENCE
                repeated += 1
    assert repeated > 60


def test_most_mistakes_shorten_names():
    rng = random.Random(1)
    drawn = Counter(
        draw_mistake(TASKS.instance(template, seed), rng) is shorten_names
        for template in TEMPLATES
        for seed in range(50)
    )
    assert 0.5 < drawn[True] / drawn.total() < 0.75


@pytest.mark.slow
def test_shares_and_order_are_decided_by_the_request():
    shown = [*demonstrations(TASKS, ASKED)]
    assert shown == [*demonstrations(TASKS, ASKED)]
    assert shown != [*demonstrations(TASKS, DemonstrationRequest(20, 4, 0.35, 0.15))]
    assert len(shown) == 20 * len(TEMPLATES)
    habits = Counter(
        TASKS.group_of[each.task.id.partition("/")[0]] for each in shown if each.kind == "habit"
    )
    assert habits == {group: 7 * [*TASKS.group_of.values()].count(group) for group in GROUPS}
    assert {each.kind for each in demonstrations(TASKS, DemonstrationRequest(5, 1))} == {"solution"}


def test_demonstrations_hold_no_held_out_name():
    for shown in demonstrations(TASKS, ASKED):
        found = NAME.findall(json.dumps(shown.task.payload))
        assert {choose_split("-".join(words)) for words in found} == {"train"}


def test_a_turn_and_an_episode_are_short():
    """Bounds in characters, which keep them within 48 and 640 tokens of a tokenizer with a token
    for every word."""
    for template in TEMPLATES:
        for kind in ("solution", "recovery", "habit"):
            shown = demonstration(TASKS, template, 11, kind, random.Random(5))
            said, _ = replay(shown)
            assert max(map(len, shown.turns)) < 180
            assert (
                len(shown.task.payload["request"])
                + sum(map(len, said))
                + sum(map(len, shown.turns))
                < 1100
            )
