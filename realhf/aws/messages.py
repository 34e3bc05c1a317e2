"""Finds the command in a policy turn, and says in messages what an AWS episode shows.

The text is a pure function of the observation map, shared by rollouts and demonstrations. What differs between runs
(ports, times, request ids) or has no use (response metadata) is normalised or dropped, because a small model would
spend its capacity on copying it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from realhf.api.environment import AssistantMessage, Opening, Task, Turn
from realhf.aws.cli.command_text import command_lines, unwrap
from realhf.aws.tasks.task import Task as AwsTask
from realhf.base.text import shorten

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)


def extract_command(text: str) -> str | None:
    """Return the first ``aws ...`` command of a turn, or None, read as every entrance reads one (``read_command``).

    Reasoning is dropped (an unclosed ``<think>`` swallows the rest, a ``</think>`` whose opening stood in the prompt
    everything before it). A quote that is never closed holds nothing but its own line.
    """
    lines = _without_reasoning(text).replace("\r\n", "\n").split("\n")
    for number, line in enumerate(lines):
        start = unwrap(line)
        if start.startswith("aws "):
            command, closed = next(command_lines("\n".join([start, *_until_fence(lines[number + 1 :])])))
            return command if closed else start.strip()
    return None


def _without_reasoning(text: str) -> str:
    text = _THINK.sub("", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0]


def _until_fence(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines before the next code fence, which may stand at the end of the last one."""
    for line in lines:
        kept = line.strip()
        if kept.startswith("```"):
            return
        if kept.endswith("```"):
            yield kept.rstrip("`")
            return
        yield line


HINT_COMMAND = "aws help --task-hint"
"""An agent asks for a hint by it."""
OBSERVATION_CHARS = 200
"""Largest number of characters by default: what a small model reads after every turn."""
NO_COMMAND = "error: no command; reply with one line that starts with aws"
_DROPPED_KEYS = frozenset(
    {
        *("ResponseMetadata", "RequestId", "RequestCharged", "ETag", "MD5OfMessageBody", "MD5OfMessageAttributes"),
        *("ServerSideEncryption", "ChecksumCRC32", "ChecksumCRC64NVME", "ChecksumType", "IsTruncated", "Prefix"),
        *("ReceiptHandle", "Owner", "BucketArn"),
    }
)
_EMPTY = (None, "", [], {})
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?|\b1[6-9]\d{8}(?:\.\d+|\d{3})?\b"
)
_LOCAL_PORT = re.compile(r"(localhost(?:\.[a-z.]+)?|127\.0\.0\.1|localstack\.cloud):\d{2,5}\b")
_HEX = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{20,}\b")
_IAM_ID = re.compile(r"\bA[A-Z]{3}[0-9A-Z]{15,17}\b")
_SECRET_SUFFIX = re.compile(r"(:secret:[\w/+=.@-]+)-[0-9A-Za-z]{6}\b")
_ERROR_LINE = re.compile(r"error|unknown options|invalid|denied|refused|timed out", re.IGNORECASE)
_CALLED = re.compile(r"^An error occurred \((\w+)\) when calling the (\w+) operation(?: \([^)]*\))?: ?")


def observation_text(
    observation: Mapping[str, Any], *, max_chars: int = OBSERVATION_CHARS, show_ids: bool = False
) -> str:
    """Return at most ``max_chars`` characters: minified output of a success ("ok" when there is none), the last
    meaningful line of an error. Longer text keeps its head and its tail. ``show_ids``: see ``normalise``."""
    if observation["command_success"]:
        text = _compact(observation["command_output"]) or "ok"
    else:
        text = "error: " + _last_meaningful(observation["error"] or observation["command_output"])
    if observation.get("hint_text"):
        text = f"hint: {observation['hint_text']}\n{text}"
    return shorten(normalise(text, show_ids=show_ids), max_chars)


def normalise(text: str, *, show_ids: bool = False) -> str:
    """Replace ports, times, uuids, IAM ids and long hexadecimal strings by fixed words, and drop the random
    end of a secret's ARN (which AWS accepts without it). ``show_ids`` leaves uuids and hexadecimal strings as they are:
    a key or a load balancer can be named by them alone."""
    text = _LOCAL_PORT.sub(r"\1:4566", text)
    text = _TIME.sub("TIME", text)
    text = text if show_ids else _UUID.sub("UUID", text)
    text = _IAM_ID.sub("ID", text)
    text = _SECRET_SUFFIX.sub(r"\1", text)
    return text if show_ids else _HEX.sub("HEX", text)


def _compact(output: str) -> str:
    output = output.strip()
    if output[:1] in ("{", "["):
        try:
            return json.dumps(_without_noise(json.loads(output)), separators=(",", ":"), ensure_ascii=False)
        except ValueError:
            pass
    return "\n".join(" ".join(line.split()) for line in output.splitlines() if line.strip())


def _without_noise(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not _is_noise(key)}
        told = {key: _without_noise(item) for key, item in kept.items() if item not in _EMPTY}
        return told or kept
    if isinstance(value, list):
        return [_without_noise(item) for item in value]
    return value


def _is_noise(key: str) -> bool:
    return key in _DROPPED_KEYS or key.endswith(("Date", "Time", "Timestamp"))


def _last_meaningful(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines:
        return "command failed"
    line = next((line for line in reversed(lines) if _ERROR_LINE.search(line)), lines[-1])
    line = _CALLED.sub(r"\1: ", line).removeprefix("aws: error: ").removeprefix("error: ")
    return line


PLAYGROUND_COMMAND, PLAYGROUND_URL = "aws-env", "http://127.0.0.1:8100/web"
_NOT_SHOWN = ("account_changes", "account_key")
_COLUMNS = ("service", "type", "name", "before", "after", "calls")


def episode_task(task: AwsTask, spare_turns: int | None = None, **reset: Any) -> Task:
    """Return a task of AWS in the form of the contract, with ``spare_turns`` turns beside those of its solution and of
    a look at each thing that may have drifted (None: as many as a run allows); ``reset`` are further arguments of the
    episode's reset."""
    payload = {"task": task.to_json(), **reset}
    needed = len(task.solution) + len(task.possible_drifts)
    most = 0 if spare_turns is None else max(1, needed + spare_turns)  # 0 would be no limit
    return Task(
        f"{task.template}-{task.seed}", task.tier, payload, seed=task.seed, template=task.template, max_turns=most
    )


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
    shown = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
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


def task_opening(observation: Mapping[str, Any], *, info: Mapping[str, Any] | None = None) -> Opening:
    """Return the opening of an episode: the description of its task, and what the account should look like, where the
    task says so: without it the agent could only guess what drifted."""
    shown = observation.get("task") or {}
    parts = [shown.get("description", "")]
    if shown.get("desired_state_spec"):
        parts.append(shown["desired_state_spec"])
    text = "\n\n".join(parts)
    return Opening([{"role": "user", "content": text}], info=info or {}, state_key=account_key(observation))


def account_key(observation: Mapping[str, Any]) -> str:
    """Return a digest of the account: the server's own, of the account as it is. Where there is none (a real account,
    or one that could not be read) one of what the commands did: of the calls that changed each resource, in their
    order. Reads, and what failed, leave it as it was."""
    return observation.get("account_key") or _digest(
        json.dumps(observation.get("account_changes") or [], sort_keys=True)
    )


@lru_cache(maxsize=1024)
def _digest(changes: str) -> str:
    """Return the digest of changes without what differs between runs. Most turns change nothing, and rollouts of a
    group often the same."""
    return hashlib.sha256(normalise(changes).encode()).hexdigest()


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
    show_ids: bool = False,
    info: Mapping[str, Any] | None = None,
) -> Turn:
    """Return the answer to a command. ``final``: its reward is the score of the episode so far."""
    return Turn(
        [{"role": "user", "content": observation_text(observation, max_chars=observation_chars, show_ids=show_ids)}],
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
        state_key=account_key(observation),
    )


def told(text: str, state_key: str = "") -> Turn:
    """Return the answer to a turn of which nothing was run, in an account of ``state_key``."""
    return Turn([{"role": "user", "content": text}], state_key=state_key)
