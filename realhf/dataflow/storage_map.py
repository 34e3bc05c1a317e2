"""Which worker holds which tensor, and how a call's inputs get to where it runs.

Source: docs/reference/dataflow.md 5 and 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fetch:
    """``dst`` reads ``keys`` of ``ids`` from ``src``, peer to peer."""

    dst: str
    src: str
    ids: tuple[str, ...]
    keys: tuple[str, ...]


class DataLost(KeyError):
    """No living worker holds a value that a call needs."""


class StorageMap:
    """Ownership: sample id -> key -> names of the workers that hold it. Names only, never a tensor."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, list[str]]] = {}

    def __len__(self) -> int:
        """Samples of which some worker holds something."""
        return len(self._owners)

    def record(self, ids: Iterable[str], keys: Iterable[str], worker: str) -> None:
        """``worker`` now holds these keys of these samples."""
        names = tuple(keys)
        for sample_id in ids:
            held = self._owners.setdefault(sample_id, {})
            for key in names:
                owners = held.setdefault(key, [])
                if worker not in owners:
                    owners.append(worker)

    def owners(self, sample_id: str, key: str) -> tuple[str, ...]:
        """Workers that hold the value, in the order in which they got it."""
        return tuple(self._owners.get(sample_id, {}).get(key, ()))

    def ids(self) -> list[str]:
        """Every sample of which some worker holds something."""
        return list(self._owners)

    def forget(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """Drop these samples; returns {worker: ids it must clear}."""
        clear: dict[str, list[str]] = {}
        for sample_id in ids:
            held = self._owners.pop(sample_id, {})
            for worker in sorted({name for owners in held.values() for name in owners}):
                clear.setdefault(worker, []).append(sample_id)
        return clear

    def plan(
        self, placement: Mapping[str, Sequence[str]], keys: Sequence[str], hosts: Mapping[str, str]
    ) -> list[Fetch]:
        """See ``make_transfer_plan``."""
        return make_transfer_plan(self._owners, placement, keys, hosts)


def make_transfer_plan(
    ownership: Mapping[str, Mapping[str, Sequence[str]]],
    placement: Mapping[str, Sequence[str]],
    keys: Sequence[str],
    hosts: Mapping[str, str],
) -> list[Fetch]:
    """The transfers that bring ``keys`` of ``placement[worker]`` to every worker. Pure and deterministic.

    A value the worker holds is not transferred. Otherwise the source is an owner on the same host (``hosts``:
    worker -> host) if there is one, and among those the one with the fewest values planned so far. Transfers
    of one pair of workers are merged when they are about the same keys. Raises DataLost when nobody in
    ``hosts`` holds a value.
    """
    planned: Counter[str] = Counter()
    fetches: list[Fetch] = []
    for dst, ids in placement.items():
        wanted: dict[str, dict[str, list[str]]] = {}
        for sample_id in ids:
            for key in keys:
                owners = [w for w in ownership.get(sample_id, {}).get(key, ()) if w in hosts]
                if dst in owners:
                    continue
                if not owners:
                    raise DataLost(f"no worker holds key {key!r} of sample {sample_id!r}")
                near = [w for w in owners if hosts[w] == hosts.get(dst)] or owners
                src = min(near, key=lambda w: (planned[w], w))
                planned[src] += 1
                wanted.setdefault(src, {}).setdefault(sample_id, []).append(key)
        fetches += _merged(dst, wanted)
    return fetches


def _merged(dst: str, wanted: Mapping[str, Mapping[str, Sequence[str]]]) -> list[Fetch]:
    fetches = []
    for src in sorted(wanted):
        groups: dict[tuple[str, ...], list[str]] = {}
        for sample_id, keys in wanted[src].items():
            groups.setdefault(tuple(keys), []).append(sample_id)
        fetches += [Fetch(dst, src, tuple(ids), keys) for keys, ids in groups.items()]
    return fetches
