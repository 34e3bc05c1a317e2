"""Gives the workers of a run their GPUs, and estimates the memory that each takes beside what is free."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from realhf.api.config import AllocationConfig, ConfigError, ExperimentConfig
from realhf.api.experiment import ExperimentSpec, InterfaceType, ModelSpec
from realhf.api.parallel import SHARDED
from realhf.base.hf_config import ModelSize, activation_bytes, model_size, size_of, trainer_memory, weight_bytes
from realhf.base.host_resources import memory_left
from realhf.launch.checks import BUILTIN, BUILTIN_PATHS, TINY_VOCAB
from realhf.scheduler.gpus import VISIBLE, visible_gpus


def allocate(
    spec: ExperimentSpec,
    allocation: AllocationConfig,
    there: int | None = None,
    elsewhere: Callable[[str], bool] | None = None,
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
    spec: ExperimentSpec, allocation: AllocationConfig, there: int, elsewhere: Callable[[str], bool] | None
) -> dict[str, int]:
    everybody = [f"model_worker/{index}" for index in range(spec.n_model_workers)]
    everybody += [name for name in (spec.rollout.workers if spec.rollout else ()) if name.startswith("generation/")]
    here = [name for name in everybody if elsewhere is None or not elsewhere(name)]
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


def check_offload(spec: ExperimentSpec, there: int | None = None) -> None:
    """Raise ConfigError for a role with ``optimizer.offload`` that trains on the CPU, or whose backend cuts its moments
    over workers. ``there``: the number of GPUs (None: this process counts those that it sees)."""
    for model in spec.models.values():
        if not (model.trainable and model.optimizer is not None and model.optimizer.offload):
            continue
        option = f"{model.role}.optimizer.offload=true"
        device = str(model.backend_args.get("device", "auto"))
        gpus = len(visible_gpus()) if there is None else there
        if device.startswith("cpu") or (device == "auto" and not gpus):
            raise ConfigError(
                f"{option}: has no effect on the CPU, where {model.role} trains (experiment {spec.name}, {gpus} GPUs "
                "are visible here): moments are in the memory of the host already"
            )
        if model.backend == SHARDED:
            raise ConfigError(
                f"{option}: backend {SHARDED} cuts moments over workers and does not offload them; use torch or ddp"
            )


GIB = 2**30
PROGRAM_BYTES = GIB * 2 // 5
"""Python, torch and transformers themselves take about this much of the host's memory in each process."""
MICRO_BATCH_TOKENS = 4096
"""Tokens of a micro-batch where mb_spec.max_tokens_per_mb is not set."""
WAYS = (
    "lower mb_spec.max_tokens_per_mb, rollout.sessions or rollout.max_total_tokens, set "
    "actor.gradient_checkpointing=true, actor.lora.rank or ppo.kl_loss_coef=0 (no reference), or take a smaller model"
)
"""What makes a trainer take less memory."""
COLUMNS = ("weights", "gradients", "moments", "activations", "keys, values")


@dataclass(frozen=True)
class Need:
    """Bytes that a role takes in a process on its ``device`` (a GPU's number, or None for the host), by ``COLUMNS``;
    None: the size of its model at ``path`` is not known."""

    process: str
    role: str
    path: str
    device: int | None
    bytes: tuple[int, ...] | None

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.bytes or ())


def needs_of(spec: ExperimentSpec, config: ExperimentConfig, gpus: Mapping[str, int], there: int) -> list[Need]:
    """Return what each role takes in each process that computes. ``gpus`` are those of the workers; without one a
    worker computes on the first of the ``there`` GPUs that there are, or on the host."""
    found = []
    for model in spec.models.values():
        size = _size(model, config)
        on_gpu = there > 0 and not str(model.backend_args.get("device", "auto")).startswith("cpu")
        device = lambda name, on_gpu=on_gpu: gpus.get(name, 0) if on_gpu else None
        for index in model.workers:
            name = f"model_worker/{index}"
            own = None if size is None else _in_training(spec, model, size, config)
            found.append(Need(name, model.role, model.path, device(name), own))
        if spec.rollout is not None and spec.rollout.role == model.role:
            engines = [name for name in spec.rollout.workers if name.startswith("generation/")]
            episodes = spec.rollout.sessions * spec.rollout.options.n_rollout_workers / len(engines)
            for name in engines:
                own = None
                if size is not None:
                    kept = _key_value_bytes(model, size, config, episodes)
                    own = (weight_bytes(size, model.dtype), 0, 0, 0, kept)
                found.append(Need(name, model.role, model.path, device(name), own))
    return found


def memory_lines(needs: list[Need], free: Mapping[int | None, int]) -> Iterator[str]:
    """Yield the plan as text: a line for each process and role, and the sums beside the bytes that are ``free`` on each
    device (as ``free_bytes`` says them)."""
    if not needs:
        return
    yield "memory, estimated, GiB: " + "  ".join(COLUMNS)
    for need in needs:
        where = "host" if need.device is None else f"GPU {need.device}"
        label = f"  {need.process} {need.role} ({where})"
        if need.bytes is None:
            yield f"{label}: the size of {need.path} is not known, since it is not here yet"
        else:
            yield f"{label}: " + "  ".join(f"{every / GIB:.3g}" for every in need.bytes) + f"  = {need.total / GIB:.3g}"
    for device in sorted({need.device for need in needs}, key=str):
        where = "host" if device is None else f"GPU {device}"
        known = free.get(device)
        beside = f", {known / GIB:.2f} free" if known is not None else ""
        yield f"  {where}: {_sum(needs, device) / GIB:.2f} in all{beside}"


def shortages(needs: list[Need], free: Mapping[int | None, int]) -> Iterator[str]:
    """Yield a line for each device that has less free than the plan wants, with the options that change it."""
    for device in sorted({need.device for need in needs}, key=str):
        wanted, known = _sum(needs, device), free.get(device)
        if known is not None and wanted > known:
            where = "this machine" if device is None else f"GPU {device}"
            yield (
                f"{where} has {known / GIB:.1f} GiB free, and this run is estimated to take {wanted / GIB:.1f}: {WAYS}"
            )


def free_bytes(there: int) -> dict[int | None, int]:
    """Return the bytes that are free now: on the host (None), within the limit of this process's group, and on each of
    the ``there`` GPUs as far as their driver says it."""
    available, left = psutil.virtual_memory().available, memory_left()
    found: dict[int | None, int] = {None: available if left is None else min(available, left)}
    if there:
        query = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
        try:
            said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
            found |= {number: int(mib) * 2**20 for number, mib in enumerate(said[:there])}
        except (OSError, ValueError, subprocess.SubprocessError):
            pass
    return found


def _sum(needs: list[Need], device: int | None) -> int:
    here = [need for need in needs if need.device == device]
    programs = PROGRAM_BYTES * len({need.process for need in here}) if device is None else 0
    return sum(need.total for need in here) + programs


def _size(model: ModelSpec, config: ExperimentConfig) -> ModelSize | None:
    """The size of a role's model; what a warm start has yet to make is as large as the actor that it starts from."""
    found = model_size(model.path)
    if found is not None:
        return found
    if config.actor.path not in BUILTIN_PATHS:
        return model_size(config.actor.path)
    small = config.builtin
    return size_of(
        {
            "hidden_size": small.hidden_size,
            "num_hidden_layers": small.num_layers,
            "num_attention_heads": small.num_heads,
            "intermediate_size": small.intermediate_size,
            "vocab_size": small.vocab_size if config.actor.path == BUILTIN else TINY_VOCAB,
        }
    )


def _in_training(spec: ExperimentSpec, model: ModelSpec, size: ModelSize, config: ExperimentConfig) -> tuple[int, ...]:
    """What a model worker holds of a role: training, or weights alone, and the episodes that it samples itself."""
    tokens = max(config.mb_spec.max_tokens_per_mb or MICRO_BATCH_TOKENS, config.rollout.max_total_tokens)
    sampled = [mfc.interface_args for mfc in spec.mfcs if mfc.interface_type is InterfaceType.GENERATE]
    if spec.evaluation is not None:
        sampled.append(spec.evaluation.interface_args)
    plays = spec.rollout is None and sampled and model.role == "actor" and model.engine.name == "embedded"
    kept = _key_value_bytes(model, size, config, max(int(args.get("sessions", 1)) for args in sampled)) if plays else 0
    if not model.trainable:
        return (0 if model.base_of else weight_bytes(size, model.dtype), 0, 0, 0, kept)
    held = trainer_memory(
        size,
        model.dtype,
        lora_rank=model.lora.rank if model.lora is not None else 0,
        offload=model.optimizer is not None and model.optimizer.offload,
        parts=model.parallel.fsdp,
    )
    passes = activation_bytes(size, model.dtype, tokens, checkpointing=model.gradient_checkpointing)
    return (held.weights, held.gradients, held.moments, passes, kept)


def _key_value_bytes(model: ModelSpec, size: ModelSize, config: ExperimentConfig, episodes: float) -> int:
    """What the keys and values of so many full episodes take, within the bound that the options set."""
    most = int(episodes * config.rollout.max_total_tokens) * size.key_values * (4 if model.dtype == "float32" else 2)
    return most if model.engine.kv_cache_gib is None else min(most, int(model.engine.kv_cache_gib * GIB))
