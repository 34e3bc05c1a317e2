"""CLI worker process: runs AWS CLI commands inside the sandbox, one at a time, on request over a
socket pair.

A frame is a 4-byte big-endian length and JSON. Request: ``{"argv": [...], "stdout_cap": bytes,
"stderr_cap": bytes}``; an empty object is a liveness check. Reply: ``exit_code``, ``stdout``,
``stderr``, ``refusal``, ``requests``, ``truncated`` (whether the output was cut), ``last`` (whether
the worker ends after this reply). A worker never opens a connection: it inherits the descriptor of
its connection to the simulator.
"""

from __future__ import annotations

import io
import os
import re
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import awscli  # noqa: F401  (must be first: makes the name botocore refer to the CLI's own copy, also in policy)

from realhf.aws.cli.policy import RefusedRequest
from realhf.aws.cli.virtual_folder import MAX_DEPTH, MAX_FILES, MAX_FOLDERS, VirtualFolder
from realhf.aws.cli.warm_cli import WarmCli
from realhf.env.containment import sandbox
from realhf.env.containment.frames import encode_frame, read_frame
from realhf.env.containment.sandbox import ProcessGuard

RUNAWAY_BYTES = 8 << 20
"""Number of dropped output bytes after which a command is aborted."""
MAX_RESIDENT_BYTES = 300 << 20
"""Resident memory above which a worker is replaced, in bytes."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
"""A control character, except the ends of lines and tabs."""
_WRITES_PER_COMMAND = 2 * MAX_FILES
"""Maximum number of files that one command may write."""


class RunawayOutput(BaseException):
    """A command printed far more than an observation can contain. The worker ends."""


class CappedSink(io.RawIOBase):
    """Byte stream that keeps the first ``cap`` bytes and counts the rest."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._kept = bytearray()
        self._dropped = 0

    def writable(self) -> bool:
        """Return True: text is written to the sink."""
        return True

    def write(self, data: Any, /) -> int:
        """Keep the bytes that fit below ``cap``. Raises RunawayOutput when more than RUNAWAY_BYTES
        were dropped."""
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
        """Return the kept bytes as text, cut at a character boundary, with a note if bytes were
        dropped. Carriage returns are removed and control characters replaced."""
        content = bytes(self._kept)
        if self._dropped:
            content = content.decode("utf-8", "ignore").encode()
        text = content.decode("utf-8", "replace").replace("\r", "")
        text = _CONTROL.sub("\ufffd", text)
        return text + (f"\n...[truncated {self._dropped} bytes]" if self._dropped else "")


class CliWorker:
    """AWS CLI worker. The zygote constructs it; ``serve`` then runs in a fork of the zygote."""

    def __init__(self, account: str) -> None:
        self.refusals: list[RefusedRequest] = []
        self.cli = WarmCli(account, self.refusals.append)

    _statm = -1

    def serve(self, request: dict[str, Any], fds: list[int], guard: ProcessGuard) -> None:
        """Apply the containment to this process, then answer requests until the owner closes the
        channel.

        ``request``: contains the path of the working ``folder``. ``fds``: descriptors of the
        channel and of the connection to the simulator.
        """
        channel, connection = (socket.socket(fileno=fd) for fd in fds)
        self.cli.connection.attach(connection)
        folder = request["folder"]
        sandbox.redirect_standard_streams()
        os.chdir(folder)
        files = VirtualFolder(Path(folder))
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        budget = sandbox.WriteBudget(folders=MAX_FOLDERS, depth=MAX_DEPTH)
        guard.apply(folder, self._on_denied, budget)
        self.refusals.clear()
        stream = channel.makefile("rb")
        while (message := read_frame(stream)) is not None:
            if not message:  # a liveness check
                channel.sendall(encode_frame({}))
                continue
            budget.files = _WRITES_PER_COMMAND
            # The folder may have been emptied since.
            budget.folders = MAX_FOLDERS if is_empty(opened) else files.enforce_limits()
            reply = self._answer(message["argv"], message["stdout_cap"], message["stderr_cap"])
            if not is_empty(opened):
                files.enforce_limits()
            reply["stderr"] = reply["stderr"].replace(f"{folder}/", "").replace(folder, ".")
            reply["last"] = self._is_polluted(folder)
            channel.sendall(encode_frame(reply))
            if reply["last"]:
                return

    def _on_denied(self, rule: str, message: str) -> None:
        self.refusals.append(RefusedRequest(rule, message))

    def _answer(self, argv: list[str], stdout_cap: int, stderr_cap: int) -> dict[str, Any]:
        self.refusals.clear()
        out = CappedSink(stdout_cap)
        err = CappedSink(stderr_cap)
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

    def _is_polluted(self, folder: str) -> bool:
        """Return whether the last command left something in the process that could affect the next
        one."""
        resident_bytes = int(os.pread(self._statm, 100, 0).split()[1]) * resource.getpagesize()
        return (
            threading.active_count() > 1
            or os.getcwd() != folder
            or resident_bytes > MAX_RESIDENT_BYTES
            or not self.cli.connection.usable
        )


def is_empty(folder: int) -> bool:
    """Return whether an open folder has no entries. A descriptor needs no check of its path, which
    would take longer than the rest."""
    with os.scandir(folder) as entries:
        return next(entries, None) is None


def text_stream(sink: CappedSink) -> io.TextIOWrapper:
    """Return an unbuffered UTF-8 text stream that writes to ``sink``."""
    return io.TextIOWrapper(sink, encoding="utf-8", errors="replace", write_through=True)  # type: ignore[arg-type]
