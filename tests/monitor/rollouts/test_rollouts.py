"""Rollouts are kept in the run folder as they were played and trained, and read back while the run
goes on."""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from realhf.api.config import MonitorConfig
from realhf.monitor.rollouts import writer
from realhf.monitor.rollouts.format import (
    FOLDER,
    Header,
    PlayLine,
    TrainLine,
    decode_record,
    encode_record,
)
from realhf.monitor.rollouts.reader import NoRecord, RolloutStore
from realhf.monitor.rollouts.records import Selection, build_selection
from realhf.monitor.rollouts.writer import RolloutWriter
from tests.monitor.rollouts.made_rollouts import outcome, sample, trained

ALL = Selection()


def write(
    run: Path, *items: object, worker: str = "model_worker/0", limit: int = 2**30, **options: bool
) -> None:
    """As a process of the run does, from its beginning to its end."""
    recorder = RolloutWriter(run, worker, ALL, limit_bytes=limit, **options)
    for item in items:
        (recorder.record_trained if hasattr(item, "mask") else recorder.record_played)(item)  # type: ignore[arg-type]
    recorder.close()
    time.sleep(0.002)  # incarnations are named by the millisecond


def read(run: Path) -> RolloutStore:
    store = RolloutStore(run)
    store.refresh()
    return store


def test_a_rollout_is_read_back_with_what_was_trained_of_it(tmp_path: Path):
    write(
        tmp_path,
        sample(texts=lambda ids: [f"<{token}>" for token in ids]),
        trained(["make-bucket@0"]),
    )
    store = read(tmp_path)
    first, second = store.rows()
    assert (first.play.id, first.play.reward, first.play.success, first.play.length) == (
        "make-bucket@0/0",
        1.0,
        True,
        2,
    )
    assert (first.play.version, first.play.turns, first.play.env, first.play.group) == (
        3,
        1,
        "aws",
        "beginner",
    )
    assert first.train is not None and first.train.n_tokens == 3
    assert (first.train.ratio_max, first.train.mismatch, first.train.advantage) == (1.5, 0.125, 2.0)
    assert first.train.clip_fraction == pytest.approx(1 / 3, abs=1e-6)
    assert (first.step, first.staleness) == (5, 1)
    assert (
        second.train is not None and second.train.n_tokens == 0 and second.train.advantage is None
    )
    record = store.record(first.play)
    assert [(each["role"], each["content"]) for each in record["messages"]] == [
        ("system", "be brief"),
        ("user", "make a bucket"),
        ("assistant", "aws s3 ls"),
        ("tool", "ok"),
    ]
    assert record["messages"][2]["tool_calls"] == [
        {"id": "call-1", "name": "shell", "arguments": {"command": "aws s3 ls"}}
    ]
    assert record["messages"][2]["reasoning"] == "I think" and record["messages"][2]["turn"] == 0
    assert record["turns"] == [
        {
            "reward": 1.0,
            "metrics": {"progress": 1.0},
            "info": {"a": 1},
            "version": [3, 4],
            "n_tokens": 2,
        }
    ]
    assert record["tokens"]["texts"] == ["<4>", "<5>", "<6>"] and record["tokens"]["mask"] == [
        1,
        1,
        0,
    ]
    tokens = store.record(first.train)
    assert (tokens["first_token"], tokens["old"], tokens["new"]) == (
        3,
        [-1.0, -0.5, -0.25],
        [-0.75, -0.25, 0.0],
    )
    assert tokens["clipped"] == [0, 1, 0]
    assert store.problems == [] and store.torn == []


def test_failures_are_kept_apart_from_zeros_and_branches_name_their_rollout(tmp_path: Path):
    failed = outcome(None, status="timeout", message="no answer", completion_ids=[], logprobs=[], versions=[],
                     loss_mask=[], turn_starts=[], turns=())  # fmt: skip
    several = outcome(0.0, status="finished", branches=(outcome(0.0, status="finished"),))
    write(tmp_path, sample(outcomes=[several, failed]))
    lines = [row.play for row in read(tmp_path).rows()]
    assert [(line.row, line.failure, line.reward, line.branch) for line in lines] == [
        (0, None, 0.0, None),
        (1, None, 0.0, 0),
        (2, "timeout", None, None),
    ]
    assert [row.play.id for row in read(tmp_path).group("make-bucket@0")] == [
        line.id for line in lines
    ]


@pytest.mark.slow
def test_hostile_text_is_data(tmp_path: Path):
    """Control characters, HTML, halves of characters, numbers that JSON lacks and a turn of 100,000
    tokens come back as they were."""
    nasty = "\x00\x1b[2J</script><script>alert(1)</script>\ud800\u2028\r\n"
    count = 100_000
    long = outcome(
        0.5, text=nasty, completion_ids=[9] * count, logprobs=[-1.0] * count, versions=[1] * count,
        loss_mask=[True] * count, info={nasty: float("nan"), "set": {1}, "obj": object}, task_id=f"t\ud800{'x' * 999}",
    )  # fmt: skip
    write(tmp_path, sample(id="a/b\n\ud800", outcomes=[long, outcome()]))
    store = read(tmp_path)
    first, second = store.rows()
    record = store.record(first.play)
    assert record["messages"][2]["content"] == nasty and len(record["tokens"]["ids"]) == count
    assert record["info"][nasty] is None and record["info"]["set"] == [1]
    assert len(first.play.task) < 310 and first.play.length == count
    assert store.record(second.play)["reward"] == 1.0, (
        "a record larger than a member spoils no other"
    )
    assert decode_record(encode_record({"deep": _nested(60)}))


def _nested(depth: int) -> object:
    return [_nested(depth - 1)] if depth else "\ud800"


def test_what_an_environment_says_for_people_is_bounded(tmp_path: Path):
    view = {"title": "the account", "rows": [["bucket", "made"]] * 50}
    first = {"log": "x" * 100_000, "view": view, "other": "y" * 100_000}
    second = {f"{number}": "z" * 100 for number in range(10_000)}
    write(
        tmp_path,
        sample(
            outcomes=[outcome(info=first), outcome(info=second), outcome(info={"n" * 10**6: 1})]
        ),
    )
    store = read(tmp_path)
    parts, many, named = (store.record(row.play)["info"] for row in store.rows())
    assert parts["view"] == view, "what is small is kept whole"
    assert all(
        "bytes are not kept" in parts[name] and len(parts[name]) > 7000 for name in ("log", "other")
    )
    assert all(isinstance(text, str) and "bytes are not kept" in text for text in (many, named))
    assert max(len(json.dumps(kept)) for kept in (parts, many, named)) < 40_000


def test_shards_are_plain_gzip_and_turn_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "MEMBER_BYTES", 1)
    monkeypatch.setattr(writer, "SHARD_BYTES", 2000)
    write(tmp_path, *(sample(id=f"s@{number}") for number in range(8)))
    files = sorted((tmp_path / FOLDER).glob("play-*.jsonl.gz"))
    assert len(files) > 2 and all(file.stat().st_size <= 2000 for file in files)
    texts = [
        json.loads(line)
        for file in files
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    store = read(tmp_path)
    assert [text["id"] for text in texts] == [line.id for line in store.play.lines]
    assert all(store.record(line)["id"] == line.id for line in store.play.lines)


def test_a_growing_run_is_followed_and_a_moved_one_read(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    store = RolloutStore(run)
    assert store.refresh() == 0 and "there are no rollouts" in store.problems[0]
    write(run, sample())
    assert store.refresh() == 2 and store.refresh() == 0 and store.problems == []
    write(run, sample(id="other@1"), worker="rollout_worker/0", by_step=False)
    assert store.refresh() == 2 and len(list(store.rows())) == 4
    run.rename(tmp_path / "moved")
    moved = read(tmp_path / "moved" / FOLDER)
    assert [moved.record(row.play)["id"] for row in moved.rows()] == [
        row.play.id for row in store.rows()
    ]
    line = next(store.rows()).play
    assert store.refresh() == 0 and store.problems and list(store.rows()) == []
    with pytest.raises(NoRecord):
        store.record(line)


def test_torn_tails_are_left_out_and_damage_is_named(tmp_path: Path):
    """A kill leaves the beginning of a member without a line, or the beginning of a line."""
    write(tmp_path, sample())
    (index,) = (tmp_path / FOLDER).glob("*.index.jsonl")
    (shard,) = (tmp_path / FOLDER).glob("*.gz")
    shard.write_bytes(shard.read_bytes() + shard.read_bytes()[:40])
    index.write_bytes(index.read_bytes() + b'{"id":"make-bu')
    store = RolloutStore(tmp_path)
    assert store.refresh() == 2 and store.torn == [index.name] and store.problems == []
    assert all(store.record(line) for line in store.play.lines)
    with index.open("ab") as file:
        file.write(b"\nnonsense\n")
    assert store.refresh() == 0 and "2 lines make no sense" in store.problems[0]
    for damage, told in (
        (shard.read_bytes()[:60], "shorter than its index"),
        (b"x" * 5000, "damaged"),
        (b"", "shorter"),
    ):
        shard.write_bytes(damage)
        store = read(tmp_path)
        with pytest.raises(NoRecord, match=told):
            store.record(store.play.lines[0])
    shard.unlink()
    with pytest.raises(NoRecord, match="No such file"):
        store.record(store.play.lines[0])


def test_what_is_no_index_is_left_out_and_holds_up_nothing(tmp_path: Path):
    """A reader would wait at a pipe for ever, and read a device until the memory is full."""
    write(tmp_path, sample())
    folder = tmp_path / FOLDER
    (index,) = folder.glob("*.index.jsonl")
    os.mkfifo(folder / "play-pipe.index.jsonl")
    (folder / "play-zero.index.jsonl").symlink_to("/dev/zero")
    (folder / "play-gone.index.jsonl").symlink_to(tmp_path / "nowhere")
    header = index.read_text().splitlines()[0]
    (folder / "play-other.index.jsonl").write_text(
        header.replace("model_worker-0", "a/../../else") + "\n"
    )
    (folder / "play-long.index.jsonl").write_bytes(
        header.replace(json.loads(header)["writer"], "long").encode() + b"\n" + b"x" * 2**21
    )
    store = read(tmp_path)
    assert len(list(store.rows())) == 2 and store.refresh() == 0
    told = sorted(problem.partition(": ")[2] for problem in store.problems)
    assert (
        told[0] == "a line has no end"
        and "names another writer, 'a/../../else" in told[1]
        and len(told) == 2
    )


def test_another_index_under_the_same_number_is_read_anew(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write(tmp_path / "one", sample(id="a@1"))
    write(tmp_path / "two", sample(id="b@1"), sample(id="b@2"))
    store = read(tmp_path / "one")
    (index,) = (tmp_path / "one").glob("*/*.index.jsonl")
    (other,) = (tmp_path / "two").glob("*/*.index.jsonl")
    content = other.read_text()
    name = json.loads(content.splitlines()[0])["writer"]
    own = json.loads(index.read_text().splitlines()[0])["writer"]
    index.write_text(content.replace(name, own).replace('"began":1', '"began":2'))
    store.refresh()
    assert {row.play.sample for row in store.rows()} == {"b@1", "b@2"}


def test_places_that_a_record_cannot_have_are_damage(tmp_path: Path):
    write(tmp_path, sample())
    store = read(tmp_path)
    line = store.play.lines[0]
    for place in (
        {"offset": 2**63},
        {"offset": -1},
        {"bytes": 10**13},
        {"bytes": -1},
        {"line": -1},
        {"line": 9},
    ):
        with pytest.raises(NoRecord, match="damaged"):
            store.record(msgspec.structs.replace(line, **place))
    os.unlink(next((tmp_path / FOLDER).glob("*.gz")))
    os.mkfifo(tmp_path / FOLDER / writer.shard_name("play", _header(store).writer, 0))
    with pytest.raises(NoRecord, match="not a regular file"):
        read(tmp_path).record(line)


def _header(store: RolloutStore) -> Header:
    header = store._indexes[0].header
    assert header is not None
    return header


def test_another_version_of_the_format_is_named(tmp_path: Path):
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "play-x.index.jsonl").write_text('{"rollouts":9,"family":"later"}\n{"id":1}\n')
    (folder / "play-y.index.jsonl").write_text("{}\n")
    (folder / "play-z.index.jsonl").write_text("\0\xff\n")
    store = read(tmp_path)
    assert (
        store.problems[0] == "play-x.index.jsonl: format 9; this version of realhf reads format 1"
    )
    assert [problem.partition(": ")[2] for problem in store.problems[1:]] == [
        "no index of rollouts"
    ] * 2


def test_a_resumed_run_takes_back_what_was_rolled_back(tmp_path: Path):
    """Steps 5 and 6 were lost with the checkpoint of step 4; step 6 then draws another task under
    the number."""
    write(tmp_path, *(sample(id=f"t@{step}", step=step) for step in (4, 5, 6)))
    write(tmp_path, trained(["t@4"], 3), trained(["t@5"], 4), trained(["t@6"], 5))
    write(tmp_path, sample(id="sampled/t/0", step=5, split="eval/sampled"))
    write(tmp_path, sample(id="t@5", step=5, outcomes=[outcome(0.25)]), sample(id="u@6", step=6))
    write(tmp_path, trained(["t@5"], 4), trained(["u@6"], 5))
    rows = list(read(tmp_path).rows())
    assert sorted({row.play.sample for row in rows}) == ["sampled/t/0", "t@4", "t@5", "u@6"]
    assert [row.play.reward for row in rows if row.play.id == "t@5/0"] == [0.25]
    assert {row.train.step for row in rows if row.train} == {4, 5, 6}


def test_a_resumed_run_counts_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the clock alone everything that the resumed run made would have been taken back by the
    killed one."""
    now = 1.7e9
    monkeypatch.setattr(time, "time", lambda: now)
    write(tmp_path, *(sample(id=f"t@{step}", step=step) for step in (4, 5)))
    now -= 3600
    write(tmp_path, sample(id="t@5", step=5, outcomes=[outcome(0.25)]), sample(id="t@6", step=6))
    write(tmp_path, sample(id="t@6", step=6, outcomes=[outcome(0.75)]))
    rows = list(read(tmp_path).rows())
    assert [(row.play.id, row.play.reward) for row in rows if row.play.row == 0] == [
        ("t@4/0", 1.0),
        ("t@5/0", 0.25),
        ("t@6/0", 0.75),
    ]


def test_a_later_attempt_counts_and_a_stream_takes_nothing_back(tmp_path: Path):
    """Finished samples of an asynchronous run survive its end; those in play are played again."""
    options = {"worker": "rollout_worker/0", "by_step": False}
    write(tmp_path, sample(id="a@0", step=5), sample(id="b@1", step=6), **options)  # type: ignore[arg-type]
    write(tmp_path, sample(id="b@1", step=5, attempt=1, outcomes=[outcome(0.5)]), **options)  # type: ignore[arg-type]
    rows = {row.play.id: row.play for row in read(tmp_path).rows()}
    assert rows["a@0/0"].reward == 1.0 and (rows["b@1/0"].reward, rows["b@1/0"].attempt) == (0.5, 1)


@pytest.mark.slow
def test_a_killed_process_loses_at_most_what_it_had_not_flushed(tmp_path: Path):
    code = (
        "import sys, time, pathlib\n"
        "from realhf.monitor.rollouts import writer\n"
        "from realhf.monitor.rollouts.records import Selection\n"
        "from tests.monitor.rollouts.made_rollouts import sample\n"
        "writer.FLUSH_S = 0.05\n"
        "recorder = writer.RolloutWriter(pathlib.Path(sys.argv[1]), 'w/0', Selection(), "
        "limit_bytes=10**9)\n"
        "for number in range(10**6):\n"
        "    recorder.record_played(sample(id=f's@{number}'))\n"
        "    time.sleep(0.001)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[3]
    )
    store = RolloutStore(tmp_path)
    due = time.monotonic() + 60
    while len(store.play.lines) < 40 and time.monotonic() < due:
        store.refresh()
        time.sleep(0.01)
    process.kill()
    process.wait(60)
    store.refresh()
    assert len(store.play.lines) >= 40 and not any(problem for problem in store.problems)
    assert all(store.record(line)["id"] == line.id for line in store.play.lines)


def test_recording_stops_at_its_bound_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                       monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    monkeypatch.setattr(writer, "FLUSH_S", 0.01)
    recorder = RolloutWriter(tmp_path, "w/0", ALL, limit_bytes=3000)
    due = time.monotonic() + 60
    number = 0
    while recorder.keeps and time.monotonic() < due:
        recorder.record_played(sample(id=f"s@{number}"))
        number += 1
        time.sleep(0.002)
    recorder.record_played(sample(id="late"))
    recorder.close()
    store = read(tmp_path)
    assert 0 < len(store.play.lines) < 2 * number
    assert (
        "recording stopped: the folder of rollouts holds 3000 bytes (monitor.rollout_bytes)"
        in store.problems[0]
    )
    assert (
        len(
            [
                r
                for r in caplog.records
                if "no longer recorded" in r.message and r.levelno == logging.WARNING
            ]
        )
        == 1
    )


@pytest.mark.parametrize("fault", ["gone", "full", "file"])
def test_a_disk_that_fails_stops_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str
):
    monkeypatch.setattr(writer, "FLUSH_S", 0.01)
    if fault == "file":
        (tmp_path / FOLDER).write_text("in the way")
    if fault == "full":

        def full(file: int, data: bytes) -> int:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr("realhf.monitor.rollouts.writer.os.write", full)
    recorder = RolloutWriter(tmp_path, "w/0", ALL, limit_bytes=2**30)
    recorder.record_played(sample())
    if fault == "gone":
        due = time.monotonic() + 60
        while not list(tmp_path.glob("*/*.index.jsonl")) and time.monotonic() < due:
            time.sleep(0.002)
        shutil.rmtree(tmp_path / FOLDER)
    due = time.monotonic() + 60
    while recorder.keeps and time.monotonic() < due:
        recorder.record_played(sample())
        time.sleep(0.002)
    recorder.record_trained(trained(["make-bucket@0"]))
    recorder.close()
    recorder.close()
    assert not recorder.keeps
    assert len([r for r in caplog.records if "no longer recorded" in r.message]) == 1


def test_a_reward_may_be_a_large_integer(tmp_path: Path):
    """One that no index could hold would end the recording of everything after it."""
    write(tmp_path, sample(outcomes=[outcome(2**70, status="finished")]), sample(id="next@1"))
    assert [row.play.reward for row in read(tmp_path).rows()] == [2.0**70, 1.0, 0.0]


def test_a_rollout_that_cannot_be_described_is_lost_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write(tmp_path, sample(id="bad@0", texts=_broken), sample())
    assert {row.play.sample for row in read(tmp_path).rows()} == {"make-bucket@0"}
    assert "cannot be described" in caplog.text


def _broken(ids: object) -> list[str]:
    raise RuntimeError("no tokenizer")


def test_the_choice_is_that_of_whole_groups_and_the_same_everywhere(tmp_path: Path):
    config = MonitorConfig(rollouts="16", rollout_tokens=0.5)
    selection = build_selection(config, n_seqs=16, group_size=8)
    assert selection == Selection(2 / 16, 0.5)
    ids = [f"task@{number}" for number in range(4000)]
    chosen = [name for name in ids if selection.selects(name)]
    assert 400 < len(chosen) < 600
    assert 0.4 < sum(map(selection.selects_tokens, chosen)) / len(chosen) < 0.6
    assert build_selection(MonitorConfig(rollouts="0"), n_seqs=16, group_size=8).share == 0
    assert build_selection(MonitorConfig(), n_seqs=16, group_size=8).share == 1
    recorder = RolloutWriter(tmp_path, "w/0", Selection(0.125, 0.5), limit_bytes=2**30)
    for name in ids[:64]:
        recorder.record_played(sample(id=name))
    recorder.record_trained(trained(ids[:64]))
    recorder.close()
    store = read(tmp_path)
    assert (
        {line.sample for line in store.play.lines}
        == {line.sample for line in store.train.lines}
        == {name for name in ids[:64] if selection.selects(name)}
    )
    tokens = {line.sample for line in store.play.lines if line.has_tokens}
    assert tokens == {line.sample for line in store.train.lines if line.has_tokens} != set()


def test_nothing_is_written_where_nothing_is_kept(tmp_path: Path):
    recorder = RolloutWriter(tmp_path, "w/0", Selection(0.0), limit_bytes=2**30)
    recorder.record_played(sample())
    recorder.close()
    assert not recorder.keeps and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["some", "-1", "1.5", "²"])
def test_a_number_of_rollouts_is_a_number(value: str):
    assert "monitor.rollouts=" in next(MonitorConfig(rollouts=value).problems("monitor"))
    assert [*MonitorConfig(rollouts="8").problems("monitor")] == []


def test_lines_hold_what_the_page_filters_by():
    play = PlayLine(id="a/b/3", time=1.0, step=2)
    train = TrainLine(id="a/b/3", time=1.0, step=2)
    assert (play.sample, play.row, train.sample) == ("a/b", 3, "a/b")
