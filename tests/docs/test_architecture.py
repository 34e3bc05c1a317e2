"""``docs/architecture.md`` is true of the tree: rooms, processes, and where to look for what."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDER = re.compile(r"`((?:realhf|workers|experiments|configs|tests|benchmarks|docs|examples)/(?:[\w]+/)*)`")
MODULE = re.compile(r"`((?:realhf|workers|tests)/[\w/]+\.py)`")


def section(title: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    parts = re.split(r"(?m)^## ", PAGE)
    found = [part for part in parts if part.startswith(f"{title}\n")]
    assert len(found) == 1, f"docs/architecture.md has {len(found)} sections {title!r}"
    return found[0]


def table(title: str) -> list[list[str]]:
    """The cells of every row of a section's table, without its head."""
    rows = [line.strip("|").split(" | ") for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def rooms() -> set[str]:
    """Every folder of the product that holds modules, as it is written on the page."""
    modules = [path for path in (ROOT / "realhf").rglob("*.py") if path.name != "__init__.py"]
    return {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in modules}


def console_scripts() -> set[str]:
    """Names of the commands that the package installs."""
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "entry_points"
    ]
    points = ast.literal_eval(calls[0].value)
    return {entry.partition("=")[0].strip() for entry in points["console_scripts"]}


def test_every_room_of_the_tree_has_one_row():
    named = [folder for row in table("Rooms") for folder in FOLDER.findall(row[0])]
    assert sorted(named) == sorted(rooms())


def test_a_room_says_what_it_holds():
    assert [row for row in table("Rooms") if len(row) != 2 or len(row[1].split()) <= 3] == []


def test_each_question_is_answered_by_a_folder_or_a_module():
    questions = table("I want to change how X works")
    assert len({row[0] for row in questions}) == len(questions) >= 20
    known = rooms()
    for question, answer in questions:
        first = answer.partition(":")[0]
        folders, modules = FOLDER.findall(first), MODULE.findall(first)
        assert len(folders) + len(modules) == 1, f"one folder or module answers {question!r}, not {folders + modules}"
        assert set(folders) <= known, question


def test_every_worker_is_in_the_table_of_processes():
    workers = {f"workers/{path.name}" for path in (ROOT / "workers").glob("*_worker.py")}
    assert len(workers) >= 7
    named = {module for row in table("Processes") for module in MODULE.findall(row[0])}
    assert workers <= named


def test_every_console_script_is_in_the_table_of_processes():
    scripts = console_scripts()
    assert len(scripts) >= 2
    text = " ".join(row[0] for row in table("Processes"))
    assert {name for name in scripts if f"`{name}`" not in text} == set()


def test_a_process_says_who_starts_it_what_it_holds_and_what_ends_it():
    assert [row for row in table("Processes") if len(row) != 4 or not all(row)] == []


def test_every_worker_is_in_the_table_of_deaths():
    """By the name that the table of processes gives it."""
    dying = " ".join(row[0] for row in table("When a process dies"))
    for path in (ROOT / "workers").glob("*_worker.py"):
        kind = path.stem.removesuffix("_worker")
        assert kind in dying, f"nothing is said about the death of a {kind} worker"


def test_every_folder_and_module_on_the_page_exists():
    missing = [path for path in {*FOLDER.findall(PAGE), *MODULE.findall(PAGE)} if not (ROOT / path).exists()]
    assert not missing


def test_the_tables_are_read_as_they_are_written():
    """The checks above see what they look for."""
    assert FOLDER.findall("`realhf/aws/cli/` and realhf/api/") == ["realhf/aws/cli/"]
    assert MODULE.findall("`workers/env_worker.py`, also `aws-env`") == ["workers/env_worker.py"]
    with pytest.raises(AssertionError, match="0 sections"):
        section("No such section")
