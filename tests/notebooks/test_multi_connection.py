"""The notebook runs from its first cell to its last, and what is committed stays small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.packaging.running_server import checkout_in, typed

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "multi_connection.ipynb"

REPEATED = "for _ in range(5)"
"""What the notebook times it times five times; here once is enough."""


def printed(notebook: Any) -> str:
    return "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )


def test_it_is_small_and_tells_nothing_about_the_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert "/home/" not in text and "site-packages" not in text and "127.0.0.1" not in text


@pytest.mark.nightly
@pytest.mark.sim
@pytest.mark.slow
def test_it_runs_on_the_server_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first cell says what to type before it is opened; every cell runs on that server."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []
    [timing] = [cell for cell in code if REPEATED in cell.source]
    timing.source = timing.source.replace(REPEATED, "for _ in range(1)")
    [command] = re.findall(r"^    (.* make run)$", notebook.cells[0].source, re.MULTILINE)
    resources = {"metadata": {"path": str(tmp_path)}}
    with typed(command, checkout_in(tmp_path)) as (url, _):
        monkeypatch.setenv("AWS_RL_ENV_URL", url)
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    words = printed(notebook)
    assert "8 sessions" in words and "8/8 sessions active" in words and "isolated" in words
    assert "'episode_count': 16" in words
    images = [output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(images) == 1
