"""The example in the docstring of the contract is an environment that can be played."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Any

from realhf.api import environment
from realhf.api.environment import AssistantMessage, Environment, Opening, Turn


def test_the_example_of_the_contract_can_be_played() -> None:
    text = environment.__doc__ or ""
    example = text[text.index("    class Parrot:") : text.index("docs/extend/environment.md")]
    names: dict[str, Any] = {"Opening": Opening, "Turn": Turn}
    exec(textwrap.dedent(example), names)
    parrot = names["Parrot"]()
    assert isinstance(parrot, Environment)
    training = [row["word"] for row in parrot.tasks("train")]
    held_out = [row["word"] for row in parrot.tasks("heldout")]
    assert training and held_out and not {*training} & {*held_out}

    async def play(answer: str) -> Turn:
        opening = await parrot.reset({"word": training[0]}, seed=1)
        assert training[0] in opening.messages[0]["content"]
        return await parrot.step(AssistantMessage(answer))

    right = asyncio.run(play(training[0]))
    wrong = asyncio.run(play("x"))
    assert (right.done, right.reward, right.metrics["success"]) == (True, 1.0, 1.0)
    assert (wrong.done, wrong.reward, wrong.metrics["success"]) == (True, 0.0, 0.0)
