"""Builds a checked experiment from a configuration: calls its build, infers the graph, and refuses options without
effect.

An experiment file reads the options it needs from a *watched* configuration. An option of an experiment
section that was set and not read does nothing, and saying so is kinder than obeying in silence. A choice such as
``model=`` serves many experiments: of its options, one must be read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

from realhf.api.config import ConfigError, ExperimentConfig, Mode
from realhf.api.experiment import ExperimentSpec, InterfaceType, ModelSpec, RunPlan, is_made
from realhf.api.graph import DataFlowGraph, GraphError, build_graph
from realhf.api.option import walk
from realhf.base.dataclass_json import from_json_value, to_json_value
from realhf.launch.allocation import Need, allocate, check_offload, free_bytes, memory_lines, needs_of, shortages
from realhf.launch.checks import is_builtin
from realhf.launch.compose import Composed
from realhf.launch.plugins import ExperimentFile, definition_of, located, options_of
from realhf.scheduler.gpus import visible_gpus

LARGE_RATE, LARGE_SUPERVISED_RATE, LORA_FACTOR = 5e-5, 5e-4, 20
"""Learning rates above these are seldom meant where all weights of a pretrained model train, by reinforcement learning
and by supervised learning: usual are 1e-6 and 1e-5, and 3e-5 and 2e-4 have served one of 135 million parameters.
Adapters take some ten times as much."""


@dataclass(frozen=True)
class BuiltExperiment:
    """An experiment that can run: its configuration, what it consists of, and its graph. ``plugin``: what every process
    of the run imports. ``effective``: the options that do something in this experiment."""

    config: ExperimentConfig
    plugin: str
    spec: ExperimentSpec
    graph: DataFlowGraph
    effective: tuple[str, ...] = ()

    def plan(self, spec: ExperimentSpec, started_at: float) -> RunPlan:
        """What the workers of ``spec`` (this experiment, or one that runs before it) are told."""
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
            gpus=_allocated(spec, config),
            network=config.network,
        )


def build_experiment(composed: Composed) -> BuiltExperiment:
    """Raises ConfigError for a mistake in the experiment, its graph, or an option that does nothing."""
    config = composed.config
    watched_config, reads = watched(config)
    spec = _build(composed.file, watched_config)
    # What the workers will read, without the sections that watch who reads them.
    plain = to_json_value(spec)
    check_effects(composed, reads)
    _check_environment(composed, plain)
    everything = (*spec.before, spec)
    for every in everything:
        _check_workers(every)
        check_offload(every)
        _allocated(every, config)
        _check_heads(every)
        _check_served(every)
    _check_hosts(config, everything)
    if config.exp_ctrl.keep_best and spec.evaluation is None:
        raise ConfigError(
            f"exp_ctrl.keep_best=true: experiment {spec.name} makes no held-out evaluation, so no policy is the best"
        )
    *_, graph = [spec_graph(every) for every in everything]
    return BuiltExperiment(
        config, composed.file.plugin, from_json_value(ExperimentSpec, plain), graph, effective(config, reads)
    )


def spec_graph(spec: ExperimentSpec) -> DataFlowGraph:
    """The graph of an experiment; a ConfigError lists everything that is wrong with it."""
    try:
        return build_graph(spec.mfcs, spec.source.keys, spec.log_keys, roles=spec.models.keys())
    except GraphError as error:
        raise ConfigError(f"experiment {spec.name}: {error}") from None


def print_graph(built: BuiltExperiment) -> int:
    """Print the dataflow graph as text and as a Mermaid diagram. Returns the exit code 0."""
    print(built.graph.summary())
    print()
    print(built.graph.to_mermaid())
    for warning in built.graph.warnings:
        print(f"warning: {warning}")
    return 0


def print_check(built: BuiltExperiment, arguments: Sequence[str] = ()) -> int:
    """Print what would run, and what is made before; then the batch script of a launch with these arguments, where the
    scheduler has one. Returns the exit code 0."""
    spec = built.spec
    print(
        f"{spec.name}: {len(spec.mfcs)} calls on {spec.n_model_workers} model worker(s), "
        f"{spec.total_train_steps} steps of {spec.n_seqs} samples, into {spec.run_dir}"
    )
    for earlier in spec.before:
        made = earlier.artifact is not None and is_made(earlier.artifact)
        rates = [f"learning rate {model.optimizer.lr:g}" for model in _trained(earlier) if model.optimizer]
        steps = "made already" if made else f"{earlier.total_train_steps} steps"
        print(f"before: {earlier.name} ({', '.join([steps, *rates])})")
    for model in _trained(spec):
        if model.optimizer is not None:
            adapters = f", adapters of rank {model.lora.rank}" if model.lora is not None else ""
            print(f"trains: {model.role} with learning rate {model.optimizer.lr:g}, from {model.path}{adapters}")
    needs, free = _memory(built)
    print("\n".join(memory_lines(needs, free)))
    chosen = built.config.scheduler
    definition = definition_of(chosen.path)
    if definition.script is not None:
        print("\nfor sbatch:\n\n" + definition.script(options_of(chosen), arguments), end="")
    return 0


def advice(built: BuiltExperiment) -> Iterator[str]:
    """What the experiment says of itself, and what is allowed and probably a mistake: more memory than there is, and
    learning rates that are too large for a pretrained model."""
    for spec in (*built.spec.before, built.spec):
        yield from spec.advice
    yield from shortages(*_memory(built))
    if is_builtin(built.config.actor.path):
        return
    for spec in (*built.spec.before, built.spec):
        supervised = all(mfc.interface == "sft" for mfc in spec.mfcs)
        for model in _trained(spec):
            most = (LARGE_SUPERVISED_RATE if supervised else LARGE_RATE) * (LORA_FACTOR if model.lora else 1)
            if model.optimizer is not None and model.optimizer.lr > most:
                option = "warm_start" if spec is not built.spec else model.role
                yield (
                    f"{option}.optimizer.lr={model.optimizer.lr:g} is large for a pretrained model: above {most:g}, "
                    f"{'supervised' if supervised else 'reinforcement'} learning mostly destroys what it knows"
                )


def _memory(built: BuiltExperiment) -> tuple[list[Need], dict[int | None, int]]:
    """What the processes take, and what is free; nothing is known of workers on other hosts."""
    if definition_of(built.config.scheduler.path).several_hosts:
        return [], {}
    there = len(visible_gpus())
    return needs_of(built.spec, built.config, _allocated(built.spec, built.config), there), free_bytes(there)


def _trained(spec: ExperimentSpec) -> list[ModelSpec]:
    return [model for model in spec.models.values() if model.trainable]


def _build(file: ExperimentFile, config: ExperimentConfig) -> ExperimentSpec:
    try:
        spec = file.module.build(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        raise ConfigError(f"experiment={file.name}: {located(error, str(file.module.__file__))}") from None
    if not isinstance(spec, ExperimentSpec):
        raise ConfigError(f"experiment={file.name}: build(config) returned a {type(spec).__name__}")
    return spec


def _allocated(spec: ExperimentSpec, config: ExperimentConfig) -> dict[str, int]:
    """Return the GPUs of the workers that stay on this machine. Raises ConfigError."""
    elsewhere = definition_of(config.scheduler.path).elsewhere
    return allocate(spec, config.allocation, elsewhere=elsewhere and partial(elsewhere, options_of(config.scheduler)))


def _check_workers(spec: ExperimentSpec) -> None:
    used = {index for model in spec.models.values() for index in model.workers}
    unused = sorted(set(range(spec.n_model_workers)) - used)
    if unused:
        raise ConfigError(
            f"experiment {spec.name}: model workers are numbered from 0 without gaps; "
            f"{unused} of 0..{spec.n_model_workers - 1} hold no model (see actor.workers, ref.workers, critic.workers, "
            "teacher.workers)"
        )
    if spec.source.worker not in used:
        raise ConfigError(
            f"experiment {spec.name}: the data source stores its tensors on model worker "
            f"{spec.source.worker}, which does not exist (0..{spec.n_model_workers - 1} do)"
        )
    for mfc in spec.mfcs:
        model = spec.models.get(mfc.model_role)
        if model is not None and not mfc.interface_type.produces_keys and len(model.workers) != model.parallel.size:
            raise ConfigError(
                f"{mfc.model_role}.workers={list(model.workers)}: the call {mfc.name} "
                f"({mfc.interface_type.value}) runs on {model.parallel.size} worker(s) of its backend {model.backend}; "
                f"name so many"
            )


def _check_heads(spec: ExperimentSpec) -> None:
    """A call that asks for values needs a model that has them."""
    for mfc in spec.mfcs:
        model = spec.models.get(mfc.model_role)
        if model is not None and mfc.interface == "critic" and model.head != "value":
            raise ConfigError(
                f"{mfc.model_role}.head={model.head}: the call {mfc.name} asks for values, which only a model with a "
                "value head gives: ModelSpec(head='value')"
            )


def _check_hosts(config: ExperimentConfig, everything: Sequence[ExperimentSpec]) -> None:
    """Workers on other hosts reach a run only where it listens on a network; what the scheduler is told of workers is
    told of workers that there are."""
    definition = definition_of(config.scheduler.path)
    finds_addresses = definition.script is not None and config.mode is Mode.check
    if not config.network.bind and definition.several_hosts and not finds_addresses:
        raise ConfigError(
            f"scheduler={config.scheduler.path}: its workers may run on other hosts; set network.bind to the address "
            "of this machine that they reach"
        )
    names = [name for spec in everything for name in _process_names(spec)]
    for problem in definition.problems(config.scheduler, names) if definition.problems is not None else ():
        raise ConfigError(f"scheduler.{problem}")


def _process_names(spec: ExperimentSpec) -> Iterator[str]:
    yield "master"
    if spec.environment is not None:
        yield "env/0"
    yield from (service.name for service in spec.services)
    yield from spec.rollout.workers if spec.rollout is not None else ()
    yield from (f"model_worker/{index}" for index in range(spec.n_model_workers))


def _check_served(spec: ExperimentSpec) -> None:
    """A model worker serves its own model's tokens only for a role that is on no other worker."""
    sampling = {mfc.model_role for mfc in spec.mfcs if mfc.interface_type is InterfaceType.GENERATE}
    if spec.evaluation is not None:
        sampling.add(spec.evaluation.role)
    for model in spec.models.values() if spec.rollout is None else ():
        if model.role in sampling and model.engine.name != "embedded" and len(model.workers) > 1:
            raise ConfigError(
                f"engine.name={model.engine.name}: a synchronous run serves {model.role} on one worker, but "
                f"{model.role}.workers={list(model.workers)}; use one worker, engine.name=embedded, or an asynchronous "
                "experiment"
            )


T = TypeVar("T")
LAUNCHER_OPTIONS = frozenset(
    {
        "experiment",
        "experiment_path",
        "experiment_name",
        "trial_name",
        "fileroot",
        "seed",
        "mode",
        "recover_mode",
        "torch_threads",
    }
)
LAUNCHER_SECTIONS = ("exp_ctrl.", "network.", "rpc.", "monitor.", "scheduler.", "allocation.")


def watched(config: ExperimentConfig) -> tuple[ExperimentConfig, set[str]]:
    """A copy of ``config`` and the set to which every option is added when it is read from the copy."""
    reads: set[str] = set()
    return _watch(config, "", reads), reads


def _watch(section: T, prefix: str, reads: set[str]) -> T:
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
            values[name] = _watch(value, f"{prefix}{name}.", reads)
    watching = type(kind.__name__, (kind,), {"__getattribute__": recording_get})
    return watching(**values)  # type: ignore[return-value]


def _has_effect(name: str, reads: set[str]) -> bool:
    return name in reads or name in LAUNCHER_OPTIONS or name.startswith(LAUNCHER_SECTIONS)


def effective(config: ExperimentConfig, reads: set[str]) -> tuple[str, ...]:
    """Every option that was read while the experiment was built, and those of the launcher itself."""
    return tuple(sorted(found.name for found in walk(config) if _has_effect(found.name, reads)))


def check_effects(composed: Composed, reads: set[str]) -> None:
    """Raise ConfigError for options that were set and not read, with the reason that stands at their field."""
    experiment = composed.config.experiment
    reasons = {found.name: found.option.idle for found in walk(composed.config)}

    def idle(names: Iterable[str]) -> list[str]:
        return [name for name in names if not _has_effect(name, reads)]

    lines = []
    for name in (*idle(composed.overridden), *idle(composed.written)):
        why = f": {reasons[name]}" if reasons[name] else ""
        where = f" (set in {composed.written[name]})" if name in composed.written else ""
        lines.append(f"option {name} has no effect in experiment {experiment}{why}{where}")
    for choice, options in composed.chosen.items():
        if options and idle(options) == list(options):
            lines.append(f"{choice} has no effect in experiment {experiment}: it reads none of {', '.join(options)}")
    if lines:
        raise ConfigError("\n".join(lines))


ENVIRONMENT = "env."


def _check_environment(composed: Composed, plain: Any) -> None:
    """Raise ConfigError for options of the environment that were set and without which the experiment is the same. All
    of them are read at once where the environment is made, so that reading one says nothing. ``plain`` is the
    experiment as plain values. An option with its default, or without which nothing can be built, is not looked at."""
    lines = []
    for name in dict.fromkeys((*composed.overridden, *composed.written)):
        if not name.startswith(ENVIRONMENT) or name == f"{ENVIRONMENT}path":
            continue
        config = copy.deepcopy(composed.config)
        section = vars(config)["env"]  # each experiment defines its own
        option = name.removeprefix(ENVIRONMENT)
        default = _default(section, option)
        if default is MISSING or default == getattr(section, option):
            continue
        setattr(section, option, default)
        try:
            without = to_json_value(_build(composed.file, config))
        except ConfigError:
            continue
        if without == plain:
            where = f" (set in {composed.written[name]})" if name in composed.written else ""
            lines.append(
                f"option {name} has no effect in experiment {config.experiment}: it plays no episodes that this option "
                f"is about{where}"
            )
    if lines:
        raise ConfigError("\n".join(lines))


def _default(section: Any, option: str) -> Any:
    """The value that an option of a section has by itself; MISSING for what is no option of it."""
    for every in fields(section):
        if every.name == option:
            return every.default_factory() if every.default_factory is not MISSING else every.default
    return MISSING
