"""The trace of ``mode=check trace=true``: a step of the run's models and calls on a pretended GPU,
beside the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from realhf.api.config import ConfigError, ExperimentConfig, Mode
from realhf.api.experiment import ExperimentSpec, InterfaceType
from realhf.base.hf_config import MEMORY_PARTS, find_model_folder
from realhf.launch.allocation import GIB, MemoryNeed, sum_parts
from realhf.launch.checks import is_builtin
from realhf.scheduler.machine import KNOWN_GPUS, Gpu, Machine, plan_machine

if TYPE_CHECKING:
    from realhf.backends.pretended.step_trace import BatchShape, StepTrace

H100 = KNOWN_GPUS["H100"]
"""GPU whose properties stand in for those of a GPU that are not known."""
TRACED_MACHINE = "8xH100"
"""Machine for which a step is traced where no GPU is visible and no machine is named."""


def choose_machine(config: ExperimentConfig, machine: Machine) -> tuple[Machine, str]:
    """Return the machine for which a launch decides, and a note if it is not this one.

    A trace on a machine without a GPU is for one with GPUs. Raises ConfigError for a trace in
    another mode than check.
    """
    if not config.trace:
        return machine, ""
    if config.mode is not Mode.check:
        raise ConfigError(
            f"trace=true: only mode=check traces a step, not mode={config.mode.value}"
        )
    if machine.gpus:
        return machine, ""
    if machine.plan:
        raise ConfigError(
            f"machine={machine.plan}: has no GPU, and trace=true traces a step on one; name a "
            f"machine with GPUs, such as {TRACED_MACHINE}"
        )
    return plan_machine(TRACED_MACHINE), (
        f"trace=true: no GPU is visible here, so all this is checked as with "
        f"machine={TRACED_MACHINE}"
    )


def trace_lines(
    spec: ExperimentSpec, config: ExperimentConfig, machine: Machine, needs: Sequence[MemoryNeed]
) -> Iterator[str]:
    """Trace a step of each model worker on a GPU, and yield lines of text: the memory of each call
    by what holds it, that of the plan, and waits and kernels of a micro-batch. Workers with the
    same roles are traced once.

    Raises ConfigError for a model that cannot be traced.
    """
    traced: set[frozenset[str]] = set()
    for need in needs:
        roles = frozenset(
            role
            for role, model in spec.models.items()
            if need.process in {f"model_worker/{index}" for index in model.workers}
        )
        if need.device is None or not roles or roles in traced:
            continue
        traced.add(roles)
        own = [other for other in needs if other.process == need.process]
        gpu = machine.gpus[need.device]
        trace = _trace(spec, config, roles, gpu)
        yield f"trace: {need.process} on GPU {need.device}, {_describe_gpu(gpu)}, GiB"
        yield from _format(trace, own)


def check_trace(spec: ExperimentSpec, config: ExperimentConfig) -> None:
    """Raise ConfigError for a run that cannot be traced, or has nothing to trace."""
    if is_builtin(config.actor.path):
        raise ConfigError(
            f"trace=true: actor.path={config.actor.path} takes little memory and is not traced; "
            "name a pretrained model"
        )
    for model in spec.models.values():
        if model.path and find_model_folder(model.path) is None:
            raise ConfigError(
                f"trace=true: {model.role}.path={model.path} has no config.json here; name a "
                f"folder with it, or fetch it with `hf download {model.path} config.json`"
            )


def _trace(
    spec: ExperimentSpec, config: ExperimentConfig, roles: frozenset[str], gpu: Gpu
) -> StepTrace:
    """Trace the calls of a worker's roles."""
    from realhf.backends.pretended.device import GPUProperties
    from realhf.backends.pretended.step_trace import trace_step
    from realhf.backends.training.tokenizer_loading import ModelLoadError

    properties = GPUProperties(
        gpu.name or H100.name,
        gpu.total_bytes or H100.total_bytes or 0,
        *(gpu.capability or H100.capability or ()),
    )
    models = {role: model for role, model in spec.models.items() if role in roles}
    calls = [call for call in spec.mfcs if call.model_role in roles]
    try:
        published = spec.rollout.role if spec.rollout is not None else ""
        return trace_step(models, calls, _find_shape(spec, config), properties, published)
    except (ModelLoadError, ValueError) as error:
        raise ConfigError(f"trace=true: {error}") from None


def _find_shape(spec: ExperimentSpec, config: ExperimentConfig) -> BatchShape:
    """Return the shape of a step's batch: groups of the longest sequences, half of which is their
    prompt."""
    from realhf.backends.pretended.step_trace import BatchShape

    sampling: dict[str, Any] = next(
        (
            dict(call.interface_args)
            for call in spec.mfcs
            if call.interface_type is InterfaceType.GENERATE
        ),
        {},
    )
    total = config.rollout.max_total_tokens
    group = spec.rollout.episodes.group_size if spec.rollout else sampling.get("group_size", 1)
    embedded = spec.models["actor"].engine.name == "embedded" if "actor" in spec.models else False
    sessions = int(sampling.get("sessions", 0)) if embedded else 0
    return BatchShape(max(1, int(group)), total // 2, total, sessions)


def _describe_gpu(gpu: Gpu) -> str:
    return f"a pretended {gpu.name or H100.name}"


def _format(trace: StepTrace, needs: Sequence[MemoryNeed]) -> Iterator[str]:
    """Yield the lines of one worker."""
    plan = sum_parts(needs)
    rows = [(call.name, call.parts, call.peak_bytes) for call in trace.calls]
    rows.append(("plan", plan, sum(plan.values())))
    width = max(len(name) for name, _, _ in rows)
    head = "  ".join(f"{part:>{max(7, len(part))}}" for part in (*MEMORY_PARTS, "in all"))
    yield f"  {'':{width}}  {head}"
    for name, parts, total in rows:
        cells = [f"{parts.get(part, 0) / GIB:{max(7, len(part))}.2f}" for part in MEMORY_PARTS]
        yield f"  {name:{width}}  {'  '.join(cells)}  {total / GIB:7.2f}"
    peak = trace.peak
    share = sum(plan.values()) / peak.peak_bytes - 1
    yield f"  the plan is {100 * abs(share):.0f} % {'above' if share > 0 else 'below'} the peak"
    for call in trace.calls:
        products = f", {call.fp32_products} fp32 products" if call.fp32_products else ""
        yield (
            f"  {call.name}: {call.kernels} kernels and {call.syncs} waits for the GPU "
            f"in {call.work}{products}"
        )
    if trace.host_bytes:
        yield f"  host: {trace.host_bytes / GIB:.2f} of moments"
