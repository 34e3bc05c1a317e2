"""Lambda broker: runs the code of Lambda functions in bubblewrap for the simulators, which cannot
start processes themselves.

Used with LAMBDA=sandbox. ``ForkServer`` runs it with one forked child per slot; the child reads
requests from ``LambdaGate`` and writes results. Every invocation has a new sandbox: Python and the
C library are read-only, the root is empty, and there is no network, no environment variable and no
child process. The limits are 2 s of CPU, 128 MB of memory, 16 KiB of output, and a time limit.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.aws.simulator import lambda_bootstrap
from realhf.env.containment import sandbox, seccomp
from realhf.env.containment.fork_server import serve_forks
from realhf.env.containment.frames import encode_frame, read_frame
from realhf.env.containment.sandbox import hide_folder

OUTPUT_BYTES = 16 * 1024
"""Maximum size of the result, and of the log, in bytes."""
MAX_WALL_S = 6.0
"""Maximum run time of an invocation, in seconds."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
"""Paths of the C library that the sandbox can read."""
_NAMESPACES = (
    "--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534",
)  # fmt: skip
"""bubblewrap options that isolate the sandbox."""
_PYTHON = "/python"
"""Path of the Python installation inside the sandbox."""
_TMP_BYTES = 16 << 20
"""Size of /tmp inside the sandbox, in bytes."""
_BOOT = "/boot"
"""Path of the bootstrap code inside the sandbox."""
_BOOT_FILES = (str(lambda_bootstrap.__file__), str(seccomp.__file__))
"""Modules that make up the bootstrap code."""
_CPU_EXCEEDED = (-24, -9, 137, 152)
"""Exit codes of a process that exceeded its CPU limit: the negative signal number, or 128 plus the
number."""


def sandbox_command(program: Path) -> list[str]:
    """Return the command line of one invocation. The process reads its request from stdin."""
    words = [str(program), *_NAMESPACES, "--clearenv"]
    words += ["--setenv", "LD_LIBRARY_PATH", f"{_PYTHON}/lib", "--setenv", "LANG", "C.UTF-8"]
    for path in _LIBRARIES:
        words += ["--ro-bind-try", path, path]
    words += ["--ro-bind", sys.base_prefix, _PYTHON]
    words += sandbox.mount_memory(program, _TMP_BYTES, "/tmp")
    words += hidden_package(
        sandbox.package_folder(), {**{path: path for path in _LIBRARIES}, sys.base_prefix: _PYTHON}
    )
    for file in _BOOT_FILES:
        words += ["--ro-bind", file, f"{_BOOT}/{os.path.basename(file)}"]
    python = f"{_PYTHON}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    bootstrap = f"{_BOOT}/{os.path.basename(_BOOT_FILES[0])}"
    return [*words, "--remount-ro", "/", "--chdir", "/tmp", python, "-I", "-S", "-B", bootstrap]


def hidden_package(package: str, bound: Mapping[str, str]) -> list[str]:
    """Return the bubblewrap options that hide ``package`` in every bound folder that contains it.

    ``bound``: path inside the sandbox, by path outside of it. Without a virtual environment, the
    tasks and their solutions are installed next to the standard library, which the sandbox can
    read.
    """
    words: list[str] = []
    for outside, inside in bound.items():
        if os.path.realpath(package).startswith(f"{os.path.realpath(outside)}/"):
            words += hide_folder(
                inside + os.path.realpath(package).removeprefix(os.path.realpath(outside))
            )
    return words


def invoke(command: list[str], request: dict[str, Any]) -> dict[str, Any]:
    """Run a Lambda function and return its result in MiniStack's format: ``body``, ``log``,
    ``error``."""
    if not request["runtime"].startswith("python"):
        return _error("Runtime.NotAvailable", "only python runtimes are run here", "")
    wall_s = min(MAX_WALL_S, max(1, request["timeout_s"]))
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
        except BrokenPipeError:
            pass
        result, log, reason = _collect(process, time.monotonic() + wall_s)
    finally:
        process.kill()
        code = process.wait()
    text = log.decode("utf-8", "replace")
    if reason:
        return _error(
            "Sandbox.Timedout" if reason == "time" else "Runtime.OutputTooLarge", reason, text
        )
    try:
        answer = json.loads(result)
        return {"body": answer["body"], "log": text, "error": bool(answer["error"])}
    except (ValueError, KeyError, TypeError):
        over = code in _CPU_EXCEEDED
        kind, message = (
            ("Sandbox.CpuExceeded", "2 s of CPU")
            if over
            else ("Runtime.ExitError", f"exit code {code}")
        )
        return _error(kind, message, text)


def _collect(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes, str]:
    """Read both output streams until they end. Return (result, log, reason); ``reason`` tells why
    reading stopped early, or is ""."""
    assert process.stdout is not None and process.stderr is not None
    buffers = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
        for stream in buffers:
            selector.register(stream, selectors.EVENT_READ)
        reason = ""
        while selector.get_map() and not reason:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                reason = "time"
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                buffer = buffers[key.fileobj]  # type: ignore[index]
                buffer += data[: OUTPUT_BYTES - len(buffer)]
                if not data:
                    selector.unregister(key.fileobj)
                elif len(buffer) >= OUTPUT_BYTES:
                    reason = f"more than {OUTPUT_BYTES} bytes of output"
        return bytes(buffers[process.stdout]), bytes(buffers[process.stderr]), reason


def _error(kind: str, message: str, log: str) -> dict[str, Any]:
    """Return the result of a failed invocation."""
    return {"body": {"errorType": kind, "errorMessage": message}, "log": log, "error": True}


def main() -> None:
    """Run the broker. It forks one child per slot, which answers invocations until its channel
    closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    program = Path(sys.argv[2])
    command = sandbox_command(program)

    def child(request: dict[str, Any], fds: list[int]) -> None:
        sandbox.forbid_new_privileges()
        channel = socket.socket(fileno=fds[0])
        stream = channel.makefile("rb")
        while (message := read_frame(stream)) is not None:
            channel.sendall(encode_frame(invoke(command, message)))

    serve_forks(control, {"ready": True}, child)


if __name__ == "__main__":
    main()
