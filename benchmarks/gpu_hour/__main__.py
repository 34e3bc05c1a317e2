"""The first hour on a GPU: is this machine able to train, and does everything come out right? In
ten minutes.

    python -m benchmarks.gpu_hour [--gpu-device cuda] [--only PART ...] [--output out/gpu_hour.json]
    python -m benchmarks.gpu_hour --gpu-device=cpu     # a rehearsal with small shapes

Every part runs in a process of its own, within a deadline, and is left out where one that it needs
has failed. A line is printed as it ends; the JSON file at the end has the same as figures, and
contains no paths and no names of this machine or its user, so that it can be sent to others. Exit
status: 0 all passed, 1 something failed or was left out, 2 there is no GPU. docs/gpu.md describes
the parts and the file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu_hour.part_process import INTERRUPTED, run_part
from benchmarks.gpu_hour.parts import PARTS, Part
from benchmarks.gpu_hour.recording import Setting
from benchmarks.gpu_hour.report import (
    FAILED,
    LEFT_OUT,
    SCHEMA,
    Line,
    PartResult,
    Report,
    format_line,
    table,
)
from realhf import __version__
from realhf.base.installation import IMPORT_ROOT, git_state
from realhf.launch.vllm_choice import find_executable

OUTPUT = Path("out") / "gpu_hour.json"
CPU_VLLM = IMPORT_ROOT / ".venv-vllm" / "bin" / "vllm"
"""Where ``make test-vllm`` installs vLLM for the CPU."""


def main() -> int:
    """Run the parts, print lines and the table, and write the report."""
    options = _parse()
    if options.list:
        for part in PARTS:
            print(f"{part.name:<9} {part.deadline_s:4.0f} s at most  {part.content}")
        return 0
    if options.gpu_device == "cuda" and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} sees none here, so nothing was run; "
            "make test-gpu ARGS=--gpu-device=cpu rehearses it on the CPU"
        )
        return 2
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    folder = Path(tempfile.mkdtemp(prefix="gpu-hour-"))
    model = options.model.absolute() if options.model is not None else None
    setting = Setting(options.gpu_device, folder, _find_vllm(options), model)
    report = run_parts(chosen, setting)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report.to_json(), encoding="utf-8")
    print(f"\n{table(report.parts)}\n{report.seconds / 60:.1f} minutes, {options.output}")
    if report.passed:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"output of the parts: {folder}")
    print(f"next: {report.next}")
    return 0 if report.passed else 1


def run_parts(chosen: Sequence[Part], setting: Setting) -> Report:
    """Run the parts in order and return the report; after Ctrl-C, the rest is left out."""
    started = datetime.now(UTC)
    start_s = time.monotonic()
    done: list[PartResult] = []
    interrupted = False
    for part in chosen:
        obstacle = "Ctrl-C" if interrupted else part.find_obstacle(done)
        if obstacle:
            line = Line(part.name, LEFT_OUT, 0.0, f"because of {obstacle}")
            print(format_line(part.name, line), flush=True)
            done.append(PartResult(part.name, LEFT_OUT, 0.0, (line,)))
            continue
        result = run_part(
            part, setting, lambda line, part=part: print(format_line(part.name, line), flush=True)
        )
        done.append(result)
        interrupted = any(line.name == INTERRUPTED for line in result.lines)
    state = git_state(IMPORT_ROOT)
    passed = not any(part.status in (FAILED, LEFT_OUT) for part in done)
    return Report(
        schema=SCHEMA,
        started=started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=round(time.monotonic() - start_s, 1),
        device=setting.device,
        project=__version__,
        commit=f"{state['commit'] or ''}{'+' if state['modified'] else ''}",
        passed=passed,
        parts=tuple(done),
        next=find_next(done, setting),
    )


def find_next(done: Sequence[PartResult], setting: Setting) -> str:
    """Return the command to run next."""
    failed = [part.name for part in done if part.status in (FAILED, LEFT_OUT)]
    rehearsal = "" if setting.cuda else "--gpu-device=cpu "
    if failed:
        return f"make test-gpu ARGS='{rehearsal}--only {' '.join(failed)}'"
    if not setting.cuda:
        return "make test-gpu, on a machine with a GPU"
    if setting.vllm is None:
        return "make vllm-cuda, then make test-gpu"
    return "python benchmarks/gpu.py, which measures rates for a quarter of an hour"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_hour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpu-device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=[part.name for part in PARTS],
        metavar="PART",
        help="run these parts (--list shows them)",
    )
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FILE", help=f"the report ({OUTPUT})"
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="PROGRAM",
        help="program that starts vLLM (that of make vllm-cuda; in a rehearsal of make test-vllm)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="pretrained model that the part vllm serves, instead of one with random weights",
    )
    options = parser.parse_args()
    for path, name in ((options.vllm, "--vllm"), (options.model, "--model")):
        if path is not None and not path.exists():
            parser.error(f"{name}={path}: there is no such file")
    return options


def _find_vllm(options: argparse.Namespace) -> Path | None:
    if options.vllm is not None:
        return options.vllm.absolute()
    if options.gpu_device == "cuda":
        return find_executable("vllm")
    return CPU_VLLM if CPU_VLLM.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
