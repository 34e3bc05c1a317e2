"""Imports experiment modules for what they build and register: by name, or by path where they lie outside the tree."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
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


def located(error: BaseException, file: str) -> str:
    """The first line of an error, with the line of a user's file where it arose, or from where it was called."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text} ({file}{f', line {line}' if line else ''})"
