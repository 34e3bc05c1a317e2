"""Scheduler ``scheduler=slurm``: a batch job with the launcher on its first node and a host agent
on each node.

``mode=check`` prints the script for ``sbatch``. Inside the job, the launcher starts all agents with
one ``srun``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from realhf.api.option import option
from realhf.cluster.cluster_keys import HostKeys
from realhf.cluster.engines.engine_process import HelperStarter
from realhf.cluster.engines.slurm_driver import NO_SRUN
from realhf.cluster.options import EngineOptions, elsewhere, placement_problems
from realhf.cluster.placement import ClusterError
from realhf.cluster.scheduler import ClusterScheduler
from realhf.scheduler.base import SchedulerDefinition

WORD = re.compile(r"[A-Za-z0-9._,@%+:=-]*")
TIME = re.compile(r"(\d+-)?\d{1,2}:\d\d:\d\d")
JOB = "SLURM_JOB_ID"
"""Environment variable that Slurm sets in a batch job and in the shell of ``salloc``."""
NOTICE_S = 120
"""Seconds before a job's time limit at which Slurm signals it, so that it can end cleanly and be
requeued."""
SET_BY_SCRIPT = ("mode=", "scheduler=", "scheduler.address=", "network.bind=", "recover_mode=")
"""Arguments of a launch that the script sets itself."""


@dataclass
class SlurmOptions(EngineOptions):
    """The resources of the batch job. Its nodes join as ``node-0``, ``node-1``, ...; the launcher runs
    on the first."""

    nodes: int = option(2, "Nodes of the job.", at_least=1, at_most=4096)
    cpus_per_node: int = option(8, "Cores of each node.", at_least=1)
    gpus_per_node: int = option(0, "GPUs of each node.", at_least=0)
    time: str = option(
        "24:00:00", "Time limit of one attempt, as [D-]HH:MM:SS; then the job is queued again."
    )
    partition: str = option("", "Partition of the job; empty: the cluster's default.")
    account: str = option("", "Account to charge; empty: the user's default.")

    def problems(self, name: str) -> Iterator[str]:
        """Yield errors of these options, including values that would not be a single word in the
        script."""
        yield from super().problems(name)
        for key in ("partition", "account"):
            if not WORD.fullmatch(getattr(self, key)):
                yield f"{name}.{key}={getattr(self, key)}: give one word"
        if not TIME.fullmatch(self.time):
            yield f"{name}.time={self.time}: give [D-]HH:MM:SS"


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=realhf
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{more}#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{notice}
# Each attempt resumes from the last checkpoint of the one before it.
set -u
cd {folder}
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
address=$(getent ahostsv4 "$(hostname -f)" | awk '$1 !~ /^127[.]/ {{ print $1; exit }}')
if [ -z "$address" ]; then
    echo "no address of $(hostname -f) that other nodes reach" >&2
    exit 1
fi
again=no
{launch} &
launcher=$!
# USR1 says that the time is nearly over; TERM also comes with scancel, after which the job cannot be requeued.
trap 'again=yes; kill -TERM "$launcher"' USR1
trap 'again=no; kill -TERM "$launcher"' TERM
wait "$launcher"
code=$?
while kill -0 "$launcher" 2> /dev/null; do  # a signal has ended the wait
    wait "$launcher"
    code=$?
done
if [ "$again" = yes ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def script(options: SlurmOptions, arguments: Sequence[str]) -> str:
    """Return the batch script for ``sbatch`` that launches with these arguments."""
    directives = [
        f"#SBATCH --{key}={value}\n"
        for key, value in (
            ("gpus-per-node", options.gpus_per_node),
            ("partition", options.partition),
            ("account", options.account),
        )
        if value
    ]
    passed_on = [text for text in arguments if not text.lstrip("+").startswith(SET_BY_SCRIPT)]
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        *passed_on,
        "scheduler=slurm",
        "recover_mode=auto",
    ]
    suffix = ' network.bind="$address"'
    if not any(text.startswith("trial_name=") for text in passed_on):
        suffix += ' trial_name="job-$SLURM_JOB_ID"'  # a requeued job keeps its number
    return SCRIPT.format(
        nodes=options.nodes,
        cpus=options.cpus_per_node,
        more="".join(directives),
        time=options.time,
        notice=NOTICE_S,
        folder=shlex.quote(str(Path.cwd())),
        launch=shlex.join(command) + suffix,
    )


class SlurmStarter(HelperStarter):
    """``AgentStarter`` that runs one ``srun`` on all nodes of the launcher's job."""

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options
        super().__init__("realhf.cluster.engines.slurm_driver")
        self.hosts = [f"node-{index}" for index in range(options.nodes)]

    def check(self) -> None:
        """See ``AgentStarter``. Raises ClusterError if ``srun`` is missing or this process is not
        in a job.

        Outside a job, srun would allocate nodes for the agents, but the launcher, the master and
        the trainer would run on the login node.
        """
        if shutil.which("srun") is None:
            raise ClusterError(NO_SRUN.format("there is none"))
        if not os.environ.get(JOB):
            raise ClusterError(NO_SRUN.format(f"this is not a Slurm job, {JOB} is not set"))

    def start_agents(self, endpoint: str, keys: HostKeys) -> None:
        """See ``AgentStarter``. Raises ClusterError if ``srun`` cannot be started."""
        plan = {
            "endpoint": endpoint,
            "keys": keys.text(),
            "nodes": self._options.nodes,
            "python": sys.executable,
        }
        self._engine.start(plan, self._options.wait_s, "srun")


def make_scheduler(options: SlurmOptions) -> ClusterScheduler:
    """Return a scheduler that waits for all nodes of the job."""
    starter = SlurmStarter(options)
    return ClusterScheduler(replace(options, hosts=[*starter.hosts, *options.hosts]), starter)


DEFINITION = SchedulerDefinition(
    SlurmOptions,
    make_scheduler,
    several_hosts=True,
    problems=placement_problems,
    elsewhere=elsewhere,
    script=script,
)
