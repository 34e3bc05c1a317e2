"""Following a file of lines: what is added arrives once, what is torn waits, what is replaced is read anew."""

from __future__ import annotations

import os
from pathlib import Path

from realhf.view.run_data import LineTail


def test_lines_arrive_once_and_a_torn_one_waits_for_its_rest(tmp_path: Path):
    path = tmp_path / "log"
    tail = LineTail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert tail.lines() == [b"one", b"two"]
    assert tail.lines() == []
    with path.open("ab") as file:
        file.write(b"ee\n\nfour\n")
    assert tail.lines() == [b"three", b"four"]
    assert tail.epoch == 0


def test_a_file_that_was_replaced_or_cut_begins_a_new_epoch(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    tail = LineTail(path)
    tail.lines()
    (tmp_path / "other").write_bytes(b"1\n2\n3\n")
    os.replace(tmp_path / "other", path)
    assert (tail.lines(), tail.epoch) == ([b"1", b"2", b"3"], 1)
    path.write_bytes(b"x\n")
    assert (tail.lines(), tail.epoch) == ([b"x"], 2)


def test_what_was_read_of_a_file_that_vanishes_still_counts(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    tail = LineTail(path)
    tail.lines()
    path.unlink()
    assert (tail.lines(), tail.epoch) == ([], 0)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "log")
    assert LineTail(tmp_path / "log").lines() == []


def test_only_the_end_of_a_long_file_is_read_from_the_first_whole_line_on(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    assert LineTail(path, tail_bytes=20).lines() == [b"line 0", b"line 98", b"line 99"]


def test_another_file_under_the_same_number_is_read_anew(tmp_path: Path):
    """A file system gives the number of a deleted file to the next one, which may be longer than the old one was."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("a\n" * 3)
    tail = LineTail(path)
    tail.lines()
    number = path.stat().st_ino
    path.write_text("b\n" * 5)
    assert path.stat().st_ino == number
    assert (tail.lines(), tail.epoch) == ([b"b"] * 5, 1)
    with path.open("a") as file:
        file.write("c\n")
    assert (tail.lines(), tail.epoch) == ([b"c"], 1)
