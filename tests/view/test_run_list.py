"""Which runs of a folder are listed when there are more than the page can follow, and where it says
so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realhf.view import run as run_list
from realhf.view.__main__ import main
from realhf.view.run import MAX_RUNS, RunList
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import go, leave, shows, text
from tests.view.runs import client, served


def many(folder: Path, count: int) -> list[Path]:
    """So many runs, of which the last ones by name were written to first."""
    made = [folder / f"run-{number:04d}" for number in range(count)]
    for age, run in enumerate(made):
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
        os.utime(run / "metrics.jsonl", (1e9 - age, 1e9 - age))
    return made


def test_more_runs_than_are_listed_are_counted_and_the_newest_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They used to be cut in silence, in the order of their names."""
    monkeypatch.setattr(run_list, "MAX_RUNS", 3)
    made = many(tmp_path / "runs", 5)
    os.utime(made[4] / "metrics.jsonl", (2e9, 2e9))
    found = client(tmp_path / "runs").get("/api/runs").json()
    assert [run["name"] for run in found["runs"]] == ["run-0000", "run-0001", "run-0004"], (
        "in the order of names"
    )
    assert (found["left_off"], found["one_left_off"]) == (2, str(made[2]))
    runs = RunList([tmp_path / "runs"])
    first = runs.refresh()
    os.utime(made[3] / "metrics.jsonl", (3e9, 3e9))
    assert runs.refresh() == first, "a run keeps its number"
    assert runs.left_off() == [made[2], made[3]]
    assert client(*made[:3]).get("/api/runs").json()["left_off"] == 0


def test_a_run_that_is_named_twice_is_left_off_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_list, "MAX_RUNS", 1)
    made = many(tmp_path / "runs", 2)
    runs = RunList([tmp_path / "runs", made[1], tmp_path])
    assert [run.name for run in runs.refresh()] == ["run-0000"]
    assert runs.left_off() == [made[1]]


def test_a_folder_without_a_run_is_not_counted_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It used to be served as "1 run"."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, said in (("empty", "no run in "), ("file", "is a file"), ("absent", "there is no ")):
        assert main([str(tmp_path / name), "--port", "0"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and said in told and name in told


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=ABSENT)
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_says_how_many_runs_are_not_listed_and_how_to_narrow(
    chromium: Chromium, tmp_path: Path, width: int
):
    made = many(tmp_path / "runs", MAX_RUNS + 12)
    chromium.look(width, 800)
    with served(tmp_path / "runs", follow=False) as url:
        go(chromium, url)
        assert text(chromium, "#choose").startswith(f"{MAX_RUNS} of {MAX_RUNS + 12} runs")
        chromium.press("c")
        chromium.wait("document.querySelector('dialog[open]')")
        said = text(chromium, "#left-off")
        assert (
            "12 more are not" in said
            and str(made[MAX_RUNS]) in said
            and "python -m realhf.view" in said
        )
        assert chromium.js("document.querySelectorAll('#runs-list input').length") == MAX_RUNS
        assert chromium.js("document.documentElement.scrollWidth") <= width
        chromium.press("Escape")
    with served(*made[:2], follow=False) as url:
        chromium.open(url + "/?few")
        shows(chromium, "overview")
        assert text(chromium, "#choose-label") == "Runs"
        assert chromium.js("document.getElementById('left-off').hidden")
        chromium.look(1280, 800)
        leave(chromium)


@pytest.mark.slow
def test_a_folder_of_runs_opens_with_the_one_that_was_written_to_last(tmp_path: Path):
    """It used to open with the first by name. Who names runs sees the first that was named."""
    made = many(tmp_path / "runs", 4)
    assert client(tmp_path / "runs").get("/api/runs").json()["first"] == 0
    os.utime(made[2] / "metrics.jsonl", (2e9, 2e9))
    assert client(tmp_path / "runs").get("/api/runs").json()["first"] == 2
    assert client(made[1], made[2]).get("/api/runs").json()["first"] == 0
    assert RunList([tmp_path / "none"]).first() == 0


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=ABSENT)
def test_the_page_opens_the_newest_run(chromium: Chromium, tmp_path: Path):
    made = many(tmp_path / "runs", 3)
    os.utime(made[1] / "metrics.jsonl", (2e9, 2e9))
    with served(tmp_path / "runs", follow=False) as url:
        go(chromium, url)
        assert text(chromium, "#title") == "run-0001"
        leave(chromium)
