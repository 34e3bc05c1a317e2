"""The tasks of ``examples/harbor``: doing nothing earns nothing, and the solution is paid."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from realhf.api.environment import SPLITS, EnvironmentSpec, Task
from realhf.env.loader.load import build_environment

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).resolve().parents[3] / "examples" / "harbor"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def build(folder: Path) -> tuple[EnvironmentSpec, list[Task]]:
    spec = build_environment(f"harbor:{folder}", {"heldout_fraction": 0.5})
    sets = [spec.tasks(split) for split in SPLITS]
    return spec, [tasks.instantiate(name, 0) for tasks in sets for name in tasks.group_of]


def test_there_are_four_tasks_of_each_kind() -> None:
    _, tasks = build(FOLDER)
    assert sorted(task.id for task in tasks) == NAMES
    groups = [task.group for task in tasks]
    kinds = {kind: groups.count(kind) for kind in groups}
    assert kinds == dict.fromkeys(("database", "files", "program", "service", "text"), 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_paid_and_nothing_else(name: str, containers: None) -> None:
    spec, tasks = build(FOLDER)
    assert spec.examine is not None
    task = next(task for task in tasks if task.id == name)
    remarks = asyncio.run(spec.examine(task))  # type: ignore[arg-type]
    assert [remark.text for remark in remarks if remark.is_fault] == []


@pytest.mark.nightly
def test_eight_containers_at_once_pay_like_one(containers: None) -> None:
    spec, tasks = build(FOLDER)
    examine = spec.examine
    assert examine is not None

    async def examine_all() -> list[str]:
        found = await asyncio.gather(*map(examine, tasks))
        return [remark.text for remarks in found for remark in remarks if remark.is_fault]

    assert asyncio.run(examine_all()) == []


@pytest.mark.nightly
def test_faults_of_a_task_are_found(tmp_path: Path, containers: None) -> None:
    for name, test, solution in (
        ("generous", "echo 0.5 > /logs/verifier/reward.txt", "true"),
        ("unsolved", "echo 0 > /logs/verifier/reward.txt", "echo tried"),
    ):
        folder = tmp_path / name
        for place, text in (
            ("task.toml", ""),
            ("instruction.md", "Do it."),
            ("environment/Dockerfile", "FROM debian"),
            ("tests/test.sh", f"#!/bin/sh\n{test}\n"),
            ("solution/solve.sh", f"#!/bin/sh\n{solution}\n"),
        ):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text)
    spec, tasks = build(tmp_path)
    assert spec.examine is not None
    faults = {
        task.id: [remark.text for remark in asyncio.run(spec.examine(task)) if remark.is_fault]  # type: ignore[arg-type]
        for task in tasks
    }
    assert faults == {
        "generous": ["a policy that does nothing earns 0.5"],
        "unsolved": ["the solution earns 0; its output ends: tried"],
    }
