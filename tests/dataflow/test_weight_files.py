"""Digests beside the weights of a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realhf.dataflow.model_host import DIGESTS_FILE, check_digests, write_digests


def engine(value: float) -> Any:
    """Return what the functions ask an engine for: its version and its weights."""
    return SimpleNamespace(version=3, weights=lambda: {"a": torch.full((3,), value)})


def test_other_weights_are_refused_with_the_name_of_the_tensor(tmp_path: Path) -> None:
    write_digests(tmp_path, engine(1.0))
    check_digests(tmp_path, engine(1.0))
    with pytest.raises(ValueError, match="a was saved with digest"):
        check_digests(tmp_path, engine(2.0))


def test_digests_of_another_computation_are_not_compared_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint made before the computation changed still loads."""
    write_digests(tmp_path, engine(1.0))
    path = tmp_path / DIGESTS_FILE
    old = json.loads(path.read_text())
    del old["scheme"]
    path.write_text(json.dumps(old))
    with caplog.at_level(logging.WARNING):
        check_digests(tmp_path, engine(2.0))
    assert f"{path} was computed otherwise" in caplog.text
