"""Settings that live in the modules of the simulator, and how a reset gets them back.

MiniStack's own reset empties its stores. What else its modules hold by name (switches that its configuration path
sets, counters) survives it, and would tell one episode about another.
"""

from __future__ import annotations

import sys
from typing import Any

_PACKAGE = "ministack"
_PLAIN = (str, bytes, int, float, bool, type(None))
_SWITCHES_THAT_ARE_OBJECTS = frozenset({("ministack.services.stepfunctions", "_sfn_mock_config")})
_KEPT = frozenset({
    ("ministack.services.cloudformation.wait_conditions", "_generation"),  # a wait of before a reset must notice it
    ("ministack.services.lambda_svc", "_poller_started"),  # its thread runs on
})  # fmt: skip


class ModuleSwitches:
    """The plain values (numbers, texts, flags) that MiniStack's modules hold at the moment this is made."""

    def __init__(self) -> None:
        self._taken = {key: value for key, value in _settings() if key not in _KEPT}

    def restore(self) -> list[str]:
        """Put back what changed; its names."""
        changed = []
        for (module, name), value in self._taken.items():
            names = vars(sys.modules[module])
            if names.get(name) is not value:
                if names.get(name) != value or type(names[name]) is not type(value):
                    changed.append(f"{module}.{name}")
                names[name] = value
        return changed

    def values(self) -> dict[str, str]:
        """What they are now, as text, by name: for comparing two moments."""
        return {f"{module}.{name}": repr(vars(sys.modules[module]).get(name))[:200] for module, name in self._taken}


def _settings() -> list[tuple[tuple[str, str], Any]]:
    found = []
    for module, contents in list(sys.modules.items()):
        if module == _PACKAGE or module.startswith(f"{_PACKAGE}."):
            for name, value in vars(contents).items():
                key = (module, name)
                if not name.startswith("__") and (_is_plain(value) or key in _SWITCHES_THAT_ARE_OBJECTS):
                    found.append((key, value))
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | frozenset) and all(map(_is_plain, value)))
