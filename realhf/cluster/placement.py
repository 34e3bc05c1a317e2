"""Decides on which host a worker runs. Pure: it knows hosts and workers as values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


class ClusterError(OSError):
    """Is raised when workers cannot be started on the hosts that there are; the message names host and option."""


LAUNCHER = "launcher"
"""The name of the launcher's own machine among the hosts."""
USES_GPU = ("model_worker", "generation")
PACKED = ("model_worker",)
"""Kinds whose workers compute together, so that they share a host."""


@dataclass(frozen=True)
class Place:
    """What a host has and what is on it. ``workers``: names of the workers there, with the GPU that each has;
    ``shared``: whether the run folder is there. Other hosts may be on the same machine, and see the same GPUs:
    ``beside`` are workers there that have one of this host's, with its number here; ``offered`` are those of its GPUs
    that other hosts see as well. On one that is ``resting`` workers have failed just now."""

    name: str
    cores: int
    gpus: int
    shared: bool
    workers: Mapping[str, int | None]
    beside: Mapping[str, int] = field(default_factory=dict)
    offered: frozenset[int] = frozenset()
    resting: bool = False

    @property
    def holders(self) -> dict[str, int]:
        """The workers that have a GPU of this host, and its number."""
        return {name: gpu for name, gpu in self.workers.items() if gpu is not None} | dict(self.beside)

    @property
    def free_gpus(self) -> list[int]:
        """GPUs that no worker has; first those that no other host sees."""
        taken = set(self.holders.values())
        return sorted({*range(self.gpus)} - taken, key=lambda gpu: (gpu in self.offered, gpu))

    def load(self) -> float:
        """Workers for each core."""
        return len(self.workers) / self.cores


def kind_of(name: str) -> str:
    """Return ``rollout_worker`` for ``rollout_worker/3``."""
    return name.partition("/")[0]


def wished(name: str, placement: Mapping[str, str]) -> str:
    """Return the host that ``placement`` names for a worker: by its name, else by its kind, else by the first pattern
    that fits it."""
    for exact in (name, kind_of(name)):
        if exact in placement:
            return placement[exact]
    return next((host for pattern, host in placement.items() if fnmatchcase(name, pattern)), "")


def choose(name: str, places: Sequence[Place], wish: str = "", *, strict: bool = True) -> Place:
    """Return where a worker goes. ``places`` has the launcher's machine first. ``wish`` is a host by name; without
    ``strict`` another one will do when it is not there.

    One that rests is chosen only where no other will do, which does not make the launcher's machine another one.
    Workers that keep a checkpoint need the run folder. Trainers of one run share a host, the launcher's where no other
    has more GPUs; other workers go to the host with the fewest workers for its cores, to the launcher's only when there
    is no other. Raises ClusterError that says what is needed and what each host has.
    """
    if wish:
        found = next((place for place in places if place.name == wish), None)
        if found is None and strict:
            there = ", ".join(place.name for place in places)
            raise ClusterError(
                f"{name}: there is no host {wish!r} (scheduler.placement, scheduler.hosts), only {there}"
            )
        if found is not None and (strict or not found.resting):
            return _fitting(name, found)
    kind = kind_of(name)
    if kind in PACKED:
        return _fitting(name, _trainers_place(name, places))
    joined = [place for place in places if place.name != LAUNCHER]
    hosts = [place for place in joined if not place.resting] or joined or list(places)
    if kind in USES_GPU and any(place.gpus for place in places):
        free = [place for place in places if place.free_gpus]
        hosts = [place for place in hosts if place.gpus] or free or [place for place in places if place.gpus]
        return min(hosts, key=lambda place: (-len(place.free_gpus), place.load(), place.name))
    return min(hosts, key=lambda place: (place.load(), place.name))


def _trainers_place(name: str, places: Sequence[Place]) -> Place:
    beside = [place for place in places if any(kind_of(other) in PACKED for other in place.workers)]
    if beside:
        return beside[0]
    able = [place for place in places if place.shared and not place.resting]
    if not able:
        raise ClusterError(f"{name}: no host has the run folder (fileroot)")
    return max(able, key=lambda place: (place.gpus, place.name == LAUNCHER))


def _fitting(name: str, place: Place) -> Place:
    if kind_of(name) in PACKED and not place.shared:
        raise ClusterError(
            f"{name} cannot run on {place.name}: it writes checkpoints into the run folder (fileroot), which that host "
            "does not share; share it, or leave the trainer on the launcher's machine (scheduler.placement)"
        )
    return place


def gpu_of(name: str, place: Place) -> int | None:
    """Return the GPU that a worker gets on a host, None where it needs none or there is none. The one with the fewest
    workers where all are taken: trainers take one each. Raises ClusterError when trainers would share one."""
    if kind_of(name) not in USES_GPU or not place.gpus:
        return None
    if place.free_gpus:
        return place.free_gpus[0]
    taken = [*place.holders.values()]
    if kind_of(name) in PACKED:
        holders = ", ".join(sorted(place.holders))
        raise ClusterError(
            f"{name}: needs a GPU of its own on {place.name}, which has {place.gpus}, all taken by {holders} "
            "(actor.workers, scheduler.placement)"
        )
    return min(range(place.gpus), key=lambda gpu: (taken.count(gpu), gpu))


def trainer_beside(name: str, gpu: int | None, place: Place) -> str:
    """Return in words who trains on the GPU that a worker gets on a host, or generates on that of a trainer; "" when
    nobody does. On the launcher's machine a configuration may want it so, and it counts only who is on another host."""
    if gpu is None:
        return ""
    holders = place.beside if place.name == LAUNCHER else place.holders
    others = [other for other, number in holders.items() if number == gpu]
    if kind_of(name) not in PACKED:
        others = [other for other in others if kind_of(other) in PACKED]
    return f"{name}: GPU {gpu} of {place.name} is also that of {', '.join(sorted(others))}" if others else ""


def capacity(places: Sequence[Place]) -> str:
    """Return in words what each host has, for messages."""
    return "; ".join(
        f"{place.name}: {place.cores} cores, {len(place.free_gpus)} of {place.gpus} GPUs free, "
        f"{len(place.workers)} workers"
        for place in places
    )
