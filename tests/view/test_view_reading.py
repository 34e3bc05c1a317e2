"""Who has a keyboard alone, or hears the page, loses nothing; layout, and runs that differ in their
seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.view.made_up_run import MadeUpRun
from realhf.view.__main__ import main
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import PAGES, go, leave, painted, shows, text
from tests.view.runs import add_step, made_up, served, write_run

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
        go(chromium, url, "tasks?runs=1")
        chromium.press("Tab")
        assert focus(chromium) == "Skip to the page"
        chromium.press("Enter")
        assert chromium.js("document.activeElement.id") == "page"
        assert chromium.js("location.hash") == "#/tasks?runs=1"
        chromium.press("Tab")
        assert chromium.js("document.activeElement.id") == "task-search", (
            "the next one is in the page"
        )


def test_a_change_of_the_run_leaves_the_focus_where_it_is(chromium: Chromium, tmp_path: Path):
    page = chromium
    run = made(tmp_path / "run")
    with served(tmp_path / "run") as url:
        go(page, url)
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
        page.wait(
            "document.activeElement.id === 'metric-search' && document.querySelector('.all .chart')"
        )
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
        go(chromium, url, "rollouts")
        chromium.press("7")
        shows(chromium, "tasks")
        chromium.press("Tab")
        assert chromium.js("document.activeElement.id") == "task-search"


@pytest.mark.parametrize(
    ("older", "to_the_other", "chosen"), [(2, ("Tab", "Tab"), "0,1"), (1, ("Tab",), "1,0")]
)
def test_the_list_of_runs_can_be_left_without_a_change(
    chromium: Chromium, tmp_path: Path, older: int, to_the_other: tuple[str, ...], chosen: str
):
    """The page opens with the newer run, and it stays the first where another is compared with
    it."""
    for seed in (1, 2):
        made(tmp_path / f"run{seed}", seed=seed).close()
    os.utime(tmp_path / f"run{older}" / "metrics.jsonl", (1e9, 1e9))
    page = chromium
    with served(tmp_path, follow=False) as url:
        go(page, url, "rollouts")
        page.press("Enter")
        shows(page, "rollout")
        before = page.js("location.hash")
        for keys in ((*to_the_other, " ", "Escape"), ("Enter",)):
            page.press("c")
            page.wait("document.querySelector('dialog[open]')")
            for key in keys:
                page.press(key)
            page.wait("!document.querySelector('dialog[open]')")
            assert page.js("location.hash") == before
        page.press("c")
        page.wait("document.querySelector('dialog[open]')")
        for key in (*to_the_other, " ", "Enter"):
            page.press(key)
        page.wait(f"new URLSearchParams(location.hash.split('?')[1]).get('runs') === '{chosen}'")
        assert page.js(
            "new URLSearchParams(location.hash.split('?')[1]).get('id')"
        ) in before.replace("%40", "@").replace("%2F", "/"), "the rollout of the first run stays"


def test_an_order_is_chosen_at_the_head_of_a_column_again_and_again(
    chromium: Chromium, tmp_path: Path
):
    made(tmp_path / "run").close()
    page = chromium
    with served(tmp_path / "run", follow=False) as url:
        go(page, url, "rollouts")
        while focus(page) != "order by reward":
            page.press("Tab", shift=True)
        for wanted in ("descending", "ascending"):
            page.press("Enter")
            page.wait("document.getElementById('count')")
            assert focus(page) == f"order by reward, {wanted} now"


@pytest.mark.nightly
@pytest.mark.parametrize("name", PAGES)
def test_everything_that_takes_the_focus_has_a_name(chromium: Chromium, tmp_path: Path, name: str):
    made_up(tmp_path / "run", info=({}, {"did": "ls", "view": {"text": "here"}}), groups=2)
    with served(tmp_path / "run", follow=False) as url:
        chromium.open(f"{url}/#/{name}")
        shows(chromium, name)
        assert chromium.js("document.querySelectorAll('a, button').length") > 10
        assert chromium.js(NAMELESS) == []


CLIPPED = """
    (() => {
        const pen = document.createElement('canvas').getContext('2d');
        const wanted = (one) => {
            const style = getComputedStyle(one);
            if (one.matches('select')) {
                const copy = one.cloneNode(true);
                copy.removeAttribute('id');
                Object.assign(copy.style, { position: 'absolute', width: 'max-content', maxWidth: 'none' });
                Object.assign(copy.style, { padding: style.padding, font: style.font });
                document.body.append(copy);
                const width = copy.getBoundingClientRect().width;
                copy.remove();
                return width;
            }
            pen.font = style.font;
            const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
            return pen.measureText(one.placeholder).width + padding;
        };
        const fields = [...document.querySelectorAll('select, input[placeholder]')].filter((one) => one.offsetParent);
        const said = [...document.querySelectorAll('button, label, summary, th')].filter((one) => one.offsetParent);
        return [
            fields.length,
            fields.filter((one) => one.getBoundingClientRect().width < wanted(one) - 0.5).map((one) => one.id),
            said.filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth).map((one) => one.innerText),
        ];
    })()"""
FIELDS = {"overview": 0, "rollouts": 6, "tokens": 1, "tasks": 3}


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_is_clipped(chromium: Chromium, tmp_path: Path, width: int, scheme: str):
    """The longest choice of each filter fits: the ways of splitting used to lose their last
    word."""
    made_up(tmp_path / "run", failing=0.4, groups=8)
    with served(tmp_path / "run", follow=False) as url:
        chromium.look(width, 800, scheme)
        chromium.open(url + "/")
        for key, name in enumerate(PAGES, start=1):
            chromium.press(str(key))
            shows(chromium, name)
            count, fields, said = chromium.js(CLIPPED)
            assert (name, count >= FIELDS.get(name, 0), fields, said) == (name, True, [], [])
            assert chromium.js("document.documentElement.scrollWidth") <= width
        chromium.look(1280, 800)
        leave(chromium)


FIRST = "document.querySelector('.chart').chart"
BANDS = f"{FIRST}.plot.bands.length"
CURVES = f"{FIRST}.columns.filter((one) => one.role === 'curve').length"
CHARTS = """
    [...document.querySelectorAll('.chart:not([hidden])')].map((one) => [
        one.querySelector('h3').innerText, one.querySelector('.readout').innerText])"""
READOUT = "document.querySelector('.chart .readout').innerText"


def seeds(folder: Path, lr: float, rewards: list[float], *, steps: int = 4, first: int = 1) -> None:
    """Runs of one experiment, a reward for each; the last has two steps fewer."""
    for place, reward in enumerate(rewards):
        number = first + place
        config = f"experiment_name: grpo\ntrial_name: s{number}\nseed: {number}\nppo:\n  lr: {lr}\n"
        run = write_run(folder / f"s{number}", steps=0, config=config)
        for step in range(1, steps + 1 - 2 * (place == len(rewards) - 1)):
            add_step(run, {"step": step, "reward/mean": reward * step, "time/step": 1.0})


def test_runs_that_differ_only_in_their_seeds_are_a_mean_and_a_band(
    chromium: Chromium, tmp_path: Path
):
    """Two groups of seeds are two curves, called by what they were told differently, as far as all
    of them have come; a key draws each run, and the address keeps it."""
    seeds(tmp_path, 0.001, [1.0, 2.0, 6.0])
    seeds(tmp_path, 0.002, [10.0, 20.0, 30.0], first=4)
    page = chromium
    with served(tmp_path, follow=False) as url:
        go(page, url, "overview?runs=0,1,2,3,4,5")
        assert page.js(CURVES) == 2 and page.js(BANDS) == 2
        assert page.js(painted(FIRST, "--k0")) > 100 and page.js(painted(FIRST, "--k1")) > 100
        told = page.js(READOUT)
        assert "ppo.lr=0.001 (3 seeds)" in told and "ppo.lr=0.002 (3 seeds)" in told
        assert "6 2 to 12" in told and "40 20 to 60" in told, (
            "at step 2, the last one that all have"
        )
        said = text(page, "#seeds-note")
        assert "mean" in said and "from the lowest to the highest" in said
        colours = (
            "[...document.querySelectorAll('#compared .dot')].map((one) => "
            "one.classList[1]).join(' ')"
        )
        assert page.js(colours) == "k0 k0 k0 k1 k1 k1"
        page.js("document.getElementById('page').focus()")
        page.press("b")
        page.wait(f"{CURVES} === 6")
        assert page.js(BANDS) == 0
        assert "seeds=0" in page.js("location.hash") and page.js(
            "document.getElementById('seeds-note').hidden"
        )
        page.open(url + "/?other#/overview?runs=0,3")
        shows(page, "overview")
        assert page.js("document.getElementById('seeds').hidden") is True, (
            "there is nothing to draw as one"
        )
        leave(page)


def test_the_band_of_smoothed_curves_over_hours_on_a_logarithmic_axis(
    chromium: Chromium, tmp_path: Path
):
    """Whatever else is asked of the charts, the band has its curve and lies within the picture."""
    seeds(tmp_path, 0.001, [0.0, 2.0, 4.0], steps=6)
    page = chromium
    with served(tmp_path, follow=False) as url:
        go(page, url, "overview?runs=0,1,2&smooth=0.6&x=hours&log=1")
        assert page.js(CURVES) == 2 and page.js(BANDS) == 1, "as measured, faint, and smoothed"
        assert page.js(f"{FIRST}.data[0].length") == 4, "as far as all have come"
        low, high = page.js(f"{FIRST}.extent.y")
        assert 1 < low < 2 and 12 < high < 20, (
            "the lowest run, which is always 0, is below the axis"
        )
        assert page.js(painted(FIRST, "--k0")) > 100
        leave(page)


@pytest.mark.nightly
def test_hosts_have_charts_and_a_note_is_shown_as_text(chromium: Chromium, tmp_path: Path):
    """CPU and memory of every host; a note that changes is shown by an open page, and nothing in it
    is obeyed."""
    run = write_run(tmp_path / "run", steps=0)
    for step in (1, 2):
        hosts = {
            f"host/{name}/{what}": 0.25 * step
            for name in ("big-1", "big-2")
            for what in ("cpu", "memory")
        }
        add_step(run, {"step": step, "reward/mean": 0.5, **hosts})
    page = chromium
    with served(run) as url:
        go(page, url)
        charts = dict(page.js(CHARTS))
        for title in ("CPU of the hosts", "Memory of the hosts"):
            (told,) = [value for name, value in charts.items() if name.startswith(title)]
            assert "big-1 50.0 %" in told and "big-2 50.0 %" in told
        assert not text(page, ".note")
        assert (
            main(
                [
                    "note",
                    str(run),
                    "<img src=x onerror=\"document.title='owned'\">",
                    "--tag",
                    "<b>x</b>",
                ]
            )
            == 0
        )
        page.wait("document.querySelector('.note')")
        assert "<img src=x" in text(page, ".note p") and text(page, ".note .tag") == "<b>x</b>"
        page.press("c")
        page.wait("document.querySelector('dialog[open]')")
        assert text(page, "#runs-list .tag") == "<b>x</b>"
        assert (
            page.js("document.title") != "owned"
            and page.js("document.querySelectorAll('.note img').length") == 0
        )
        leave(page)
