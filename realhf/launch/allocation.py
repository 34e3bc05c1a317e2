"""Assignment of GPUs to the workers of a run, and an estimate of the memory that they need."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor

import psutil

from realhf.api.config import AllocationConfig, ConfigError, ExperimentConfig
from realhf.api.experiment import ExperimentSpec, InterfaceType, ModelSpec
from realhf.api.parallel import SHARDED
from realhf.base.engine_memory import SERVER_SHARE
from realhf.base.hf_config import (
    MEMORY_PARTS,
    ModelSize,
    estimate_size,
    gathered_bytes,
    model_size,
    scoring_memory,
    trainer_memory,
    training_memory,
    weight_bytes,
)
from realhf.base.host_resources import memory_left
from realhf.launch.checks import BUILTIN, BUILTIN_PATHS, TINY_VOCAB
from realhf.scheduler.gpus import VISIBLE
from realhf.scheduler.machine import Machine


def allocate(
    spec: ExperimentSpec,
    allocation: AllocationConfig,
    gpu_count: int,
    elsewhere: Callable[[str], bool] | None = None,
    plan: str = "",
) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each worker that computes, by worker name.

    A GPU's number is its index among the ``gpu_count`` GPUs that this process sees, or those of
    another machine, which the user has named ``plan``. Each worker gets one, but a worker that
    starts a server with tensor parallelism gets as many as the server needs. Workers for which
    ``elsewhere`` returns True are omitted, because their host assigns GPUs. If ``allocation.gpus``
    is empty, the workers are spread over all GPUs. In that case the result is empty, and workers
    see all GPUs, if there is at most one GPU, all roles compute on the CPU, or there are too few
    for a server of several GPUs beside a trainer of one. Raises ConfigError with the numbers of
    required and available GPUs.
    """
    count = _Count(gpu_count, plan)
    assigned = _assign(spec, allocation, count, elsewhere)
    for model in spec.models.values():
        parallel_size = model.engine.tensor_parallel_size
        if parallel_size > 1 and 0 < gpu_count < parallel_size and elsewhere is None:
            raise ConfigError(
                f"engine.tensor_parallel_size={parallel_size}: the server needs as many GPUs, "
                f"{count.describe()}"
            )
        if assigned and parallel_size > 1 and elsewhere is not None:
            raise ConfigError(
                f"engine.tensor_parallel_size={parallel_size}: each worker sees one GPU with a "
                f"scheduler of several hosts; start the server yourself and name it in "
                f"engine.vllm_url"
            )
    _check_servers(spec, assigned, gpu_count, elsewhere)
    return assigned


@dataclass(frozen=True)
class _Count:
    """The number of GPUs of a machine."""

    gpus: int
    """The number."""
    plan: str
    """How the user named another machine; "" for this one."""

    def describe(self, noun: str = "") -> str:
        """Return the number, followed by ``noun``, as a part of an error message."""
        if self.plan:
            return f"machine={self.plan} has {self.gpus}{noun}"
        return f"{self.gpus}{noun} are visible here (those of {VISIBLE}, or else of this machine)"


def _check_servers(
    spec: ExperimentSpec,
    assigned: Mapping[str, tuple[int, ...]],
    gpu_count: int,
    elsewhere: Callable[[str], bool] | None,
) -> None:
    """Raise ConfigError for several vLLM servers on one GPU whose shares are more than one alone
    takes: each has a context and captured graphs besides its share. By default a server takes
    nearly all, or half of what a trainer leaves. Whether a trainer fits beside them is a matter of
    the plan (``realhf.launch.engine_plan``)."""
    model = spec.models[spec.rollout.role] if spec.rollout is not None else None
    if (
        spec.rollout is None
        or model is None
        or model.engine.name != "vllm"
        or model.engine.vllm_url is not None
        or not gpu_count
    ):
        return
    on_gpu: dict[int, list[str]] = {}
    for name in spec.rollout.workers:
        if name.startswith("generation/") and (elsewhere is None or not elsewhere(name)):
            for gpu in assigned.get(name, (0,)):
                on_gpu.setdefault(gpu, []).append(name)
    share = model.engine.gpu_memory_utilization
    trained = {
        gpu
        for index in range(spec.n_model_workers)
        for gpu in assigned.get(f"model_worker/{index}", (0,))
    }
    for gpu, names in on_gpu.items():
        whole = SERVER_SHARE / 2 if gpu in trained else SERVER_SHARE
        if len(names) > 1 and (share is None or share * len(names) > SERVER_SHARE):
            raise ConfigError(
                f"async_rl.n_generation_workers={spec.rollout.options.n_generation_workers}: "
                f"{len(names)} vLLM servers would share GPU {gpu}, and "
                + (
                    "each takes what it finds free"
                    if share is None
                    else f"each takes {share:g} of its memory (engine.gpu_memory_utilization)"
                )
                + f"; start fewer, or give each at most engine.gpu_memory_utilization="
                f"{floor(100 * whole / len(names)) / 100:g}"
            )


def _assign(
    spec: ExperimentSpec,
    allocation: AllocationConfig,
    count: _Count,
    elsewhere: Callable[[str], bool] | None,
) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each worker as ``allocate`` does, of a known number of GPUs."""
    names = [f"model_worker/{index}" for index in range(spec.n_model_workers)]
    names += [
        name
        for name in (spec.rollout.workers if spec.rollout else ())
        if name.startswith("generation/")
    ]
    local = [name for name in names if elsewhere is None or not elsewhere(name)]
    models = [name for name in local if name.startswith("model_worker/")]
    generators = local[len(models) :]
    if not allocation.gpus:
        return _spread(spec, models, generators, count) if count.gpus else {}
    gpus = list(allocation.gpus)
    trained = sum(_count_gpus(spec, name) for name in models)
    served = sum(_count_gpus(spec, name) for name in generators)
    needed = trained if allocation.share else trained + served
    if len(gpus) < needed:
        further = "" if allocation.share or not generators else _describe_generators(spec, names)
        raise ConfigError(
            f"allocation.gpus={gpus}: {len(models)} model worker(s){further} need {needed} GPUs, "
            f"{len(gpus)} are named"
            + ("; allocation.share=true runs generation on the GPUs of training" if further else "")
        )
    if missing := [gpu for gpu in gpus if gpu >= count.gpus]:
        raise ConfigError(
            f"allocation.gpus={gpus}: {count.describe(' GPUs')}, so there is no number {missing[0]}"
        )
    share = allocation.share and bool(models)
    remaining = gpus[:trained] if share else gpus[trained:]
    for name in generators:
        if _count_gpus(spec, name) > len(remaining):
            raise ConfigError(
                f"engine.tensor_parallel_size={_count_gpus(spec, name)}: the server needs as many "
                f"GPUs, and allocation.share=true leaves it the {len(remaining)} of training"
            )
    return _deal(spec, models, gpus) | _deal(spec, generators, remaining)


def _count_gpus(spec: ExperimentSpec, name: str) -> int:
    """Return the number of GPUs that a worker needs: those of the server that it starts, else
    one."""
    if name.startswith("generation/"):
        return spec.models[spec.rollout.role].engine.tensor_parallel_size if spec.rollout else 1
    if spec.rollout is not None:
        return 1
    index = int(name.partition("/")[2])
    engines = [model.engine for model in spec.models.values() if index in model.workers]
    return max((engine.tensor_parallel_size for engine in engines), default=1)


def _describe_generators(spec: ExperimentSpec, names: list[str]) -> str:
    """Return the part of an error message that counts the generation workers."""
    generators = [name for name in names if name.startswith("generation/")]
    size = _count_gpus(spec, generators[0])
    each = f" (of {size} GPUs each, engine.tensor_parallel_size)" if size > 1 else ""
    return f" and {len(generators)} generation worker(s){each}"


def _deal(
    spec: ExperimentSpec, names: list[str], gpus: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Deal GPUs out to workers, as many as each needs, beginning again after the last one."""
    dealt: dict[str, tuple[int, ...]] = {}
    at = 0
    for name in names:
        count = _count_gpus(spec, name)
        dealt[name] = tuple(gpus[number % len(gpus)] for number in range(at, at + count))
        at += count
    return dealt


def _spread(
    spec: ExperimentSpec, models: list[str], generators: list[str], count: _Count
) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each worker if ``allocation.gpus`` is empty: GPUs are assigned
    round-robin, to model workers first.

    Generation workers do not share GPUs with model workers if there are enough GPUs. Workers that
    train a role together must have different GPUs, because NCCL rejects two ranks on one GPU.
    Raises ConfigError.
    """
    on_gpus = [
        model
        for model in spec.models.values()
        if not str(model.backend_args.get("device", "auto")).startswith("cpu")
    ]
    parallel = [model for model in on_gpus if model.parallel.size > 1]
    gpu_count = count.gpus
    if not on_gpus or not models:
        return {}
    trained = sum(_count_gpus(spec, name) for name in models)
    needed = trained + sum(_count_gpus(spec, name) for name in generators)
    if parallel and gpu_count < needed:
        further = _describe_generators(spec, generators) if generators else ""
        advice = (
            "; allocation.gpus with allocation.share=true runs generation on the GPUs of training"
            if further
            else ""
        )
        raise ConfigError(
            f"allocation.gpus=[]: {parallel[0].role} trains on {parallel[0].parallel.size} "
            f"workers, each with a GPU of "
            f"its own; {len(models)} model worker(s){further} need {needed} GPUs, "
            f"{count.describe()}{advice}; an empty {VISIBLE} in the environment of the launcher "
            f"keeps the run on the CPU"
        )
    tensor_parallel = any(model.engine.tensor_parallel_size > 1 for model in spec.models.values())
    if not parallel and (gpu_count == 1 or (tensor_parallel and gpu_count < needed)):
        return {}
    if not parallel and tensor_parallel and not generators and len(models) == 1:
        return {}
    remaining = range(trained, gpu_count) if trained < gpu_count else range(gpu_count)
    return _deal(spec, models, range(gpu_count)) | _deal(spec, generators, remaining)


def check_offload(spec: ExperimentSpec, gpu_count: int) -> None:
    """Raise ConfigError for a role with ``optimizer.offload`` that trains on the CPU, or whose
    backend shards the moments. ``gpu_count`` is the number of GPUs that this process sees."""
    for model in spec.models.values():
        if not (model.trainable and model.optimizer is not None and model.optimizer.offload):
            continue
        option = f"{model.role}.optimizer.offload=true"
        device = str(model.backend_args.get("device", "auto"))
        if device.startswith("cpu") or (device == "auto" and not gpu_count):
            raise ConfigError(
                f"{option}: has no effect on the CPU, where {model.role} trains (experiment "
                f"{spec.name}, {gpu_count} GPUs "
                "are visible here): moments are in the memory of the host already"
            )
        if model.backend == SHARDED:
            raise ConfigError(
                f"{option}: backend {SHARDED} cuts moments over workers and does not offload them; "
                f"use torch or ddp"
            )


GIB = 2**30
"""Number of bytes in a GiB."""
PROGRAM_BYTES = GIB * 2 // 5
"""Approximate host memory in bytes that Python, torch and transformers need in each process."""
MICRO_BATCH_TOKENS = 4096
"""Tokens per micro-batch if mb_spec.max_tokens_per_mb is not set."""
MEMORY_ADVICE = (
    "lower mb_spec.max_tokens_per_mb, rollout.sessions or rollout.max_total_tokens, set "
    "actor.gradient_checkpointing=true, actor.lora.rank or ppo.kl_loss_coef=0 (no reference), or "
    "take a smaller model"
)
"""Advice that names the options which reduce a trainer's memory."""


COPY = "copy"
"""Part of the memory that holds whole weights apart from those that train: with adapters added, or
gathered from all shards. It is there while a policy samples, is published or exported."""
KEY_VALUES = "keys, values"
"""Part of the memory that generation holds; it is freed before other calls."""
_KEPT = ("weights", "masters", "moments")
"""Parts of the memory that a process holds between calls."""
_IN_CALLS = (("gradients", "activations", "logits", "unsharded"), (COPY, KEY_VALUES))
"""Parts of the memory that one call holds: one that trains or scores, and one that samples."""
_IN_SERVER = (("activations", KEY_VALUES),)
"""Parts of the memory that a server holds besides its weights."""


_PUBLISHED_VERSIONS = 3
"""Number of versions of the weights in host memory: two that are kept, and one that is written."""


@dataclass(frozen=True)
class MemoryNeed:
    """Estimated memory of one role in one process."""

    process: str
    """Name of the worker process."""
    role: str
    """Name of the role."""
    path: str
    """Path of the role's model."""
    device: int | None
    """Index of the GPU; None for host memory."""
    bytes: Mapping[str, int] | None
    """Bytes for each of ``MEMORY_PARTS``, 0 for those that are missing; None if the model's size is
    not known."""
    is_server: bool = False
    """Whether the process is a vLLM server, which reserves its keys and values when it starts."""

    @property
    def total(self) -> int:
        """Largest sum of parts that are there at the same time, in bytes; 0 if the model's size is
        not known."""
        return sum(sum_parts([self]).values())


def estimate_needs(
    spec: ExperimentSpec,
    config: ExperimentConfig,
    gpus: Mapping[str, int],
    gpu_count: int,
    gpu_bytes: int = 80 * GIB,
) -> list[MemoryNeed]:
    """Return the estimated memory of each role in each process that computes, and what they keep in
    host memory.

    ``gpus`` maps workers to GPUs; a worker without an entry computes on GPU 0 if ``gpu_count`` is
    positive, else on the host. ``gpu_bytes`` is the memory of a GPU."""
    needs = []
    for model in spec.models.values():
        size = find_model_size(model, config)
        on_gpu = gpu_count > 0 and not str(model.backend_args.get("device", "auto")).startswith(
            "cpu"
        )
        device = lambda name, on_gpu=on_gpu: gpus.get(name, 0) if on_gpu else None
        for index in model.workers:
            name = f"model_worker/{index}"
            parts = None
            if size is not None:
                memory = gpu_bytes if on_gpu else 0
                parts = _model_worker_bytes(spec, model, size, config, memory, index)
            needs.append(MemoryNeed(name, model.role, model.path, device(name), parts))
            if size is not None:
                needs += _estimate_host_needs(spec, model, size, index)
        # A running server has a GPU that nobody here knows of.
        starts = model.engine.name != "vllm" or model.engine.vllm_url is None
        if spec.rollout is not None and spec.rollout.role == model.role and starts:
            engines = [name for name in spec.rollout.workers if name.startswith("generation/")]
            episodes = spec.rollout.sessions * spec.rollout.options.n_rollout_workers / len(engines)
            for name in engines:
                parts = None
                if size is not None:
                    kv_cache = key_value_bytes(model, size, config, episodes)
                    parts = {"weights": weight_bytes(size, model.dtype), KEY_VALUES: kv_cache}
                needs.append(MemoryNeed(name, model.role, model.path, device(name), parts))
    return needs


def format_estimate(needs: list[MemoryNeed], free: Mapping[int | None, int]) -> Iterator[str]:
    """Yield the estimate as lines of text: one for each process and role, then one for each device
    with the sum and its free memory (``free``, from ``free_bytes``)."""
    if not needs:
        return
    yield "memory, estimated, GiB: " + "  ".join(MEMORY_PARTS)
    for need in needs:
        where = "host" if need.device is None else f"GPU {need.device}"
        label = f"  {need.process} {need.role} ({where})"
        if need.bytes is None:
            is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", need.path)
            hint = f" (`hf download {need.path} config.json`)" if is_hub_id else ""
            yield f"{label}: the size of {need.path} is not known, since it is not here yet{hint}"
        else:
            yield (
                f"{label}: "
                + "  ".join(f"{need.bytes.get(part, 0) / GIB:.3g}" for part in MEMORY_PARTS)
                + f"  = {need.total / GIB:.3g}"
            )
    for device in sorted({need.device for need in needs}, key=str):
        where = "host" if device is None else f"GPU {device}"
        available = free.get(device)
        remark = f", {available / GIB:.2f} free" if available is not None else ""
        unknown = any(need.device == device and need.bytes is None for need in needs)
        least = "at least " if unknown else ""
        yield f"  {where}: {least}{sum_device(needs, device) / GIB:.2f} in all{remark}"


def find_shortages(needs: list[MemoryNeed], free: Mapping[int | None, int]) -> Iterator[str]:
    """Yield a warning if the host, or a GPU, has less free memory than estimated, with the options
    that reduce it. GPUs that lack more than the estimate may be wrong by are refused elsewhere
    (``realhf.launch.gpu_shortages``)."""
    for device in sorted({need.device for need in needs}, key=str):
        needed = sum_device(needs, device)
        available = free.get(device)
        if available is not None and needed > available:
            where = "this machine" if device is None else f"GPU {device}"
            yield (
                f"{where} has {available / GIB:.1f} GiB free, and this run is estimated to take "
                f"{needed / GIB:.1f}: "
                f"{MEMORY_ADVICE}"
            )


def free_bytes(machine: Machine) -> dict[int | None, int]:
    """Return the free bytes of each device: of the host under the key None, within the limit of
    this process's control group, and of each of the machine's GPUs under its index, where they are
    known. Those of another machine's host are not."""
    if machine.plan:
        return {**machine.free_bytes()}
    available = psutil.virtual_memory().available
    left = memory_left()
    return {None: available if left is None else min(available, left), **machine.free_bytes()}


def sum_device(needs: Sequence[MemoryNeed], device: int | None) -> int:
    """Return the estimated bytes on a device. On the host they include ``PROGRAM_BYTES`` for each
    process."""
    there = group_processes(needs, device)
    computing = [process for process in there if " " not in process]
    programs = PROGRAM_BYTES * len(computing) if device is None else 0
    return sum(sum(sum_parts(each).values()) for each in there.values()) + programs


def group_processes(needs: Sequence[MemoryNeed], device: int | None) -> dict[str, list[MemoryNeed]]:
    """Return the needs on a device by process."""
    by_process: dict[str, list[MemoryNeed]] = {}
    for need in needs:
        if need.device == device:
            by_process.setdefault(need.process, []).append(need)
    return by_process


def sum_parts(needs: Sequence[MemoryNeed]) -> dict[str, int]:
    """Return the estimated peak of one process by part."""
    sums: dict[str, int] = dict.fromkeys(MEMORY_PARTS, 0)
    for _, part, size in find_peak(needs):
        sums[part] += size
    return sums


def find_peak(needs: Sequence[MemoryNeed]) -> Iterator[tuple[MemoryNeed, str, int]]:
    """Yield the parts that one process holds at its peak, each with its need and its bytes. The
    roles of a process compute in turn: what only a call holds is there for the largest call."""
    known = [(need, need.bytes) for need in needs if need.bytes is not None]
    calls = [
        [(need, part, parts.get(part, 0)) for part in group]
        for need, parts in known
        for group in (_IN_SERVER if need.is_server else _IN_CALLS)
    ]
    yield from max(calls, key=lambda call: sum(size for _, _, size in call), default=[])
    for need, parts in known:
        yield from ((need, part, parts.get(part, 0)) for part in _KEPT)


def _estimate_host_needs(
    spec: ExperimentSpec, model: ModelSpec, size: ModelSize, index: int
) -> Iterator[MemoryNeed]:
    """Yield what a model worker keeps of a role in host memory: offloaded moments, and the versions
    of the weights that generation workers may fetch from it."""
    if model.trainable and model.optimizer is not None and model.optimizer.offload:
        trained = size.adapters(model.lora.rank) if model.lora is not None else size.parameters
        parts = {"moments": 8 * trained}
        yield MemoryNeed(f"moments of model_worker/{index}", model.role, model.path, None, parts)
    rollout = spec.rollout
    publishes = rollout is not None and rollout.role == model.role and index == model.workers[0]
    if rollout is not None and publishes and rollout.options.weights in ("shm", "fetch"):
        parts = {"weights": _PUBLISHED_VERSIONS * weight_bytes(size, model.dtype)}
        yield MemoryNeed(f"published by model_worker/{index}", model.role, model.path, None, parts)


def find_model_size(model: ModelSpec, config: ExperimentConfig) -> ModelSize | None:
    """Return the size of a role's model, or None if it is not known. A model that a warm start has
    not created yet is taken to be as large as the actor."""
    size = model_size(model.path)
    if size is not None:
        return size
    if config.actor.path not in BUILTIN_PATHS:
        return model_size(config.actor.path)
    small = config.builtin
    return estimate_size(
        {
            "hidden_size": small.hidden_size,
            "num_hidden_layers": small.num_layers,
            "num_attention_heads": small.num_heads,
            "intermediate_size": small.intermediate_size,
            "vocab_size": small.vocab_size if config.actor.path == BUILTIN else TINY_VOCAB,
        }
    )


def sampled_sessions(spec: ExperimentSpec) -> int:
    """Return the largest number of episodes that the calls and evaluations of an experiment sample
    at once; 0 if they sample none."""
    arguments = [
        mfc.interface_args for mfc in spec.mfcs if mfc.interface_type is InterfaceType.GENERATE
    ]
    if spec.evaluation is not None and spec.evaluation.generates:
        arguments.append(spec.evaluation.interface_args)
    return max((int(each.get("sessions", 1)) for each in arguments), default=0)


def _model_worker_bytes(
    spec: ExperimentSpec,
    model: ModelSpec,
    size: ModelSize,
    config: ExperimentConfig,
    gpu_bytes: int,
    index: int,
) -> dict[str, int]:
    """Return the bytes of each part of the memory of a role in model worker ``index``: its training
    state, or only weights and a scoring pass if it is not trained, and the KV cache of the episodes
    that the worker samples itself. ``gpu_bytes`` is the memory of its GPU, 0 on the host."""
    tokens = max(
        config.mb_spec.max_tokens_per_mb or MICRO_BATCH_TOKENS, config.rollout.max_total_tokens
    )
    sessions = sampled_sessions(spec)
    samples = (
        spec.rollout is None
        and sessions > 0
        and model.role == "actor"
        and model.engine.name == "embedded"
    )
    kv_cache = 0
    if samples:
        kv_cache = key_value_bytes(model, size, config, sessions)
    if not model.trainable:
        parts = model.parallel.fsdp
        weights = 0 if model.base_of else weight_bytes(size, model.dtype) // parts
        scoring = scoring_memory(
            size, model.dtype, tokens, gpu_bytes, parts, predicts_tokens=model.head == "lm"
        )
        return {
            "weights": weights,
            "activations": scoring.activations,
            "logits": scoring.logits,
            "unsharded": scoring.unsharded,
            KEY_VALUES: kv_cache,
        }
    rank = model.lora.rank if model.lora is not None else 0
    training = trainer_memory(
        size,
        model.dtype,
        lora_rank=rank,
        offload=model.optimizer is not None and model.optimizer.offload,
        parts=model.parallel.fsdp,
    )
    passes = training_memory(
        size,
        model.dtype,
        tokens,
        checkpointing=model.gradient_checkpointing,
        lora_rank=rank,
        gpu_bytes=gpu_bytes,
        predicts_tokens=model.head == "lm",
        parts=model.parallel.fsdp,
    )
    publishes = spec.rollout is not None and spec.rollout.role == model.role
    return {
        "weights": training.weights,
        "masters": training.masters,
        "gradients": training.gradients,
        "moments": training.moments,
        "activations": passes.activations,
        "logits": passes.logits,
        "unsharded": passes.unsharded,
        COPY: _copy_bytes(model, size, samples, publishes, index == model.workers[0]),
        KEY_VALUES: kv_cache,
    }


def _copy_bytes(
    model: ModelSpec, size: ModelSize, samples: bool, publishes: bool, first: bool
) -> int:
    """Return the bytes of the whole weights that a trainer has apart from those that it trains. The
    ``first`` worker of a sharded one gathers them to publish and export them, all of them do to
    sample."""
    if model.parallel.fsdp > 1 and (samples or first):
        return gathered_bytes(size, model.dtype)
    if model.lora is not None and (samples or publishes):
        return (4 if model.dtype == "float32" else 2) * sum(map(math.prod, size.matrices))
    return 0


def key_value_bytes(
    model: ModelSpec, size: ModelSize, config: ExperimentConfig, episodes: float
) -> int:
    """Return the size in bytes of the KV cache for ``episodes`` episodes of maximum length, limited
    by ``engine.kv_cache_gib``."""
    full = (
        int(episodes * config.rollout.max_total_tokens)
        * size.key_values
        * (4 if model.dtype == "float32" else 2)
    )
    return (
        full
        if model.engine.kv_cache_gib is None
        else min(full, int(model.engine.kv_cache_gib * GIB))
    )
