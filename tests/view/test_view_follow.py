"""A page that is open follows its run, and whoever reads it keeps the place, the focus and the
choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.view.made_up_run import MadeUpRun
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import go, leave, shows, text
from tests.view.runs import add_step, client, made_up, served, write_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]
TOP = "document.querySelector({}).getBoundingClientRect().top"


def played(folder: Path, **options: int) -> MadeUpRun:
    """A run whose rollouts were not trained yet."""
    run = MadeUpRun(folder, failing=0.0, **options)
    run.add_step(1, train=False)
    return run


def marked(page: Chromium) -> None:
    """Remember the page: one that is loaded anew has no such mark."""
    page.js("window.unloaded = 'no'")


@pytest.mark.nightly
def test_an_open_rollout_shows_that_it_was_trained(chromium: Chromium, tmp_path: Path):
    """Its advantage and those of its group used to appear after a reload only."""
    page = chromium
    run = played(tmp_path / "run")
    with served(tmp_path / "run") as url:
        page.look(1280, 500)
        go(page, url, "rollout")
        marked(page)
        assert "trained at version" not in text(page, ".facts").lower()
        assert set(text(page, "#group td:nth-child(4)").splitlines()) == {"–"}
        page.js(
            "document.querySelector('.talk .turn').focus(); "
            "document.getElementById('page').scrollTop = 500"
        )
        page.js("getSelection().selectAllChildren(document.querySelector('.talk .turn pre'))")
        place = page.js(TOP.format("'.talk .turn'"))
        chosen = page.js("getSelection().toString()")
        assert chosen
        run.train()
        page.wait(
            "document.querySelector('.facts').innerText.toLowerCase().includes('trained at "
            "version')"
        )
        page.wait(
            "[...document.querySelectorAll('#group td:nth-child(4)')].every((one) => one.innerText "
            "!== '–')"
        )
        assert page.js(TOP.format("'.talk .turn'")) == pytest.approx(place, abs=1.0), (
            "nothing moves under the eyes"
        )
        assert page.js("document.getElementById('page').scrollTop") > 0
        assert page.js("getSelection().toString()") == chosen
        assert page.js("document.activeElement === document.querySelector('.talk .turn')")
        assert page.js("window.unloaded") == "no"
        page.look(1280, 800)
        leave(page)
    run.close()


def test_a_link_of_the_group_keeps_the_focus_when_the_group_is_trained(
    chromium: Chromium, tmp_path: Path
):
    page = chromium
    run = played(tmp_path / "run")
    with served(tmp_path / "run") as url:
        go(page, url, "rollout")
        page.js("document.querySelectorAll('#group a')[3].focus()")
        run.train()
        page.wait("document.querySelectorAll('#group td:nth-child(4)')[3].innerText !== '–'")
        assert page.js("document.activeElement === document.querySelectorAll('#group a')[3]")
    run.close()


def test_open_tokens_show_that_they_were_trained(chromium: Chromium, tmp_path: Path):
    """The token that was chosen, the colour, the scroll and a selected text stay."""
    page = chromium
    run = played(tmp_path / "run", longest=1500)
    with served(tmp_path / "run") as url:
        go(page, url, "tokens?token=700")
        marked(page)
        assert "not trained yet" in text(page, ".page")
        page.js(
            "document.getElementById('colour').focus(); document.getElementById('page').scrollTop "
            "= 150"
        )
        page.js(
            "getSelection().selectAllChildren(document.querySelector('.token[data-at=\"705\"]'))"
        )
        before = page.js(
            "[location.hash, document.getElementById('colour').value, getSelection().toString()]"
        )
        place = page.js(TOP.format("'.token[aria-current]'"))
        run.train()
        page.wait("document.getElementById('token').innerText.toLowerCase().includes('ratio')")
        assert "not trained yet" not in text(page, ".page")
        assert page.js("document.querySelectorAll('.token.clipped').length") > 5
        options = page.js("[...document.getElementById('colour').options].map((one) => one.value)")
        assert {"engine", "ratio", "advantage"} <= set(options)
        assert page.js("document.querySelector('.token[aria-current]').dataset.at") == "700"
        after = page.js(
            "[location.hash, document.getElementById('colour').value, getSelection().toString()]"
        )
        assert after == before
        assert page.js("document.activeElement.id") == "colour"
        assert page.js(TOP.format("'.token[aria-current]'")) == pytest.approx(place, abs=1.0)
        assert page.js("window.unloaded") == "no"
        page.press("Escape")
        page.press("m")
        page.wait(f"document.getElementById('colour').value === {json.dumps(options[1])}")
        leave(page)
    run.close()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["rollout", "tokens"])
def test_the_first_rollout_appears_on_a_page_that_had_none(
    chromium: Chromium, tmp_path: Path, name: str
):
    page = chromium
    run = MadeUpRun(tmp_path / "run", longest=30, failing=0.0)
    with served(tmp_path / "run") as url:
        go(page, url, name)
        assert "was kept" in text(page, ".page")
        run.add_step(1)
        page.wait("document.querySelector('.facts')")
        assert "was kept" not in text(page, ".page")
    run.close()


def test_of_a_rollout_that_has_not_changed_no_record_is_read_again(tmp_path: Path):
    """A run adds rollouts all the time, and one of 100,000 tokens is large."""
    run = played(tmp_path / "run")
    with client(tmp_path / "run") as page:
        page.get("/api/runs/0/rollouts")
        (sample,) = {line["id"].rpartition("/")[0] for line in indexed(tmp_path / "run")}
        query = {"id": f"{sample}/0"}
        first = page.get("/api/runs/0/rollout", params=query).json()
        run.add_step(1, train=False)
        again = page.get("/api/runs/0/rollout", params=query | {"seen": first["stamp"]}).json()
        assert again == {"id": query["id"], "stamp": first["stamp"], "same": True}
        run.train()
        trained = page.get("/api/runs/0/rollout", params=query | {"seen": first["stamp"]}).json()
        assert trained["train_line"] is not None and trained["stamp"] != first["stamp"]
    run.close()


def indexed(folder: Path) -> list[dict]:
    (index,) = (folder / "rollouts").glob("play-*.index.jsonl")
    return [json.loads(line) for line in index.read_text().splitlines()[1:]]


def test_who_reads_the_list_keeps_the_row_and_its_place(chromium: Chromium, tmp_path: Path):
    """New rollouts come in at the top; the rows used to move away under the eyes."""
    page = chromium
    run = MadeUpRun(tmp_path / "run")
    for _ in range(3):
        run.add_step(4)
    name = "document.querySelector('.row[aria-selected=true]')?.ariaLabel"
    count = "document.getElementById('count').innerText.startsWith('{} of')"
    with served(tmp_path / "run") as url:
        go(page, url, "rollouts")
        newest = page.js(name)
        run.add_step(4)
        page.wait(count.format(128))
        page.wait(f"{name} !== {json.dumps(newest)}")
        assert page.js(name).startswith("step 4"), (
            "at the top the newest is the one that Enter opens"
        )
        for key in ("ArrowDown",) * 30:
            page.press(key)
        chosen = page.js(name)
        place = page.js(TOP.format("'.row[aria-selected=true]'"))
        run.add_step(4)
        page.wait(count.format(160))
        assert page.js(name) == chosen
        assert page.js(TOP.format("'.row[aria-selected=true]'")) == place
        page.js("document.getElementById('grid').scrollTop = 100 * 30")
        looked_at = "document.elementFromPoint(300, 500).closest('.row')?.ariaLabel"
        page.wait(looked_at)
        first = page.js(looked_at)
        run.add_step(4)
        page.wait(count.format(192))
        page.wait(looked_at)
        assert page.js(looked_at) == first, "what is looked at stays"
    run.close()


def test_a_list_is_drawn_anew_while_changes_come_faster_than_it_is_asked_for(
    chromium: Chromium, tmp_path: Path
):
    """Each change used to begin the wait anew, so that a busy run was never shown."""
    page = chromium
    run = MadeUpRun(tmp_path / "run")
    run.add_step(1)
    with served(tmp_path / "run") as url:
        go(page, url, "tasks")
        before = text(page, "#tasks tbody")
        for _ in range(20):  # about half a second between them, and the page waits for one
            run.add_step(1)
            page.js("new Promise((done) => setTimeout(done, 400))")
            if text(page, "#tasks tbody") != before:
                break
        else:
            raise AssertionError("nothing new was shown for eight seconds")
    run.close()


def test_a_button_held_down_while_rows_arrive_chooses_its_row(chromium: Chromium, tmp_path: Path):
    """The row under the pointer is made anew meanwhile; the click used to be lost."""
    page = chromium
    run = MadeUpRun(tmp_path / "run")
    run.add_step(8)
    with served(tmp_path / "run") as url:
        go(page, url, "rollouts")
        page.press("ArrowDown")
        meant = page.js("document.getElementById('row-6').ariaLabel")
        box = page.js(
            "(({x, y}) => [x, y])(document.getElementById('row-6').getBoundingClientRect())"
        )
        point = {"x": box[0] + 40, "y": box[1] + 10, "button": "left", "clickCount": 1}
        page.call("Input.dispatchMouseEvent", type="mousePressed", **point)
        run.add_step(8)
        page.wait("document.getElementById('count').innerText.startsWith('128 of')")
        page.call("Input.dispatchMouseEvent", type="mouseReleased", **point)
        page.wait(
            f"document.querySelector('.row[aria-selected=true]').ariaLabel === {json.dumps(meant)}"
        )
    run.close()


def test_a_search_that_ends_takes_the_focus_from_nobody(chromium: Chromium, tmp_path: Path):
    """It may take half a minute, and who typed into another field meanwhile was thrown out of
    it."""
    made_up(tmp_path / "run", groups=4)
    page = chromium
    look_for = """
        document.getElementById('search').value = 'onerror';
        document.getElementById('search').focus();
        document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true }));"""
    with served(tmp_path / "run", follow=False) as url:
        for after, focus in (("document.getElementById('f-task').focus()", "f-task"), ("", "grid")):
            page.open(f"{url}/?{focus}#/rollouts")
            shows(page, "rollouts")
            page.js(look_for + after)
            page.wait("document.getElementById('searched').innerText.includes('all of 32')")
            page.js("new Promise((done) => setTimeout(done))")
            assert page.js("document.activeElement.id") == focus


def test_a_metric_that_comes_later_leaves_the_focus_in_its_chart(
    chromium: Chromium, tmp_path: Path
):
    page = chromium
    run = write_run(tmp_path / "run", steps=2, ended=False)
    with served(run) as url:
        go(page, url)
        page.press("/")
        page.wait("document.querySelectorAll('.all .chart').length === 2")
        page.js("[...document.querySelectorAll('.all .chart')].at(-1).focus()")
        heard = page.js("document.activeElement.ariaLabel")
        add_step(run, {"step": 3, "reward/mean": 0.5, "time/step": 1.0, "another/metric": 2.0})
        page.wait("document.querySelectorAll('.all .chart').length === 3")
        assert page.js("document.activeElement.ariaLabel") == heard
        names = page.js(
            "[...document.querySelectorAll('.all .chart h3')].map((one) => one.innerText)"
        )
        assert names == sorted(names)


def test_a_lane_that_comes_in_above_leaves_the_line_that_was_chosen(
    chromium: Chromium, tmp_path: Path
):
    page = chromium
    run = write_run(tmp_path / "run", ended=False)
    span = {"name": "env/step", "ph": "X", "ts": 1_200_000, "pid": 1, "tid": 1, "dur": 100_000}
    with served(run) as url:
        go(page, url, "timeline")
        page.press("ArrowUp")
        with (run / "trace" / "master.jsonl").open("a") as file:
            file.write(json.dumps(span) + "\n")
        page.wait(
            "document.querySelector('.page.timeline [role=status]').innerText.includes('2 spans')"
        )
        page.press("n")
        assert "train/actor_train" in text(page, ".page.timeline [role=status]")


SLOWLY = """
    const fetched = window.fetch;
    window.fetch = async (path, ...rest) => {
        const reply = await fetched(path, ...rest);
        if (path.includes('/rollout?') && !window.late) {
            window.late = 'answered';
            await new Promise((done) => { window.arrive = done; });
        }
        return reply;
    };"""


@pytest.mark.nightly
def test_what_changes_while_a_page_is_being_made_is_shown(chromium: Chromium, tmp_path: Path):
    """On a slow connection the answer was that of before the change, and the change was taken for
    known."""
    page = chromium
    run = played(tmp_path / "run")
    with served(tmp_path / "run") as url:
        go(page, url)
        page.js(SLOWLY)
        page.press("5")
        page.wait("window.late === 'answered'")
        answers = (
            "performance.getEntriesByType('resource').filter((one) => "
            "one.name.includes('/changes')).length"
        )
        before = page.js(answers)
        run.train()
        page.wait(f"{answers} > {before}")
        page.js("window.arrive()")
        page.wait(
            "document.querySelector('.facts')?.innerText.toLowerCase().includes('trained at "
            "version')"
        )
        page.open("about:blank")
    run.close()
