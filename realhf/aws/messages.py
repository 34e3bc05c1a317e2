"""Conversion between AWS episodes and chat messages: finds the command in a policy turn, and
formats observations as text.

The text is a pure function of the observation, shared by rollouts and demonstrations. Values that
differ between runs (ports, times, request ids) or carry no information (response metadata) are
normalised or dropped, because a small model would spend its capacity on copying them.
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
    """Return the first ``aws ...`` command of a turn, cleaned up as by ``read_command``, or None if
    there is none.

    Reasoning is dropped: an unclosed ``<think>`` removes the rest of the text, and a ``</think>``
    whose opening tag was in the prompt removes everything before it. If a quote is never closed,
    the command ends with its line.
    """
    lines = _strip_reasoning(text).replace("\r\n", "\n").split("\n")
    for number, line in enumerate(lines):
        start = unwrap(line)
        if start.startswith("aws "):
            command, closed = next(
                command_lines("\n".join([start, *_until_fence(lines[number + 1 :])]))
            )
            return command if closed else start.strip()
    return None


def _strip_reasoning(text: str) -> str:
    text = _THINK.sub("", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0]


def _until_fence(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines before the next code fence, which may also be at the end of the last line."""
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("```"):
            return
        if stripped.endswith("```"):
            yield stripped.rstrip("`")
            return
        yield line


HINT_COMMAND = "aws help --task-hint"
"""The command that requests a hint."""
OBSERVATION_CHARS = 200
"""Default length limit of an observation, in characters. It is small because a small model has to
read one after every turn."""
NO_COMMAND = "error: no command; reply with one line that starts with aws"
"""Answer to a turn without a command."""
_DROPPED_KEYS = frozenset(
    {
        *(
            "ResponseMetadata",
            "RequestId",
            "RequestCharged",
            "ETag",
            "MD5OfMessageBody",
            "MD5OfMessageAttributes",
        ),
        *(
            "ServerSideEncryption",
            "ChecksumCRC32",
            "ChecksumCRC64NVME",
            "ChecksumType",
            "IsTruncated",
            "Prefix",
        ),
        *("ReceiptHandle", "Owner", "BucketArn"),
    }
)
"""Response keys without information for the policy."""
_EMPTY = (None, "", [], {})
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?|\b1[6-9]\d{8}(?:\.\d+|\d{3})?\b"
)
"""ISO 8601 times and Unix times in seconds or milliseconds."""
_LOCAL_PORT = re.compile(r"(localhost(?:\.[a-z.]+)?|127\.0\.0\.1|localstack\.cloud):\d{2,5}\b")
_HEX = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{20,}\b")
_IAM_ID = re.compile(r"\bA[A-Z]{3}[0-9A-Z]{15,17}\b")
_SECRET_SUFFIX = re.compile(r"(:secret:[\w/+=.@-]+)-[0-9A-Za-z]{6}\b")
_ERROR_LINE = re.compile(r"error|unknown options|invalid|denied|refused|timed out", re.IGNORECASE)
"""Lines of an error output that state the error."""
_CALL_ERROR = re.compile(
    r"^An error occurred \((\w+)\) when calling the (\w+) operation(?: \([^)]*\))?: ?"
)
"""Prefix of an API error in the output of the AWS CLI."""


def observation_text(
    observation: Mapping[str, Any], *, max_chars: int = OBSERVATION_CHARS, show_ids: bool = False
) -> str:
    """Return an observation as text of at most ``max_chars`` characters.

    For a successful command this is its minified output ("ok" if empty), otherwise the line that
    states the error. A hint comes first. Of longer text, the head and the tail are kept.
    ``show_ids``: see ``normalise``.
    """
    if observation["command_success"]:
        text = _minify(observation["command_output"]) or "ok"
    else:
        text = "error: " + _error_line(observation["error"] or observation["command_output"])
    if observation.get("hint_text"):
        text = f"hint: {observation['hint_text']}\n{text}"
    return shorten(normalise(text, show_ids=show_ids), max_chars)


def normalise(text: str, *, show_ids: bool = False) -> str:
    """Replace ports, times, UUIDs, IAM ids and long hexadecimal strings with fixed words, and drop
    the random suffix of a secret's ARN (AWS accepts the ARN without it). ``show_ids`` keeps UUIDs
    and hexadecimal strings, because a key or a load balancer can only be named by its id."""
    text = _LOCAL_PORT.sub(r"\1:4566", text)
    text = _TIME.sub("TIME", text)
    text = text if show_ids else _UUID.sub("UUID", text)
    text = _IAM_ID.sub("ID", text)
    text = _SECRET_SUFFIX.sub(r"\1", text)
    return text if show_ids else _HEX.sub("HEX", text)


def _minify(output: str) -> str:
    output = output.strip()
    if output[:1] in ("{", "["):
        try:
            return json.dumps(
                _drop_noise(json.loads(output)), separators=(",", ":"), ensure_ascii=False
            )
        except ValueError:
            pass
    return "\n".join(" ".join(line.split()) for line in output.splitlines() if line.strip())


def _drop_noise(value: Any) -> Any:
    if isinstance(value, dict):
        wanted = {key: item for key, item in value.items() if not _is_noise(key)}
        non_empty = {key: _drop_noise(item) for key, item in wanted.items() if item not in _EMPTY}
        return non_empty or wanted
    if isinstance(value, list):
        return [_drop_noise(item) for item in value]
    return value


def _is_noise(key: str) -> bool:
    return key in _DROPPED_KEYS or key.endswith(("Date", "Time", "Timestamp"))


def _error_line(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines:
        return "command failed"
    line = next((line for line in reversed(lines) if _ERROR_LINE.search(line)), lines[-1])
    line = _CALL_ERROR.sub(r"\1: ", line).removeprefix("aws: error: ").removeprefix("error: ")
    return line


PLAYGROUND_COMMAND = "aws-env"
PLAYGROUND_URL = "http://127.0.0.1:8100/web"
"""Command that starts the playground, and the playground's default address."""
_HIDDEN_FIELDS = ("account_changes", "account_key")
_COLUMNS = ("service", "type", "name", "before", "after", "calls")


def episode_task(task: AwsTask, spare_turns: int | None = None, **reset: Any) -> Task:
    """Return an AWS task in the format of the environment contract.

    Its turn limit is the number of commands in its solution, plus one look at each resource that
    may have drifted, plus ``spare_turns`` (None: no limit of its own, only that of the run).
    ``reset``: further reset arguments of the episode.
    """
    payload = {"task": task.to_json(), **reset}
    solution_turns = len(task.solution) + len(task.possible_drifts)
    # 0 means no limit
    max_turns = 0 if spare_turns is None else max(1, solution_turns + spare_turns)
    return Task(
        f"{task.template}-{task.seed}",
        task.tier,
        payload,
        seed=task.seed,
        template=task.template,
        max_turns=max_turns,
    )


def replay_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``replay`` entry of ``Opening.info``, which describes how a person can play the
    task's episode by hand. ``payload`` is the payload of a task built by ``episode_task``; returns
    {} if it contains no AWS task."""
    task = payload.get("task")
    if not isinstance(task, Mapping):
        return {}
    order = {
        "task_id": task.get("task_id"),
        "seed": task.get("seed"),
        "split": payload.get("split"),
    }
    order = {name: value for name, value in order.items() if value is not None}
    start = {"title": "AWS playground", "command": PLAYGROUND_COMMAND, "url": PLAYGROUND_URL}
    return {"replay": {**start, "order": order | {"chaos": bool(payload.get("chaos"))}}}


def turn_info(command: str, observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``Turn.info`` for the answer to a command. It is meant for people: ``did`` (the
    command), ``observation`` (without the account's changes and digest) and, if the episode's
    commands have changed the account, ``view`` (a table of these changes)."""
    changes = observation.get("account_changes") or ()
    visible = {name: value for name, value in observation.items() if name not in _HIDDEN_FIELDS}
    info: dict[str, Any] = {"did": command, "observation": visible}
    rows = [
        [_cell(change, name) for name in _COLUMNS] for change in changes if "more" not in change
    ]
    if rows:
        more = sum(change["more"] for change in changes if "more" in change)
        note = f"{more} more calls changed other resources." if more else ""
        info["view"] = {
            "title": "What its commands changed in the account",
            "columns": _COLUMNS,
            "rows": rows,
        }
        info["view"] |= {"note": note} if note else {}
    return info


def _cell(change: Mapping[str, Any], name: str) -> str:
    value = change.get(name, "")
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def task_opening(
    observation: Mapping[str, Any], *, info: Mapping[str, Any] | None = None
) -> Opening:
    """Return the opening of an episode: the task description and, if the task has one, the desired
    state of the account, without which the agent could only guess what has drifted."""
    task = observation.get("task") or {}
    parts = [task.get("description", "")]
    if task.get("desired_state_spec"):
        parts.append(task["desired_state_spec"])
    text = "\n\n".join(parts)
    return Opening(
        [{"role": "user", "content": text}], info=info or {}, state_key=account_key(observation)
    )


def account_key(observation: Mapping[str, Any]) -> str:
    """Return the server's digest of the account's state.

    If there is none (a real account, or one that could not be read), return a digest of the calls
    that changed each resource, in order. Reads and failed calls do not change it.
    """
    return observation.get("account_key") or _digest(
        json.dumps(observation.get("account_changes") or [], sort_keys=True)
    )


@lru_cache(maxsize=1024)
def _digest(changes: str) -> str:
    """Return the SHA-256 digest of the normalised text. Cached, because most turns change nothing
    and the rollouts of a group often make the same changes."""
    return hashlib.sha256(normalise(changes).encode()).hexdigest()


def command_of(message: AssistantMessage) -> str | None:
    """Return the command in a turn of the policy, or None."""
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
    """Return the turn that answers a command. ``final``: ``reward`` is the score of the episode so
    far, see ``Turn.final``."""
    return Turn(
        [
            {
                "role": "user",
                "content": observation_text(
                    observation, max_chars=observation_chars, show_ids=show_ids
                ),
            }
        ],
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


def message_turn(text: str, state_key: str = "") -> Turn:
    """Return a turn for a policy message that ran no command. ``state_key`` is the digest of the
    unchanged account."""
    return Turn([{"role": "user", "content": text}], state_key=state_key)
