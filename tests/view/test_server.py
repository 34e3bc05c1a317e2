"""What the server tells the page about runs, whatever lies in their folders, and whom it tells nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import time
from importlib import resources
from pathlib import Path

import pytest

from realhf.view.run import Run
from realhf.view.run_folder import is_locked
from tests.view.runs import add_step, client, write_run


def states(*folders: Path) -> list[str]:
    return [run["state"] for run in client(*folders).get("/api/runs").json()["runs"]]


def test_metrics_arrive_by_column_and_only_what_was_added(tmp_path: Path):
    run = write_run(tmp_path / "run")
    with client(run) as page:
        first = page.get("/api/runs/0/metrics").json()
        assert (first["start"], first["steps"]) == (0, [1, 2, 3])
        assert first["columns"] == {"reward/mean": [0.1, 0.2, 0.3], "time/step": [1.5, 1.5, 1.5]}
        add_step(run, {"step": 4, "reward/mean": float("nan"), "new": float("inf"), "text": "no number"})
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
        file.write("[]\nnonsense\n" + "[" * 100_000 + '\n{"step": "1"}\n{"step": 4}\n{"step": 5, "torn')
    found = client(run).get("/api/runs/0/metrics").json()
    assert (found["steps"], found["unreadable"]) == ([1, 2, 3, 4], 4)


def test_a_folder_is_called_what_it_is(tmp_path: Path):
    ended, killed = write_run(tmp_path / "ended"), write_run(tmp_path / "killed", ended=False)
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
        assert page.get("/api/runs/3/metrics").json()["steps"] == [1, 2, 3], "what was read is not lost"


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
        for part in ("metrics", "evaluations", "advisories", "about", "spans", "rollouts", "search?text=a"):
            assert page.get(f"/api/runs/0/{part}").status_code == 200


def test_integers_beyond_all_floats_are_infinite(tmp_path: Path):
    run = write_run(tmp_path / "run")
    add_step(run, {"step": 4, "policy/grad_norm": 10**400, "reward/mean": -(10**400)})
    with client(run) as page:
        columns = page.get("/api/runs/0/metrics").json()["columns"]
        assert (columns["policy/grad_norm"][3], columns["reward/mean"][3]) == ("Infinity", "-Infinity")
        assert {one["id"] for one in page.get("/api/runs/0/advisories").json()} == {"policy_not_finite"}


def test_every_answer_says_which_server_it_is_of(tmp_path: Path):
    """A page that stays open while another server takes the port would mix their runs."""
    run = write_run(tmp_path / "run")
    first, second = client(run), client(run)
    paths = ("/", "/api/runs", "/api/runs/0/metrics", "/api/runs/9/metrics")
    named = [{page.get(path).headers["X-Realhf-Server"] for path in paths} for page in (first, second)]
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
    with client(*[write_run(tmp_path / name, config=config) for name, config in folders.items()]) as page:
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
        assert (point["step"], point["way"], point["group"], point["low"]) == (0, "sampled", "overall", 0.4)
        (run / "evaluations.json").write_text('{"1": [], "x": {}, "2": {"sampled": {"a": 3, "b": {"success": "0"}}}}')
        assert page.get("/api/runs/0/evaluations").json() == [
            {"step": 2, "way": "sampled", "group": "b", "success": None}
        ]


def test_a_change_is_told_at_once_and_silence_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("realhf.view.server.CHANGES_S", 0.0)
    run = write_run(tmp_path / "run")
    with client(run, follow=True) as page:
        first = page.get("/api/changes", params={"run": 0, "seen": ""}).json()
        add_step(run, {"step": 4})
        second = page.get("/api/changes", params={"run": 0, "seen": first["seen"]}).json()
        changed = {part for part, stamp in second["runs"]["0"].items() if stamp != first["runs"]["0"][part]}
        assert changed == {"metrics"}
        assert page.get("/api/changes", params={"run": 0, "seen": second["seen"]}).json()["seen"] == second["seen"]


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


@pytest.mark.parametrize("path", ["/api/runs/7/metrics", "/api/runs/-1/metrics", "/static/..%2Fserver.py", "/static/x"])
def test_what_is_not_there_is_not_found(tmp_path: Path, path: str):
    assert client(write_run(tmp_path / "run")).get(path).status_code == 404


def test_nothing_can_be_sent(tmp_path: Path):
    assert client(write_run(tmp_path / "run")).post("/api/runs").status_code == 405


def test_the_charts_are_drawn_by_the_library_that_the_readme_beside_it_names():
    look = resources.files("realhf.base").joinpath("look")
    told = re.findall(r"`(\S+)` \| `dist/\S+` \| `([0-9a-f]{64})`", look.joinpath("uplot.README.md").read_text())
    found = [(name, hashlib.sha256(look.joinpath(name).read_bytes()).hexdigest()) for name, _ in told]
    assert len(told) == 2 and found == told
