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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from realhf.api import environment as api
from realhf.api.option import option
from realhf.base import process_clock
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
_PLAIN_TEXT = "I do not know."
"""A text that no game has reason to fail on."""
_WAITED_SHARE = 0.9
"""Share of a call's limit after which it no longer waits for the games of others."""


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
        "A reset or a step takes at most this time (s), after it has waited for other games of the "
        "process for as long.",
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
            with _ALONE.hold(options.game, options.timeout_s, options.timeout_s):
                start(seed).read()
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{name}, env.args: {problem}") from None
    threads = Threads(f"textarena {options.game}")
    return api.EnvironmentSpec(
        f"textarena {options.game}",
        lambda _: TextArenaEnvironment(options.game, start, threads, options.timeout_s),
        partial(SeedTaskSet, options.game),
    )


class Alone:
    """Lets one game at a time run, since games draw from the process's generators.

    A call that does not return keeps them, for it would go on drawing from those of a later game.
    So all calls fail at once while it runs, and are served again if it returns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: tuple[str, float] | None = None
        """The game that runs, and when its call ends at the latest."""

    def check(self) -> None:
        """Raise EnvironmentFailure that names the game if a call runs for longer than it may."""
        holder = self._holder
        if holder is not None and process_clock.now() > holder[1]:
            problem = f"textarena: a call of {holder[0]} does not return, so no game can be played"
            raise api.EnvironmentFailure("capacity", problem)

    @contextmanager
    def hold(self, name: str, wait_s: float, limit_s: float) -> Iterator[None]:
        """Wait for other games, then keep them waiting. Raises EnvironmentFailure after ``wait_s``.

        limit_s: how long the game ``name`` may take.
        """
        if not self._lock.acquire(timeout=max(wait_s, 0.0)):
            self.check()
            raise api.EnvironmentFailure(
                "capacity", f"textarena: {name} waited {wait_s:.3g} s for other games"
            )
        try:
            self._holder = (name, process_clock.now() + limit_s)
            yield
        finally:
            self._holder = None
            self._lock.release()


_ALONE = Alone()


class Game:
    """A game from a seed on. All methods may block; ``_ALONE`` is held while one runs."""

    def __init__(self, make: Any, seats: int, moves: list[str], max_chars: int, seed: int) -> None:
        self._moves = moves
        self._max_chars = max_chars
        self._rng = random.Random(f"textarena {seed}")
        self._seat = self._rng.randrange(seats)
        self._listed: list[str] = []
        """The moves that the game named when the policy last read it."""
        self._generators = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )
        with self._own_generators():
            self._env = make()
            self._env.reset(num_players=seats, seed=seed)
            if not self._answer():
                raise RuntimeError("the opponent found no legal move")

    def play(self, text: str) -> api.Turn:
        """Make the policy's move, and the opponent's. A text on which the game fails has lost; an
        opponent without a legal move has drawn. Raises EnvironmentFailure for a game that fails
        whatever the move."""
        text = replace_surrogates(text[-_MAX_MOVE_CHARS:])
        with self._own_generators():
            before = copy.deepcopy(self._env)
            try:
                self._env.step(text)
            except Exception as error:
                if not self._is_to_blame(text, before):
                    problem = f"textarena: {type(error).__name__}: {first_line(error)}"
                    raise api.EnvironmentFailure("internal", problem[:2000]) from error
                metrics = {"success": 0.0, "invalid_move": 1.0}
                problem = f"error: {type(error).__name__}"
                return api.Turn([{"role": "user", "content": problem}], True, 0.0, metrics=metrics)
            has_answered = self._answer()
        state = self._env.state
        message = {"role": "user", "content": self.read()}
        if not has_answered:
            message["content"] = "The opponent has no legal move: a draw."
            metrics = {"success": 0.0, "invalid_move": 0.0}
            return api.Turn([message], True, 0.5, metrics=metrics)
        if not state.done:
            return api.Turn([message])
        paid = validate_number((state.rewards or {}).get(self._seat, 0), "the reward")
        reward = min(max(paid if state.num_players == 1 else (1 + paid) / 2, 0.0), 1.0)
        invalid = float(bool(state.game_info[self._seat].get("invalid_move")))
        metrics = {"success": float(reward >= 1), "invalid_move": invalid}
        return api.Turn([message], True, reward, metrics=metrics)

    def _is_to_blame(self, text: str, before: Any) -> bool:
        """Return whether the game failed because of the policy's text, not of its own code."""
        state = self._env.state
        if state.error_count > before.state.error_count or state.game_info[self._seat].get(
            "invalid_move"
        ):
            return True  # The game had refused the move already.
        # A text that a parser fails on must not void a bad episode. So the policy is to blame if
        # the game, from where it was, bears a move that it listed: the one in the text if there is
        # one, since that move alone may meet a bug. A game that lists none has to take one of the
        # opponent's moves or, if none are known, to bear a plain text.
        if self._listed or not self._moves:
            chosen = [move for move in self._listed if move in text][-1:]
            return any(_bears(before, move) for move in chosen or self._listed or [_PLAIN_TEXT])
        return any(self._try(move, before) is not None for move in self._moves)

    def read(self) -> str:
        """Return what the game and the opponent have said since the policy's turn."""
        state = self._env.state
        said = state.observations[self._seat]
        state.observations[self._seat] = []
        self._listed = _find_listed(text for by, text, _ in said if by != self._seat)
        lines = [
            f"[{state.role_mapping[by]}] {text}" if by == 1 - self._seat else text
            for by, text, _ in said
            if by != self._seat
        ]
        if state.done:
            lines.append(str(state.game_info[self._seat].get("reason") or "The game is over."))
        return shorten(replace_surrogates("\n".join(lines)), self._max_chars)

    def _answer(self) -> bool:
        """Make random legal moves until it is the policy's turn again. Return False if the opponent
        has none."""
        while not (state := self._env.state).done and state.current_player_id != self._seat:
            moves = _find_listed(text for _, text, _ in state.observations[state.current_player_id])
            moves = moves or [*self._moves]
            self._rng.shuffle(moves)
            env = next(filter(None, (self._try(move, self._env) for move in moves)), None)
            if env is None:
                return False
            self._env = env
        return True

    def _try(self, move: str, env: Any) -> Any:
        """Return a copy of the game ``env`` after a move; None if it is not legal."""
        env = copy.deepcopy(env)
        seat = env.state.current_player_id
        with suppress(Exception):
            env.step(move)
            if not env.state.game_info[seat]["invalid_move"] and not env.state.error_count:
                return env
        return None

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Let the game draw from generators of its own."""
        outer = (random.getstate(), np.random.get_state())
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        try:
            yield
        finally:
            self._generators = (random.getstate(), np.random.get_state())
            random.setstate(outer[0])
            np.random.set_state(outer[1])


def _bears(env: Any, text: str) -> bool:
    """Return whether a copy of a game takes or refuses a text without failing."""
    try:
        copy.deepcopy(env).step(text)
    except Exception:
        return False
    return True


def _find_listed(texts: Iterable[str]) -> list[str]:
    """Return the legal moves that the last of the texts with a list names."""
    listed = [match[1] for text in texts if (match := _LISTED.search(text))]
    return _MOVE.findall(listed[-1]) if listed else []


@dataclass
class TextArenaEnvironment:
    """Environment that plays one game after another."""

    name: str
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
        """Run ``work`` alone. Its limit counts from when no other game runs."""
        _ALONE.check()
        loop = asyncio.get_running_loop()
        waits_until = process_clock.now() + _WAITED_SHARE * self.timeout_s

        def run_alone() -> Any:
            with _ALONE.hold(self.name, waits_until - process_clock.now(), self.timeout_s):
                loop.call_soon_threadsafe(restart)
                return work()

        def restart() -> None:
            with suppress(RuntimeError):  # The call is over already.
                limit.reschedule(loop.time() + self.timeout_s)

        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await self.threads.run(run_alone)
        except TimeoutError:
            problem = f"textarena: no answer within env.timeout_s={self.timeout_s:g} s"
            raise api.EnvironmentFailure("timeout", problem) from None
        except api.EnvironmentFailure:
            raise
        except Exception as error:
            raise api.EnvironmentFailure("internal", f"textarena: {error}"[:2000]) from error


DEFINITION = api.EnvironmentDefinition(TextArenaOptions, build)
