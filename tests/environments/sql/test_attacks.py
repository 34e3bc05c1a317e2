"""Hostile statements neither leave the database, nor take long, nor grow it: with all layers, and
without the first."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from realhf.environments.sql import database as database_module
from realhf.environments.sql.database import Database, StatementLimits
from realhf.environments.sql.tasks import SqlTaskSet, draw_instance
from tests.environments.sql.attacks import FIRST_LAYER_ALONE, HARMLESS, REFUSED

ROOT = Path(__file__).resolve().parents[3]
LIMITS = StatementLimits(steps=100_000, ms=20.0, rows=10, kilobytes=64)
MAX_MS = 45.0
"""The limit, one look at the clock later, and what a slow machine needs to get out of a
statement."""
INSTANCE = draw_instance(SqlTaskSet().instantiate("archive", 1).payload)


def written_bytes() -> int:
    """Bytes that this thread has handed to the kernel in any write."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def open_files() -> list[str]:
    """What the descriptors of this process lead to in the file system; other threads may hold pipes
    and sockets."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(
        path for path in found if path.startswith("/") and not path.startswith(("/dev/", "/proc/"))
    )


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """SQLite's temporary files would go here, and so would a file with a relative name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    return tmp_path


def attack(statement: str, folder: Path, *, writable: bool):
    """Run the statement as it would be in an episode, and check what must hold of any."""
    target = Database(INSTANCE.tables, LIMITS, writable=writable)
    names = {
        "{T}": INSTANCE.tables[0].name,
        "{U}": INSTANCE.tables[1].name,
        "{F}": str(folder / "escaped"),
    }
    for mark, name in names.items():
        statement = statement.replace(mark, name)
    before = target.rows()
    files = open_files()
    written = written_bytes()
    started = time.thread_time()
    result = target.execute(statement)
    took_ms = (time.thread_time() - started) * 1e3
    assert (open_files(), written_bytes(), os.listdir(folder)) == (files, written, [])
    assert took_ms < MAX_MS
    assert target.rows() == before
    assert {
        row[0] for row in target.execute("SELECT name FROM sqlite_master WHERE type = 'table'").rows
    } == set(before)
    assert len(result.rows) <= LIMITS.rows
    target.close()
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("writable", [True, False], ids=["change", "question"])
@pytest.mark.parametrize("name", REFUSED)
def test_an_attack_is_refused(name: str, writable: bool, empty_folder: Path):
    assert attack(REFUSED[name], empty_folder, writable=writable).error


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - FIRST_LAYER_ALONE))
def test_an_attack_is_refused_by_sqlite_when_its_text_was_let_through(
    name: str, empty_folder: Path, monkeypatch
):
    """The second layer: limits, authorizer, steps and time."""
    monkeypatch.setattr(database_module, "find_refusal", lambda statement: "")
    assert attack(REFUSED[name], empty_folder, writable=True).error


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_runs(name: str, empty_folder: Path):
    assert attack(HARMLESS[name], empty_folder, writable=True).error == ""


def test_the_folder_of_the_checks_is_the_one_that_sqlite_would_use(empty_folder: Path):
    """Else a temporary file would go unseen."""
    assert os.environ["SQLITE_TMPDIR"] == str(empty_folder) != tempfile.gettempdir()
    assert len(REFUSED) >= 25


@pytest.mark.parametrize(
    "statement", ["UPDATE {T} SET name = 'x'", "DELETE FROM {T}", "INSERT INTO {T} DEFAULT VALUES"]
)
def test_a_question_leaves_its_database_as_it_is(statement: str, empty_folder: Path):
    assert "not allowed" in attack(statement, empty_folder, writable=False).error


@pytest.mark.slow
def test_many_attacks_need_little_memory():
    """In a process of its own: what it needs at its peak, over what it needs without the
    attacks."""
    code = (
        "import resource\n"
        "from realhf.environments.sql.database import Database\n"
        "from tests.environments.sql.attacks import REFUSED, HARMLESS\n"
        "from tests.environments.sql.test_attacks import INSTANCE, LIMITS\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "db = Database(INSTANCE.tables, LIMITS, writable=True)\n"
        "statements = [s.replace('{T}', INSTANCE.tables[0].name) for s in [*REFUSED.values(), "
        "*HARMLESS.values()]]\n"
        "before = peak()\n"
        "[db.execute(s) for s in statements * 3]\n"
        "print((peak() - before) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert int(done.stdout) < 64
