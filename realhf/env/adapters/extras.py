"""Imports a package of others that an adapter needs, and says how to install it when it is not there."""

from __future__ import annotations

import importlib
from types import ModuleType

from realhf.base.installation import install_command


def needed(module: str, extra: str) -> ModuleType:
    """Import a module that an extra of this package installs. Raises ValueError that names the extra when it is
    missing or cannot be imported."""
    install = install_command(extra)
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == package:
            raise ValueError(f"env.path={extra} needs the package {package}: {install} ({error})") from None
        raise ValueError(f"env.path={extra}: {package} is not whole: {error}; {install}") from None
    except Exception as error:
        raise ValueError(f"env.path={extra}: importing {module} raised {type(error).__name__}: {error}") from None
