"""Checkpoints are whole or absent: kills at every system call that matters, broken files, full disks."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.dataflow.checkpoint import CheckpointError, CheckpointStore
from tests.dataflow.checkpoints import save


def put(text: str, size: int = 1000):
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights.bin").write_text(text * size)

    return write


def weights(folder: Path) -> str:
    return (folder / "actor" / "weights.bin").read_text()


def test_the_latest_comes_back_whole_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "recover", keep=2)
    assert store.latest() is None
    for step in (5, 10, 15):
        save(store, step, put(f"w{step} "), {"next_step": step, "text": "ü"})
    found = store.latest()
    assert found is not None
    assert (found.step, found.state) == (15, {"next_step": 15, "text": "ü"})
    assert weights(found.folder) == "w15 " * 1000
    assert sorted(p.name for p in store.folder.iterdir()) == ["LATEST", "ckpt-00000010", "ckpt-00000015"]


def test_a_step_that_is_run_again_replaces_the_history_after_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, text in ((5, "a"), (10, "b"), (5, "c")):
        save(store, step, put(text), {"text": text})
    found = store.latest()
    assert found is not None and found.state == {"text": "c"} and weights(found.folder).startswith("c")
    assert not list(tmp_path.glob("ckpt-00000010*"))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "manifest_gone", "state"])
def test_a_broken_checkpoint_falls_back_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, put("old"), {"n": 1})
    folder = save(store, 2, put("new"), {"n": 2})
    file = folder / "actor" / "weights.bin"
    if damage == "flip":
        file.write_text("nex" + file.read_text()[3:])
    elif damage == "cut":
        file.write_text(file.read_text()[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        (folder / "MANIFEST.json").write_text('{"step": 2, "fil')
    elif damage == "manifest_gone":
        (folder / "MANIFEST.json").unlink()
    else:
        (folder / "state.json").write_text('{"n": 3}')
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None and (found.step, found.state) == (1, {"n": 1})
    assert str(folder) in caplog.text and "not valid" in caplog.text


def test_latest_lost_or_wrong_still_finds_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, put("a"), {})
    save(store, 2, put("b"), {})
    for text in (None, "ckpt-99", "\0\0"):
        if text is None:
            (tmp_path / "LATEST").unlink()
        else:
            (tmp_path / "LATEST").write_text(text)
        found = store.latest()
        assert found is not None and found.step == 2


KILLED = """
import os, sys
from pathlib import Path
from realhf.dataflow import checkpoint
from realhf.dataflow.checkpoint import CheckpointStore
from tests.dataflow.checkpoints import save

countdown = [int(sys.argv[2])]
def dying(name):
    original = getattr(os, name)
    def call(*args, **kwargs):
        countdown[0] -= 1
        if countdown[0] == 0:
            os._exit(9)
        return original(*args, **kwargs)
    setattr(os, name, call)
for name in ("mkdir", "fsync", "rename", "replace", "rmdir", "unlink"):
    dying(name)

def write(folder):
    (folder / "actor").mkdir()
    (folder / "actor" / "weights.bin").write_text("new" * 1000)
save(CheckpointStore(Path(sys.argv[1]), keep=1), 7, write, {"name": "new"})
print("finished")
"""


@pytest.mark.slow
def test_killed_at_each_phase_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    seen = []
    for phase in range(1, 60):
        folder = tmp_path / str(phase)
        store = CheckpointStore(folder, keep=1)
        save(store, 6, put("old"), {"name": "old"})
        run = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(phase)], capture_output=True, text=True, timeout=300
        )
        found = store.latest()
        assert found is not None
        assert weights(found.folder) == found.state["name"] * 1000
        seen.append(found.state["name"])
        save(store, 8, put("next"), {"name": "next"})
        assert sorted(p.name for p in folder.iterdir()) == ["LATEST", "ckpt-00000008"]
        if "finished" in run.stdout:
            break
        assert run.returncode == 9, run.stderr
    else:
        pytest.fail("the script never finished")
    assert seen == sorted(seen, reverse=True) and set(seen) == {"old", "new"}, seen


def test_a_full_disk_is_one_clear_error_and_harms_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, put("good"), {"n": 1})

    def full(folder: Path) -> None:
        (folder / "partial").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_elsewhere(folder: Path) -> None:
        raise RuntimeError("save of 'w0' raised SafetensorError: No space left on device (os error 28)")

    for write in (full, full_elsewhere):
        with pytest.raises(CheckpointError, match=r"step 2 was not written to .*no space left on device.*intact"):
            save(store, 2, write, {})
        found = store.latest()
        assert found is not None and found.step == 1
        assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_write_to_a_really_full_device(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    with pytest.raises(CheckpointError, match="no space left on device"):
        save(CheckpointStore(tmp_path), 1, write, {})


def test_an_error_of_the_writer_passes_and_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise KeyError("no such role")

    with pytest.raises(KeyError, match="no such role"):
        save(CheckpointStore(tmp_path), 1, write, {})
    assert list(tmp_path.iterdir()) == []


def test_writers_in_other_processes_use_begin_and_commit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    draft = store.begin(3)
    put("x")(draft)
    store.commit(3, draft, {"n": 3})
    found = store.latest()
    assert found is not None and found.state == {"n": 3}
    manifest = json.loads((found.folder / "MANIFEST.json").read_text())
    assert [entry["path"] for entry in manifest["files"]] == ["actor/weights.bin", "state.json"]
