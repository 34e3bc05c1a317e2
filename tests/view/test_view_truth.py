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
    played = {"time/actor_gen": 3.0, "time/part/actor_gen/environment": 1.0, "time/part/actor_gen/generation": 2.0}
    for step in range(2, 12):
        add_step(
            run, {"step": step, "time/actor_train": 1.0} | played | ({"policy/entropy": step} if step % 4 == 0 else {})
        )
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
        times = page.js(chart.format("Where the time goes") + ".innerText")
        assert all(name in times for name in ("environment", "generation", "actor_train")), times
        assert "actor_gen" not in times, "a call that plays is shown by its parts, as in the terminal"
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


TOLD = """
    (async () => {{
        for (let seen = null; ; ) {{
            const asked = new URLSearchParams({{ run: 0, ...(seen && {{ seen }}) }});
            const found = await (await fetch(`/api/changes?${{asked}}`)).json();
            if (found.states[0].steps >= {}) return found.states[0].steps;
            seen = found.seen;
        }}
    }})()"""


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
            run.add_step(1)
            assert page.js(TOLD.format(step)) == step
        assert text(page, ".card b").splitlines()[0] == "1"
        page.js(HIDDEN.format("false"))
        page.wait("document.querySelector('.card b').innerText === '3'")
    run.close()


def test_a_task_is_a_template_and_its_instances_come_with_a_click(chromium: Chromium, tmp_path: Path):
    """Each drawn instance used to count as a task of its own: a run of 50 templates showed hundreds of tasks that were
    never solved, and no curve."""
    page, run = chromium, MadeUpRun(tmp_path / "run", failing=0.0)
    for _ in range(10):
        run.add_step(8, of=10)
    run.close()
    (index,) = (tmp_path / "run" / "rollouts").glob("play-*.index.jsonl")
    head, *rest = index.read_text().splitlines()
    lines = [json.loads(line) for line in rest]
    conversations = [line for line in lines if line["id"].endswith("/1")]
    for line in conversations:
        line["branch"] = 0
    index.write_text("\n".join([head, *map(json.dumps, lines), ""]))
    instances: dict[str, set[str]] = {}
    for line in lines:
        instances.setdefault(line["template"], set()).add(line["task"])
    name = max(instances, key=lambda one: len(instances[one]))
    assert len(instances[name]) > 1
    with served(tmp_path / "run", follow=False) as url:
        page.open(url + "/#/tasks")
        shows(page, "tasks")
        assert text(page, ".readout").startswith(f"{len(instances)} tasks: ")
        assert page.js("document.querySelectorAll('#tasks tbody tr').length") == len(instances)
        played = page.js("[...document.querySelectorAll('#tasks tbody tr')].map((row) => +row.cells[7].innerText)")
        assert sum(played) == len(lines) - len(conversations), "a further conversation is no further rollout"
        opener = f"document.querySelector('[data-place=\"open {name}\"]')"
        page.js(f"{opener}.focus()")
        page.press("Enter")
        assert set(text(page, "#tasks .instance a").splitlines()) == instances[name]
        assert page.js("document.activeElement.dataset.place") == f"open {name}", "the focus stays where it is"
        page.js(f"document.querySelector('[data-place=\"template {name}\"]').click()")
        shows(page, "rollouts")
        own = [line["template"] for line in lines if "branch" not in line]
        assert text(page, "#count").startswith(f"{own.count(name)} of {len(own)} rollouts\ntemplate {name}")


def test_curves_are_drawn_over_hours_or_tokens_on_a_logarithmic_axis_and_in_part(chromium: Chromium, tmp_path: Path):
    run, page = write_run(tmp_path / "run", steps=1), chromium
    for step in range(2, 12):
        add_step(run, {"step": step, "time/step": 1800, "batch/tokens": 500, "policy/kl_ref": 10.0 ** -(step % 4)})
    chart = "[...document.querySelectorAll('.chart')].find((one) => one.innerText.startsWith('KL'))"
    ticks = f"[...{chart}.querySelectorAll('.tick.left')].map((one) => one.textContent)"
    steps = f"[...{chart}.querySelectorAll('.tick:not(.left)')].map((one) => Number(one.textContent.replace(',', '')))"
    with served(run, follow=False) as url:
        page.open(url + "/")
        shows(page, "overview")
        assert max(page.js(steps)) >= 10
        page.press("x")
        assert 4 < max(page.js(steps)) <= 5.1, "ten steps of half an hour"
        page.press("l")
        assert page.js(ticks) == ["0.001", "0.01", "0.1", "1"]
        assert "x=hours" in page.js("location.hash") and "log=1" in page.js("location.hash")
        page.call("Page.reload")
        page.wait("document.documentElement?.dataset.page === 'overview'")
        assert page.js("document.getElementById('along').value") == "hours"
        page.press("x")
        assert max(page.js(steps)) == 5000
        page.press("x")
        page.js(f"{chart}.scrollIntoView()")
        left, top, wide = page.js(
            f"(({{x, y, width}}) => [x, y, width])({chart}.querySelector('svg').getBoundingClientRect())"
        )
        for kind, x in (("mousePressed", 0.5), ("mouseMoved", 0.7), ("mouseReleased", 0.9)):
            place = {"x": left + x * wide, "y": top + 60, "button": "left", "clickCount": 1}
            page.call("Input.dispatchMouseEvent", type=kind, **place)
        assert min(page.js(steps)) >= 5, "the part that was dragged over"
        page.press("z")
        assert min(page.js(steps)) <= 2
        page.open("about:blank")
        assert page.problems == []
