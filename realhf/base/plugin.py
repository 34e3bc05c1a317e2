"""Imports experiment modules for what they build and register: by name, or by path where they lie outside the tree."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType


def load_plugin(plugin: str | Path) -> ModuleType:
    """Import a module (``experiments.mine``) or a file (``/path/mine.py``, under a name of its own) once per process.
    Raises whatever its code raises."""
    if not str(plugin).endswith(".py"):
        return importlib.import_module(str(plugin))
    file = Path(plugin).resolve()
    # Two files of one name in two folders are two modules.
    name = f"realhf_plugin_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
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
