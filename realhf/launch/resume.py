"""What a launch finds in its run folder, and which options may differ from those that the run had so far.

Whether an option may stands at its field (``on_resume`` in ``realhf/api/option.py``). The options of a run are
kept with each of its checkpoints; before the first one ``config.yaml`` has them.
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


class Change(NamedTuple):
    """An option that is not what it was."""

    name: str
    on_resume: OnResume
    before: Any
    now: Any

    def __str__(self) -> str:
        return describe_change(self.name, self.before, self.now)


class Resumption(NamedTuple):
    """What a run goes on from. ``completed_steps`` are those of the newest checkpoint that looks whole: the master
    reads all of it, and says from which step on the run has the options that ``changed``. These are the ones that it
    takes on with another value than before, except those that nobody needs to hear of."""

    completed_steps: int
    changed: tuple[Change, ...]
    options_known: bool

    @property
    def values(self) -> dict[str, list[Any]]:
        """The options that changed, with both values."""
        return {change.name: [change.before, change.now] for change in self.changed}

    def warnings(self) -> Iterator[str]:
        """Yield what a person should hear of it."""
        if not self.options_known:
            yield "it is not known which options the run had so far, so they were not compared with those of now"


def check_resume(config: ExperimentConfig, effective: Sequence[str] = ()) -> Resumption | None:
    """Return what is in the run folder to go on from, None for nothing. Raises ConfigError for options that make it
    another experiment, or that come too late to have an effect. ``effective``: only these do something in this
    experiment; any other one makes no difference, and could not be set back."""
    folder = run_folder(config)
    if config.recover_mode is RecoverMode.disabled:
        return None
    try:
        newest = CheckpointStore.of_run(folder).newest()
    except CheckpointError as error:
        raise ConfigError(f"trial_name={config.trial_name}: {error}") from None
    if newest is None and not any(map(_holds_files, (folder / "journal", folder / "trajectory"))):
        return None
    step, state = newest or (0, {})
    before = state.get("options") or _options_in(folder, config)
    found = changes(config, before) if before else []
    found = [change for change in found if not effective or change.name in effective]
    start = f"trial_name={config.trial_name}: {folder} holds a run"
    if refused := [change for change in found if change.on_resume == "refuses"]:
        raise ConfigError(
            f"{start} that has made {step} steps with other options: {_listed(refused)}; choose another trial_name, go "
            "on with the options that it has, or begin it anew with recover_mode=disabled"
        )
    told = [change for change in found if change.on_resume == "warns"]
    late = [change for change in told if change.name != "total_train_steps"]
    if late and step >= config.total_train_steps:
        raise ConfigError(
            f"{start} that is complete with {step} steps, so other options have no effect: {_listed(late)}; choose "
            "another trial_name, train further with a larger total_train_steps, or begin anew with "
            "recover_mode=disabled"
        )
    return Resumption(step, tuple(told), bool(before))


def plain_options(config: ExperimentConfig) -> dict[str, Any]:
    """Return every option under its dotted name, as a value that JSON has."""
    return {found.name: to_json_value(found.value) for found in walk(config)}


def changes(config: ExperimentConfig, before: Mapping[str, Any]) -> list[Change]:
    """The options whose values are not those that ``before`` has under their dotted names. One that it does not have,
    as after an update of the library, had its default; those of another experiment, environment or scheduler are not
    compared with anything, that it is another one says enough, and says so first."""
    defaults = plain_options(type(config)())
    # Runs from before there was this option streamed their rollouts if the experiment was named so.
    defaults["async_rl.enabled"] = str(before.get("experiment", "")).endswith("_async")
    found = [
        Change(name, about.on_resume or "refuses", before.get(name, defaults[name]), to_json_value(value))
        for name, about, value in walk(config)
    ]
    found = [change for change in found if not _same(change.before, change.now)]
    other = [change.name.removesuffix("path") for change in found if change.name in ("env.path", "scheduler.path")]
    if any(change.name == "experiment" for change in found):
        other = [""]
    found = [change for change in found if change.name in before or not change.name.startswith(tuple(other))]
    return sorted(found, key=lambda change: change.name not in ("experiment", "env.path", "actor.path"))


def resume_line(arguments: Sequence[str], trial_name: str) -> str:
    """The command that goes on with a run which was named after the time of its launch."""
    again = [text for text in arguments if not text.startswith(("recover_mode=", "trial_name="))]
    return shlex.join([*LAUNCH, *again, f"trial_name={trial_name}"])


def _options_in(run_dir: Path, config: ExperimentConfig) -> dict[str, Any]:
    """The options that the ``config.yaml`` of a run has, as far as the configuration of now has them, too."""
    content, found = read_config(run_dir), {}
    for name in plain_options(config):
        part: Any = content
        for key in name.split("."):
            part = part.get(key, _MISSING) if isinstance(part, dict) else _MISSING
        if part is not _MISSING:
            found[name] = part
    return found


_MISSING = object()


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_file() and path.stat().st_size for path in folder.rglob("*"))


def _same(before: Any, now: Any) -> bool:
    """Whether two values of an option mean the same: a file or folder may be named in two ways."""
    if before == now or not (isinstance(before, str) and isinstance(now, str)):
        return before == now
    with suppress(OSError, ValueError):
        return os.path.samefile(before, now)
    return False


def _listed(found: Sequence[Change]) -> str:
    return describe_changes({change.name: (change.before, change.now) for change in found})
