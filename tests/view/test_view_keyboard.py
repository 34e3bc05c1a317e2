"""Who has a keyboard alone, or hears the page, loses neither the place nor the name of anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.view.made_up_run import MadeUpRun
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import PAGES, shows
from tests.view.runs import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]
NAMELESS = """
    [...document.querySelectorAll('a, button, input, select, textarea, summary, [tabindex="0"]')]
        .filter((one) => one.offsetParent && !one.labels?.length && !one.ariaLabel && !one.textContent.trim())
        .map((one) => one.outerHTML)"""


def made(folder: Path, *, seed: int = 1, steps: int = 2) -> MadeUpRun:
    run = MadeUpRun(folder, seed=seed)
    for _ in range(steps):
        run.add_step(2, of=4)
    return run


def focus(page: Chromium) -> str:
    """What a person hears of the element that has the focus."""
    return page.js("document.activeElement.ariaLabel ?? document.activeElement.innerText")


def test_the_skip_link_leads_into_the_page_that_is_shown(chromium: Chromium, tmp_path: Path):
    """It used to lead to the overview of the first run."""
    for seed in (1, 2):
        made(tmp_path / f"run{seed}", seed=seed).close()
    with served(tmp_path, follow=False) as url:
        chromium.open(url + "/#/tasks?runs=1")
        shows(chromium, "tasks")
        chromium.press("Tab")
        assert focus(chromium) == "Skip to the page"
        chromium.press("Enter")
        assert chromium.js("document.activeElement.id") == "page"
        assert chromium.js("location.hash") == "#/tasks?runs=1"
        chromium.press("Tab")
        assert chromium.js("document.activeElement.id") == "task-search", "the next one is in the page"


def test_a_change_of_the_run_leaves_the_focus_where_it_is(chromium: Chromium, tmp_path: Path):
    page, run = chromium, made(tmp_path / "run")
    with served(tmp_path / "run") as url:
        page.open(url + "/")
        shows(page, "overview")
        while not focus(page).startswith("Timeline"):
            page.press("Tab")
        run.add_step(2)
        page.wait("document.querySelector('.card b').innerText === '3'")
        assert focus(page).startswith("Timeline")
        page.press("Enter")
        shows(page, "timeline")
        page.press("1")
        shows(page, "overview")
        page.press("/")
        page.wait("document.activeElement.id === 'metric-search' && document.querySelector('.all .chart')")
        page.press("Tab")
        chart = focus(page)
        assert "arrows move the cursor" in chart
        run.add_step(2)
        page.wait("document.querySelector('.card b').innerText === '4'")
        assert focus(page) == chart
        assert page.js("document.activeElement.querySelector('.readout').ariaLive") == "polite"
    run.close()


def test_after_a_change_of_the_page_tab_goes_on_in_it(chromium: Chromium, tmp_path: Path):
    made(tmp_path / "run").close()
    with served(tmp_path / "run", follow=False) as url:
        chromium.open(url + "/#/rollouts")
        shows(chromium, "rollouts")
        chromium.press("7")
        shows(chromium, "tasks")
        chromium.press("Tab")
        assert chromium.js("document.activeElement.id") == "task-search"


def test_the_list_of_runs_can_be_left_without_a_change(chromium: Chromium, tmp_path: Path):
    for seed in (1, 2):
        made(tmp_path / f"run{seed}", seed=seed).close()
    page = chromium
    with served(tmp_path, follow=False) as url:
        page.open(url + "/#/rollouts")
        shows(page, "rollouts")
        page.press("Enter")
        shows(page, "rollout")
        before = page.js("location.hash")
        for keys in (("Tab", "Tab", " ", "Escape"), ("Enter",)):
            page.press("c")
            page.wait("document.querySelector('dialog[open]')")
            for key in keys:
                page.press(key)
            page.wait("!document.querySelector('dialog[open]')")
            assert page.js("location.hash") == before
        page.press("c")
        page.wait("document.querySelector('dialog[open]')")
        for key in ("Tab", "Tab", " ", "Enter"):
            page.press(key)
        page.wait("new URLSearchParams(location.hash.split('?')[1]).get('runs') === '0,1'")
        assert page.js("new URLSearchParams(location.hash.split('?')[1]).get('id')") in before.replace(
            "%40", "@"
        ).replace("%2F", "/"), "the rollout of the first run stays"


def test_an_order_is_chosen_at_the_head_of_a_column_again_and_again(chromium: Chromium, tmp_path: Path):
    made(tmp_path / "run").close()
    page = chromium
    with served(tmp_path / "run", follow=False) as url:
        page.open(url + "/#/rollouts")
        shows(page, "rollouts")
        while focus(page) != "order by reward":
            page.press("Tab", shift=True)
        for wanted in ("descending", "ascending"):
            page.press("Enter")
            page.wait("document.getElementById('count')")
            assert focus(page) == f"order by reward, {wanted} now"


@pytest.mark.nightly
@pytest.mark.parametrize("name", PAGES)
def test_everything_that_takes_the_focus_has_a_name(chromium: Chromium, tmp_path: Path, name: str):
    run = MadeUpRun(tmp_path / "run", info=({}, {"did": "ls", "view": {"text": "here"}}))
    run.add_step(2)
    run.close()
    with served(tmp_path / "run", follow=False) as url:
        chromium.open(f"{url}/#/{name}")
        shows(chromium, name)
        assert chromium.js("document.querySelectorAll('a, button').length") > 10
        assert chromium.js(NAMELESS) == []
