"""Plays the games of textarena that the adapter serves, and prints what came of it as JSON. Runs in
an environment that has the package."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import textarena as ta
from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv
from textarena.envs.registration import ENV_REGISTRY
from textarena.envs.TicTacToe.env import TicTacToeEnv

from realhf.api.environment import AssistantMessage, EnvironmentFailure, EnvironmentSpec
from realhf.env.adapters.textarena import Game
from realhf.env.loader.load import build_environment

MOVES = {
    "ConnectFour": [f"[col {n}]" for n in range(7)],
    "GuessTheNumber": [f"[{n}]" for n in range(1, 21)],
    "Mastermind": ["[1 2 3 4]", "[2 3 4 5]", "[3 4 5 6]", "[4 5 6 1]"],
    "Nim": [f"[{pile} {n}]" for pile in range(3) for n in range(1, 4)],
    "Chopsticks": [f"[attack {a} {b}]" for a in range(2) for b in range(2)],
}
"""Moves to draw from in games that do not list them."""


async def play(spec: EnvironmentSpec, seed: int, mover: int, text: str = "") -> dict[str, Any]:
    """Play one game with random moves, or with one ``text`` in all turns."""
    moves = MOVES.get(spec.name.split()[1].partition("-")[0], ["[roll]", "[rock]", "[heads]"])
    rng = random.Random(mover)
    env = spec.make("")
    read = (await env.reset({}, seed=seed)).messages[0]["content"]
    said = [read]
    for _ in range(400):
        random.random()  # Others draw from the generator that the games use, too.
        listed = re.findall(r"\[[^\[\]\n]+\]", re.split(r"(?i)(?:moves|actions)", read)[-1])
        turn = await env.step(AssistantMessage(text or rng.choice(listed or moves)))
        read = turn.messages[0]["content"]
        said.append(read)
        if turn.done:
            return {"said": said, "reward": turn.reward, **turn.metrics}
    return {"said": said, "reward": None}


class Failing(GuessTheNumberEnv):
    """A game that can take no text."""

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        raise ZeroDivisionError(action)


class FailingOnSome(GuessTheNumberEnv):
    """A game that can take no text of some."""

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        if "crash" in action:
            raise ZeroDivisionError(action)
        return super().step(action)


class FailingOnCell(TicTacToeEnv):
    """A game with a bug in one of the moves that it lists."""

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        if "crash" in action or "[4]" in action:
            raise ZeroDivisionError(action)
        return super().step(action)


def blame(make: Callable[[], Any], seats: int, moves: list[str], text: str) -> list[Any] | str:
    """Return what a text that a game fails on pays, or as what it fails."""
    game = Game(make, seats, moves, 400, 0)
    game.read()
    try:
        turn = game.play(text)
    except EnvironmentFailure as error:
        return error.kind
    return [turn.done, turn.reward, turn.metrics["invalid_move"]]


def strand() -> list[Any]:
    """Return what a game pays in which the opponent has no legal move."""
    game = Game(partial(ta.make, "ConnectFour-v0-raw"), 2, [f"[col {n}]" for n in range(7)], 400, 0)
    game._moves = ["[col 99]"]
    turn = game.play("[col 3]")
    return [turn.done, turn.reward, turn.metrics["success"]]


async def main() -> None:
    served: dict[str, Any] = {}
    refused: dict[str, str] = {}
    games: dict[str, str] = {}
    for name in ENV_REGISTRY:
        if name.endswith("-raw"):
            games.setdefault(str(ENV_REGISTRY[name].entry_point), name.removesuffix("-raw"))
    for name in games.values():
        try:
            spec = build_environment("textarena", {"game": name})
        except ValueError as error:
            refused[name] = str(error)
            continue
        plays = [await play(spec, seed, mover=seed) for seed in range(4)]
        served[name] = {
            "plays": plays,
            "again": [await play(spec, seed, mover=seed) for seed in range(4)] == plays,
            "invalid": [await play(spec, seed, 0, "I do not know.") for seed in range(2)],
            "bad": await play(spec, 0, 0, f"[{'9' * 5000}] [col {'9' * 5000}]"),
        }
    short = build_environment("textarena", {"game": "TicTacToe-v0", "observation_chars": 80})
    few = build_environment("textarena", {"game": "Mastermind-v0", "args": {"max_turns": 3}})
    problems = []
    for options in (
        {"game": "TicTacTo-v0"},
        {"game": "Nim-v0", "args": {"colour": 1}},
        {"game": ""},
    ):
        try:
            build_environment("textarena", options)
        except ValueError as error:
            problems.append(str(error))
    bounded = max(len(each) for each in (await play(short, 1, 1))["said"])
    turns = max([len((await play(few, seed, seed))["said"]) for seed in range(8)])
    fails = {
        "all": blame(Failing, 1, [], "[3]"),
        "some": blame(FailingOnSome, 1, [], "crash"),
        "listed": blame(FailingOnCell, 2, [], "[4]"),
        "besides": blame(FailingOnCell, 2, [], "crash"),
        "with a move": blame(FailingOnCell, 2, [], "[8] crash"),
    }
    results = {
        "fails": fails,
        "stranded": strand(),
        "served": served,
        "refused": refused,
        "problems": problems,
    }
    print(json.dumps({**results, "bounded": bounded, "turns": turns}))


if __name__ == "__main__":
    asyncio.run(main())
