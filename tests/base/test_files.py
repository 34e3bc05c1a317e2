"""A file is whole or as it was before: in every module that says so of its own files. One that
grows is followed."""

from __future__ import annotations

import io
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from realhf.api.config import MonitorConfig
from realhf.base import files
from realhf.base.files import (
    LineTail,
    atomic_file,
    atomic_folder,
    find_imported_files,
    find_matching_files,
    write_atomic,
)
from realhf.dataflow.checkpoint import LATEST, CheckpointStore
from realhf.monitor.events import EventStream
from realhf.monitor.run_files import EVALUATIONS_FILE, Evaluations
from realhf.monitor.run_log import METRICS_FILE, RunLog
from realhf.monitor.summary import write_summary
from realhf.monitor.trace import TRACE_FILE, TraceWriter, merge_traces, trace_path
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
    RunLog(
        folder,
        MonitorConfig(trackers=[]),
        EventStream(io.StringIO()),
        completed_steps=9,
        total_steps=9,
    )


def summary(folder):
    write_summary({"steps": list(range(40))}, folder)


def identity(folder):
    run_info(folder, 1).store_name("wandb", "x" * 40)


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
    (tmp_path / METRICS_FILE).write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in range(1, 4))
    )
    (tmp_path / IDENTITY_FILE).write_text('{"id": "ab"}')
    with TraceWriter(trace_path(tmp_path, "master"), "master") as writer:
        writer.instant("weights", version=2)
    write = WRITERS[name]
    write(tmp_path)
    content = (tmp_path / name).read_bytes()
    files = sorted(tmp_path.rglob("*"))
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
        write_atomic(tmp_path / "file", "1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_what_a_killed_process_left_is_replaced(tmp_path):
    (tmp_path / "file.partial").write_text("half of a long one")
    write_atomic(tmp_path / "file", "ü", synced=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "ü"


def test_a_folder_is_not_replaced_and_an_error_of_the_block_is_told(tmp_path):
    with pytest.raises(IsADirectoryError, match="expected a file"):
        write_atomic(tmp_path, "1")
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "file") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="first"), atomic_file(tmp_path / "file"):
        raise ValueError("first")  # nothing was begun, so nothing can be removed
    assert not list(tmp_path.iterdir())


def test_synced_brings_file_and_name_to_the_disk_in_this_order(tmp_path, monkeypatch):
    """What is seen is what the kernel is asked, in its order: a name on the disk without its bytes
    is a torn file."""
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
    write_atomic(tmp_path / "file", "1")
    assert asked == ["replace"]
    asked.clear()
    write_atomic(tmp_path / "file", "2", synced=True)
    assert asked == ["file.partial", "replace", tmp_path.name]


@pytest.fixture
def package(tmp_path):
    texts = {
        "made/first.py": "from made import second\nimport json\nSTARTED = ['-m', 'made.started', "
        "'made.nothing']\n",
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
    names = [
        path.relative_to(package).as_posix()
        for path in find_imported_files(package, ["made.first"])
    ]
    assert names == [
        "deep/third.py",
        "first.py",
        "room/__init__.py",
        "room/one.py",
        "second.py",
        "started.py",
    ]


def test_a_module_or_a_pattern_that_finds_nothing_is_an_error(package):
    assert [path.name for path in find_matching_files(package, ["data/**/*"])] == [
        "two.yaml",
        "one.yaml",
    ]
    with pytest.raises(FileNotFoundError, match=r"made\.gone"):
        find_imported_files(package, ["made.first", "made.gone"])
    with pytest.raises(FileNotFoundError, match="data/\\*\\.yml"):
        find_matching_files(package, ["data/*.yaml", "data/*.yml"])


def test_lines_arrive_once_and_a_torn_one_waits_for_its_rest(tmp_path: Path):
    path = tmp_path / "log"
    tail = LineTail(path)
    assert [*tail.lines()] == []
    path.write_bytes(b"one\ntwo\nthr")
    assert [*tail.lines()] == [b"one", b"two"]
    assert [*tail.lines()] == []
    with path.open("ab") as file:
        file.write(b"ee\n\nfour\n")
    assert [*tail.lines()] == [b"three", b"four"]
    assert tail.epoch == 0


def test_a_file_that_was_replaced_or_cut_begins_a_new_epoch(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    tail = LineTail(path)
    list(tail.lines())
    (tmp_path / "other").write_bytes(b"1\n2\n3\n")
    os.replace(tmp_path / "other", path)
    assert ([*tail.lines()], tail.epoch) == ([b"1", b"2", b"3"], 1)
    path.write_bytes(b"x\n")
    assert ([*tail.lines()], tail.epoch) == ([b"x"], 2)


def test_what_was_read_of_a_file_that_vanishes_still_counts(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    tail = LineTail(path)
    list(tail.lines())
    path.unlink()
    assert ([*tail.lines()], tail.epoch) == ([], 0)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "log")
    assert [*LineTail(tmp_path / "log").lines()] == []


def test_only_the_end_of_a_long_file_is_read_from_the_first_whole_line_on(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    assert [*LineTail(path, tail_bytes=20).lines()] == [b"line 0", b"line 98", b"line 99"]


def test_another_file_under_the_same_number_is_read_anew(tmp_path: Path):
    """A file system gives the number of a deleted file to the next one, which may be longer than
    the old one was."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("a\n" * 3)
    tail = LineTail(path)
    list(tail.lines())
    number = path.stat().st_ino
    path.write_text("b\n" * 5)
    assert path.stat().st_ino == number
    assert ([*tail.lines()], tail.epoch) == ([b"b"] * 5, 1)
    with path.open("a") as file:
        file.write("c\n")
    assert ([*tail.lines()], tail.epoch) == ([b"c"], 1)


KILLED = """
import os, sys
from pathlib import Path
from realhf.base import files

out, phase, exchanges = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
countdown = [phase]
def dying(module, name):
    original = getattr(module, name)
    def call(*args, **kwargs):
        countdown[0] -= 1
        if countdown[0] == 0:
            os._exit(9)
        return original(*args, **kwargs)
    setattr(module, name, call)
if not exchanges:
    files._exchange = lambda one, other: False
for module, name in ((os, "mkdir"), (os, "replace"), (os, "rmdir"), (os, "unlink"), (files, "_exchange")):
    dying(module, name)
with files.atomic_folder(out) as folder:
    (folder / "weights").write_text("new")
    (folder / "more").write_text("new")
print("finished")
"""


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchanged", "moved away"])
def test_a_folder_is_whole_and_nothing_is_left_beside_it_whenever_its_writer_is_killed(
    tmp_path, exchanges
):
    """Halves used to stay for ever, and between two renames there was no policy."""
    seen = []
    for phase in range(1, 40):
        out = tmp_path / str(phase) / "policy"
        with atomic_folder(out) as folder:
            (folder / "weights").write_text("old")
        arguments = [sys.executable, "-c", KILLED, str(out), str(phase), str(exchanges)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
        assert out.is_dir() or not exchanges
        files.recover_folder(out)
        assert [path.name for path in out.parent.iterdir()] == ["policy"], (
            "what was killed is cleaned up"
        )
        assert {path.name: path.read_text() for path in out.iterdir()} in (
            {"weights": "old"},
            {"weights": "new", "more": "new"},
        )
        seen.append((out / "weights").read_text())
        if "finished" in done.stdout:
            break
        assert done.returncode == 9, done.stderr
    else:
        pytest.fail("the script never finished")
    assert seen == sorted(seen, reverse=True) and set(seen) == {"old", "new"}, seen


def test_a_folder_that_is_still_written_is_left_alone(tmp_path):
    out = tmp_path / "policy"
    with atomic_folder(out) as folder:
        (folder / "weights").write_text("one")
        other = out.with_name(".policy.1.tmp")
        folder.rename(other)  # as if another process wrote it
        files.recover_folder(out)
        assert (other / "weights").read_text() == "one"
        other.rename(folder)
    assert (out / "weights").read_text() == "one"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_folder_takes_the_place_of_whatever_was_there(tmp_path, kind):
    out = tmp_path / "policy"
    out.write_text("") if kind == "file" else out.symlink_to(tmp_path / "nowhere")
    with atomic_folder(out) as folder:
        (folder / "weights").write_text("new")
    assert (out / "weights").read_text() == "new" and [
        path.name for path in tmp_path.iterdir()
    ] == ["policy"]
