"""What an open page shows is what lies in the files now, of the run whose name it bears."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.view.made_up_run import MadeUpRun
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import shows, text
from tests.view.runs import add_step, served, write_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]
CURVE = "document.querySelector('.chart .curve').getAttribute('d')"


def test_another_server_on_the_port_is_noticed_and_no_run_mixed_with_another(chromium: Chromium, tmp_path: Path):
    """Both servers call their run number 0. Its curve used to begin with the steps of the other run."""
    page = chromium
    for seed, steps in ((1, 4), (2, 7)):
        run = MadeUpRun(tmp_path / f"seed{seed}", seed=seed)
        for _ in range(steps):
            run.add_step(2)
        run.close()
    with served(tmp_path / "seed1") as url:
        page.open(url + "/")
        shows(page, "overview")
        page.wait("document.querySelector('.card b').innerText === '4'")
    page.wait("!document.getElementById('notice').hidden")
    with served(tmp_path / "seed2", port=urlsplit(url).port or 0):
        page.wait("document.querySelector('.card b')?.innerText === '7'", 60)
        assert text(page, "#title").endswith("seed2")
        page.wait(CURVE)
        found = page.js(CURVE)
        page.open(url + "/?fresh")
        shows(page, "overview")
        assert found == page.js(CURVE)
        page.open("about:blank")
    page.problems.clear()  # the browser complains of the time without a server


def test_rollouts_that_came_while_another_page_was_open_are_there(chromium: Chromium, tmp_path: Path):
    page, run = chromium, MadeUpRun(tmp_path / "run")
    run.add_step(1)
    with served(tmp_path / "run") as url:
        page.open(url + "/#/rollouts")
        shows(page, "rollouts")
        assert "8 of 8 rollouts" in text(page, "#count")
        page.press("1")
        shows(page, "overview")
        run.add_step(1)
        page.wait("document.querySelector('.card b').innerText === '2'")
        page.press("4")
        shows(page, "rollouts")
        page.wait("document.getElementById('count').innerText.startsWith('16 of 16')")
    run.close()


def test_what_was_said_of_unreadable_lines_stays_when_rollouts_arrive(chromium: Chromium, tmp_path: Path):
    page, run = chromium, MadeUpRun(tmp_path / "run")
    run.add_step(1)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    with served(tmp_path / "run") as url:
        page.open(url + "/")
        shows(page, "overview")
        page.wait("document.getElementById('notice').innerText.includes('metrics.jsonl')")
        answers = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/changes')).length"
        before = page.js(answers)
        (index,) = (tmp_path / "run" / "rollouts").glob("play-*.index.jsonl")
        with index.open("a") as file:
            file.write('{"note":"told","time":1.0}\n')
        page.wait(f"{answers} > {before}")
        assert "metrics.jsonl" in text(page, "#notice")
    run.close()


def test_a_metric_of_some_steps_is_drawn_and_a_long_one_keeps_its_lows(chromium: Chromium, tmp_path: Path):
    """A value between gaps has no line; and in a curve that is thinned out a gap is no 0."""
    run, page = write_run(tmp_path / "run", steps=1), chromium
    for step in range(2, 12):
        add_step(run, {"step": step} | ({"policy/entropy": step} if step % 4 == 0 else {}))
    long = write_run(tmp_path / "long", steps=1)
    rows = [
        {"step": step} | ({"policy/kl_ref": 0.5 if step == 1501 else 9.0} if step % 2 else {})
        for step in range(2, 4000)
    ]
    with (long / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    chart = "[...document.querySelectorAll('.chart')].find((one) => one.innerText.startsWith('{}'))"
    with served(run, long, follow=False) as url:
        page.open(url + "/")
        shows(page, "overview")
        assert page.js(chart.format("Entropy") + ".querySelectorAll('.point').length") == 2
        page.open(url + "/?long#/overview?runs=1")
        shows(page, "overview")
        heights = (
            page.js(chart.format("KL") + ".querySelector('.curve').getAttribute('d')").replace("M", "L").split("L")
        )
        lows = {float(part.split(",")[1]) for part in heights if part}
        assert len(lows) == 2, "the one low value is drawn"


def test_evaluations_that_are_greedy_alone_count_as_evaluations(chromium: Chromium, tmp_path: Path):
    run = write_run(tmp_path / "run")
    held = {"overall": {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 10}}
    (run / "evaluations.json").write_text(json.dumps({"2": {"greedy": held}}))
    with served(run, follow=False) as url:
        chromium.open(url + "/")
        shows(chromium, "overview")
        assert "50.0 %\nstep 2; greedy" in text(chromium, ".card:nth-child(4)")


HIDDEN = """
    Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {} }});
    document.dispatchEvent(new Event('visibilitychange'));"""


WAITING = """
    fetch('/api/changes?run=0').then((reply) => reply.json()).then(({ seen }) => {
        window.answer = fetch(`/api/changes?${new URLSearchParams({ run: 0, seen })}`).then((reply) => reply.json());
    })"""


def test_a_page_that_nobody_looks_at_holds_no_connection(chromium: Chromium, tmp_path: Path):
    """A browser has six of them to a server: the seventh page that followed a run waited for the others. A headless
    browser calls every page visible, so the page is told."""
    page, run = chromium, MadeUpRun(tmp_path / "run")
    run.add_step(1)
    with served(tmp_path / "run") as url:
        page.open(url + "/")
        shows(page, "overview")
        page.js(HIDDEN.format("true"))
        for step in (2, 3):  # whoever waits for changes knows of the second step before the third one is told
            page.js(WAITING)
            run.add_step(1)
            assert page.js("window.answer.then((found) => found.states[0].steps)") == step
        assert text(page, ".card b").splitlines()[0] == "1"
        page.js(HIDDEN.format("false"))
        page.wait("document.querySelector('.card b').innerText === '3'")
    run.close()
