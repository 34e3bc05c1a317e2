"""Which tasks ``make test`` validates, on small repositories made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.aws.validation.task_sample import COMMITS, SAMPLE_SIZE, choose_tasks

ALL = [*range(100, 200)]
TASKS = "realhf/aws/tasks/beginner.yaml"


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def commit(root: Path, path: str, text: str) -> None:
    write(root, path, text)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    commit(tmp_path, TASKS, "[{task_id: 101, name: a}, {task_id: 102, name: b}]")
    commit(tmp_path, "realhf/aws/grading/grader.py", "1")
    for number in range(COMMITS):
        commit(tmp_path, "README.md", f"{number}")
    return tmp_path


@pytest.mark.slow
def test_a_sample_is_drawn_by_the_commit(repository: Path) -> None:
    first = choose_tasks(repository, ALL)
    assert len(first) == SAMPLE_SIZE and first == sorted(first) == choose_tasks(repository, ALL)
    commit(repository, "README.md", "another")
    assert choose_tasks(repository, ALL) != first


@pytest.mark.slow
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "in the working tree"])
def test_tasks_that_changed_are_played_besides(repository: Path, committed: bool) -> None:
    change = commit if committed else write
    change(repository, TASKS, "[{task_id: 101, name: a}, {task_id: 102, name: c}]")
    assert 102 in choose_tasks(repository, ALL)
    assert len(choose_tasks(repository, ALL)) in (SAMPLE_SIZE, SAMPLE_SIZE + 1)
    new_file = "realhf/aws/tasks/expert/new.yaml"
    change(repository, new_file, "[{task_id: 150, name: x}]")
    assert {102, 150} <= set(choose_tasks(repository, ALL))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "path",
    [
        "realhf/aws/grading/new.py",
        "realhf/aws/simulator/pool.py",
        "realhf/aws/tasks/loader.py",
        "realhf/aws/messages.py",
        "realhf/aws/real_aws/new.py",
        "realhf/env/containment/x.py",
        "constraints.txt",
    ],
)
def test_all_are_played_after_a_change_of_what_judges(repository: Path, path: str) -> None:
    write(repository, path, "x")
    assert choose_tasks(repository, ALL) == ALL


def test_all_are_played_where_git_cannot_say_what_changed(tmp_path: Path) -> None:
    assert choose_tasks(tmp_path, ALL) == ALL
    git(tmp_path, "init", "-q")
    commit(tmp_path, "README.md", "a history that is too short")
    assert choose_tasks(tmp_path, ALL) == ALL
