"""The page in a real browser, by keys alone: a run that grows is followed from its curves to single tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.view.made_up_run import MadeUpRun
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.runs import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with closing(Chromium()) as browser:
        browser.look(1280, 800)
        yield browser


def text(page: Chromium, selector: str) -> str:
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText).join('\\n')")


def shows(page: Chromium, name: str) -> None:
    page.wait(f"document.documentElement.dataset.page === {json.dumps(name)}")


def test_a_growing_run_is_followed_from_its_curves_to_a_token_by_keys_alone(chromium: Chromium, tmp_path: Path):
    """A step arrives by itself; failures are filtered; a rollout opens, with its tokens and its group; an advisory
    leads to the rollouts that show it. Nothing in a rollout is carried out, and no other host is asked."""
    page, run = chromium, MadeUpRun(tmp_path / "run", failing=0.4)
    for _ in range(6):
        run.add_step(4, of=8)
    with served(tmp_path / "run") as url:
        page.open(url + "/")
        shows(page, "overview")
        page.wait("document.querySelector('.card b').innerText === '6'")
        run.add_step(4, of=8)
        page.wait("document.querySelector('.card b').innerText === '7'")

        page.press("4")
        shows(page, "rollouts")
        assert "224 of 224 rollouts" in text(page, "#count")
        page.press("f")
        page.wait("!document.getElementById('count').innerText.includes('224 of 224')")
        assert set(page.js("[...document.querySelectorAll('.row .outcome')].map((one) => one.innerText)")) <= {
            "failure: simulator",
            "failure: timeout",
        }
        page.press("ArrowDown")
        page.press("Enter")
        shows(page, "rollout")
        assert "failure: " in text(page, ".facts")
        assert "An error occurred" in text(page, ".talk")
        assert page.js("document.querySelectorAll('#group tbody tr').length") == 8

        page.press("6")
        shows(page, "tokens")
        before = text(page, "#token")
        page.press("ArrowRight")
        page.wait(f"document.getElementById('token').innerText !== {json.dumps(before)}")
        assert "2 of" in text(page, "#token")
        assert page.js("document.querySelector('.token[aria-current]').dataset.at") == "1"
        page.press("m")
        page.wait("document.getElementById('colour').value === 'trainer'")

        page.press("b")
        shows(page, "rollout")
        page.press("g")
        page.wait("document.querySelectorAll('.talks.two .talk').length === 2")

        page.press("2")
        shows(page, "advisories")
        page.wait("document.querySelector('[data-id=failures_rising]')")
        count = page.js("document.querySelectorAll('.advisory').length")
        for _ in range(count):
            page.press("j")
            if page.js("document.activeElement.dataset.id") == "failures_rising":
                break
        page.press("Enter")
        shows(page, "rollouts")
        assert page.js("document.getElementById('f-outcome').value") == "failed"
        assert page.js("document.querySelectorAll('.row').length") > 5

        assert page.js("document.title") != "owned"
        asked = page.js("performance.getEntriesByType('resource').map((one) => one.name)")
        assert asked
        assert all(one.startswith(url) for one in asked)
        page.open("about:blank")
        assert page.problems == []
    run.close()


def test_hostile_text_is_shown_as_text_and_a_deleted_run_is_called_so(chromium: Chromium, tmp_path: Path):
    run = MadeUpRun(tmp_path / "run")
    run.add_step(2)
    page = chromium
    with served(tmp_path / "run") as url:
        page.open(url + "/#/rollouts?text=onerror")
        page.wait("document.getElementById('searched')?.innerText.includes('all of 16')")
        assert "2 of 16 rollouts" in text(page, "#count")
        page.press("Enter")
        shows(page, "rollout")
        assert "<script>document.title='owned'</script>" in text(page, ".talk")
        assert page.js("document.querySelectorAll('.talk img, .talk script').length") == 0
        run.close()
        shutil.rmtree(tmp_path / "run")
        page.wait("document.getElementById('state').dataset.state === 'gone'")
        assert "onerror" in text(page, ".talk"), "what was loaded stays"
        page.press("1")
        shows(page, "overview")
        assert page.js("document.title") != "owned"
        page.open("about:blank")
        assert page.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_telephone(chromium: Chromium, tmp_path: Path, scheme: str):
    run = MadeUpRun(tmp_path / "run")
    run.add_step(2)
    run.close()
    with served(tmp_path / "run", follow=False) as url:
        chromium.look(390, 800, scheme)
        chromium.open(url + "/")
        for key, name in enumerate(
            ("overview", "advisories", "timeline", "rollouts", "rollout", "tokens", "tasks"), start=1
        ):
            chromium.press(str(key))
            shows(chromium, name)
            assert chromium.js("document.documentElement.scrollWidth") <= 390, name
        chromium.look(1280, 800)
        chromium.open("about:blank")
        assert chromium.problems == []
