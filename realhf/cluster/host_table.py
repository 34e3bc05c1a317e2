"""Keeps the launcher's view of the hosts that take part: what each has, which workers run there, what it shares."""

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
from realhf.cluster.messages import HostHello, Probe, Probed
from realhf.cluster.own_host import own_gpus
from realhf.cluster.placement import LAUNCHER, USES_GPU, Place, kind_of
from realhf.scheduler.base import WorkerSpec

CLOCKS_APART_S = 5.0
_SHARES = {None: "fileroot not looked at", True: "shares fileroot", False: "does not share fileroot"}
PROBE_S = 10.0
"""How long a host may take to look at the run folder."""


REST_S, LONGEST_REST_S = 15.0, 600.0
"""How long a host on which workers fail gets none: at first, doubled each time, and at most."""
QUICK_S, QUICK_ENDS = 10.0, 2
"""A worker that fails so soon may have failed because of its host; so many in a row have."""


@dataclass
class Backoff:
    """What has failed on a host since a worker last ran there for ``QUICK_S``: how many ends in a row, how often it was
    let rest for them and until when (``process_clock.now``), and what the last one said."""

    ends: int = 0
    rests: int = 0
    until: float = 0.0
    why: str = ""

    @property
    def left_s(self) -> float:
        """Seconds until the host gets workers again; 0 when it does."""
        return max(0.0, self.until - process_clock.now())


@dataclass
class Running:
    """A worker that runs: its spec as the launcher gave it, its host, since when, and where its log ended here."""

    spec: WorkerSpec
    host: str
    since: float
    gpu: int | None = None


@dataclass
class Host:
    """A host that takes part. ``transfers``: what is on the way to it; ``shared``: whether it has the run folder, None
    before it was asked; ``there``: paths that look the same on it; ``leave_by``: when it is sent away at the latest
    (``process_clock.now``), if it was told to leave; ``strange``: it has talked nonsense."""

    hello: HostHello
    transfers: TransferQueue
    shared: bool | None = None
    there: set[str] = field(default_factory=set)
    since: float = field(default_factory=process_clock.now)
    leave_by: float = math.inf
    strange: bool = False

    @property
    def leaving(self) -> bool:
        """Whether it was told to leave."""
        return self.leave_by != math.inf


class HostTable:
    """Is what the scheduler knows: ``hosts`` by name, ``workers`` by name, and the ``troubles`` of hosts, which outlast
    a run that begins again."""

    def __init__(self, troubles: dict[str, Backoff] | None = None) -> None:
        self.hosts: dict[str, Host] = {}
        self.workers: dict[str, Running] = {}
        self.troubles = {} if troubles is None else troubles

    def on(self, host: str) -> dict[str, Running]:
        """Return the workers on a host."""
        return {name: worker for name, worker in self.workers.items() if worker.host == host}

    def places(self) -> list[Place]:
        """Return where workers may go, the launcher's machine first. Hosts on one machine share its GPUs: the first
        node of a batch job has the launcher and an agent."""
        gpus: dict[str, Sequence[str]] = {LAUNCHER: own_gpus()}
        gpus |= {name: host.hello.gpus for name, host in sorted(self.hosts.items())}
        taken = {name: self._gpus_on(name, own) for name, own in gpus.items()}
        seen_by = Counter(gpu for own in gpus.values() for gpu in set(own))
        holders = {gpu: list[tuple[str, str]]() for gpu in seen_by}
        for name, workers in taken.items():
            for worker, number in workers.items():
                if number is not None:
                    holders[gpus[name][number]].append((name, worker))
        found: list[Place] = []
        for name, own in gpus.items():
            host = self.hosts.get(name)
            if host is not None and host.leaving:
                continue
            cores, shared = (host.hello.cores, bool(host.shared)) if host else (usable_cores(), True)
            beside = {
                worker: number for number, gpu in enumerate(own) for other, worker in holders[gpu] if other != name
            }
            offered = frozenset(number for number, gpu in enumerate(own) if seen_by[gpu] > 1)
            rests = self.rest_s(name) > 0
            found.append(Place(name, cores, len(own), shared, taken[name], beside, offered, rests))
        return found

    def _gpus_on(self, host: str, gpus: Sequence[str]) -> Mapping[str, int | None]:
        """Return the GPU of each worker there; the first, which torch takes, of one that computes and sees all."""

        def gpu_of(name: str, worker: Running) -> int | None:
            number = 0 if worker.gpu is None and kind_of(name) in USES_GPU else worker.gpu
            return number if number is not None and number < len(gpus) else None

        return {name: gpu_of(name, worker) for name, worker in self.on(host).items()}

    def failed(self, worker: Running, why: str, *, sure: bool) -> str:
        """Note that a worker has failed, ``sure`` because of its host; return what a person should know of it, "" when
        the host goes on getting workers."""
        host = worker.host
        if not sure and process_clock.now() - worker.since >= QUICK_S:
            self.troubles.pop(host, None)
            return ""
        trouble = self.troubles.setdefault(host, Backoff())
        trouble.ends, trouble.why = trouble.ends + 1, f"{worker.spec.name} {why}"
        if not (sure or trouble.ends >= QUICK_ENDS) or trouble.left_s:
            return ""
        rest_s = min(LONGEST_REST_S, REST_S * 2**trouble.rests)
        trouble.until, trouble.rests = process_clock.now() + rest_s, trouble.rests + 1
        return f"host {host} gets no workers for {rest_s:g} s: {trouble.why}"

    def rest_s(self, host: str) -> float:
        """Return for how long a host gets no workers."""
        trouble = self.troubles.get(host)
        return trouble.left_s if trouble is not None else 0.0

    def take(self, host: str) -> dict[str, Running]:
        """Remove a host with its workers, and return these."""
        self.hosts.pop(host, None)
        gone = self.on(host)
        for name in gone:
            del self.workers[name]
        return gone

    def lines(self, endpoint: str) -> Iterator[str]:
        """Say what takes part, a line for each host and worker."""
        yield f"launcher at {endpoint}: {len(self.hosts)} hosts, {len(self.workers)} workers"
        rows = {LAUNCHER: ""} | {
            name: f"  {host.hello.address}  {host.hello.cores} cores  {host.hello.memory_gib:.0f} GiB  "
            f"{len(host.hello.gpus)} GPUs  {_SHARES[host.shared]}{'  leaving' * host.leaving}{self._rests(name)}"
            for name, host in sorted(self.hosts.items())
        }
        for host, text in rows.items():
            yield f"{host}{text}"
            for name, worker in sorted(self.on(host).items()):
                gpu = "" if worker.gpu is None else f"  GPU {worker.gpu}"
                yield f"  {name}  {process_clock.now() - worker.since:.0f} s{gpu}"

    def _rests(self, host: str) -> str:
        left_s = self.rest_s(host)
        return f"  gets no workers for {left_s:.0f} s: {self.troubles[host].why}" if left_s else ""


def warnings(hello: HostHello) -> Iterator[str]:
    """Say what a person should know about a host that has come."""
    apart = hello.clock - time.time()
    if abs(apart) > CLOCKS_APART_S:
        yield (
            f"host {hello.name}: its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} the "
            "launcher's; times in logs and traces will not fit together (set it by NTP)"
        )


class FolderProbe:
    """Finds out whether a host has ``folder``: writes a token there, which the host reads and answers beside it."""

    def __init__(self, folder: Path, paths: Mapping[str, str]) -> None:
        self._text, tag = secrets.token_hex(16), secrets.token_hex(4)
        self._token, self._answer = folder / f".host-{tag}", folder / f".host-{tag}-answer"
        self._prints = paths
        folder.mkdir(parents=True, exist_ok=True)
        self._token.write_text(self._text, encoding="ascii")

    def question(self, number: int) -> Probe:
        """Return what a host is asked."""
        return Probe(number, str(self._token), str(self._answer), [*self._prints])

    def judge(self, host: Host, answer: Probed) -> None:
        """Note what the host shares, and forget its answer."""
        try:
            said = self._answer.read_text(encoding="ascii")
        except (OSError, ValueError):
            said = ""
        self._answer.unlink(missing_ok=True)
        host.shared = answer.token == self._text and said == self._text[::-1]
        looks = zip(self._prints.items(), answer.prints, strict=False)
        host.there = {path for (path, own), theirs in looks if own and own == theirs}

    def close(self) -> None:
        """Remove the token and its answer."""
        for path in (self._token, self._answer):
            path.unlink(missing_ok=True)
