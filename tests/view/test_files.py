"""What a person writes about a run, and the report of a run in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realhf.api.passport import PASSPORT_FILE, Counts, Passport
from realhf.monitor.run_files import record_death, record_placement
from realhf.view.__main__ import main
from realhf.view.report import MAX_STEPS, write_report
from realhf.view.run import mask_secrets
from realhf.view.run_folder import MAX_CHARACTERS, MAX_TAGS, RunNote, read_note
from tests.view.runs import client, kept_answers, made_up, write_run


def test_what_is_written_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command without words, and by the page with the run and in the list of runs."""
    run = write_run(tmp_path / "run")
    assert (
        main(
            [
                "note",
                str(run),
                "lr too high?\nagain with half",
                "--tag",
                "baseline",
                "--tag",
                "draft",
            ]
        )
        == 0
    )
    assert main(["note", str(run), "--untag", "draft"]) == 0
    capsys.readouterr()
    assert main(["note", str(run)]) == 0
    assert capsys.readouterr().out == "[baseline]\nlr too high?\nagain with half\n"
    page = client(run)
    note = page.get("/api/runs/0/about").json()["note"]
    assert note == {"text": "lr too high?\nagain with half", "tags": ["baseline"]}
    assert page.get("/api/runs").json()["runs"][0]["tags"] == ["baseline"]
    assert main(["note", str(run), "", "--untag", "baseline"]) == 0
    assert read_note(run) == RunNote()


def test_the_passport_of_the_environment_is_told_in_a_line(tmp_path: Path) -> None:
    page = client(run := write_run(tmp_path / "run"))
    about = lambda: page.get("/api/runs/0/about").json()["passport"]
    assert about() == "", "a run that plays no environment has none"
    (run / "config.yaml").write_text("env: {path: shop.py:Shop}")
    assert "no passport" in about()
    Passport("shop", "check", "2026-11-28", "", {"beside": Counts(wrong=4, paid=1)}).write(
        run / PASSPORT_FILE
    )
    assert about().startswith("shop: of 4 wrong plays 1 were paid (95 %: ")
    assert about() in str(kept_answers(write_report(run)))


def test_a_note_that_changes_is_a_change_of_the_run(tmp_path: Path) -> None:
    """So that a page that follows the run shows it."""
    page = client(run := write_run(tmp_path / "run"))
    before = page.get("/api/changes?run=0").json()["runs"]["0"]
    assert main(["note", str(run), "text"]) == 0
    after = page.get("/api/changes?run=0").json()["runs"]["0"]
    assert {part for part in after if after[part] != before[part]} == {"about"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x" * (MAX_CHARACTERS + 1)], "characters"),
        (["--tag", "two\nlines"], "--tag"),
        (["--tag", " "], "--tag"),
        ([word for number in range(MAX_TAGS + 1) for word in ("--tag", str(number))], "33 tags"),
    ],
)
def test_what_is_no_note_is_refused_and_nothing_written(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main(["note", str(run), *words]) == 2
    assert said in capsys.readouterr().err and not (run / "note.json").exists()


def test_only_a_run_has_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["note", str(tmp_path), "text"]) == 2
    assert "is not a run" in capsys.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"text": 1, "tags": "ab"}', '{"tags": [1, null, {"a": 1}]}', "[" * 100_000],
)
def test_a_file_that_somebody_spoilt_is_no_note(tmp_path: Path, content: str) -> None:
    (tmp_path / "note.json").write_text(content)
    assert read_note(tmp_path) == RunNote()


def test_half_a_character_takes_nobody_the_page(tmp_path: Path) -> None:
    """JSON can name one, and so can bytes of a command line that are no UTF-8; neither the run nor
    the list of all runs is lost over it."""
    run = write_run(tmp_path / "run")
    assert main(["note", str(run), "caf\udce9"]) == 0
    page = client(run)
    assert page.get("/api/runs/0/about").json()["note"]["text"] == "caf?"
    (run / "note.json").write_text(json.dumps({"text": "\ud800", "tags": ["\ud800 draft"]}))
    assert page.get("/api/runs").json()["runs"][0]["tags"] == ["? draft"]


def test_a_huge_file_is_cut_and_a_terminal_is_not_driven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    (run / "note.json").write_text(
        json.dumps({"text": "\x1b]0;owned\x07" + "x" * 10**6, "tags": ["t" * 999] * 999})
    )
    assert len(read_note(run).text) == MAX_CHARACTERS and read_note(run).tags == ("t" * 64,)
    assert main(["note", str(run)]) == 0
    assert "\x1b" not in capsys.readouterr().out


OWN = "/api/runs/0"


def test_the_report_of_a_killed_run_says_what_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "grpo" / "x<y"
    for place in (folder, Path(__file__)):
        assert (
            main(["report", str(place)]) == 1 and f"{place} is not a run" in capsys.readouterr().err
        )
    write_run(folder, ended=False)
    begun = {"at": "a", "completed_steps": 0, "changed": {}}
    again = {
        "at": "b",
        "completed_steps": 2,
        "changed": {"ppo.lr": [0.1, 0.2], "env.token": ["one", "two"]},
    }
    (folder / "provenance.json").write_text(
        json.dumps({"arguments": ["seed=3"], "launches": [begun, again]})
    )
    (folder / "nonfinite.jsonl").write_text('{"step": 2, "call": "actor_train"}\n{"step')
    record_death(folder, "generation/0", "killed: no heartbeat", "it is started again")
    record_placement(folder, "a", "rollout_worker/0")
    record_placement(folder, "a", lost="its wire was cut")
    assert main(["report", str(folder)]) == 0 and capsys.readouterr().out.strip() == str(
        folder / "report.html"
    )
    answers = kept_answers(folder / "report.html")
    about = answers[f"{OWN}/about"]
    assert [event["what"] for event in about["events"]] == [
        "resumed with ppo.lr: 0.1 → 0.2, env.token: (not shown) → (not shown)",
        "generation/0: killed: no heartbeat; it is started again",
        "host a was lost: its wire was cut",
        "actor_train skipped its update: loss or gradient was not finite",
    ]
    assert [event["step"] for event in about["events"]] == [2, None, None, 2]
    assert about["hosts"] == {"a": ["rollout_worker/0"]}
    (run,) = answers["/api/runs"]["runs"]
    assert run["state"] == "running" and run["folder"] == "x<y", (
        "of this machine's folders only the name"
    )
    assert "<title>grpo/x&lt;y</title>" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("env.args.api_key=sk-123", "env.args.api_key=(not shown)"),
        ("env.args={api_key:sk-123,size:3}", "env.args={api_key:(not shown),size:3}"),
        ("env.token=Bearer sk-123, or other", "env.token=(not shown)"),
        ("env.passphrase=[all that is, in it]", "env.passphrase=(not shown)"),
        (
            "env.args={'password': 'two words, no', size: 3}",
            "env.args={'password': (not shown), size: 3}",
        ),
        ("env.args.apiKey=sk-123", "env.args.apiKey=(not shown)"),
        ("stream.url=http://me:p@w@host:1/a", "stream.url=http://(not shown)@host:1/a"),
        ("stream.url=http://me:pw@host:1/a", "stream.url=http://(not shown)@host:1/a"),
        ("stream.token_file=/etc/token", "stream.token_file=/etc/token"),
        ("gen.max_new_tokens=256", "gen.max_new_tokens=256"),
        ("monitor.rollout_tokens=1", "monitor.rollout_tokens=1"),
    ],
)
def test_values_of_secrets_are_left_out(given: str, shown: str):
    assert mask_secrets(given) == shown


def test_no_secret_of_the_configuration_is_in_a_report(tmp_path: Path):
    env = "env:\n  url: http://me:hush1@host/\n  args:\n    api_key: hush2\n  token: [hush3]\n"
    run = write_run(tmp_path / "run", config=f"{env}fileroot: /home/hush4\n")
    (run / "provenance.json").write_text(json.dumps({"arguments": ["env.args.api_key=hush5"]}))
    answers = json.dumps(kept_answers(write_report(run)))
    assert "api_key" in answers and "(not shown)" in answers and "hush" not in answers


@pytest.mark.slow
def test_of_a_long_run_every_so_many_steps_are_kept_and_the_last_one(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=0)
    count = 2 * MAX_STEPS + 7
    rows = [
        {"step": step, "reward/mean": float("nan") if step == count else 0.5}
        for step in range(1, count + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = kept_answers(write_report(run))
    metrics = answers[f"{OWN}/metrics"]
    assert len(metrics["steps"]) <= MAX_STEPS and metrics["steps"][-1] == count
    assert metrics["columns"]["reward/mean"][-1] == "NaN" and len(
        metrics["columns"]["reward/mean"]
    ) == len(metrics["steps"])
    assert "one of every 3 steps" in answers["/api/runs"]["runs"][0]["text"]


@pytest.mark.slow
def test_the_last_rollouts_fill_the_room_that_there_is(tmp_path: Path):
    made_up(tmp_path / "run", failing=0.0, steps=3, groups=4)
    everything = kept_answers(write_report(tmp_path / "run"))[f"{OWN}/rollout"]
    assert len(everything) == 3 * 4 * 8
    size = len(json.dumps(everything))
    some = kept_answers(write_report(tmp_path / "run", size // 2))[f"{OWN}/rollout"]
    assert 20 < len(some) < 70
    assert min(one["step"] for one in some.values()) >= 2, "the newest"
    assert kept_answers(write_report(tmp_path / "run", 0))[f"{OWN}/rollout"] == {}
