"""Experiment files outside the package, imported by path for what they build and register."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_plugin(path: str | Path) -> ModuleType:
    """Import the file once per process, under a name of its own. Raises whatever its code raises."""
    file = Path(path).resolve()
    name = f"realhf_plugin_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
