"""A real Slurm of one node in namespaces of its own: nothing of it outlives the block, and nothing
else is touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.network.hosts import Host

NODE = "node0"
_CONF = """\
ClusterName=test
SlurmctldHost={node}({address})
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
NodeName={node} NodeAddr={address} CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# The first process of a namespace of process ids: when it is killed, so is everything of this
# Slurm.
_NODE = """\
set -e
hostname {node}
mount -t tmpfs none "$1/cgroup"
mount --bind "$1/hosts" /etc/hosts
slurmctld -D -i & slurmd -D -N {node} &
wait
"""


class Slurm:
    """Submits jobs and asks about them. ``folder`` is where jobs run."""

    def __init__(self, folder: Path, host: Host) -> None:
        self.folder = folder
        self.daemons: subprocess.Popen[bytes]
        self._host = host
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, may_fail: bool = False) -> str:
        """Run a command of Slurm and return what it prints."""
        words = [*self._host.enter, *command]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, check=False, env=self.environment
        )
        assert may_fail or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script; the number of its job."""
        path = self.folder / "job.sh"
        path.write_text(script)
        given = (
            "--parsable",
            f"--chdir={self.folder}",
            f"--output={self.folder}/job.log",
            *options,
        )
        return self.run("sbatch", *given, str(path))

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: ``JobState``, ``Restarts`` and so on."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(
        self, number: str, what: Callable[[dict[str, str]], object], within_s: float
    ) -> dict[str, str]:
        """Wait until something holds of a job."""
        deadline = time.monotonic() + within_s
        while not what(found := self.job(number)):
            assert time.monotonic() < deadline, f"{found}\n{self.said()[-4000:]}"
            time.sleep(0.3)
        return found

    def crash(self) -> None:
        """Kill the node with everything that runs on it."""
        self.daemons.kill()
        self.daemons.wait(60)

    def said(self) -> str:
        """What jobs have printed."""
        log = self.folder / "job.log"
        return log.read_text(errors="replace") if log.exists() else ""


@contextlib.contextmanager
def real_slurm(folder: Path, host: Host) -> Iterator[Slurm]:
    """A Slurm whose daemons and jobs are on a host that is a network namespace. Skips where it is
    not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [
        name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name, path=path) is None
    ]:
        pytest.skip(f"{', '.join(missing)} missing (apt-get install slurm-wlm)")
    for name in ("state", "spool", "cgroup"):
        (folder / name).mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {NODE}\n")
    (folder / "slurm.conf").write_text(
        _CONF.format(node=NODE, address=host.address, folder=folder, cpus=os.cpu_count())
    )
    (folder / "cgroup.conf").write_text(
        f"CgroupMountpoint={folder}/cgroup\nCgroupPlugin=cgroup/v1\n"
    )
    slurm = Slurm(folder, host)
    script = _NODE.format(node=NODE)
    words = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*host.enter, *words, "bash", "-c", script, "bash", str(folder)]
    with (folder / "daemons.log").open("wb") as log:
        slurm.daemons = subprocess.Popen(
            command, env={**slurm.environment, "PATH": path}, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while "idle" not in slurm.run("sinfo", "-h", "-o", "%T", may_fail=True):
            assert slurm.daemons.poll() is None and time.monotonic() < deadline, (
                folder / "daemons.log"
            ).read_text()
            time.sleep(0.3)
        yield slurm
    finally:
        slurm.crash()
