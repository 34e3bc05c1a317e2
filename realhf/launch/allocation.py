"""Gives the workers of a run their GPUs, and refuses what the machine or the configuration has too few of."""

from __future__ import annotations

from collections.abc import Callable

from realhf.api.config import AllocationConfig, ConfigError
from realhf.api.experiment import ExperimentSpec
from realhf.scheduler.gpus import VISIBLE, visible_gpus


def nowhere_else(name: str) -> bool:
    """Say of every worker that it runs on this machine."""
    del name
    return False


def allocate(
    spec: ExperimentSpec,
    allocation: AllocationConfig,
    there: int | None = None,
    elsewhere: Callable[[str], bool] = nowhere_else,
) -> dict[str, int]:
    """Return the GPU of each worker that computes, by its name, as a number among the ``there`` GPUs that this process
    sees (None: it counts them). Workers that are ``elsewhere`` get theirs from their own host. With none named, the
    workers are dealt out over those that are there; {} where there is one at most, where all roles compute on the CPU,
    and where a server of generation spreads over several. Raises ConfigError with the numbers that are needed and
    available."""
    there = len(visible_gpus()) if there is None else there
    given = _given(spec, allocation, there, elsewhere)
    for model in spec.models.values():
        wanted = model.engine.tensor_parallel_size
        if given and wanted > 1:
            raise ConfigError(
                f"engine.tensor_parallel_size={wanted}: each worker sees one GPU here, with allocation.gpus or a role "
                "on several workers; start the server yourself and name it in engine.vllm_url"
            )
    return given


def _given(
    spec: ExperimentSpec, allocation: AllocationConfig, there: int, elsewhere: Callable[[str], bool]
) -> dict[str, int]:
    everybody = [f"model_worker/{index}" for index in range(spec.n_model_workers)]
    everybody += [name for name in (spec.rollout.workers if spec.rollout else ()) if name.startswith("generation/")]
    here = [name for name in everybody if not elsewhere(name)]
    models = [name for name in here if name.startswith("model_worker/")]
    players = here[len(models) :]
    if not allocation.gpus:
        return _dealt_out(spec, models, players, there) if there else {}
    gpus = list(allocation.gpus)
    needed = len(models) if allocation.share else len(models) + len(players)
    if len(gpus) < needed:
        further = "" if allocation.share or not players else f" and {len(players)} generation worker(s)"
        raise ConfigError(
            f"allocation.gpus={gpus}: {len(models)} model worker(s){further} need {needed} GPUs, {len(gpus)} are named"
            + ("; allocation.share=true puts generation beside training" if further else "")
        )
    if missing := [gpu for gpu in gpus if gpu >= there]:
        raise ConfigError(
            f"allocation.gpus={gpus}: {there} GPUs are visible here (those of {VISIBLE}, or else of this machine), so "
            f"there is no number {missing[0]}"
        )
    given = dict(zip(models, gpus, strict=False))
    turns = gpus[: len(models)] if allocation.share and models else gpus[len(models) :]
    return given | {name: turns[number % len(turns)] for number, name in enumerate(players)}


def _dealt_out(spec: ExperimentSpec, models: list[str], players: list[str], there: int) -> dict[str, int]:
    """Return the GPUs of workers when none are named: one for each as long as there are some, model workers first.
    Generation stays away from trainers where it can. Workers of a role that train together need different ones, since
    NCCL refuses two ranks on one GPU. Raises ConfigError."""
    on_gpus = [
        model for model in spec.models.values() if not str(model.backend_args.get("device", "auto")).startswith("cpu")
    ]
    together = [model for model in on_gpus if model.parallel.size > 1]
    if not on_gpus or not models:
        return {}
    workers = [*models, *players]
    if together and there < len(workers):
        further = f" and {len(players)} generation worker(s)" if players else ""
        beside = "; allocation.gpus with allocation.share=true puts generation beside training" if further else ""
        raise ConfigError(
            f"allocation.gpus=[]: {together[0].role} trains on {together[0].parallel.size} workers, each with a GPU of "
            f"its own; {len(models)} model worker(s){further} need {len(workers)} GPUs, {there} are visible here"
            f"{beside}; an empty {VISIBLE} in the environment of the launcher keeps the run on the CPU"
        )
    spread = any(model.engine.tensor_parallel_size > 1 for model in spec.models.values())
    if not together and (there == 1 or spread):
        return {}
    given = {name: number % there for number, name in enumerate(models)}
    turns = range(len(models), there) if len(models) < there else range(there)
    return given | {name: turns[number % len(turns)] for number, name in enumerate(players)}
