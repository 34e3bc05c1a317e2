"""What ``benchmarks/readability.py`` counts, on a file of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.readability import main

SOURCE = '''"""A module."""

LIMIT = 3
"""A constant with a docstring."""


class Pair:
    """Two things."""

    left: int
    """The first one."""
    right: int

    def accepted(self) -> bool:
        """Nobody was told."""
        first, second = self.left, self.right  # packed
        return first < second

    @property
    def sorted(self) -> bool:
        return True


class Pair:
    pass
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "realhf").mkdir()
    (tmp_path / "realhf" / "module.py").write_text(SOURCE)
    return tmp_path


def test_the_figures_are_those_of_the_file(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(root), "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["files"], figures["lines"], figures["comments"]) == (
        1,
        len(SOURCE.splitlines()),
        1,
    )
    assert (figures["fields"], figures["documented_fields"], figures["field_doc_lines"]) == (
        2,
        1,
        2,
    )
    assert (figures["tuple_assignments"], figures["functions"]) == (1, 2)
    assert figures["participles"] == ["realhf/module.py:14 accepted"], (
        "a property is named for what it is"
    )
    assert (
        figures["words"]["nobody"] == figures["words"]["told"] == 1
        and figures["words"]["said"] == 0
    )
    assert "class names defined more than once: 1: Pair" in capsys.readouterr().out


def test_a_sample_is_the_same_for_a_seed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = []
    for seed in ("a", "a"):
        main(["--root", str(root), "--docstrings", "9", "--functions", "1", "--seed", seed])
        samples.append(capsys.readouterr().out)
    assert samples[0] == samples[1]
    assert (
        "--- realhf/module.py:7 Pair\nTwo things." in samples[0] and samples[0].count("=== ") == 1
    )
