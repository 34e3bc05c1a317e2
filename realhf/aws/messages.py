"""Says in messages what an AWS episode shows: the same wherever its commands run, on a server or in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, Opening, Task, Turn
from realhf.aws.extraction import extract_command
from realhf.aws.observation_text import OBSERVATION_CHARS, observation_text
from realhf.aws.tasks.task import Task as AwsTask

PLAYGROUND_COMMAND, PLAYGROUND_URL = "aws-env", "http://127.0.0.1:8100/web"
_COLUMNS = ("service", "type", "name", "before", "after", "calls")


def episode_task(task: AwsTask, **reset: Any) -> Task:
    """Return a task of AWS in the form of the contract; ``reset`` are further arguments of the episode's reset."""
    payload = {"task": task.to_json(), **reset}
    return Task(f"{task.template}-{task.seed}", task.tier, payload, seed=task.seed, template=task.template)


def replay_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return for people how the episode of a task (the payload of ``episode_task``) is played again by hand: ``replay``
    of ``Opening.info``, or nothing where the payload holds no task."""
    task = payload.get("task")
    if not isinstance(task, Mapping):
        return {}
    order = {"task_id": task.get("task_id"), "seed": task.get("seed"), "split": payload.get("split")}
    order = {name: value for name, value in order.items() if value is not None}
    start = {"title": "AWS playground", "command": PLAYGROUND_COMMAND, "url": PLAYGROUND_URL}
    return {"replay": {**start, "order": order | {"chaos": bool(payload.get("chaos"))}}}


def told_people(command: str, observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``info`` of the answer to a command: ``did``, the whole ``observation``, and ``view``, what the commands
    so far changed in the account (see ``Turn.info``)."""
    changes = observation.get("account_changes") or ()
    shown = {name: value for name, value in observation.items() if name != "account_changes"}
    found: dict[str, Any] = {"did": command, "observation": shown}
    rows = [[_cell(change, name) for name in _COLUMNS] for change in changes if "more" not in change]
    if rows:
        more = sum(change["more"] for change in changes if "more" in change)
        note = f"{more} more calls changed other resources." if more else ""
        found["view"] = {"title": "What its commands changed in the account", "columns": _COLUMNS, "rows": rows}
        found["view"] |= {"note": note} if note else {}
    return found


def _cell(change: Mapping[str, Any], name: str) -> str:
    value = change.get(name, "")
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


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
        metrics={
            "success": float(observation["task_achieved"]),
            "progress": float(observation["partial_progress"]),
            "simulator_lost": float(bool(observation.get("simulator_lost"))),
            "account_unreadable": float(bool(observation.get("account_unreadable"))),
        },
        info=info or {},
        final=final,
    )


def told(text: str) -> Turn:
    """Return the answer to a turn of which nothing was run."""
    return Turn([{"role": "user", "content": text}])
