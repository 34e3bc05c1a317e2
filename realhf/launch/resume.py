"""Resumption of a run: finding the checkpoint in its folder, and checking the options that have
changed.

Each option declares with ``on_resume`` (``realhf/api/option.py``) whether it may change. A run's
options are stored with each checkpoint; before the first checkpoint they are read from
``config.yaml``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from realhf.api.config import ConfigError, ExperimentConfig, RecoverMode, run_folder
from realhf.api.option import OnResume, walk
from realhf.base.dataclass_json import to_json_value
from realhf.dataflow.checkpoint import CheckpointError, CheckpointStore
from realhf.monitor.provenance import LAUNCH, describe_change, describe_changes, read_config


class OptionChange(NamedTuple):
    """A changed option of a resumed run."""

    name: str
    """Dotted name of the option."""
    on_resume: OnResume
    """Effect of the change."""
    before: Any
    """Value in the run so far, as a JSON value."""
    now: Any
    """Value in this launch, as a JSON value."""

    def __str__(self) -> str:
        return describe_change(self.name, self.before, self.now)


class Resumption(NamedTuple):
    """State from which a run resumes."""

    completed_steps: int
    """Number of completed steps in the newest checkpoint that looks complete. The master reads the
    whole checkpoint and may have to use an earlier one."""
    changed: tuple[OptionChange, ...]
    """Changed options about which the user is warned."""
    options_known: bool
    """Whether the options that the run has used so far are known."""

    @property
    def values(self) -> dict[str, list[Any]]:
        """Changed options as {name: [value before, value now]}."""
        return {change.name: [change.before, change.now] for change in self.changed}

    def warnings(self) -> Iterator[str]:
        """Yield warnings for the user."""
        if not self.options_known:
            yield (
                "it is not known which options the run had so far, so they were not compared with "
                "those of now"
            )


def check_resume(config: ExperimentConfig, effective: Sequence[str] = ()) -> Resumption | None:
    """Return the state in the run folder from which to resume; None if there is none.

    Only changes of the ``effective`` options are considered (() means all options), because other
    options have no effect and could not be set back. Raises ConfigError for changes that would make
    it another experiment, and for changes to a run that is already complete.
    """
    folder = run_folder(config)
    if config.recover_mode is RecoverMode.disabled:
        return None
    try:
        newest = CheckpointStore.for_run(folder).newest()
    except CheckpointError as error:
        raise ConfigError(f"trial_name={config.trial_name}: {error}") from None
    if newest is None and not any(map(_has_content, (folder / "journal", folder / "trajectory"))):
        return None
    step, state = newest or (0, {})
    earlier = state.get("options") or _read_options(folder, config)
    changes = find_changes(config, earlier) if earlier else []
    changes = [change for change in changes if not effective or change.name in effective]
    start = f"trial_name={config.trial_name}: {folder} has a run"
    if refused_changes := [change for change in changes if change.on_resume == "refuses"]:
        raise ConfigError(
            f"{start} that has trained {step} steps with other options: {_format_changes(refused_changes)}; "
            f"choose another "
            "trial_name, use the options of that run, or start it over with "
            "recover_mode=disabled"
        )
    warning_changes = [change for change in changes if change.on_resume == "warns"]
    without_effect = [change for change in warning_changes if change.name != "total_train_steps"]
    if without_effect and step >= config.total_train_steps:
        raise ConfigError(
            f"{start} that is complete with {step} steps, so other options have no effect: "
            f"{_format_changes(without_effect)}; "
            "choose another trial_name, train further with a larger total_train_steps, or start "
            "it over with recover_mode=disabled"
        )
    return Resumption(step, tuple(warning_changes), bool(earlier))


def plain_options(config: ExperimentConfig) -> dict[str, Any]:
    """Return all options as JSON values, by dotted name."""
    return {entry.name: to_json_value(entry.value) for entry in walk(config)}


def find_changes(config: ExperimentConfig, before: Mapping[str, Any]) -> list[OptionChange]:
    """Return the options whose values differ from those in ``before``, which maps dotted names to
    JSON values.

    An option that is missing in ``before``, for example because the library was updated, is assumed
    to have had its default value. If the experiment, environment or scheduler itself has changed,
    those of its options that are missing in ``before`` are not compared. Changes of the experiment,
    environment and model come first in the result.
    """
    defaults = plain_options(type(config)())
    # Before this option existed, experiments named *_async were the asynchronous ones.
    defaults["async_rl.enabled"] = str(before.get("experiment", "")).endswith("_async")
    changes = [
        OptionChange(
            name,
            option.on_resume or "refuses",
            before.get(name, defaults[name]),
            to_json_value(value),
        )
        for name, option, value in walk(config)
    ]
    changes = [change for change in changes if not _is_same_value(change.before, change.now)]
    replaced = [
        change.name.removesuffix("path")
        for change in changes
        if change.name in ("env.path", "scheduler.path")
    ]
    if any(change.name == "experiment" for change in changes):
        replaced = [""]
    changes = [
        change
        for change in changes
        if change.name in before or not change.name.startswith(tuple(replaced))
    ]
    return sorted(
        changes, key=lambda change: change.name not in ("experiment", "env.path", "actor.path")
    )


def resume_command(arguments: Sequence[str], trial_name: str) -> str:
    """Return the command that resumes a run with a generated trial name."""
    kept_arguments = [
        text for text in arguments if not text.startswith(("recover_mode=", "trial_name="))
    ]
    return shlex.join([*LAUNCH, *kept_arguments, f"trial_name={trial_name}"])


_MISSING = object()
"""Sentinel for an option that a configuration file does not set, because None is a possible
value."""


def _read_options(run_dir: Path, config: ExperimentConfig) -> dict[str, Any]:
    """Return those options in a run's ``config.yaml`` that ``config`` also has, by dotted name."""
    content = read_config(run_dir)
    options = {}
    for name in plain_options(config):
        part: Any = content
        for key in name.split("."):
            part = part.get(key, _MISSING) if isinstance(part, dict) else _MISSING
        if part is not _MISSING:
            options[name] = part
    return options


def _has_content(folder: Path) -> bool:
    """Return whether a folder contains a non-empty file."""
    return folder.is_dir() and any(
        path.is_file() and path.stat().st_size for path in folder.rglob("*")
    )


def _is_same_value(before: Any, now: Any) -> bool:
    """Return whether two values of an option are equal, or paths of the same file or folder."""
    if before == now or not (isinstance(before, str) and isinstance(now, str)):
        return before == now
    with suppress(OSError, ValueError):
        return os.path.samefile(before, now)
    return False


def _format_changes(changes: Sequence[OptionChange]) -> str:
    return describe_changes({change.name: (change.before, change.now) for change in changes})
