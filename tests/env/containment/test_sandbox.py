"""The sandbox applied to a real forked process."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from realhf.env.containment import sandbox, seccomp
from realhf.env.containment.programs import (
    WorkingFolder,
    remove_abandoned_folders,
    remove_folder,
)

BWRAP = sandbox.find_bubblewrap()

ATTEMPTS = r"""
import json, os, socket, subprocess, sys
from realhf.env.containment import sandbox
roots = (*sandbox.package_roots(), os.path.dirname(sandbox.package_folder()))  # as if it lay among the packages
import ctypes, tempfile
inside = sys.argv[1]
secret = sys.argv[2]
sandbox.forbid_new_privileges()
sandbox.limit_resources(file_bytes=1000, open_files=64, memory_bytes=1 << 30, address_bytes=4 << 30, cpu_s=60)
denied = []
sandbox.AuditGuard(roots, (inside,), lambda rule, text: denied.append(rule)).install()
def attempt(action):
    try:
        action()
    except sandbox.Denied as error:
        return "denied " + str(error).split(":")[0]
    except Exception as error:
        return type(error).__name__
    return "done"
def write(path, size=1):
    with open(path, "w") as file:
        file.write("x" * size)
outcomes = {
    "subprocess": attempt(lambda: subprocess.run(["true"])),
    "system": attempt(lambda: os.system("true")),
    "fork": attempt(os.fork),
    "exec": attempt(lambda: os.execv("/bin/true", ["true"])),
    "ctypes": attempt(lambda: ctypes.CDLL(None)),
    "connect": attempt(lambda: socket.create_connection(("127.0.0.1", 1), timeout=1)),
    "resolve": attempt(lambda: socket.getaddrinfo("example.com", 80)),
    "bind": attempt(lambda: socket.socket().bind(("127.0.0.1", 0))),
    "read secret": attempt(lambda: open(secret).read()),
    "read by link": attempt(lambda: open(os.path.join(inside, "link")).read()),
    "read environ": attempt(lambda: open("/proc/self/environ").read()),
    "list": attempt(lambda: os.listdir("/")),
    "read a task's answer": attempt(
        lambda: open(os.path.join(sandbox.package_folder(), "aws/tasks/warmup.yaml")).read()
    ),
    "list the tasks": attempt(lambda: os.listdir(os.path.join(sandbox.package_folder(), "aws", "tasks"))),
    "write outside": attempt(lambda: write(secret + "2")),
    "remove outside": attempt(lambda: os.remove(secret)),
    "symlink": attempt(lambda: os.symlink(secret, os.path.join(inside, "new"))),
    "kill": attempt(lambda: os.kill(os.getppid(), 0)),
    "write inside": attempt(lambda: write(os.path.join(inside, "ok"))),
    "write too much": attempt(lambda: write(os.path.join(inside, "big"), 5000)),
    "import": attempt(lambda: __import__("colorsys")),
}
print(json.dumps([outcomes, denied]))
"""


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_every_forbidden_operation_is_stopped(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("canary")
    (inside / "link").symlink_to(secret)
    done = _python(ATTEMPTS, str(inside), str(secret))
    outcomes, denied = json.loads(done.stdout)
    assert outcomes == {
        "subprocess": "denied process-start",
        "system": "denied process-start",
        "fork": "denied process-start",
        "exec": "denied process-start",
        "ctypes": "denied process-start",
        "connect": "denied egress",
        "resolve": "denied egress",
        "bind": "denied egress",
        "read secret": "denied local-file",
        "read by link": "denied local-file",
        "read environ": "denied local-file",
        "list": "denied local-file",
        "read a task's answer": "denied local-file",
        "list the tasks": "denied local-file",
        "write outside": "denied local-file",
        "remove outside": "denied local-file",
        "symlink": "denied local-file",
        "kill": "denied process-start",
        "write inside": "done",
        "write too much": "OSError",
        "import": "done",
    }
    assert len(denied) == 18
    assert secret.read_text() == "canary"


def test_without_a_network_an_inherited_socket_still_works() -> None:
    _python(
        """
import socket
from realhf.env.containment import sandbox
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
isolated = sandbox.leave_network()
client.sendall(b"x")
assert listener.accept()[0].recv(1) == b"x"
if isolated:
    try:
        socket.create_connection(listener.getsockname(), timeout=1)
    except OSError:
        pass
    else:
        raise SystemExit("the network is still there")
"""
    )


SIGNALS = r"""
import ctypes, errno, json, os, platform, resource, signal, sys, threading
from realhf.env.containment import sandbox, seccomp
numbers = {
    "x86_64": {"tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "prlimit64": 302},
    "aarch64": {"tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "prlimit64": 261},
}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
other, kill = int(sys.argv[1]), signal.SIGKILL
queued = ctypes.create_string_buffer(bytes([kill, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]), 128)  # SI_QUEUE
limits = (ctypes.c_uint64 * 2)(1, 1)
arguments = {
    "tkill": (other, kill),
    "tgkill": (other, other, kill),
    "rt_sigqueueinfo": (other, kill, queued),
    "rt_tgsigqueueinfo": (other, other, kill, queued),
    "prlimit64": (other, resource.RLIMIT_CPU, limits, None),
}
sandbox.forbid_new_privileges()
filtered = sys.argv[2] == "filtered" and seccomp.install()
for name in sys.argv[3:]:
    result = libc.syscall(numbers[name], *arguments[name])
    print(name, errno.errorcode[ctypes.get_errno()] if result else "possible")
caught = []
signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(len(caught), *resource.getrlimit(resource.RLIMIT_CORE), flush=True)
os.abort()
"""
OF_ANOTHER = ("tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "prlimit64")


@pytest.mark.slow
@pytest.mark.skipif(
    not seccomp.available(), reason="the system calls of this machine are not known"
)
def test_a_filtered_process_signals_and_limits_itself_alone() -> None:
    """By system calls, which no hook sees: a sibling lives on, with its limits, and abort ends the
    process itself."""

    def tried(how: str, names: tuple[str, ...]) -> tuple[list[str], int, bool]:
        with subprocess.Popen(["sleep", "600"]) as sibling:
            try:
                command = [sys.executable, "-c", SIGNALS, str(sibling.pid), how, *names]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=300, check=False
                )
                # An abort whose signal is refused ends in a crash, by another signal.
                assert done.returncode == -signal.SIGABRT, done.stderr
                limit = resource.prlimit(sibling.pid, resource.RLIMIT_CPU)[0]
                sibling.send_signal(signal.SIGTERM)
                return done.stdout.splitlines(), sibling.wait(), limit == 1
            finally:
                sibling.kill()

    said, end, limited = tried("filtered", OF_ANOTHER)
    assert said == [*(f"{name} EPERM" for name in OF_ANOTHER), "2 0 0"]
    assert end == -signal.SIGTERM and not limited
    for name in OF_ANOTHER:
        said, end, limited = tried("plain", (name,))
        assert said[0] == f"{name} possible", "else nothing was tried above"
        assert limited if name == "prlimit64" else end == -signal.SIGKILL


FILL = r"""
import json

def fill(path):
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(70):
                file.write(bytes(1 << 20))
    except OSError as error:
        return error.strerror
    return "written"

print(json.dumps({path: fill(path) for path in ("/tmp/a", "/dev/shm/a", "/dev/a")}))
"""


@pytest.mark.skipif(BWRAP is None, reason="bubblewrap does not work here")
def test_what_is_written_to_memory_in_bubblewrap_is_bounded() -> None:
    assert BWRAP is not None
    command = [*sandbox.sandbox_command(BWRAP), sys.executable, "-I", "-S", "-c", FILL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "/tmp/a": "No space left on device",
        "/dev/shm/a": "No space left on device",
        "/dev/a": "Read-only file system",
    }


def leave_and_remove(folder: Path, report: Connection) -> None:
    """Leave what a program can leave in its folder, and remove it; send what is logged."""
    if os.geteuid() == 0:  # Permissions keep root from nothing.
        os.setgid(65534)
        os.setuid(65534)
    (folder / "outer" / "inner").mkdir(parents=True)
    (folder / "outer" / "inner" / "file").touch()
    (folder / "link").symlink_to(folder.parent / "kept")
    os.chmod(folder / "outer" / "inner", 0)
    os.chmod(folder / "outer", 0)
    os.chdir(folder)
    for _ in range(3000):
        os.mkdir("deep")
        os.chdir("deep")
    os.chdir("/")
    logged = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(logged))
    remove_folder(folder)
    report.send(logged.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True])
def test_a_folder_is_removed_whatever_a_program_left_in_it(stays: bool) -> None:
    """Folders that cannot be read, a tree deeper than Python recurses, and nothing behind links. A
    folder that has to stay is logged."""
    # Not below tmp_path, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="realhf-test-") as place:
        kept = Path(place) / "kept"
        kept.mkdir(mode=0o555)
        folder = Path(place) / "folder"
        folder.mkdir()
        os.chmod(folder, 0o777)
        os.chmod(place, 0o555 if stays else 0o777)
        context = multiprocessing.get_context("fork")
        receiver, report = context.Pipe(duplex=False)
        child = context.Process(target=leave_and_remove, args=(folder, report))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert folder.exists() == stays
        assert kept.stat().st_mode & 0o777 == 0o555
        assert receiver.recv().strip() == (
            f"the working folder {folder} of a program could not be removed" if stays else ""
        )


OWNER = """
import os, sys
from realhf.env.containment.programs import WorkingFolder
folder = WorkingFolder()
(folder.path / "file").touch()
os.utime(folder.path, (0, 0))
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_folder_of_a_killed_owner_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "realhf-program-elsewhere").symlink_to("/")
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        folders = [Path(str(owner.stdout and owner.stdout.readline()).strip()) for owner in owners]
        new = WorkingFolder()
        owners[0].kill()
        owners[0].wait()
        remove_abandoned_folders()
        assert [folder.exists() for folder in (*folders, new.path)] == [False, True, True]
        new.remove()
        assert not new.path.exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()


@pytest.mark.parametrize("knows_size", [False, True])
def test_a_bubblewrap_that_cannot_limit_memory_still_contains(
    knows_size: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bubblewrap is played by a shell script, which refuses options as the real one does."""
    refusal = 'for word; do [ "$word" = --size ] && echo "bwrap: Unknown option $word" >&2 && exit 1; done\n'
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\n" + ("" if knows_size else refusal) + "exit 0\n")
    program.chmod(0o755)
    monkeypatch.setattr(sandbox, "PROGRAM_PATH", str(tmp_path))
    assert sandbox.find_bubblewrap() == program
    words = sandbox.sandbox_command(program)
    assert ("--size" in words) == knows_size
    assert words[words.index("/tmp") - 1] == words[words.index("/dev/shm") - 1] == "--tmpfs"
    assert caplog.text.count("refuses --size") == (not knows_size)
