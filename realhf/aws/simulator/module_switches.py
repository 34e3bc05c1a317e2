"""Restores settings that live in the modules of the simulator.

MiniStack's own reset empties its stores. What else its modules hold by name (switches that its configuration path sets,
counters) survives it, and would carry knowledge from one episode to another.
"""

from __future__ import annotations

import re
import sys
from typing import Any

_PACKAGE = "ministack"
_PLAIN = (str, bytes, int, float, bool, type(None))
_SWITCHES_THAT_ARE_OBJECTS = frozenset({("ministack.services.stepfunctions", "_sfn_mock_config")})
_RUNNING = re.compile(r"_started$|^_inflight_total$|^_generation$")
"""Names of threads and waits that outlive a reset; to forget them would start them twice."""


class ModuleSwitches:
    """Remembers the plain values (numbers, texts, flags) that MiniStack's modules hold at the moment this is made."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[str, Any]] = {}
        for module, name, value in _settings():
            self._taken.setdefault(module, {})[name] = value

    def restore(self) -> list[str]:
        """Put back what changed; returns its names. Where there was nothing and is an object now (a thread, a lock),
        that was made when first needed, and stays."""
        changed = []
        for module, settings in self._taken.items():
            names = vars(sys.modules[module])
            for name, value in settings.items():
                now = names.get(name)
                if now is value or (value is None and not _is_plain(now)):
                    continue
                if type(now) is not type(value) or now != value:
                    changed.append(f"{module}.{name}")
                names[name] = value
        return changed

    def values(self) -> dict[str, str]:
        """Return the present values, as text, by name: for comparing two moments."""
        return {
            f"{module}.{name}": repr(vars(sys.modules[module]).get(name))[:200]
            for module, settings in self._taken.items()
            for name in settings
        }


def _settings() -> list[tuple[str, str, Any]]:
    found = []
    for module, contents in list(sys.modules.items()):
        if module == _PACKAGE or module.startswith(f"{_PACKAGE}."):
            for name, value in vars(contents).items():
                if name.startswith("__") or _RUNNING.search(name):
                    continue
                if _is_plain(value) or (module, name) in _SWITCHES_THAT_ARE_OBJECTS:
                    found.append((module, name, value))
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | frozenset) and all(map(_is_plain, value)))
