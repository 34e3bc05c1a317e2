"""Containment is what was tried at the start, layer by layer; a layer that fails to hold stops the
start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.aws.simulator.pool import MiniStackPool
from realhf.env.containment import sandbox, seccomp
from realhf.env.containment.probe import Attempt, Containment, NotContained, describe_layers
from realhf.env.containment.sandbox import LAYERS, package_folder

pytestmark = pytest.mark.sim
BWRAP = sandbox.find_bubblewrap()

_CHILD = r"""
import json, os, socket, sys
from realhf.env.containment import sandbox, seccomp
from realhf.env.containment.probe import run_probe
from realhf.env.containment.sandbox import ProcessGuard
channel, request, without = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
channel = os.dup2(channel, 64)  # beyond the descriptors allowed below, as one inherited from a parent with many is
if without == "filter":
    seccomp.install = lambda: False
if without == "hooks":
    sandbox.AuditGuard.install = lambda guard: None
if without == "limits":
    sandbox.limit_resources = lambda **limits: None
if without != "network" and not sandbox.leave_network():
    sys.exit("no network namespace")
run_probe(ProcessGuard(1 << 20, 64, 1 << 30, 60), request, [channel])
"""


def attempts(tmp_path: Path, without: str) -> list[Attempt]:
    """What a process could do that applied every layer but one. There is no bubblewrap around
    it."""
    (tmp_path / "host").write_text("content")
    with socket.create_server(("127.0.0.1", 0)) as canary:
        request = {
            "port": canary.getsockname()[1],
            "file": str(tmp_path / "host"),
            "new_file": str(tmp_path / "made"),
            "folder": str(tmp_path),
            "layers": LAYERS,
        }
        ours, theirs = socket.socketpair()
        with ours, theirs:
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, str(theirs.fileno()), json.dumps(request), without],
                pass_fds=(theirs.fileno(),),
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if "no network namespace" in done.stderr:
                pytest.skip("this kernel gives no network namespace")
            assert done.returncode == 0, done.stderr
            answer = json.loads(ours.recv(1 << 16)[4:])
    return [Attempt(**attempt) for attempt in answer["attempts"]]


@pytest.mark.skipif(
    not seccomp.available(), reason="the system calls of this machine are not known"
)
@pytest.mark.parametrize("without", ["filter", "hooks", "limits", "network", "nothing"])
def test_each_layer_is_seen_to_be_missing_by_its_own_acts(tmp_path: Path, without: str) -> None:
    """Only the layer that is left out fails, and bubblewrap, which is not there: no other layer
    stands in for it."""
    found = attempts(tmp_path, without)
    assert {attempt.layer for attempt in found} == set(LAYERS)
    assert {attempt.layer for attempt in found if not attempt.stopped} == {
        "bubblewrap",
        without,
    } - {"nothing"}
    for layer in {without, "bubblewrap"} & set(LAYERS):
        assert not any(attempt.stopped for attempt in found if attempt.layer == layer), found


def test_a_layer_that_does_not_hold_stops_the_start_unless_it_is_named() -> None:
    found = {
        "CLI workers": [
            Attempt("hooks", "fork", True, "denied"),
            Attempt("filter", "fork", False, "possible"),
        ]
    }
    with pytest.raises(
        NotContained, match=r"'filter' does not hold: CLI workers could fork.*--may-lack"
    ):
        describe_layers(found, ("hooks", "filter"), frozenset())
    lines = describe_layers(found, ("hooks", "filter"), frozenset({"filter"}))
    assert lines["hooks"] == "holds; tried and stopped: fork"
    assert lines["filter"].startswith("DOES NOT HOLD, and may be missing: CLI workers could fork")


def test_a_layer_that_was_not_tried_is_not_believed() -> None:
    found = {"simulators": [Attempt("filter", "fork", True, "EPERM")], "CLI workers": []}
    with pytest.raises(NotContained, match="CLI workers were not tried"):
        describe_layers(found, ("filter",), frozenset())


def test_a_network_that_is_claimed_to_be_gone_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygotes are told that something around them took the network away, and nothing did."""
    monkeypatch.setattr(Containment, "network_mode", "outer")
    pool = MiniStackPool(1, sandbox="plain")
    with pytest.raises(
        NotContained, match="'network' does not hold: simulators could connect to the host"
    ):
        pool.start()
    assert not pool.slots


def test_what_is_printed_was_observed(pool: MiniStackPool) -> None:
    statement = pool.containment()
    for layer in ("audit hooks", "system call filter", "resource limits"):
        assert f"{layer}: holds; tried and stopped: " in statement
    assert Containment.decide("plain", "stub").statement().count("not tried") == 3


def test_a_process_does_not_go_on_without_its_filter() -> None:
    """The result of installing the system call filter is looked at in every worker."""
    script = """
import sys
from realhf.env.containment import sandbox, seccomp
from realhf.env.containment.sandbox import ProcessGuard
seccomp.install = lambda: False
guard = ProcessGuard(1 << 20, 64, 1 << 30, 60, may_lack=frozenset(sys.argv[1:]))
try:
    guard.apply("/tmp")
except RuntimeError as error:
    print(error)
"""
    said = []
    for layers in ((), ("filter",)):
        command = [sys.executable, "-c", script, *layers]
        said.append(
            subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        )
    assert said == ["the system call filter could not be installed\n", ""]


def test_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="may_lack names moat"):
        MiniStackPool(1, may_lack=frozenset({"moat"}))


@pytest.mark.skipif(BWRAP is None, reason="bubblewrap is not installed or not permitted here")
def test_the_probe_needs_no_package_that_can_be_written(tmp_path: Path) -> None:
    """On a read-only file system even the removal of a file that is not there is refused."""
    script = """
import sys
from pathlib import Path
from realhf.env.containment import probe as containment_check
containment_check._probe = lambda *of_a_child: []
print(containment_check.probe_layers({"simulators": None}, Path(sys.argv[1]), ()))
"""
    package = package_folder()
    command = [
        str(BWRAP),
        "--dev-bind",
        "/",
        "/",
        "--ro-bind",
        package,
        package,
        sys.executable,
        "-c",
        script,
    ]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "{'simulators': []}\n", done.stderr
