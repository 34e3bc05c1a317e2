"""Checks a pool before it serves: code is uploaded, invoked and event-triggered, and must have no effect on the host.

It speaks plain HTTP to one simulator; all others are forks of the same zygote. Source: docs/reference/environment.md 5.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import select
import socket
import time
import urllib.parse
import zipfile
from collections.abc import Iterator
from pathlib import Path

from realhf.aws.simulator.ministack_process import MiniStackProcess
from realhf.env.containment.probe import NotContained

_ROLE = "arn:aws:iam::000000000000:role/self-test"
_FUNCTION = "/2015-03-31/functions"
_EFFECT_S = 0.1
_ANSWER_S = 30.0
"""Seconds to wait for an answer. A simulator answers in milliseconds, but on a machine that starts many things at once
it may take seconds."""
_CODE = """
import os, socket
def touch(path):
    try:
        open(path, "w").close()
    except OSError:
        pass
for path in {paths!r}:
    touch(path)
def handler(event, context):
    for path in {paths!r}:
        touch(path)
    try:
        socket.create_connection(("127.0.0.1", {port}), timeout=1)
    except OSError:
        return "ran, contained"
    return "ran, connected"
"""


def startup_check(simulator: MiniStackProcess, root: Path, lambda_mode: str) -> tuple[str, ...]:
    """Return what was tried without effect. Raises NotContained, and TimeoutError when the simulator does not answer.

    ``root`` is the pool's folder; markers would appear there, in the simulator's own folder and in /tmp.
    """
    with socket.create_server(("127.0.0.1", 0)) as canary:
        port = canary.getsockname()[1]
        marker = root / "self-test-marker"
        markers = [marker, root / "simulators" / "0" / marker.name, Path("/tmp") / f"{root.name}-marker"]
        with _patience():
            answer = _invoke_and_trigger(simulator, [str(path) for path in markers], port)
        called = bool(select.select([canary], [], [], _EFFECT_S)[0])
        inside = Path(f"/proc/{simulator.pid}/root")
        seen = [str(path) for path in markers if path.exists() or (inside / str(path)[1:]).exists()]
        for path in markers:
            path.unlink(missing_ok=True)
    if seen:
        raise NotContained(f"self-test: code of a Lambda function wrote {', '.join(seen)}")
    if called:
        raise NotContained("self-test: something inside the sandbox connected out")
    expected = "ran, contained" if lambda_mode == "sandbox" else "stub"
    if expected not in answer:
        raise NotContained(f"self-test: LAMBDA={lambda_mode} should answer {expected!r}, got {answer[:200]!r}")
    with _patience():
        simulator.reset(0, _ANSWER_S)
    return ("function invoked and event-triggered: no marker", "connect-out: failed")


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TimeoutError(
            f"the self-test at start got no answer from its simulator within {_ANSWER_S:g} s ({error}); "
            "the machine may be overloaded: start again, or with fewer sessions"
        ) from error


def _invoke_and_trigger(simulator: MiniStackProcess, markers: list[str], port: int) -> str:
    """Invoke the function directly, by an event and with calls out over HTTP; returns the answer of the direct call."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("index.py", _CODE.format(paths=markers, port=port))
    function = {
        "FunctionName": "self-test",
        "Runtime": "python3.12",
        "Handler": "index.handler",
        "Role": _ROLE,
        "Code": {"ZipFile": base64.b64encode(archive.getvalue()).decode()},
    }
    created = simulator.ask("POST", _FUNCTION, "lambda", _ANSWER_S, body=json.dumps(function).encode())
    arn = json.loads(created)["FunctionArn"]
    path = f"{_FUNCTION}/self-test/invocations"
    answer = simulator.ask("POST", path, "lambda", _ANSWER_S, body=b"{}").decode()
    simulator.ask("POST", path, "lambda", _ANSWER_S, {"X-Amz-Invocation-Type": "Event"}, b"{}")
    topic = _sns(simulator, Action="CreateTopic", Name="self-test")
    arn_of_topic = topic.partition("<TopicArn>")[2].partition("<")[0]
    _sns(simulator, Action="Subscribe", TopicArn=arn_of_topic, Protocol="lambda", Endpoint=arn)
    _sns(simulator, Action="Subscribe", TopicArn=arn_of_topic, Protocol="http", Endpoint=f"http://127.0.0.1:{port}/")
    _sns(simulator, Action="Publish", TopicArn=arn_of_topic, Message="self-test")
    time.sleep(_EFFECT_S)
    return answer


def _sns(simulator: MiniStackProcess, **parameters: str) -> str:
    body = urllib.parse.urlencode({"Version": "2010-03-31", **parameters}).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    return simulator.ask("POST", "/", "sns", _ANSWER_S, headers, body).decode()
