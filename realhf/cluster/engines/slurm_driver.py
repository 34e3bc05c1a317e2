"""Helper process that starts host agents through ``srun``: ``python -m
realhf.cluster.engines.slurm_driver``."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from realhf.cluster.engines.engine_process import serve
from realhf.cluster.placement import ClusterError
from realhf.scheduler.process import FATAL

AGENT_EXIT_S = 6.0
"""Seconds that ``stop`` waits for the agents to exit by themselves after the end of the run."""
SRUN_EXIT_S = 6.0
"""Seconds that srun then has to end the remaining agents."""
TAIL_BYTES = 8000
NO_SRUN = (
    "scheduler=slurm: srun cannot be run here ({}); this launch belongs into a batch job, whose "
    "script mode=check "
    "prints"
)
TASK = """\
exec {python} -m realhf.worker --join {endpoint} --key-file - --host-agent --name "node-$SLURM_PROCID" --temporary \\
    --linger-s 0
"""
"""Command on each node. It reads the keys from standard input, so that they appear neither on a
command line nor on a disk. srun copies its standard input to all tasks, so each node gets the keys
of all nodes."""


class SlurmEngine:
    """``AgentEngine`` that runs one ``srun`` with a task for each node."""

    def __init__(self) -> None:
        self._srun: subprocess.Popen[bytes] | None = None
        self._output: Any = None

    def start(self, plan: Mapping[str, Any]) -> None:
        """Start the agents of ``plan``, which has the entries ``endpoint``, ``keys``, ``nodes`` and
        ``python``. Raises ClusterError."""
        task = TASK.format(
            python=shlex.quote(plan["python"]), endpoint=shlex.quote(plan["endpoint"])
        )
        nodes = str(int(plan["nodes"]))
        # A failed node must not end the agents on other nodes: the launcher handles the failure.
        command = [
            "srun",
            "--nodes",
            nodes,
            "--ntasks",
            nodes,
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=0",
        ]
        command += ["--overlap", "--input=all", "bash", "-c", task]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - read until ``stop``
        try:
            self._srun = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._output, stderr=self._output
            )
        except OSError as error:
            raise ClusterError(NO_SRUN.format(error.strerror)) from None
        assert self._srun.stdin is not None
        # BrokenPipeError: srun has already ended, and its output says why.
        with contextlib.suppress(BrokenPipeError):
            self._srun.stdin.write(plan["keys"].encode())
            self._srun.stdin.close()

    def problem(self) -> str:
        """See ``AgentEngine``."""
        if self._srun is None or (code := self._srun.poll()) is None:
            return ""
        self._output.seek(0, 2)
        self._output.seek(max(0, self._output.tell() - TAIL_BYTES))
        lines = [
            line
            for line in self._output.read().decode("utf-8", "replace").splitlines()
            if line.strip()
        ]
        causes = [line for line in lines if FATAL in line] or lines
        return f"srun has ended with exit code {code}" + (
            f": {causes[-1].strip()}" if causes else ""
        )

    def stop(self) -> None:
        """See ``AgentEngine``."""
        if self._srun is None:
            return
        # On SIGTERM, srun kills its tasks at once, and they may leave files behind. So wait first.
        for end, limit_s in (
            (lambda: None, AGENT_EXIT_S),
            (self._srun.terminate, SRUN_EXIT_S),
            (self._srun.kill, None),
        ):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(limit_s)
                break
        self._srun = None
        self._output.close()


if __name__ == "__main__":
    serve(SlurmEngine())
