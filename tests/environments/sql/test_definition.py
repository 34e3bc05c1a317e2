"""The environment is registered, and each of its options has an effect."""

from __future__ import annotations

import pytest

from realhf.api.environment import SPLITS, AssistantMessage, EnvironmentDefinition
from realhf.api.option import problems
from realhf.environments.sql import DEFINITION, SqlOptions
from realhf.registry import environments
from tests.environments.sql.playing import play, said


def test_it_is_registered():
    definition = environments.get("sql")
    assert definition is DEFINITION and isinstance(definition, EnvironmentDefinition)
    spec = definition.build(definition.options())
    assert spec.name == "sql" and spec.launch is None and spec.deterministic
    assert "answer: VALUE" in spec.system_prompt
    assert [spec.tasks(split).split for split in SPLITS] == [*SPLITS]


@pytest.mark.parametrize(
    "changed", [{"groups": []}, {"groups": ["lookups"]}, {"max_rows": 0}, {"statement_ms": 0}, {"statement_steps": 10}]
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
    fill = f"INSERT INTO {table} SELECT id + 1000 * {{}}, '{'x' * 500}', 'x', 1 FROM {table} WHERE id < 1000"
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
