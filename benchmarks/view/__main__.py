"""Measures how fast the page of ``python -m realhf.view`` shows a large run, in a headless
Chromium.

    python -m benchmarks.view [--rollouts 100000] [--repeats 3] [--json FILE]

A made-up run is written first. Every repeat starts a server of its own, which has read nothing, and opens the list of
rollouts in a new browser: *open, cold* is from the request of the page until rows are there, *open, warm* the same once
more, after the server and the browser have seen it. Then failures are filtered, rollouts are sorted by reward, and a
text that few rollouts hold is searched for to the end. *Server CPU* is that of the cold open, after the server listens.
*Page memory* is what the page's script holds. Medians and ranges, and the load of the machine beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import psutil

from benchmarks.view.made_up_run import write_run
from tests.chromium import ABSENT, PROGRAM, Chromium

START_S = 120.0
OPEN_S = 120.0
SEARCH_S = 120.0
SOUGHT = "task-123"
BY_REWARD = "document.querySelector('.head-row .reward').click()"
SHOWN = (
    "document.documentElement.dataset.page === 'rollouts' && "
    "document.querySelectorAll('.row').length > 5"
)


class Server:
    """The page's server as a child process. Call ``close`` at the end."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "realhf.view", str(folder), "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = re.search(r"http://[0-9.:]+", self._process.stdout.readline())
        if said is None:
            self.close()
            raise RuntimeError(f"the server of {folder} does not listen")
        self.url = said[0]
        with urllib.request.urlopen(self.url + "/static/app.js", timeout=START_S) as answer:
            answer.read()

    def cpu_s(self) -> float:
        """Return the CPU seconds that it has used."""
        spent = psutil.Process(self._process.pid).cpu_times()
        return spent.user + spent.system

    def close(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()


def measure(folder: Path) -> dict[str, float]:
    """Open, filter, sort and search once with a new server and browser, and return the
    measurements."""
    with closing(Server(folder)) as server, closing(Chromium()) as page:
        page.look(1280, 800)
        before = server.cpu_s()
        found = {"open, cold s": _opened(page, f"{server.url}/#/rollouts")}
        found["server CPU s"] = server.cpu_s() - before
        page.open("about:blank")
        found["open, warm s"] = _opened(page, f"{server.url}/?again#/rollouts")
        page.press("f")
        found["filter ms"] = _filter_ms(page)
        page.press("x")
        page.js(BY_REWARD)
        found["sort ms"] = _filter_ms(page)
        found["search s"] = _searched(page)
        heap = page.call("Runtime.getHeapUsage")
        found["page memory MB"] = (heap["usedSize"] + heap.get("backingStorageSize", 0)) / 1e6
        assert not page.problems, page.problems
        return found


def _opened(page: Chromium, url: str) -> float:
    began = time.perf_counter()
    page.open(url)
    page.wait(SHOWN, OPEN_S)
    return time.perf_counter() - began


def _filter_ms(page: Chromium) -> float:
    return float(page.js("document.documentElement.dataset.filterMs"))


def _searched(page: Chromium) -> float:
    page.press("/")
    page.write(SOUGHT)
    began = time.perf_counter()
    page.press("Enter")
    page.wait("document.getElementById('searched').innerText.includes('looked through')", SEARCH_S)
    spent = time.perf_counter() - began
    said = page.js("document.getElementById('searched').innerText")
    assert "; all of" in said, said
    return spent


def main() -> int:
    """Run the benchmark and print the results. Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if PROGRAM is None:
        print(ABSENT, file=sys.stderr)
        return 1
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        write_run(folder, args.rollouts)
        for _ in range(args.repeats):
            rows.append(measure(folder))
            print({name: round(value, 3) for name, value in rows[-1].items()}, flush=True)
    print(f"{args.rollouts} rollouts, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(f"{name:16} {statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})")
    if args.json:
        args.json.write_text(
            json.dumps({"rollouts": args.rollouts, "load": os.getloadavg(), "repeats": rows})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
