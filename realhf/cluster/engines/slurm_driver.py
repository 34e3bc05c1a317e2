"""Starts host agents by ``srun``, in a process of its own: ``python -m realhf.cluster.engines.slurm_driver``."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from realhf.cluster.engines.engine_process import serve
from realhf.cluster.errors import ClusterError
from realhf.scheduler.failure import FATAL

STOP_S = 12.0
TAIL_BYTES = 8000
NO_SRUN = (
    "scheduler=slurm: srun cannot be run here ({}); this launch belongs into a batch job, whose script mode=check "
    "prints"
)
TASK = """\
umask 077
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
cat > "$folder/cluster.key"
trap 'kill -TERM "$agent"' TERM
{python} -m realhf.worker --join {endpoint} --key-file "$folder/cluster.key" --host-agent \\
    --name "node-$SLURM_PROCID" --folder "$folder/run" < /dev/null &
agent=$!
wait "$agent"; code=$?
wait "$agent" 2> /dev/null
exit "$code"
"""
"""What runs on each node. The keys come over the standard input, which srun gives to all tasks: they are on no command
line, and in no folder that others share."""


class SlurmEngine:
    """Runs one ``srun`` with a task for each node."""

    def __init__(self) -> None:
        self._srun: subprocess.Popen[bytes] | None = None
        self._said: Any = None

    def start(self, plan: Mapping[str, Any]) -> None:
        """Run the agents of ``plan``: ``endpoint``, ``keys``, ``nodes`` and ``python``. Raises ClusterError."""
        task = TASK.format(python=shlex.quote(plan["python"]), endpoint=shlex.quote(plan["endpoint"]))
        nodes = str(int(plan["nodes"]))
        # One node that fails must not end the others: the launcher decides what happens then.
        command = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
        command += ["--overlap", "--input=all", "bash", "-c", task]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - read until ``stop``
        try:
            self._srun = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._said, stderr=self._said)
        except OSError as error:
            raise ClusterError(NO_SRUN.format(error.strerror)) from None
        assert self._srun.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended at once; what it said tells why
            self._srun.stdin.write(json.dumps(plan["keys"]).encode())
            self._srun.stdin.close()

    def problem(self) -> str:
        """See ``Engine``."""
        if self._srun is None or (code := self._srun.poll()) is None:
            return ""
        self._said.seek(0, 2)
        self._said.seek(max(0, self._said.tell() - TAIL_BYTES))
        lines = [line for line in self._said.read().decode("utf-8", "replace").splitlines() if line.strip()]
        causes = [line for line in lines if FATAL in line] or lines
        return f"srun has ended with exit code {code}" + (f": {causes[-1].strip()}" if causes else "")

    def stop(self) -> None:
        """See ``Engine``."""
        if self._srun is None:
            return
        self._srun.terminate()
        try:
            self._srun.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()
        self._srun = None
        self._said.close()


if __name__ == "__main__":
    serve(SlurmEngine())
