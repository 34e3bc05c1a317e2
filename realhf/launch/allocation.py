"""Gives the workers of a run their GPUs, and refuses what the machine or the configuration has too few of."""

from __future__ import annotations

from pathlib import Path

from realhf.api.config import AllocationConfig, ConfigError
from realhf.api.experiment import ExperimentSpec

DRIVER = Path("/proc/driver/nvidia/gpus")
"""The driver has an entry here for each GPU of the machine."""


def allocate(spec: ExperimentSpec, allocation: AllocationConfig, driver: Path = DRIVER) -> dict[str, int]:
    """Return the GPU of each worker that computes, by its name; {} where none are named. Raises ConfigError with the
    numbers that are needed and available."""
    gpus = list(allocation.gpus)
    if not gpus:
        return {}
    models = [f"model_worker/{index}" for index in range(spec.n_model_workers)]
    players = [name for name in (spec.rollout.workers if spec.rollout else ()) if name.startswith("generation/")]
    needed = len(models) if allocation.share else len(models) + len(players)
    if len(gpus) < needed:
        further = "" if allocation.share or not players else f" and {len(players)} generation worker(s)"
        raise ConfigError(
            f"allocation.gpus={gpus}: {len(models)} model worker(s){further} need {needed} GPUs, {len(gpus)} are named"
            + ("; allocation.share=true puts generation beside training" if further else "")
        )
    there = len([*driver.glob("*")]) if driver.is_dir() else 0
    if missing := [gpu for gpu in gpus if gpu >= there]:
        raise ConfigError(f"allocation.gpus={gpus}: this machine has {there} GPUs, so no number {missing[0]}")
    given = dict(zip(models, gpus, strict=False))
    turns = gpus[: len(models)] if allocation.share else gpus[len(models) :]
    return given | {name: turns[number % len(turns)] for number, name in enumerate(players)}
