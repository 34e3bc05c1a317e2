"""Rollouts as the page gets them: columns, one of them whole, its group, and those that hold a text."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.view.made_up_run import HOSTILE, MadeUpRun
from realhf.monitor.rollouts.format import FORMAT, PLAY, Header, PlayLine
from realhf.monitor.rollouts.writer import Shards
from realhf.view.run import Run
from tests.view.runs import client
from tests.view.test_spans import unpacked


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """Three steps of four groups of eight."""
    run = MadeUpRun(tmp_path / "run")
    for _ in range(3):
        run.add_step(4, of=3)
    run.close()
    return tmp_path / "run"


def lines(folder: Path, family: str) -> list[dict]:
    (index,) = (folder / "rollouts").glob(f"{family}-*.index.jsonl")
    return [json.loads(line) for line in index.read_text().splitlines()[1:]]


def test_the_columns_say_what_the_index_says(made_up: Path):
    header, arrays = unpacked(client(made_up).get("/api/runs/0/rollouts").content)
    played = {line["id"]: line for line in lines(made_up, "play")}
    trained = {line["id"]: line for line in lines(made_up, "train")}
    assert header["count"] == len(played) == 96
    for at in range(96):
        name = f"{header['tables']['sample'][arrays['sample'][at]]}/{arrays['row'][at]}"
        play, train = played.pop(name), trained.get(name)
        assert header["tables"]["task"][arrays["task"][at]] == play["task"]
        assert header["tables"]["failure"][arrays["failure"][at]] == (play.get("failure") or "")
        assert arrays["reward"][at] == pytest.approx(play.get("reward", np.nan), nan_ok=True), "a failure is no zero"
        assert arrays["success"][at] == play.get("success", False)
        assert not arrays["branch"][at]
        assert arrays["staleness"][at] == (-1 if train is None else train["staleness"])
        assert arrays["advantage"][at] == pytest.approx(np.nan if train is None else train["advantage"], nan_ok=True)
    assert any(line.get("failure") for line in lines(made_up, "play"))


def test_a_step_that_is_added_arrives_and_a_folder_that_vanishes_is_still_shown(tmp_path: Path):
    run = MadeUpRun(tmp_path / "run")
    with client(tmp_path / "run") as page:
        run.add_step(1)
        page.get("/api/runs")
        assert unpacked(page.get("/api/runs/0/rollouts").content)[0]["count"] == 8
        run.add_step(1)
        assert unpacked(page.get("/api/runs/0/rollouts").content)[0]["count"] == 16
        run.close()
        shutil.rmtree(tmp_path / "run")
        header, _ = unpacked(page.get("/api/runs/0/rollouts").content)
        assert header["count"] == 16
        assert "gone" in header["problems"][0]


def test_a_run_that_was_made_again_in_the_same_folder_is_read_anew(tmp_path: Path):
    """With the same options it has as many rollouts as before; they are others."""
    header: list[dict] = []
    with client(tmp_path / "run") as page:
        for seed in (1, 2):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            run = MadeUpRun(tmp_path / "run", seed=seed, failing=0.0)
            run.add_step(4)
            run.close()
            page.get("/api/runs")
            header.append(unpacked(page.get("/api/runs/0/rollouts").content)[0])
    assert header[0]["count"] == header[1]["count"] == 32
    assert header[0]["tables"]["sample"] != header[1]["tables"]["sample"]


def test_why_recording_stopped_is_told_though_no_rollout_follows(tmp_path: Path):
    run = MadeUpRun(tmp_path / "run")
    run.add_step(1)
    with client(tmp_path / "run") as page:
        assert unpacked(page.get("/api/runs/0/rollouts").content)[0]["problems"] == []
        (index,) = (tmp_path / "run" / "rollouts").glob("play-*.index.jsonl")
        with index.open("a") as file:
            file.write('{"note":"recording stopped: the disk is full","time":1.0}\n')
        (problem,) = unpacked(page.get("/api/runs/0/rollouts").content)[0]["problems"]
        assert "the disk is full" in problem
    run.close()


def test_numbers_that_no_table_holds_are_the_nearest_that_it_does(tmp_path: Path):
    shards = Shards(tmp_path / "rollouts", Header(rollouts=FORMAT, family=PLAY, writer="w", worker="w", began=0.0))
    shards.append([], [], [PlayLine(id=f"s/{'9' * 30}", time=1.0, step=10**30, length=-(10**25), turns=2)])
    shards.close()
    _, arrays = unpacked(Run(tmp_path, "run").rollouts.packed())
    assert [int(arrays[name][0]) for name in ("step", "length", "turns")] == [2**31 - 1, -(2**31), 2]


def test_one_rollout_comes_with_its_records_and_its_group(made_up: Path):
    wanted = next(line for line in lines(made_up, "train") if line.get("has_tokens"))
    with client(made_up) as page:
        found = page.get("/api/runs/0/rollout", params={"id": wanted["id"]}).json()
        assert found["play"]["id"] == found["train"]["id"] == wanted["id"]
        assert len(found["play"]["tokens"]["ids"]) == len(found["train"]["ratio"]) == wanted["n_tokens"]
        sample = wanted["id"].rpartition("/")[0]
        assert [one["id"] for one in found["group"]] == [f"{sample}/{row}" for row in range(8)]
        assert page.get("/api/runs/0/rollout", params={"id": "no/0"}).status_code == 404


def test_a_record_that_is_damaged_is_said_and_the_rest_is_shown(made_up: Path):
    (shard,) = (made_up / "rollouts").glob("play-*.jsonl.gz")
    shard.write_bytes(shard.read_bytes()[:100])
    found = client(made_up).get("/api/runs/0/rollout", params={"id": lines(made_up, "play")[0]["id"]}).json()
    assert "damaged" in found["play"]["problem"]
    assert found["line"]["task"]


def test_a_text_is_found_whatever_its_case_and_names_of_fields_are_not(made_up: Path):
    def ids(text: str) -> tuple[set[str], dict]:
        found = [json.loads(line) for line in page.get("/api/runs/0/search", params={"text": text}).text.splitlines()]
        return {name for item in found[:-1] for name in item["ids"]}, found[-1]

    failed = {line["id"] for line in lines(made_up, "play") if line.get("failure")}
    with client(made_up) as page:
        assert ids("an ERROR occurred") == (failed, {"done": True, "searched": 96, "of": 96})
        assert ids("tool_calls")[0] == set(), "the name of a field is no word of a conversation"
        assert len(ids(HOSTILE[:30])[0]) == 12


def test_a_search_ends_at_its_deadline_and_says_how_far_it_came(made_up: Path):
    found = list(Run(made_up, "run").rollouts.search("bucket", deadline=0.0, stopped=lambda: False))
    assert found == [{"done": False, "searched": 0, "of": 96}]


@pytest.mark.parametrize(
    ("text", "written", "found"),
    [
        ("/tmp/a", '"look at /TMP/a"', True),
        ("/tmp/a", r'"look at \/tmp\/a"', True),
        ("bucket", r'"\u0062ucket"', True),
        ("strasse", '"Straße"', True),
        ("strasse", r'"Stra\u00dfe"', True),
        ("300 k", '"300 \u212a"', True),  # the sign of the kelvin
        ('a "b', r'"A \"b"', True),
        ("c:\\x", r'"c:\\X"', True),
        ("straße", '"strasse"', True),
        ("a\nb", r'"a\nb"', True),
        ("nb", r'"a\nb"', False),
        ("message", '"m"', False),
        ("", '"m"', True),
    ],
)
def test_a_text_is_found_however_its_record_spells_it(tmp_path: Path, text: str, written: str, found: bool):
    """Records are looked through as they are written before they are decoded, and nothing is missed by that."""
    record = b'{"id":"s/0","message":%s,"messages":[]}' % written.encode()
    shards = Shards(tmp_path / "rollouts", Header(rollouts=FORMAT, family=PLAY, writer="w", worker="w", began=0.0))
    shards.append([record], [PlayLine(id="s/0", time=1.0, step=1)])
    shards.close()
    *ids, done = Run(tmp_path, "run").rollouts.search(text, time.monotonic() + 60, lambda: False)
    assert done["done"] and ids == [{"ids": ["s/0"]}] * found
