"""Runs that differ in nothing but their seeds, drawn as one; the hosts of a run; what a person wrote about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.view.__main__ import main
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import painted, shows, text
from tests.view.runs import add_step, served, write_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]
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


def test_runs_that_differ_only_in_their_seeds_are_a_mean_and_a_band(chromium: Chromium, tmp_path: Path):
    """Two groups of seeds are two curves, called by what they were told differently, as far as all of them have come;
    a key draws each run, and the address keeps it."""
    seeds(tmp_path, 0.001, [1.0, 2.0, 6.0])
    seeds(tmp_path, 0.002, [10.0, 20.0, 30.0], first=4)
    page = chromium
    with served(tmp_path, follow=False) as url:
        page.open(url + "/#/overview?runs=0,1,2,3,4,5")
        shows(page, "overview")
        assert page.js(CURVES) == 2 and page.js(BANDS) == 2
        assert page.js(painted(FIRST, "--k0")) > 100 and page.js(painted(FIRST, "--k1")) > 100
        told = page.js(READOUT)
        assert "ppo.lr=0.001 (3 seeds)" in told and "ppo.lr=0.002 (3 seeds)" in told
        assert "6 2 to 12" in told and "40 20 to 60" in told, "at step 2, the last one that all have"
        said = text(page, "#seeds-said")
        assert "mean" in said and "from the lowest to the highest" in said
        colours = "[...document.querySelectorAll('#compared .dot')].map((one) => one.classList[1]).join(' ')"
        assert page.js(colours) == "k0 k0 k0 k1 k1 k1"
        page.js("document.getElementById('page').focus()")
        page.press("b")
        page.wait(f"{CURVES} === 6")
        assert page.js(BANDS) == 0
        assert "seeds=0" in page.js("location.hash") and page.js("document.getElementById('seeds-said').hidden")
        page.open(url + "/?other#/overview?runs=0,3")
        shows(page, "overview")
        assert page.js("document.getElementById('seeds').hidden") is True, "there is nothing to draw as one"
        page.open("about:blank")
        assert page.problems == []


def test_the_band_of_smoothed_curves_over_hours_on_a_logarithmic_axis(chromium: Chromium, tmp_path: Path):
    """Whatever else is asked of the charts, the band has its curve and lies within the picture."""
    seeds(tmp_path, 0.001, [0.0, 2.0, 4.0], steps=6)
    page = chromium
    with served(tmp_path, follow=False) as url:
        page.open(url + "/#/overview?runs=0,1,2&smooth=0.6&x=hours&log=1")
        shows(page, "overview")
        assert page.js(CURVES) == 2 and page.js(BANDS) == 1, "as measured, faint, and smoothed"
        assert page.js(f"{FIRST}.data[0].length") == 4, "as far as all have come"
        low, high = page.js(f"{FIRST}.extent.y")
        assert 1 < low < 2 and 12 < high < 20, "the lowest run, which is always 0, is below the axis"
        assert page.js(painted(FIRST, "--k0")) > 100
        page.open("about:blank")
        assert page.problems == []


def test_hosts_have_charts_and_a_note_is_shown_as_text(chromium: Chromium, tmp_path: Path):
    """CPU and memory of every host; a note that changes is shown by an open page, and nothing in it is obeyed."""
    run = write_run(tmp_path / "run", steps=0)
    for step in (1, 2):
        hosts = {f"host/{name}/{what}": 0.25 * step for name in ("big-1", "big-2") for what in ("cpu", "memory")}
        add_step(run, {"step": step, "reward/mean": 0.5, **hosts})
    page = chromium
    with served(run) as url:
        page.open(url + "/")
        shows(page, "overview")
        charts = dict(page.js(CHARTS))
        for title in ("CPU of the hosts", "Memory of the hosts"):
            (told,) = [value for name, value in charts.items() if name.startswith(title)]
            assert "big-1 0.5" in told and "big-2 0.5" in told
        assert not text(page, ".note")
        assert main(["note", str(run), "<img src=x onerror=\"document.title='owned'\">", "--tag", "<b>x</b>"]) == 0
        page.wait("document.querySelector('.note')")
        assert "<img src=x" in text(page, ".note p") and text(page, ".note .tag") == "<b>x</b>"
        page.press("c")
        page.wait("document.querySelector('dialog[open]')")
        assert text(page, "#runs-list .tag") == "<b>x</b>"
        assert page.js("document.title") != "owned" and page.js("document.querySelectorAll('.note img').length") == 0
        page.open("about:blank")
        assert page.problems == []
