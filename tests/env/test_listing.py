"""The list of environments: sizes of groups, tools or text, a solver or none, one sentence; one
that fails is a row."""

from __future__ import annotations

import json

import pytest

from realhf.env.__main__ import main
from realhf.env.listing import describe_environment
from realhf.registry import environments


def test_every_registered_environment_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(environments) >= {"countdown", "sql"}
    assert not [row["error"] for row in rows.values() if row["error"]]
    assert rows["countdown"]["interface"] == "text" and rows["countdown"]["solver"] is True
    assert (
        rows["countdown"]["groups"]["train"].keys() == rows["countdown"]["groups"]["heldout"].keys()
    )
    needed = {name: rows[name]["interface"] for name in ("openenv", "verifiers", "gymnasium")}
    assert needed == {
        "openenv": "needs env.url",
        "verifiers": "needs env.name",
        "gymnasium": "needs env.id",
    }
    assert all(row["about"].endswith(".") for row in rows.values())


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in environments)


def test_an_environment_that_cannot_be_loaded_is_a_row_with_the_reason() -> None:
    assert describe_environment("no_such")["error"].startswith(
        "ValueError: unknown environment 'no_such'"
    )
