"""A run of the launcher, followed by ``python -m realhf.view`` in a real browser from its first
step to its tokens, by keys alone: ``make test-view``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.process_family import family, gone
from tests.view.page import follow_advisory, leave, shows, text

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 400.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.whole_run,
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.skipif(PROGRAM is None, reason=ABSENT),
]
STEPS = 40
"""More than are waited for: the run goes on while it is looked at."""
OPTIONS = (
    *(
        "experiment=grpo",
        "actor.path=builtin_tiny",
        f"total_train_steps={STEPS}",
        "torch_threads=1",
    ),
    *(
        "dataset.train_bs_n_seqs=6",
        "ppo.group_size=2",
        "gen.max_new_tokens=6",
        "rollout.max_total_tokens=400",
    ),
    *(
        "rollout.retries=0",
        "evaluation.episodes_per_task=0",
        "evaluation.greedy_episodes_per_task=0",
    ),
    *(
        "monitor.progress=false",
        "monitor.rollout_tokens=1",
        "monitor.trackers=[]",
        "recover_mode=disabled",
    ),
)


@contextmanager
def process(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A module that runs until the end of the block, then is gone with all that it started."""
    with log.open("wb") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield started
    finally:
        others = family(started.pid)
        started.kill()
        started.wait()
        assert gone(others, 60.0)


def said(log: Path, pattern: str, by: subprocess.Popen[bytes]) -> str:
    """Wait until a process has written what the pattern finds."""
    end = time.monotonic() + PATIENCE_S
    while not (found := re.search(pattern, log.read_text("utf-8", "replace"))):
        assert by.poll() is None and time.monotonic() < end, log.read_text("utf-8", "replace")[
            -2000:
        ]
        time.sleep(0.05)
    return found[1]


def test_a_run_is_followed_from_its_first_step_to_its_tokens(tmp_path: Path) -> None:
    """The environment really fails at a third of its tasks, and answers are really cut off."""
    run = tmp_path / "grpo" / "followed"
    where = [f"fileroot={tmp_path}", "experiment_name=grpo", "trial_name=followed"]
    environment = f"env.path={ROOT / 'tests' / 'view' / 'flaky_environment.py'}:FlakyEcho"
    launch = tmp_path / "launch.log"
    view = tmp_path / "view.log"
    with process(launch, "realhf.launch", *OPTIONS, environment, *where) as launcher:
        end = time.monotonic() + PATIENCE_S
        while not (run / "config.yaml").exists():
            assert launcher.poll() is None and time.monotonic() < end, launch.read_text(
                "utf-8", "replace"
            )[-2000:]
            time.sleep(0.05)
        with (
            process(view, "realhf.view", str(run), "--follow", "--port", "0") as viewer,
            closing(Chromium()) as page,
        ):
            url = said(view, r"(http://127\.0\.0\.1:\d+)/", viewer)
            page.look(1280, 800)
            page.open(url + "/")
            walk(page, url, launcher)
            leave(page)


def walk(page: Chromium, url: str, launcher: subprocess.Popen[bytes]) -> None:
    shows(page, "overview")
    step = "Number(document.querySelector('.card b')?.innerText)"
    page.wait(f"{step} >= 1", PATIENCE_S)
    before = page.js(step)
    assert launcher.poll() is None, "the run has ended before it was looked at"
    page.wait(f"{step} > {before}", PATIENCE_S)
    assert text(page, "#state").startswith("The run goes on")

    page.press("4")
    shows(page, "rollouts")
    page.press("f")
    page.wait("document.querySelectorAll('.row.failed').length > 0", PATIENCE_S)
    assert set(text(page, ".row .outcome").splitlines()) == {"failure: lost"}
    page.press("ArrowDown")
    page.press("Enter")
    shows(page, "rollout")
    assert "the machine is broken" in text(page, ".facts")

    page.press("b")
    shows(page, "rollouts")
    while not page.js("document.querySelector('.head-row .reward').innerText.includes('↓')"):
        page.press("o")
    page.wait("document.querySelector('.row .outcome')?.innerText === 'no success'", PATIENCE_S)
    page.press("Home")
    page.press("Enter")
    shows(page, "rollout")
    assert "What it heard" in text(page, "#state-left") and "Play it in the echo" in text(
        page, "#again"
    )
    page.press("t")
    shows(page, "tokens")
    page.press("ArrowRight")
    page.wait("document.getElementById('token').innerText.includes('2 of')")
    page.press("b")
    shows(page, "rollout")
    page.press("g")
    page.wait("document.querySelectorAll('.talks.two .talk').length === 2")

    follow_advisory(page, "failures_rising", patience_s=PATIENCE_S)
    page.wait("document.querySelectorAll('.row.failed').length > 0", PATIENCE_S)
    asked = page.js("performance.getEntriesByType('resource').map((one) => one.name)")
    assert asked and all(one.startswith(url) for one in asked)
