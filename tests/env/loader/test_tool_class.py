"""A class with tools plays as it does in TRL, and whatever is wrong with it or with a call has one
exact outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realhf.api.environment import (
    AssistantMessage,
    Environment,
    EnvironmentFailure,
    EnvironmentSpec,
    ToolCall,
    Turn,
)
from realhf.env.loader.load import build_environment
from realhf.env.loader.validation import BrokenContract, validate_messages
from tests.env.loader.counter import COUNTER

Build = Callable[..., EnvironmentSpec]


def says(*calls: ToolCall, content: str = "") -> AssistantMessage:
    return AssistantMessage(content, calls)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


async def answer(environment: Environment, *calls: ToolCall) -> list[str]:
    """What the policy reads after these calls."""
    turn = await environment.step(says(*calls))
    assert [message["role"] for message in turn.messages] == ["tool"] * len(calls)
    return [message["content"] for message in turn.messages]


# ---- an episode


async def test_an_episode_is_played_as_in_trl(build: Build) -> None:
    """The text of reset follows the prompt, results are tool messages, and an answer without calls
    ends the episode. Each turn has the reward of its state, but only the end is a success."""
    spec = build(COUNTER)
    environment = spec.make("")
    opening = await environment.reset({"goal": 4, "prompt": "Count. "}, seed=0)
    assert opening.messages == [{"role": "user", "content": "Count. Reach 4."}]
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "stop"]
    turn = await environment.step(
        says(ToolCall("add", {"amount": 1}, id="c1"), call("add", amount=1, twice=True))
    )
    assert turn.messages == [
        {"role": "tool", "name": "add", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    assert (turn.done, turn.reward, turn.final, turn.metrics["success"]) == (False, 0.0, True, 0.0)
    turn = await environment.step(says(call("add", amount=1)))
    assert (turn.done, turn.reward, turn.metrics["success"]) == (False, 1.0, 0.0)
    turn = await environment.step(says(content="4"))
    assert (turn.done, turn.reward, turn.messages) == (True, 1.0, [])
    assert turn.metrics == {
        "success": 1.0,
        "tool_calls": 3.0,
        "tool_failures": 0.0,
        "tool_errors": 0.0,
    }
    await environment.reset({}, seed=0)
    turn = await environment.step(says(call("stop")))
    assert turn.done and turn.messages[0]["content"] == "None"
    await environment.close()


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({}, [("user", "Reach 3.")]),
        ({"prompt": "A"}, [("user", "AReach 3.")]),
        (
            {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]},
            [("system", "S"), ("user", "UReach 3.")],
        ),
        (
            {"prompt": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]},
            [("user", "UReach 3."), ("assistant", "A")],
        ),
        ({"prompt": [{"role": "system", "content": "S"}]}, [("system", "S"), ("user", "Reach 3.")]),
    ],
)
async def test_the_text_of_reset_ends_the_last_message_of_the_user(
    build: Build, row: dict[str, Any], messages: list[tuple[str, str]]
) -> None:
    before = str(row)
    opening = await build(COUNTER).make("").reset(row, seed=0)
    assert [(each["role"], each["content"]) for each in opening.messages] == messages
    assert str(row) == before


async def test_the_cause_of_a_failure_is_what_the_author_raised(build: Build) -> None:
    """Whoever wants to know more than the sentence finds it there, also for a result against the
    contract."""
    for name, line, cause in (
        ("a.py", "raise KeyError", KeyError),
        ("b.py", "return None", BrokenContract),
    ):
        environment = build(
            COUNTER.replace("return 1.0 if self.count == self.goal else 0.0", line), name
        ).make("")
        await environment.reset({}, seed=0)
        with pytest.raises(EnvironmentFailure) as caught:
            await environment.step(says())
        assert type(caught.value.__cause__) is cause


async def test_async_methods_run_on_the_event_loop_and_others_beside_it(build: Build) -> None:
    """A class may mix them; named components are summed, and the class may count for itself."""
    text = """
    import asyncio, threading

    class Mixed:
        async def reset(self, seed, **row):
            self.seed, self.threads = seed, {threading.current_thread() is threading.main_thread()}

        async def wait(self) -> str:
            '''Wait.'''
            await asyncio.sleep(0)
            self.threads.add("loop" if threading.current_thread() is threading.main_thread() else "thread")
            return "waited"

        def work(self) -> str:
            '''Work.'''
            self.threads.add("main" if threading.current_thread() is threading.main_thread() else "beside")
            return "worked"

        async def get_reward(self):
            return {"speed": 0.25, "style": 0.5}

        def metrics(self):
            return {"success": 1.0, "seed": self.seed, "ok": self.threads == {True, "loop", "beside"}}
    """
    environment = build(text).make("")
    assert (await environment.reset({}, seed=9)).messages == [{"role": "user", "content": ""}]
    turn = await environment.step(says(call("wait"), call("work")))
    assert [message["content"] for message in turn.messages] == ["waited", "worked"]
    assert (turn.reward, turn.rewards) == (0.75, {"speed": 0.25, "style": 0.5})
    assert {name: turn.metrics[name] for name in ("success", "seed", "ok")} == {
        "success": 1.0,
        "seed": 9.0,
        "ok": 1.0,
    }


@pytest.mark.parametrize(
    ("returned", "reward", "rewards"),
    [
        ("True", 1.0, {}),
        ("2", 2.0, {}),
        ("{'reward': 3, 'a': 1}", 3.0, {"a": 1.0}),
        ("__import__('numpy').float32(0.5)", 0.5, {}),
        ("__import__('numpy').bool_(True)", 1.0, {}),
        ("__import__('fractions').Fraction(1, 4)", 0.25, {}),
        ("__import__('numpy').array(0.5)", 0.5, {}),
        (
            "{'a': __import__('torch').tensor(0.5), 'b': __import__('numpy').float32(0.25)}",
            0.75,
            {"a": 0.5, "b": 0.25},
        ),
    ],
)
async def test_a_reward_is_a_number_or_named_components(
    build: Build, returned: str, reward: float, rewards: dict[str, float]
) -> None:
    environment = build(COUNTER.replace("1.0 if self.count == self.goal else 0.0", returned)).make(
        ""
    )
    await environment.reset({}, seed=0)
    turn = await environment.step(says())
    assert (turn.reward, turn.rewards, type(turn.reward)) == (reward, rewards, float)


async def test_options_reach_the_class_and_data_makes_tasks(build: Build, tmp_path: Path) -> None:
    """The nested dataclass is the only argument of the class; rows come from a file beside the
    author's."""
    (tmp_path / "goals.jsonl").write_text(
        "".join(f'{{"goal": {n}, "group": "g{n % 2}"}}\n' for n in range(40))
    )
    options = """
    def __init__(self, options):
        self.step = options.step

    @dataclass(frozen=True)
    class Options:
        step: int
"""
    text = "from dataclasses import dataclass\n" + COUNTER.replace("    done = False\n", options)
    spec = build(text, step=3, data="goals.jsonl")
    train = spec.tasks("train")
    held_out = spec.tasks("heldout")
    assert len(train.group_of) + len(held_out.group_of) == 40 and set(train.groups) == {"g0", "g1"}
    assert 1 <= len(held_out.group_of) <= 12 and not set(train.group_of) & set(held_out.group_of)
    first = train.instantiate(next(iter(train.group_of)), 5)
    opening = await spec.make("").reset(first.payload, seed=first.seed)
    assert opening.messages[0]["content"] == f"Reach {first.payload['goal']}."
    with pytest.raises(ValueError, match=r"env\.step is missing"):
        build(text)


async def test_a_class_without_rows_has_a_task_for_every_seed(build: Build) -> None:
    """Its splits share no seed, and reset is given the seed if it takes one."""
    spec = build(
        COUNTER.replace("goal: int = 3, **row", "seed")
        .replace("= goal, 0, False", "= seed, 0, False")
        .replace("{goal}", "{seed}")
    )
    seeds = {}
    for split in ("train", "heldout"):
        tasks = spec.tasks(split)
        [template] = tasks.group_of
        made = [tasks.instantiate(template, seed) for seed in range(50)]
        assert len({task.id for task in made}) == 50
        seeds[split] = {task.seed for task in made}
    assert not seeds["train"] & seeds["heldout"]
    with pytest.raises(ValueError, match="not in tuple"):
        spec.tasks("held_out")
    opening = await spec.make("").reset({}, seed=77)
    assert opening.messages[0]["content"] == "Reach 77."


async def test_close_and_metrics_with_arguments_are_tools(build: Build) -> None:
    """As in TRL; without arguments they are the door's."""
    text = """
    class House:
        closed = 0

        def reset(self, **row): ...

        def close(self, door: str) -> str:
            '''Close a door.

            Args:
                door: its name
            '''
            return f"closed {door}"

        def metrics(self):
            return {"doors": 2}

        def get_reward(self):
            return 0
    """
    environment = build(text).make("")
    assert [tool["function"]["name"] for tool in (await environment.reset({}, seed=0)).tools] == [
        "close"
    ]
    assert await answer(environment, call("close", door="A")) == ["closed A"]
    assert (await environment.step(says())).metrics["doors"] == 2.0
    await environment.close()


# ---- calls that go wrong


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        (call("ad"), "Tool ad not found.; did you mean 'add'? (known: add, stop)"),
        (call(""), "Tool  not found. (known: add, stop)"),
        (call("reset"), "Tool reset not found. (known: add, stop)"),
        (call("get_reward"), "Tool get_reward not found. (known: add, stop)"),
        (call("__class__"), "Tool __class__ not found. (known: add, stop)"),
        (call("__init__"), "Tool __init__ not found. (known: add, stop)"),
        (call("count"), "Tool count not found. (known: add, stop)"),
        (call("add.__globals__"), "Tool add.__globals__ not found. (known: add, stop)"),
        (call("x" * 10_000), f"Tool {'x' * 60}... not found. (known: add, stop)"),
        (call("add"), "add needs the argument 'amount'"),
        (call("add", amount="many"), "argument 'amount' must be a whole number, not 'many'"),
        (call("add", amount=True), "argument 'amount' must be a whole number, not True"),
        (call("add", amount=1.5), "argument 'amount' must be a whole number, not 1.5"),
        (call("add", amount=None), "argument 'amount' must be a whole number, not None"),
        (call("add", amount=[1]), "argument 'amount' must be a whole number, not [1]"),
        (
            call("add", amount=float("nan")),
            "the arguments are no JSON: nan is not JSON (at ['amount'])",
        ),
        (call("add", amount="9" * 10_000), "argument 'amount' must be a whole number, not '999"),
        (call("add", amount=1, self=2), "add has no argument 'self' (known: amount, twice)"),
        (
            call("add", amount=1, **{"__class__": 2}),
            "add has no argument '__class__' (known: amount, twice)",
        ),
        (
            call("add", amount=1, twise=True),
            "add has no argument 'twise'; did you mean 'twice'? (known: amount, twice)",
        ),
        (call("add", amount=-1), "amounts are positive"),
        (ToolCall("add", [1]), "the arguments must be an object"),  # type: ignore[arg-type]
        (
            ToolCall("", {}, problem="the JSON of the call ends early"),
            "the JSON of the call ends early",
        ),
    ],
)
async def test_a_wrong_call_is_answered_with_the_reason(
    build: Build, tool: ToolCall, sentence: str
) -> None:
    """The policy reads it as in TRL, the episode goes on, and the state is as before."""
    environment = build(COUNTER).make("")
    await environment.reset({}, seed=0)
    turn = await environment.step(says(tool))
    [message] = turn.messages
    expected = str({"error": sentence})
    assert message["content"][: len(expected) - 2] == expected[:-2]
    assert message["name"] == (tool.name if 0 < len(tool.name) <= 60 else message["name"]) != ""
    assert len(message["content"]) < 400
    assert (turn.done, turn.metrics["tool_failures"], turn.metrics["tool_calls"]) == (
        False,
        1.0,
        1.0,
    )
    assert await answer(environment, call("add", amount="3")) == ["3"]


@pytest.mark.slow
async def test_deep_and_large_arguments_are_refused_or_taken_but_never_break_anything(
    build: Build,
) -> None:
    """Recursion is bounded before the author's code sees a value; only what the schema offers can
    be called."""
    text = """
    class Store:
        def reset(self, **row): self.seen = 0
        def put(self, value: dict) -> str:
            '''Put.

            Args:
                value: anything
            '''
            self.seen += 1
            return str(len(value))
        def get_reward(self): return self.seen
        @property
        def secret(self): return 1
        @staticmethod
        def helper(): return 1
        def _hidden(self): return 1
        def close(self): self.seen = -1
        def metrics(self): return {}
    """
    environment = build(text).make("")
    opening = await environment.reset({}, seed=0)
    assert [tool["function"]["name"] for tool in opening.tools] == ["put"]
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert "stand in one another" in (await answer(environment, call("put", value=deep)))[0]
    assert await answer(environment, call("put", value={str(n): n for n in range(50_000)})) == [
        "50000"
    ]
    assert "half a character" in (await answer(environment, call("put", value={"a": "\ud800"})))[0]
    for name in ("secret", "helper", "_hidden", "close", "metrics", "seen", "__dict__"):
        assert f"Tool {name} not found." in (await answer(environment, call(name)))[0]
    assert (await environment.step(says())).reward == 1.0


@pytest.mark.parametrize("word", ["def", "async def"])
async def test_a_user_answers_a_turn_without_a_call(build: Build, word: str) -> None:
    """In words of theirs until they leave; what is no text breaks the contract, and another
    signature is refused."""
    reply = f"    {word} user_reply(self, text):\n        return {{}}"
    answer = reply.format(
        'None if text == "bye" else 3 if text == "three" else f"You said {text}."'
    )
    environment = build(COUNTER + answer).make("")
    opening = await environment.reset({}, seed=1)
    assert "user_reply" not in str(opening.tools)
    turn = await environment.step(says(content="hm"))
    assert (turn.messages, turn.done) == ([{"role": "user", "content": "You said hm."}], False)
    assert (await environment.step(says(call("add", amount=1), content="bye"))).messages[0][
        "role"
    ] == "tool"
    turn = await environment.step(says(content="bye"))
    assert (turn.messages, turn.done, turn.metrics["tool_calls"]) == ([], True, 1)
    with pytest.raises(
        EnvironmentFailure, match=r"Counter\.user_reply .*must return text, or None .*, not 3"
    ):
        await environment.step(says(content="three"))
    with pytest.raises(ValueError, match=r"Counter\.user_reply must be user_reply\(self, text\)"):
        build(COUNTER + reply.format("text").replace("self, text", "self"), "other.py")


async def test_a_mistake_of_the_author_is_counted_and_told(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """An AttributeError in a tool that was called rightly is no failure of the policy alone: it is
    in the metrics and the info of the turn, and once in the log. What a tool raises on purpose and
    a call that is wrong are not."""
    environment = build(COUNTER.replace("self.count += amount", "self.cuont += amount")).make("")
    for _ in range(2):
        await environment.reset({}, seed=1)
        for wrong in (call("add", amount="x"), call("add", amount=-1), call("none")):
            turn = await environment.step(says(wrong))
            assert turn.metrics["tool_errors"] == 0 and turn.info == {}
        turn = await environment.step(says(call("add", amount=1)))
        assert turn.metrics["tool_errors"] == 1 and turn.metrics["tool_failures"] == 4
        [told] = turn.info["tool_errors"]
        assert (
            "Counter.add: AttributeError: 'Counter' object has no attribute 'cuont'" in told
            and "line 19" in told
        )
    assert caplog.text.count("Counter.add: AttributeError") == 1


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ("return {'a': 1}", "{'a': 1}"),
        ("raise KeyError('key')", str({"error": "'key'"})),
        ("assert False", str({"error": "AssertionError"})),
        (
            "return 'x' * (1 << 20)",
            "x" * (1 << 18) + f"... ({(1 << 20) - (1 << 18)} more characters)",
        ),
        ("return chr(0xd800)", "?"),
        ("import asyncio; raise asyncio.TimeoutError", str({"error": "TimeoutError"})),
        ("return self.stop2()", str({"error": "maximum recursion depth exceeded"})),
    ],
)
async def test_what_a_tool_returns_or_raises_is_text_for_the_policy(
    build: Build, body: str, content: str
) -> None:
    extra = f"\n    def stop2(self) -> str:\n        '''Stop.'''\n        {body}\n"
    environment = build(COUNTER + extra).make("")
    await environment.reset({}, seed=0)
    [text] = await answer(environment, call("stop2"))
    assert text == content or text.startswith(content[:-2])


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(["add", "stop", "reset", "get_reward", "__init__", "done", ""]) | st.text(
    max_size=8
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["amount", "twice", "self", "__class__"]) | st.text(max_size=5), ANY_JSON
)


@pytest.mark.nightly
@pytest.mark.slow
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.builds(ToolCall, NAMES, ARGUMENTS, st.text(max_size=3)), max_size=3))
def test_whatever_a_policy_calls_each_call_has_an_answer(
    build: Build, calls: list[ToolCall]
) -> None:
    """Never an exception and never a failure, and the answers are messages as the contract wants
    them."""

    async def play() -> Turn:
        environment = build(COUNTER).make("")
        await environment.reset({}, seed=0)
        return await environment.step(says(*calls))

    turn = asyncio.run(play())
    assert len(turn.messages) == len(calls) and turn.reward in (0.0, 1.0)
    assert validate_messages(turn.messages, "messages") == turn.messages


# ---- blocking code


SLEEPER = """
import threading
import time

class Sleeper:
    closed, waiting, over = [], [], threading.Event()

    def reset(self, **row):
        self.name = row.get("name")

    def sleep(self, seconds: float) -> str:
        '''Sleep.

        Args:
            seconds: how long
        '''
        time.sleep(seconds)
        return f"slept as {self.name}"

    def wait(self) -> bool:
        '''Wait until it is over.'''
        Sleeper.waiting.append(self.name)
        return Sleeper.over.wait(60)

    def get_reward(self):
        return 0.0

    def close(self):
        Sleeper.closed.append(self.name)
"""


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_blocking_tool_stops_neither_the_loop_nor_other_episodes(build: Build) -> None:
    """Twenty wait at once, until the loop lets them go on."""
    spec = build(SLEEPER)
    environments = [spec.make("") for _ in range(20)]
    await asyncio.gather(*(each.reset({}, seed=0) for each in environments))
    sleeper = environments[0]._play._instance  # type: ignore[attr-defined]
    answers = asyncio.gather(*(answer(each, call("wait")) for each in environments))
    await until(lambda: len(sleeper.waiting) == 20)
    sleeper.over.set()
    assert await answers == [["True"]] * 20


async def test_an_instance_whose_call_was_cancelled_is_left_to_its_thread(
    build: Build, write: Callable[..., str]
) -> None:
    """The next episode gets a new instance; the old one closes when its call returns."""
    spec = build(SLEEPER)
    environment = spec.make("")
    await environment.reset({"name": "old"}, seed=0)
    old = environment._play._instance  # type: ignore[attr-defined]
    given_up = asyncio.create_task(environment.step(says(call("wait"))))
    await until(lambda: old.waiting == ["old"])
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    with pytest.raises(EnvironmentFailure, match="may still be running") as caught:
        await environment.step(says(call("sleep", seconds=0.0)))
    assert caught.value.kind == "lost"
    await environment.reset({"name": "new"}, seed=0)
    assert await answer(environment, call("sleep", seconds=0.0)) == ["slept as new"]
    closed = old.closed
    assert closed == []
    old.over.set()
    await until(lambda: closed == ["old"])
    await environment.close()
    assert closed == ["old", "new"]


@pytest.mark.slow
async def test_fifteen_hundred_trivial_episodes_take_less_than_a_second(build: Build) -> None:
    """The wrapper's share of an episode is small: one reset and one turn."""
    spec = build(COUNTER)
    environments = [spec.make("") for _ in range(50)]
    turn: list[Turn] = []

    async def play(environment: Environment) -> None:
        for seed in range(30):
            await environment.reset({}, seed=seed)
            turn.append(await environment.step(says(call("add", amount=3))))

    least = float("inf")
    for _ in range(5):  # a busy machine makes it dearer, and never cheaper
        turn.clear()
        before = time.process_time()
        await asyncio.gather(*map(play, environments))
        least = min(least, time.process_time() - before)
        assert [each.reward for each in turn] == [1.0] * 1500
        if least < 1.0:
            break
    assert least < 1.0


def test_an_environment_is_made_without_running_anything_of_it(write: Callable[..., str]) -> None:
    """``make`` is called on an event loop, so the author's constructor must wait for the first
    reset."""
    path = write(COUNTER.replace("done = False", "def __init__(self): raise RuntimeError"))
    assert build_environment(path, {}).make("") is not None


async def test_a_class_says_its_state_or_leaves_it_to_the_text(build: Build) -> None:
    """``state_key`` is read after reset and after each turn; what is no text is told with its
    class."""
    plain = build(COUNTER).make("")
    assert (await plain.reset({"goal": 4}, seed=0)).state_key == ""
    keyed = COUNTER + "\n    @property\n    def state_key(self):\n        return {made}\n"
    environment = build(keyed.replace("{made}", "str(self.count)"), "keyed.py").make("")
    assert (await environment.reset({"goal": 4}, seed=0)).state_key == "0"
    assert (await environment.step(says(call("add", amount=2)))).state_key == "2"
    with pytest.raises(EnvironmentFailure, match="state_key must be text, not 5"):
        await build(keyed.replace("{made}", "5"), "number.py").make("").reset({"goal": 4}, seed=0)
