"""Says which GPUs a process sees, and hands single ones of them to workers.

GPUs are numbered from 0 among those that the process itself sees: where ``CUDA_VISIBLE_DEVICES`` names some, as batch
systems and containers do, number 0 is the first of that list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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


def gpus_anywhere(machine: str, environment: Mapping[str, str] | None = None, driver: Path = DRIVER) -> tuple[str, ...]:
    """Return for each of ``visible_gpus`` a name that no other GPU of any machine has: ``machine`` and the address of
    the GPU on its bus. Two processes of one machine, whatever they see of it, give one GPU the same name; so it is also
    for numbers where all GPUs are of one model, since the driver does not say in which order CUDA counts others. A UUID
    that the driver does not list (a part of a GPU, for instance) is the name itself."""
    listed = sorted(driver.glob("*"))
    uuids = {entry.name: _uuid(entry) for entry in listed}

    def names() -> Iterator[str]:
        for name in visible_gpus(environment, driver):
            if name.isdecimal():
                yield f"{machine}/{listed[int(name)].name}"
            else:  # CUDA takes the beginning of a UUID, too
                found = next((address for address, uuid in uuids.items() if uuid.startswith(name)), "")
                yield f"{machine}/{found}" if found else name

    return tuple(names())


def _uuid(entry: Path) -> str:
    try:
        lines = (entry / "information").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), "")


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
