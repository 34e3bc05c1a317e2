"""Games of the package ``textarena``: ``env.path=textarena env.game=NAME``.

A game's end pays what the package says, between 0 and 1. Against an opponent, who plays random
legal moves, it pays 1, 0.5 or 0 for a win, a draw or a loss, and the seed decides who begins. Source:
textarena 0.7.4, whose games draw from the global generators of Python and NumPy.
"""

from __future__ import annotations

import asyncio
import copy
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from realhf.api import environment as api
from realhf.api.option import option
from realhf.base.installation import import_extra
from realhf.base.text import first_line, shorten, suggest_names
from realhf.env.loader.tasks import SeedTaskSet
from realhf.env.loader.threads import Threads
from realhf.env.loader.validation import replace_surrogates, validate_number

EXTRA = "textarena"
"""Name of the extra of this package, and of the package itself."""
_NEEDS_MORE = re.compile(r"\bnltk\b|EnglishDictionary|OpenRouter|OpenAI\(|(?<![.\w])eval\(")
"""Code that downloads word lists, asks another model, or runs text as Python."""
_BROKEN = ("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte")
"""Games whose own code fails: it swaps the arguments of calls of textarena."""
_LISTED = re.compile(r"(?:available|valid|possible) (?:moves|actions)\b(.*)", re.DOTALL | re.I)
"""The end of a message that lists the legal moves."""
_MOVE = re.compile(r"\[[^\[\]]+\]")
_OPPONENTS: Mapping[str, list[str]] = {
    "Chopsticks": [
        f"[{do} {a} {b}]" for do in ("attack", "split") for a in range(6) for b in range(6)
    ],
    "ConnectFour": [f"[col {column}]" for column in range(16)],
    "Crusade": [],
    "GameOfPureStrategy": [f"[{card}]" for card in (*range(2, 11), *"ajqk")],
    "IndianPoker": [],
    "IteratedMatchingPennies": ["[heads]", "[tails]"],
    "IteratedPrisonersDilemma": ["[cooperate]", "[defect]"],
    "IteratedRockPaperScissors": ["[rock]", "[paper]", "[scissors]"],
    "KuhnPoker": [],
    "Nim": [f"[{pile} {count}]" for pile in range(8) for count in range(1, 16)],
    "Othello": [f"[{row} {column}]" for row in range(16) for column in range(16)],
    "PigDice": [],
    "SimpleTak": [],
    "TicTacToe": [],
    "WildTicTacToe": [],
}
"""Games for two that are served, with moves from which the opponent takes a legal one where the game
does not list them."""
_MAX_MOVE_CHARS = 4096
"""Maximum number of characters of a turn that a game reads: the last ones."""
_LOCK = threading.Lock()
"""Held while a game runs, since it draws from the process's generators."""


@dataclass
class TextArenaOptions:
    """A game of the package ``textarena``, for one player or against random legal moves."""

    needs: ClassVar[str] = "game"

    game: str = option("", "Name of the game, such as TicTacToe-v0.")
    args: dict[str, Any] = option({}, "Options of the game, such as env.args.max_turns=10.")
    observation_chars: int = option(
        4000, "The policy reads at most this much of what a game says before a turn.", at_least=3
    )
    timeout_s: float = option(
        20.0,
        "A reset or a step returns within this time (s).",
        above=0,
        at_most=3600,
        on_resume="free",
    )


def build(options: TextArenaOptions) -> api.EnvironmentSpec:
    """Return the specification. Raises ValueError that names the option for a missing package, an
    unknown game, and one that cannot be played."""
    if not options.game:
        raise ValueError("env.game is missing: the name of a game of textarena")
    package = import_extra(EXTRA, EXTRA)
    registry: Mapping[str, Any] = import_extra("textarena.envs.registration", EXTRA).ENV_REGISTRY
    known = sorted(name.removesuffix("-raw") for name in registry if name.endswith("-raw"))
    name = f"env.game={options.game}"
    if options.game not in known:
        hint = suggest_names(options.game, known)
        raise ValueError(f"{name}: textarena has no such game{hint}")
    folder = str(registry[options.game].entry_point).split(".")[2]
    files = Path(str(package.__file__)).parent.joinpath("envs", folder).rglob("*.py")
    source = "\n".join(file.read_text("utf-8") for file in sorted(files))
    seats = 1 if "SinglePlayerState" in source else 2
    if _NEEDS_MORE.search(source):
        raise ValueError(
            f"{name} is not served: it downloads words, asks another model or evaluates text"
        )
    if folder in _BROKEN:
        raise ValueError(f"{name} is not served: its code fails in textarena")
    if seats == 2 and folder not in _OPPONENTS:
        served = ", ".join(_OPPONENTS)
        raise ValueError(f"{name} is not served: opponents are known for {served}")
    make = partial(package.make, f"{options.game}-raw", **options.args)
    start = partial(Game, make, seats, _OPPONENTS.get(folder, []), options.observation_chars)
    try:
        for seed in range(4 * (seats - 1) + 1):  # Some begin, others answer.
            start(seed).read()
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{name}, env.args: {problem}") from None
    threads = Threads(f"textarena {options.game}")
    return api.EnvironmentSpec(
        f"textarena {options.game}",
        lambda _: TextArenaEnvironment(start, threads, options.timeout_s),
        partial(SeedTaskSet, options.game),
    )


class Game:
    """A game from a seed on. All methods may block."""

    def __init__(self, make: Any, seats: int, moves: list[str], max_chars: int, seed: int) -> None:
        self._moves = moves
        self._max_chars = max_chars
        self._rng = random.Random(f"textarena {seed}")
        self._seat = self._rng.randrange(seats)
        self._generators = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )
        with self._own_generators():
            self._env = make()
            self._env.reset(num_players=seats, seed=seed)
            self._answer()

    def play(self, text: str) -> api.Turn:
        """Make the policy's move, and the opponent's. A text on which the game fails has lost."""
        with self._own_generators():
            try:
                self._env.step(replace_surrogates(text[-_MAX_MOVE_CHARS:]))
            except Exception as error:
                metrics = {"success": 0.0, "invalid_move": 1.0}
                problem = f"error: {type(error).__name__}"
                return api.Turn([{"role": "user", "content": problem}], True, 0.0, metrics=metrics)
            self._answer()
        state = self._env.state
        message = {"role": "user", "content": self.read()}
        if not state.done:
            return api.Turn([message])
        paid = validate_number((state.rewards or {}).get(self._seat, 0), "the reward")
        reward = min(max(paid if state.num_players == 1 else (1 + paid) / 2, 0.0), 1.0)
        invalid = float(bool(state.game_info[self._seat].get("invalid_move")))
        metrics = {"success": float(reward >= 1), "invalid_move": invalid}
        return api.Turn([message], True, reward, metrics=metrics)

    def read(self) -> str:
        """Return what the game and the opponent have said since the policy's turn."""
        state = self._env.state
        said = state.observations[self._seat]
        state.observations[self._seat] = []
        lines = [
            f"[{state.role_mapping[by]}] {text}" if by == 1 - self._seat else text
            for by, text, _ in said
            if by != self._seat
        ]
        if state.done:
            lines.append(str(state.game_info[self._seat].get("reason") or "The game is over."))
        return shorten(replace_surrogates("\n".join(lines)), self._max_chars)

    def _answer(self) -> None:
        """Make random legal moves until it is the policy's turn again."""
        while not (state := self._env.state).done and state.current_player_id != self._seat:
            said = state.observations[state.current_player_id]
            listed = [match[1] for _, text, _ in said if (match := _LISTED.search(text))]
            moves = _MOVE.findall(listed[-1]) if listed else []
            moves = moves or [*self._moves]
            self._rng.shuffle(moves)
            env = next(filter(None, map(self._try, moves)), None)
            if env is None:
                raise RuntimeError("the opponent found no legal move")
            self._env = env

    def _try(self, move: str) -> Any:
        """Return a copy of the game after the opponent's move; None if it is not legal."""
        env = copy.deepcopy(self._env)
        seat = env.state.current_player_id
        with suppress(Exception):
            env.step(move)
            if not env.state.game_info[seat]["invalid_move"] and not env.state.error_count:
                return env
        return None

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Let the game draw from generators of its own."""
        with _LOCK:
            outer = (random.getstate(), np.random.get_state())
            random.setstate(self._generators[0])
            np.random.set_state(self._generators[1])
            try:
                yield
            finally:
                self._generators = (random.getstate(), np.random.get_state())
                random.setstate(outer[0])
                np.random.set_state(outer[1])


@dataclass
class TextArenaEnvironment:
    """Environment that plays one game after another."""

    start: Callable[[int], Game]
    threads: Threads
    timeout_s: float
    """Limit in seconds of one call of the package."""
    _game: Game | None = field(default=None, init=False)

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> api.Opening:
        """Start the game of a seed. Raises EnvironmentFailure."""
        del task
        game: Game = await self._call(partial(self.start, seed))
        self._game = game
        return api.Opening([{"role": "user", "content": game.read()}])

    async def step(self, message: api.AssistantMessage) -> api.Turn:
        """Play the move. Raises EnvironmentFailure."""
        if self._game is None:
            raise api.EnvironmentFailure("lost", "there is no episode: reset comes first")
        return await self._call(partial(self._game.play, message.content))

    async def close(self) -> None:
        """Forget the game."""
        self._game = None

    async def _call(self, work: Callable[[], Any]) -> Any:
        try:
            return await asyncio.wait_for(self.threads.run(work), self.timeout_s)
        except TimeoutError:
            problem = f"textarena: no answer within env.timeout_s={self.timeout_s:g} s"
            raise api.EnvironmentFailure("timeout", problem) from None
        except api.EnvironmentFailure:
            raise
        except Exception as error:
            raise api.EnvironmentFailure("internal", f"textarena: {error}"[:2000]) from error


DEFINITION = api.EnvironmentDefinition(TextArenaOptions, build)
