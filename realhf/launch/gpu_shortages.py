"""What does not fit into the GPUs' memory, with the options that change it most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from realhf.api.config import ExperimentConfig
from realhf.api.experiment import ExperimentSpec, ModelSpec
from realhf.api.parallel import SHARDED
from realhf.launch.allocation import (
    GIB,
    KEY_VALUES,
    MemoryNeed,
    find_peak,
    group_processes,
    sum_device,
)
from realhf.launch.engine_plan import is_engine

_ERROR = 0.05
"""Relative error of the estimate, within which a run may still fit."""
_MOST_OPTIONS = 5
"""Largest number of options that a message names."""


def find_gpu_shortages(
    needs: Sequence[MemoryNeed],
    free: Mapping[int | None, int],
    spec: ExperimentSpec,
    config: ExperimentConfig,
) -> Iterator[str]:
    """Yield an error for each GPU with clearly less free memory than estimated: what takes most of
    it, and the options that lower it, the most effective first."""
    for device in sorted({need.device for need in needs if need.device is not None}):
        needed = sum_device(needs, device)
        available = free.get(device)
        if available is None or needed <= available * (1 + _ERROR):
            continue
        there = group_processes(needs, device)
        parts = sorted(
            (entry for each in there.values() for entry in find_peak(each) if entry[2]),
            key=lambda entry: -entry[2],
        )
        of, largest, size = parts[0]
        options = dict.fromkeys(
            option
            for need, part, _ in parts
            for option in (
                _advise_engine(need, part, [*there], spec)
                if is_engine(need) or part == KEY_VALUES
                else _advise(need, part, spec, config)
            )
        )
        named = list(options)[:_MOST_OPTIONS]
        yield (
            f"GPU {device} has {available / GIB:.1f} GiB free, and this run is estimated to take "
            f"{needed / GIB:.1f}, most of it for {largest} of {of.role} ({size / GIB:.3g}): "
            f"{'; or '.join([*named, 'take a smaller model'])}"
        )


def _advise_engine(
    need: MemoryNeed, part: str, there: Sequence[str], spec: ExperimentSpec
) -> Iterator[str]:
    """Yield the options that lower a part of what an engine takes. ``there``: the processes on its
    GPU."""
    engine = spec.models[need.role].engine
    generating = [process for process in there if process.startswith("generation/")]
    if part == KEY_VALUES and need.is_server:
        verb = "set" if engine.gpu_memory_utilization is None else "lower"
        taken = f"vLLM takes {need.total / GIB:.3g} GiB"
        yield f"{verb} engine.gpu_memory_utilization ({taken})"
    elif part == KEY_VALUES:
        yield f"{'set' if engine.kv_cache_gib is None else 'lower'} engine.kv_cache_gib"
    if need.process in generating and part in (KEY_VALUES, "weights"):
        if len(generating) > 1:
            yield "start fewer generation workers (async_rl.n_generation_workers)"
        if len(generating) < len(there):
            yield "generate on a GPU without a trainer (allocation.gpus)"
    if part == KEY_VALUES and not need.is_server:
        yield "lower rollout.max_total_tokens"


def _advise(
    need: MemoryNeed, part: str, spec: ExperimentSpec, config: ExperimentConfig
) -> Iterator[str]:
    """Yield the options that lower a part of a need, as far as they are not set."""
    model = spec.models[need.role]
    role = model.role
    if part in ("activations", "logits"):
        if part == "activations" and model.trainable and not model.gradient_checkpointing:
            yield f"set {role}.gradient_checkpointing=true"
        tokens = config.mb_spec.max_tokens_per_mb
        if tokens is None or tokens > config.rollout.max_total_tokens:
            yield f"lower mb_spec.max_tokens_per_mb (to {config.rollout.max_total_tokens} or more)"
        else:
            yield "lower rollout.max_total_tokens"
    elif part in ("weights", "masters", "gradients", "moments") and model.trainable:
        yield from _advise_trainer(model)
    elif part == "weights" and role == "ref":
        yield "set ppo.kl_loss_coef=0 (no reference) or give it another worker (ref.workers)"


def _advise_trainer(model: ModelSpec) -> Iterator[str]:
    """Yield the options that lower what a trainer keeps."""
    role = model.role
    if model.lora is None and model.backend == SHARDED:
        yield f"divide it over more workers ({role}.workers)"
        yield f"train adapters ({role}.lora.rank, {role}.backend=ddp)"
    elif model.lora is None:
        yield f"train adapters ({role}.lora.rank)"
        yield f"divide it over several workers ({role}.backend=fsdp2 {role}.workers=[0,1])"
    offloads = model.optimizer is not None and model.optimizer.offload
    if model.backend != SHARDED and not offloads:
        yield f"set {role}.optimizer.offload=true"
