"""What the server tells the page about runs, whatever lies in their folders, and whom it tells
nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import struct
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.view.made_up_run import HOSTILE, MadeUpRun
from realhf.monitor.rollouts.format import FORMAT, PLAY, Header, PlayLine
from realhf.monitor.rollouts.writer import ShardWriter
from realhf.monitor.run_files import record_placement
from realhf.monitor.trace import TraceWriter, trace_path
from realhf.view.run import Run
from realhf.view.run_data import RunSpans
from realhf.view.run_folder import is_locked
from tests.view import runs
from tests.view.runs import add_step, client, write_run


def states(*folders: Path) -> list[str]:
    return [run["state"] for run in client(*folders).get("/api/runs").json()["runs"]]


def test_metrics_arrive_by_column_and_only_what_was_added(tmp_path: Path):
    run = write_run(tmp_path / "run")
    with client(run) as page:
        first = page.get("/api/runs/0/metrics").json()
        assert (first["start"], first["steps"]) == (0, [1, 2, 3])
        assert first["columns"] == {"reward/mean": [0.1, 0.2, 0.3], "time/step": [1.5, 1.5, 1.5]}
        add_step(
            run, {"step": 4, "reward/mean": float("nan"), "new": float("inf"), "text": "no number"}
        )
        more = page.get("/api/runs/0/metrics", params={"epoch": first["epoch"], "start": 3}).json()
        assert (more["start"], more["steps"]) == (3, [4])
        assert more["columns"] == {"reward/mean": ["NaN"], "new": ["Infinity"], "text": [None]}


def test_a_run_that_went_on_from_an_earlier_step_is_read_anew(tmp_path: Path):
    run = write_run(tmp_path / "run")
    with client(run) as page:
        epoch = page.get("/api/runs/0/metrics").json()["epoch"]
        shutil.copy(run / "metrics.jsonl", tmp_path / "other")
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "other").write_text("".join(lines[:2]))
        os.replace(tmp_path / "other", run / "metrics.jsonl")
        again = page.get("/api/runs/0/metrics", params={"epoch": epoch, "start": 3}).json()
        assert (again["start"], again["steps"]) == (0, [1, 2])


def test_lines_without_sense_are_counted_and_left_out(tmp_path: Path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            "[]\nnonsense\n" + "[" * 100_000 + '\n{"step": "1"}\n{"step": 4}\n{"step": 5, "torn'
        )
    found = client(run).get("/api/runs/0/metrics").json()
    assert (found["steps"], found["unreadable"]) == ([1, 2, 3, 4], 4)


def test_a_folder_is_called_what_it_is(tmp_path: Path):
    ended = write_run(tmp_path / "ended")
    killed = write_run(tmp_path / "killed", ended=False)
    for path in (killed, *killed.rglob("*")):
        os.utime(path, (1e9, 1e9))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("nothing of a run")
    gone = write_run(tmp_path / "gone")
    with client(ended, killed, tmp_path / "foreign", gone) as page:
        assert page.get("/api/runs").json()["runs"][3]["state"] == "finished"
        shutil.rmtree(gone)
        found = page.get("/api/runs").json()["runs"]
        assert [run["state"] for run in found] == ["finished", "stopped", "foreign", "gone"]
        assert "stopped after 3 steps" in found[1]["text"]
        assert "moved or deleted" in found[3]["text"]
        assert page.get("/api/runs/3/metrics").json()["steps"] == [1, 2, 3], (
            "what was read is not lost"
        )


def test_a_killed_run_whose_files_are_from_the_future_does_not_go_on(tmp_path: Path):
    """Its clock was ahead, or ours was set back."""
    run = write_run(tmp_path / "run", ended=False)
    for path in (run, *run.rglob("*")):
        os.utime(path, (time.time() + 3600,) * 2)
    (found,) = client(run).get("/api/runs").json()["runs"]
    assert found["state"] == "stopped" and "yet to come" in found["text"]


def test_a_link_that_leads_nowhere_stops_nobody_from_following(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "trace" / "old.jsonl").symlink_to(tmp_path / "nowhere")
    before = Run(run, "run").stamps()["spans"]
    with (run / "trace" / "master.jsonl").open("a") as file:
        file.write("{}\n")
    assert Run(run, "run").stamps()["spans"] != before


def test_a_pipe_in_a_run_folder_holds_up_nothing(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "rollouts").mkdir()
    for name in ("placements.jsonl", "trace/a.jsonl", "rollouts/play-a.index.jsonl"):
        os.mkfifo(run / name)
    with client(run) as page:
        for part in (
            "metrics",
            "evaluations",
            "advisories",
            "about",
            "spans",
            "rollouts",
            "search?text=a",
        ):
            assert page.get(f"/api/runs/0/{part}").status_code == 200


def test_integers_beyond_all_floats_are_infinite(tmp_path: Path):
    run = write_run(tmp_path / "run")
    add_step(run, {"step": 4, "policy/grad_norm": 10**400, "reward/mean": -(10**400)})
    with client(run) as page:
        columns = page.get("/api/runs/0/metrics").json()["columns"]
        assert (columns["policy/grad_norm"][3], columns["reward/mean"][3]) == (
            "Infinity",
            "-Infinity",
        )
        assert {one["id"] for one in page.get("/api/runs/0/advisories").json()} == {
            "policy_not_finite"
        }


def test_every_answer_says_which_server_it_is_of(tmp_path: Path):
    """A page that stays open while another server takes the port would mix their runs."""
    run = write_run(tmp_path / "run")
    first = client(run)
    second = client(run)
    paths = ("/", "/api/runs", "/api/runs/0/metrics", "/api/runs/9/metrics")
    named = [
        {page.get(path).headers["X-Realhf-Server"] for path in paths} for page in (first, second)
    ]
    assert len(named[0]) == len(named[1]) == 1 and named[0] != named[1]


def test_a_run_whose_lock_is_held_goes_on(tmp_path: Path):
    import fcntl

    run = write_run(tmp_path / "run", ended=False)
    os.utime(run / "metrics.jsonl", (1e9, 1e9))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_locked(run / ".lock")
        assert states(run) == ["running"]
    assert not is_locked(run / ".lock")


def test_a_folder_of_runs_is_looked_through_and_new_ones_are_found(tmp_path: Path):
    write_run(tmp_path / "grpo" / "one")
    (tmp_path / "grpo" / "circle").symlink_to(tmp_path)
    with client(tmp_path) as page:
        assert [run["name"] for run in page.get("/api/runs").json()["runs"]] == ["grpo/one"]
        write_run(tmp_path / "grpo" / "a")
        found = page.get("/api/runs").json()["runs"]
        assert [(run["number"], run["name"]) for run in found] == [(0, "grpo/one"), (1, "grpo/a")]


def test_configuration_is_flat_and_bounded(tmp_path: Path):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for last, name in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]\n"
    wide = f"a: &a {{x: [{', '.join('x' * 99)}]}}\n"
    for last, name in zip("abcdefgh", "bcdefghi", strict=True):
        wide += f"{name}: &{name} {{{', '.join(f'{key}: *{last}' for key in 'abcdefghi')}}}\n"
    folders = {"run": "seed: 1\nppo:\n  lr: 0.1\n", "hostile": bomb, "wide": wide}
    with client(
        *[write_run(tmp_path / name, config=config) for name, config in folders.items()]
    ) as page:
        assert page.get("/api/runs/0/about").json()["config"] == {"seed": "1", "ppo.lr": "0.1"}
        began = time.process_time()
        assert len(page.get("/api/runs/1/about").content) < 100_000
        assert len(page.get("/api/runs/2/about").content) < 100_000
        assert time.process_time() - began < 20


def test_the_command_can_be_pasted_into_a_shell_whatever_it_holds(tmp_path: Path):
    run = write_run(tmp_path / "run")
    words = ["experiment=grpo", "env.tiers=[warmup]", "trial_name=a b; echo $(owned)"]
    (run / "provenance.json").write_text(json.dumps({"arguments": words}))
    command = client(run).get("/api/runs/0/about").json()["origin"]["command"]
    assert shlex.split(command) == ["python", "-m", "realhf.launch", *words]
    assert "'trial_name=a b; echo $(owned)'" in command


def test_evaluations_are_points_and_nonsense_is_left_out(tmp_path: Path):
    run = write_run(tmp_path / "run")
    with client(run) as page:
        (point,) = page.get("/api/runs/0/evaluations").json()
        assert (point["step"], point["way"], point["group"], point["low"]) == (
            0,
            "sampled",
            "overall",
            0.4,
        )
        (run / "evaluations.json").write_text(
            '{"1": [], "x": {}, "2": {"sampled": {"a": 3, "b": {"success": "0"}}}}'
        )
        assert page.get("/api/runs/0/evaluations").json() == [
            {"step": 2, "way": "sampled", "group": "b", "success": None}
        ]


def test_a_change_is_told_at_once_and_silence_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("realhf.view.server.CHANGES_S", 0.0)
    run = write_run(tmp_path / "run")
    with client(run, follow=True) as page:
        first = page.get("/api/changes", params={"run": 0, "seen": ""}).json()
        add_step(run, {"step": 4})
        second = page.get("/api/changes", params={"run": 0, "seen": first["seen"]}).json()
        changed = {
            part for part, stamp in second["runs"]["0"].items() if stamp != first["runs"]["0"][part]
        }
        assert changed == {"metrics"}
        assert (
            page.get("/api/changes", params={"run": 0, "seen": second["seen"]}).json()["seen"]
            == second["seen"]
        )


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8765"},
        {"Host": "127.0.0.1.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:8765"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ],
)
def test_foreign_hosts_and_pages_are_refused(tmp_path: Path, headers: dict[str, str]):
    run = write_run(tmp_path / "run")
    for path in ("/", "/api/runs", "/api/runs/0/metrics", "/static/app.js"):
        assert client(run).get(path, headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:8765", "[::1]:8765"])
def test_the_page_itself_is_served_with_a_strict_policy(tmp_path: Path, host: str):
    answer = client(write_run(tmp_path / "run")).get("/", headers={"Host": host})
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "<script>" not in answer.text
    assert " style=" not in answer.text


@pytest.mark.parametrize(
    "path", ["/api/runs/7/metrics", "/api/runs/-1/metrics", "/static/..%2Fserver.py", "/static/x"]
)
def test_what_is_not_there_is_not_found(tmp_path: Path, path: str):
    assert client(write_run(tmp_path / "run")).get(path).status_code == 404


def test_nothing_can_be_sent(tmp_path: Path):
    assert client(write_run(tmp_path / "run")).post("/api/runs").status_code == 405


def test_the_charts_are_drawn_by_the_library_that_the_readme_beside_it_names():
    look = resources.files("realhf.base").joinpath("look")
    told = re.findall(
        r"`(\S+)` \| `dist/\S+` \| `([0-9a-f]{64})`", look.joinpath("uplot.README.md").read_text()
    )
    found = [
        (name, hashlib.sha256(look.joinpath(name).read_bytes()).hexdigest()) for name, _ in told
    ]
    assert len(told) == 2 and found == told


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
        play = played.pop(name)
        train = trained.get(name)
        assert header["tables"]["task"][arrays["task"][at]] == play["task"]
        assert header["tables"]["failure"][arrays["failure"][at]] == (play.get("failure") or "")
        assert arrays["reward"][at] == pytest.approx(play.get("reward", np.nan), nan_ok=True), (
            "a failure is no zero"
        )
        assert arrays["success"][at] == play.get("success", False)
        assert not arrays["branch"][at]
        assert arrays["staleness"][at] == (-1 if train is None else train["staleness"])
        assert arrays["advantage"][at] == pytest.approx(
            np.nan if train is None else train["advantage"], nan_ok=True
        )
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
        assert "was removed" in header["problems"][0]


def test_a_run_that_was_made_again_in_the_same_folder_is_read_anew(tmp_path: Path):
    """With the same options it has as many rollouts as before; they are others."""
    header: list[dict] = []
    with client(tmp_path / "run") as page:
        for seed in (1, 2):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            runs.made_up(tmp_path / "run", seed=seed, failing=0.0, groups=4)
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
    shards = ShardWriter(
        tmp_path / "rollouts",
        Header(rollouts=FORMAT, family=PLAY, writer="w", worker="w", began=0.0),
    )
    shards.add(None, PlayLine(id=f"s/{'9' * 30}", time=1.0, step=10**30, length=-(10**25), turns=2))
    shards.flush()
    shards.close()
    _, arrays = unpacked(Run(tmp_path, "run").rollouts.pack())
    assert [int(arrays[name][0]) for name in ("step", "length", "turns")] == [
        2**31 - 1,
        -(2**31),
        2,
    ]


def test_one_rollout_comes_with_its_records_and_its_group(made_up: Path):
    wanted = next(line for line in lines(made_up, "train") if line.get("has_tokens"))
    with client(made_up) as page:
        found = page.get("/api/runs/0/rollout", params={"id": wanted["id"]}).json()
        assert found["play"]["id"] == found["train"]["id"] == wanted["id"]
        assert (
            len(found["play"]["tokens"]["ids"])
            == len(found["train"]["ratio"])
            == wanted["n_tokens"]
        )
        sample = wanted["id"].rpartition("/")[0]
        assert [one["id"] for one in found["group"]] == [f"{sample}/{row}" for row in range(8)]
        assert page.get("/api/runs/0/rollout", params={"id": "no/0"}).status_code == 404


def test_a_record_that_is_damaged_is_said_and_the_rest_is_shown(made_up: Path):
    (shard,) = (made_up / "rollouts").glob("play-*.jsonl.gz")
    shard.write_bytes(shard.read_bytes()[:100])
    found = (
        client(made_up)
        .get("/api/runs/0/rollout", params={"id": lines(made_up, "play")[0]["id"]})
        .json()
    )
    assert "damaged" in found["play"]["problem"]
    assert found["line"]["task"]


def test_a_text_is_found_whatever_its_case_and_names_of_fields_are_not(made_up: Path):
    def ids(text: str) -> tuple[set[str], dict]:
        found = [
            json.loads(line)
            for line in page.get("/api/runs/0/search", params={"text": text}).text.splitlines()
        ]
        return {name for item in found[:-1] for name in item["ids"]}, found[-1]

    failed = {line["id"] for line in lines(made_up, "play") if line.get("failure")}
    with client(made_up) as page:
        assert ids("an ERROR occurred") == (failed, {"done": True, "searched": 96, "of": 96})
        assert ids("tool_calls")[0] == set(), "the name of a field is no word of a conversation"
        assert len(ids(HOSTILE[:30])[0]) == 12


def test_a_search_ends_at_its_deadline_and_says_how_far_it_came(made_up: Path):
    found = list(
        Run(made_up, "run").rollouts.search("bucket", deadline=0.0, is_stopped=lambda: False)
    )
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
def test_a_text_is_found_however_its_record_spells_it(
    tmp_path: Path, text: str, written: str, found: bool
):
    """Records are looked through as they are written before they are decoded, and nothing is missed
    by that."""
    record = b'{"id":"s/0","message":%s,"messages":[]}' % written.encode()
    shards = ShardWriter(
        tmp_path / "rollouts",
        Header(rollouts=FORMAT, family=PLAY, writer="w", worker="w", began=0.0),
    )
    shards.add(record, PlayLine(id="s/0", time=1.0, step=1))
    shards.flush()
    shards.close()
    *ids, done = Run(tmp_path, "run").rollouts.search(text, time.monotonic() + 60, lambda: False)
    assert done["done"] and ids == [{"ids": ["s/0"]}] * found


TYPES = {
    "u8": np.uint8,
    "i32": np.int32,
    "f64": np.float64,
    "f32": np.float32,
    "u16": np.uint16,
    "u32": np.uint32,
}


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    assert (4 + length) % 8 == 0
    arrays = {
        name: np.frombuffer(
            data, TYPES[place["kind"]], place["length"], 4 + length + place["offset"]
        )
        for name, place in header["arrays"].items()
    }
    return header, arrays


def test_spans_carry_their_names_and_only_new_ones_are_sent(tmp_path: Path):
    tracer = TraceWriter(trace_path(tmp_path, "model_worker/0"), "model_worker/0")
    tracer.record("train/actor_train", 10_000_000_000, 12_000_000_000)
    tracer.record("sample", 11_000_000_000, 11_500_000_000, line="player 1", id="s-7")
    tracer.instant("step", step=4)
    tracer.close()
    spans = RunSpans(tmp_path)
    header, arrays = unpacked(spans.pack(0, 0))
    assert header["processes"] == [{"pid": 3000, "name": "model_worker/0"}]
    names = [header["names"][number] for number in arrays["name"]]
    samples = [header["samples"][number] for number in arrays["sample"]]
    began = (arrays["began"] + header["base"]).round(6).tolist()
    found = sorted(zip(names, samples, began, arrays["seconds"].tolist(), strict=True))
    assert found == [("sample", "s-7", 11.0, 0.5), ("train/actor_train", "", 10.0, 2.0)]
    assert [step for _, step in header["steps"]] == [4]
    again, arrays = unpacked(spans.pack(header["epoch"], 2))
    assert (again["start"], len(arrays["began"])) == (2, 0)


def test_processes_of_several_hosts_stand_by_their_host(tmp_path: Path):
    for process in ("rollout_worker/0", "model_worker/0", "master"):
        TraceWriter(trace_path(tmp_path, process), process).close()
    for host, process in (
        ("b", "rollout_worker/0"),
        ("b", "model_worker/0"),
        ("c", "rollout_worker/0"),
    ):
        record_placement(tmp_path, host, process)
    header, _ = unpacked(RunSpans(tmp_path).pack(0, 0))
    names = [process["name"] for process in header["processes"]]
    assert names == ["launcher · master", "b · model_worker/0", "c · rollout_worker/0"]


def test_lines_without_sense_are_left_out(tmp_path: Path):
    (tmp_path / "trace").mkdir()
    text = '{"name": 3}\nnonsense\n{"name":"a","ph":"X","ts":5,"pid":1,"tid":1,"dur":-4}\n'
    (tmp_path / "trace" / "x.jsonl").write_text(text)
    _, arrays = unpacked(RunSpans(tmp_path).pack(0, 0))
    assert arrays["seconds"].tolist() == [0.0]


@pytest.mark.nightly
def test_of_too_many_spans_the_older_half_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("realhf.view.run_data.MAX_SPANS", 10)
    (tmp_path / "trace").mkdir()
    event = {"name": "a", "ph": "X", "pid": 1, "tid": 1, "dur": 1}
    (tmp_path / "trace" / "x.jsonl").write_text(
        "".join(json.dumps(event | {"ts": ts}) + "\n" for ts in range(1, 12))
    )
    header, arrays = unpacked(RunSpans(tmp_path).pack(0, 0))
    assert len(arrays["began"]) == 6
    assert header["epoch"] == 1
