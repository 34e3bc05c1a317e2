"""Supervised training on episodes that canonical solutions really produced against MiniStack.

    packed_input_ids, loss_mask ──► actor_train

An experiment of its own, and the warm start of the built-in policy for the experiments that build on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from realhf.api.config import ExperimentConfig, OptimizerConfig, run_folder
from realhf.api.config.option import section
from realhf.api.experiment import ExperimentSpec, JobSpec, ModelSpec, SourceSpec
from realhf.api.mfc import InterfaceType, MFCDef
from realhf.api.sample import MicroBatchSpec
from realhf.aws.options import AwsOptions
from realhf.aws.tasks.loader import training_tags
from realhf.base.content_key import content_key
from realhf.base.dataclass_json import to_plain
from realhf.base.paths import PACKAGE
from realhf.base.source_files import imported_files, matching_files
from realhf.monitor.provenance import package_versions

EPISODE_MODULES = ("realhf.aws.training.sft_data", "realhf.api.observation_text")
TASK_FILES = ("aws/tasks/**/*",)
LEARNING_MODULES = (
    "realhf.algorithms.sft",
    "realhf.data.chat_dataset",
    "realhf.backends.builtin_policy",
    "realhf.backends.training.torch_backend",
    "realhf.dataflow.model_host",
)
"""With all that they import: what a demonstration and a warm-started policy depend on."""


@dataclass
class Config(ExperimentConfig):
    """With the AWS environment, whose tasks are demonstrated."""

    env: AwsOptions = section(AwsOptions)


def build(config: Config) -> ExperimentSpec:
    """Return supervised training on demonstrations that are played first, unless they are there already."""
    spec = _supervised(
        config, steps=config.total_train_steps, batch=config.dataset.train_bs_n_seqs, optimizer=config.actor.optimizer
    )
    return replace(spec, run_dir=run_folder(config))


def warm_start(config: Config) -> ExperimentSpec:
    """The built-in policy, trained on demonstrations; found again by the content of all that it depends on."""
    options = config.warm_start
    spec = _supervised(config, steps=options.train_steps, batch=options.batch_size, optimizer=options.optimizer)
    files = imported_files(PACKAGE, LEARNING_MODULES)
    made_from = {
        "artifacts": [job.artifact.name for job in spec.jobs],
        "seed": config.seed,
        "model": [config.actor.backend, config.actor.dtype],
        "max_tokens": config.rollout.max_total_tokens,
    }
    key = content_key({**made_from, "options": {**to_plain(options), "cache_dir": None}}, files)
    return replace(spec, run_dir=run_folder(config) / f"warm_start-{key}", artifact=_cache(config) / f"policy-{key}")


def _supervised(config: Config, *, steps: int, batch: int, optimizer: OptimizerConfig) -> ExperimentSpec:
    demonstrations = _demonstrations(config)
    jobs, path = (demonstrations,), config.actor.path
    if path == "builtin":
        jobs += (_untrained_model(config, demonstrations.artifact),)
        path = str(jobs[-1].artifact)
    actor = ModelSpec(
        "actor",
        path,
        tuple(config.actor.workers),
        trainable=True,
        backend=config.actor.backend,
        dtype=config.actor.dtype,
        gradient_checkpointing=config.actor.gradient_checkpointing,
        optimizer=optimizer,
        chat_template_kwargs=config.actor.chat_template_kwargs,
    )
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
        },
    )
    return ExperimentSpec(
        name="sft_aws",
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


def _demonstrations(config: Config) -> JobSpec:
    files = [*imported_files(PACKAGE, EPISODE_MODULES), *matching_files(PACKAGE, TASK_FILES)]
    options, tasks = config.warm_start, config.env
    content = (
        "--episodes-per-task",
        str(options.episodes_per_task),
        "--seed",
        str(config.seed),
        "--mix",
        f"recovery={options.recovery_fraction}",
        f"habit={options.habit_fraction}",
        "--learn-mistakes",
        "--tiers",
        *tasks.tiers,
        "--tags",
        *training_tags(tasks.tiers, tasks.tags),
    )
    key = content_key([content, package_versions(("ministack", "awscli"))], set(files))
    return JobSpec(
        "sft_data",
        "realhf.aws.training.sft_data",
        artifact=_cache(config) / f"demonstrations-{key}.jsonl",
        argv=("--out", "{artifact}", *content, "--pool-size", str(min(4, tasks.pool_size))),
    )


def _untrained_model(config: Config, demonstrations: Path) -> JobSpec:
    builtin = to_plain(config.builtin)
    versions = package_versions(("torch", "transformers", "tokenizers"))
    key = content_key(
        [builtin, demonstrations.name, config.seed, versions], [PACKAGE / "backends" / "builtin_policy.py"]
    )
    options = [text for name, value in builtin.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return JobSpec(
        "builtin_policy",
        "realhf.backends.builtin_policy",
        artifact=_cache(config) / f"untrained-{key}",
        argv=("--demonstrations", str(demonstrations), "--out", "{artifact}", "--seed", str(config.seed), *options),
    )


def _cache(config: Config) -> Path:
    folder = config.warm_start.cache_dir or Path(config.fileroot) / "warm_start"
    return Path(folder).expanduser().resolve()
