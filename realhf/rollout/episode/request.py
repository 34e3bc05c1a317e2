"""Says what an episode is to be, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.environment import Task


@dataclass(frozen=True)
class Limits:
    """Bounds an episode: policy turns, tokens of prompt and completion together, and ``turn_tokens``, the room that a
    policy turn must have (the engine's max_new_tokens)."""

    max_turns: int
    max_total_tokens: int
    turn_tokens: int


@dataclass(frozen=True)
class EpisodeRequest:
    """Asks for one episode of ``task``. ``index`` is its place among those that are asked for together.
    ``sampling_seed`` starts the stream of random numbers of its tokens (None: the engine's call decides, see
    ``GenRequest.seed``)."""

    index: int
    task: Task
    sampling_seed: int | None = None
