"""Supervised fine-tuning on the rows of a file (``dataset.path``), or on demonstrations, which are
episodes played by the environment's scripted solver.

    packed_input_ids, loss_mask ──► actor_train

This is an experiment by itself, and the warm start of the policy in other experiments.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.row_file import RowFile, evaluate_rows, prepare_rows
from realhf.api.config import (
    ConfigError,
    ExperimentConfig,
    LoraConfig,
    OptimizerConfig,
    WarmStartConfig,
    run_folder,
)
from realhf.api.environment import DemonstrationRequest
from realhf.api.experiment import (
    ExperimentSpec,
    InterfaceType,
    JobSpec,
    MFCDef,
    ModelSpec,
    SourceSpec,
)
from realhf.api.option import option
from realhf.api.parallel import resolve_parallel
from realhf.api.sample import MicroBatchSpec
from realhf.backends.shipped_policy import LESSONS, find_shipped_policy, is_outdated
from realhf.base.dataclass_json import to_json_value
from realhf.base.files import content_key, find_imported_files
from realhf.base.installation import PACKAGE
from realhf.data.row_formats import SUPERVISED
from realhf.env.loader.load import ChosenEnvironment, chosen_environment, with_environment
from realhf.env.loader.mixture import name_members, split_mixture
from realhf.monitor.provenance import package_versions

LEARNING_MODULES = (
    "realhf.algorithms.sft",
    "realhf.data.chat_dataset",
    "realhf.backends.builtin_policy",
    "realhf.backends.training.torch_backend",
    "realhf.dataflow.model_host",
)
"""Modules whose code, including everything that they import, is part of the cache key of a
warm-started policy."""
BUILTIN = "builtin"
"""Value of ``actor.path`` for the built-in policy, which is first trained on demonstrations."""
UNTRAINED = "builtin_tiny"
"""Value of ``actor.path`` for the built-in policy with random weights."""


@dataclass
class Config(ExperimentConfig):
    """ExperimentConfig plus the section ``env`` with the options of the chosen environment."""

    env: Any = option(
        None, "Environment and its options: env=NAME, or env.path=FILE.py:Name for a custom one."
    )


def config_class(environment: str) -> type[Config]:
    """Return the configuration class for an environment. Raises ValueError for an unknown
    environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return the supervised experiment. A job tokenises the rows of its file or generates its
    demonstrations first, unless they are cached.

    Raises ConfigError for an invalid row, and for an environment without a scripted solver.
    """
    if config.dataset.path is not None:
        return build_on_rows(config)
    spec = _build_supervised(
        config,
        steps=config.total_train_steps,
        batch=config.dataset.train_bs_n_seqs,
        optimizer=config.actor.optimizer,
        lora=config.actor.lora.if_enabled(),
    )
    return replace(spec, name=config.experiment, run_dir=run_folder(config))


def build_on_rows(config: Config) -> ExperimentSpec:
    """Return the supervised experiment on the rows of a file. Raises ConfigError for an invalid
    row."""
    file = file_of_rows(config, SUPERVISED)
    actor = actor_model(config, file.model, config.actor.optimizer, config.actor.lora.if_enabled())
    train = supervised_train(config, config.dataset.train_bs_n_seqs)
    spec = ExperimentSpec(
        name=config.experiment,
        models={"actor": actor},
        mfcs=(train,),
        source=file.source(train.input_keys, actor.workers[0]),
        n_seqs=config.dataset.train_bs_n_seqs,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
        evaluation=evaluate_rows(config, file.rows, {}),
        jobs=file.jobs,
        export_role="actor",
    )
    return evaluate_in_environment(spec, config)


def file_of_rows(config: Config, kind: str) -> RowFile:
    """Return the data file of ``dataset.path``. ``kind``: ``SUPERVISED`` or ``PREFERENCE``. Raises
    ConfigError for an invalid row."""
    is_builtin = config.actor.path in (BUILTIN, UNTRAINED)
    untrained = build_untrained_policy(config) if is_builtin else None
    return prepare_rows(config, kind, _cache_folder(config), untrained)


def evaluate_in_environment(spec: ExperimentSpec, config: Config) -> ExperimentSpec:
    """Return an experiment on the rows of a file with an evaluation on held-out tasks of the
    environment, if one is chosen."""
    if config.env is None:
        return spec
    # That module imports this one.
    from experiments.policy_gradient import episode_engine, evaluate_episodes

    evaluation = evaluate_episodes(config)
    if spec.evaluation is not None:
        evaluation = replace(evaluation, also=(spec.evaluation,))
    actor = replace(spec.models["actor"], engine=episode_engine(config))
    return replace(
        spec,
        models={**spec.models, "actor": actor},
        evaluation=evaluation,
        environment=chosen_environment(config.env).spec.launch,
    )


class InitialWeights(NamedTuple):
    """Initial weights of an experiment, and what has to run to produce them."""

    path: str
    """Folder or hub id of the model."""
    before: tuple[ExperimentSpec, ...] = ()
    """Experiments that run first, such as a warm start."""
    jobs: tuple[JobSpec, ...] = ()
    """Jobs that run first, such as the creation of a random model."""


def resolve_initial_weights(config: Config) -> InitialWeights:
    """Return the initial weights of an experiment: the built-in policy after its warm start, the
    built-in policy with random weights, or the model at ``actor.path``, after a warm start if
    ``actor.warm_start`` is set.

    Raises ConfigError for a warm start in an environment without a scripted solver.
    """
    if config.actor.path == BUILTIN or (config.actor.path != UNTRAINED and config.actor.warm_start):
        before = build_warm_start(config)
        return InitialWeights(str(before.artifact), (before,))
    if config.actor.path == UNTRAINED:
        job = build_untrained_policy(config)
        return InitialWeights(str(job.artifact), jobs=(job,))
    return InitialWeights(config.actor.path)


OUTDATED = (
    "the policy shipped with the environment was trained on a different prompt, tasks or scripts "
    "than the current ones, so the run first trains its own (python -m experiments.shipped_policy "
    "ships a new one)"
)
"""Advice shown when a shipped policy does not match the environment any more."""


def build_warm_start(config: Config) -> ExperimentSpec:
    """Return the supervised experiment that warm-starts the policy. It trains all weights.

    The artifact is named by a hash of all its inputs, so that later runs reuse it. For the built-in
    policy, the artifact is the policy shipped with the environment if that was made from the same
    inputs.
    """
    options = config.warm_start
    spec = _build_supervised(
        config, steps=options.train_steps, batch=options.batch_size, optimizer=options.optimizer
    )
    files = find_imported_files(PACKAGE, LEARNING_MODULES)
    made_from: dict[str, Any] = {
        "artifacts": [job.artifact.name for job in spec.jobs],
        "seed": config.seed,
        "model": [config.actor.backend, config.actor.dtype],
        "max_tokens": config.rollout.max_total_tokens,
    }
    if config.actor.path != BUILTIN:
        made_from["weights"] = _hash_model_files(config.actor.path)
    if config.actor.chat_template_kwargs:
        made_from["template"] = config.actor.chat_template_kwargs
    key = content_key({**made_from, "options": _training_options(options)}, files)
    folder = run_folder(config) / f"warm_start-{key}"
    artifact = _cache_folder(config) / f"policy-{key}"
    advice: tuple[str, ...] = ()
    if config.actor.path == BUILTIN and options.shipped:
        ships = chosen_environment(config.env).spec.shipped_policy
        recipe = warm_start_recipe(config) if ships is not None else {}
        if (shipped := find_shipped_policy(ships, recipe)) is not None:
            artifact = shipped
        elif ships is not None and is_outdated(ships, recipe):
            advice = (OUTDATED,)
    return replace(spec, name="warm_start", run_dir=folder, artifact=artifact, advice=advice)


def warm_start_recipe(config: Config) -> dict[str, Any]:
    """Return the inputs of the built-in policy's warm start as JSON values. They include the user's
    options and a digest of the demonstrated tasks and scripts, but not the seed, the code or file
    locations."""
    environment = chosen_environment(config.env)
    options = config.warm_start
    return {
        "environment": environment.reference,
        "demonstrations": _demonstration_program(
            environment, _demonstration_request(config, seed=0)
        )[1],
        LESSONS: _lessons_digest(environment),
        "model": {
            **to_json_value(config.builtin),
            "backend": config.actor.backend,
            "dtype": config.actor.dtype,
        },
        "max_tokens": config.rollout.max_total_tokens,
        "template": config.actor.chat_template_kwargs,
        "training": _training_options(options),
    }


_SAMPLE = DemonstrationRequest(
    episodes_per_task=2, seed=0, habit_fraction=0.5, recovery_fraction=0.5
)
"""Request for two demonstrations per template: one with a mistake that is not repaired, and one
with a mistake that is repaired before the task is solved."""


def _lessons_digest(environment: ChosenEnvironment) -> str:
    """Return the SHA-256 of the system prompt and of a sample of tasks and scripts.

    A shipped policy with another digest is outdated, regardless of its warm-start options.
    """
    spec = environment.spec
    lessons: list[Any] = []
    if spec.demonstrations is not None:
        lessons += spec.demonstrations.scripts(_SAMPLE)
    elif spec.demonstrate is not None:
        for one in spec.demonstrate(_SAMPLE):
            lessons.append([dict(one.task.payload), one.turns, one.learned])
    content = [spec.system_prompt, *lessons]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _training_options(options: WarmStartConfig) -> dict[str, Any]:
    """Return the options as JSON values, with those that do not affect the training set to None."""
    return {**to_json_value(options), "cache_dir": None, "shipped": None}


def _hash_model_files(path: str) -> list[str]:
    """Return "NAME SHA-256" for each file in a model's folder. For a hub id, return the id itself.

    Hashing half a gigabyte takes about a second.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [path]
    hashes = []
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        with file.open("rb") as content:
            hashes.append(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}")
    return hashes


def _build_supervised(
    config: Config,
    *,
    steps: int,
    batch: int,
    optimizer: OptimizerConfig,
    lora: LoraConfig | None = None,
) -> ExperimentSpec:
    environment = chosen_environment(config.env)
    demonstrations = _demonstrations_job(config, environment)
    jobs = (demonstrations,)
    path = config.actor.path
    if path in (BUILTIN, UNTRAINED):
        jobs += (
            build_untrained_policy(config, demonstrations.artifact if path == BUILTIN else None),
        )
        path = str(jobs[-1].artifact)
    actor = actor_model(config, path, optimizer, lora)
    train = supervised_train(config, batch)
    rows = {"path": str(demonstrations.artifact)}
    source = SourceSpec(
        "jsonl_chat",
        rows,
        keys=train.input_keys,
        worker=actor.workers[0],
        dataset_args={
            **rows,
            "max_tokens": config.rollout.max_total_tokens,
            "chat_template_kwargs": config.actor.chat_template_kwargs,
            "system_prompt": environment.spec.system_prompt,
            "tool_parser": config.actor.tool_parser,
        },
    )
    return ExperimentSpec(
        name="sft",
        models={"actor": actor},
        mfcs=(train,),
        source=source,
        n_seqs=batch,
        total_train_steps=steps,
        seed=config.seed,
        run_dir=Path(),
        jobs=jobs,
        export_role="actor",
    )


def supervised_train(config: Config, batch: int) -> MFCDef:
    """Return the supervised train call on ``batch`` sequences."""
    return MFCDef(
        "actor_train",
        "actor",
        InterfaceType.TRAIN_STEP,
        "sft",
        n_seqs=batch,
        input_keys=("packed_input_ids", "loss_mask"),
        timeout_s=config.rpc.call_timeout_s,
        mb_spec=MicroBatchSpec(config.mb_spec.n_mbs, config.mb_spec.max_tokens_per_mb),
    )


def actor_model(
    config: Config, path: str, optimizer: OptimizerConfig, lora: LoraConfig | None
) -> ModelSpec:
    """Return the specification of the actor, the role that is trained. ``path``: its initial
    weights."""
    actor = config.actor
    return ModelSpec(
        "actor",
        path,
        tuple(actor.workers),
        trainable=True,
        backend=actor.backend,
        dtype=actor.dtype,
        experts=actor.experts,
        gradient_checkpointing=actor.gradient_checkpointing,
        compile=actor.compile,
        optimizer=optimizer,
        lora=lora,
        chat_template_kwargs=actor.chat_template_kwargs,
        tool_parser=actor.tool_parser,
        parallel=resolve_parallel("actor", actor),
    )


def _demonstration_request(config: Config, seed: int) -> DemonstrationRequest:
    options = config.warm_start
    return DemonstrationRequest(
        options.episodes_per_task, seed, options.habit_fraction, options.recovery_fraction
    )


def _demonstration_program(
    environment: ChosenEnvironment, request: DemonstrationRequest
) -> tuple[str, tuple[str, ...]]:
    """Return the module that generates the demonstrations when run as a program, and its
    arguments."""
    program = environment.spec.demonstrations
    if program is not None:
        return program.module, program.argv(request)
    return "realhf.rollout.demonstrations", _demonstration_argv(environment, request)


def _demonstrations_job(config: Config, environment: ChosenEnvironment) -> JobSpec:
    module, argv = _demonstration_program(environment, _demonstration_request(config, config.seed))
    program = environment.spec.demonstrations
    files = {
        *find_imported_files(PACKAGE, (module,)),
        *(program.files if program is not None else _environment_files(environment)),
    }
    key = content_key(
        [argv, package_versions(program.packages if program is not None else ())], files
    )
    return JobSpec(
        "demonstrations",
        module,
        artifact=_cache_folder(config) / f"demonstrations-{key}.jsonl",
        argv=("--out", "{artifact}", *argv),
    )


def _demonstration_argv(
    environment: ChosenEnvironment, request: DemonstrationRequest
) -> tuple[str, ...]:
    """Return the arguments of the program ``realhf.rollout.demonstrations`` for this environment.

    Raises ConfigError for an environment without a scripted solver.
    """
    if environment.spec.demonstrate is None:
        raise ConfigError(
            f"the environment {environment.spec.name} has no scripted solver, so there are no "
            f"demonstrations to train on; train with experiment=grpo from actor.path=FOLDER "
            f"without actor.warm_start, or try a run out with actor.path={UNTRAINED}"
        )
    # Shares and limits of a mixture are about groups of rollouts.
    of_rollouts = ("weights", "limits") if environment.spec.parts else ()
    options = {
        name: value for name, value in environment.options.items() if name not in of_rollouts
    }
    return (
        environment.reference,
        "--options",
        json.dumps(options, sort_keys=True),
        "--request",
        json.dumps(to_json_value(request), sort_keys=True),
    )


def _environment_files(environment: ChosenEnvironment) -> list[Path]:
    """Return the source files of an environment, or of all environments of a mixture: the file that
    defines it, or its module in this package with all imported modules."""
    members = split_mixture(environment.reference)
    references = [*name_members(members).values()] if members else [environment.reference]
    specs = [part.spec for part in environment.spec.parts.values()] or [environment.spec]
    files: list[Path] = []
    for reference, spec in zip(references, specs, strict=True):
        file = reference.partition(":")[0]
        files += (
            [Path(file)]
            if file.endswith(".py")
            else find_imported_files(PACKAGE, (str(getattr(spec.make, "__module__", "")),))
        )
    return files


def build_untrained_policy(config: Config, demonstrations: Path | None = None) -> JobSpec:
    """Return the job that creates a built-in policy with random weights.

    Its tokenizer is trained on ``demonstrations``. If there are none (``actor.path=builtin_tiny``),
    it has one token per byte, which works in every environment. The artifact is the model's folder,
    named by a hash of all its inputs.
    """
    builtin = to_json_value(config.builtin)
    versions = package_versions(("torch", "transformers", "tokenizers"))
    learned_from = [] if demonstrations is None else [demonstrations.name]
    key = content_key(
        [builtin, *learned_from, config.seed, versions],
        [PACKAGE / "backends" / "builtin_policy.py"],
    )
    options = [
        text
        for name, value in builtin.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    demonstration_options = (
        [] if demonstrations is None else ["--demonstrations", str(demonstrations)]
    )
    return JobSpec(
        "builtin_policy",
        "realhf.backends.builtin_policy",
        artifact=_cache_folder(config) / f"{'untrained' if learned_from else 'bytes'}-{key}",
        argv=(*demonstration_options, "--out", "{artifact}", "--seed", str(config.seed), *options),
    )


def _cache_folder(config: Config) -> Path:
    folder = config.warm_start.cache_dir or Path(config.fileroot) / "warm_start"
    return Path(folder).expanduser().resolve()
