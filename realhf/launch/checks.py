"""Checks made before any process starts. Every problem is reported, one line each.

Ranges and choices stand at the fields of the configuration, and sections check what is theirs
(``realhf/api/config/option.py``); here are the checks across sections.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from shutil import which
from tempfile import TemporaryFile

from realhf.api.config import ConfigError, ExperimentConfig, ModelConfig, RecoverMode, run_folder
from realhf.api.config.option import problems, sections
from realhf.base.extras import install_command
from realhf.builtins import registered_names
from realhf.launch.adapters import adapter_problems
from realhf.launch.chosen_scheduler import definition_of
from realhf.launch.model import BUILTIN_PATHS, checkpoint_problems, model_problems, vocabulary_problems


def check_config(config: ExperimentConfig) -> None:
    """Raise ConfigError that lists everything wrong with the values themselves. The experiment's module is imported
    already: names that it registers are known."""
    found = [
        *problems(config, known=registered_names),
        *_sampling(config),
        *_names_and_workers(config),
        *_sizes(config),
        *model_problems("actor", config.actor, config.rollout.max_total_tokens),
        *checkpoint_problems("actor", config.actor.path),
        *adapter_problems("actor", config.actor),
        *_other_models(config),
        *_not_here(config),
    ]
    if found:
        raise ConfigError("\n".join(found))


def _other_models(config: ExperimentConfig) -> Iterator[str]:
    """Sections of an experiment that are models, too, such as a critic; their path may name the actor's weights."""
    for role, model in sections(config):
        if isinstance(model, ModelConfig) and role != "actor" and model.path not in ("actor", *BUILTIN_PATHS):
            yield from model_problems(role, model, config.rollout.max_total_tokens, renders=False)
            yield from checkpoint_problems(role, model.path)
            yield from vocabulary_problems(role, model, config.actor, config.builtin.vocab_size)


def _not_here(config: ExperimentConfig) -> Iterator[str]:
    """What a run would miss on this machine after its first minutes: vLLM, a tracker, a folder that can be written."""
    engine = config.engine
    elsewhere = definition_of(config.scheduler.path).several_hosts
    if (
        engine.name == "vllm"
        and engine.vllm_url is None
        and not elsewhere
        and not which(os.path.expanduser(engine.vllm_executable))
    ):
        yield (
            f"engine.vllm_executable={engine.vllm_executable}: no such program here, so engine.name=vllm starts no "
            "server; install vLLM in an environment of its own and name its program, or a server that runs with "
            "engine.vllm_url"
        )
    for name in config.monitor.trackers:
        if find_spec(name) is None:
            yield f"monitor.trackers: {name} is not installed: {install_command(name)}"
    there = run_folder(config)
    while not os.path.exists(there):  # Path.exists raises where a folder above cannot be looked into
        there = there.parent
    try:
        TemporaryFile(dir=there).close()
    except OSError as error:
        yield f"fileroot: cannot write to {there}: {error.strerror}"


def _sampling(config: ExperimentConfig) -> Iterator[str]:
    for cut in config.gen.truncations():
        yield (
            f"gen.{cut}: tokens would be drawn from a cut distribution and trained with the log-probabilities of "
            "the whole one; training samples with top_p=1, top_k=0 and min_new_tokens=0"
        )


def _names_and_workers(config: ExperimentConfig) -> Iterator[str]:
    for role, workers in (("actor", config.actor.workers), ("ref", config.ref.workers)):
        if not workers or min(workers) < 0 or len(set(workers)) < len(workers):
            yield f"{role}.workers={workers}: give different indices of model workers, from 0"
    for option, text in (("experiment_name", config.experiment_name), ("trial_name", config.trial_name)):
        if not re.fullmatch(r"[\w.-]+", text) or text.startswith("."):
            yield f"{option}={text!r}: use letters, digits, '_', '-' and '.'; it names a folder"


def _sizes(config: ExperimentConfig) -> Iterator[str]:
    heads, hidden = config.builtin.num_heads, config.builtin.hidden_size
    if config.actor.path in BUILTIN_PATHS:
        if heads < 1 or hidden % heads or (hidden // heads) % 2:
            yield f"builtin.hidden_size={hidden}: must be num_heads={heads} times an even head width"
        if config.rollout.max_total_tokens > config.builtin.max_positions:
            yield (
                f"rollout.max_total_tokens={config.rollout.max_total_tokens}: the built-in policy has "
                f"builtin.max_positions={config.builtin.max_positions}"
            )
    folder = run_folder(config)
    if config.recover_mode is RecoverMode.resume and not (folder / "checkpoints").is_dir():
        others = sorted(path.parent.name for path in folder.parent.glob("*/checkpoints"))
        named = f"; give the trial_name of a run: {', '.join(others[-8:])}" if others else ""
        yield f"recover_mode=resume: no checkpoint in {folder}{named}"
