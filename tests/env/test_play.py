"""A game by hand: what a typed line means, turns and rewards are shown, the environment is
closed."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from realhf.env.__main__ import main
from realhf.env.play import CALL, HELP, NEXT, QUIT, RESTART, SAY, TOOLS, TypedLine, read_line

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
}
KNOWN = [
    {"type": "function", "function": {"name": "read", "description": "Read.", "parameters": SCHEMA}}
]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("hello there", TypedLine(SAY, "hello there")),
        ("", TypedLine(SAY, "")),
        ("//etc", TypedLine(SAY, "/etc")),
        ("/help", TypedLine(HELP)),
        ("/tools", TypedLine(TOOLS)),
        ("/restart", TypedLine(RESTART)),
        ("/next ", TypedLine(NEXT)),
        ("/quit", TypedLine(QUIT)),
        ("/tool read", TypedLine(CALL, name="read")),
        (
            "/tool read path=7 lines=7",
            TypedLine(CALL, name="read", arguments={"path": "7", "lines": 7}),
        ),
        (
            "/tool read path='a b' other=x",
            TypedLine(CALL, name="read", arguments={"path": "a b", "other": "x"}),
        ),
        (
            '/tool read {"lines": "seven"}',
            TypedLine(CALL, name="read", arguments={"lines": "seven"}),
        ),
        ("/tool other list=[1,2]", TypedLine(CALL, name="other", arguments={"list": [1, 2]})),
    ],
)
def test_what_a_line_means(line: str, meant: TypedLine) -> None:
    assert read_line(line, KNOWN) == meant


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/fly", "'/fly' is not a command"),
        ("/quit now", "'/quit now' is not a command"),
        ("/tool", "say which tool"),
        ("/tool read path", "'path' is not an argument: write key=value"),
        ("/tool read lines=many", "lines is of the type integer, and 'many' is none"),
        ("/tool read path='a", "the arguments cannot be read: no closing quotation"),
        ('/tool read {"path": ', "the arguments are no JSON"),
    ],
)
def test_a_line_that_means_nothing_is_a_sentence(line: str, says: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_line(line, KNOWN)
    assert str(raised.value).startswith(says)


SOUND = f"{Path(__file__).parent / 'check' / 'sound.py'}:Sound"
OWN = '''
"""Two environments for the tests of the game."""

import time


class Odd:
    """Says what it should not, and what it should."""

    async def reset(self, task, *, seed):
        self.turns = 0
        return {"messages": [{"role": "user", "content": "evil \\x1b[31m text"}]}

    async def step(self, message):
        self.turns += 1
        if message.content == "raise":
            raise KeyError("lost")
        if message.content == "wait":
            time.sleep(60)
        final = message.content == "final"
        return {
            "messages": [{"role": "user", "content": f"you said {message.content!r}"}],
            "reward": 0.5,
            "rewards": {"style": 0.25},
            "done": final,
            "final": final,
        }

    async def close(self):
        print("closed")
'''


@pytest.fixture
def odd(tmp_path: Path) -> str:
    file = tmp_path / "odd_ones.py"
    file.write_text(OWN)
    return f"{file}:Odd"


def played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str, *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    status = main(["play", *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_a_game_with_tools_is_played_from_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call of the right amount solves the task; what is said afterwards is refused."""
    lines = "/tools\nhello\n/tool add amount=3\n/tool fly\nmore\n"
    status, shown = played(monkeypatch, capsys, lines, SOUND, "--task", "below ten", "--seed", "2")
    assert status == 0
    for text in (
        "── Sound, task below ten/4, group small, split train, seed 2",
        "system: Use the tool.",
        "user: The counter is at 0. Bring it to ",
        "tool add(amount: integer)",
        "> hello",
        "user: Call the tool.",
        "tool: The counter is at 3.",
        "there is no tool 'fly'; it is called all the same",
        "tool: error: add takes a whole number",
    ):
        assert text in shown, text


def test_the_end_is_shown_with_the_return(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The held-out task of seed 0 is drawn again after /restart."""
    lines = (
        "".join(f"/tool add amount={amount}\n" for amount in [1] * 8)
        + "late\n/restart\n/quit\nnever\n"
    )
    status, shown = played(
        monkeypatch,
        capsys,
        lines,
        SOUND,
        "--split",
        "heldout",
        "--seed",
        "0",
        "--task",
        "below ten",
    )
    assert status == 0 and "the episode is over, its return is " in shown
    assert shown.count("── Sound, task below ten/1, group small, split heldout, seed 0") == 2
    assert "> late" not in shown or "the episode is over: /restart begins it again" in shown
    assert "> never" not in shown


def test_rewards_are_summed_and_a_final_one_replaces_them(
    odd: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that ends with a backslash goes on; control characters are shown and not obeyed; the
    end closes."""
    _, shown = played(monkeypatch, capsys, "a\\\nb\n\nfinal\n", odd)
    assert "evil \u241b[31m text" in shown and "\x1b" not in shown
    assert "you said 'a\\nb'" in shown
    assert (
        "reward +0.5  style +0.25  return 0.5" in shown
        and "reward +0.5  style +0.25  return 1" in shown
    )
    assert "reward +0.5 (final)  style +0.25  return 0.5" in shown
    assert shown.rstrip().endswith("closed")


def test_an_environment_that_raises_is_said_in_a_line_and_can_be_begun_again(
    odd: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, shown = played(monkeypatch, capsys, "raise\nhello\n/restart\nhello\n", odd)
    assert (
        "the environment failed: step raised KeyError: 'lost', at " in shown
        and ":17 in step" in shown
    )
    assert "the episode is over: /restart begins it again" in shown
    assert shown.count("you said 'hello'") == 1 and status == 0


def test_an_environment_that_failed_last_ends_with_1(
    odd: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert played(monkeypatch, capsys, "raise\n", odd)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no_such",), "error: unknown environment 'no_such'"),
        (
            (SOUND, "--task", "below tem"),
            "error: the split 'train' has no task 'below tem'; did you mean 'below ten'?",
        ),
        ((SOUND, "--seed", "x"), "error: argument --seed: invalid int value: 'x'"),
        ((SOUND, "size=3"), f"error: {SOUND}: env.size is unknown"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        status, shown = played(monkeypatch, capsys, "", *arguments)
    except SystemExit as end:
        status = end.code
        shown = capsys.readouterr().err
    assert status == 2 and shown.startswith(says) and shown.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_closes_the_environment(odd: str) -> None:
    """At the prompt of a terminal, with its line editing: status 130, and no traceback."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "realhf.env", "play", odd]
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    seen = bytearray()
    reader = threading.Thread(target=read_all, args=(leader, seen), daemon=True)
    reader.start()
    try:
        wait_for(seen, b"> ")
        os.write(leader, b"hello\n")
        wait_for(seen, b"you said 'hello'")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    reader.join(60)
    assert b"interrupted" in seen and b"closed" in seen and b"Traceback" not in seen
    os.close(leader)


@pytest.mark.slow
def test_ctrl_c_while_the_environment_blocks_ends_within_seconds(odd: str) -> None:
    """It cannot be closed any more, which is said."""
    command = [sys.executable, "-m", "realhf.env", "play", odd]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdin is not None and process.stdout is not None
    seen = bytearray()
    reader = threading.Thread(target=read_all, args=(process.stdout.fileno(), seen), daemon=True)
    reader.start()
    try:
        process.stdin.write(b"wait\n")
        process.stdin.flush()
        wait_for(seen, b"> wait")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    reader.join(60)
    assert b"interrupted" in seen and b"it blocks the event loop and cannot be closed" in seen
    assert b"Traceback" not in seen
    process.stdin.close()
    process.stdout.close()


def read_all(leader: int, seen: bytearray) -> None:
    try:
        while found := os.read(leader, 4096):
            seen += found
    except OSError:
        pass


def wait_for(seen: bytearray, text: bytes) -> None:
    deadline = time.monotonic() + 60
    while text not in seen:
        assert time.monotonic() < deadline, bytes(seen)
        time.sleep(0.02)
