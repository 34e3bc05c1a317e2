"""Functions that list a process's visible GPUs and restrict a worker to some of them.

A GPU's number is its index, from 0, among the GPUs that the process sees. If
``CUDA_VISIBLE_DEVICES`` is set, as in batch systems and containers, number 0 is the first entry of
that list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder in which the driver lists the machine's GPUs."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that restricts the GPUs that a process sees."""


def visible_gpus(
    environment: Mapping[str, str] | None = None, driver: Path = DRIVER
) -> tuple[str, ...]:
    """Return the GPUs that a process sees, in CUDA's order, each as a driver number or UUID.

    ``environment`` contains the environment variables of the process; None for this process's. As
    in CUDA, the list ends at the first entry that does not exist, and no GPU is visible if the list
    names one twice.
    """
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

    All processes on a machine use the same name for a GPU, regardless of which GPUs they see. For
    numbered GPUs this requires that all GPUs are of the same model; otherwise the driver does not
    list them in CUDA's order. A UUID that the driver does not list, such as that of a MIG instance,
    is itself used as the name.
    """
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


def restrict_to_gpus(
    gpus: Sequence[int], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return environment variables with which a worker sees only the GPUs with these numbers, in
    this order.

    A number is an index among the GPUs that are visible in ``environment`` (None for this process's
    environment). Raises ValueError if there is no such GPU.
    """
    base = os.environ if environment is None else environment
    listed = _parse_visible(base)
    if listed is None:
        return {**base, VISIBLE: ",".join(map(str, gpus))}
    if missing := [gpu for gpu in gpus if gpu >= len(listed)]:
        raise ValueError(
            f"GPU {missing[0]}: {VISIBLE}={base[VISIBLE]!r} shows this process {len(listed)} GPUs "
            "only"
        )
    return {**base, VISIBLE: ",".join(listed[gpu] for gpu in gpus)}


def _parse_visible(environment: Mapping[str, str]) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``, or None if it is not set and all GPUs are
    visible."""
    text = environment.get(VISIBLE)
    return (
        None if text is None else [name.strip() for name in text.split(",")] if text.strip() else []
    )
