"""What an open page shows is what lies in the files now, of the run whose name it bears."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.view.made_up_run import MadeUpRun
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.view.page import chart, drag, go, leave, painted, shows, text, ticks
from tests.view.runs import add_step, made_up, served, write_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=ABSENT)]
CURVE = f"{chart('Reward')}.data"


@pytest.mark.nightly
def test_another_server_on_the_port_is_noticed_and_no_run_mixed_with_another(
    chromium: Chromium, tmp_path: Path
):
    """Both servers call their run number 0. Its curve used to begin with the steps of the other
    run."""
    page = chromium
    for seed, steps in ((1, 4), (2, 7)):
        made_up(tmp_path / f"seed{seed}", seed=seed, steps=steps, groups=2)
    with served(tmp_path / "seed1") as url:
        go(page, url)
        page.wait("document.querySelector('.card b').innerText === '4'")
    page.wait("!document.getElementById('notice').hidden")
    with served(tmp_path / "seed2", port=urlsplit(url).port or 0):
        page.wait("document.querySelector('.card b')?.innerText === '7'", 60)
        assert text(page, "#title").endswith("seed2")
        page.wait(f"{CURVE}[0].length === 7")
        found = page.js(CURVE)
        page.open(url + "/?fresh")
        shows(page, "overview")
        assert found == page.js(CURVE)
        page.open("about:blank")
    page.problems.clear()  # the browser complains of the time without a server


def test_rollouts_that_came_while_another_page_was_open_are_there(
    chromium: Chromium, tmp_path: Path
):
    page = chromium
    run = MadeUpRun(tmp_path / "run")
    run.add_step(1)
    with served(tmp_path / "run") as url:
        go(page, url, "rollouts")
        assert "8 of 8 rollouts" in text(page, "#count")
        page.press("1")
        shows(page, "overview")
        run.add_step(1)
        page.wait("document.querySelector('.card b').innerText === '2'")
        page.press("4")
        shows(page, "rollouts")
        page.wait("document.getElementById('count').innerText.startsWith('16 of 16')")
    run.close()


def test_what_was_said_of_unreadable_lines_stays_when_rollouts_arrive(
    chromium: Chromium, tmp_path: Path
):
    page = chromium
    run = MadeUpRun(tmp_path / "run")
    run.add_step(1)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    with served(tmp_path / "run") as url:
        go(page, url)
        page.wait("document.getElementById('notice').innerText.includes('metrics.jsonl')")
        answers = (
            "performance.getEntriesByType('resource').filter((one) => "
            "one.name.includes('/changes')).length"
        )
        before = page.js(answers)
        (index,) = (tmp_path / "run" / "rollouts").glob("play-*.index.jsonl")
        with index.open("a") as file:
            file.write('{"note":"told","time":1.0}\n')
        page.wait(f"{answers} > {before}")
        assert "metrics.jsonl" in text(page, "#notice")
    run.close()


def test_a_metric_of_some_steps_is_a_curve_and_one_that_is_no_number_breaks_it(
    chromium: Chromium, tmp_path: Path
):
    """Steps that a metric leaves out are no gaps; a value between gaps is drawn as a point."""
    run = write_run(tmp_path / "run", steps=1)
    page = chromium
    played = {
        "time/actor_gen": 3.0,
        "time/part/actor_gen/environment": 1.0,
        "time/part/actor_gen/generation": 2.0,
    }
    for step in range(2, 12):
        found = {"policy/entropy": step} if step % 4 == 0 else {}
        broken = {"policy/kl_ref": 1.0 if step in (5, 8, 9) else float("nan")}
        add_step(run, {"step": step, "time/actor_train": 1.0} | played | found | broken)
    with served(run, follow=False) as url:
        go(page, url)
        times = page.js(chart("Where the time goes") + ".node.innerText")
        assert all(name in times for name in ("environment", "generation", "actor_train")), times
        assert "actor_gen" not in times, (
            "a call that plays is shown by its parts, as in the terminal"
        )
        entropy = chart("Entropy")
        kl = chart("KL")
        lone = "{0}.plot.series[1].points.filter({0}.plot, 1)"
        assert page.js(lone.format(entropy)) == []
        assert page.js(painted(entropy, "--k0")) > 100
        assert len(page.js(lone.format(kl))) == 1, "of the steps 5, 8 and 9 the first stands alone"
        assert page.js(painted(kl, "--k0")) > 20
        leave(page)


@pytest.mark.nightly
def test_a_hundred_thousand_steps_are_drawn_with_their_one_low(chromium: Chromium, tmp_path: Path):
    """Many steps share a column of pixels; the lowest and the highest of them are drawn."""
    long = write_run(tmp_path / "long", steps=0)
    page = chromium
    rows = [
        {"step": step, "policy/kl_ref": 0.5 if step == 30_001 else 9.0}
        for step in range(1, 100_001)
    ]
    (long / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kl = chart("KL")
    with served(long, follow=False) as url:
        go(page, url)
        assert page.js(f"{kl}.data[0].length") == 100_000
        low = page.js(
            f"[{kl}.plot.valToPos(30001, 'x', true), {kl}.plot.valToPos(1, 'y', "
            f"true)].map(Math.round)"
        )
        drawn = (
            f"[...{kl}.plot.ctx.getImageData({low[0] - 2}, {low[1]}, 5, 1).data].some((one) => one "
            f"> 0)"
        )
        assert page.js(drawn), "the one low value is drawn"
        leave(page)


def test_evaluations_that_are_greedy_alone_count_as_evaluations(chromium: Chromium, tmp_path: Path):
    run = write_run(tmp_path / "run")
    held = {"overall": {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 10}}
    (run / "evaluations.json").write_text(json.dumps({"2": {"greedy": held}}))
    with served(run, follow=False) as url:
        go(chromium, url)
        assert "50.0 %\nstep 2; greedy" in text(chromium, ".card:nth-child(4)")


def test_the_figures_of_a_short_run_are_drawn_as_they_are_said(chromium: Chromium, tmp_path: Path):
    """Shares stand in percent at the axis as on the cards, one step has one tick, and any run has
    the curve of its loss: supervised runs showed none."""
    run = write_run(tmp_path / "run", steps=0)
    page = chromium
    add_step(run, {"step": 1, "success/overall": 0.25, "policy/loss": 0.0, "reward/mean": 0.5})
    with served(run) as url:
        go(page, url)
        assert page.js(ticks(chart("Loss"), 0)) == ["1"]
        assert "0" in page.js(ticks(chart("Loss"), 1)) and not page.js(
            f"{chart('Loss')}.extent.y.some((y) => y < 0)"
        )
        share = page.js(ticks(chart("Success"), 1))
        assert share[0] == "0 %" and all(one.endswith(" %") for one in share)
        assert "25.0 %" in page.js(f"{chart('Success')}.readout.innerText")
        add_step(run, {"step": 2, "success/overall": 0.75, "policy/loss": -0.5, "reward/mean": 0.5})
        page.wait(f"{chart('Loss')}.data[0].length === 2")
        page.wait(f"{chart('Loss')}.extent.x.join() === '1,2'")
        leave(page)


@pytest.mark.parametrize(
    ("config", "ended", "says"),
    [
        ("evaluation: {episodes_per_task: 5, greedy_episodes_per_task: 0}", True, "none was made"),
        ("evaluation: {episodes_per_task: 0, greedy_episodes_per_task: 0}", True, "switched off"),
        ("evaluation: {episodes_per_task: 5, greedy_episodes_per_task: 0}", False, "none yet"),
        ("seed: 1", True, "none was made"),
        ("experiment: sft", True, "none: this run plays no episodes"),
    ],
)
def test_a_run_without_an_evaluation_says_why(
    chromium: Chromium, tmp_path: Path, config: str, ended: bool, says: str
):
    """One that had ended said ``none yet``."""
    run = write_run(tmp_path / "run", config=config, ended=ended)
    (run / "evaluations.json").unlink()
    if "sft" in config:
        rows = (run / "metrics.jsonl").read_text().replace("reward/mean", "policy/loss")
        (run / "metrics.jsonl").write_text(rows)
    with served(run, follow=False) as url:
        go(chromium, url)
        assert says in text(chromium, ".card:nth-child(4)")
        leave(chromium)


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
    """A browser has six of them to a server: the seventh page that followed a run waited for the
    others. A headless browser calls every page visible, so the page is told."""
    page = chromium
    run = MadeUpRun(tmp_path / "run")
    run.add_step(1)
    with served(tmp_path / "run") as url:
        go(page, url)
        page.js(HIDDEN.format("true"))
        # whoever waits for changes knows of the second step before the third one is told
        for step in (
            2,
            3,
        ):
            run.add_step(1)
            assert page.js(TOLD.format(step)) == step
        assert text(page, ".card b").splitlines()[0] == "1"
        page.js(HIDDEN.format("false"))
        page.wait("document.querySelector('.card b').innerText === '3'")
    run.close()


def test_a_task_is_a_template_and_its_instances_come_with_a_click(
    chromium: Chromium, tmp_path: Path
):
    """Each drawn instance used to count as a task of its own: a run of 50 templates showed hundreds
    of tasks that were never solved, and no curve."""
    page = chromium
    run = MadeUpRun(tmp_path / "run", failing=0.0)
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
        go(page, url, "tasks")
        assert text(page, ".readout").startswith(f"{len(instances)} tasks: ")
        assert page.js("document.querySelectorAll('#tasks tbody tr').length") == len(instances)
        played = page.js(
            "[...document.querySelectorAll('#tasks tbody tr')].map((row) => "
            "+row.cells[7].innerText)"
        )
        assert sum(played) == len(lines) - len(conversations), (
            "a further conversation is no further rollout"
        )
        opener = f"document.querySelector('[data-place=\"open {name}\"]')"
        page.js(f"{opener}.focus()")
        page.press("Enter")
        assert set(text(page, "#tasks .instance a").splitlines()) == instances[name]
        assert page.js("document.activeElement.dataset.place") == f"open {name}", (
            "the focus stays where it is"
        )
        page.js(f"document.querySelector('[data-place=\"template {name}\"]').click()")
        shows(page, "rollouts")
        own = [line["template"] for line in lines if "branch" not in line]
        assert text(page, "#count").startswith(
            f"{own.count(name)} of {len(own)} rollouts\ntemplate {name}"
        )


def measured(folder: Path) -> Path:
    """A run of eleven steps of half an hour and 500 tokens each."""
    run = write_run(folder, steps=1)
    for step in range(2, 12):
        add_step(
            run,
            {
                "step": step,
                "time/step": 1800,
                "batch/tokens": 500,
                "policy/kl_ref": 10.0 ** -(step % 4),
            },
        )
    return run


def test_curves_are_drawn_over_hours_or_tokens_on_a_logarithmic_axis(
    chromium: Chromium, tmp_path: Path
):
    run = measured(tmp_path / "run")
    page = chromium
    kl = chart("KL")
    farthest = f"Math.max(...{ticks(kl, 0)}.map((one) => Number(one.replace(',', ''))))"
    with served(run, follow=False) as url:
        go(page, url)
        assert page.js(farthest) == 10
        page.press("x")
        assert 4 < page.js(farthest) <= 5.1, "ten steps of half an hour"
        page.press("l")
        assert page.js(ticks(kl, 1)) == ["0.001", "0.01", "0.1", "1"]
        assert "x=hours" in page.js("location.hash") and "log=1" in page.js("location.hash")
        page.call("Page.reload")
        page.wait("document.documentElement?.dataset.page === 'overview'")
        assert page.js("document.getElementById('along').value") == "hours"
        page.press("x")
        assert page.js(farthest) == 5000
        leave(page)


def test_a_part_is_zoomed_into_by_pointer_keys_and_buttons(chromium: Chromium, tmp_path: Path):
    """All charts show the same part; the address keeps it, and a key shows all of it again."""
    run = measured(tmp_path / "run")
    page = chromium
    kl = chart("KL")
    reward = chart("Reward")
    span = f"(({{min, max}}) => [min, max])({kl}.plot.scales.x)"
    with served(run, follow=False) as url:
        go(page, url)
        whole = page.js(span)
        drag(page, f"{kl}.plot.over", 0.5, 0.9)
        assert page.js(span) == pytest.approx([6, 10], abs=0.01), "from step to step"
        assert page.js(f"{reward}.extent?.x ?? null") in (None, page.js(span))
        part = page.js(span)
        page.call("Page.reload")
        page.wait("document.documentElement?.dataset.page === 'overview'")
        assert page.js(span) == pytest.approx(part, rel=1e-4)
        page.press("z")
        assert page.js(span) == whole and "range" not in page.js("location.hash")
        page.js(f"{kl}.node.focus()")
        for key in ("Home", "ArrowRight", "ArrowRight", "+"):
            page.press(key)
        begin, end = page.js(span)
        assert (begin, end) == pytest.approx((2.0, 6.5), abs=0.6), (
            "about the cursor, which is on the fourth step"
        )
        assert page.js(f"{kl}.readout.innerText").startswith("step 4")
        page.press("-")
        page.press("-")
        assert page.js(span) == whole
        page.js("document.querySelector('.bar [aria-label=\"Zoom in\"]').click()")
        assert page.js(span)[1] < whole[1]
        page.press("Enter")
        assert page.js("document.activeElement.classList.contains('wide')")
        assert page.js(f"{kl}.plot.height") > 300 and page.js(f"{kl}.plot.width") > 1000
        leave(page)


def test_a_metric_that_is_chosen_stays_in_the_address(chromium: Chromium, tmp_path: Path):
    """Any metric has a chart that can be pinned before all others, and be let go again."""
    run = measured(tmp_path / "run")
    page = chromium
    first = "document.querySelector('.chart h3').innerText"
    with served(run, follow=False) as url:
        go(page, url)
        assert page.js(first) == "Reward"
        page.press("/")
        page.js("document.activeElement.value = 'tokens'")
        page.js("document.activeElement.dispatchEvent(new Event('input'))")
        names = "[...document.querySelectorAll('.all .chart h3')].map((one) => one.innerText)"
        assert page.js(names) == ["batch/tokens"]
        for key in ("Tab", "Tab", "Enter"):
            page.press(key)
        pinned = "[...document.querySelectorAll('.pins h3')].map((one) => one.innerText)"
        assert page.js(pinned) == ["batch/tokens"]
        assert page.js("document.activeElement.ariaPressed") == "true"
        assert "pins=batch" in page.js("location.hash")
        page.call("Page.reload")
        page.wait("document.documentElement?.dataset.page === 'overview'")
        assert page.js(pinned) == ["batch/tokens"]
        assert page.js(painted("document.querySelector('.pins .chart').chart", "--k0")) > 100
        page.js("document.querySelector('.pins button').click()")
        assert page.js(pinned) == [] and "pins" not in page.js("location.hash")
        leave(page)


@pytest.mark.nightly
def test_a_theme_that_changes_changes_the_colours_of_the_charts(chromium: Chromium, tmp_path: Path):
    run = write_run(tmp_path / "run")
    page = chromium
    reward = chart("Reward")
    with served(run, follow=False) as url:
        page.look(1280, 800, "light")
        go(page, url)
        light = page.js(f"{reward}.colour('--k0')()")
        assert page.js(painted(reward, "--k0")) > 100
        page.press("d")
        page.press("d")
        page.wait(f"{reward}.colour('--k0')() !== {json.dumps(light)}")
        page.wait(f"{painted(reward, '--k0')} > 100")
        page.press("d")
        leave(page)
