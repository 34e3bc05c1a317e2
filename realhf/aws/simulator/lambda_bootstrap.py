"""Entry point inside a Lambda sandbox: limits its own process, then calls the handler. It uses the
standard library only.

stdin: the broker's request. stdout: ``{"body", "error"}``. stderr: the function's output.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import resource
import sys
import traceback
from typing import Any

_LIMITS = {
    resource.RLIMIT_CPU: 2,
    resource.RLIMIT_AS: 128 << 20,
    resource.RLIMIT_FSIZE: 8 << 20,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_NPROC: 16,
    resource.RLIMIT_CORE: 0,
}
"""Resource limits of the process. CPU time is in seconds, memory and file sizes are in bytes."""


class Context:
    """The context object that a handler receives together with its event."""

    def __init__(self, name: str, timeout_s: int) -> None:
        self.function_name = name
        self.aws_request_id = "00000000-0000-0000-0000-000000000000"
        self.memory_limit_in_mb = 128
        self._timeout_ms = timeout_s * 1000

    def get_remaining_time_in_millis(self) -> int:
        """Return the function's timeout in milliseconds. It does not count down."""
        return self._timeout_ms


def main() -> None:
    """Limit this process, call the handler and write its result."""
    for kind, value in _LIMITS.items():
        resource.setrlimit(kind, (value, value))
    request = json.load(sys.stdin)
    sys.path.insert(0, os.path.dirname(__file__))
    if not importlib.import_module("seccomp").install():
        raise SystemExit("no system call filter for this machine: code is not run")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        body = _handle(request)
        error = False
        text = json.dumps({"body": body, "error": error})
    except BaseException as problem:
        traceback.print_exc()
        body = {"errorType": type(problem).__name__, "errorMessage": str(problem)[:1000]}
        text = json.dumps({"body": body, "error": True})
    sys.stdout.flush()
    answers.write(text)
    answers.close()
    os._exit(0)


def _handle(request: dict[str, Any]) -> Any:
    """Load the function from its archive, call its handler and return the result."""
    with open("/tmp/code.zip", "wb") as file:
        file.write(base64.b64decode(request["code"]))
    sys.path.insert(0, "/tmp/code.zip")
    os.environ.update({str(name): str(value) for name, value in request["variables"].items()})
    module, _, function = request["handler"].rpartition(".")
    handler = getattr(importlib.import_module(module.replace("/", ".")), function)
    return handler(request["event"], Context(request["name"], request["timeout_s"]))


if __name__ == "__main__":
    main()
