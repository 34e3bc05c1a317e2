"""Process that runs command lines in the CLI driver, with or without its short cuts, and tells all
that came of it.

    python -m tests.aws.cli.command_recorder (quick|plain) (SERVICES|all) [descriptor of a connection]

SERVICES, with commas between them, are loaded before the first command; SERVICE/OPERATION loads one
operation, allowed or not. Each line of its input is
JSON, ``{"commands": [...], "answers": [...]}``: the simulator's answers that are replayed if there is
no connection. Each line of its output is JSON: ``results`` has one entry for each command, which holds
what the worker answers, the requests as sent, and the answers that they got. Of a command whose output
runs away, it holds the process's largest size instead of an answer. ``plan_runs`` counts the commands
and the calls that were run by plans so far, and ``without_plan`` lists the operations whose commands
or calls never are.
"""

import base64
import itertools
import json
import os
import re
import resource
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import awscli  # noqa: F401  (must be first: makes the name botocore refer to the CLI's own copy)

from realhf.aws.cli import short_cuts
from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.plain_calls import CallPlan
from realhf.aws.cli.plain_commands import CommandPlan
from realhf.aws.cli.policy import check_command
from realhf.aws.cli.worker import CliWorker, RunawayOutput

DATA_BYTES = 1 << 30
"""Maximum memory of the process, as that of a worker is limited."""


def main() -> None:
    """Answer lines until the input ends."""
    if sys.argv[1] == "plain":
        short_cuts.install = lambda session, has_document: None
        short_cuts.prepare = lambda *parts: None
    descriptors = [int(word) for word in sys.argv[3:]]
    services = ALLOWED if sys.argv[2] == "all" else sys.argv[2].split(",")
    sys.argv = ["aws"]  # the parsers name the program after it
    numbers = itertools.count()
    uuid.uuid4 = lambda: uuid.UUID(int=next(numbers), version=4)  # tokens of requests
    time.sleep = lambda seconds: None  # before it tries again, up to half a minute
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    plan_runs = {"commands": 0, "calls": 0}
    _count(CommandPlan, "invoke", plan_runs, "commands")
    _count(CallPlan, "call", plan_runs, "calls")
    worker = CliWorker("000000000000")
    operations = dict(map(_read_service, services))
    worker.cli.preload(operations)
    without_plan = sorted(_find_without_plan(worker.cli, operations))
    connection = worker.cli.connection
    exchange = connection._exchange
    sent: list[str] = []
    answers: list[Any] = []
    got: list[Any] = []

    def replay(data: bytes, method: str) -> tuple[int, dict[str, str], bytes]:
        sent.append(base64.b64encode(data).decode())
        if descriptors:
            status, headers, body = exchange(data, method)
            got.append([status, headers, base64.b64encode(body).decode()])
            return status, headers, body
        status, headers, text = answers.pop(0)
        return status, headers, base64.b64decode(text)

    connection._exchange = replay  # type: ignore[method-assign]
    if descriptors:
        connection.attach(socket.socket(fileno=descriptors[0]))
    os.chdir(tempfile.mkdtemp())
    for line in sys.stdin:
        request = json.loads(line)
        answers[:] = request["answers"]
        results = []
        for command in request["commands"]:
            verdict = check_command(command)
            # Refused commands as well: the driver must be as it was whatever the policy lets by.
            words = [*verdict.argv, *verdict.own.words] or command.split()[1:]
            sent.clear()
            got.clear()
            try:
                answer = worker._answer(words, 1 << 20, 1 << 20)
            except RunawayOutput:
                answer = {"runaway": True, "peak_bytes": read_peak_bytes()}
            results.append({**answer, "sent": [*sent], "got": [*got]})
        answer = {"results": results, "plan_runs": plan_runs, "without_plan": without_plan}
        print(json.dumps(answer), flush=True)


def _read_service(word: str) -> tuple[str, frozenset[str]]:
    service, _, operation = word.partition("/")
    return service, frozenset({operation}) if operation else ALLOWED[service]


def _count(plan: Any, method: str, counts: dict[str, int], key: str) -> None:
    """Count the calls of a plan's method."""
    original = getattr(plan, method)

    def counted(*arguments: Any) -> Any:
        counts[key] += 1
        return original(*arguments)

    setattr(plan, method, counted)


def _find_without_plan(cli: Any, operations: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the operations of which no command, or no call, is run by a plan."""
    found = set()
    commands = cli._driver._get_command_table()
    for service, names in operations.items():
        if service == "s3":  # has no operations of its own
            continue
        for name in names:
            operation = commands[service]._get_command_table()[name]
            plan = getattr(operation, "_plan", None)
            client = cli._get_client(commands[service]._service_name)
            calls = getattr(client, "_plans", {}).get(operation._operation_model.name)
            if plan is None or not plan.is_plain or calls is None or not calls.is_plain:
                found.add(f"{service} {name}")
    return found


def read_peak_bytes() -> int:
    """Return the largest resident memory of this process. That of ``getrusage`` begins with what
    the process had that started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[0]) << 10


if __name__ == "__main__":
    main()
