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
from realhf.cluster.messages import HostHello, Probe, ProbeAnswer
from realhf.cluster.own_host import own_gpus
from realhf.cluster.placement import LAUNCHER, USES_GPU, CandidateHost, kind_of
from realhf.scheduler.base import WorkerSpec

CLOCKS_APART_S = 5.0
"""Difference of clocks from which a warning is given, in seconds."""
_SHARES = {
    None: "fileroot not looked at",
    True: "shares fileroot",
    False: "does not share fileroot",
}
PROBE_S = 10.0
"""Seconds within which a host must answer a probe of the run folder."""


REST_S = 15.0
"""Seconds that a host gets no workers after failures; doubled each time, ..."""
MAX_REST_S = 600.0
"""... up to this."""
QUICK_S = 10.0
"""A worker that fails within this time may have failed because of its host, ..."""
QUICK_ENDS = 2
"""... and this many in a row are taken to have."""


@dataclass
class HostBackoff:
    """Failures on a host since a worker last ran there for ``QUICK_S``, and the pause that follows
    them."""

    ends: int = 0
    """Failures in a row."""
    rests: int = 0
    """Number of pauses so far."""
    until: float = 0.0
    """End of the pause (process_clock.now)."""
    why: str = ""
    """Reason of the last failure."""

    @property
    def left_s(self) -> float:
        """Seconds until the host gets workers again; 0 if it does now."""
        return max(0.0, self.until - process_clock.now())


@dataclass
class RunningWorker:
    """A running worker."""

    spec: WorkerSpec
    """As the launcher gave it, with paths of the launcher's machine."""
    host: str
    since: float
    """Time of its start (process_clock.now)."""
    gpu: int | None = None
    """Number of its GPU on the host; None without one, or if it sees all of them."""


@dataclass
class Host:
    """A joined host."""

    hello: HostHello
    transfers: TransferQueue
    """Files to send to it, and the workers that need them."""
    shared: bool | None = None
    """Whether it shares the run folder; None before it was probed."""
    there: set[str] = field(default_factory=set)
    """Paths that have the same content on it as on the launcher's machine."""
    since: float = field(default_factory=process_clock.now)
    """Time of its registration (process_clock.now)."""
    leave_by: float = math.inf
    """If an operator removes it: when it is dropped at the latest (process_clock.now)."""
    strange: bool = False
    """Whether its agent has sent invalid messages."""

    @property
    def leaving(self) -> bool:
        """Whether an operator is removing it."""
        return self.leave_by != math.inf


class HostTable:
    """Hosts and workers by name, and recent failures of hosts (``troubles``), which outlast a
    restart of the run."""

    def __init__(self, troubles: dict[str, HostBackoff] | None = None) -> None:
        self.hosts: dict[str, Host] = {}
        self.workers: dict[str, RunningWorker] = {}
        self.troubles = {} if troubles is None else troubles

    def workers_on(self, host: str) -> dict[str, RunningWorker]:
        """Return the workers on a host."""
        return {name: worker for name, worker in self.workers.items() if worker.host == host}

    def candidates(self) -> list[CandidateHost]:
        """Return the hosts that may get workers, the launcher's machine first.

        Hosts of one machine share its GPUs, such as the launcher and the agent on the first node of
        a batch job.
        """
        gpus: dict[str, Sequence[str]] = {LAUNCHER: own_gpus()}
        gpus |= {name: host.hello.gpus for name, host in sorted(self.hosts.items())}
        taken = {name: self._gpus_by_worker(name, own) for name, own in gpus.items()}
        seen_by = Counter(gpu for own in gpus.values() for gpu in set(own))
        holders = {gpu: list[tuple[str, str]]() for gpu in seen_by}
        for name, workers in taken.items():
            for worker, number in workers.items():
                if number is not None:
                    holders[gpus[name][number]].append((name, worker))
        candidates: list[CandidateHost] = []
        for name, own in gpus.items():
            host = self.hosts.get(name)
            if host is not None and host.leaving:
                continue
            cores = host.hello.cores if host else usable_cores()
            shared = bool(host.shared) if host else True
            beside = {
                worker: number
                for number, gpu in enumerate(own)
                for other, worker in holders[gpu]
                if other != name
            }
            offered = frozenset(number for number, gpu in enumerate(own) if seen_by[gpu] > 1)
            rests = self.rest_s(name) > 0
            candidates.append(
                CandidateHost(name, cores, len(own), shared, taken[name], beside, offered, rests)
            )
        return candidates

    def _gpus_by_worker(self, host: str, gpus: Sequence[str]) -> Mapping[str, int | None]:
        """Return the GPU of each worker of a host.

        A worker that computes and sees all GPUs uses the first one, as torch does.
        """

        def gpu_of(name: str, worker: RunningWorker) -> int | None:
            number = 0 if worker.gpu is None and kind_of(name) in USES_GPU else worker.gpu
            return number if number is not None and number < len(gpus) else None

        return {name: gpu_of(name, worker) for name, worker in self.workers_on(host).items()}

    def note_failure(self, worker: RunningWorker, why: str, *, sure: bool) -> str:
        """Record the failure of a worker, and pause its host if the host is the likely cause.

        sure: the host is known to be the cause. Returns a notice for the user if the host is
        paused, else "".
        """
        host = worker.host
        if not sure and process_clock.now() - worker.since >= QUICK_S:
            self.troubles.pop(host, None)
            return ""
        trouble = self.troubles.setdefault(host, HostBackoff())
        trouble.ends += 1
        trouble.why = f"{worker.spec.name} {why}"
        if not (sure or trouble.ends >= QUICK_ENDS) or trouble.left_s:
            return ""
        rest_s = min(MAX_REST_S, REST_S * 2**trouble.rests)
        trouble.until = process_clock.now() + rest_s
        trouble.rests += 1
        return f"host {host} gets no workers for {rest_s:g} s: {trouble.why}"

    def rest_s(self, host: str) -> float:
        """Return the seconds for which a host gets no workers."""
        trouble = self.troubles.get(host)
        return trouble.left_s if trouble is not None else 0.0

    def remove_host(self, host: str) -> dict[str, RunningWorker]:
        """Remove a host and its workers; return the workers."""
        self.hosts.pop(host, None)
        gone = self.workers_on(host)
        for name in gone:
            del self.workers[name]
        return gone

    def lines(self, endpoint: str) -> Iterator[str]:
        """Yield a line of text for each host and worker."""
        yield f"launcher at {endpoint}: {len(self.hosts)} hosts, {len(self.workers)} workers"
        rows = {LAUNCHER: ""} | {
            name: f"  {host.hello.address}  {host.hello.cores} cores  {host.hello.memory_gib:.0f} "
            f"GiB  "
            f"{len(host.hello.gpus)} GPUs  "
            f"{_SHARES[host.shared]}{'  leaving' * host.leaving}{self._rest_text(name)}"
            for name, host in sorted(self.hosts.items())
        }
        for host, text in rows.items():
            yield f"{host}{text}"
            for name, worker in sorted(self.workers_on(host).items()):
                gpu = "" if worker.gpu is None else f"  GPU {worker.gpu}"
                yield f"  {name}  {process_clock.now() - worker.since:.0f} s{gpu}"

    def _rest_text(self, host: str) -> str:
        left_s = self.rest_s(host)
        return f"  gets no workers for {left_s:.0f} s: {self.troubles[host].why}" if left_s else ""


def list_warnings(hello: HostHello) -> Iterator[str]:
    """Yield warnings about a host that has joined."""
    apart = hello.clock - time.time()
    if abs(apart) > CLOCKS_APART_S:
        yield (
            f"host {hello.name}: its clock is {abs(apart):.0f} s "
            f"{'ahead of' if apart > 0 else 'behind'} the "
            "launcher's; times in logs and traces will not fit together (set it by NTP)"
        )


class FolderProbe:
    """Probe whether a host shares ``folder``: it must read a token there, and write an answer next
    to it.

    paths: fingerprints of other files by path, which are compared with the host's.
    """

    def __init__(self, folder: Path, paths: Mapping[str, str]) -> None:
        self._text = secrets.token_hex(16)
        tag = secrets.token_hex(4)
        self._token = folder / f".host-{tag}"
        self._answer = folder / f".host-{tag}-answer"
        self._prints = paths
        folder.mkdir(parents=True, exist_ok=True)
        self._token.write_text(self._text, encoding="ascii")

    def build_probe(self, number: int) -> Probe:
        """Return the message for a host."""
        return Probe(number, str(self._token), str(self._answer), [*self._prints])

    def apply_answer(self, host: Host, answer: ProbeAnswer) -> None:
        """Record what the host shares, and remove its answer."""
        try:
            written = self._answer.read_text(encoding="ascii")
        except (OSError, ValueError):
            written = ""
        self._answer.unlink(missing_ok=True)
        host.shared = answer.token == self._text and written == self._text[::-1]
        prints = zip(self._prints.items(), answer.prints, strict=False)
        host.there = {path for (path, own), theirs in prints if own and own == theirs}

    def close(self) -> None:
        """Remove the token and its answer."""
        for path in (self._token, self._answer):
            path.unlink(missing_ok=True)
