"""A class with tools that is broken fails its episode, or is refused before there is one; cause and
line are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.api.environment import AssistantMessage, EnvironmentFailure, EnvironmentSpec, ToolCall
from realhf.env.loader.load import load_definition
from tests.env.loader.counter import COUNTER

Build = Callable[..., EnvironmentSpec]

RETURN = "return 1.0 if self.count == self.goal else 0.0"
END = "self.done = True"
ENDLESS = "the reward must be a finite number, not "


async def failure(spec: EnvironmentSpec) -> str:
    """The text of the failure of kind internal in which an episode ends that calls the tool
    ``stop``."""
    environment = spec.make("")
    with pytest.raises(EnvironmentFailure) as caught:
        await environment.reset({}, seed=1)
        await environment.step(AssistantMessage("", (ToolCall("stop"),)))
    assert caught.value.kind == "internal" and "\n" not in str(caught.value)
    return str(caught.value)


BROKEN: dict[str, tuple[str, str, str]] = {
    "raises when it is made": (
        "done = False",
        "def __init__(self): {}['x']",
        r"Counter\.__init__ .*KeyError: 'x' \(.*line 3\)",
    ),
    "raises in reset": (
        "self.goal, self.count,",
        "1 / 0; self.goal, self.count,",
        r"Counter\.reset \(seed 1\): ZeroDivisionError: .*mine\.py, line 6\)",
    ),
    "reset returns a number": (
        'return f"Reach {goal}."',
        "return 4",
        r"Counter\.reset .*reset must return text or None, not 4 \(.*mine\.py, line 5\)",
    ),
    "raises in get_reward": (
        RETURN,
        "return {}[1]",
        r"Counter\.get_reward .*KeyError: 1 \(.*mine\.py, line 27\)",
    ),
    "returns NaN": (
        RETURN,
        "return float('nan')",
        rf"Counter\.get_reward .*{ENDLESS}nan \(.*mine\.py, line 26\)",
    ),
    "returns infinity": (RETURN, "return 1e999", f"{ENDLESS}inf"),
    "returns a number without end": (RETURN, "return 10**400", f"{ENDLESS}a number of 1329 bits"),
    "returns text": (RETURN, "return '1'", f"{ENDLESS}'1'"),
    "returns nothing": (RETURN, "pass", f"{ENDLESS}None"),
    "returns a NaN component": (
        RETURN,
        "return {'a': float('nan')}",
        r"the reward\['a'\] must be a finite number, not nan",
    ),
    "returns components without end": (
        RETURN,
        "return {'a': 3e38, 'b': 3e38}",
        ENDLESS + r"6e\+38",
    ),
    "returns no component": (RETURN, "return {}", "named components, not an empty map"),
    "exits in a tool": (
        END,
        "raise SystemExit(2)",
        r"Counter\.stop .*SystemExit: 2 \(.*mine\.py, line 24\)",
    ),
    "has no memory left": (
        END,
        "raise MemoryError",
        r"Counter\.stop .*MemoryError:  \(.*line 24\)",
    ),
    "stops the iteration": (RETURN, "raise StopIteration", r"Counter\.get_reward .*StopIteration"),
    "cancels itself": (
        RETURN,
        "import asyncio; raise asyncio.CancelledError",
        r"Counter\.get_reward .*CancelledError",
    ),
    "counts NaN": (
        "def get_reward",
        "def metrics(self): return {'a': float('nan')}\n    def get_reward",
        r"metrics\['a'\] must be a finite number.*line 26\)",
    ),
    "makes its end a function": (
        END,
        "self.done = lambda: True",
        r"Counter\.done .*done must be true or false, which a function is not: it would end no episode",
    ),
    "counts no map": (
        "done = False\n",
        "done = False\n    metrics = 3\n",
        r"metrics must be a map from names to numbers, not 3 \(.*line 2\)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("where", ["in a thread", "on the loop"])
async def test_a_broken_class_fails_its_episode_and_names_the_line(
    build: Build, name: str, where: str
) -> None:
    """The failure is of the kind internal, never a reward; it names the class, the task and the
    line. It is the same when another method is async, so that the turn is played on the event
    loop."""
    good, bad, sentence = BROKEN[name]
    assert good in COUNTER
    text = COUNTER.replace(good, bad, 1)
    if where == "on the loop":
        text += '\n    async def later(self) -> None:\n        """Wait."""\n'
    assert re.search(sentence, await failure(build(text)))


@pytest.mark.parametrize(
    "later", ["", '\n    async def later(self) -> None:\n        """Wait."""\n']
)
async def test_an_interrupt_of_a_thread_is_a_failure_of_its_episode(
    build: Build, later: str
) -> None:
    """It cannot come from a keyboard there."""
    text = COUNTER.replace(END, "raise KeyboardInterrupt") + later
    assert re.search(
        r"Counter\.stop .*KeyboardInterrupt:  \(.*line 24\)", await failure(build(text))
    )


async def test_a_coroutine_behind_a_plain_method_is_waited_for_or_named(build: Build) -> None:
    """A class with an async method is played on the loop, where the result can be waited for;
    another one is not."""
    text = COUNTER.replace(RETURN, "return __import__('asyncio').sleep(0, 0.5)")
    assert re.search(
        r"get_reward must be written with async def \(.*line 26\)", await failure(build(text))
    )
    later = '\n    async def later(self) -> None:\n        """Wait."""\n'
    environment = build(text + later, "other.py").make("")
    await environment.reset({}, seed=1)
    assert (await environment.step(AssistantMessage(""))).reward == 0.5


REFUSED: dict[str, tuple[str, str, str]] = {
    "a tool without hints": (
        "amount: int, ",
        "amount, ",
        r"the tool Counter\.add: the argument 'amount' has no type hint \(.*mine\.py, line 9\)",
    ),
    "an end that is a static method": (
        "done = False",
        "done = staticmethod(bool)",
        r"Counter\.done is a method.*line \d+\)",
    ),
    "a tool without a docstring": (
        '"""End the game."""',
        "pass",
        r"the tool Counter\.stop: it has no docstring.*mine\.py, line 22\)",
    ),
    "an argument without a description": (
        "twice: whether",
        "thrice: whether",
        r"Counter\.add: the docstring says nothing of the argument 'twice'",
    ),
    "an argument of a strange type": (
        "amount: int",
        "amount: object",
        r"Counter\.add: argument 'amount' has the type object, which has no JSON schema",
    ),
    "an unknown type": (
        "amount: int",
        "amount: 'Integer'",
        r"Counter\.add: its type hints cannot be read: name 'Integer'",
    ),
    "any number of arguments": (
        "twice: bool = False",
        "*more: int",
        r"Counter\.add: the argument \*more: int cannot be given by name",
    ),
    "arguments of get_reward": (
        "get_reward(self)",
        "get_reward(self, completion)",
        r"Counter\.get_reward must take no arguments: .*completion",
    ),
    "options that are no dataclass": (
        "done = False",
        "Options = dict",
        r"Counter\.Options must be a dataclass",
    ),
    "a system prompt that is no text": (
        "done = False",
        "system_prompt = 3",
        r"system_prompt of Counter must be text, not 3",
    ),
    "demonstrations that need an instance": (
        "done = False",
        "def demonstrate(self, request): ...",
        r"Counter\.demonstrate must be a static method \(.*line 3\)",
    ),
    "a choice that cannot be compared": (
        "amount: int",
        "amount: __import__('typing').Literal[[1]]",
        r"the tool Counter\.add: ",
    ),
    "tasks that need an instance": (
        "done = False",
        "def tasks(self, split): ...",
        r"Counter\.tasks must be a static method \(.*line 3\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_cannot_be_played_is_refused_with_the_line(
    write: Callable[..., str], name: str
) -> None:
    good, bad, sentence = REFUSED[name]
    assert good in COUNTER
    with pytest.raises(ValueError, match=sentence):
        load_definition(write(COUNTER.replace(good, bad, 1)))


def test_a_class_without_tools_is_refused(write: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"Idle has no tool, that is no public method.*line 1\)"):
        load_definition(
            write("class Idle:\n    def reset(self): ...\n    def get_reward(self): return 1\n")
        )


async def test_the_failure_names_the_line_in_a_base_class(
    build: Build, write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is that of the author's code, in whichever of their files it stands."""
    monkeypatch.syspath_prepend(tmp_path)
    write(COUNTER.replace(RETURN, "return int('x')"), "base_of_counter.py")
    text = "from base_of_counter import Counter\n\nclass Derived(Counter):\n    pass\n"
    assert "base_of_counter.py, line 27)" in await failure(build(text))
