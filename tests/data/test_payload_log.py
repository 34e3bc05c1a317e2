"""The payload log: what was handed a reference is there after any death, and nothing else is
believed."""

import errno
import os
import resource
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.data import payload_log
from realhf.data.payload_log import PayloadDamaged, PayloadLog

FRAMES = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


def path(folder, segment):
    return folder / f"payload-{segment:06d}.log"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.lists(FRAMES, max_size=4), max_size=6),
    segment_bytes=st.sampled_from([1, 300, 1 << 20]),
)
def test_everything_reads_back_from_another_log(tmp_path_factory, batches, segment_bytes):
    folder = tmp_path_factory.mktemp("log")
    log = PayloadLog(folder, segment_bytes=segment_bytes)
    refs = [ref for batch in batches for ref in log.append(batch)]
    log.close()
    assert [PayloadLog(folder).read(ref) for ref in refs] == [
        frames for batch in batches for frames in batch
    ]
    assert refs == sorted(refs), "references rise"


def test_segments_are_closed_at_their_size_and_at_every_open(tmp_path):
    log = PayloadLog(tmp_path, segment_bytes=100)
    refs = [log.append([[b"x" * 60]])[0] for _ in range(4)]
    assert [ref[0] for ref in refs] == [0, 0, 1, 1]
    log.close()
    again = PayloadLog(tmp_path, segment_bytes=100)
    assert again.append([[b"y"]])[0][0] == 2
    assert again.segments() == [0, 1, 2]
    again.close()


def test_any_damage_is_noticed(tmp_path):
    log = PayloadLog(tmp_path)
    before, ref, after = log.append([[b"before"], [b"precious", b"", b"bytes"], [b"after"]])
    log.close()
    whole = path(tmp_path, 0).read_bytes()
    for position in range(ref[1], ref[1] + ref[2]):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path(tmp_path, 0).write_bytes(damaged)
        with pytest.raises(PayloadDamaged):
            log.read(ref)
        assert (log.read(before), log.read(after)) == ([b"before"], [b"after"])
    path(tmp_path, 0).write_bytes(whole)
    assert log.read(ref) == [b"precious", b"", b"bytes"]


def test_a_torn_tail_harms_only_what_was_torn(tmp_path):
    log = PayloadLog(tmp_path)
    kept, torn = log.append([[b"kept"], [b"torn" * 10]])
    log.close()
    whole = path(tmp_path, 0).read_bytes()
    for length in range(torn[1], len(whole)):
        path(tmp_path, 0).write_bytes(whole[:length])
        again = PayloadLog(tmp_path)
        assert again.read(kept) == [b"kept"]
        with pytest.raises(PayloadDamaged, match="bytes are there"):
            again.read(torn)


@pytest.mark.parametrize(
    "ref", [[7, 0, 20], [0, 1 << 40, 20], [0, 0, 3], [0, 0, 0], [0, -1, 20], [0, 2, 20]]
)
def test_references_to_nothing_are_damage(tmp_path, ref):
    log = PayloadLog(tmp_path)
    log.append([[b"some frame that is long enough"]])
    with pytest.raises(PayloadDamaged):
        log.read(ref)
    log.close()


def test_only_what_is_alive_and_the_active_segment_stay(tmp_path):
    log = PayloadLog(tmp_path, segment_bytes=1)
    refs = [log.append([[bytes([n])]])[0] for n in range(5)]
    (tmp_path / "payload-x.log").write_text("not ours")
    assert log.keep_only([1]) == [0, 2, 3]
    assert log.segments() == [1, 4]
    assert [log.read(refs[n]) for n in (1, 4)] == [[b"\x01"], [b"\x04"]]
    log.close()
    assert PayloadLog(tmp_path).keep_only([]) == [1, 4]


def test_each_rank_has_a_log_of_its_own_and_reads_all(tmp_path):
    logs = [PayloadLog(tmp_path, rank=rank, segment_bytes=1) for rank in range(3)]
    refs = [log.append([[bytes([n])]])[0] for n in range(2) for log in logs]
    assert [ref[3:] for ref in refs] == [[], [1], [2]] * 2, "a log alone says nothing of ranks"
    assert [reader.read(ref) for reader in logs for ref in refs] == [
        [bytes([n])] for n in (0, 0, 0, 1, 1, 1)
    ] * 3
    for log in logs:
        log.close()
    alone = PayloadLog(tmp_path)
    assert alone.segments() == [0, 1] and alone.read(refs[5]) == [b"\x01"]
    alone.sweep([refs[0], refs[5]], ranks=1)
    assert not (tmp_path / "rank-1").exists(), "nothing of it is needed"
    assert alone.read(refs[5]) == [b"\x01"] and alone.read(refs[0]) == [b"\x00"], (
        "its own log is not swept"
    )
    with pytest.raises(PayloadDamaged):
        alone.read(refs[2])
    alone.sweep([], ranks=3)
    assert alone.read(refs[5]) == [b"\x01"], "rank 2 looks after its own"


def test_what_cannot_be_read_now_is_not_lost(tmp_path):
    """Without a free descriptor every sample that had arrived used to count as damaged, and was
    dropped for good."""
    log = PayloadLog(tmp_path)
    (ref,) = log.append([[b"kept"]])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            log.read(ref)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert log.read(ref) == [b"kept"]
    log.close()


def test_a_full_disk_is_an_error_and_the_next_append_is_whole(tmp_path, monkeypatch):
    log = PayloadLog(tmp_path)
    (first,) = log.append([[b"first"]])

    def full(descriptor, buffers):
        os.write(descriptor, b"half of a rec")
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(payload_log.os, "writev", full)
    with pytest.raises(OSError, match=f"no space left: '{tmp_path}'"):
        log.append([[b"second"]])
    monkeypatch.undo()
    (third,) = log.append([[b"third"]])
    assert (log.read(first), log.read(third)) == ([b"first"], [b"third"])
    assert third[:2] == [1, 0]
    log.close()


def test_writes_that_are_cut_short_go_on(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(payload_log.os, "writev", lambda fd, buffers: real(fd, [buffers[0][:3]]))
    log = PayloadLog(tmp_path)
    refs = log.append([[b"abcdefgh", b"", b"ij"], [b"k"]])
    monkeypatch.undo()
    assert [log.read(ref) for ref in refs] == [[b"abcdefgh", b"", b"ij"], [b"k"]]
    log.close()


WRITER = """
import sys
from pathlib import Path
from realhf.data.payload_log import PayloadLog
log = PayloadLog(Path(sys.argv[1]), segment_bytes=2000)
for number in range(1_000_000):
    print(number, *log.append([[b"%d" % number, bytes(300)]])[0], flush=True)
"""


@pytest.mark.slow
def test_what_was_appended_survives_a_kill(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(20)]
    process.kill()
    lines += [
        line
        for line in process.communicate(timeout=300)[0].splitlines(keepends=True)
        if line.endswith("\n")
    ]
    log = PayloadLog(tmp_path)
    for line in lines:
        number, *ref = map(int, line.split())
        assert log.read(ref) == [b"%d" % number, bytes(300)]
