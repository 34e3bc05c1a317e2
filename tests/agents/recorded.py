"""The agents of this folder under the name of their file, with a record of what the engine sampled for them.

``rollout.agent=tests/agents/recorded.py:NAME`` plays the agent of ``NAME.py`` as it is. After each episode a line is
appended to the file that ``RECORD_OF_AGENTS`` names: the turns as the engine returned them, and what the session
counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from realhf.api.generation import TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.base.plugin import load_plugin

HERE = Path(__file__).resolve().parent
FILE = "RECORD_OF_AGENTS"


class RecordedTokens:
    """A ``TokenSource`` that keeps what it returns: for each turn the ids before it and its ids."""

    def __init__(self, tokens: TokenSource) -> None:
        self.turns: list[tuple[list[int], list[int]]] = []
        self._tokens = tokens

    async def generate(self, request: GenRequest) -> GenOutput:
        """Sample, and record it. The rest of a turn is recorded with its beginning."""
        output = await self._tokens.generate(request)
        ids = list(request.token_ids)
        start = len(ids) - request.sampled
        turn = (ids[:start], ids[start:] + output.token_ids)
        earlier = (ids[:start], ids[start:])
        if request.sampled and earlier in self.turns:
            self.turns.remove(earlier)
        self.turns.append(turn)
        return output

    def free(self, slots: Sequence[int]) -> None:
        """Free the cache entries of these slots."""
        self._tokens.free(slots)


def __getattr__(name: str) -> Callable[..., Awaitable[Any]]:
    file = HERE / f"{name}.py"
    if name.startswith("_") or not file.is_file():
        raise AttributeError(name)
    agent = load_plugin(file).rollout

    async def rollout(task: Any, base_url: str, session: Any) -> Any:
        endpoint = session._endpoint
        endpoint._llm = tokens = RecordedTokens(endpoint._llm)
        problem = ""
        try:
            return await agent(task, base_url, session)
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"[:300]
            raise
        finally:
            ledger = endpoint.ledger
            line = {
                "task": session.id,
                "turns": tokens.turns,
                "steps": len(session._progress.turns),
                "answers": ledger.turns,
                "conversations": len(ledger.branches),
                "checked": ledger.checked,
                "broken": ledger.broken,
                "problem": problem,
            }
            with Path(os.environ[FILE]).open("a") as out:
                out.write(json.dumps(line) + "\n")

    return rollout
