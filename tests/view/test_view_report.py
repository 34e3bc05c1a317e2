"""The report of a run in a browser: the page without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.view.made_up_run import HOSTILE
from realhf.view.report import write_report
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import PAGES, chart, painted, shows, text
from tests.view.runs import add_step, made_up

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]
FOREIGN = """
    const one = document.createElement('script');
    one.textContent = 'window.ran = 1';
    document.body.append(one);"""


@pytest.mark.nightly
def test_a_report_opens_from_its_file_and_asks_nobody(chromium: Chromium, tmp_path: Path):
    """Every page of it is drawn; a rollout is found by its text and opened; what was written into
    it is not obeyed."""
    made_up(tmp_path / "run", failing=0.3, steps=4, groups=4)
    folder = tmp_path / "run"
    add_step(folder, {"step": 5, "reward/mean": 0.5, f"x/{HOSTILE}": 1.0})
    page = chromium
    page.open(write_report(folder, 200_000).as_uri())
    shows(page, "overview")
    assert text(page, ".card b").splitlines()[0] == "5"
    assert page.js(painted(chart("Reward"), "--k0")) > 100
    for key, name in enumerate(PAGES, start=1):
        page.press(str(key))
        shows(page, name)
        assert not text(page, ".problem") and not text(page, "#notice")
    page.press("4")
    shows(page, "rollouts")
    page.js("document.getElementById('search').value = 'onerror'")
    page.js("document.getElementById('search').focus()")
    page.press("Enter")
    page.wait("document.getElementById('searched').innerText.includes('looked through')")
    page.press("Enter")
    shows(page, "rollout")
    assert "onerror" in text(page, ".talk")
    page.js("location.hash = '#/rollout?id=nobody@1/0'")
    page.wait("document.querySelector('.problem')")
    assert "python -m realhf.view" in text(page, ".problem")
    assert (
        page.js(
            "performance.getEntriesByType('resource').filter((one) => "
            "!one.name.startsWith('data:')).length"
        )
        == 0
    )
    assert page.js("document.title") != "owned"
    assert page.problems == []
    refused = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
    assert page.js(refused) == "refused"
    assert any("Content Security Policy" in problem for problem in page.problems)
    page.js(FOREIGN)
    assert page.js("window.ran ?? 0") == 0, "no other script runs in it"
    page.problems.clear()
