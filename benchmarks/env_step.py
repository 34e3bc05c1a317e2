"""Environment time of one GRPO step: 8 sessions x 6 turns, through the real server and
MultiTurnEnvPool.

A scripted policy stands in for the model, so that nothing but the environment is timed: wire, AWS
CLI, MiniStack, grading. In the same run the usual design plays the same commands: one `aws` process
per command, the sessions concurrent.

    python benchmarks/env_step.py [--repeats 20] [--baseline-repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from realhf.api.environment import AssistantMessage
from realhf.api.model import GenOutput, GenRequest
from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.aws.tasks.task import Task

SESSIONS = 8
TURNS = 6
WARM_UP = 3
TARGET_MS = 300
LABELS = {
    "step_ms": "step with its resets",
    "turns_ms": "its turns alone",
    "process_per_command_ms": "one process per command",
}
Messages = Sequence[Mapping[str, Any]]
_READS = (
    "aws s3api list-buckets",
    "aws sqs list-queues",
    "aws dynamodb list-tables",
    "aws iam list-users",
    "aws logs describe-log-groups",
    "aws sns list-topics",
)


class ByteChat:
    """Chat format with one token per byte, which is sufficient for a policy that recites
    commands."""

    stop_ids = (256,)

    def opening(self, messages: Messages, tools: Messages = ()) -> list[int]:
        """Return the bytes of the messages."""
        del tools
        return [token for message in messages for token in message["content"].encode()]

    def following_messages(
        self, messages: Messages, *, ended: bool, tools: Messages = (), end: int | None = None
    ) -> list[int]:
        """Return the bytes of the messages."""
        del ended, end
        return self.opening(messages, tools)

    def parse(self, token_ids: Sequence[int], tools: Messages = ()) -> AssistantMessage:
        """Return the bytes as text. There are no tools."""
        del tools
        text = bytes(i for i in token_ids if i < 256).decode()
        return AssistantMessage(text, text=text, token_count=len(token_ids))


class ScriptedPolicy:
    """Policy that recites ``scripts[slot]``, one command per round."""

    def __init__(self, scripts: Sequence[Sequence[str]]) -> None:
        self.chat = ByteChat()
        self._scripts = scripts

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Return the next line of each script."""
        outputs = []
        for request in requests:
            ids = [*self._scripts[request.slot][round_index].encode(), 256]
            outputs.append(GenOutput(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
        return outputs

    def free(self, slots: Iterable[int]) -> None:
        """Do nothing: no state is kept."""
        del slots


def workload() -> tuple[list[Task], list[list[str]]]:
    """Return one multi-step task per session, and for each a script of six commands: the solution
    mixed with reads, so that the last command completes the task."""
    tasks = []
    scripts = []
    templates = [t for t in load_templates(["intermediate"]) if 2 <= len(t.solution) <= 3]
    for session in range(SESSIONS):
        task = instantiate(templates[session % len(templates)].task_id, seed=session)
        solution = [*task.solution]
        reads = [_READS[(session + i) % len(_READS)] for i in range(TURNS - len(solution))]
        script = []
        while solution:
            script += reads[:1] + solution[:1] if len(solution) > 1 else [*reads, *solution]
            reads = reads[1:]
            solution = solution[1:]
        tasks.append(task)
        scripts.append(script)
        assert len(script) == TURNS
    return tasks, scripts


def play_ours(
    pool: MultiTurnEnvPool, tasks: Sequence[Task], scripts: Sequence[Sequence[str]]
) -> tuple[float, float]:
    """Play one step. Return (milliseconds of environment time including resets, milliseconds of the
    turns alone)."""
    before = dict(pool.timings)
    resets = [{"task": task.to_json(), "chaos": False} for task in tasks]
    groups = pool.run_groups(
        resets, ScriptedPolicy(scripts), group_size=1, seeds=[t.seed for t in tasks]
    )
    assert all(group[0].achieved and len(group[0].turns) == TURNS for group in groups)
    env = pool.timings["env_s"] - before["env_s"]
    return 1000 * env, 1000 * (env - pool.timings["reset_s"] + before["reset_s"])


def play_process_per_command(slots: Sequence[Slot], scripts: Sequence[Sequence[str]]) -> float:
    """Play the same commands with a new ``aws`` process per command and all sessions concurrently,
    which is the usual design. Return the milliseconds."""
    aws = str(Path(sys.executable).parent / "aws")
    environment = {
        "PATH": os.defpath,
        "AWS_ACCESS_KEY_ID": "000000000000",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_PAGER": "",
        "AWS_EC2_METADATA_DISABLED": "true",
    }

    def play(slot: Slot, script: Sequence[str]) -> None:
        """Play a script with one ``aws`` process per command."""
        slot.reset()
        for command in script:
            argv = [aws, "--endpoint-url", slot.endpoint, *shlex.split(command)[1:]]
            done = subprocess.run(argv, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stderr}"

    began = time.perf_counter()
    with ThreadPoolExecutor(SESSIONS) as threads:
        list(threads.map(play, slots, scripts))
    return 1000 * (time.perf_counter() - began)


def measure(repeats: int, baseline_repeats: int) -> dict[str, list[float]]:
    """Measure both designs in turn, so that changes of the machine's load affect both, and return
    the milliseconds of each repeat."""
    tasks, scripts = workload()
    samples: dict[str, list[float]] = {"step_ms": [], "turns_ms": [], "process_per_command_ms": []}
    baseline = MiniStackPool(SESSIONS)
    try:
        baseline.start()
        slots = [baseline.acquire() for _ in range(SESSIONS)]
        limits: dict[str, Any] = {
            "max_turns": TURNS,
            "max_total_tokens": 1 << 16,
            "turn_tokens": 512,
        }
        with (
            EnvServerProcess(SESSIONS) as server,
            MultiTurnEnvPool(server.url, SESSIONS, **limits) as pool,
        ):
            for _ in range(WARM_UP):
                play_ours(pool, tasks, scripts)
            for repeat in range(repeats):
                step, turns = play_ours(pool, tasks, scripts)
                samples["step_ms"].append(step)
                samples["turns_ms"].append(turns)
                if (
                    repeat * baseline_repeats // repeats
                    != (repeat + 1) * baseline_repeats // repeats
                ):
                    samples["process_per_command_ms"].append(
                        play_process_per_command(slots, scripts)
                    )
    finally:
        baseline.stop()
    return samples


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, 95th percentile (nearest rank), minimum and maximum, in milliseconds."""
    ordered = sorted(samples)
    rank = max(0, -(-95 * len(ordered) // 100) - 1)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[rank],
        "min": ordered[0],
        "max": ordered[-1],
        "repeats": len(ordered),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--baseline-repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    samples = measure(arguments.repeats, arguments.baseline_repeats)
    figures: dict[str, Any] = {name: summary(values) for name, values in samples.items() if values}
    figures["host"] = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    figures["versions"] = {
        name: version(name) for name in ("ministack", "awscli", "websockets", "uvicorn")
    }
    print(
        f"{SESSIONS} sessions x {TURNS} turns on {os.cpu_count()} CPUs, milliseconds of "
        f"environment time"
    )
    for name, label in LABELS.items():
        if row := figures.get(name):
            print(
                f"  {label:24} "
                + "  ".join(f"{key} {row[key]:8.1f}" for key in ("median", "p95", "min", "max"))
            )
    ours = figures["step_ms"]
    theirs = figures.get("process_per_command_ms")
    if theirs:
        ratio = {
            "median": theirs["median"] / ours["median"],
            "min": theirs["min"] / ours["max"],
            "max": theirs["max"] / ours["min"],
        }
        figures["ratio"] = ratio
        print(
            f"  one process per command takes {ratio['median']:.1f} times as long "
            f"({ratio['min']:.1f} to {ratio['max']:.1f})"
        )
    print(f"  target of {TARGET_MS} ms: {'reached' if ours['median'] <= TARGET_MS else 'missed'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
