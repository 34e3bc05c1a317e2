"""What a reply says, what the policy is told, and an episode of the SQL environment."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.environment import AssistantMessage, Environment, EnvironmentFailure, ToolCall
from realhf.environments.sql import DEFINITION, SqlOptions
from realhf.environments.sql.database import Result
from realhf.environments.sql.environment import (
    NO_STATEMENT,
    is_right,
    read_answer,
    read_statement,
    result_text,
)
from realhf.environments.sql.tasks import TEMPLATES, SqlTaskSet, draw_instance
from tests.environments.sql.attacks import HARMLESS, REFUSED
from tests.environments.sql.playing import play, said, score

QUESTIONS = [
    name for name, (group, _) in TEMPLATES.items() if group in ("lookup", "aggregate", "join")
]


@pytest.mark.parametrize(
    "content, statement",
    [
        ("SELECT 1", "SELECT 1"),
        ("  SELECT 1 ;\n", "SELECT 1"),
        ("SELECT 1;;", "SELECT 1"),
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("I look first.\n```SQL\nSELECT 1\n```\nand then\n```sql\nSELECT 2\n```", "SELECT 1"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("```sqlite\nSELECT 1", "SELECT 1"),
        ("```sql```", ""),
        ("", ""),
        ("SELECT\n1", "SELECT\n1"),
    ],
)
def test_a_statement_may_stand_in_a_fence(content: str, statement: str):
    assert read_statement(content) == statement


@pytest.mark.parametrize(
    "content, answer",
    [
        ("answer: 7", "7"),
        ("Answer : brave-otter \n", "brave-otter"),
        ("It is clear now.\n\nANSWER: oslo", "oslo"),
        ("answer:", ""),
        ("answer: 7\nSELECT 1", None),
        ("the answer: 7", None),
        ("SELECT 'answer: 7'", None),
        ("", None),
        ("\n", None),
    ],
)
def test_an_answer_is_the_last_line(content: str, answer: str | None):
    assert read_answer(content) == answer


@pytest.mark.parametrize(
    "given, expected, right",
    [
        ("7", 7, True),
        ("7.0", 7, True),
        (" '7'. ", 7, True),
        ("+7", 7, True),
        ("07", 7, True),
        ("7 ", 7, True),
        ("8", 7, False),
        ("7.4", 7, False),
        ("", 7, False),
        ("nan", 7, False),
        ("inf", 7, False),
        ("NULL", 7, False),
        ("None", 7, False),
        ("7e0", 7, False),
        ("7" * 5000, 7, False),
        ("7 8", 7, False),
        ("٧", 7, False),
        ("brave-otter", "brave-otter", True),
        ('"Brave-Otter"', "brave-otter", True),
        ("brave", "brave-otter", False),
        ("", "brave-otter", False),
        ("brave-otter brave-lynx", "brave-otter", False),
    ],
)
def test_an_answer_is_compared_by_what_it_means(given: str, expected: int | str, right: bool):
    assert is_right(given, expected) is right


@pytest.mark.parametrize(
    "result, text",
    [
        (Result(), "no rows"),
        (Result(((7,),)), "7"),
        (Result(((1, "a"), (2, None)), more=True), "1|a\n2|NULL\nmore rows"),
        (Result(changed=0), "ok, 0 rows changed"),
        (Result(changed=1), "ok, 1 row changed"),
        (Result(changed=3), "ok, 3 rows changed"),
        (Result(((5,),), changed=1), "5"),
        (Result(error="no such table: x"), "error: no such table: x"),
        (Result(error="no such column: \x1b[2J\u202e"), "error: no such column:  [2J "),
        (Result(((1.5, 2.0, 1 / 3, float("inf"), float("-inf")),)), "1.5|2|0.3333333333|Inf|-Inf"),
        (Result(((b"\x00\xff", "a\nb\x1b"),)), "x'00ff'|a b "),
    ],
)
def test_a_result_is_compact(result: Result, text: str):
    assert result_text(result, 200) == text


@pytest.mark.parametrize("result", [Result((("x" * 500,),)), Result(error="x" * 500)])
def test_a_long_result_is_cut(result: Result):
    text = result_text(result, 50)
    assert len(text) == 50 and text.endswith("...")


QUESTION = SqlTaskSet().instantiate("cell", 11)
CHANGE = SqlTaskSet().instantiate("set_number", 11)


def make(**options: object):
    return DEFINITION.build(SqlOptions(**options)).make("")


async def test_an_episode_opens_with_tables_and_request():
    environment = make()
    assert isinstance(environment, Environment)
    opening = await environment.reset(QUESTION.payload, seed=0)
    (message,) = opening.messages
    instance = draw_instance(QUESTION.payload)
    assert message == {"role": "user", "content": instance.text()} and not opening.tools
    assert instance.tables[0].heading() in instance.text() and instance.request in instance.text()
    assert opening.info["tables"][instance.tables[0].name] == [
        list(row) for row in instance.tables[0].rows
    ]
    await environment.close()


async def test_the_seed_of_a_reset_changes_nothing():
    """What is drawn stands in the payload, so the episodes of a group are of one instance."""
    environment = make()
    first, second = [await environment.reset(QUESTION.payload, seed=seed) for seed in (1, 2)]
    assert first == second
    await environment.close()


async def test_an_answer_that_was_found_but_not_given_is_half_the_score():
    statement, _ = draw_instance(QUESTION.payload).turns()
    turns = await play(QUESTION, [statement, statement, "answer: 0"])
    assert [turn.reward for turn in turns] == [0.5, 0.0, 0.0]
    assert turns[-1].done and turns[-1].metrics == {"success": 0.0, "progress": 0.5}
    assert said(turns[-1]) == "wrong"


async def test_a_guessed_constant_is_no_found_answer():
    """Else listing numbers would pay."""
    answer = draw_instance(QUESTION.payload).answer
    turns = await play(QUESTION, [f"SELECT {answer}", f"VALUES ({answer})"])
    assert score(turns) == 0


@pytest.mark.slow
@pytest.mark.sampled(30)
@pytest.mark.parametrize("template", QUESTIONS)
@pytest.mark.parametrize("seed", range(12))
async def test_a_constant_is_no_found_answer_whatever_the_statement_names(template: str, seed: int):
    """It was worth half the score where it named the columns that the answer depends on."""
    task = SqlTaskSet().instantiate(template, seed)
    instance = draw_instance(task.payload)
    tables = ", ".join(table.name for table in instance.tables)
    named = " AND ".join(f"{table}.{name} IS NOT NULL" for table, name in instance.reads)
    constant = f"'{instance.answer}'" if isinstance(instance.answer, str) else f"{instance.answer}"
    guesses = [
        f"SELECT {constant} FROM {tables} WHERE {named} LIMIT 1",
        f"SELECT CASE WHEN {named} THEN {constant} END FROM {tables} LIMIT 1",
        f"SELECT max({constant}) FROM {tables} WHERE {named}",
    ]
    assert score(await play(task, guesses)) == 0
    assert score(await play(task, [*guesses, *instance.turns()[:1]])) == 0.5
    assert score(await play(task, [*instance.turns()[:1], guesses[0]])) == 0, "the last one counts"


async def test_an_answer_among_others_is_not_found():
    instance = draw_instance(QUESTION.payload)
    table = instance.tables[0]
    turns = await play(
        QUESTION, [f"SELECT * FROM {table.name}", f"SELECT {table.columns[3]} FROM {table.name}"]
    )
    assert score(turns) == 0


async def test_an_answer_to_a_change_is_refused_and_the_episode_goes_on():
    turns = await play(CHANGE, ["answer: 5", *draw_instance(CHANGE.payload).turns()])
    assert said(turns[0]).startswith("error: the task asks for a change")
    assert not turns[0].done and turns[1].metrics["success"] == 1


async def test_deleting_what_should_be_changed_is_no_progress():
    """It used to count as a wrong row less."""
    task = SqlTaskSet().instantiate("raise_numbers", 8)
    (statement,) = draw_instance(task.payload).statements
    table = statement.split()[1]
    condition = statement.partition(" WHERE ")[2]
    turns = await play(task, [f"DELETE FROM {table} WHERE {condition}"])
    assert said(turns[0]).startswith("ok, ") and "0 rows" not in said(turns[0])
    assert score(turns) <= 0


async def test_harm_that_is_repaired_costs_nothing():
    instance = draw_instance(CHANGE.payload)
    table = instance.tables[0].name
    turns = await play(
        CHANGE, [f"UPDATE {table} SET id = id + 500", f"UPDATE {table} SET id = id - 500"]
    )
    assert [turn.reward for turn in turns] == pytest.approx([-0.2, 0.2])
    turns = await play(
        CHANGE,
        [
            f"UPDATE {table} SET id = id + 500",
            f"UPDATE {table} SET id = id - 500",
            *instance.turns(),
        ],
    )
    assert score(turns) == pytest.approx(1.0)


async def test_the_state_is_that_of_the_rows_and_of_a_question_what_was_read():
    """Reads and failures leave it; a change and its repair come back to it, and another episode to
    the same."""
    table = draw_instance(CHANGE.payload).tables[0].name
    there = f"UPDATE {table} SET id = id + 500"
    back = f"UPDATE {table} SET id = id - 500"
    keys = [
        turn.state_key
        for turn in await play(CHANGE, [f"SELECT * FROM {table}", "nonsense", there, back])
    ]
    other = [turn.state_key for turn in await play(CHANGE, [there, "answer: 5"])]
    assert keys[0] == keys[1] == keys[3] != keys[2] and other == [keys[2]] * 2 and "" not in keys
    assert {turn.state_key for turn in await play(QUESTION, ["SELECT 1"])} == {""}


async def test_people_see_which_rows_are_wrong():
    instance = draw_instance(CHANGE.payload)
    table = instance.tables[0]
    wanted = next(row for row in instance.wanted[0] if row not in table.rows)
    found = next(row for row in table.rows if row[0] == wanted[0])
    environment = make()
    await environment.reset(CHANGE.payload, seed=0)
    turn = await environment.step(AssistantMessage("SELECT 1"))
    lines = ["|".join(map(str, (table.name, *row))) for row in (wanted, found)]
    rows = [[each.name, "|".join(map(str, row))] for each in instance.tables for row in each.rows]
    view = {"title": "The rows", "columns": ["table", "row"], "rows": rows}
    assert turn.info == {"missing": lines[:1], "surplus": lines[1:], "view": view}
    flooded = await environment.step(
        AssistantMessage(f"UPDATE {table.name} SET name = x'00' || name || '{'x' * 500}'")
    )
    assert len(json.dumps(flooded.info)) < 3000
    await environment.close()


async def test_an_episode_ends_after_so_many_turns():
    turns = await play(QUESTION, ["SELECT 1"] * 9, max_statements=3)
    assert [turn.done for turn in turns] == [False, False, True]
    assert turns[-1].metrics["success"] == 0


async def test_observations_are_cut():
    wide = "SELECT " + " || ".join([f"'{'x' * 100}'"] * 4)
    (turn,) = await play(QUESTION, [wide], max_statements=1, observation_chars=60)
    assert len(said(turn)) == 60 and said(turn).endswith("...")


async def test_a_message_without_a_statement_is_answered():
    environment = make()
    await environment.reset(QUESTION.payload, seed=0)
    call = ToolCall("sql", {"query": "SELECT 1"})
    none: str = None  # type: ignore[assignment]
    for message in (
        AssistantMessage(""),
        AssistantMessage(" ;\n"),
        AssistantMessage("", (call,)),
        AssistantMessage(none),
    ):
        turn = await environment.step(message)
        assert said(turn) == NO_STATEMENT and turn.reward == 0 and not turn.done
    await environment.close()


async def test_a_step_without_an_episode_is_a_failure():
    environment = make()
    for _ in range(2):
        with pytest.raises(EnvironmentFailure, match="no episode") as failure:
            await environment.step(AssistantMessage("SELECT 1"))
        assert failure.value.kind == "internal"
        await environment.reset(QUESTION.payload, seed=0)
        await environment.close()
        await environment.close()


async def test_a_task_of_another_environment_is_a_failure():
    environment = make()
    with pytest.raises(EnvironmentFailure, match="no template"):
        await environment.reset({"task_id": 5}, seed=0)
    await environment.close()


async def test_an_instance_plays_episode_after_episode():
    environment = make()
    for task in (QUESTION, CHANGE, QUESTION, CHANGE):
        await environment.reset(task.payload, seed=0)
        for text in draw_instance(task.payload).turns():
            turn = await environment.step(AssistantMessage(text))
        assert turn.metrics["success"] == 1
        with pytest.raises(EnvironmentFailure):
            await environment.step(AssistantMessage("SELECT 1"))
        await environment.reset(task.payload, seed=0)
    await environment.close()


TEXTS = st.one_of(
    st.sampled_from([*REFUSED.values(), *HARMLESS.values()]),
    st.sampled_from(
        [
            turn
            for name in TEMPLATES
            for turn in draw_instance(SqlTaskSet().instantiate(name, 5).payload).turns()
        ]
    ),
    st.sampled_from(
        [
            "DELETE FROM {T}",
            "UPDATE {T} SET id = -id",
            "INSERT INTO {T} SELECT id + 100, name, 'x', 1 FROM {T}",
        ]
    ),
    st.text(max_size=40),
    st.text(alphabet="answer: 0123456789.'-\n", max_size=20),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), st.integers(0, 50), st.lists(TEXTS, max_size=8))
def test_the_same_messages_give_the_same_turns(template: str, seed: int, texts: list[str]):
    """And whatever is said, the rewards add up to a score between the worst harm and 1 and the text
    is short."""
    task = SqlTaskSet().instantiate(template, seed)
    names = [table.name for table in draw_instance(task.payload).tables]
    said_now = [text.replace("{T}", names[0]).replace("{U}", names[-1]) for text in texts]
    first, second = (asyncio.run(play(task, said_now, statement_ms=1000.0)) for _ in range(2))
    assert first == second
    for turn in first:
        assert len(said(turn)) <= 200
        assert turn.reward is not None and 0 <= turn.metrics["progress"] <= 1
        json.dumps([turn.messages, turn.info, turn.metrics])
    assert -0.2 - 1e-9 <= score(first) <= 1 + 1e-9
    assert not first or first[-1].metrics["success"] == (abs(score(first) - 1) < 1e-9)


@pytest.mark.nightly
@pytest.mark.slow
async def test_hundreds_at_once_leave_nothing_behind():
    """Neither descriptors nor memory, also when nobody closes an episode before the next one."""

    async def hold(number: int) -> None:
        environment = make()
        for template in ("archive", "cell"):
            await environment.reset(SqlTaskSet().instantiate(template, number).payload, seed=0)
            await environment.step(AssistantMessage("SELECT 1"))
            await asyncio.sleep(0)
        held.append(environment)

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    held: list = []
    before = files()
    sizes = []
    for _ in range(3):
        await asyncio.gather(*(hold(number) for number in range(200)))
        deadline = time.monotonic() + 60
        while files() > before and time.monotonic() < deadline:
            # what runs beside the tests in this process opens and closes files, too
            await asyncio.sleep(0.05)
        assert files() <= before and len(held) == 200
        await asyncio.gather(*(environment.close() for environment in held))
        held.clear()
        gc.collect()
        sizes.append(resident_mib())
    assert sizes[-1] - sizes[0] < 8
