"""The first hour on a GPU, on a CPU: the program, its report, and parts that fail, hang or die."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.gpu_hour import __main__ as program
from benchmarks.gpu_hour.device_tests import FASTEST_FIRST, FOLDER, order_files
from benchmarks.gpu_hour.models import build_model, make_config
from benchmarks.gpu_hour.part_process import run_part
from benchmarks.gpu_hour.parts import PARTS, Part
from benchmarks.gpu_hour.recording import Setting
from benchmarks.gpu_hour.report import (
    FAILED,
    LEFT_OUT,
    PASSED,
    SKIPPED,
    Line,
    PartResult,
    read_report,
    scrub,
)
from benchmarks.gpu_hour.steps import StepShape
from benchmarks.harness.gpu_figures import Shape, train_operations
from realhf.base.installation import IMPORT_ROOT
from tests.benchmarks.hour_parts import die, fail, hang

NAMES = [part.name for part in PARTS]


def setting_in(folder: Path, device: str = "cpu") -> Setting:
    return Setting(device, folder, None, None)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpu_hour", *arguments])
    return program.main()


def test_the_list_names_every_part_and_what_it_needs_comes_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    for number, part in enumerate(PARTS):
        assert {*part.needs} <= {*NAMES[:number]}, part.name


def test_without_a_gpu_one_line_says_how_to_rehearse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(monkeypatch, "--output", str(tmp_path / "report.json")) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no GPU: ") and "make test-gpu ARGS=--gpu-device=cpu" in line
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_not_there_is_an_error_of_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, "--gpu-device=cpu", "--vllm", "/no/such/vllm")
    assert "--vllm=/no/such/vllm: there is no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_report_is_what_was_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out" / "report.json"
    options = ("--gpu-device=cpu", "--only", "versions", "--output", str(path))
    assert call(monkeypatch, *options) == 0
    printed = capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    report = read_report(text)
    (part,) = report.parts
    assert report.passed and report.device == "cpu" and part.name == "versions"
    assert part.lines[1].figures["torch"] == torch.__version__
    for line in part.lines:
        assert line.name in printed and line.result in printed
    assert printed.splitlines()[-1] == f"next: {report.next}"
    check_anonymous(text)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rehearsal_without_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "CPU_VLLM", tmp_path / "vllm")
    path = tmp_path / "report.json"
    assert call(monkeypatch, "--gpu-device=cpu", "--output", str(path)) == 0, (
        capsys.readouterr().out
    )
    text = path.read_text(encoding="utf-8")
    report = read_report(text)
    assert [(part.name, part.status) for part in report.parts] == [
        (name, SKIPPED if name in ("vllm", "run") else PASSED) for name in NAMES
    ]
    lines = [line for part in report.parts for line in part.lines]
    skipped = [line.result for line in lines if line.status == SKIPPED]
    assert any("make test-vllm installs one" in reason for reason in skipped)
    assert any(reason.startswith("not on a CPU: ") for reason in skipped)
    traces = [line.figures for line in lines if line.name.startswith("their trace, ")]
    assert len(traces) == 2 and all(figures["traced_gib"] > 0 for figures in traces)
    check_anonymous(text)


def check_anonymous(text: str) -> None:
    """Nothing in a report tells whose machine it was."""
    assert str(IMPORT_ROOT) not in text and str(Path.home()) not in text
    assert f'"{platform.node()}"' not in text and "/tmp/" not in text


def test_texts_lose_folders_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "box7.lab.example")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    assert scrub(f"in {IMPORT_ROOT}/realhf/api/model.py:7") == "in realhf/api/model.py:7"
    assert scrub(f"cwd={IMPORT_ROOT}") == "cwd=."
    assert scrub("/home/alice/models/m1: no such file") == ".../m1: no such file"
    assert (
        scrub("open('~/x/y.json') by alice@box7.lab.example") == "open('.../y.json') by USER@HOST"
    )
    assert scrub("box7 and box71") == "HOST and box71"
    kept = "http://127.0.0.1:80/pause a/b c /dev/shm 3/4 GB/s </s> /proc/self"
    assert scrub(kept) == kept


def test_a_report_is_read_strictly() -> None:
    line = Line("one", PASSED, 1.0, "fine", {"peak_gib": 1.5, "reach": [[True]]})
    part = PartResult("kernels", PASSED, 1.0, (line,))
    setting = setting_in(Path("nowhere"))
    report = dataclasses.replace(program.run_parts([], setting), parts=(part,))
    assert read_report(report.to_json()) == report
    made = json.loads(report.to_json())
    for change, message in (
        ({"schema": "another"}, "schema"),
        ({"device": ...}, "device"),
        ({"parts": [{**made["parts"][0], "status": "good"}]}, "'good' is none of"),
    ):
        changed = {name: value for name, value in {**made, **change}.items() if value is not ...}
        with pytest.raises(ValueError, match=message):
            read_report(json.dumps(changed))


def test_the_next_command_repeats_what_failed() -> None:
    done = [
        PartResult("versions", PASSED, 1.0, ()),
        PartResult("kernels", FAILED, 1.0, ()),
        PartResult("tests", LEFT_OUT, 0.0, ()),
    ]
    cpu = setting_in(Path("nowhere"))
    cuda = dataclasses.replace(cpu, device="cuda")
    expected = "make test-gpu ARGS='--gpu-device=cpu --only kernels tests'"
    assert program.find_next(done, cpu) == expected
    assert program.find_next(done, cuda) == expected.replace("--gpu-device=cpu ", "")
    assert program.find_next(done[:1], cpu).startswith("make test-gpu")
    assert program.find_next(done[:1], cuda).startswith("make vllm-cuda")
    with_vllm = dataclasses.replace(cuda, vllm=Path("vllm"))
    assert program.find_next(done[:1], with_vllm).startswith("python benchmarks/gpu.py")


def test_steps_fill_their_micro_batches_and_count_prompts_once() -> None:
    config = make_config(setting_in(Path("nowhere")))
    shape = StepShape(256, 32, 32)
    assert (shape.groups, shape.rows) == (2, 16)
    sample = shape.draw(config.vocab_size)
    lengths = [length for group in sample.seqlens["packed_input_ids"] for length in group]
    assert lengths == [64] * 16
    ids = (sample.data or {})["packed_input_ids"].view(2, 8, 64)
    assert all(torch.equal(ids[:, 0, :32], ids[:, row, :32]) for row in range(8))
    assert not torch.equal(ids[:, 0, 32:], ids[:, 1, 32:])
    size = Shape.of(config)
    alone = train_operations(size, [64] * 16, 16 * 32)
    per_prompt = train_operations(size, [32], 0)
    assert shape.operations(size) == pytest.approx(alone - 14 * per_prompt)


def test_the_served_model_has_favourites_and_doubts() -> None:
    """Tied to a narrow embedding, it would only repeat its last token, and show no differences."""
    torch.set_num_threads(1)
    model = build_model(
        make_config(setting_in(Path("nowhere"))), torch.device("cpu"), torch.float32
    )
    ids = torch.arange(3, 51)[None]
    with torch.inference_mode():
        logits = model(ids).logits[0]
    log_p = logits.log_softmax(-1)
    assert 2.5 < float(logits.std()) < 3.5
    assert 2.0 < float(-(log_p.exp() * log_p).sum(-1).mean()) < 6.0
    assert float(log_p.exp()[torch.arange(48), ids[0]].mean()) < 0.05


def test_every_file_of_the_tests_is_played() -> None:
    files = order_files()
    assert {*files} == {f"tests/gpu/{path.name}" for path in FOLDER.glob("test_*.py")}
    known = [f"tests/gpu/test_{name}.py" for name in FASTEST_FIRST]
    assert files[: len(known)] == known, "a new file comes last until its time is known"


def play(run: object, folder: Path, deadline_s: float = 60.0) -> tuple[PartResult, list[Line]]:
    shown: list[Line] = []
    part = Part("made", "for this test", deadline_s, run)  # pyright: ignore[reportArgumentType]
    return run_part(part, setting_in(folder), shown.append), shown


@pytest.mark.slow
def test_a_failed_check_is_a_line_and_a_needed_one_ends_the_part(tmp_path: Path) -> None:
    result, shown = play(fail, tmp_path)
    assert result.status == FAILED and [*result.lines] == shown
    assert [(line.status, line.result) for line in shown] == [
        (PASSED, "done"),
        (FAILED, "x is wrong"),
        (SKIPPED, "not on a CPU: it needs two GPUs"),
        (FAILED, "ValueError: two lines"),
    ]
    assert shown[0].figures["pid"] != os.getpid() and shown[1].figures == {"half": 1}


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    (result, shown) = play(hang, tmp_path, deadline_s=0.3)
    assert [line.name for line in shown] == ["a first thing", "the deadline"]
    assert result.status == FAILED and "not done within 1.5 s" in shown[1].result
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(shown[0].figures["pid"]).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_part_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    result, (line,) = play(die, tmp_path)
    assert result.status == FAILED
    assert line.result == "the process ended with 3: no kernel image is available"


def test_what_needs_a_failed_part_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = []

    def run(part: Part, setting: Setting, show: object) -> PartResult:
        played.append(part.name)
        status = FAILED if part.name == "kernels" else PASSED
        return PartResult(part.name, status, 1.0, (Line("x", status, 1.0, "y"),))

    monkeypatch.setattr(program, "run_part", run)
    report = program.run_parts(PARTS, setting_in(Path("nowhere")))
    left_out = {part.name for part in report.parts if part.status == LEFT_OUT}
    assert left_out == {"tests", "steps", "vllm", "run"}
    assert not report.passed and played == ["versions", "kernels"]
    assert "because of kernels" in capsys.readouterr().out
