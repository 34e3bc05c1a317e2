"""The page in a real browser, by keys alone: a run that grows is followed from its curves to single
tokens."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks.view.made_up_run import HOSTILE, MadeUpRun
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import PAGES, chart, follow_advisory, go, leave, shows, text
from tests.view.runs import made_up, served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]


def test_a_growing_run_is_followed_from_its_curves_to_a_token_by_keys_alone(
    chromium: Chromium, tmp_path: Path
):
    """A step arrives by itself; failures are filtered; a rollout opens, with its tokens and its
    group; an advisory leads to the rollouts that show it. Nothing in a rollout is carried out, and
    no other host is asked."""
    page = chromium
    run = MadeUpRun(tmp_path / "run", failing=0.4)
    for _ in range(6):
        run.add_step(4, of=8)
    with served(tmp_path / "run") as url:
        go(page, url)
        page.wait("document.querySelector('.card b').innerText === '6'")
        run.add_step(4, of=8)
        page.wait("document.querySelector('.card b').innerText === '7'")

        page.press("4")
        shows(page, "rollouts")
        assert "224 of 224 rollouts" in text(page, "#count")
        page.press("f")
        page.wait("!document.getElementById('count').innerText.includes('224 of 224')")
        assert set(
            page.js("[...document.querySelectorAll('.row .outcome')].map((one) => one.innerText)")
        ) <= {
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

        follow_advisory(page, "failures_rising")
        assert page.js("document.getElementById('f-outcome').value") == "failed"
        assert page.js("document.querySelectorAll('.row').length") > 5

        assert page.js("document.title") != "owned"
        asked = page.js("performance.getEntriesByType('resource').map((one) => one.name)")
        assert asked
        assert all(one.startswith(url) for one in asked)
        leave(page)
    run.close()


def test_hostile_text_is_shown_as_text_and_a_deleted_run_is_called_so(
    chromium: Chromium, tmp_path: Path
):
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
        assert "⟨U+0000⟩⟨U+001B⟩[31m⟨U+202E⟩" in text(page, ".talk"), (
            "what nobody would see is named"
        )
        assert page.js("document.querySelectorAll('.talk img, .talk script').length") == 0
        run.close()
        shutil.rmtree(tmp_path / "run")
        page.wait("document.getElementById('state').dataset.state === 'gone'")
        assert "onerror" in text(page, ".talk"), "what was loaded stays"
        page.press("1")
        shows(page, "overview")
        assert page.js("document.title") != "owned"
        leave(page)


def test_two_runs_are_compared_and_the_options_listed_in_which_they_differ(
    chromium: Chromium, tmp_path: Path
):
    """One of them was killed, and is called so."""
    for seed in (1, 2):
        made_up(tmp_path / f"seed{seed}", seed=seed, steps=2 + seed, groups=1)
    (tmp_path / "seed1" / "summary.json").write_text(json.dumps({"steps": 3}))
    for path in (tmp_path / "seed2", *(tmp_path / "seed2").rglob("*")):
        os.utime(path, (1e9, 1e9))
    page = chromium
    with served(tmp_path, follow=False) as url:
        go(page, url)
        page.press("c")
        page.wait("document.querySelectorAll('#runs-list input').length === 2")
        for key in ("Tab", "Tab", " ", "Enter"):
            page.press(key)
        page.wait("document.getElementById('difference')")
        rows = [line.split("\t") for line in text(page, "#difference tbody").splitlines()]
        assert rows == [["seed", "1", "2"], ["ppo.lr", "0.001", "0.002"]]
        assert text(page, "#compared td:nth-child(2) small").splitlines() == ["finished", "stopped"]
        assert page.js(f"{chart('Reward')}.columns.map((one) => one.kind)") == [0, 1], (
            "on the same axes"
        )
        page.press("c")
        page.wait("document.querySelector('dialog[open]')")
        for key in ("Tab", " ", "Enter"):
            page.press(key)
        page.wait("!location.hash.includes('0,1')")
        shows(page, "overview")
        page.wait("document.getElementById('state').dataset.state === 'stopped'")
        assert "stopped after 4 steps, before its end" in text(page, "#state")
        leave(page)


COVERED = """
    (() => {
        const strips = document.querySelector('.strips').getBoundingClientRect();
        const names = [...document.querySelectorAll('.strip-names span')];
        const within = (box) => box.top >= strips.top - 1 && box.bottom <= strips.bottom + 1;
        const beside = (box) => box.right <= strips.left && within(box);
        const covering = names.filter((one) => !beside(one.getBoundingClientRect()));
        return names.length ? covering.map((one) => one.innerText) : ['none'];
    })()"""
HOSTILE_INFO = (
    {
        "replay": {
            "title": "game",
            "command": "play",
            "url": "javascript:document.title='owned'",
            "order": {},
        }
    },
    {
        "did": HOSTILE,
        "view": {"title": HOSTILE, "columns": [HOSTILE], "rows": [[HOSTILE], "no row", {"a": 1}]},
    },
)
GAME = {
    "title": "game",
    "command": "play-it --now",
    "url": "http://127.0.0.1:9/play",
    "order": {"task_id": 7, "seed": 3},
}


def test_what_the_environment_left_is_shown_and_its_episode_can_be_played_again(
    chromium: Chromium, tmp_path: Path
):
    """The address for playing has task, seed and what was done; only one of this machine becomes a
    link."""
    view = {
        "title": "The account",
        "columns": ["name", "after"],
        "rows": [["a-bucket", "there"]],
        "note": "one more",
    }
    folders = []
    for name, info in (
        ("told", ({"replay": GAME}, {"did": "aws s3 mb", "view": view})),
        ("hostile", HOSTILE_INFO),
    ):
        made_up(tmp_path / name, info=info, groups=1)
        folders.append(tmp_path / name)
    page = chromium
    with served(*folders, follow=False) as url:
        go(page, url, "rollout?runs=0")
        assert text(page, "#state-left h2") == "The account"
        assert [text(page, "#state-left tbody"), text(page, "#state-left p")] == [
            "a-bucket\tthere",
            "one more",
        ]
        assert "play-it" in text(page, "#again")
        page.press("p")
        address = page.js("document.activeElement.href")
        assert address.startswith("http://127.0.0.1:9/play#play=")
        asked = json.loads(unquote(address.partition("#play=")[2]))
        assert asked == {"task_id": 7, "seed": 3, "commands": ["aws s3 mb"]}
        page.open(url + "/?other#/rollout?runs=1")
        shows(page, "rollout")
        assert "onerror" in text(page, "#state-left h2") and "<script>" in text(
            page, "#state-left tbody"
        )
        assert (
            page.js(
                "document.querySelectorAll('#state-left img, #state-left script, #again').length"
            )
            == 0
        )
        assert page.js("document.title") != "owned"
        leave(page)


def test_of_a_hundred_thousand_tokens_a_window_is_drawn(chromium: Chromium, tmp_path: Path):
    made_up(tmp_path / "run", longest=100_000, failing=0.0, groups=1)
    page = chromium
    with served(tmp_path / "run", follow=False) as url:
        go(page, url, "tokens")
        assert "1 of 100,000" in text(page, "#token")
        page.press("End")
        page.wait("document.getElementById('token').innerText.includes('100,000 of 100,000')")
        assert page.js("document.querySelector('.token[aria-current]').dataset.at") == "99999"
        assert page.js("document.querySelectorAll('.token').length") <= 600
        before = page.js("location.hash")
        page.press("n")
        page.wait(f"location.hash !== {json.dumps(before)}")
        assert page.js("document.querySelectorAll('.token').length") <= 600
        for _ in range(page.js("document.querySelectorAll('#colour option').length")):
            low, high = page.js(
                "[...document.querySelectorAll('#legend')].map((one) => "
                "one.innerText.split('\\n'))[0]"
            )
            assert float(low.replace(",", "")) <= float(high.replace(",", "")), (
                "colours without a scale say nothing"
            )
            page.press("m")
        covered = page.js(COVERED)
        assert covered == [], "the names of the strips used to lie over their cells"
        page.press("b")
        shows(page, "rollout")
        leave(page)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_telephone(chromium: Chromium, tmp_path: Path, scheme: str):
    made_up(tmp_path / "run", groups=2)
    with served(tmp_path / "run", follow=False) as url:
        chromium.look(390, 800, scheme)
        chromium.open(url + "/")
        for key, name in enumerate(PAGES, start=1):
            chromium.press(str(key))
            shows(chromium, name)
            assert chromium.js("document.documentElement.scrollWidth") <= 390, name
        chromium.look(1280, 800)
        leave(chromium)
