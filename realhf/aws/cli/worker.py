"""Answers commands over a socketpair, one at a time, inside the sandbox: one CLI worker.

Frames are a 4-byte big-endian length and JSON. Request: ``{"argv": [...]}``. Reply: ``exit_code``, ``stdout``,
``stderr``, ``refusal``, ``requests``, ``truncated`` (the output was cut), ``last`` (the worker ends). A worker never
connects: its connection to the simulator is a descriptor.
"""

from __future__ import annotations

import io
import os
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import awscli  # noqa: F401  (first: it makes the name botocore mean the CLI's own copy, also for policy)

from realhf.aws.cli.policy import RefusedRequest
from realhf.aws.cli.virtual_folder import MAX_DEPTH, MAX_FILES, MAX_FOLDERS, VirtualFolder
from realhf.aws.cli.warm_cli import WarmCli
from realhf.env.containment import sandbox
from realhf.env.containment.frames import frame, read_frame
from realhf.env.containment.sandbox import ProcessGuard

RUNAWAY_BYTES = 8 << 20
MAX_RESIDENT_BYTES = 300 << 20
_WRITES_PER_COMMAND = 2 * MAX_FILES


class RunawayOutput(BaseException):
    """A command printed more than any observation could use; the worker ends."""


class CappedSink(io.RawIOBase):
    """Keeps the first ``cap`` bytes, counts the rest."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._kept = bytearray()
        self._dropped = 0

    def writable(self) -> bool:
        """Always True: text is written to the sink."""
        return True

    def write(self, data: Any, /) -> int:
        """Take bytes, keep what fits below ``cap``. Raises RunawayOutput when far more was dropped than anybody could
        use."""
        view = bytes(data)
        room = self._cap - len(self._kept)
        self._kept += view[:room] if room > 0 else b""
        self._dropped += max(0, len(view) - max(room, 0))
        if self._dropped > RUNAWAY_BYTES:
            raise RunawayOutput
        return len(view)

    @property
    def cut(self) -> bool:
        """Whether bytes were dropped."""
        return self._dropped > 0

    def text(self) -> str:
        """Return the kept text, cut on a character boundary; carriage returns are dropped, control characters
        replaced."""
        kept = bytes(self._kept)
        if self._dropped:
            kept = kept.decode("utf-8", "ignore").encode()
        text = kept.decode("utf-8", "replace").replace("\r", "")
        if not text.isprintable():
            text = "".join(c if (c >= " " and c != "\x7f") or c in "\n\t" else "\ufffd" for c in text)
        return text + (f"\n...[truncated {self._dropped} bytes]" if self._dropped else "")


class CliWorker:
    """Answers commands. It is built in the zygote; ``serve`` runs in a fork of it."""

    def __init__(self, account: str) -> None:
        self.refusals: list[RefusedRequest] = []
        self.cli = WarmCli(account, self.refusals.append)

    _statm = -1

    def serve(self, request: dict[str, Any], fds: list[int], guard: ProcessGuard) -> None:
        """Contain this process, then answer until the owner closes the channel. ``fds``: channel, connection."""
        channel, connection = (socket.socket(fileno=fd) for fd in fds)
        self.cli.connection.attach(connection)
        folder = request["folder"]
        sandbox.redirect_standard_streams()
        os.chdir(folder)
        files = VirtualFolder(Path(folder))
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        budget = sandbox.WriteBudget(folders=MAX_FOLDERS, depth=MAX_DEPTH)
        guard.apply(folder, self._denied, budget)
        self.refusals.clear()
        stream = channel.makefile("rb")
        while (message := read_frame(stream)) is not None:
            if not message:  # are you there?
                channel.sendall(frame({}))
                continue
            budget.files = _WRITES_PER_COMMAND
            budget.folders = files.enforce_limits()  # the folder may have been emptied since
            reply = self._answer(message["argv"], message["stdout_cap"], message["stderr_cap"])
            files.enforce_limits()
            reply["stderr"] = reply["stderr"].replace(f"{folder}/", "").replace(folder, ".")
            reply["last"] = self._polluted(folder)
            channel.sendall(frame(reply))
            if reply["last"]:
                return

    def _denied(self, rule: str, message: str) -> None:
        self.refusals.append(RefusedRequest(rule, message))

    def _answer(self, argv: list[str], stdout_cap: int, stderr_cap: int) -> dict[str, Any]:
        self.refusals.clear()
        out, err = CappedSink(stdout_cap), CappedSink(stderr_cap)
        code, requests = self.cli.run(argv, text_stream(out), text_stream(err))
        refusal = self.refusals[0] if self.refusals else None
        return {
            "exit_code": code,
            "stdout": out.text(),
            "stderr": err.text(),
            "refusal": None if refusal is None else [refusal.rule, refusal.message],
            "requests": requests,
            "truncated": out.cut,
        }

    def _polluted(self, folder: str) -> bool:
        """Return whether a command left something behind that the next one could see."""
        resident_bytes = int(os.pread(self._statm, 100, 0).split()[1]) * resource.getpagesize()
        return (
            threading.active_count() > 1
            or os.getcwd() != folder
            or resident_bytes > MAX_RESIDENT_BYTES
            or not self.cli.connection.usable
        )


def text_stream(sink: CappedSink) -> io.TextIOWrapper:
    """Return a text stream that writes UTF-8 to ``sink`` at once."""
    return io.TextIOWrapper(sink, encoding="utf-8", errors="replace", write_through=True)  # type: ignore[arg-type]
