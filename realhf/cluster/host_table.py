"""The launcher's table of joined hosts: their resources, workers, shared files and recent
failures."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from realhf.base import process_clock
from realhf.base.host_resources import usable_cores
from realhf.cluster.file_transfer import TransferQueue
from realhf.cluster.messages import FolderProbeRequest, HostHello, ProbeAnswer
from realhf.cluster.own_host import own_gpus
from realhf.cluster.placement import LAUNCHER, USES_GPU, CandidateHost, kind_of
from realhf.scheduler.base import WorkerSpec

CLOCK_TOLERANCE_S = 5.0
"""Clock difference in seconds above which a host gets a warning."""
_SHARES = {
    None: "fileroot not looked at",
    True: "shares fileroot",
    False: "does not share fileroot",
}
PROBE_S = 10.0
"""Seconds within which a host must answer a probe of the run folder."""


BACKOFF_S = 15.0
"""Seconds of a host's first pause, in which it gets no workers. Each further pause is twice as
long, ..."""
MAX_BACKOFF_S = 600.0
"""... up to this number of seconds."""
QUICK_FAILURE_S = 10.0
"""A worker failure within this time in seconds after the start may be the host's fault. ..."""
QUICK_FAILURES = 2
"""After this many such failures in a row the host is paused."""


@dataclass
class HostBackoff:
    """Failures on a host, and the pause without workers that follows them. The count is reset when
    a worker has run on the host for ``QUICK_FAILURE_S``."""

    failures: int = 0
    """Failures in a row."""
    pauses: int = 0
    """Number of pauses so far."""
    until: float = 0.0
    """End of the last pause (process_clock.now)."""
    reason: str = ""
    """Worker that failed last, and why."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the host gets workers again; 0 if it is not paused."""
        return max(0.0, self.until - process_clock.now())


@dataclass
class RunningWorker:
    """A running worker: where it runs and since when."""

    spec: WorkerSpec
    """The worker's specification, with paths on the launcher's machine."""
    host: str
    since: float
    """Time of its start (process_clock.now)."""
    gpu: int | None = None
    """Index of its GPU on the host; None if it uses no GPU or sees all of them."""


@dataclass
class JoinedHost:
    """State of a joined host."""

    hello: HostHello
    transfers: TransferQueue
    """Files to send to the host, and the workers that need them."""
    shared: bool | None = None
    """Whether the host shares the run folder; None if it has not been probed yet."""
    same_paths: set[str] = field(default_factory=set)
    """Paths that have the same content on the host as on the launcher's machine."""
    since: float = field(default_factory=process_clock.now)
    """Time of registration (process_clock.now)."""
    leave_by: float = math.inf
    """Latest time at which the host is dropped, if an operator is removing it (process_clock.now);
    else infinity."""
    sends_invalid: bool = False
    """Whether the host's agent has sent an invalid message."""

    @property
    def leaving(self) -> bool:
        """Whether an operator is removing the host."""
        return self.leave_by != math.inf


class HostTable:
    """Joined hosts and running workers by name, and recent failures by host. ``backoffs`` is kept
    by the caller, so that failures survive a restart of the run."""

    def __init__(self, backoffs: dict[str, HostBackoff] | None = None) -> None:
        self.hosts: dict[str, JoinedHost] = {}
        self.workers: dict[str, RunningWorker] = {}
        self.backoffs = {} if backoffs is None else backoffs

    def workers_on(self, host: str) -> dict[str, RunningWorker]:
        """Return the workers on a host."""
        return {name: worker for name, worker in self.workers.items() if worker.host == host}

    def candidates(self) -> list[CandidateHost]:
        """Return the hosts that may get workers, the launcher's machine first.

        Hosts on the same machine share its GPUs, for example the launcher and the agent on the
        first node of a batch job.
        """
        gpus: dict[str, Sequence[str]] = {LAUNCHER: own_gpus()}
        gpus |= {name: host.hello.gpus for name, host in sorted(self.hosts.items())}
        gpus_by_worker = {name: self._gpus_by_worker(name, own) for name, own in gpus.items()}
        host_count = Counter(gpu for own in gpus.values() for gpu in set(own))
        users = {gpu: list[tuple[str, str]]() for gpu in host_count}
        for name, workers in gpus_by_worker.items():
            for worker, number in workers.items():
                if number is not None:
                    users[gpus[name][number]].append((name, worker))
        candidates: list[CandidateHost] = []
        for name, own in gpus.items():
            host = self.hosts.get(name)
            if host is not None and host.leaving:
                continue
            cores = host.hello.cores if host else usable_cores()
            shared = bool(host.shared) if host else True
            neighbours = {
                worker: number
                for number, gpu in enumerate(own)
                for other, worker in users[gpu]
                if other != name
            }
            shared_gpus = frozenset(number for number, gpu in enumerate(own) if host_count[gpu] > 1)
            paused = self.backoff_s(name) > 0
            candidates.append(
                CandidateHost(
                    name,
                    cores,
                    len(own),
                    shared,
                    gpus_by_worker[name],
                    neighbours,
                    shared_gpus,
                    paused,
                )
            )
        return candidates

    def _gpus_by_worker(self, host: str, gpus: Sequence[str]) -> Mapping[str, int | None]:
        """Return the GPU index of each worker on a host; None for a worker without a GPU.

        A worker that uses a GPU and sees all of them uses the first one, as torch does.
        """

        def gpu_of(name: str, worker: RunningWorker) -> int | None:
            number = 0 if worker.gpu is None and kind_of(name) in USES_GPU else worker.gpu
            return number if number is not None and number < len(gpus) else None

        return {name: gpu_of(name, worker) for name, worker in self.workers_on(host).items()}

    def note_failure(self, worker: RunningWorker, reason: str, *, is_host_fault: bool) -> str:
        """Record the failure of a worker, and pause its host if the host is the likely cause.

        is_host_fault: whether the host is known to be the cause. Returns a notice for the user if
        the host is now paused, else "".
        """
        host = worker.host
        if not is_host_fault and process_clock.now() - worker.since >= QUICK_FAILURE_S:
            self.backoffs.pop(host, None)
            return ""
        backoff = self.backoffs.setdefault(host, HostBackoff())
        backoff.failures += 1
        backoff.reason = f"{worker.spec.name} {reason}"
        if not (is_host_fault or backoff.failures >= QUICK_FAILURES) or backoff.remaining_s:
            return ""
        backoff_s = min(MAX_BACKOFF_S, BACKOFF_S * 2**backoff.pauses)
        backoff.until = process_clock.now() + backoff_s
        backoff.pauses += 1
        return f"host {host} gets no workers for {backoff_s:g} s: {backoff.reason}"

    def backoff_s(self, host: str) -> float:
        """Return the remaining seconds of a host's pause; 0 if it is not paused."""
        backoff = self.backoffs.get(host)
        return backoff.remaining_s if backoff is not None else 0.0

    def remove_host(self, host: str) -> dict[str, RunningWorker]:
        """Remove a host and its workers; return the workers."""
        self.hosts.pop(host, None)
        removed = self.workers_on(host)
        for name in removed:
            del self.workers[name]
        return removed

    def lines(self, endpoint: str) -> Iterator[str]:
        """Yield the status report: a line for the launcher at ``endpoint``, and one for each host
        and worker."""
        yield f"launcher at {endpoint}: {len(self.hosts)} hosts, {len(self.workers)} workers"
        rows = {LAUNCHER: ""} | {
            name: f"  {host.hello.address}  {host.hello.cores} cores  {host.hello.memory_gib:.0f} "
            f"GiB  "
            f"{len(host.hello.gpus)} GPUs  "
            f"{_SHARES[host.shared]}{'  leaving' * host.leaving}{self._backoff_text(name)}"
            for name, host in sorted(self.hosts.items())
        }
        for host, text in rows.items():
            yield f"{host}{text}"
            for name, worker in sorted(self.workers_on(host).items()):
                gpu = "" if worker.gpu is None else f"  GPU {worker.gpu}"
                yield f"  {name}  {process_clock.now() - worker.since:.0f} s{gpu}"

    def _backoff_text(self, host: str) -> str:
        left_s = self.backoff_s(host)
        return (
            f"  gets no workers for {left_s:.0f} s: {self.backoffs[host].reason}" if left_s else ""
        )


def list_warnings(hello: HostHello) -> Iterator[str]:
    """Yield warnings about a host that has joined, such as a wrong clock."""
    offset_s = hello.clock - time.time()
    if abs(offset_s) > CLOCK_TOLERANCE_S:
        yield (
            f"host {hello.name}: its clock is {abs(offset_s):.0f} s "
            f"{'ahead of' if offset_s > 0 else 'behind'} the "
            "launcher's; times in logs and traces will not fit together (set it by NTP)"
        )


class FolderProbe:
    """Probe of whether a host shares ``folder``. The host must read a token file in the folder and
    write an answer file next to it.

    paths: {path: fingerprint} of other files, to compare with the host's fingerprints.
    """

    def __init__(self, folder: Path, paths: Mapping[str, str]) -> None:
        self._text = secrets.token_hex(16)
        tag = secrets.token_hex(4)
        self._token = folder / f".host-{tag}"
        self._answer = folder / f".host-{tag}-answer"
        self._prints = paths
        folder.mkdir(parents=True, exist_ok=True)
        self._token.write_text(self._text, encoding="ascii")

    def build_probe(self, number: int) -> FolderProbeRequest:
        """Return the probe request number ``number``, to send to a host."""
        return FolderProbeRequest(number, str(self._token), str(self._answer), [*self._prints])

    def apply_answer(self, host: JoinedHost, answer: ProbeAnswer) -> None:
        """Set ``host.shared`` and ``host.same_paths`` from a host's answer, and remove its answer
        file."""
        try:
            written = self._answer.read_text(encoding="ascii")
        except (OSError, ValueError):
            written = ""
        self._answer.unlink(missing_ok=True)
        host.shared = answer.token == self._text and written == self._text[::-1]
        prints = zip(self._prints.items(), answer.prints, strict=False)
        host.same_paths = {path for (path, own), theirs in prints if own and own == theirs}

    def close(self) -> None:
        """Remove the token file and the answer file."""
        for path in (self._token, self._answer):
            path.unlink(missing_ok=True)
