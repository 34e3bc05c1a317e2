"""What holds the processes of a pool: bubblewrap, the system call filter, the self-test, the Lambda
sandbox."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from realhf.aws.simulator import lambda_broker
from realhf.aws.simulator import pool as self_test
from realhf.aws.simulator.pool import CONTAINED_PARTS, MiniStackPool, Slot
from realhf.env.containment import probe, sandbox
from realhf.env.containment.probe import Containment

pytestmark = pytest.mark.sim
BWRAP = sandbox.find_bubblewrap()
needs_bubblewrap = pytest.mark.skipif(
    BWRAP is None, reason="bubblewrap is not installed or not permitted here"
)


@pytest.mark.parametrize(
    ("mode", "lambda_mode", "name"),
    [
        ("bwrap", "stub", "SANDBOX=bwrap"),
        ("auto", "sandbox", "LAMBDA=sandbox"),
        ("plain", "sandbox", "LAMBDA=sandbox"),
    ],
)
def test_what_needs_bubblewrap_does_not_start_without(
    monkeypatch: pytest.MonkeyPatch, mode: str, lambda_mode: str, name: str
) -> None:
    monkeypatch.setattr(probe, "find_bubblewrap", lambda: None)
    with pytest.raises(RuntimeError, match=f"{name}.*bubblewrap"):
        MiniStackPool(1, sandbox=mode, lambda_mode=lambda_mode).start()


def test_auto_says_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_bubblewrap", lambda: None)
    statement = Containment.decide("auto", "stub").statement()
    assert (
        "bubblewrap: off" in statement
        and "LAMBDA=sandbox and hosts beyond loopback are off" in statement
    )


@pytest.mark.parametrize("words", [{"sandbox": "docker"}, {"lambda_mode": "yes"}])
def test_other_modes_are_refused(words: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is one of"):
        MiniStackPool(1, **words)  # pyright: ignore[reportArgumentType]


@needs_bubblewrap
def test_processes_live_in_namespaces_of_their_own(pool: MiniStackPool, slot: Slot) -> None:
    for pid, visible in ((slot.ministack.pid, False), (slot.worker_pid, True)):
        for kind in ("pid", "net", "ipc", "mnt", "user"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
        root = Path(f"/proc/{pid}/root")
        assert (
            not (root / "home").exists()
            and not (root / "var").exists()
            and not (root / "etc/passwd").exists()
        )
        assert (root / str(slot.files.path)[1:]).exists() is visible
        status = Path(f"/proc/{pid}/status").read_text()
        assert (
            "CapEff:\t0000000000000000" in status
            and "NoNewPrivs:\t1" in status
            and "Seccomp:\t2" in status
        )
    assert "bubblewrap: on" in pool.containment() and "no marker" in pool.containment()


def test_the_filter_stops_what_no_hook_sees() -> None:
    script = """
import ctypes, errno, os, threading
from realhf.env.containment import sandbox, seccomp
sandbox.forbid_new_privileges()
assert seccomp.install() == seccomp.available()
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *arguments):
    return call(*arguments) == -1 and ctypes.get_errno() == errno.EPERM
if seccomp.available():
    assert refused(libc.fork)
    assert refused(libc.socket, 2, 1, 0)
    assert refused(libc.execv, b"/bin/true", None)
    assert refused(libc.ptrace, 0, 0, 0, 0)
    assert refused(libc.unshare, 0x10000000)
    assert refused(libc.kill, os.getppid(), 0)
done = []
thread = threading.Thread(target=done.append, args=(1,))
thread.start()
thread.join()
assert done == [1]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@needs_bubblewrap
def test_answers_of_tasks_are_not_in_the_sandbox() -> None:
    """Not even for code that got past every guard of the interpreter."""
    assert BWRAP is not None
    script = f"""
import os
from realhf.aws.cli import zygote
from realhf.aws.simulator import ministack_server
ours = {sandbox.package_folder()!r}
assert sorted(os.listdir(ours)) == ["__init__.py", "aws", "base", "env"], os.listdir(ours)
assert sorted(os.listdir(os.path.join(ours, "aws"))) == ["__init__.py", "cli", "simulator"]
try:
    open(os.path.join(ours, "planted"), "w")
except OSError:
    raise SystemExit(0)
raise SystemExit("a file was planted among the modules")
"""
    words = [
        *sandbox.sandbox_command(BWRAP, CONTAINED_PARTS),
        sys.executable,
        "-P",
        "-B",
        "-c",
        script,
    ]
    environment = {"PYTHONPATH": str(Path(sandbox.package_folder()).parent)}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_package_is_hidden_from_lambda_code_wherever_it_is_installed() -> None:
    bound = {"/usr/lib": "/usr/lib", "/opt/python": "/python"}
    words = lambda_broker.hidden_package("/opt/python/lib/python3.11/site-packages/realhf", bound)
    place = "/python/lib/python3.11/site-packages/realhf"
    assert words == ["--tmpfs", place, "--remount-ro", place]
    assert lambda_broker.hidden_package("/home/me/project/realhf", bound) == []


def test_a_simulator_that_is_slow_at_start_is_waited_for(slot: Slot, tmp_path: Path) -> None:
    """A loaded machine stops nobody: here the simulator sleeps for longer than a reset usually may
    take."""
    pid = slot.ministack.pid
    os.kill(pid, signal.SIGSTOP)
    waking = threading.Timer(2.3, os.kill, (pid, signal.SIGCONT))
    waking.start()
    try:
        assert self_test.run_self_test(slot.ministack, tmp_path, "stub")
    finally:
        waking.join()


def test_a_simulator_that_never_answers_is_named(
    slot: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "_ANSWER_S", 0.2)
    os.kill(slot.ministack.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match="self-test at start got no answer"):
            self_test.run_self_test(slot.ministack, tmp_path, "stub")
    finally:
        os.kill(slot.ministack.pid, signal.SIGCONT)
    slot.respawn()


@pytest.mark.parametrize(
    ("effect", "message"),
    [("marker", "wrote"), ("connect", "connected out"), ("answer", "should answer")],
)
def test_an_effect_stops_the_start(
    slot: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str, message: str
) -> None:
    def broken(simulator: object, markers: list[str], port: int) -> str:
        if effect == "marker":
            Path(markers[0]).touch()
        if effect == "connect":
            self_test.socket.create_connection(("127.0.0.1", port)).close()
        return "something else" if effect == "answer" else '{"statusCode": 200, "body": "stub"}'

    monkeypatch.setattr(self_test, "_invoke_and_trigger", broken)
    with pytest.raises(self_test.NotContained, match=message):
        self_test.run_self_test(slot.ministack, tmp_path, "stub")


@pytest.fixture(scope="module")
def lambda_slot():
    pool = MiniStackPool(1, sandbox="plain", lambda_mode="sandbox")
    pool.start()
    yield pool.acquire()
    pool.stop()


def _archive(source: str) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("index.py", source)
    return archive.getvalue()


def _invoke(slot: Slot, source: str) -> object:
    slot.reset()
    slot.files.put("code.zip", _archive(source))
    created = slot.executor.run(
        "aws lambda create-function --function-name f --runtime python3.12 --handler index.handler "
        "--timeout 5 "
        "--role arn:aws:iam::000000000000:role/r --zip-file fileb://code.zip"
    )
    assert created.success, created.stderr
    invoked = slot.executor.run(
        "aws lambda invoke --function-name f --payload '{\"n\": 20}' out.json"
    )
    assert invoked.success, invoked.stderr
    return json.loads((slot.files.path / "out.json").read_text())


@pytest.mark.nightly
@needs_bubblewrap
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return event['n'] + 1", 21),
        (
            "import os; return sorted(set(os.environ) - {'LC_CTYPE'})",
            ["LANG", "LD_LIBRARY_PATH", "PWD"],
        ),
        ("import os; os.fork()", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 22))", "PermissionError"),
        ("open('/usr/lib/x', 'w')", "OSError"),
        ("open('/etc/passwd')", "FileNotFoundError"),
        ("return len(bytearray(300 << 20))", "MemoryError"),
        ("print('x' * 100000)", "Runtime.OutputTooLarge"),
    ],
)
def test_lambda_code_runs_in_a_sandbox(lambda_slot: Slot, body: str, expected: object) -> None:
    answer = _invoke(lambda_slot, f"def handler(event, context):\n    {body}\n")
    assert (answer.get("errorType") if isinstance(answer, dict) else answer) == expected, answer


@needs_bubblewrap
def test_lambda_code_that_computes_forever_is_ended_by_its_share_of_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked of the broker itself, with a clock that leaves a busy machine the time to give it its
    two seconds."""
    monkeypatch.setattr(lambda_broker, "MAX_WALL_S", 150.0)
    code = base64.b64encode(
        _archive("def handler(event, context):\n    while True: pass\n")
    ).decode()
    function = {
        "name": "f",
        "runtime": "python3.12",
        "handler": "index.handler",
        "variables": {},
        "timeout_s": 150,
    }
    assert BWRAP is not None
    answer = lambda_broker.invoke(
        lambda_broker.sandbox_command(BWRAP), {**function, "code": code, "event": {}}
    )
    assert answer["error"] and answer["body"]["errorType"] == "Sandbox.CpuExceeded", answer
