"""Import of user-defined experiments and components by module name or file path.

A *reference* names a component: ``file.py:Name``, ``package.module:Name``, or ``file.py`` if the
file defines only one component.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from realhf.base.text import suggest_names


class Reference(NamedTuple):
    """The two parts of a reference. Both are empty for a string that is not a reference, such as a
    registered name."""

    place: str
    """Path of the file, or name of the module."""
    name: str
    """Name that is defined in the file or module; "" if none is given."""

    @property
    def file(self) -> Path | None:
        """Absolute path of the file; None for a module."""
        return Path(self.place).expanduser().resolve() if self.place.endswith(".py") else None


def split_reference(text: str) -> Reference:
    """Split a reference into its file or module and its name."""
    place, _, name = text.rpartition(":") if ":" in text else (text, "", "")
    return (
        Reference(place, name) if place and (name or place.endswith(".py")) else Reference("", "")
    )


def absolute_reference(text: str) -> str:
    """Return a reference with its file path made absolute, so that every process of a run can use
    it."""
    file, colon, name = text.partition(":")
    return f"{Path(file).expanduser().resolve()}{colon}{name}" if file.endswith(".py") else text


def load_reference(text: str) -> tuple[ModuleType, str]:
    """Import the module or file of a reference. Return (module, name), where the name is "" if the
    reference contains none.

    Raises ValueError with a one-sentence message. If the import fails, the message contains the
    source line.
    """
    parts = split_reference(text)
    file = parts.file
    if file is not None and not file.is_file():
        raise ValueError(f"{text}: there is no file {file}")
    if file is None and "/" in parts.place:
        raise ValueError(
            f"{text}: {parts.place} is neither a Python file (.py) nor a module (package.module)"
        )
    module = import_user_code(
        text, lambda: load_plugin(file or parts.place), str(file) if file else ""
    )
    if parts.name and not hasattr(module, parts.name):
        own = [each for each in vars(module) if not each.startswith("_")]
        raise ValueError(
            f"{text}: {parts.place} defines no {parts.name!r}{suggest_names(parts.name, own)}"
        )
    return module, parts.name


def import_user_code(text: str, load: Callable[[], Any], file: str = "") -> Any:
    """Return the result of ``load``, which imports the reference or registered name ``text``.

    Any exception in the imported code is converted to a ValueError with the source line. file: path
    of the imported file, if known.
    """
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{text}: {describe_user_error(error, file or _innermost_file(error))}"
        ) from None


def _innermost_file(error: BaseException) -> str:
    """Return the path of the file in which an import failed. If the module does not exist, it is a
    file of the import machinery."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename if trace is not None else ""


def load_plugin(plugin: str | Path) -> ModuleType:
    """Import a module (``experiments.mine``) or a file (``/path/mine.py``, under a generated module
    name) once per process.

    Raises any exception of its code.
    """
    if not str(plugin).endswith(".py"):
        return importlib.import_module(str(plugin))
    file = Path(plugin).resolve()
    # The checksum distinguishes files with the same name in different folders.
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


def describe_user_error(error: BaseException, file: str) -> str:
    """Return the first line of an error, with the number of the innermost line of ``file`` in its
    traceback."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
    ]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text} ({file}{f', line {line}' if line else ''})"
