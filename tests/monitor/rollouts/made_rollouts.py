"""Makes rollouts, for tests of what is kept of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from realhf.api.environment import AssistantMessage, ToolCall
from realhf.api.rollout import PlayedTurn, RolloutOutcome
from realhf.api.trace import PlayedSample, TrainedRows


def outcome(
    reward: float | None = 1.0, *, text: str = "aws s3 ls", status: str = "achieved", **changed: Any
) -> Any:
    said = AssistantMessage(
        text, (ToolCall("shell", {"command": text}, "call-1"),), "I think", f"<t>{text}"
    )
    turn = PlayedTurn(
        text,
        "ok",
        reward or 0.0,
        said,
        [{"role": "tool", "content": "ok"}],
        metrics={"progress": 1.0},
        info={"a": 1},
    )
    values: dict[str, Any] = {
        "status": status,
        "prompt_ids": [1, 2, 3],
        "completion_ids": [4, 5, 6],
        "logprobs": [-0.5, -0.25, 0.0],
        "versions": [3, 4, -1],
        "loss_mask": [True, True, False],
        "reward": reward,
        "achieved": reward == 1.0,
        "progress": 1.0,
        "turns": (turn,),
        "task_id": "make-bucket",
        "group": "beginner",
        "seed": 7,
        "turn_starts": [0],
        "turn_rewards": [reward or 0.0],
        "opening": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "make a bucket"},
        ],
        "timings": {"wall_s": 0.5},
    }
    return RolloutOutcome(**(values | changed))


def sample(
    id: str = "make-bucket@0", step: int = 4, outcomes: Any = None, **changed: Any
) -> PlayedSample:
    rollouts = outcomes if outcomes is not None else [outcome(), outcome(0.0, status="finished")]
    return PlayedSample(id, rollouts, step, env="aws", sampling={"temperature": 1.0}, **changed)


def trained(ids: list[str], step: int = 4, rows: int = 2) -> TrainedRows:
    """Rows of five predicted tokens, the last three of which train, except in the last row."""
    n = len(ids) * rows
    mask = np.tile([False, False, True, True, True], n)
    mask[-5:] = False
    behaviour = np.tile(np.array([0, 0, -1.0, -0.5, -0.25], np.float32), n)
    return TrainedRows(
        step,
        ids,
        [rows] * len(ids),
        np.full(n, 5),
        mask,
        behaviour,
        behaviour + np.float32(0.125),
        behaviour + np.float32(0.25),
        np.tile(np.array([1, 1, 1.0, 1.5, 0.5], np.float32), n),
        np.tile(np.array([0, 0, 2.0, 2.0, 2.0], np.float32), n),
        np.tile([False, False, False, True, False], n),
        np.tile(np.array([-1, -1, 3, 3, 4], np.int32), n),
    )
