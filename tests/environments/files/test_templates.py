"""The templates of files: solutions solve, nothing and harm earn nothing, and the splits share no
name."""

from __future__ import annotations

import json
import random
from itertools import product

import pytest

from realhf.api.environment import HELD_OUT, SPLITS, TRAIN
from realhf.environments.files.definition import play
from realhf.environments.files.tasks import (
    GROUPS,
    KINDS,
    NAME,
    TEMPLATES,
    FilesInstance,
    FilesTasks,
    answer,
    choose_split,
    draw_name,
)
from realhf.environments.files.workspace import FilesWorkspace

DRAWS = 30


def opened(instance: FilesInstance) -> FilesWorkspace:
    workspace = FilesWorkspace()
    assert workspace.reset(**json.loads(json.dumps(instance.row))) == instance.request
    return workspace


def instances(template: str, split: str = TRAIN) -> list[FilesInstance]:
    return [FilesTasks(GROUPS, split).instance(template, seed) for seed in range(DRAWS)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_solution_earns_one_and_its_beginnings_less(template: str):
    """In both splits: nothing done is 0, no step before the last one solves, each step is possible,
    all of them 1."""
    for instance in instances(template) + instances(template, HELD_OUT):
        workspace = opened(instance)
        assert workspace.get_reward() == 0
        for call in instance.solution:
            assert 0 <= workspace.get_reward() < 1
            assert not play(workspace, call).startswith("error:")
        assert workspace.get_reward() == 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_harm_earns_nothing(template: str):
    """To delete everything, to empty everything, to move everything away, to answer at once with a
    guess."""
    for instance in instances(template):
        gone, empty, moved, guessed = (opened(instance) for _ in range(4))
        for number, path in enumerate(instance.files):
            gone.delete_file(path)
            empty.write_file(path, "")
            moved.move_file(path, f"elsewhere/{number}.txt")
        for guess in (instance.request, "", "0", "1"):
            play(guessed, answer(guess))
        for harmed in (gone, empty, moved, guessed):
            assert harmed.get_reward() <= 0


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_look_alone_earns_nothing(template: str):
    for instance in instances(template):
        workspace = opened(instance)
        workspace.list_files()
        for path in instance.files:
            workspace.read_file(path)
        for name in NAME.finditer(instance.request):
            workspace.search_files(name[0])
        assert workspace.get_reward() == 0


def test_there_are_enough_templates_in_groups_of_rising_difficulty():
    assert len(TEMPLATES) >= 10
    groups = [group for group, _ in TEMPLATES.values()]
    assert groups == sorted(groups, key=GROUPS.index)
    calls = dict.fromkeys(GROUPS, 0)
    for template, (group, _) in TEMPLATES.items():
        calls[group] = max(
            calls[group], *(len(instance.solution) for instance in instances(template))
        )
    assert calls == {"one_call": 1, "look_first": 2, "change": 2, "several": 3}


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_instance_holds_names_and_all_are_of_its_split(template: str):
    """So no instance can be in both splits, whatever is drawn."""
    for split in SPLITS:
        for instance in instances(template, split):
            found = NAME.findall(json.dumps(instance.row))
            assert len(found) >= 3
            assert {choose_split("-".join(words)) for words in found} == {split}


@pytest.mark.parametrize("template", TEMPLATES)
def test_seeds_draw_instances_that_differ(template: str):
    """The same seed draws the same task, other seeds other ones."""
    tasks = FilesTasks(GROUPS, TRAIN)
    again = FilesTasks(GROUPS, TRAIN)
    drawn = [tasks.instantiate(template, seed) for seed in range(DRAWS)]
    assert drawn == [again.instantiate(template, seed) for seed in range(DRAWS)]
    assert (
        len({json.dumps(task.payload) for task in drawn})
        == DRAWS
        == len({task.id for task in drawn})
    )
    assert {task.group for task in drawn} == {TEMPLATES[template][0]}


def test_words_make_enough_names_in_both_splits_and_training_knows_every_pair_of_neighbours():
    words = [word for kind in KINDS for part in kind for word in part]
    assert len({*words}) == len(words) > 100
    assert all(word.isalpha() and word.islower() for word in words)
    for kind in KINDS:
        names = {"-".join(parts): parts for parts in product(*kind)}
        assert sum(choose_split(name) == HELD_OUT for name in names) > 300
        known = [parts for name, parts in names.items() if choose_split(name) == TRAIN]
        assert {(a, b) for a, b, _ in known} == {*product(*kind[:2])}
        assert {(b, c) for _, b, c in known} == {*product(*kind[1:])}
        for split in SPLITS:
            rng = random.Random(1)
            drawn = [draw_name(rng, split, kind) for _ in range(200)]
            assert all(NAME.fullmatch(name) and choose_split(name) == split for name in drawn)


def test_rows_have_one_form():
    """Columns and types are the same for all tasks, so a table of them can be stored."""
    for template in TEMPLATES:
        row = instances(template)[0].row
        assert {*row} == {"request", "files", "wanted", "answer"}
        assert isinstance(row["request"], str) and isinstance(row["answer"], str)
        assert all({*file} == {"path", "text"} for file in row["files"] + row["wanted"])
