"""Environments of the package ``verifiers`` through the adapter: one that ships with it, unchanged,
and one that has a tool and a rubric of two rewards. Its word lists are downloaded; here they are
written, and nothing else is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.interop.training import LIMIT_S, ROOT, STEPS, trained

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
HERE = Path(__file__).resolve().parent
WORDS = ("candle", "garden", "market", "planet", "silver", "window")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="verifiers is not installed; `make test-verifiers` installs it"
    ),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a word list, as ``NLTK_DATA`` names it."""
    folder = tmp_path_factory.mktemp("nltk") / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text("".join(f"{word}\n" for word in WORDS))
    (folder / "README").touch()
    return str(folder.parent.parent)


@pytest.fixture(scope="module")
def played(words: str) -> dict[str, Any]:
    """What came of episodes that the side environment played."""
    variables = {
        "PATH": str(PYTHON.parent),
        "PYTHONPATH": f"{ROOT}:{HERE}",
        "NLTK_DATA": words,
        "HOME": words,
    }
    done = subprocess.run(
        [PYTHON, HERE / "play_foreign.py", "verifiers"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_game_of_the_package_is_played_to_its_end(played: dict[str, Any]) -> None:
    game = played["hangman"]
    assert "Hangman" in game["read"][1] and game["done"] and not game["failure"]
    assert (
        game["reward"] == 1.0
        and game["rewards"] == {"game_reward": 1.0}
        and game["metrics"]["success"] == 1.0
    )
    assert played["few"]["done"] is False and "_" in played["few"]["read"][-1]


def test_a_tool_and_named_rewards_are_those_of_the_environment(played: dict[str, Any]) -> None:
    plain = played["plain"]
    tool = played["tool"]
    assert plain["read"] == ["Use the tool.", "Double 4."] and plain["tools"] == [
        "doubling_tools_double"
    ]
    assert (plain["reward"], plain["rewards"]) == (1.0, {"right": 0.75, "short": 0.25})
    assert tool["read"][2] == "8" and tool["read"][3].startswith(
        "error: the arguments are not JSON"
    )
    assert tool["metrics"] == {"turns": 3.0, "success": 1.0} and tool["reward"] == 1.0
    assert played["many"] == [1.0] * 6 and played["max turns"] == [10, 4]


def test_a_verifier_that_raises_and_names_that_are_wrong_have_a_reason(
    played: dict[str, Any],
) -> None:
    assert (
        played["broken"]["failure"].startswith("internal: ")
        and "the verifier broke" in played["broken"]["failure"]
    )
    missing, wrong = played["problems"]
    assert "env.name=no-such-thing" in missing and "game" in wrong
    assert played["left off"]["failure"] == "" and played["tasks left"] == 0


def test_the_splits_share_no_task(played: dict[str, Any]) -> None:
    train = played["splits"]["train"]
    held_out = played["splits"]["heldout"]
    assert len(train) + len(held_out) == 30 and held_out and not {*train} & {*held_out}


def test_five_steps_on_an_environment_of_the_package(words: str, tmp_path: Path) -> None:
    rows = trained(
        tmp_path,
        "env.path=verifiers",
        "env.name=textarena",
        "env.args.game=Hangman-v0",
        "env.most_tasks=40",
        "env.max_turns=2",
        "rollout.max_turns=4",
        "builtin.max_positions=2560",
        "rollout.max_total_tokens=2500",
        python=PYTHON,
        variables={"NLTK_DATA": words},
    )
    assert len(rows) == STEPS
    assert all(row["batch/tokens"] > 0 for row in rows)
