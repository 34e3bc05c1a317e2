"""Says in messages what an AWS episode shows: the same wherever its commands run, on a server or in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, Opening, Task, Turn
from realhf.aws.extraction import extract_command
from realhf.aws.observation_text import OBSERVATION_CHARS, observation_text
from realhf.aws.tasks.task import Task as AwsTask


def episode_task(task: AwsTask, **reset: Any) -> Task:
    """Return a task of AWS in the form of the contract; ``reset`` are further arguments of the episode's reset."""
    return Task(f"{task.template}-{task.seed}", task.tier, {"task": task.to_json(), **reset}, seed=task.seed)


def task_opening(
    observation: Mapping[str, Any], *, desired_state: bool = False, info: Mapping[str, Any] | None = None
) -> Opening:
    """Return the opening of an episode: the description of its task, and with ``desired_state`` what the account should
    look like, where the task says so."""
    shown = observation.get("task") or {}
    parts = [shown.get("description", "")]
    if desired_state and shown.get("desired_state_spec"):
        parts.append(shown["desired_state_spec"])
    return Opening([{"role": "user", "content": "\n\n".join(parts)}], info=info or {})


def command_of(message: AssistantMessage) -> str | None:
    """Return the command that a turn of the policy holds, or None."""
    return extract_command(message.text or message.content)


def command_turn(
    observation: Mapping[str, Any],
    reward: float,
    done: bool,
    *,
    final: bool = False,
    observation_chars: int = OBSERVATION_CHARS,
    info: Mapping[str, Any] | None = None,
) -> Turn:
    """Return the answer to a command. ``final``: its reward is the score of the episode so far."""
    return Turn(
        [{"role": "user", "content": observation_text(observation, max_chars=observation_chars)}],
        done=done,
        reward=reward,
        metrics={"success": float(observation["task_achieved"]), "progress": float(observation["partial_progress"])},
        info=info or {},
        final=final,
    )


def told(text: str) -> Turn:
    """Return the answer to a turn of which nothing was run."""
    return Turn([{"role": "user", "content": text}])
