"""Placement of workers on hosts, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


class ClusterError(OSError):
    """Workers that cannot be started on the available hosts; the message names host and option."""


LAUNCHER = "launcher"
"""Name of the launcher's own machine among the hosts."""
USES_GPU = ("model_worker", "generation")
"""Kinds of workers that use a GPU where there is one."""
PACKED = ("model_worker",)
"""Kinds whose workers compute together and therefore share a host."""


@dataclass(frozen=True)
class CandidateHost:
    """A host with its resources and their use. Several hosts may be on one machine and see the same
    GPUs."""

    name: str
    cores: int
    gpus: int
    """Number of GPUs."""
    shared: bool
    """Whether it shares the run folder."""
    workers: Mapping[str, int | None]
    """Workers on the host by name, each with the number of its GPU."""
    neighbours: Mapping[str, int] = field(default_factory=dict)
    """Workers of other hosts of the same machine that use a GPU of this host, with its number
    here."""
    shared_gpus: frozenset[int] = frozenset()
    """GPUs that other hosts of the same machine see as well."""
    paused: bool = False
    """Whether workers have failed on it recently, so that it gets none for a while."""

    @property
    def gpu_users(self) -> dict[str, int]:
        """Workers that use a GPU of this host, with its number."""
        return {name: gpu for name, gpu in self.workers.items() if gpu is not None} | dict(
            self.neighbours
        )

    @property
    def free_gpus(self) -> list[int]:
        """GPUs that no worker uses; those that no other host sees come first."""
        used = set(self.gpu_users.values())
        return sorted({*range(self.gpus)} - used, key=lambda gpu: (gpu in self.shared_gpus, gpu))

    def load(self) -> float:
        """Return the number of workers per core."""
        return len(self.workers) / self.cores


def kind_of(name: str) -> str:
    """Return ``rollout_worker`` for ``rollout_worker/3``."""
    return name.partition("/")[0]


def find_placed_host(name: str, placement: Mapping[str, str]) -> str:
    """Return the host that ``placement`` names for a worker; "" without one.

    The worker's name takes precedence over its kind, and this over the first pattern that matches.
    """
    for exact in (name, kind_of(name)):
        if exact in placement:
            return placement[exact]
    return next((host for pattern, host in placement.items() if fnmatchcase(name, pattern)), "")


def choose_host(
    name: str, places: Sequence[CandidateHost], preferred_name: str = "", *, strict: bool = True
) -> CandidateHost:
    """Choose the host of a worker.

    places: all hosts, the launcher's machine first. preferred_name: name of a preferred host; unless ``strict``,
    another one is chosen if it is missing.

    - Trainers of a run share a host: the launcher's, unless another one has more GPUs. It must
      share the run folder, into which they write checkpoints.
    - Other workers go to the host with the fewest workers per core, to the launcher's machine only
      if there is no other host. Those that use a GPU go to the host with the most free GPUs.
    - A paused host is chosen only if all hosts but the launcher's are paused.

    Raises ClusterError with the requirement and the resources of each host.
    """
    if preferred_name:
        preferred = next((place for place in places if place.name == preferred_name), None)
        if preferred is None and strict:
            names = ", ".join(place.name for place in places)
            raise ClusterError(
                f"{name}: there is no host {preferred_name!r} (scheduler.placement, scheduler.hosts), only "
                f"{names}"
            )
        if preferred is not None and (strict or not preferred.paused):
            return _check_fits(name, preferred)
    kind = kind_of(name)
    if kind in PACKED:
        return _check_fits(name, _choose_trainer_host(name, places))
    joined = [place for place in places if place.name != LAUNCHER]
    hosts = [place for place in joined if not place.paused] or joined or list(places)
    if kind in USES_GPU and any(place.gpus for place in places):
        free = [place for place in places if place.free_gpus]
        hosts = (
            [place for place in hosts if place.gpus]
            or free
            or [place for place in places if place.gpus]
        )
        return min(hosts, key=lambda place: (-len(place.free_gpus), place.load(), place.name))
    return min(hosts, key=lambda place: (place.load(), place.name))


def _choose_trainer_host(name: str, places: Sequence[CandidateHost]) -> CandidateHost:
    trainer_hosts = [
        place for place in places if any(kind_of(other) in PACKED for other in place.workers)
    ]
    if trainer_hosts:
        return trainer_hosts[0]
    suitable = [place for place in places if place.shared and not place.paused]
    if not suitable:
        raise ClusterError(f"{name}: no host has the run folder (fileroot)")
    return max(suitable, key=lambda place: (place.gpus, place.name == LAUNCHER))


def _check_fits(name: str, place: CandidateHost) -> CandidateHost:
    if kind_of(name) in PACKED and not place.shared:
        raise ClusterError(
            f"{name} cannot run on {place.name}: it writes checkpoints into the run folder "
            f"(fileroot), which that host "
            "does not share; share it, or leave the trainer on the launcher's machine "
            "(scheduler.placement)"
        )
    return place


def choose_gpu(name: str, place: CandidateHost) -> int | None:
    """Choose the GPU of a worker on a host; return None if it needs none or there is none.

    Without a free GPU, a worker shares the one with the fewest workers, except a trainer: raises
    ClusterError.
    """
    if kind_of(name) not in USES_GPU or not place.gpus:
        return None
    if place.free_gpus:
        return place.free_gpus[0]
    used = [*place.gpu_users.values()]
    if kind_of(name) in PACKED:
        users = ", ".join(sorted(place.gpu_users))
        raise ClusterError(
            f"{name}: needs a GPU of its own on {place.name}, which has {place.gpus}, all used by "
            f"{users} "
            "(actor.workers, scheduler.placement)"
        )
    return min(range(place.gpus), key=lambda gpu: (used.count(gpu), gpu))


def describe_shared_gpu(name: str, gpu: int | None, place: CandidateHost) -> str:
    """Describe with which trainers a worker shares its GPU, or with which workers a trainer does;
    "" if it does not.

    On the launcher's machine sharing may be configured, so only workers of other hosts count.
    """
    if gpu is None:
        return ""
    users = place.neighbours if place.name == LAUNCHER else place.gpu_users
    others = [other for other, number in users.items() if number == gpu]
    if kind_of(name) not in PACKED:
        others = [other for other in others if kind_of(other) in PACKED]
    return (
        f"{name}: GPU {gpu} of {place.name} is also that of {', '.join(sorted(others))}"
        if others
        else ""
    )


def describe_capacity(places: Sequence[CandidateHost]) -> str:
    """Describe the resources of each host, for messages."""
    return "; ".join(
        f"{place.name}: {place.cores} cores, {len(place.free_gpus)} of {place.gpus} GPUs free, "
        f"{len(place.workers)} workers"
        for place in places
    )
