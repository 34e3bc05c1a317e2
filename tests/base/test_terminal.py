"""A program goes on when what it prints to is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from rich.console import Console
from realhf.base.terminal import guard_output

with guard_output() as terminal:
    terminal.on_loss(lambda reason: Path(sys.argv[1]).write_text(reason))
    for number in range(20_000):
        print(number)
    Console().print("a table")
    print("an error", file=sys.stderr)
    Path(sys.argv[2]).write_text("done")
sys.exit(3)
"""


def finished(tmp_path: Path, **streams: object) -> tuple[int, str, bool]:
    """Run the program; return its exit code, the note about the loss, and whether it came to its
    end."""
    note = tmp_path / "note"
    done = tmp_path / "done"
    command = [sys.executable, "-c", PROGRAM, str(note), str(done)]
    code = subprocess.run(command, timeout=60, check=False, **streams).returncode  # type: ignore[call-overload]
    return code, note.read_text() if note.exists() else "", done.exists()


@pytest.mark.slow
def test_a_closed_pipe_is_noted_and_the_exit_code_is_the_program_s(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        found = finished(tmp_path, stdout=writer, stderr=writer)
    finally:
        os.close(writer)
    assert found == (3, "stdout is lost: Broken pipe", True)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="this system has no device that is always full"
)
def test_a_full_disk_is_noted(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        assert finished(tmp_path, stdout=full, stderr=full) == (
            3,
            "stdout is lost: No space left on device",
            True,
        )


@pytest.mark.slow
def test_a_stream_that_is_closed_from_the_start_is_noted(tmp_path: Path) -> None:
    note = tmp_path / "note"
    done = tmp_path / "done"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    line = f"exec {sys.executable} {program} {note} {done} >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], timeout=60, check=False).returncode == 3
    assert (note.read_text(), done.read_text()) == ("stdout is lost: Bad file descriptor", "done")


@pytest.mark.slow
def test_a_stream_that_takes_all_is_left_as_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert finished(tmp_path) == (3, "", True)
    out, error = capfd.readouterr()
    assert out.splitlines()[-2:] == ["19999", "a table"]
    assert error == "an error\n"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["realhf", "realhf.launch"])
def test_a_command_whose_reader_has_gone_ends_well(module: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=100,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
