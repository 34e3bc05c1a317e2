"""A note and tags of a run: written by a command, read back by it and by the page, and never more than text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realhf.view.__main__ import main
from realhf.view.run_folder import MOST_CHARACTERS, MOST_TAGS, Note, read_note
from tests.view.runs import client, write_run


def test_what_is_written_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command without words, and by the page with the run and in the list of runs."""
    run = write_run(tmp_path / "run")
    assert main(["note", str(run), "lr too high?\nagain with half", "--tag", "baseline", "--tag", "draft"]) == 0
    assert main(["note", str(run), "--untag", "draft"]) == 0
    capsys.readouterr()
    assert main(["note", str(run)]) == 0
    assert capsys.readouterr().out == "[baseline]\nlr too high?\nagain with half\n"
    page = client(run)
    note = page.get("/api/runs/0/about").json()["note"]
    assert note == {"text": "lr too high?\nagain with half", "tags": ["baseline"]}
    assert page.get("/api/runs").json()["runs"][0]["tags"] == ["baseline"]
    assert main(["note", str(run), "", "--untag", "baseline"]) == 0
    assert read_note(run) == Note()


def test_a_note_that_changes_is_a_change_of_the_run(tmp_path: Path) -> None:
    """So that a page that follows the run shows it."""
    page = client(run := write_run(tmp_path / "run"))
    before = page.get("/api/changes?run=0").json()["runs"]["0"]
    assert main(["note", str(run), "text"]) == 0
    after = page.get("/api/changes?run=0").json()["runs"]["0"]
    assert {part for part in after if after[part] != before[part]} == {"about"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x" * (MOST_CHARACTERS + 1)], "characters"),
        (["--tag", "two\nlines"], "--tag"),
        (["--tag", " "], "--tag"),
        ([word for number in range(MOST_TAGS + 1) for word in ("--tag", str(number))], "33 tags"),
    ],
)
def test_what_is_no_note_is_refused_and_nothing_written(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main(["note", str(run), *words]) == 2
    assert said in capsys.readouterr().err and not (run / "note.json").exists()


def test_only_a_run_has_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["note", str(tmp_path), "text"]) == 2
    assert "is not a run" in capsys.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"text": 1, "tags": "ab"}', '{"tags": [1, null, {"a": 1}]}', "[" * 100_000]
)
def test_a_file_that_somebody_spoilt_is_no_note(tmp_path: Path, content: str) -> None:
    (tmp_path / "note.json").write_text(content)
    assert read_note(tmp_path) == Note()


def test_half_a_character_takes_nobody_the_page(tmp_path: Path) -> None:
    """JSON can name one, and so can bytes of a command line that are no UTF-8; neither the run nor the list of all runs
    is lost over it."""
    run = write_run(tmp_path / "run")
    assert main(["note", str(run), "caf\udce9"]) == 0
    page = client(run)
    assert page.get("/api/runs/0/about").json()["note"]["text"] == "caf?"
    (run / "note.json").write_text(json.dumps({"text": "\ud800", "tags": ["\ud800 draft"]}))
    assert page.get("/api/runs").json()["runs"][0]["tags"] == ["? draft"]


def test_a_huge_file_is_cut_and_a_terminal_is_not_driven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    (run / "note.json").write_text(json.dumps({"text": "\x1b]0;owned\x07" + "x" * 10**6, "tags": ["t" * 999] * 999}))
    assert len(read_note(run).text) == MOST_CHARACTERS and read_note(run).tags == ("t" * 64,)
    assert main(["note", str(run)]) == 0
    assert "\x1b" not in capsys.readouterr().out
