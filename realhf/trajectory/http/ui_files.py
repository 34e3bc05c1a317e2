"""Lists the files of the status page: its own, and those that it shares with the other pages of the project."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType

PAGE_PATH = "/ui"


def _files() -> Mapping[str, Traversable]:
    own = resources.files("realhf.trajectory.http").joinpath("static")
    shared = resources.files("realhf.base").joinpath("look")
    found = {
        f"{PAGE_PATH}/{file.name}": file for folder in (shared, own) for file in folder.iterdir() if file.is_file()
    }
    return MappingProxyType(found | {PAGE_PATH: own.joinpath("status.html")})


UI_FILES: Mapping[str, Traversable] = _files()
"""By path, what anybody may load: the page shows nothing before it is given a token."""
