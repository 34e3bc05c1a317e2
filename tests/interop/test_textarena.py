"""Games of the real package textarena through the adapter: all that are served, ``env check`` of
three, and a short run on each of these."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.interop.training import LIMIT_S, ROOT, trained

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
THREE = ("TicTacToe-v0", "ConnectFour-v0", "GuessTheNumber-v0")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="textarena is not installed; `make test-verifiers` installs it",
    ),
]


def run(*arguments: str) -> str:
    """Return what a command in the side environment prints."""
    done = subprocess.run(
        [PYTHON, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(run("tests/interop/play_textarena.py").splitlines()[-1])


def test_games_repeat_and_pay_between_0_and_1(results: dict[str, Any]) -> None:
    served = results["served"]
    assert len(served) >= 30 and {*THREE, "Nim-v0", "Othello-v0-tiny", "Mastermind-v0"} <= {*served}
    for name, each in served.items():
        assert each["again"], name
        paid = [play["reward"] for play in each["plays"] if play["reward"] is not None]
        assert all(0 <= reward <= 1 for reward in paid), (name, paid)
        assert all(text.strip() for play in each["plays"] for text in play["said"][:1]), name
    two = [
        play
        for name in ("TicTacToe-v0", "Nim-v0", "KuhnPoker-v0")
        for play in served[name]["plays"]
    ]
    assert {play["reward"] for play in two} <= {0.0, 0.5, 1.0}
    openings = {play["said"][0][:16] for play in served["TicTacToe-v0"]["plays"]}
    assert openings == {"You are Player 0", "You are Player 1"}


@pytest.mark.parametrize("kind", ["invalid", "bad"])
def test_an_invalid_move_is_answered_and_then_lost(results: dict[str, Any], kind: str) -> None:
    """``bad`` has more digits than Python converts."""
    for name in ("TicTacToe-v0", "ConnectFour-v0", "Nim-v0", "GuessTheNumber-v0"):
        found = results["served"][name][kind]
        for play in found if isinstance(found, list) else [found]:
            assert (play["reward"], play["success"], play["invalid_move"]) == (0.0, 0.0, 1.0), name
            assert len(play["said"]) <= 3


def test_a_text_on_which_the_game_fails_has_lost(results: dict[str, Any]) -> None:
    """Unless the game fails on its own legal moves, too: then there is no reward."""
    fails = results["fails"]
    assert fails["some"] == fails["besides"] == fails["with a move"] == [True, 0.0, 1.0]
    assert fails["all"] == fails["listed"] == "internal"


def test_an_opponent_without_a_legal_move_has_drawn(results: dict[str, Any]) -> None:
    assert results["stranded"] == [True, 0.5, 0.0]


def test_games_that_cannot_be_played_are_refused_in_one_line(results: dict[str, Any]) -> None:
    refused = results["refused"]
    for name in ("Hangman-v0", "Wordle-v0", "WordLadder-v0", "TwentyQuestions-v0", "Debate-v0"):
        assert "downloads words, asks another model" in refused[name]
    assert "its code fails" in refused["Countdown-v0"]
    for name in ("Battleship-v0", "SecretMafia-v0"):
        assert "opponents are known for Chopsticks" in refused[name]

    assert not any("\n" in problem for problem in [*refused.values(), *results["problems"]])
    unknown, options, missing = results["problems"]
    assert (
        "env.game=TicTacTo-v0: textarena has no such game; did you mean 'TicTacToe-v0'" in unknown
    )
    assert "env.game=Nim-v0, env.args: TypeError" in options and "colour" in options
    assert "env.game is missing" in missing


def test_text_is_bounded_and_the_arguments_of_a_game_count(results: dict[str, Any]) -> None:
    assert results["bounded"] == 80
    assert results["turns"] == 4  # The opening, and the answers to three guesses.


@pytest.mark.parametrize("game", THREE)
def test_check_and_three_steps(game: str, tmp_path: Path) -> None:
    checked = run("-m", "realhf.env", "check", "textarena", f"game={game}")
    assert "ok" in checked
    rows = trained(
        tmp_path,
        "env=textarena",
        f"env.game={game}",
        "total_train_steps=3",
        "rollout.max_turns=6",
        "rollout.max_total_tokens=2500",
        "builtin.max_positions=2560",
        python=PYTHON,
    )
    assert len(rows) == 3
