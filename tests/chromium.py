"""A headless Chromium driven over its DevTools protocol: no driver program, no further package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ABSENT = "needs Chromium (apt-get install chromium)"
START_S = ANSWER_S = 60.0
_KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    " ": 32,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
_SHIFT = 8
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Chromium:
    """One page in a browser of its own; ``close`` it. ``problems`` collects what its console
    complains about: exceptions, failed requests, violations of the content security policy."""

    def __init__(self) -> None:
        assert PROGRAM is not None, ABSENT
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        self._log = Path(self._profile, "log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.problems: list[str] = []
        self._calls = 0
        self._session: str | None = None
        try:
            self._socket = connect(self._address(), max_size=None, proxy=None)
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            said = self._log.read_text("utf-8", "replace")
            if found := re.search(r"DevTools listening on (ws://\S+)", said):
                return found[1]
            time.sleep(0.02)
        raise TimeoutError(f"Chromium did not start within {START_S:g} s: {said[-500:]}")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a DevTools command. Raises RuntimeError with the browser's words,
        TimeoutError."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        self._socket.send(
            json.dumps(message | ({"sessionId": self._session} if self._session else {}))
        )
        while True:
            answer = json.loads(self._socket.recv(timeout=ANSWER_S))
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(answer["params"]["exceptionDetails"])[:500])
            elif (
                answer.get("method") == "Log.entryAdded"
                and answer["params"]["entry"]["level"] == "error"
            ):
                self.problems.append(answer["params"]["entry"]["text"])
            elif answer.get("id") == self._calls:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(
            f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})"
        )

    def js(self, expression: str) -> Any:
        """Value of an expression in the page, promises awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = ANSWER_S) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self._holds(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{expression} is not true after {timeout_s:g} s; {self.problems}"
                )
            time.sleep(0.02)

    def _holds(self, expression: str) -> bool:
        try:
            return self.js(f"!!({expression})")
        except RuntimeError as error:
            if "context" not in str(error) and "navigated" not in str(error):
                raise
            return False  # the page is being loaded anew

    def press(self, key: str, *, shift: bool = False) -> None:
        """One key, as a person presses it."""
        code = _KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        event = {
            "key": key,
            "windowsVirtualKeyCode": code,
            "text": text,
            "modifiers": _SHIFT if shift else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def write(self, text: str) -> None:
        """Text into the field that has the focus."""
        self.call("Input.insertText", text=text)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Size of the window and the colour scheme that the person prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(ANSWER_S)
        shutil.rmtree(self._profile, ignore_errors=True)
