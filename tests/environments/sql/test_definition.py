"""The SQL environment as it is registered, and its scripted solver."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from realhf.api.environment import (
    HABIT,
    RECOVERY,
    SOLUTION,
    SPLITS,
    AssistantMessage,
    Demonstration,
    DemonstrationRequest,
    EnvironmentDefinition,
)
from realhf.api.option import problems
from realhf.environments.sql import DEFINITION, SqlOptions
from realhf.environments.sql.tasks import TEMPLATES, draw_instance
from realhf.registry import environments
from tests.environments.sql.playing import play, said, score


def test_it_is_registered():
    definition = environments.get("sql")
    assert definition is DEFINITION and isinstance(definition, EnvironmentDefinition)
    spec = definition.build(definition.options())
    assert spec.name == "sql" and spec.launch is None and spec.deterministic
    assert "answer: VALUE" in spec.system_prompt
    assert [spec.tasks(split).split for split in SPLITS] == [*SPLITS]


@pytest.mark.parametrize(
    "changed",
    [
        {"groups": []},
        {"groups": ["lookups"]},
        {"max_rows": 0},
        {"statement_ms": 0},
        {"statement_steps": 10},
    ],
)
def test_impossible_options_are_problems(changed: dict):
    assert len([*problems(SqlOptions(**changed), "env")]) == 1


def test_the_defaults_are_possible():
    assert [*problems(SqlOptions(), "env")] == []


async def test_rows_and_steps_are_options():
    task = DEFINITION.build(SqlOptions()).tasks("train").instantiate("cell", 1)
    table = (await opening(task)).split()[1].partition("(")[0]
    rows = f"SELECT id FROM {table} WHERE id > 0"
    (turn,) = await play(task, [rows], max_rows=2, max_statements=1)
    assert said(turn).count("\n") == 2 and said(turn).endswith("more rows")
    product = f"SELECT count(*) FROM {table}, {table} b, {table} c, {table} d"
    for steps, cut in ((1000, True), (100_000, False)):
        (turn,) = await play(task, [product], statement_steps=steps, max_statements=1)
        assert (said(turn) == "error: the statement takes too long") is cut


async def test_the_size_of_the_database_is_an_option():
    task = DEFINITION.build(SqlOptions()).tasks("train").instantiate("delete", 1)
    table = (await opening(task)).split()[1].partition("(")[0]
    fill = (
        f"INSERT INTO {table} SELECT id + 1000 * {{}}, '{'x' * 500}', 'x', 1 FROM {table} WHERE id "
        f"< 1000"
    )
    full = []
    for size in (16, 4096):
        turns = await play(task, [fill.format(step) for step in range(1, 8)], database_kb=size)
        full.append(any("full" in said(turn) for turn in turns))
    assert full == [True, False]


async def opening(task) -> str:
    environment = DEFINITION.build(SqlOptions()).make("")
    found = await environment.reset(task.payload, seed=0)
    await environment.step(AssistantMessage("SELECT 1"))
    await environment.close()
    return found.messages[0]["content"]


REQUEST = DemonstrationRequest(
    episodes_per_task=20, seed=3, habit_fraction=0.35, recovery_fraction=0.15
)


def demonstrations(
    request: DemonstrationRequest = REQUEST, **options: object
) -> list[Demonstration]:
    demonstrate = DEFINITION.build(SqlOptions(**options)).demonstrate
    assert demonstrate is not None
    return list(demonstrate(request))


@pytest.mark.slow
async def test_every_demonstration_ends_as_it_says():
    found = demonstrations()
    for item in found:
        turns = await play(item.task, item.turns)
        assert turns[-1].metrics["success"] == float(item.succeeds), (item, turns)
        assert score(turns) == pytest.approx(1.0 if item.succeeds else 0.0)
        assert len(turns) == len(item.turns) <= 4
    assert {item.kind for item in found} == {SOLUTION, RECOVERY, HABIT}


@pytest.mark.slow
async def test_a_mistake_is_answered_by_an_error():
    """So a policy can see that it made one."""
    for item in demonstrations():
        if item.kind != SOLUTION:
            turns = await play(item.task, item.turns[:1])
            assert said(turns[0]).startswith(
                ("error: no such ", "error: cannot join using column ")
            ), (item, turns)


def test_every_template_has_its_shares():
    counts = Counter((item.task.payload["template"], item.kind) for item in demonstrations())
    shares = {HABIT: 7, RECOVERY: 3, SOLUTION: 10}
    assert counts == {(name, kind): share for name in TEMPLATES for kind, share in shares.items()}


def test_most_mistakes_name_tables_in_the_singular():
    found = [item for item in demonstrations() if item.kind != SOLUTION]
    tables = [draw_instance(item.task.payload).tables[0].name for item in found]
    singular = sum(
        re.search(rf"\b{name}\b", item.turns[0]) is None
        for name, item in zip(tables, found, strict=True)
    )
    assert 0.5 < singular / len(found) < 0.75


def test_the_mistake_of_a_recovery_is_not_to_be_learned():
    for item in demonstrations():
        if item.kind == RECOVERY:
            assert item.learned == (False, *[True] * (len(item.turns) - 1))
        else:
            assert item.learned == ()


def test_a_habit_is_repeated():
    for item in demonstrations():
        if item.kind == HABIT:
            assert len(item.turns) == 3 and item.turns[1] == item.turns[2]
            assert not item.succeeds


@pytest.mark.slow
def test_the_seed_decides():
    assert demonstrations() == demonstrations()
    assert demonstrations() != demonstrations(DemonstrationRequest(20, 4, 0.35, 0.15))


def test_demonstrations_are_of_training_tasks_of_the_chosen_groups():
    found = demonstrations(groups=["join"])
    assert {item.task.group for item in found} == {"join"}
    assert {item.task.payload["split"] for item in found} == {"train"}


def test_without_shares_all_are_solutions():
    assert {item.kind for item in demonstrations(DemonstrationRequest(2, 0))} == {SOLUTION}
    assert demonstrations(DemonstrationRequest(0, 0)) == []


@pytest.mark.parametrize(
    "shares", [(-0.1, 0.0), (0.6, 0.6), (float("nan"), 0.0), (0.0, float("inf"))]
)
def test_impossible_shares_are_refused(shares: tuple[float, float]):
    with pytest.raises(ValueError, match="shares of one"):
        demonstrations(DemonstrationRequest(5, 0, *shares))
