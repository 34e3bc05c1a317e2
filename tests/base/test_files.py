"""A file is whole or as it was before: in every module that says so of its own files."""

from __future__ import annotations

import io
import json
import os
import resource
import stat
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from realhf.api.config import MonitorConfig
from realhf.base.files import imported_files, matching_files, whole_file, write_whole
from realhf.dataflow.checkpoint import LATEST, CheckpointStore
from realhf.monitor.events import EventStream
from realhf.monitor.run_files import EVALUATIONS_FILE, Evaluations
from realhf.monitor.run_log import METRICS_FILE, RunLog
from realhf.monitor.summary import write_summary
from realhf.monitor.trace import TRACE_FILE, TraceWriter, file_of, merge_traces
from realhf.monitor.trackers import IDENTITY_FILE, run_info
from realhf.view.report import REPORT_FILE, write_report
from tests.dataflow.checkpoints import save


@contextmanager
def room_for(size):
    """No file grows beyond so many bytes: a write fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def evaluations(folder):
    Evaluations(folder).add(1, {"sampled": {}})


def report(folder):
    write_report(folder)


def metrics(folder):
    RunLog(folder, MonitorConfig(trackers=[]), EventStream(io.StringIO()), completed_steps=9, total_steps=9)


def summary(folder):
    write_summary({"steps": list(range(40))}, folder)


def identity(folder):
    run_info(folder, 1).remember("wandb", "x" * 40)


def trace(folder):
    merge_traces(folder)


WRITERS: dict[str, Callable[[Path], None]] = {
    EVALUATIONS_FILE: evaluations,
    REPORT_FILE: report,
    METRICS_FILE: metrics,
    "summary.json": summary,
    IDENTITY_FILE: identity,
    TRACE_FILE: trace,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_other(tmp_path, name):
    """The half of the new one used to lie beside it until the next one was written."""
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 4)))
    (tmp_path / IDENTITY_FILE).write_text('{"id": "ab"}')
    with TraceWriter(file_of(tmp_path, "master"), "master") as writer:
        writer.instant("weights", version=2)
    write = WRITERS[name]
    write(tmp_path)
    content, files = (tmp_path / name).read_bytes(), sorted(tmp_path.rglob("*"))
    with room_for(20), pytest.raises(OSError, match="File too large"):
        write(tmp_path)
    assert sorted(tmp_path.rglob("*")) == files
    assert (tmp_path / name).read_bytes() == content


def test_a_checkpoint_that_cannot_be_named_leaves_the_name_of_the_one_before(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, lambda folder: None, {})
    (tmp_path / f"{LATEST}.partial").mkdir()  # in the way of the next one
    with pytest.raises(Exception, match="checkpoint of step 2 was not written"):
        save(store, 2, lambda folder: None, {})
    assert (tmp_path / LATEST).read_text() == "ckpt-00000001"


def test_modes_are_those_of_a_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", "1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_what_a_killed_process_left_is_replaced(tmp_path):
    (tmp_path / "file.partial").write_text("half of a long one")
    write_whole(tmp_path / "file", "ü", synced=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "ü"


def test_a_folder_is_not_replaced_and_an_error_of_the_block_is_told(tmp_path):
    with pytest.raises(IsADirectoryError, match="a file is wanted"):
        write_whole(tmp_path, "1")
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "file") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="first"), whole_file(tmp_path / "file"):
        raise ValueError("first")  # nothing was begun, so nothing can be removed
    assert not list(tmp_path.iterdir())


def test_synced_brings_file_and_name_to_the_disk_in_this_order(tmp_path, monkeypatch):
    """What is seen is what the kernel is asked, in its order: a name on the disk without its bytes is a torn file."""
    asked: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}

    def fsync(descriptor):
        asked.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real["fsync"](descriptor)

    def replace(source, target):
        asked.append("replace")
        real["replace"](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_whole(tmp_path / "file", "1")
    assert asked == ["replace"]
    asked.clear()
    write_whole(tmp_path / "file", "2", synced=True)
    assert asked == ["file.partial", "replace", tmp_path.name]


@pytest.fixture
def package(tmp_path):
    texts = {
        "made/first.py": "from made import second\nimport json\nSTARTED = ['-m', 'made.started', 'made.nothing']\n",
        "made/second.py": "def later():\n    from made.deep.third import thing\n    return thing\n",
        "made/deep/third.py": "import made.first\nthing = 1\n",
        "made/started.py": "from made.room import thing\n",
        "made/room/__init__.py": "from made.room.one import thing\n",
        "made/room/one.py": "thing = 1\n",
        "made/deep/__init__.py": "",
        "made/alone.py": "",
        "made/data/one.yaml": "",
        "made/data/more/two.yaml": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "made"


def test_imports_are_followed_through_others_and_into_processes(package):
    names = [path.relative_to(package).as_posix() for path in imported_files(package, ["made.first"])]
    assert names == ["deep/third.py", "first.py", "room/__init__.py", "room/one.py", "second.py", "started.py"]


def test_a_module_or_a_pattern_that_finds_nothing_is_an_error(package):
    assert [path.name for path in matching_files(package, ["data/**/*"])] == ["two.yaml", "one.yaml"]
    with pytest.raises(FileNotFoundError, match=r"made\.gone"):
        imported_files(package, ["made.first", "made.gone"])
    with pytest.raises(FileNotFoundError, match="data/\\*\\.yml"):
        matching_files(package, ["data/*.yaml", "data/*.yml"])
