"""Visible GPUs of a process, and their assignment to workers.

GPUs are numbered from 0 among those that the process sees: if ``CUDA_VISIBLE_DEVICES`` is set, as
batch systems and containers do, number 0 is the first entry of that list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder in which the driver lists the GPUs of the machine."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that restricts the GPUs that a process sees."""


def visible_gpus(
    environment: Mapping[str, str] | None = None, driver: Path = DRIVER
) -> tuple[str, ...]:
    """Return the GPUs that a process sees, in CUDA's order, as driver numbers or UUIDs.

    ``environment`` is the environment of the process, None for this one. As in CUDA, the list ends
    at the first entry that does not exist, and a list that names a GPU twice shows none."""
    listed = _parse_visible(os.environ if environment is None else environment)
    gpu_count = len([*driver.glob("*")]) if driver.is_dir() else 0
    if listed is None:
        return tuple(str(number) for number in range(gpu_count))
    visible: list[str] = []
    for name in listed if gpu_count else ():
        if not name.startswith(("GPU-", "MIG-")) and not (
            name.isdecimal() and int(name) < gpu_count
        ):
            break
        visible.append(name)
    return tuple(visible) if len(set(visible)) == len(visible) else ()


def global_gpu_names(
    machine: str, environment: Mapping[str, str] | None = None, driver: Path = DRIVER
) -> tuple[str, ...]:
    """Return a globally unique name for each of ``visible_gpus``: ``machine`` and the GPU's bus
    address.

    All processes of a machine give a GPU the same name, whichever GPUs they see. For numbered GPUs
    this requires that all are of one model, because the driver does not list others in CUDA's
    order. A UUID that the driver does not list, such as that of a MIG instance, is used as the name
    itself."""
    listed = sorted(driver.glob("*"))
    uuids = {entry.name: _read_uuid(entry) for entry in listed}

    def names() -> Iterator[str]:
        for name in visible_gpus(environment, driver):
            if name.isdecimal():
                yield f"{machine}/{listed[int(name)].name}"
            else:  # CUDA also accepts a prefix of a UUID.
                bus_address = next(
                    (address for address, uuid in uuids.items() if uuid.startswith(name)), ""
                )
                yield f"{machine}/{bus_address}" if bus_address else name

    return tuple(names())


def _read_uuid(entry: Path) -> str:
    try:
        lines = (entry / "information").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), ""
    )


def restrict_to_gpu(gpu: int, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which a worker sees only the GPU with this number.

    It is numbered among the GPUs of ``environment`` (None for this process's). Raises ValueError if
    there are fewer."""
    base = os.environ if environment is None else environment
    listed = _parse_visible(base)
    if listed is None:
        return {**base, VISIBLE: str(gpu)}
    if gpu >= len(listed):
        raise ValueError(
            f"GPU {gpu}: {VISIBLE}={base[VISIBLE]!r} shows this process {len(listed)} GPUs only"
        )
    return {**base, VISIBLE: listed[gpu]}


def _parse_visible(environment: Mapping[str, str]) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``, or None if it is not set and all GPUs are
    visible."""
    text = environment.get(VISIBLE)
    return (
        None if text is None else [name.strip() for name in text.split(",")] if text.strip() else []
    )
