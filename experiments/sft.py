"""Supervised training on demonstrations: episodes that the scripted solver of an environment really played in it.

    packed_input_ids, loss_mask ──► actor_train

An experiment of its own, and the warm start of the policy for the experiments that build on it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.shipped_policy import LESSONS, is_outdated, shipped_policy
from realhf.api.config import ConfigError, ExperimentConfig, LoraConfig, OptimizerConfig, WarmStartConfig, run_folder
from realhf.api.environment import DemonstrationRequest
from realhf.api.experiment import ExperimentSpec, InterfaceType, JobSpec, MFCDef, ModelSpec, SourceSpec
from realhf.api.option import option
from realhf.api.parallel import parallel_of
from realhf.api.sample import MicroBatchSpec
from realhf.base.dataclass_json import to_json_value
from realhf.base.files import content_key, imported_files
from realhf.base.installation import PACKAGE
from realhf.env.loader.load import ChosenEnvironment, chosen_environment, with_environment
from realhf.monitor.provenance import package_versions

LEARNING_MODULES = (
    "realhf.algorithms.sft",
    "realhf.data.chat_dataset",
    "realhf.backends.builtin_policy",
    "realhf.backends.training.torch_backend",
    "realhf.dataflow.model_host",
)
"""With all that they import: what a warm-started policy depends on, beside its demonstrations."""
BUILTIN, UNTRAINED = "builtin", "builtin_tiny"
"""Models that are made here: the built-in policy, trained on demonstrations first, and one that knows nothing."""


@dataclass
class Config(ExperimentConfig):
    """With the environment whose tasks are demonstrated; its own options make the section ``env``."""

    env: Any = option(None, "The environment and its options: env=NAME, or env.path=FILE.py:Name for one of your own.")


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on an environment. Raises ValueError when there is no such environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return supervised training on demonstrations that are played first, unless they are there already. Raises
    ConfigError for an environment without a scripted solver."""
    spec = _supervised(
        config,
        steps=config.total_train_steps,
        batch=config.dataset.train_bs_n_seqs,
        optimizer=config.actor.optimizer,
        lora=config.actor.lora.chosen(),
    )
    return replace(spec, name=config.experiment, run_dir=run_folder(config))


class FirstWeights(NamedTuple):
    """Where an experiment's first weights lie, and what makes them: experiments that run before, and single jobs."""

    path: str
    before: tuple[ExperimentSpec, ...] = ()
    jobs: tuple[JobSpec, ...] = ()


def first_weights(config: Config) -> FirstWeights:
    """The model that an experiment starts from: the built-in policy after its warm start, one that knows nothing, or
    that of actor.path, after a warm start if actor.warm_start says so. Raises ConfigError for a warm start on an
    environment without a scripted solver."""
    if config.actor.path == BUILTIN or (config.actor.path != UNTRAINED and config.actor.warm_start):
        before = warm_start(config)
        return FirstWeights(str(before.artifact), (before,))
    if config.actor.path == UNTRAINED:
        job = untrained_policy(config)
        return FirstWeights(str(job.artifact), jobs=(job,))
    return FirstWeights(config.actor.path)


OUTDATED = (
    "the policy that ships with the environment was taught by another prompt, other tasks or other scripts than there "
    "are now, so the run makes one of its own first (python -m experiments.shipped_policy ships a new one)"
)


def warm_start(config: Config) -> ExperimentSpec:
    """A policy's training on demonstrations, of all its weights, found again by the content of all that it depends
    on; in place of the built-in policy's, the one that ships with the environment, where that was made from the
    same."""
    options = config.warm_start
    spec = _supervised(config, steps=options.train_steps, batch=options.batch_size, optimizer=options.optimizer)
    files = imported_files(PACKAGE, LEARNING_MODULES)
    made_from: dict[str, Any] = {
        "artifacts": [job.artifact.name for job in spec.jobs],
        "seed": config.seed,
        "model": [config.actor.backend, config.actor.dtype],
        "max_tokens": config.rollout.max_total_tokens,
    }
    if config.actor.path != BUILTIN:
        made_from["weights"] = _content(config.actor.path)
    if config.actor.chat_template_kwargs:
        made_from["template"] = config.actor.chat_template_kwargs
    key = content_key({**made_from, "options": _training(options)}, files)
    folder = run_folder(config) / f"warm_start-{key}"
    artifact = _cache(config) / f"policy-{key}"
    advice: tuple[str, ...] = ()
    if config.actor.path == BUILTIN and options.shipped:
        ships = chosen_environment(config.env).spec.shipped_policy
        recipe = warm_start_recipe(config) if ships is not None else {}
        if (shipped := shipped_policy(ships, recipe)) is not None:
            artifact = shipped
        elif ships is not None and is_outdated(ships, recipe):
            advice = (OUTDATED,)
    return replace(spec, name="warm_start", run_dir=folder, artifact=artifact, advice=advice)


def warm_start_recipe(config: Config) -> dict[str, Any]:
    """What the warm start of the built-in policy is made from, as far as a person chooses it: all but the seed, the
    code and where files are kept; and what it is taught."""
    environment, options = chosen_environment(config.env), config.warm_start
    return {
        "environment": environment.reference,
        "demonstrations": _player(environment, _request(config, seed=0))[1],
        LESSONS: _lessons_digest(environment),
        "model": {**to_json_value(config.builtin), "backend": config.actor.backend, "dtype": config.actor.dtype},
        "max_tokens": config.rollout.max_total_tokens,
        "template": config.actor.chat_template_kwargs,
        "training": _training(options),
    }


_SAMPLE = DemonstrationRequest(episodes_per_task=2, seed=0, habit_fraction=0.5, recovery_fraction=0.5)
"""One mistake that is stuck to and one that is recovered from, which ends in the solution, of each template."""


def _lessons_digest(environment: ChosenEnvironment) -> str:
    """Return the SHA-256 of the system prompt and of a sample of tasks and scripts: a policy that was taught others is
    outdated, whatever the options of its warm start."""
    spec = environment.spec
    lessons: list[Any] = []
    if spec.demonstrations is not None:
        lessons += spec.demonstrations.scripts(_SAMPLE)
    elif spec.demonstrate is not None:
        for one in spec.demonstrate(_SAMPLE):
            lessons.append([dict(one.task.payload), one.turns, one.learned])
    told = [spec.system_prompt, *lessons]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _training(options: WarmStartConfig) -> dict[str, Any]:
    """How a warm start trains, and not where it is kept or found."""
    return {**to_json_value(options), "cache_dir": None, "shipped": None}


def _content(path: str) -> list[str]:
    """What is in a model's folder; of a hub id, its name. Reading half a gigabyte takes a second."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [path]
    found = []
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        with file.open("rb") as content:
            found.append(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}")
    return found


def _supervised(
    config: Config, *, steps: int, batch: int, optimizer: OptimizerConfig, lora: LoraConfig | None = None
) -> ExperimentSpec:
    environment = chosen_environment(config.env)
    demonstrations = _demonstrations(config, environment)
    jobs, path = (demonstrations,), config.actor.path
    if path in (BUILTIN, UNTRAINED):
        jobs += (untrained_policy(config, demonstrations.artifact if path == BUILTIN else None),)
        path = str(jobs[-1].artifact)
    actor = actor_model(config, path, optimizer, lora)
    train = MFCDef(
        "actor_train",
        "actor",
        InterfaceType.TRAIN_STEP,
        "sft",
        n_seqs=batch,
        input_keys=("packed_input_ids", "loss_mask"),
        timeout_s=config.rpc.call_timeout_s,
        mb_spec=MicroBatchSpec(config.mb_spec.n_mbs, config.mb_spec.max_tokens_per_mb),
    )
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


def actor_model(config: Config, path: str, optimizer: OptimizerConfig, lora: LoraConfig | None) -> ModelSpec:
    """Return the role that is trained, with its first weights in ``path``."""
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
        parallel=parallel_of("actor", actor),
    )


def _request(config: Config, seed: int) -> DemonstrationRequest:
    options = config.warm_start
    return DemonstrationRequest(options.episodes_per_task, seed, options.habit_fraction, options.recovery_fraction)


def _player(environment: ChosenEnvironment, request: DemonstrationRequest) -> tuple[str, tuple[str, ...]]:
    """The program that plays demonstrations, and its arguments."""
    program = environment.spec.demonstrations
    if program is not None:
        return program.module, program.argv(request)
    return "realhf.rollout.demonstrations", _player_argv(environment, request)


def _demonstrations(config: Config, environment: ChosenEnvironment) -> JobSpec:
    module, argv = _player(environment, _request(config, config.seed))
    program = environment.spec.demonstrations
    files = {
        *imported_files(PACKAGE, (module,)),
        *(program.files if program is not None else _environment_files(environment)),
    }
    key = content_key([argv, package_versions(program.packages if program is not None else ())], files)
    return JobSpec(
        "demonstrations",
        module,
        artifact=_cache(config) / f"demonstrations-{key}.jsonl",
        argv=("--out", "{artifact}", *argv),
    )


def _player_argv(environment: ChosenEnvironment, request: DemonstrationRequest) -> tuple[str, ...]:
    """Arguments of the program that plays demonstrations of an environment in its own process."""
    if environment.spec.demonstrate is None:
        raise ConfigError(
            f"the environment {environment.spec.name} has no scripted solver, so there are no demonstrations to train "
            f"on; learn by trial (experiment=grpo), from actor.path=FOLDER without actor.warm_start, or try the "
            f"machinery with actor.path={UNTRAINED}"
        )
    return (
        environment.reference,
        "--options",
        json.dumps(dict(environment.options), sort_keys=True),
        "--request",
        json.dumps(to_json_value(request), sort_keys=True),
    )


def _environment_files(environment: ChosenEnvironment) -> list[Path]:
    """The files that an environment consists of, as far as they can be found: its own, and those that it imports."""
    file = environment.reference.partition(":")[0]
    if file.endswith(".py"):
        return [Path(file)]
    return imported_files(PACKAGE, (str(getattr(environment.spec.make, "__module__", "")),))


def untrained_policy(config: Config, demonstrations: Path | None = None) -> JobSpec:
    """Return the job that makes a policy with random weights: with a vocabulary for ``demonstrations``, or without them
    that of ``actor.path=builtin_tiny``, with a token for each byte, with which any environment can be tried at once.
    Its artifact is the folder of the model, found again by the content of all that it depends on."""
    builtin = to_json_value(config.builtin)
    versions = package_versions(("torch", "transformers", "tokenizers"))
    learned_from = [] if demonstrations is None else [demonstrations.name]
    key = content_key([builtin, *learned_from, config.seed, versions], [PACKAGE / "backends" / "builtin_policy.py"])
    options = [text for name, value in builtin.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    given = [] if demonstrations is None else ["--demonstrations", str(demonstrations)]
    return JobSpec(
        "builtin_policy",
        "realhf.backends.builtin_policy",
        artifact=_cache(config) / f"{'untrained' if learned_from else 'bytes'}-{key}",
        argv=(*given, "--out", "{artifact}", "--seed", str(config.seed), *options),
    )


def _cache(config: Config) -> Path:
    folder = config.warm_start.cache_dir or Path(config.fileroot) / "warm_start"
    return Path(folder).expanduser().resolve()
