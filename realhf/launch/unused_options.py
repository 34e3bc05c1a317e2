"""Options without effect: what the command line or the experiment's YAML set and nobody read while it was built.

An experiment file reads the options it needs from a *watched* configuration. An option of an experiment
section that was set and not read does nothing, and saying so is kinder than obeying in silence. A choice such as
``model=`` serves many experiments: of its options, one must be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from realhf.api.config import ConfigError, ExperimentConfig
from realhf.api.config.option import walk
from realhf.launch.compose import Composed

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
