"""Whole runs as jobs of a real Slurm: one that is over, one that is cancelled, one whose time is
over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.cluster.engines.slurm import SlurmOptions, script
from tests.cluster.bed import OPTIONS, ROOT, hosts
from tests.cluster.engines.real_slurm import Slurm, real_slurm

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(900)]
RUN_S = 400.0
KEY = re.compile(rb'secret"\s*: ')
"""In every file of keys of a run, a launcher or a host."""
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    (tmp_path / "node-tmp").mkdir()
    for name, value in {
        "TMPDIR": tmp_path / "node-tmp",
        "HOME": tmp_path / "home",
        "PYTHONPATH": ROOT,
    }.items():
        monkeypatch.setenv(name, str(value))
    with hosts("a") as lan, real_slurm(tmp_path / "slurm", lan.hosts["a"]) as found:
        yield found


class Job:
    """A run in the batch queue, by the script that a person gets."""

    def __init__(self, slurm: Slurm, folder: Path, policy: Path, steps: int) -> None:
        self.slurm = slurm
        self.runs = folder / "runs"
        self._folder = folder
        given = (
            *OPTIONS,
            f"total_train_steps={steps}",
            f"fileroot={self.runs}",
            f"actor.path={policy}",
        )
        options = SlurmOptions(nodes=1, cpus_per_node=1, time="01:00:00")
        self.number = slurm.submit(script(options, [*given, "scheduler.nodes=1"]))

    def trained(self, steps: int) -> None:
        """Wait until it has trained so many steps."""

        def there(job: dict[str, str]) -> bool:
            assert job["JobState"] not in ENDED, self.slurm.said()[-4000:]
            found = [*self.runs.rglob("metrics.jsonl")]
            return bool(found) and len(found[0].read_text().splitlines()) >= steps

        self.slurm.until(self.number, there, RUN_S)

    def with_keys(self) -> list[Path]:
        """Files with keys of a run or a cluster, of all that the job may have written."""
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        assert any(path.name == "config.yaml" for path in files)
        return [path for path in files if KEY.search(path.read_bytes())]

    def of_agents(self) -> list[Path]:
        """What agents have left among the temporary files of the node."""
        return [*(self._folder / "node-tmp").glob("*agent*")]


def test_a_run_whose_time_is_over_is_queued_again_and_goes_on_to_its_end(
    slurm: Slurm, tmp_path: Path, tiny_policy: Path
):
    """Slurm sends USR1 two minutes before the end of a job's time; here it is sent by hand. After
    each attempt nothing of the agents is on the node: a key of the user's cluster used to stay
    after a good run."""
    job = Job(slurm, tmp_path, tiny_policy, 12)
    job.trained(3)
    slurm.run("scancel", "--batch", "--signal=USR1", job.number)
    slurm.until(job.number, lambda found: found["Restarts"] == "1", 60)
    assert not job.with_keys() and not job.of_agents()
    found = slurm.until(job.number, lambda found: found["JobState"] in ENDED, RUN_S)
    assert found["JobState"] == "COMPLETED", slurm.said()[-4000:]
    (summary,) = job.runs.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 12
    assert not job.with_keys() and not job.of_agents()


def test_a_run_that_is_cancelled_is_gone_and_never_queued_again(
    slurm: Slurm, tmp_path: Path, tiny_policy: Path
):
    """Once is enough. TERM used to reach the script, which queued the job again."""
    job = Job(slurm, tmp_path, tiny_policy, 500)
    job.trained(1)
    slurm.run("scancel", job.number)
    slurm.until(job.number, lambda found: not slurm.run("squeue", "-h"), 90)
    found = slurm.job(job.number)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")
    assert not job.with_keys()


def test_where_everything_is_killed_at_once_no_key_stays(
    slurm: Slurm, tmp_path: Path, tiny_policy: Path
):
    """Nobody gets to clean up on a node that dies; the launcher and all agents were there."""
    job = Job(slurm, tmp_path, tiny_policy, 500)
    job.trained(1)
    slurm.crash()
    assert job.of_agents(), "they could not clean up"
    assert not job.with_keys()
