"""A CLI worker that an agent has taken over: a real process that answers what it likes and runs
nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

from realhf.aws.cli.executor import CliExecutor
from realhf.aws.tasks.task import Task
from realhf.env.containment.fork_server import ForkedProcess

_PROGRAM = """
import socket, struct, sys
answer = sys.stdin.buffer.read()
channel = socket.socket(fileno=int(sys.argv[1]))
stream = channel.makefile("rb")
while header := stream.read(4):
    stream.read(struct.unpack(">I", header)[0])
    channel.sendall(answer)
"""


SENT = {
    "service": "s3",
    "operation": "PutBucketVersioning",
    "params": {"Bucket": "ledger"},
    "status": 200,
    "error_code": "",
}
"""A request that would solve ``versioning_task``, as a worker reports it."""


def versioning_task(**fields: object) -> Task:
    """Turn versioning on; graded by a command."""
    look = "aws s3api get-bucket-versioning --bucket ledger"
    data = {
        "task_id": 9100,
        "difficulty": "expert",
        "description": "Turn on versioning of the bucket ledger.",
        "setup_commands": ["aws s3 mb s3://ledger"],
        "success_criteria": {
            "state_checks": [{"command": look, "json_path": "Status", "expected": "Enabled"}]
        },
    }
    return Task.from_json(data | fields)


def framed(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def forged(
    stdout: str = "", requests: list[dict[str, Any]] | None = None, **other: Any
) -> dict[str, Any]:
    """A well-formed reply that says that all went well."""
    return {
        "exit_code": 0,
        "stdout": stdout,
        "stderr": "",
        "refusal": None,
        "requests": requests or [],
        "last": False,
        "truncated": False,
        **other,
    }


class CompromisedWorker:
    """Stands in the place of the workers of ``executor`` and sends ``answer`` for every frame,
    until ``close``."""

    def __init__(self, executor: CliExecutor, answer: bytes) -> None:
        self._executor = executor
        self._answer = answer
        self._spawn = executor._spawn
        self._programs: list[subprocess.Popen[bytes]] = []
        executor.stop()
        executor._spawn = self._spawn_forger

    def _spawn_forger(self) -> tuple[ForkedProcess, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-S", "-c", _PROGRAM, str(theirs.fileno())]
            program = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),))
        assert program.stdin is not None
        with program.stdin:
            program.stdin.write(self._answer)
        self._programs.append(program)
        return ForkedProcess(program.pid, os.pidfd_open(program.pid), "a compromised worker"), ours

    def close(self) -> None:
        """The executor gets real workers again."""
        self._executor.stop()
        self._executor._spawn = self._spawn
        for program in self._programs:
            program.kill()
            program.wait()
