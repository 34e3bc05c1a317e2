"""``docs/cluster.md`` followed to the letter: its commands are read from the page and typed on two
fresh hosts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.network.lan import Lan
from tests.cluster.bed import ROOT, hosts

STEP = re.compile(r"(?ms)^ *On (?P<host>alpha|beta):\n\n(?P<commands>(?: {7,}\S[^\n]*\n)+)")
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
RUN_S = 800.0
HIDDEN = 'mount -t tmpfs none "$0" && exec "$@"'
"""Each host has a home of its own and does not see the other's."""


def commands() -> list[tuple[str, str]]:
    """Host and command of each step, in order."""
    part = PAGE.partition("## Two machines, step by step\n")[2].partition("\n## ")[0]
    return [
        (found["host"], line.strip())
        for found in STEP.finditer(part)
        for line in found["commands"].splitlines()
    ]


def test_the_page_has_a_command_for_every_step():
    words = [command.split()[:3] for _, command in commands()]
    assert [host for host, _ in commands()] == ["alpha", "beta", "beta", "alpha", "alpha"]
    assert [word[2] if word[0] == "python" else word[0] for word in words] == [
        "realhf.cluster",
        "scp",
        "realhf.worker",
        "realhf.launch",
        "realhf.cluster",
    ]


class Hands:
    """Type commands on the hosts, each in a home of its own."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        self._lan = lan
        self._folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in lan.hosts:
            (folder / name).mkdir()

    def words(self, host: str, command: str) -> list[str]:
        """The command with the addresses of this bed, our interpreter and no need for sshd."""
        for number, name in enumerate(self._lan.hosts, 1):
            command = command.replace(f"10.0.0.{number}", self._lan.hosts[name].address)
        words = shlex.split(command)
        if words[0] == "scp":
            words = ["cp", str(self._folder / "alpha" / words[1].partition(":")[2]), words[2]]
        else:
            words[0] = sys.executable
            hidden = self._folder / ("beta" if host == "alpha" else "alpha")
            words = ["unshare", "-m", "sh", "-c", HIDDEN, str(hidden), *words]
        return [*self._lan.hosts[host].enter, *words]

    def type(self, name: str, host: str, command: str) -> subprocess.Popen[bytes]:
        """Start a command; what it says is in ``NAME.log``."""
        home = self._folder / host
        environment = {
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            words = self.words(host, command)
            self.running[name] = subprocess.Popen(
                words, cwd=home, env=environment, stdout=log, stderr=log
            )
        return self.running[name]

    def says(self, name: str) -> str:
        """What a command has said so far."""
        return (self._folder / f"{name}.log").read_text(errors="replace")


@pytest.mark.several_hosts
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_its_commands_lead_to_a_run_on_two_hosts(tmp_path: Path):
    (_, keys), (_, copy), (_, agent), (_, launch), (_, status) = commands()
    with hosts("alpha", "beta") as lan:
        hands = Hands(lan, tmp_path)
        try:
            assert hands.type("keys", "alpha", keys).wait(60) == 0, hands.says("keys")
            said = [line.strip() for line in hands.says("keys").splitlines()]
            assert said[1].startswith("cluster-beta.key: ") and all(
                f"       {line}\n" in PAGE for line in said
            ), said
            assert hands.type("copy", "beta", copy).wait(60) == 0
            hands.type("agent", "beta", agent)
            launcher = hands.type("launch", "alpha", launch)
            end = time.monotonic() + RUN_S
            while "step 1/6" not in hands.says("launch"):
                assert launcher.poll() is None and time.monotonic() < end, hands.says("launch")[
                    -4000:
                ]
                time.sleep(0.2)
            assert hands.type("status", "alpha", status).wait(60) == 0, hands.says("status")
            assert launcher.wait(RUN_S) == 0, hands.says("launch")[-4000:]
            assert hands.running["agent"].wait(90) == 0, hands.says("agent")
        finally:
            for process in hands.running.values():
                process.terminate()
            for process in hands.running.values():
                process.wait(60)
            shutil.rmtree(tmp_path / "alpha" / "runs", ignore_errors=True)
        lines = [line.split() for line in hands.says("status").splitlines()[1:]]
        there = [line[0] for line in lines]
        assert there.index("model_worker/0") < there.index("beta") < there.index("generation/0"), (
            there
        )
        assert "beta takes part in the run of the launcher" in hands.says("agent")
        assert "does not share fileroot" in hands.says("status")
