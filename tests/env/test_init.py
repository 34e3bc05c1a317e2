"""``init`` writes a start that works: the check finds no fault in it, its own tests pass, nothing
is overwritten."""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.api.environment import Task
from realhf.env.__main__ import main
from realhf.env.listing import describe_environment
from realhf.env.loader.load import build_environment
from realhf.env.scaffold import ENV_FORMATS
from realhf.launch.__main__ import main as launch
from realhf.rollout.black_box_agent import BlackBoxAgent, load_agent
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from tests.rollout.black_box import FakeTokens, chat

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("door", ENV_FORMATS)
def test_what_it_writes_passes_the_check_and_its_own_tests(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of its own tests is the check."""
    assert main(["init", "first_game", "--door", door]) == 0
    told = capsys.readouterr().out.splitlines()
    name = "reward" if door == "dataset" else "FirstGame"
    assert told[1].strip() == f"python -m realhf.env check first_game.py:{name}"
    assert told[2].strip() == f"python -m realhf.env play first_game.py:{name}"
    assert f"env.path=first_game.py:{name}" in told[3] and len(told) == 4
    assert launch([*shlex.split(told[3])[3:], "mode=check"]) == 0, capsys.readouterr().err
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        tests = runpy.run_path(str(tmp_path / "test_first_game.py"))
        run = [test() for called, test in tests.items() if called.startswith("test_")]
    finally:
        sys.modules.pop("first_game", None)
    assert len(run) >= 2 and "test_the_check_finds_no_fault" in tests


@pytest.mark.slow
def test_the_lines_for_another_folder_find_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent is named by its file: it was named as a module, which is found in the working
    directory alone."""
    (tmp_path / "games").mkdir()
    assert main(["init", "agent_game", "--door", "agent", "--folder", "games"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert launch([*words[3:], "mode=check"]) == 0
    [agent] = [word.partition("=")[2] for word in words if word.startswith("rollout.agent=")]
    assert load_agent(agent).__module__


@pytest.mark.slow
async def test_the_agent_plays_as_it_would_in_a_run(tmp_path: Path) -> None:
    """With the session and the endpoint of a run, up to its end and to a limit. It was written for
    another contract once, which its own tests stood in for."""
    assert main(["init", "agent_play", "--door", "agent"]) == 0
    spec = build_environment(f"{tmp_path / 'agent_play.py'}:AgentPlay", {})
    heard: list[str] = []

    def speak(prompt: str) -> str:
        heard.append(prompt)
        return str(prompt.count("<|user|>"))

    for turns, status in ((8, "finished"), (2, "max_turns")):
        limits = EpisodeLimits(max_turns=turns, max_total_tokens=2000, turn_tokens=10)
        agent = BlackBoxAgent(
            load_agent(f"{tmp_path / 'agent_play.py'}:solve"), chat(), limits, timeout_s=60
        )
        try:
            wanted = EpisodeRequest(0, Task("1", seed=9), sampling_seed=5)
            outcome = await agent.play(spec.make(""), wanted, FakeTokens(speak), 2)
        finally:
            await agent.close()
        assert outcome.valid and len(outcome.turns) == turns, outcome.message
        assert outcome.status in (status, "max_turns") and "I think of a number" in heard[0]
        assert "The number is higher" in heard[-1] or "The number is lower" in heard[-1]


@pytest.mark.nightly
@pytest.mark.slow
def test_its_tests_run_by_pytest_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a newcomer would run them, but for the check."""
    assert main(["init", "first_game"]) == 0
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not check",
        "test_first_game.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("door", ENV_FORMATS)
def test_it_is_short_and_clean(door: str, tmp_path: Path) -> None:
    """Less than 60 lines, formatted as ruff does, and without an import of this package."""
    assert main(["init", "first_game", "--door", door]) == 0
    text = (tmp_path / "first_game.py").read_text()
    assert (
        text.count("\n") < 60
        and "import realhf" not in text
        and "from realhf" not in text
        and "$" not in text
    )
    for tool in (("check", "--select", "E,F,I,UP,B,SIM"), ("format", "--check")):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *tool,
            "--isolated",
            "--line-length",
            "120",
            str(tmp_path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_nothing_is_overwritten_and_nothing_is_half_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_mine.py").write_text("mine")
    assert main(["init", "mine"]) == 2
    assert capsys.readouterr().err == "error: test_mine.py exists already; nothing was written\n"
    assert (tmp_path / "test_mine.py").read_text() == "mine" and not (tmp_path / "mine.py").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("My-Game",),
            "error: 'My-Game' is not a name: write a small letter, then letters, digits and "
            "underscores",
        ),
        (("../up",), "error: '../up' is not a name"),
        (("class",), "error: 'class' is not a name"),
        (("json",), "error: 'json' is the name of another module, which it would hide"),
        (("realhf",), "error: 'realhf' is the name of another module"),
        (
            ("mine", "--folder", "none"),
            "error: none cannot be written to: No such file or directory",
        ),
    ],
)
def test_a_name_or_folder_that_cannot_be_is_one_line(
    arguments: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(says) and told.count("\n") == 1 and [*tmp_path.iterdir()] == []


def test_what_it_writes_says_what_it_is_about(tmp_path: Path) -> None:
    """The sentence that ``list`` would show, of a file as of a registered name."""
    assert main(["init", "mine"]) == 0
    row = describe_environment(f"{tmp_path / 'mine.py'}:Mine")
    assert row["interface"] == "1 tool" and not row["error"]
