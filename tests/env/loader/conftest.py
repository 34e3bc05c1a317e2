"""What the tests of the doors share: files of an author, and the environments in them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.api.environment import EnvironmentSpec
from realhf.env.loader.load import build_environment


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a file of an author and returns its path."""

    def written(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return str(tmp_path / name)

    return written


@pytest.fixture
def build(write: Callable[..., str]) -> Callable[..., EnvironmentSpec]:
    """Builds the environment in a file of an author. A file is imported once, so another text needs
    another name."""

    def built(text: str, name: str = "mine.py", **options: Any) -> EnvironmentSpec:
        return build_environment(write(text, name), options)

    return built
