"""Map of which worker stores which tensor, and planning of the transfers that bring a call's inputs
to its workers.

Source: docs/reference/dataflow.md 5 and 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fetch:
    """A peer-to-peer transfer between two workers."""

    dst: str
    """Worker that receives the values."""
    src: str
    """Worker from which they are read."""
    ids: tuple[str, ...]
    """Ids of the samples."""
    keys: tuple[str, ...]
    """Keys to transfer of each sample."""


class DataLost(KeyError):
    """Error: no living worker stores a value that a call needs."""


class StorageMap:
    """Map from sample id and key to the names of the workers that store the value. It holds only
    names, no tensors."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, list[str]]] = {}

    def __len__(self) -> int:
        """Return the number of samples with a value on at least one worker."""
        return len(self._owners)

    def record(self, ids: Iterable[str], keys: Iterable[str], worker: str) -> None:
        """Record that ``worker`` stores these keys of these samples."""
        names = tuple(keys)
        for sample_id in ids:
            owners_by_key = self._owners.setdefault(sample_id, {})
            for key in names:
                owners = owners_by_key.setdefault(key, [])
                if worker not in owners:
                    owners.append(worker)

    def owners(self, sample_id: str, key: str) -> tuple[str, ...]:
        """Return the workers that store the value, in the order in which they were recorded."""
        return tuple(self._owners.get(sample_id, {}).get(key, ()))

    def ids(self) -> list[str]:
        """Return the ids of all samples with a value on at least one worker."""
        return list(self._owners)

    def forget(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """Remove samples; return the ids that each worker must clear."""
        ids_by_worker: dict[str, list[str]] = {}
        for sample_id in ids:
            owners_by_key = self._owners.pop(sample_id, {})
            for worker in sorted({name for owners in owners_by_key.values() for name in owners}):
                ids_by_worker.setdefault(worker, []).append(sample_id)
        return ids_by_worker

    def plan(
        self, placement: Mapping[str, Sequence[str]], keys: Sequence[str], hosts: Mapping[str, str]
    ) -> list[Fetch]:
        """Return the transfers that ``make_transfer_plan`` makes for the recorded owners."""
        return make_transfer_plan(self._owners, placement, keys, hosts)


def make_transfer_plan(
    ownership: Mapping[str, Mapping[str, Sequence[str]]],
    placement: Mapping[str, Sequence[str]],
    keys: Sequence[str],
    hosts: Mapping[str, str],
) -> list[Fetch]:
    """Return the transfers that bring ``keys`` of the samples ``placement[worker]`` to every
    worker.

    A value that the worker already stores is not transferred. Otherwise the source is an owner on
    the same host (``hosts``: worker -> host) if there is one, and among equals the one with the
    fewest values planned so far. Transfers between the same two workers are merged if they have the
    same keys. Raises DataLost if no worker in ``hosts`` stores a value. Pure and deterministic.
    """
    planned: Counter[str] = Counter()
    fetches: list[Fetch] = []
    for dst, ids in placement.items():
        keys_by_source: dict[str, dict[str, list[str]]] = {}
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
                keys_by_source.setdefault(src, {}).setdefault(sample_id, []).append(key)
        fetches += _merge_fetches(dst, keys_by_source)
    return fetches


def _merge_fetches(
    dst: str, keys_by_source: Mapping[str, Mapping[str, Sequence[str]]]
) -> list[Fetch]:
    """Merge the samples that ``dst`` reads from the same source with the same keys into one fetch
    each."""
    fetches = []
    for src in sorted(keys_by_source):
        groups: dict[tuple[str, ...], list[str]] = {}
        for sample_id, keys in keys_by_source[src].items():
            groups.setdefault(tuple(keys), []).append(sample_id)
        fetches += [Fetch(dst, src, tuple(ids), keys) for keys, ids in groups.items()]
    return fetches
