"""Gymnasium environments in words: what a text means as an action, threads and deadlines of
instances, failures."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from realhf.api.environment import AssistantMessage, EnvironmentFailure
from realhf.env.adapters.gymnasium_text import (
    Actions,
    GymnasiumEnvironment,
    GymnasiumRules,
    build_actions,
    without_escapes,
)
from realhf.env.loader.load import build_environment
from realhf.env.loader.threads import MAX_STUCK, Threads

WAYS = Actions(("left", "right", "stay put"), start=-1)


class Corridor:
    """Walk to the place 2, in the form of a Gymnasium environment; notes who calls it."""

    def __init__(self) -> None:
        self.callers = {threading.get_ident()}
        self.closed = False
        self.hold: threading.Event | None = None
        self.answer: tuple[Any, ...] | BaseException | None = None
        self.place = self.seed = 0

    def reset(self, *, seed: int, options: Any) -> tuple[Any, dict[str, Any]]:
        self.callers.add(threading.get_ident())
        self.place = 0
        self.seed = seed
        return {"place": 0, "options": options}, {}

    def step(self, action: int) -> tuple[Any, ...]:
        self.callers.add(threading.get_ident())
        if self.hold is not None:
            self.hold.wait(60)
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is not None:
            return self.answer
        self.place += action
        there = self.place == 2
        return {"place": self.place}, 0.5 if there else -0.1, there, self.place < -2, {}

    def render(self) -> str:
        return "." * self.place + "X"

    def close(self) -> None:
        self.callers.add(threading.get_ident())
        self.closed = True


class Made:
    """Makes instances and keeps them."""

    def __init__(self, **changes: Any) -> None:
        self.all: list[Corridor] = []
        self.changes = changes

    def __call__(self) -> Corridor:
        env = Corridor()
        env.__dict__.update(self.changes)
        self.all.append(env)
        return env


def environment(
    made: Made,
    *,
    render: bool = False,
    timeout_s: float = 60.0,
    given_up: list[Threads] | None = None,
) -> GymnasiumEnvironment:
    rules = GymnasiumRules(render, 40, 0.3, timeout_s)
    return GymnasiumEnvironment(
        "Corridor", made, WAYS, rules, {"long": True}, [] if given_up is None else given_up
    )


@contextmanager
def failing(kind: str) -> Iterator[pytest.ExceptionInfo[EnvironmentFailure]]:
    with pytest.raises(EnvironmentFailure) as caught:
        yield caught
    assert caught.value.kind == kind, caught.value


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("right", 0),
        (" Left\n", -1),
        ("I go right.", 0),
        ("stay put, I say", 1),
        ("STAY PUT", 1),
        ("bright", None),
        ("left or right", None),
        ("\ud800", None),
        ("", None),
    ],
)
def test_a_text_means_the_one_action_that_it_names(text: str, action: int | None) -> None:
    if action is None:
        with pytest.raises(ValueError, match="Answer with one of: left, right, stay put"):
            WAYS.of(text)
    else:
        assert WAYS.of(text) == action


def test_text_is_an_action_where_the_space_holds_it() -> None:
    spaces = SimpleNamespace(Text=type("Text", (), {}), Discrete=type("Discrete", (), {}))
    space = spaces.Text()
    space.min_length = 1
    space.max_length = 4
    space.character_set = {*"abc"}
    actions = build_actions(SimpleNamespace(spaces=spaces), space, [])  # type: ignore[arg-type]
    assert actions.of("cab") == "cab"
    for text in ("", "abcab", "abz"):
        with pytest.raises(ValueError, match=r"characters"):
            actions.of(text)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["a", "b"], "names 2 actions, the environment has 3"),
        (["a", "b", "A"], "3 different words"),
    ],
)
def test_names_that_do_not_fit_the_actions_are_refused(names: list[str], named: str) -> None:
    spaces = SimpleNamespace(Text=type("Text", (), {}), Discrete=type("Discrete", (), {}))
    space = spaces.Discrete()
    space.n = 3
    space.start = 5
    package: Any = SimpleNamespace(spaces=spaces)
    assert build_actions(package, space, []).of("6") == 6
    with pytest.raises(ValueError, match=named):
        build_actions(package, space, names)
    with pytest.raises(ValueError, match="only Text and Discrete"):
        build_actions(package, object(), [])


async def test_an_episode_is_played_on_one_thread_of_its_own() -> None:
    made = Made()
    env = environment(made)
    opening = await env.reset({}, seed=9)
    assert opening.messages[0]["content"] == '{"place": 0, "options": {"long": true}}'
    turn = await env.step(AssistantMessage("up"))
    assert (
        "Answer with one of" in turn.messages[0]["content"]
        and turn.reward == -1.0
        and not turn.done
    )
    assert (await env.step(AssistantMessage("stay put"))).reward == -0.1
    turn = await env.step(AssistantMessage("stay put"))
    assert (turn.done, turn.reward, turn.metrics["success"]) == (True, 0.5, 1.0)
    with failing("lost"):
        await env.step(AssistantMessage("left"))
    await env.reset({}, seed=10)
    await env.close()
    (corridor,) = made.all
    assert corridor.closed and corridor.seed == 10
    assert len(corridor.callers) == 1 and threading.get_ident() not in corridor.callers


async def test_a_policy_that_never_acts_comes_to_an_end() -> None:
    env = environment(Made())
    await env.reset({}, seed=1)
    assert not any([(await env.step(AssistantMessage("up"))).done for _ in range(9)])
    await env.step(AssistantMessage("left"))
    turns = [await env.step(AssistantMessage("up")) for _ in range(10)]
    assert [turn.done for turn in turns] == [False] * 9 + [True]
    await env.close()


@pytest.mark.parametrize(("wrong_reward", "garbage"), [(-1.0, -10.0), (0.0, 0.0)])
async def test_a_turn_that_is_no_action_costs(wrong_reward: float, garbage: float) -> None:
    """More than a step by default, so that it is better to act than to say nothing; success is the
    environment's."""

    async def played(words: list[str]) -> tuple[float, float]:
        rules = GymnasiumRules(False, 40, 0.3, 60.0, wrong_reward=wrong_reward)
        env = GymnasiumEnvironment("Corridor", Made(), WAYS, rules, {}, [])
        await env.reset({}, seed=1)
        turns = [await env.step(AssistantMessage(said)) for said in words]
        await env.close()
        assert turns[-1].done
        return math.fsum(turn.reward or 0.0 for turn in turns), turns[-1].metrics.get(
            "success", 0.0
        )

    assert await played(["up"] * 10) == (garbage, 0.0)
    assert await played(["left"] * 3) == (pytest.approx(-0.3), 0.0)
    assert await played(["up", "stay put", "stay put"]) == (pytest.approx(wrong_reward + 0.4), 1.0)


@pytest.mark.parametrize(
    ("rendered", "read"),
    [
        ("plain", "plain"),
        ("\x1b[41mS\x1b[0mFFF", "[S]FFF"),
        (
            "|\x1b[43m \x1b[0m: :\x1b[34;1mR\x1b[0m|\x1b[35mB\x1b[0m|",
            "|[ ]: :(blue:R)|(magenta:B)|",
        ),
        ("\x1b[7m\x1b[31mx\x1b[my", "[x]y"),
        ("\x1b[?25l\x1b[1;1Ha\x1b]0;title\x07b\x1bMc\x1b(Bd\x1b", "abcd"),
        ("\x1b[1mbold\x1b[0m", "bold"),
        ("\x1b[38;5;31mx\x1b[39my\x1b[38;2;10;40;5mz\x1b[0m", "xyz"),
        ("\x1b[48;5;31mS\x1b[49mF\x1b[7mS\x1b[27mF\x1b[31mr\x1b[39mF", "[S]F[S]F(red:r)F"),
        ("\x1b[" + "1" * 5000 + "mx", "x"),
    ],
)
def test_what_a_terminal_would_colour_is_said_in_words(rendered: str, read: str) -> None:
    """The policy read the escape sequences, and in FrozenLake they alone say where the agent
    stands."""
    assert without_escapes(rendered) == read


async def test_what_is_rendered_is_shown_and_cut() -> None:
    env = environment(Made(), render=True)
    assert (await env.reset({}, seed=1)).messages[0]["content"] == "X"
    await env.close()
    env = environment(Made(render=lambda: "\x1b[2J  (Left)\n\x1b[41mS\x1b[0mFF\n"), render=True)
    assert (await env.reset({}, seed=1)).messages[0]["content"] == "  (Left)\n[S]FF\n"
    await env.close()
    env = environment(Made(render=lambda: "x" * 50), render=True)
    assert (await env.reset({}, seed=1)).messages[0][
        "content"
    ] == "x" * 40 + "... (10 more characters)"
    await env.close()


@pytest.mark.parametrize(
    "answer",
    [
        ({}, float("nan"), False, False, {}),
        ({}, "much", False, False, {}),
        (object(), 0.0, False, False, {}),
        ({}, 0.0),
        ZeroDivisionError("the world broke"),
        SystemExit(3),
        asyncio.CancelledError(),
    ],
)
async def test_what_the_environment_must_not_answer_is_a_failure(answer: Any) -> None:
    env = environment(Made(answer=answer))
    await env.reset({}, seed=1)
    with failing("internal") as caught:
        await env.step(AssistantMessage("left"))
    assert "Corridor" in str(caught.value)
    await env.close()


@pytest.mark.slow
async def test_a_call_that_does_not_return_is_a_timeout_and_its_instance_is_left_to_it() -> None:
    hold = threading.Event()
    given_up = list[Threads]()
    before = threading.active_count()
    made = Made(hold=hold)
    env = environment(made, timeout_s=2.0, given_up=given_up)
    await env.reset({}, seed=1)
    with failing("timeout") as caught:
        await env.step(AssistantMessage("left"))
    assert "env.timeout_s" in str(caught.value) and [each.stuck for each in given_up] == [1]
    with failing("lost"):
        await env.step(AssistantMessage("left"))
    await env.reset({}, seed=2)
    assert len(made.all) == 2 and not made.all[0].closed
    hold.set()
    async with asyncio.timeout(60):
        while given_up[0].stuck or not made.all[0].closed:
            await asyncio.sleep(0.01)
        await env.close()
        while threading.active_count() > before:
            await asyncio.sleep(0.01)


async def test_an_environment_whose_calls_never_return_makes_no_more_instances() -> None:
    given_up: list[Any] = [SimpleNamespace(stuck=1)] * MAX_STUCK
    with failing("capacity"):
        await environment(Made(), given_up=given_up).reset({}, seed=1)


@pytest.mark.parametrize(("name", "option"), [("gymnasium", "id"), ("verifiers", "name")])
def test_a_package_that_is_missing_is_named_with_the_extra(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: dict[str, ModuleType | None] = {name: None, f"{name}.v1": None}
    for module, nothing in missing.items():
        monkeypatch.setitem(sys.modules, module, nothing)
    with pytest.raises(
        ValueError, match=rf"needs the package {name}: pip install -e '.*\[{name}\]'"
    ):
        build_environment(name, {option: "Anything-v1"})
    with pytest.raises(ValueError, match=rf"env\.{option} is missing"):
        build_environment(name, {})
