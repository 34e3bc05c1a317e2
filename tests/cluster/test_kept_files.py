"""What is brought to a host lies below the agent's folder, whole or not at all."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from realhf.cluster.kept_files import keep
from realhf.cluster.messages import FilePiece, Kept


def test_parts_make_a_file_that_appears_with_the_last_one_and_replaces_the_one_before(tmp_path: Path):
    target = tmp_path / "runs" / "plan.json"
    for text in (b"first life", b"2"):
        assert keep(FilePiece(str(target), 0, text, False), tmp_path).size == len(text)
        assert keep(FilePiece(str(target), len(text), b"!", True), tmp_path) == Kept(str(target), len(text) + 1, "")
        assert target.read_bytes() == text + b"!"
    assert target.stat().st_mode & 0o777 == 0o600 and [*target.parent.iterdir()] == [target]


@pytest.mark.parametrize("path", ["/etc/realhf", "{}/../x", "{}/a/../../x", "relative", "/", "{}/a\0b"])
def test_nothing_is_written_elsewhere(tmp_path: Path, path: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert keep(FilePiece(path.format(folder), 0, b"x", True), folder).problem
    assert [*tmp_path.rglob("*")] == [folder]


def test_a_link_is_not_written_through(tmp_path: Path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    (folder / ".f.part").symlink_to(outside)
    assert keep(FilePiece(str(folder / "f"), 4, b"x", True), folder).problem
    assert keep(FilePiece(str(folder / "f"), 0, b"x", True), folder).problem == ""
    assert outside.read_text() == "mine" and not (folder / "f").is_symlink()


def test_a_file_that_misses_a_part_never_gets_its_name(tmp_path: Path):
    target = tmp_path / "weights"
    keep(FilePiece(str(target), 0, b"a" * 10, False), tmp_path)
    assert keep(FilePiece(str(target), 20, b"c" * 10, True), tmp_path).problem == "a part before byte 20 is missing"
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_told_and_what_was_written_is_removed(tmp_path: Path):
    """The limit of a file's size fails a write in its middle, as a disk without room does."""
    target, before = tmp_path / "weights", resource.getrlimit(resource.RLIMIT_FSIZE)
    keep(FilePiece(str(target), 0, b"a" * 1000, False), tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        found = keep(FilePiece(str(target), 1000, b"b" * 1000, False), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (found.size, found.problem) == (0, "File too large")
    assert not [*tmp_path.iterdir()]
    assert keep(FilePiece(str(target), 2000, b"c", True), tmp_path).problem == "a part before byte 2000 is missing"
    assert not target.exists()
