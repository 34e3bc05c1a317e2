"""Cost of keeping rollouts, beside the step that makes them.

    python -m benchmarks.monitor.recording [--steps 40] [--groups 16] [--group-size 8] [--turns 3] [--tokens 400]
                                           [--share 0.25] [--step-seconds S]
    python -m benchmarks.monitor.recording --pairs 3 [-- key=value ...]

The first form hands made-up steps of the default job's size to a recorder, as fast as it takes
them, and prints CPU time of a step: of the caller, who waits for nothing else, and of caller and
writer together (of the process, so that a busy machine does not blur it); and bytes on the disk.
``--step-seconds``: the step that this is a part of.

The second form trains in turns with and without recording, the same seed, and prints the median of
``time/step`` without the first step of each run, and the ratio for every pair. Use it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from realhf.api.environment import AssistantMessage
from realhf.api.rollout import PlayedTurn, RolloutOutcome
from realhf.api.trace import PlayedSample, TrainedRows
from realhf.monitor.rollouts.records import Selection
from realhf.monitor.rollouts.writer import RolloutWriter

ANSWER = (
    "ok; buckets: alpha-bucket, beta-bucket; region eu-central-1; nothing else was found in this "
    "account " * 2
)
COMMAND = (
    "aws s3api put-bucket-versioning --bucket light-seal-test --versioning-configuration "
    "Status=Enabled"
)


def outcome(turns: int, tokens: int, member: int) -> RolloutOutcome:
    """Return an episode with this number of turns and tokens; a third of the tokens are sampled."""
    random = np.random.default_rng(member)
    mask = [place % 3 == 0 for place in range(tokens)]
    said = AssistantMessage(COMMAND, text=COMMAND)
    observation = {
        "command_success": True,
        "command_output": ANSWER,
        "task_achieved": False,
        "steps_left": 9,
    }
    turn = PlayedTurn(
        COMMAND, ANSWER, 0.25, said, [{"role": "user", "content": ANSWER}], metrics={"progress": 0.25},
        info={"observation": observation},
    )  # fmt: skip
    return RolloutOutcome(
        "max_turns", random.integers(0, 2000, 60).tolist(), random.integers(0, 2000, tokens).tolist(),
        (-random.random(tokens)).tolist(), [3 if sampled else -1 for sampled in mask], mask, 0.25, False, 0.25,
        (turn,) * turns, "task", "beginner", member, turn_starts=[tokens // turns * number for number in range(turns)],
        turn_rewards=[0.25] * turns, opening=[{"role": "user", "content": ANSWER}],
    )  # fmt: skip


def made_up(given: argparse.Namespace) -> None:
    """Record invented steps and print the cost per step."""
    names = {token: f"t{token}" for token in range(2000)}
    group = [outcome(given.turns, given.tokens, member) for member in range(given.group_size)]
    rows = given.groups * given.group_size
    length = given.tokens + 59
    flat = np.random.default_rng(0).random(rows * length).astype(np.float32)
    mask = np.tile(np.arange(length) % 3 == 0, rows)
    with tempfile.TemporaryDirectory() as folder:
        recorder = RolloutWriter(
            Path(folder), "bench/0", Selection(1.0, given.share), limit_bytes=2**34
        )
        began = time.process_time()
        caller = 0.0
        for step in range(given.steps):
            ids = [f"task@{step * given.groups + number}" for number in range(given.groups)]
            mine = time.thread_time()
            for name in ids:
                recorder.record_played(
                    PlayedSample(
                        name,
                        group,
                        step + 1,
                        env="aws",
                        texts=lambda ids: [names[token] for token in ids],
                    )
                )
            counts = np.full(given.groups, given.group_size)
            recorder.record_trained(
                TrainedRows(
                    step, ids, counts, np.full(rows, length), mask, flat, flat, flat, flat, flat, flat > 2,
                    np.zeros(len(flat), np.int32),
                )
            )  # fmt: skip
            caller += time.thread_time() - mine
        recorder.close()
        spent = time.process_time() - began
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        kept = sum(path.read_bytes().count(b"\n") - 1 for path in files if path.name.startswith("play-") and
                   path.name.endswith(".index.jsonl"))  # fmt: skip
    if kept != rows * given.steps:
        raise SystemExit(
            f"error: {kept} of {rows * given.steps} rollouts were kept; give fewer --steps"
        )
    each = 1000 / given.steps
    print(f"{rows} rollouts a step: caller {caller * each:.2f} ms, in all {spent * each:.1f} ms "
          f"CPU a step, "
          f"{size / given.steps / 1024:.0f} KiB a step")  # fmt: skip
    if given.step_seconds:
        print(
            f"{100 * spent / given.steps / given.step_seconds:.2f} % of a step of "
            f"{given.step_seconds:g} s"
        )


def pairs(given: argparse.Namespace) -> None:
    """Train with and without recording in turns, and print the median step times."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.pairs):
            order = ("all", "0") if number % 2 == 0 else ("0", "all")
            seconds = {
                kept: trained(Path(folder), f"{kept}-{number}", kept, given.options)
                for kept in order
            }
            ratios.append(seconds["all"] / seconds["0"])
            print(
                f"pair {number}: with {seconds['all']:.3f} s, without {seconds['0']:.3f} s, "
                f"{ratios[-1]:.4f}"
            )
    print(f"median ratio {statistics.median(ratios):.4f}")


def trained(folder: Path, name: str, kept: str, options: Sequence[str]) -> float:
    """Run a training job and return its median step time in seconds. ``kept``: value of
    ``monitor.rollouts``."""
    arguments = [
        *(options or ["experiment=grpo_aws", "total_train_steps=8"]),
        f"fileroot={folder}",
        "trial_name=default",
    ]
    subprocess.run(
        [sys.executable, "-m", "realhf.launch", *arguments, f"monitor.rollouts={kept}", f"experiment_name={name}",
         "monitor.progress=false"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = (folder / name / "default" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.median(json.loads(line)["time/step"] for line in lines[1:])


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("steps", 40),
        ("groups", 16),
        ("group-size", 8),
        ("turns", 3),
        ("tokens", 400),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    if given.pairs:
        pairs(given)
    else:
        made_up(given)


if __name__ == "__main__":
    main()
