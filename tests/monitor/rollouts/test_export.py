"""Rollouts leave a run as JSON lines, as a Parquet table and as logs that Inspect's own package
reads."""

from __future__ import annotations

import json
import resource
import subprocess
import zipfile
from pathlib import Path

import pytest

from realhf.monitor.rollouts.export import ExportFailed, export, export_command
from realhf.monitor.rollouts.records import Selection
from realhf.monitor.rollouts.writer import RolloutWriter
from tests.monitor.rollouts.made_rollouts import outcome, sample, trained

SIDE = Path(__file__).parents[3] / ".venv-inspect" / "bin" / "python"
NASTY = "\x00</script>\ud800\u2028"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two groups, of which one has a failure and hostile text, and an evaluation."""
    folder = tmp_path / "run"
    folder.mkdir()
    recorder = RolloutWriter(folder, "model_worker/0", Selection(), limit_bytes=2**30)
    recorder.record_played(sample(id="make-bucket@0"))
    failed = outcome(None, status="timeout", message="no answer", turns=(), completion_ids=[], logprobs=[], versions=[],
                     loss_mask=[], turn_starts=[])  # fmt: skip
    recorder.record_played(
        sample(id=f"../{NASTY}", outcomes=[outcome(0.25, text=NASTY, status="max_turns"), failed])
    )
    recorder.record_trained(trained(["make-bucket@0"]))
    recorder.record_played(
        sample(id="eval/sampled/5/t/0", step=5, split="eval/sampled", outcomes=[outcome()])
    )
    recorder.close()
    return folder


def test_json_lines_hold_everything(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.jsonl"
    assert export_command([str(run), "--to", "jsonl", str(out)]) == 0
    assert capsys.readouterr().out == f"5 rollouts in {out}\n"
    first, second, nasty, failed, evaluated = map(json.loads, out.read_bytes().splitlines())
    assert (first["id"], first["reward"], first["step_trained"], first["train_staleness"]) == (
        "make-bucket@0/0", 1.0, 5, 1,
    )  # fmt: skip
    assert (
        first["record"]["messages"][1]["content"] == "make a bucket"
        and first["trained"]["first_token"] == 3
    )
    assert second["train_n_tokens"] == 0 and "trained" not in second
    assert nasty["record"]["messages"][2]["content"] == NASTY and nasty["step_trained"] is None
    assert (failed["failure"], failed["reward"]) == ("timeout", None)
    assert evaluated["split"] == "eval/sampled" and not list(tmp_path.glob("*.partial"))


def test_logs_of_inspect_have_a_sample_for_each_instance_and_no_path_of_its_id(
    run: Path, tmp_path: Path
):
    assert export_command([str(run), "--to", "inspect", str(tmp_path / "logs")]) == 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "eval-sampled-step5.eval",
        "train.eval",
    ]
    with zipfile.ZipFile(tmp_path / "logs" / "train.eval") as log:
        names = log.namelist()
        samples = [json.loads(log.read(name)) for name in names if name.startswith("samples/")]
        header = json.loads(log.read("header.json"))
    assert all(name.count("/") <= 1 and ".." not in name and name.isascii() for name in names)
    assert [each["epoch"] for each in samples] == [1, 2, 1, 2]
    assert samples[3]["scores"] == {} and samples[3]["error"]["message"] == "timeout: no answer"
    assert header["results"]["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(1.25 / 3)


def test_what_cannot_be_exported_is_told_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert export_command([str(tmp_path), "--to", "jsonl", str(tmp_path / "out")]) == 1
    assert "there are no rollouts" in capsys.readouterr().err
    assert export_command([str(run), "--to", "jsonl", str(tmp_path / "no" / "out")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert export_command([str(run), "--to", "jsonl", str(tmp_path)]) == 1
    assert "expected a file" in capsys.readouterr().err
    for shard in run.glob("rollouts/play-*.gz"):
        shard.unlink()
    assert export_command([str(run), "--to", "jsonl", str(tmp_path / "out")]) == 0
    assert "of 5 the record cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["jsonl", "inspect"])
def test_a_disk_that_is_full_keeps_no_half_of_an_export(run: Path, tmp_path: Path, kind: str):
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(ExportFailed, match="File too large"):
            export(run, kind, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not out.exists() or not list(out.iterdir())
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.skipif(not SIDE.is_file(), reason="Inspect is not installed: make test-inspect")
def test_inspect_and_pyarrow_read_what_was_written(run: Path, tmp_path: Path):
    script = f"""
import sys
sys.path.insert(0, {str(SIDE.parents[2])!r})
import json
from pathlib import Path
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries
logs = list_eval_logs({str(tmp_path / "logs")!r})
log = read_eval_log({str(tmp_path / "logs" / "train.eval")!r})
summaries = read_eval_log_sample_summaries({str(tmp_path / "logs" / "train.eval")!r})
import pyarrow.parquet as parquet
from realhf.monitor.rollouts.export import export
export(Path({str(run)!r}), "parquet", Path({str(tmp_path / "out.parquet")!r}))
table = parquet.read_table({str(tmp_path / "out.parquet")!r}).to_pylist()
one = read_eval_log_sample({str(tmp_path / "logs" / "train.eval")!r}, "make-bucket@0", 1)
print(json.dumps([
    len(logs), log.status, log.eval.task, len(log.samples), len(summaries),
    [s.scores["reward"].value if s.scores else s.error.message for s in log.samples],
    [m.role for m in one.messages], one.messages[2].tool_calls[0].function,
    [[r["id"], r["reward"], r["failure"], r["train_n_tokens"]] for r in table],
    json.loads(table[0]["messages"])[1]["content"],
]))
"""
    assert export_command([str(run), "--to", "inspect", str(tmp_path / "logs")]) == 0
    done = subprocess.run(
        [SIDE, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    logs, status, task, count, summaries, scores, roles, function, table, told = json.loads(
        done.stdout
    )
    assert (logs, status, task, count, summaries) == (2, "success", "aws/train", 4, 4)
    assert (
        sorted(map(str, scores)) == ["0.0", "0.25", "1.0", "timeout: no answer"]
        and function == "shell"
    )
    assert roles == ["system", "user", "assistant", "tool"]
    assert table[0] == ["make-bucket@0/0", 1.0, None, 3] and table[3][1:] == [None, "timeout", None]
    assert told == "make a bucket"
