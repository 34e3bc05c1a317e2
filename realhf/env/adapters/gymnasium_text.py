"""Gymnasium environments played in text: ``env.path=gymnasium env.id=ID``. Each instance runs on
its own thread.

The policy's text selects the action: it is the action itself if the action space is Text, or names
an action if the space is Discrete. The policy reads the observation, or what the environment
renders as text. Source: Gymnasium 1.4, ``Env``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

from realhf.api.environment import (
    AssistantMessage,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Turn,
)
from realhf.api.option import option
from realhf.base.installation import import_extra
from realhf.base.plugin import describe_user_error
from realhf.env.loader.tasks import SeedTaskSet
from realhf.env.loader.threads import MAX_STUCK, Threads
from realhf.env.loader.validation import (
    BrokenContract,
    format_value,
    replace_surrogates,
    validate_number,
)

EXTRA = "gymnasium"
"""Name of the extra of this package that installs Gymnasium."""
_MAX_ACTIONS = 1000
"""Maximum number of actions of a Discrete space, because the prompt lists them all."""
_SUCCESS = ("success", "is_success")
"""Keys of ``info`` in which environments report success."""
_SOLVED = 1e-9
"""Tolerance when a return is compared with ``success_reward``."""


@dataclass
class GymnasiumOptions:
    """A Gymnasium environment whose actions are text, or a few that have names. Every seed is a
    task."""

    needs: ClassVar[str] = "id"

    id: str = option(
        "", "The environment; package.module:ID imports the module first, which registers it."
    )
    kwargs: dict[str, Any] = option(
        {}, "What gymnasium.make is given besides, such as env.kwargs.map_name=4x4."
    )
    reset_options: dict[str, Any] = option({}, "The options that each reset is given.")
    actions: list[str] = option(
        [], "The names of the actions of a Discrete space, the first one's first."
    )
    render: bool = option(
        False, "The policy reads what the environment renders (render mode ansi), not observations."
    )
    observation_chars: int = option(
        4000, "The policy reads at most this much of an observation.", at_least=1
    )
    system_prompt: str = option(
        "", "This text precedes every episode; without it, the names of the actions do."
    )
    success_reward: float = option(
        1.0,
        "An episode that terminates with at least this reward is a success, where the environment "
        "does not say.",
    )
    most_wrong: int = option(
        10, "An episode ends after this many consecutive turns without an action.", at_least=1
    )
    wrong_reward: float = option(
        -1.0,
        "The reward of a turn without an action; 0 makes it free, and better than a step that "
        "costs.",
        at_most=0,
    )
    instances: int = option(
        32,
        "At most this many instances live in one process, each with a thread.",
        at_least=1,
        on_resume="free",
    )
    deterministic: bool = option(
        True,
        "The same seed and actions bring the same answers, so that a lost episode is resumed by "
        "replay.",
    )
    timeout_s: float = option(
        60.0,
        "A reset or a step returns within this time (s).",
        above=0,
        at_most=3600,
        on_resume="free",
    )


@dataclass(frozen=True)
class Actions:
    """The actions that the policy may take: named actions of a Discrete space, or text."""

    names: tuple[str, ...] = ()
    """Names of the actions of a Discrete space; () if actions are text."""
    start: int = 0
    """Number of the first action of the Discrete space."""
    min_chars: int = 0
    """Minimum number of characters of a text."""
    max_chars: int = 0
    """Maximum number of characters of a text."""
    charset: frozenset[str] = frozenset()
    """Characters that a text may contain; empty for any."""

    def of(self, text: str) -> int | str:
        """Return the action that the policy's text selects. Raises ValueError with a message for
        the policy if the text selects none."""
        if not self.names:
            return self._text(text)
        word = text.strip().lower()
        exact = [place for place, name in enumerate(self.names) if name.lower() == word]
        places = exact or [
            place for place, name in enumerate(self.names) if _contains_name(word, name.lower())
        ]
        if len(places) != 1:
            raise ValueError(f"Answer with one of: {', '.join(self.names)}.")
        return self.start + places[0]

    def _text(self, text: str) -> str:
        """Return a valid text action. Raises ValueError for the policy."""
        text = replace_surrogates(text)
        if not self.min_chars <= len(text) <= self.max_chars:
            raise ValueError(
                f"Answer with {self.min_chars} to {self.max_chars} characters, not {len(text)}."
            )
        if self.charset and (wrong := sorted({*text} - self.charset)):
            raise ValueError(f"These characters cannot be used: {' '.join(map(repr, wrong[:20]))}.")
        return text


def build(options: GymnasiumOptions) -> EnvironmentSpec:
    """Return the specification of the environment.

    Raises ValueError that names the option if the package is missing, the environment is not
    registered or cannot be made, its spaces cannot be expressed in text, or the names do not fit
    its actions.
    """
    if not options.id:
        raise ValueError(
            "env.id is missing: the id of a Gymnasium environment, such as env.id=FrozenLake-v1"
        )
    gymnasium = import_extra("gymnasium", EXTRA)
    make = partial(_make_instance, gymnasium, options)
    instance = make()
    try:
        actions = build_actions(gymnasium, instance.action_space, options.actions)
    finally:
        instance.close()
    abandoned_threads: list[Threads] = []
    rules = GymnasiumRules(
        options.render,
        options.observation_chars,
        options.success_reward,
        options.timeout_s,
        options.most_wrong,
        options.wrong_reward,
    )
    prompt = options.system_prompt or (
        f"Answer with one of: {', '.join(actions.names)}." if actions.names else ""
    )
    return EnvironmentSpec(
        f"gymnasium {options.id}",
        lambda _: GymnasiumEnvironment(
            options.id, make, actions, rules, dict(options.reset_options), abandoned_threads
        ),
        partial(SeedTaskSet, options.id),
        system_prompt=prompt,
        concurrency=options.instances,
        deterministic=options.deterministic,
    )


@dataclass(frozen=True)
class GymnasiumRules:
    """How the environment's answers are interpreted."""

    render: bool
    """Whether the policy reads the rendered text instead of the observation."""
    max_chars: int
    """Maximum number of characters of an observation that the policy reads."""
    success_reward: float
    """Minimum return of a successful episode."""
    timeout_s: float
    """Limit in seconds of one call of the environment."""
    max_wrong_turns: int = 10
    """Number of consecutive turns that select no action after which the episode ends."""
    wrong_reward: float = -1.0
    """Reward of a turn that selects no action."""


class GymnasiumEnvironment:
    """Environment that plays one episode after another on an instance of Gymnasium, whose calls are
    all made by one thread.

    After a call that did not return in time, the next reset creates a new instance on a new thread.
    The old thread closes the old instance when the call returns; until then it is listed in
    ``abandoned_threads``, which all environments of one specification share.

    name: for messages. make: returns a new instance. reset_options: the options of each reset.
    """

    def __init__(
        self,
        name: str,
        make: Any,
        actions: Actions,
        rules: GymnasiumRules,
        reset_options: Mapping[str, Any],
        abandoned_threads: list[Threads],
    ) -> None:
        self._name = name
        self._make = make
        self._actions = actions
        self._rules = rules
        self._reset_options = reset_options
        self._abandoned_threads = abandoned_threads
        self._instance = _Instance(make, rules)
        self._thread: Threads | None = None
        self._done = True
        self._is_abandoned = False
        self._wrong_turns = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start the episode of a seed. Raises EnvironmentFailure."""
        del task
        if self._thread is None or self._is_abandoned:
            if (count := sum(each.stuck for each in self._abandoned_threads)) >= MAX_STUCK:
                raise EnvironmentFailure(
                    "capacity", f"{self._name}: {count} calls have not returned"
                )
            self._instance = _Instance(self._make, self._rules)
            self._thread = Threads(self._name, 1, idle_s=None)
            self._is_abandoned = False
        text = await self._run(
            self._thread, partial(self._instance.reset, seed, self._reset_options), "reset"
        )
        self._done = False
        self._wrong_turns = 0
        return Opening([{"role": "user", "content": text}])

    async def step(self, message: AssistantMessage) -> Turn:
        """Take the action that the text selects, and return the environment's turn. If the text
        selects no action, the turn explains that to the policy. Raises EnvironmentFailure."""
        if self._done or self._thread is None:
            raise EnvironmentFailure(
                "lost", f"{self._name}: there is no episode: reset comes first"
            )
        try:
            action = self._actions.of(message.content)
        except ValueError as error:
            self._wrong_turns += 1
            self._done = self._wrong_turns >= self._rules.max_wrong_turns
            # Without a penalty, text without an action would be better than any action that costs.
            return Turn(
                [{"role": "user", "content": str(error)}], self._done, self._rules.wrong_reward
            )
        self._wrong_turns = 0
        turn = await self._run(self._thread, partial(self._instance.step, action), "step")
        self._done = turn.done
        return turn

    async def close(self) -> None:
        """Close the instance, on its thread."""
        thread = self._thread
        self._thread = None
        self._done = True
        if thread is not None and not self._is_abandoned:
            try:
                await self._run(thread, self._instance.close, "close")
            finally:
                thread.stop()

    async def _run(self, thread: Threads, work: Callable[[], Any], call_name: str) -> Any:
        """Run ``work`` on the thread and return its result. Raises EnvironmentFailure, also if
        ``work`` does not return in time."""
        if self._is_abandoned:
            raise EnvironmentFailure(
                "lost", f"{self._name}: the call before has not returned; reset starts a new one"
            )
        limit_s = self._rules.timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await thread.run(
                    partial(self._call_on_thread, work, call_name), after=self._instance.close
                )
        except EnvironmentFailure:
            raise
        except asyncio.CancelledError:
            self._give_up(thread)
            raise
        except Exception as error:
            if not (isinstance(error, TimeoutError) and deadline.expired()):
                raise EnvironmentFailure(
                    "internal", f"{self._name}: {call_name}: {_describe_error(error)}"
                ) from error
            self._give_up(thread)
            raise EnvironmentFailure(
                "timeout",
                f"{self._name}: {call_name} has not returned within env.timeout_s={limit_s:g} s",
            ) from None

    def _call_on_thread(self, work: Callable[[], Any], call_name: str) -> Any:
        """Run a call on the thread. SystemExit and similar exceptions are converted to
        EnvironmentFailure here, because on the event loop they could not be distinguished from the
        loop's own."""
        try:
            return work()
        except Exception:
            raise
        except BaseException as error:
            problem = f"{self._name}: {call_name} raised {type(error).__name__}: {error}"
            raise EnvironmentFailure("internal", problem) from error

    def _give_up(self, thread: Threads) -> None:
        """Abandon a thread whose call has not returned, and forget the abandoned threads that have
        ended."""
        self._is_abandoned = True
        self._abandoned_threads[:] = [
            *(each for each in self._abandoned_threads if each.stuck),
            thread,
        ]
        thread.stop()


class _Instance:
    """One Gymnasium instance; only its own thread uses it."""

    def __init__(self, make: Any, rules: GymnasiumRules) -> None:
        self._make = make
        self._rules = rules
        self._env: Any = None
        self._return = 0.0

    def reset(self, seed: int, reset_options: Mapping[str, Any]) -> str:
        """Start an episode; return what the policy reads."""
        if self._env is None:
            self._env = self._make()
        self._return = 0.0
        observation, _ = self._env.reset(seed=seed, options=dict(reset_options) or None)
        return self._format_observation(observation)

    def step(self, action: int | str) -> Turn:
        """Take an action. Raises BrokenContract for a reward that is not finite."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        number = validate_number(reward, "the reward")
        self._return += number
        done = bool(terminated or truncated)
        reported_success = next(
            (info[key] for key in _SUCCESS if isinstance(info, Mapping) and key in info), None
        )
        enough = bool(terminated) and self._return >= self._rules.success_reward - _SOLVED
        success = float(done and (enough if reported_success is None else bool(reported_success)))
        return Turn(
            [{"role": "user", "content": self._format_observation(observation)}],
            done,
            number,
            metrics={"success": success},
        )

    def close(self) -> None:
        """Close the instance if it was created."""
        env = self._env
        self._env = None
        if env is not None:
            env.close()

    def _format_observation(self, observation: Any) -> str:
        """Return the text for the policy: the observation or the rendered text, shortened. Raises
        BrokenContract if the environment rendered something other than text."""
        content = self._env.render() if self._rules.render else observation
        if self._rules.render and not isinstance(content, str):
            raise BrokenContract(
                f"render returned no text but {format_value(content)}; env.render=false shows observations"
            )
        text = replace_surrogates(
            without_escapes(content) if isinstance(content, str) else _observation_to_json(content)
        )
        limit = self._rules.max_chars
        return (
            text
            if len(text) <= limit
            else f"{text[:limit]}... ({len(text) - limit} more characters)"
        )


_ESCAPE = re.compile(
    r"\x1b(?:\[(?P<codes>(?:[0-9]{0,3};){0,32}[0-9]{0,3})m|\[[0-?]*[ -/]*[@-~]"
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])?"
)
"""Escape sequences of a terminal. Source: ECMA-48, 5.4 (control sequences), 8.3.89 (OSC) and
8.3.117 (SGR, whose ``codes`` set the appearance of text)."""
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""Names of the colours by the last digit of their SGR code."""
_HIGHLIGHTED = "highlighted"
"""Appearance of text that is inverted or has a background colour."""


def without_escapes(text: str) -> str:
    """Replace the terminal escape sequences in ``text`` with readable marks: highlighted text is
    put in brackets, like the agent's position in ``[S]FFF``, and coloured text follows the name of
    its colour, like ``(blue:R)``."""
    parts = list[str]()
    appearance = ""
    start = 0
    for escape in _ESCAPE.finditer(text):
        parts.append(_mark_appearance(text[start : escape.start()], appearance))
        start = escape.end()
        if (codes := escape["codes"]) is not None:
            appearance = _apply_sgr_codes(codes, appearance)
    parts.append(_mark_appearance(text[start:], appearance))
    return "".join(parts)


def _mark_appearance(text: str, appearance: str) -> str:
    """Return a piece of text with a mark for its appearance."""
    if not text or not appearance:
        return text
    return f"[{text}]" if appearance == _HIGHLIGHTED else f"({appearance}:{text})"


def _apply_sgr_codes(codes: str, appearance: str) -> str:
    """Return the appearance of text after an SGR sequence with these codes: a colour,
    ``_HIGHLIGHTED``, or "" for normal text."""
    numbers = iter([int(code or 0) for code in codes.split(";")])
    for code in numbers:
        # A colour given by its index (5) or its RGB values (2).
        if code in (
            38,
            48,
        ):
            for _ in range({5: 1, 2: 3}.get(next(numbers, 0), 0)):
                next(numbers, 0)
        if code == 0 or code in ((27, 49) if appearance == _HIGHLIGHTED else (38, 39)):
            appearance = ""
        elif code == 7 or 40 <= code <= 48 or 100 <= code <= 107:
            appearance = _HIGHLIGHTED
        elif appearance != _HIGHLIGHTED and (30 <= code <= 37 or 90 <= code <= 97):
            appearance = _COLOURS[code % 10]
    return appearance


def build_actions(gymnasium: ModuleType, space: Any, names: Sequence[str]) -> Actions:
    """Return the actions of an action space. Raises ValueError for a space other than Text and
    Discrete, and for names that do not fit it."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Text):
        if names:
            raise ValueError("env.actions has no effect: the actions of this environment are text")
        return Actions(
            (), 0, int(space.min_length), int(space.max_length), frozenset(space.character_set)
        )
    if not isinstance(space, spaces.Discrete):
        raise ValueError(
            f"its action space is {space}; only Text and Discrete ones can be written as text"
        )
    count = int(space.n)
    if count > _MAX_ACTIONS:
        raise ValueError(f"it has {count} actions; at most {_MAX_ACTIONS} can be named")
    if names and len(names) != count:
        raise ValueError(f"env.actions names {len(names)} actions, the environment has {count}")
    action_names = tuple(name.strip() for name in names) or tuple(
        str(int(space.start) + place) for place in range(count)
    )
    if not all(action_names) or len({name.lower() for name in action_names}) < count:
        raise ValueError(
            f"env.actions must be {count} different words, not {', '.join(map(repr, names))}"
        )
    return Actions(action_names, int(space.start))


def _contains_name(text: str, name: str) -> bool:
    """Return whether a text contains a name as separate words."""
    place = text.find(name)
    while place >= 0:
        around = text[place - 1 : place] + text[place + len(name) : place + len(name) + 1]
        if not any(character.isalnum() or character == "_" for character in around):
            return True
        place = text.find(name, place + 1)
    return False


def _make_instance(gymnasium: ModuleType, options: GymnasiumOptions) -> Any:
    """Return a new instance. Raises ValueError that names the option."""
    more = {"render_mode": "ansi"} if options.render else {}
    try:
        return gymnasium.make(options.id, **{**options.kwargs, **more})
    except Exception as error:
        line = " ".join(str(error).split())[:600]
        raise ValueError(
            f"env.id={options.id}: it cannot be made: {type(error).__name__}: {line}"
        ) from error


def _observation_to_json(observation: Any) -> str:
    """Return an observation as JSON; arrays become lists. Raises BrokenContract."""

    def to_list(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(type(value).__name__)

    try:
        return json.dumps(observation, default=to_list, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BrokenContract(
            f"the observation has no plain form: {error}: {format_value(observation)}"
        ) from None


def _describe_error(error: BaseException) -> str:
    """Return an error as text, with the file in which it was raised."""
    trace = error.__traceback__
    file = ""
    while trace is not None:
        trace, file = trace.tb_next, trace.tb_frame.f_code.co_filename
    return describe_user_error(error, file)


DEFINITION = EnvironmentDefinition(GymnasiumOptions, build)
