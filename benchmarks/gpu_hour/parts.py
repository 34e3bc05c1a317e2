"""The parts of the first hour, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.gpu_hour.device_tests import run_tests
from benchmarks.gpu_hour.kernels import check_kernels
from benchmarks.gpu_hour.recording import Recorder, Setting
from benchmarks.gpu_hour.report import FAILED, LEFT_OUT, PartResult
from benchmarks.gpu_hour.served import check_served
from benchmarks.gpu_hour.steps import check_steps
from benchmarks.gpu_hour.training_run import check_run
from benchmarks.gpu_hour.versions import check_versions

_REHEARSAL_FACTOR = 5.0
"""Factor by which deadlines are longer in a rehearsal, whose cores may be busy with other work."""


@dataclass(frozen=True)
class Part:
    """A part of the program."""

    name: str
    """Name, as ``--only`` takes it."""
    content: str
    """What it does, in one line."""
    deadline_s: float
    """Seconds on a GPU after which it is ended."""
    run: Callable[[Recorder, Setting], None]
    """The part itself."""
    needs: tuple[str, ...] = ()
    """Parts without whose success it would fail, or prove nothing."""

    def limit_s(self, setting: Setting) -> float:
        """Return the seconds after which the part is ended."""
        return self.deadline_s if setting.cuda else _REHEARSAL_FACTOR * self.deadline_s

    def find_obstacle(self, done: Sequence[PartResult]) -> str:
        """Return which of the parts that it needs did not pass; "" if it can begin. A part that was
        not asked for, or skipped, is no obstacle."""
        failed = [
            part.name
            for part in done
            if part.name in self.needs and part.status in (FAILED, LEFT_OUT)
        ]
        return " and ".join(failed)


PARTS: tuple[Part, ...] = (
    Part(
        "versions",
        "GPUs, driver, torch, CUDA, NCCL, vLLM; memory, peers and limits",
        60.0,
        check_versions,
    ),
    Part(
        "kernels",
        "bf16 products, attention without padding, fp32 logits, digests, copies",
        120.0,
        check_kernels,
    ),
    Part(
        "tests",
        "tests/gpu to the first failure, and ranks over NCCL in bf16",
        300.0,
        run_tests,
        ("kernels",),
    ),
    Part(
        "steps",
        "GRPO steps of 0.6B in bf16: utilisation, peak memory beside the plan and the trace",
        240.0,
        check_steps,
        ("kernels",),
    ),
    Part(
        "vllm",
        "a server's log-probabilities beside the trainer's, weights that change under load",
        420.0,
        check_served,
        ("kernels",),
    ),
    Part(
        "run",
        "an asynchronous run with vLLM, whose server and launcher are killed",
        300.0,
        check_run,
        ("vllm",),
    ),
)
"""All parts, in the order in which they run."""
