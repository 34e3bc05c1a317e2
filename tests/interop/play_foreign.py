"""Runs in an environment with ``verifiers`` and Gymnasium: plays environments of theirs through the
adapters.

    python play_foreign.py verifiers|gymnasium

Prints one JSON line: what the policy read and what it was paid.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from realhf.api.environment import (
    HELD_OUT,
    SPLITS,
    TRAIN,
    AssistantMessage,
    EnvironmentFailure,
    EnvironmentSpec,
    ToolCall,
)
from realhf.env.loader.load import build_environment


async def played(
    spec: EnvironmentSpec, template: str, seed: int, said: list[Any], env: Any = None
) -> dict[str, Any]:
    """Play one episode: what was read, the reward, and how it ended."""
    own = env or spec.make("")
    task = spec.tasks(TRAIN).instantiate(template or next(iter(spec.tasks(TRAIN).group_of)), seed)
    found: dict[str, Any] = {"read": [], "reward": 0.0, "failure": ""}
    try:
        opening = await own.reset(task.payload, seed=task.seed)
        found["tools"] = [tool["function"]["name"] for tool in opening.tools]
        found["read"] = [message["content"] for message in opening.messages]
        for text in said:
            message = (
                AssistantMessage("", (text,))
                if isinstance(text, ToolCall)
                else AssistantMessage(text)
            )
            turn = await own.step(message)
            found["read"] += [each["content"] for each in turn.messages]
            found["reward"] = turn.reward if turn.final else found["reward"] + (turn.reward or 0.0)
            found |= {
                "done": turn.done,
                "metrics": dict(turn.metrics),
                "rewards": dict(turn.rewards),
            }
            if turn.done:
                break
    except EnvironmentFailure as failure:
        found["failure"] = f"{failure.kind}: {failure}"
    if env is None:
        await own.close()
    return found


async def verifiers() -> dict[str, Any]:
    hangman = build_environment(
        "verifiers", {"name": "textarena", "args": {"game": "Hangman-v0"}, "most_tasks": 20}
    )
    doubling = build_environment(
        "verifiers", {"name": "doubling_taskset", "args": {"lowest": 4}, "max_turns": 4}
    )
    splits = {split: [*doubling.tasks(split).group_of] for split in SPLITS}
    first = splits[TRAIN][0]
    number = int(first.partition(":")[0]) + 4
    words = [f"[{word}]" for word in ("candle", "garden", "market", "window", "planet", "silver")]
    env = doubling.make("")
    found = {
        "splits": splits,
        "max turns": [hangman.max_turns, doubling.max_turns],
        "hangman": await played(hangman, "", 1, words),
        "few": await played(hangman, "", 1, ["[q]", "[x]"]),
        "plain": await played(doubling, first, 1, [str(2 * number)], env),
        "left off": await played(doubling, first, 1, [], env),
    }
    call = ToolCall(found["plain"]["tools"][0], {"number": number}, id="c1")
    broken = ToolCall(call.name, {}, text="{", problem="the call is not JSON")
    found["tool"] = await played(doubling, first, 1, [call, broken, f"It is {2 * number}."], env)
    found["broken"] = await played(doubling, first, 1, ["break"], env)
    many = await asyncio.gather(*(played(doubling, first, 1, [str(2 * number)]) for _ in range(6)))
    found["many"] = [each["reward"] for each in many]
    await env.close()
    found["problems"] = problems(
        "verifiers", {"name": "no-such-thing"}, {"name": "textarena", "args": {"game": "Chess"}}
    )
    found["tasks left"] = len(asyncio.all_tasks()) - 1
    return found


def problems(name: str, *options: dict[str, Any]) -> list[str]:
    """What is said about options that cannot be."""
    said = []
    for each in options:
        try:
            build_environment(name, each)
        except ValueError as error:
            said.append(str(error))
    return said


async def gymnasium() -> dict[str, Any]:
    import gymnasium as gym  # pyright: ignore[reportMissingImports]

    class Password(gym.Env):
        """Say the word; text in, text out."""

        action_space = gym.spaces.Text(min_length=1, max_length=5, charset="abc")
        observation_space = gym.spaces.Text(max_length=20, charset="abcdefghijklmnopqrstuvwxyz 2")

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
            super().reset(seed=seed)
            self.word = "".join(self.np_random.choice([*"abc"], 2))
            return f"a word of {len(self.word)}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
            return (
                "right" if action == self.word else "wrong",
                float(action == self.word),
                action == self.word,
                False,
                {},
            )

    gym.register("Password-v0", Password)
    lake = build_environment(
        "gymnasium",
        {
            "id": "FrozenLake-v1",
            "actions": ["left", "down", "right", "up"],
            "kwargs": {"is_slippery": False},
            "render": True,
        },
    )
    password = build_environment("gymnasium", {"id": "Password-v0"})
    words = [one + other for one in "abc" for other in "abc"]
    wrong = problems(
        "gymnasium",
        {"id": "Nothing-v9"},
        {"id": "CartPole-v1", "actions": ["left"]},
        {"id": "Pendulum-v1"},
    )
    return {
        "lake": await played(lake, "", 1, ["down", "down", "right", "down", "right", "right"]),
        "hole": await played(lake, "", 1, ["down", "right"]),
        "prompt": lake.system_prompt,
        "password": await played(password, "", 3, ["xyz", *words]),
        "problems": wrong,
        "held out": password.tasks(HELD_OUT).instantiate("Password-v0", 3).seed,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run({"verifiers": verifiers, "gymnasium": gymnasium}[sys.argv[1]]())))
