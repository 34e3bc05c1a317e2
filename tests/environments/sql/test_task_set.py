"""Every template is solvable, pays for progress alone, and draws other words for the held-out
split."""

from __future__ import annotations

import json
import sqlite3

import pytest

from realhf.api.environment import HELD_OUT, SPLITS, TRAIN, TaskSet
from realhf.environments.sql import instance as names
from realhf.environments.sql.tasks import GROUPS, TEMPLATES, SqlTaskSet, draw_instance
from tests.environments.sql.playing import play, score

SEEDS = range(12)
QUESTIONS = [
    name for name, (group, _) in TEMPLATES.items() if group in ("lookup", "aggregate", "join")
]
CHANGES = [name for name in TEMPLATES if name not in QUESTIONS]


def test_there_are_templates_in_groups_of_rising_difficulty():
    tasks = SqlTaskSet()
    assert isinstance(tasks, TaskSet)
    assert tasks.groups == GROUPS and set(tasks.group_of.values()) == set(GROUPS)
    assert len(tasks.group_of) == 18 and len(QUESTIONS) == 10


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("split", SPLITS)
async def test_the_scripted_solution_solves_the_task_and_earns_one(template: str, split: str):
    for seed in SEEDS:
        task = SqlTaskSet(split).instantiate(template, seed)
        turns = await play(task, draw_instance(task.payload).turns())
        assert score(turns) == pytest.approx(1.0)
        assert turns[-1].done and turns[-1].metrics == {"success": 1.0, "progress": 1.0}
        assert not any(turn.done or turn.metrics["success"] for turn in turns[:-1])
        assert len(turns) <= 3


@pytest.mark.parametrize("template", TEMPLATES)
async def test_every_step_of_a_solution_but_a_look_pays(template: str):
    task = SqlTaskSet().instantiate(template, 3)
    instance = draw_instance(task.payload)
    turns = await play(task, instance.turns())
    paid = [turn.reward for turn in turns]
    if instance.answer is not None:
        assert paid == [0.5, 0.5]
    elif template == "copy_number":
        assert paid == [0.0, 1.0]
    else:
        assert all(reward > 0 for reward in paid)


@pytest.mark.parametrize("template", TEMPLATES)
async def test_doing_nothing_earns_nothing(template: str):
    task = SqlTaskSet().instantiate(template, 1)
    table = draw_instance(task.payload).tables[0].name
    idle = [
        "",
        "hello",
        "SELECT 1",
        f"SELECT * FROM {table}",
        "DROP TABLE x",
        f"UPDATE {table} SET id = id",
    ]
    turns = await play(task, idle)
    assert [turn.reward for turn in turns] == [0.0] * len(idle)
    assert not turns[-1].done and turns[-1].metrics == {"success": 0.0, "progress": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "harm", ["DELETE FROM {T}", "UPDATE {T} SET name = 'x'", "UPDATE {T} SET id = id + 500"]
)
async def test_harm_earns_at_most_nothing(template: str, harm: str):
    for seed in SEEDS:
        task = SqlTaskSet().instantiate(template, seed)
        table = draw_instance(task.payload).tables[0].name
        turns = await play(task, [harm.format(T=table)])
        assert score(turns) <= 0
        assert turns[-1].metrics == {"success": 0.0, "progress": 0.0}


@pytest.mark.parametrize("template", CHANGES)
async def test_a_change_with_collateral_damage_is_no_success(template: str):
    """The whole database is compared, not the row that was asked for."""
    task = SqlTaskSet().instantiate(template, 2)
    instance = draw_instance(task.payload)
    kept = next(row for row in instance.tables[0].rows if row in instance.wanted[0])
    damage = f"DELETE FROM {instance.tables[0].name} WHERE id = {kept[0]}"
    turns = await play(task, [damage, *instance.turns()])
    assert not turns[-1].done and turns[-1].metrics["success"] == 0
    assert score(turns) < 1


@pytest.mark.parametrize("template", QUESTIONS)
async def test_a_wrong_answer_ends_a_question_without_success(template: str):
    task = SqlTaskSet().instantiate(template, 4)
    turns = await play(task, ["answer: 1234567", "answer: 1"])
    assert len(turns) == 1 and turns[0].done and score(turns) == 0


@pytest.mark.parametrize("template", CHANGES)
async def test_the_row_of_a_shortened_name_is_not_the_right_one(template: str):
    """Another row's name differs in the last word alone, so a pattern in place of the name does
    damage."""
    task = SqlTaskSet().instantiate(template, 5)
    rows = draw_instance(task.payload).tables[0].rows
    shortened = [str(row[1]).rpartition("-")[0] for row in rows]
    assert len(set(shortened)) < len(shortened)


@pytest.mark.slow
def test_the_splits_share_no_instance():
    """No main table of one split has a name, a column of numbers and rows that the other can
    draw."""
    tables: dict[str, set[tuple[str, str]]] = {}
    for split in SPLITS:
        tasks = SqlTaskSet(split)
        drawn = [
            draw_instance(tasks.instantiate(name, seed).payload)
            for name in TEMPLATES
            for seed in range(40)
        ]
        tables[split] = {
            (instance.tables[0].name, instance.tables[0].columns[3]) for instance in drawn
        }
        assert all(names.is_heldout_pair(*pair) is (split == HELD_OUT) for pair in tables[split])
        row_names = {str(row[1]) for instance in drawn for row in instance.tables[0].rows}
        assert all(
            names.is_heldout_pair(*name.split("-")) is (split == HELD_OUT) for name in row_names
        )
        assert len(tables[split]) > 30
    assert not tables[TRAIN] & tables[HELD_OUT]


@pytest.mark.parametrize(
    "first, second", [(names.TABLES, names.NUMBER_COLUMNS), (names.ROW_ADJECTIVES, names.ANIMALS)]
)
def test_every_word_can_be_drawn_in_training_and_every_split_has_names(first: tuple, second: tuple):
    """Else drawing would not end, and a policy would meet words of held-out names for the first
    time."""
    assert len(set(first)) == len(first) and len(set(second)) == len(second)
    held = {(one, two) for one in first for two in second if names.is_heldout_pair(one, two)}
    free = {(one, two) for one in first for two in second} - held
    assert {one for one, _ in free} == set(first) and {two for _, two in free} == set(second)
    assert 0.1 < len(held) / len(free) < 0.4


def test_every_word_that_is_drawn_once_has_a_second_partner_in_its_split():
    """Else drawing a second table with the same column, or a second row with the same first word,
    would not end."""
    for held_out in (False, True):
        for first, second in (
            (names.NUMBER_COLUMNS, names.TABLES),
            (names.ROW_ADJECTIVES, names.ANIMALS),
        ):
            for word in first:
                pairs = (
                    (word, other) if first is names.ROW_ADJECTIVES else (other, word)
                    for other in second
                )
                partners = sum(names.is_heldout_pair(*pair) is held_out for pair in pairs)
                assert partners >= 2 or (held_out and not partners), word


def test_no_word_means_something_to_sqlite():
    """Else a table in the singular would be a syntax error, and a column could not be named without
    quotes."""
    connection = sqlite3.connect(":memory:")
    columns = (*names.TEXT_COLUMNS, *names.NUMBER_COLUMNS, *names.LINKED_COLUMNS)
    for word in (
        *names.TABLES,
        *(table[:-1] for table in names.TABLES),
        *names.ROW_ADJECTIVES,
        *columns,
    ):
        with pytest.raises(sqlite3.OperationalError, match=f"no such table: {word}"):
            connection.execute(f"SELECT 1 FROM {word}")
        with pytest.raises(sqlite3.OperationalError, match=f"no such column: {word}"):
            connection.execute(f"SELECT {word}")
    connection.close()


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_instance_is_decided_by_template_split_and_seed_and_is_json(template: str):
    task = SqlTaskSet().instantiate(template, 7)
    assert task == SqlTaskSet().instantiate(template, 7)
    assert draw_instance(json.loads(json.dumps(task.payload))) == draw_instance(task.payload)
    drawn = {
        draw_instance(SqlTaskSet(split).instantiate(template, seed).payload)
        for split in SPLITS
        for seed in SEEDS
    }
    assert len(drawn) == 2 * len(SEEDS)


def test_ids_are_unique_and_stable():
    tasks = [
        SqlTaskSet(split).instantiate(name, seed)
        for split in SPLITS
        for name in TEMPLATES
        for seed in SEEDS
    ]
    assert len({task.id for task in tasks}) == len(tasks)
    assert tasks[0].id == "cell:train:0" and tasks[0].group == "lookup"


@pytest.mark.parametrize("template", TEMPLATES)
def test_requests_and_statements_are_short(template: str):
    """A small policy reads and writes them."""
    for seed in SEEDS:
        instance = draw_instance(SqlTaskSet().instantiate(template, seed).payload)
        assert len(instance.text()) <= 240
        assert max(len(turn) for turn in instance.turns()) <= 120


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"template": "nothing", "split": TRAIN, "seed": 1},
        {"template": ["cell"], "split": TRAIN, "seed": 1},
        {"template": "cell", "split": "test", "seed": 1},
        {"template": "cell", "split": None, "seed": 1},
        {"template": "cell", "split": TRAIN, "seed": None},
        {"template": "cell", "split": TRAIN, "seed": float("nan")},
        {"template": "cell", "split": TRAIN, "seed": True},
    ],
)
def test_a_payload_that_is_none_of_ours_is_refused(payload: dict):
    with pytest.raises(ValueError, match=r"template|split"):
        draw_instance(payload)
