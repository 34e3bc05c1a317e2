"""Pure functions that choose the host and the GPU of each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


class ClusterError(OSError):
    """Raised when workers cannot be started on the available hosts. The message names the host and
    the option to change."""


LAUNCHER = "launcher"
"""Host name that stands for the launcher's own machine."""
USES_GPU = ("model_worker", "generation")
"""Kinds of workers that use a GPU if the host has one."""
PACKED = ("model_worker",)
"""Kinds whose workers compute together and therefore must run on the same host."""


@dataclass(frozen=True)
class CandidateHost:
    """A host's resources and their current use. Several hosts may be on one machine and see the
    same GPUs."""

    name: str
    cores: int
    gpus: int
    """Number of GPUs."""
    shared: bool
    """Whether the host shares the run folder."""
    workers: Mapping[str, int | None]
    """GPU index of each worker on the host, by worker name; None if it uses no GPU."""
    neighbours: Mapping[str, int] = field(default_factory=dict)
    """Workers that belong to other hosts on the same machine and use a GPU of this host, by name,
    with that GPU's index on this host."""
    shared_gpus: frozenset[int] = frozenset()
    """Indices of the GPUs that other hosts on the same machine see as well."""
    paused: bool = False
    """Whether the host gets no workers for a while, because workers have failed on it."""

    @property
    def gpu_users(self) -> dict[str, int]:
        """All workers that use a GPU of this host, with that GPU's index."""
        return {name: gpu for name, gpu in self.workers.items() if gpu is not None} | dict(
            self.neighbours
        )

    @property
    def free_gpus(self) -> list[int]:
        """Indices of the unused GPUs; those that no other host sees come first."""
        used = set(self.gpu_users.values())
        return sorted({*range(self.gpus)} - used, key=lambda gpu: (gpu in self.shared_gpus, gpu))

    def load(self) -> float:
        """Return the number of workers per core."""
        return len(self.workers) / self.cores


def kind_of(name: str) -> str:
    """Return the kind of a worker: ``rollout_worker`` for ``rollout_worker/3``."""
    return name.partition("/")[0]


def find_placed_host(name: str, placement: Mapping[str, str]) -> str:
    """Return the host that ``placement`` assigns to a worker; "" if it assigns none.

    An entry for the worker's name takes precedence over one for its kind, and an entry for its kind
    takes precedence over the first matching pattern.
    """
    for exact in (name, kind_of(name)):
        if exact in placement:
            return placement[exact]
    return next((host for pattern, host in placement.items() if fnmatchcase(name, pattern)), "")


def choose_host(
    name: str, places: Sequence[CandidateHost], preferred_name: str = "", *, strict: bool = True
) -> CandidateHost:
    """Choose the host of a worker.

    places: all hosts, the launcher's machine first. preferred_name: name of the preferred host, or
    "". If that host is missing, another one is chosen, unless ``strict``.

    - All trainers run on one host: the launcher's machine, unless another host has more GPUs. It
      must share the run folder, into which the trainers write checkpoints.
    - Workers that use a GPU run on the host with the most free GPUs, and other workers on the host
      with the fewest workers per core. They run on the launcher's machine only if there is no other
      host.
    - A paused host is chosen only if all hosts except the launcher's machine are paused.

    Raises ClusterError if no host is suitable, with the requirement and the resources of each host.
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
    """Choose the GPU of a worker on a host and return its index; return None if the worker needs no
    GPU or the host has none.

    If no GPU is free, the worker shares the GPU that has the fewest workers; a trainer must not, so
    ClusterError is raised for it.
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
    """Describe which trainers share a worker's GPU or, for a trainer, which workers do; "" if it is
    not shared.

    On the launcher's machine only workers of other hosts count, because sharing among its own
    workers may be configured.
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
