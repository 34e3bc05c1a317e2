"""The loops that the page and the examples print, typed as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.commands import ROOT, commands_of
from tests.tinker.conftest import Server

pytestmark = pytest.mark.nightly
PRINTED = "http://127.0.0.1:8800"


def ran(command, within_s=400) -> str:
    """What a program prints that ends well."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A server of the policy that the package brings: the examples' tasks are longer than the
    tests' own model."""
    running = Server(
        ROOT / "realhf/aws/training/policy", tmp_path_factory.mktemp("shipped") / "root"
    )
    yield running
    assert running.stop() == 0, running.log.read_text()[-3000:]


@pytest.mark.parametrize("example", ["examples/tinker_countdown.py", "examples/tinker_aws.py"])
def test_an_example_runs_by_the_command_that_its_docstring_gives(shipped, example):
    (command,) = [each for each in commands_of(ROOT / example) if each.program == example]
    *_, url, steps = command.arguments
    assert url == PRINTED and steps.isdigit()
    said = ran([sys.executable, example, shipped.url, "1"])
    assert re.search(r"mean re(ward|turn) \d\.\d{3}$", said, re.M)


def test_the_loop_of_the_page_runs_and_learns(server):
    page = (ROOT / "docs" / "tinker.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert PRINTED in loop
    lines = ran([sys.executable, "-c", loop.replace(PRINTED, server.url)]).splitlines()
    losses = [float(line.split()[1]) for line in lines[:10]]
    assert losses[-1] < losses[0] and lines[-1].startswith("tinker://")
