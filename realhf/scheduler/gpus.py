"""Says which GPUs a process sees, and hands single ones of them to workers.

GPUs are numbered from 0 among those that the process itself sees: where ``CUDA_VISIBLE_DEVICES`` names some, as batch
systems and containers do, number 0 is the first of that list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
"""The driver has an entry here for each GPU of the machine."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str] | None = None, driver: Path = DRIVER) -> tuple[str, ...]:
    """Return what CUDA calls the GPUs that a process with this environment (None: this process) sees, in its order:
    numbers of the driver, or UUIDs. As in CUDA, a list of them ends at the first number that does not exist, and one
    that names a GPU twice shows none."""
    listed = _listed(os.environ if environment is None else environment)
    there = len([*driver.glob("*")]) if driver.is_dir() else 0
    if listed is None:
        return tuple(str(number) for number in range(there))
    seen: list[str] = []
    for name in listed if there else ():
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdecimal() and int(name) < there):
            break
        seen.append(name)
    return tuple(seen) if len(set(seen)) == len(seen) else ()


def with_one_gpu(gpu: int, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which a worker sees one GPU only: the one with this number among those of
    ``environment`` (None: this process). Raises ValueError when it lists fewer."""
    given = os.environ if environment is None else environment
    listed = _listed(given)
    if listed is None:
        return {**given, VISIBLE: str(gpu)}
    if gpu >= len(listed):
        raise ValueError(f"GPU {gpu}: {VISIBLE}={given[VISIBLE]!r} shows this process {len(listed)} GPUs only")
    return {**given, VISIBLE: listed[gpu]}


def _listed(environment: Mapping[str, str]) -> list[str] | None:
    """Return the entries of the list of GPUs that the environment has; None where all are seen."""
    text = environment.get(VISIBLE)
    return None if text is None else [name.strip() for name in text.split(",")] if text.strip() else []
