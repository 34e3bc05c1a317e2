"""Says what a tracker is: something that takes the stream of a run's metrics to where people look at many runs."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from realhf.base.files.whole_file import write_whole

IDENTITY_FILE = "trackers.json"


class Tracker(Protocol):
    """Takes what a run reports. All methods are called on one thread, in order; what one raises ends this tracker."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take finite numbers of a step. Steps need not ascend: an evaluation may come late, and a resumed run repeats
        the steps after its checkpoint."""
        ...

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Take transcripts of a step."""
        ...

    def close(self, failed: bool) -> None:
        """Send what is left and mark the run as over; ``failed``: it ended early."""
        ...


@dataclass(frozen=True)
class RunFacts:
    """Tells a tracker about the run. ``id`` is the same after a resumption and another one after a fresh start;
    ``first_step`` is the next step to come; ``config`` what was asked for; ``past`` what a resumed run had reported of
    the steps before."""

    run_dir: Path
    experiment: str
    trial: str
    id: str
    first_step: int
    config: Mapping[str, Any]
    past: Sequence[tuple[int, Mapping[str, float]]] = ()

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.first_step > 1

    def known(self, tracker: str) -> str | None:
        """Return the name that a tracker has given to this run before, if it did."""
        return _read(self.run_dir).get(tracker)

    def remember(self, tracker: str, name: str) -> None:
        """Keep the name that a tracker gives to this run, for its resumption."""
        _write(self.run_dir, {**_read(self.run_dir), tracker: name})


def facts_of(run_dir: Path, completed_steps: int, past: Sequence[tuple[int, Mapping[str, float]]] = ()) -> RunFacts:
    """Return the facts of the run in a folder, with the id that it had before where it is resumed."""
    known = _read(run_dir) if completed_steps > 0 else {}
    if "id" not in known:
        known = {"id": uuid.uuid4().hex}
        _write(run_dir, known)
    name = run_dir.parent.name, run_dir.name
    return RunFacts(run_dir, *name, known["id"], completed_steps + 1, _config(run_dir), past)


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def flat(config: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Return a nested configuration as {dotted name: text}."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{start}{name}.")
        else:
            found[f"{start}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def _config(run_dir: Path) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _read(run_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((run_dir / IDENTITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _write(run_dir: Path, names: Mapping[str, str]) -> None:
    write_whole(run_dir / IDENTITY_FILE, json.dumps(dict(names)))
