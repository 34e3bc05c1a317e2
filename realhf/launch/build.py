"""Construction of an experiment from a configuration: calls ``build``, infers the graph, and
rejects options without effect.

``build`` gets a *watched* configuration, which records the options that are read. An option that
was set but never read has no effect and is reported as an error. A choice such as ``model=`` sets
options for many experiments, so it is enough if one of them is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from realhf.api.config import ConfigError, ExperimentConfig, Mode
from realhf.api.experiment import ExperimentSpec, InterfaceType, ModelSpec, RunPlan, artifact_exists
from realhf.api.graph import DataFlowGraph, GraphError, build_graph
from realhf.api.option import walk
from realhf.base.dataclass_json import from_json_value, to_json_value
from realhf.base.hf_config import find_model_folder, is_counted
from realhf.launch.allocation import (
    GIB,
    MemoryNeed,
    allocate,
    check_offload,
    estimate_needs,
    find_shortages,
    format_estimate,
    free_bytes,
    sum_device,
)
from realhf.launch.checks import BUILTIN_PATHS, is_builtin
from realhf.launch.compose import ComposedConfig
from realhf.launch.engine_plan import plan_engines
from realhf.launch.gpu_shortages import find_gpu_shortages
from realhf.launch.plugins import (
    ExperimentFile,
    describe_user_error,
    load_scheduler,
    read_scheduler_options,
)
from realhf.launch.step_trace import check_trace, trace_lines
from realhf.launch.vllm_choice import find_executable
from realhf.launch.weights_choice import check_medium, describe_medium
from realhf.scheduler.machine import NO_GPUS, Machine

LARGE_RATE = 5e-5
"""Learning rate of reinforcement learning above which a warning is shown if all weights of a
pretrained model are trained. 1e-6 is usual; 5e-5 worked for a model with 135 million parameters."""
LARGE_SUPERVISED_RATE = 5e-4
"""Learning rate of supervised learning above which a warning is shown. 1e-5 is usual; 4e-4 worked
for a model with 135 million parameters."""
LORA_FACTOR = 20
"""Factor by which both limits are higher with LoRA, where learning rates are usually about ten
times as large."""


@dataclass(frozen=True)
class BuiltExperiment:
    """An experiment that was built and checked and can run."""

    config: ExperimentConfig
    """Configuration from which the experiment was built."""
    plugin: str
    """Module or file that every process of the run imports."""
    spec: ExperimentSpec
    """Specification: models, calls and data source."""
    graph: DataFlowGraph
    """Dataflow graph of the calls."""
    effective: tuple[str, ...] = ()
    """Names of the options that have an effect in this experiment."""
    machine: Machine = NO_GPUS
    """The machine on which the experiment was checked."""

    def plan(self, spec: ExperimentSpec, started_at: float) -> RunPlan:
        """Return the run plan for the workers of ``spec``, which is this experiment or one that
        runs before it.

        ``started_at`` is the time of the launch in seconds since the epoch.
        """
        config = self.config
        return RunPlan(
            spec=spec,
            rpc=config.rpc,
            monitor=config.monitor,
            exp_ctrl=config.exp_ctrl,
            recover_mode=config.recover_mode,
            torch_threads=config.torch_threads,
            started_at=started_at,
            plugins=(self.plugin,),
            gpus=_assign_gpus(spec, config, self.machine),
            network=config.network,
        )


def build_experiment(composed: ComposedConfig) -> BuiltExperiment:
    """Build and check an experiment. Raises ConfigError for a mistake in the experiment or its
    graph, and for options without effect."""
    config = composed.config
    watched_config, reads = watch_reads(config)
    spec = _call_build(composed.file, watched_config)
    # The specification may contain watched sections. Its JSON form, which the workers read, does
    # not.
    plain = to_json_value(spec)
    check_effects(composed, reads)
    _check_environment(composed, plain)
    all_specs = (*spec.before, spec)
    for every in all_specs:
        _check_workers(every)
        check_offload(every, len(composed.machine.gpus))
        _assign_gpus(every, config, composed.machine)
        _check_heads(every)
        _check_served_actor(every)
    _check_hosts(config, all_specs)
    if config.trace:
        check_trace(spec, config)
    if config.exp_ctrl.keep_best and (spec.evaluation is None or not spec.evaluation.generates):
        raise ConfigError(
            f"exp_ctrl.keep_best=true: experiment {spec.name} has no held-out evaluation, so it "
            "cannot tell which policy is the best"
        )
    *_, graph = [build_spec_graph(every) for every in all_specs]
    final = from_json_value(ExperimentSpec, plain)
    check_medium(
        final,
        _assign_gpus(spec, config, composed.machine),
        gpu_count=len(composed.machine.gpus),
        several_hosts=load_scheduler(config.scheduler.path).several_hosts,
    )
    return BuiltExperiment(
        config,
        composed.file.plugin,
        final,
        graph,
        effective_options(config, reads),
        composed.machine,
    )


def build_spec_graph(spec: ExperimentSpec) -> DataFlowGraph:
    """Build the dataflow graph of an experiment. Raises ConfigError that lists all problems of the
    graph."""
    try:
        return build_graph(spec.mfcs, spec.source.keys, spec.log_keys, roles=spec.models.keys())
    except GraphError as error:
        raise ConfigError(f"experiment {spec.name}: {error}") from None


def print_graph(built: BuiltExperiment) -> int:
    """Print the dataflow graph as text and as a Mermaid diagram. Return the exit code 0."""
    print(built.graph.summary())
    print()
    print(built.graph.to_mermaid())
    for warning in built.graph.warnings:
        print(f"warning: {warning}")
    return 0


def print_check(built: BuiltExperiment, arguments: Sequence[str] = ()) -> int:
    """Print a summary of the run and of the experiments that run before it. If the scheduler uses a
    batch script, also print the script for a launch with these arguments. Return the exit code
    0."""
    spec = built.spec
    print(
        f"{spec.name}: {len(spec.mfcs)} calls on {spec.n_model_workers} model worker(s), "
        f"{spec.total_train_steps} steps of {spec.n_seqs} samples, into {spec.run_dir}"
    )
    for earlier in spec.before:
        exists = earlier.artifact is not None and artifact_exists(earlier.artifact)
        rates = [
            f"learning rate {model.optimizer.lr:g}"
            for model in _trained_models(earlier)
            if model.optimizer
        ]
        steps = "made already" if exists else f"{earlier.total_train_steps} steps"
        print(f"before: {earlier.name} ({', '.join([steps, *rates])})")
    for model in _trained_models(spec):
        if model.optimizer is not None:
            adapters = f", adapters of rank {model.lora.rank}" if model.lora is not None else ""
            print(
                f"trains: {model.role} with learning rate {model.optimizer.lr:g} in {model.dtype}, "
                f"from {model.path}{adapters}"
            )
    for line in _describe_machine(built):
        print(line)
    needs, free, _ = _estimate_memory(built)
    print("\n".join(format_estimate(needs, free)))
    if built.config.trace:
        for line in trace_lines(spec, built.config, built.machine, needs):
            print(line, flush=True)
    chosen = built.config.scheduler
    definition = load_scheduler(chosen.path)
    if definition.script is not None:
        print(
            "\nfor sbatch:\n\n" + definition.script(read_scheduler_options(chosen), arguments),
            end="",
        )
    return 0


def _describe_machine(built: BuiltExperiment) -> Iterator[str]:
    """Yield lines of text: the machine's GPUs, which engine samples, and which worker gets which
    GPU."""
    spec = built.spec
    machine = built.machine
    if machine.gpus or machine.plan:
        planned = f", as planned by machine={machine.plan}" if machine.plan else ""
        yield f"machine: {machine.describe()}{planned}"
    sampling = spec.rollout.role if spec.rollout is not None else "actor"
    model = spec.models.get(sampling)
    if model is not None and (spec.rollout is not None or _samples(spec, sampling)):
        yield f"samples: {_describe_engine(model, machine)}"
    gpus = _assign_gpus(spec, built.config, machine)
    if gpus:
        placed = (f"{name} on {' and '.join(map(str, numbers))}" for name, numbers in gpus.items())
        idle = len(machine.gpus) - len({number for numbers in gpus.values() for number in numbers})
        unused = f"; idle: {idle} of {len(machine.gpus)} ({_LAYOUT_OPTIONS})" if idle else ""
        yield f"GPUs: {', '.join(placed)}{unused}"
    elif machine.gpus:
        yield "GPUs: all workers on GPU 0" + (
            ", a server also on the next ones"
            if model is not None and model.engine.tensor_parallel_size > 1
            else ""
        )
    if line := describe_medium(spec, gpus):
        yield line


_LAYOUT_OPTIONS = "actor.workers, async_rl.n_generation_workers, engine.tensor_parallel_size"
"""Options that decide how many GPUs a run uses."""


def _samples(spec: ExperimentSpec, role: str) -> bool:
    """Return whether a role samples tokens in a synchronous run."""
    evaluation = spec.evaluation
    return any(
        mfc.model_role == role and mfc.interface_type is InterfaceType.GENERATE for mfc in spec.mfcs
    ) or (evaluation is not None and evaluation.generates and evaluation.role == role)


def _describe_engine(model: ModelSpec, machine: Machine) -> str:
    engine = model.engine
    if engine.name != "vllm":
        return f"{engine.name}, in {model.dtype}"
    if engine.vllm_url is not None:
        return f"vllm at {engine.vllm_url}"
    found = find_executable(engine.vllm_executable) or engine.vllm_executable
    program = f"{engine.vllm_executable}, taken to be there" if machine.plan else found
    runner = "of its own choice" if engine.vllm_runner == "auto" else engine.vllm_runner.upper()
    size = engine.tensor_parallel_size
    shared = f", on {size} GPUs together" if size > 1 else ""
    return f"vllm ({program}), model runner {runner}, in {model.dtype}{shared}"


def find_warnings(built: BuiltExperiment) -> Iterator[str]:
    """Yield warnings: the experiment's own advice, devices with too little free memory, and
    learning rates that are probably too large for a pretrained model.

    Raises ConfigError for a run that does not fit into the GPUs' memory, if the memory of its
    models was counted; others are warned of. A trace, which tells what takes it, is made
    nevertheless.
    """
    for spec in (*built.spec.before, built.spec):
        yield from spec.advice
    if built.config.mode in (Mode.run, Mode.check):
        memory = _estimate_memory(built)
        if memory.problems and _is_counted(built) and not built.config.trace:
            raise ConfigError("\n".join(memory.problems))
        yield from memory.problems or find_shortages(memory.needs, memory.free)
        if built.config.mode is Mode.run and not memory.problems:
            yield from _find_taken_memory(memory, built.machine)
    if is_builtin(built.config.actor.path):
        return
    for spec in (*built.spec.before, built.spec):
        supervised = all(mfc.interface == "sft" for mfc in spec.mfcs)
        for model in _trained_models(spec):
            limit = (LARGE_SUPERVISED_RATE if supervised else LARGE_RATE) * (
                LORA_FACTOR if model.lora else 1
            )
            if model.optimizer is not None and model.optimizer.lr > limit:
                option = "warm_start" if spec is not built.spec else model.role
                yield (
                    f"{option}.optimizer.lr={model.optimizer.lr:g} is large for a pretrained "
                    f"model: above {limit:g}, "
                    f"{'supervised' if supervised else 'reinforcement'} learning mostly destroys "
                    f"what it knows"
                )


def _is_counted(built: BuiltExperiment) -> bool:
    """Return whether the memory of each model of a run was counted. A model that is not there yet
    is one that a warm start makes of the actor."""
    actor = built.config.actor.path
    paths = {model.path for model in built.spec.models.values()}
    return all(
        path in BUILTIN_PATHS or is_counted(path)
        for path in (path if find_model_folder(path) is not None else actor for path in paths)
    )


def _find_taken_memory(memory: MemoryPlan, machine: Machine) -> Iterator[str]:
    """Yield a warning for each GPU on which the run would fit if no process used it. Those may be
    what a crash has left behind, and end by themselves."""
    for device, free in machine.free_bytes().items():
        needed = sum_device(memory.needs, device)
        if free < needed <= memory.free.get(device, 0):
            yield (
                f"GPU {device} has {free / GIB:.1f} GiB free, this run is estimated to take "
                f"{needed / GIB:.1f}, and other processes hold what is missing; end them "
                "(`nvidia-smi` lists them)"
            )


class MemoryPlan(NamedTuple):
    """The estimated memory of a run."""

    needs: list[MemoryNeed]
    """Memory of each role and process; empty if hosts are used whose memory is not known."""
    free: dict[int | None, int]
    """Free bytes of each device."""
    problems: list[str]
    """What does not fit into the GPUs, with the options to change."""


def _estimate_memory(built: BuiltExperiment) -> MemoryPlan:
    """Return the estimated memory, without any needs if the scheduler uses several hosts.

    A check plans with what is free. A run plans with GPUs that no other process uses: after a crash
    the memory of the old processes may be freed a little later.
    """
    if load_scheduler(built.config.scheduler.path).several_hosts:
        return MemoryPlan([], {}, [])
    spec = built.spec
    is_run = built.config.mode is Mode.run
    machine = built.machine.without_processes() if is_run else built.machine
    gpus = _assign_gpus(spec, built.config, machine)
    first = {name: numbers[0] for name, numbers in gpus.items()}
    sizes = [gpu.total_bytes for gpu in machine.gpus if gpu.total_bytes is not None]
    known = {"gpu_bytes": min(sizes)} if sizes else {}
    needs = estimate_needs(spec, built.config, first, len(machine.gpus), **known)
    free = free_bytes(machine)
    try:
        planned = plan_engines(needs, spec, built.config, gpus, machine)
    except ConfigError as error:
        return MemoryPlan(needs, free, [str(error)])
    return MemoryPlan(planned, free, [*find_gpu_shortages(planned, free, spec, built.config)])


def _trained_models(spec: ExperimentSpec) -> list[ModelSpec]:
    return [model for model in spec.models.values() if model.trainable]


def _call_build(file: ExperimentFile, config: ExperimentConfig) -> ExperimentSpec:
    """Call the experiment's ``build`` function. Raises ConfigError for its errors."""
    try:
        spec = file.module.build(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        raise ConfigError(
            f"experiment={file.name}: {describe_user_error(error, str(file.module.__file__))}"
        ) from None
    if not isinstance(spec, ExperimentSpec):
        raise ConfigError(f"experiment={file.name}: build(config) returned a {type(spec).__name__}")
    return spec


def _assign_gpus(
    spec: ExperimentSpec, config: ExperimentConfig, machine: Machine
) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each worker that runs on this machine. Raises ConfigError."""
    elsewhere = load_scheduler(config.scheduler.path).elsewhere
    return allocate(
        spec,
        config.allocation,
        len(machine.gpus),
        plan=machine.plan,
        elsewhere=elsewhere and partial(elsewhere, read_scheduler_options(config.scheduler)),
    )


def _check_workers(spec: ExperimentSpec) -> None:
    """Raise ConfigError for model workers without a model, and for roles with a wrong number of
    workers."""
    used = {index for model in spec.models.values() for index in model.workers}
    unused = sorted(set(range(spec.n_model_workers)) - used)
    if unused:
        raise ConfigError(
            f"experiment {spec.name}: model workers are numbered from 0 without gaps; "
            f"{unused} of 0..{spec.n_model_workers - 1} have no model (see actor.workers, "
            f"ref.workers, critic.workers, "
            "teacher.workers)"
        )
    if spec.source.worker not in used:
        raise ConfigError(
            f"experiment {spec.name}: the data source stores its tensors on model worker "
            f"{spec.source.worker}, which does not exist (0..{spec.n_model_workers - 1} do)"
        )
    for mfc in spec.mfcs:
        model = spec.models.get(mfc.model_role)
        if (
            model is not None
            and not mfc.interface_type.produces_keys
            and len(model.workers) != model.parallel.size
        ):
            raise ConfigError(
                f"{mfc.model_role}.workers={list(model.workers)}: the call {mfc.name} "
                f"({mfc.interface_type.value}) runs on {model.parallel.size} worker(s) of its "
                f"backend {model.backend}; "
                f"list that many workers"
            )


def _check_heads(spec: ExperimentSpec) -> None:
    """Raise ConfigError for a call that needs values from a model without a value head."""
    for mfc in spec.mfcs:
        model = spec.models.get(mfc.model_role)
        if model is not None and mfc.interface == "critic" and model.head != "value":
            raise ConfigError(
                f"{mfc.model_role}.head={model.head}: the call {mfc.name} asks for values, which "
                f"only a model with a "
                "value head gives: ModelSpec(head='value')"
            )


def _check_hosts(config: ExperimentConfig, specs: Sequence[ExperimentSpec]) -> None:
    """Raise ConfigError if workers on other hosts could not connect to the run, or if the scheduler
    rejects its options for these experiments."""
    definition = load_scheduler(config.scheduler.path)
    finds_addresses = definition.script is not None and config.mode is Mode.check
    if not config.network.bind and definition.several_hosts and not finds_addresses:
        raise ConfigError(
            f"scheduler={config.scheduler.path}: its workers may run on other hosts; set "
            f"network.bind to the address "
            "of this machine that they reach"
        )
    names = [name for spec in specs for name in _process_names(spec)]
    for problem in (
        definition.problems(config.scheduler, names) if definition.problems is not None else ()
    ):
        raise ConfigError(f"scheduler.{problem}")


def _process_names(spec: ExperimentSpec) -> Iterator[str]:
    yield "master"
    if spec.environment is not None:
        yield "env/0"
    yield from (service.name for service in spec.services)
    yield from spec.rollout.workers if spec.rollout is not None else ()
    yield from (f"model_worker/{index}" for index in range(spec.n_model_workers))


def _check_served_actor(spec: ExperimentSpec) -> None:
    """Raise ConfigError for a synchronous run in which a separate generation server would sample
    from a role on several workers."""
    sampling = {mfc.model_role for mfc in spec.mfcs if mfc.interface_type is InterfaceType.GENERATE}
    if spec.evaluation is not None and spec.evaluation.generates:
        sampling.add(spec.evaluation.role)
    for model in spec.models.values() if spec.rollout is None else ():
        if model.role in sampling and model.engine.name != "embedded" and len(model.workers) > 1:
            raise ConfigError(
                f"engine.name={model.engine.name}: a synchronous run serves {model.role} on one "
                f"worker, but "
                f"{model.role}.workers={list(model.workers)}; use one worker, "
                f"engine.name=embedded, or an asynchronous "
                "experiment"
            )


Section = TypeVar("Section")
LAUNCHER_OPTIONS = frozenset(
    {
        "experiment",
        "experiment_path",
        "experiment_name",
        "trial_name",
        "fileroot",
        "seed",
        "mode",
        "trace",
        "machine",
        "recover_mode",
        "torch_threads",
    }
)
"""Options that the launcher itself reads in every experiment."""
LAUNCHER_SECTIONS = ("exp_ctrl.", "network.", "rpc.", "monitor.", "scheduler.", "allocation.")
"""Name prefixes of the options in sections that the launcher itself reads in every experiment."""


def watch_reads(config: ExperimentConfig) -> tuple[ExperimentConfig, set[str]]:
    """Return a copy of ``config``, and a set that collects the name of each option that is read
    from the copy."""
    reads: set[str] = set()
    return _watch_section(config, "", reads), reads


def _watch_section(section: Section, prefix: str, reads: set[str]) -> Section:
    kind = type(section)
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]

    def recording_get(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in names and not is_dataclass(value):
            reads.add(f"{prefix}{name}")
        return value

    values = {name: getattr(section, name) for name in names}
    for name, value in values.items():
        if is_dataclass(value) and not isinstance(value, type):
            values[name] = _watch_section(value, f"{prefix}{name}.", reads)
    watching = type(kind.__name__, (kind,), {"__getattribute__": recording_get})
    return watching(**values)  # type: ignore[return-value]


def _has_effect(name: str, reads: set[str]) -> bool:
    return name in reads or name in LAUNCHER_OPTIONS or name.startswith(LAUNCHER_SECTIONS)


def effective_options(config: ExperimentConfig, reads: set[str]) -> tuple[str, ...]:
    """Return the names of the options that were read while the experiment was built, and of the
    options that the launcher reads itself."""
    return tuple(sorted(entry.name for entry in walk(config) if _has_effect(entry.name, reads)))


def check_effects(composed: ComposedConfig, reads: set[str]) -> None:
    """Raise ConfigError for options that were set but not read. The message contains the field's
    ``unused_because`` text as the reason."""
    experiment = composed.config.experiment
    reasons = {entry.name: entry.option.unused_because for entry in walk(composed.config)}

    def unused(names: Iterable[str]) -> list[str]:
        return [name for name in names if not _has_effect(name, reads)]

    written = composed.written
    if composed.config.dataset.path and "dataset.path" in reads:
        # The shipped YAML file of an experiment that trains on episodes or on a file has options
        # for both.
        path = composed.config.experiment_path
        own = Path(path).with_suffix(".yaml").name if path else ""
        written = [name for name, source in written.items() if source == own]
    lines = []
    for name in (*unused(composed.overridden), *unused(written)):
        reason = f": {reasons[name]}" if reasons[name] else ""
        where = f" (set in {composed.written[name]})" if name in composed.written else ""
        lines.append(f"option {name} has no effect in experiment {experiment}{reason}{where}")
    for choice, options in composed.chosen.items():
        if options and unused(options) == list(options):
            lines.append(
                f"{choice} has no effect in experiment {experiment}: it reads none of "
                f"{', '.join(options)}"
            )
    if lines:
        raise ConfigError("\n".join(lines))


ENVIRONMENT = "env."


def _check_environment(composed: ComposedConfig, plain: Any) -> None:
    """Raise ConfigError for environment options that were set but do not change the experiment.

    The environment's factory reads all of its options at once, so reads do not show which options
    have an effect. Instead, the experiment is built again with each option at its default and
    compared with ``plain``, which is the experiment as JSON values. Options that have their default
    value, or whose default makes the build fail, are skipped.
    """
    lines = []
    for name in dict.fromkeys((*composed.overridden, *composed.written)):
        if not name.startswith(ENVIRONMENT) or name == f"{ENVIRONMENT}path":
            continue
        config = copy.deepcopy(composed.config)
        # ExperimentConfig itself has no such field.
        *parents, option = name.split(".")
        section: Any = config
        for parent in parents:
            section = vars(section)[parent]
        default = _find_default(section, option)
        if default is MISSING or default == getattr(section, option):
            continue
        setattr(section, option, default)
        try:
            without = to_json_value(_call_build(composed.file, config))
        except ConfigError:
            continue
        if without == plain:
            where = f" (set in {composed.written[name]})" if name in composed.written else ""
            lines.append(
                f"option {name} has no effect in experiment {config.experiment}: it plays no "
                f"episodes that this option "
                f"is about{where}"
            )
    if lines:
        raise ConfigError("\n".join(lines))


def _find_default(section: Any, option: str) -> Any:
    """Return the default value of a section's option; MISSING if the section has no such option."""
    for every in fields(section):
        if every.name == option:
            return (
                every.default_factory() if every.default_factory is not MISSING else every.default
            )
    return MISSING
