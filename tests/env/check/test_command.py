"""The command ``python -m realhf.env``: exit statuses, one line for a mistake, JSON, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from realhf.env.__main__ import main
from realhf.env.loader.load import parse_options

HERE = Path(__file__).parent
SOUND = f"{HERE / 'sound.py'}:Sound"
HANGS = f"{HERE / 'broken' / 'hangs_hard.py'}:Broken"
SERVED = f"{HERE / 'served.py'}:Served"
QUICK = ("--instances", "4", "--tasks", "2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "no_such"), "error: unknown environment 'no_such' (known: "),
        (("check", "no_such.py:Name"), "error: there is no file no_such.py"),
        (("check", "countdown", "levels"), "error: 'levels' is not an option: write option=value"),
        (("check", "countdown", "a=1", "env.a=2"), "error: the option 'a' is given twice"),
        (("check", "countdown", "a=[1"), "error: a: '[1' is no JSON"),
        (
            ("check", "countdown", "--instances", "0"),
            "error: argument --instances: '0' is not a whole number from 1",
        ),
        (("check",), "error: the following arguments are required: ENVIRONMENT"),
        (("fly",), "error: argument COMMAND: invalid choice: 'fly'"),
        (("list", "--all"), "error: unrecognized argument '--all'"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr().err
    assert status == 2 and told.startswith(says) and told.count("\n") == 1


def test_options_stay_text_but_for_lists_maps_and_null() -> None:
    assert parse_options(["size=3", "env.name=a=b", "rows=[1]", "none=null"]) == {
        "size": "3",
        "name": "a=b",
        "rows": [1],
        "none": None,
    }


@pytest.mark.slow
def test_a_sound_environment_ends_with_0_and_shows_every_check_and_the_tools(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", SOUND, *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"check of {SOUND}" and lines[-1].startswith("Sound: no faults, no notes, ")
    assert [line.split()[0] for line in lines[1:9]] == ["ok"] * 8
    assert "tool add: Add a number to the counter." in lines


@pytest.mark.slow
def test_a_broken_one_ends_with_1_and_json_is_nothing_but_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options may stand after flags, and one that does not exist is a fault of loading."""
    assert main(["check", SOUND, "--json", *QUICK, "size=3"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and "env.size is unknown" in found["findings"][0]["line"]
    assert found["checks"][0] == {"name": "load", "outcome": "fault", "remark": ""}


@pytest.mark.slow
def test_an_environment_with_a_service_is_played_at_an_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without one its tasks are judged, and it is said why nothing else is; ``play`` refuses it in
    a sentence."""
    assert main(["check", SERVED, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "ok       tasks            train: 1 template in 1 group" in shown
    assert (
        "demonstrations: it is played on the service some.service; start it and give its --address"
        in shown
    )
    assert main(["check", SERVED, *QUICK, "--address", "http://127.0.0.1:1"]) == 0
    assert "ok       instances        4 at once" in capsys.readouterr().out
    assert main(["play", SERVED]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: served is played on a service (some.service), which `play` does not start;"
    )
    assert said.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_ends_the_environments_process_and_says_so() -> None:
    """Status 130, one line, no traceback, and no process is left behind."""
    command = [sys.executable, "-m", "realhf.env", "check", HANGS, "--timeout", "30"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        child = None
        deadline = time.monotonic() + 60
        while child is None or child.cpu_times().user < 0.3:
            assert time.monotonic() < deadline, "the environment's process did not come up"
            child = next(iter(psutil.Process(process.pid).children()), None)
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (
        told.startswith("interrupted: the environment's process is gone")
        and "Traceback" not in told
    )
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_no_command_imports_torch() -> None:
    code = (
        "import sys; from realhf.env.__main__ import main; main(['list']); assert 'torch' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
