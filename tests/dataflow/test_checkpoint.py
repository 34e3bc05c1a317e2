"""Checkpoints are whole or absent: kills at every system call that matters, broken files, full
disks."""

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
    assert sorted(p.name for p in store.folder.iterdir()) == [
        "LATEST",
        "ckpt-00000010",
        "ckpt-00000015",
    ]


def test_a_step_that_is_run_again_replaces_the_history_after_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, text in ((5, "a"), (10, "b"), (5, "c")):
        save(store, step, put(text), {"text": text})
    found = store.latest()
    assert (
        found is not None and found.state == {"text": "c"} and weights(found.folder).startswith("c")
    )
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
    (told,) = found.warnings
    assert told.startswith(
        "the run resumes from the checkpoint of step 1, because later ones cannot be used: ckpt-000"
    )
    before = contents(folder)
    newer = save(store, 2, put("again"), {"n": 3})
    assert contents(tmp_path / f"{folder.name}.damaged") == before, "what could not be used is kept"
    found = CheckpointStore(tmp_path).latest()
    assert found is not None and found.folder == newer and not found.warnings


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def flip(file: Path, offset: int = 3) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def look(store: CheckpointStore, how: str) -> None:
    getattr(store, how)()


@pytest.mark.parametrize("how", ["latest", "newest"])
def test_checkpoints_that_cannot_be_used_are_not_none(tmp_path: Path, how: str) -> None:
    """The run used to begin at step 0 and to overwrite what it had made."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        flip(save(store, step, put("x"), {"n": step}) / "state.json")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        look(store, how)
    told = str(refused.value)
    assert told.startswith(
        f"{store.folder} has checkpoints, but none can be used: ckpt-00000002 (state.json differs"
    )
    assert (
        "ckpt-00000001 (state.json" in told and "recover_mode=disabled" in told and "\n" not in told
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("how", ["latest", "newest"])
@pytest.mark.parametrize("kind", ["link", "no_folder", "one_is_a_link", "latest_is_a_folder"])
def test_a_disk_that_is_not_mounted_holds_no_run_that_begins(
    tmp_path: Path, kind: str, how: str
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = save(store, 1, put("x"), {})
    if kind == "latest_is_a_folder":
        (store.folder / "LATEST").unlink()
        (store.folder / "LATEST").mkdir()
    elif kind == "one_is_a_link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "not mounted")
    else:
        store.folder.rename(tmp_path / "elsewhere")
        store.folder.symlink_to(
            tmp_path / "not mounted"
        ) if kind == "link" else store.folder.write_text("")
    with pytest.raises(
        CheckpointError,
        match=rf"{store.folder}.*(link|ot a dir|is a folder).*recover_mode=disabled",
    ):
        look(store, how)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_what_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint used to be taken, and the newer one to be deleted, because there was no
    descriptor left."""
    store = CheckpointStore(tmp_path)
    save(store, 1, put("old"), {})
    file = save(store, 2, put("new"), {}) / "actor" / "weights.bin"
    ordinary = Path.open

    def fails(self: Path, *args: object, **more: object) -> object:
        if self == file:
            raise OSError(number, os.strerror(number), str(self))
        return ordinary(self, *args, **more)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        with pytest.raises(
            CheckpointError,
            match=rf"{file} cannot be read: {os.strerror(number)}.*nothing was changed",
        ):
            store.latest()
    found = store.latest()
    assert found is not None and found.step == 2 and not found.warnings


def test_checkpoints_that_are_gone_are_missed(tmp_path: Path) -> None:
    """A run that was killed before its first checkpoint has none, and one that has made one is told
    apart from it."""
    store = CheckpointStore.for_run(tmp_path)
    assert store.latest() is None
    store.begin(1)
    assert store.latest() is None
    save(store, 1, put("x"), {})
    for path in sorted(store.folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for _ in range(2):
        with pytest.raises(
            CheckpointError,
            match=r"has no checkpoint, though the run has made one .*checkpoints\.json",
        ):
            store.latest()
        if store.folder.exists():
            store.folder.rmdir()
    (tmp_path / "checkpoints.json").rename(tmp_path / "summary.json")
    with pytest.raises(CheckpointError, match=r"has made one .*summary\.json exists"):
        store.newest()


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
        (told,) = found.warnings
        assert f"{tmp_path / 'LATEST'} does not name the newest checkpoint" in told


@pytest.mark.slow
def test_one_bit_anywhere_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2, put("a", 10), {"n": 2})
    newest = save(store, 3, put("b", 10), {"n": 3})
    for file in [*newest.rglob("*"), tmp_path / "LATEST"]:
        if file.is_dir():
            continue
        data = file.read_bytes()
        for offset in range(len(data)):
            flip(file, offset)
            found = CheckpointStore(tmp_path).latest()
            assert found is not None and len(found.warnings) == 1, (file, offset)
            assert found.step == (3 if file.name == "LATEST" else 2), (
                "of LATEST alone nothing is lost"
            )
            file.write_bytes(data)


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


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_at_each_phase_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    seen = []
    for phase in range(1, 60):
        folder = tmp_path / str(phase)
        store = CheckpointStore(folder, keep=1)
        save(store, 6, put("old"), {"name": "old"})
        run = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(phase)],
            capture_output=True,
            text=True,
            timeout=300,
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
        raise RuntimeError(
            "save of 'w0' raised SafetensorError: No space left on device (os error 28)"
        )

    for write in (full, full_elsewhere):
        with pytest.raises(
            CheckpointError, match=r"step 2 was not written to .*no space left on device.*intact"
        ):
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
