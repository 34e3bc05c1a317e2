"""Handles Lambda code on the simulator's side: it is never run here, but answered with a fixed result or sent to the
broker.

Source: docs/reference/environment.md 5, row 8.
"""

from __future__ import annotations

import base64
import importlib
import select
import socket
import threading
from typing import Any

from realhf.env.containment.frames import frame, read_frame

_EXECUTORS = ("proxy", "docker", "provided", "provided_warm", "warm", "local")
_ANSWER_S = 20.0


class LambdaGate:
    """Replaces every executor of MiniStack. Without a channel (LAMBDA=stub) no code is even read."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._stream: Any = None
        self._lock = threading.Lock()

    def install(self) -> None:
        """Replace the executors. Raises RuntimeError when this version of MiniStack has other executors than those
        known."""
        module = importlib.import_module("ministack.services.lambda_svc")
        for executor in _EXECUTORS:
            if not hasattr(module, f"_execute_function_{executor}"):
                raise RuntimeError(f"this version of ministack has no Lambda executor {executor}: not contained")
            setattr(module, f"_execute_function_{executor}", self.execute)

    def attach(self, channel: socket.socket) -> None:
        """Send code to the broker at the other end from now on."""
        self._channel = channel
        self._stream = channel.makefile("rb")

    def execute(self, func: dict[str, Any], event: Any, *_: Any) -> dict[str, Any]:
        """Return MiniStack's result of one invocation: ``body``, ``log``, ``error``."""
        if self._channel is None:
            return {"body": {"statusCode": 200, "body": "stub"}, "log": "", "error": False}
        config = func.get("config") or func
        request = {
            "code": base64.b64encode(func.get("code_zip") or b"").decode(),
            "handler": str(config.get("Handler", "")),
            "runtime": str(config.get("Runtime", "")),
            "name": str(config.get("FunctionName", "")),
            "variables": (config.get("Environment") or {}).get("Variables") or {},
            "timeout_s": int(config.get("Timeout") or 3),
            "event": event,
        }
        with self._lock:
            try:
                self._channel.sendall(frame(request))
                if not select.select([self._channel], [], [], _ANSWER_S)[0]:
                    raise TimeoutError(f"the Lambda broker did not answer within {_ANSWER_S:g} s")
                answer = read_frame(self._stream)
            except OSError as error:
                self._channel.close()  # a late answer must not become the next one's
                return _failed("Service.Unavailable", str(error))
        return answer or _failed("Service.Unavailable", "the Lambda broker ended")


def _failed(kind: str, message: str) -> dict[str, Any]:
    return {"body": {"errorType": kind, "errorMessage": message}, "log": "", "error": True}
