"""A session's folder can be emptied whatever was made in it, or else another one takes its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realhf.aws.cli import virtual_folder
from realhf.aws.cli.virtual_folder import MAX_FILES, MAX_FOLDERS, VirtualFolder, remove_folder


def _dig(folder: Path, depth: int) -> None:
    """Make folders inside one another, deeper than a path may be long, with a file in each tenth."""
    here = os.open(folder, os.O_RDONLY)
    for level in range(depth):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
        if level % 10 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def test_a_folder_is_emptied_however_deep_it_is(tmp_path: Path) -> None:
    """Removal used to recurse, and a thousand folders inside one another ended it for good."""
    files = VirtualFolder(tmp_path / "files")
    _dig(files.path, 1300)
    (files.path / "link").symlink_to(tmp_path)
    assert files.clear() and os.listdir(files.path) == [] and files.path == tmp_path / "files"
    _dig(files.path, 30)
    remove_folder(files.path)
    assert os.listdir(tmp_path) == []
    remove_folder(files.path)


def test_a_folder_that_cannot_be_emptied_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(path: Path) -> None:
        raise PermissionError("not today")

    files = VirtualFolder(tmp_path / "files")
    files.put("old.txt", b"x")
    monkeypatch.setattr(virtual_folder, "empty_folder", broken)
    assert not files.clear()
    assert files.names() == [] and files.path != tmp_path / "files"
    assert (tmp_path / "files" / "old.txt").exists() and "not today" in caplog.text


def test_limits_count_what_lies_below(tmp_path: Path) -> None:
    files = VirtualFolder(tmp_path / "files")
    for number in range(5):
        (files.path / f"f{number}" / "g").mkdir(parents=True)
        for name in range(20):
            (files.path / f"f{number}" / "g" / str(name)).touch()
    assert files.enforce_limits() == MAX_FOLDERS - 10
    assert len([path for path in files.path.rglob("*") if path.is_file()]) == MAX_FILES
