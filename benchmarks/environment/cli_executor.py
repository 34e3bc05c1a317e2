"""What one AWS command costs: the ``aws`` program as a subprocess against the warm in-process
executor.

    python benchmarks/environment/cli_executor.py [--slots 8] [--repeats 20] [--sandbox auto|bwrap|plain]

Both run the same commands against the same real simulators in the same session. Also printed: start
of the pool, reset, state calls, CPU time by process and memory (PSS) per slot.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from realhf.aws.simulator.pool import MiniStackPool, Slot, worker_environment
from realhf.env.containment.probe import SANDBOX_MODES

COMMANDS = (
    "aws s3api "
    "list-buckets", "aws s3 "
                    "ls", "aws s3 mb s3://bench-bucket", "aws sqs create-queue --queue-name bench",
    "aws sqs "
    "list-queues", "aws dynamodb list-tables", "aws iam list-roles", "aws ec2 describe-vpcs",
    "aws lambda "
    "list-functions", "aws sns create-topic --name bench", "aws logs describe-log-groups",
    "aws ssm describe-parameters", "aws kms list-keys", "aws secretsmanager list-secrets",
)  # fmt: skip


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def _spread(samples: Sequence[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "median_ms": round(statistics.median(ordered), 2),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2),
        "n": len(ordered),
    }


def _aws_program(slot: Slot, command: str) -> None:
    program = Path(sys.executable).with_name("aws")
    words = [str(program), "--endpoint-url", slot.endpoint, *command.split()[1:]]
    subprocess.run(
        [sys.executable, *words],
        env=worker_environment(),
        capture_output=True,
        check=False,
        timeout=60,
    )


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def _play(slot: Slot, repeats: int) -> dict[str, object]:
    first = [_timed(lambda command=command: slot.executor.run(command)) for command in COMMANDS]
    before = (_cpu_ms(slot.worker_pid), _cpu_ms(slot.ministack.pid), time.process_time() * 1e3)
    warm = [
        _timed(lambda c=command: slot.executor.run(c))
        for _ in range(repeats)
        for command in COMMANDS
    ]
    after = (_cpu_ms(slot.worker_pid), _cpu_ms(slot.ministack.pid), time.process_time() * 1e3)
    names = ("worker", "simulator", "owner")
    cpu = {
        name: round((b - a) / len(warm), 2) for name, a, b in zip(names, before, after, strict=True)
    }
    return {"first_use": _spread(first), "warm": _spread(warm), "cpu_ms_per_command": cpu}


def _cycle(pool: MiniStackPool) -> tuple[float, float]:
    """Return (milliseconds to acquire a slot, milliseconds to release it after one command)."""
    began = time.perf_counter()
    slot = pool.acquire()
    taken = (time.perf_counter() - began) * 1e3
    slot.executor.run("aws s3 mb s3://bench-bucket")
    return taken, _timed(lambda: pool.release(slot))


def measure(slots: int, repeats: int, sandbox: str) -> dict[str, object]:
    """Run the benchmark and return all measurements named in the module docstring."""
    pool = MiniStackPool(slots, sandbox=sandbox)
    start_ms = _timed(pool.start)
    try:
        slot = pool.acquire()
        ours = _play(slot, repeats)
        program = [
            _timed(lambda c=command: _aws_program(slot, c))
            for command in COMMANDS * max(1, repeats // 10)
        ]
        state = [_timed(lambda: slot.state.call("sqs", "ListQueues")) for _ in range(10 * repeats)]
        reset = [_timed(lambda: slot.reset(1)) for _ in range(5 * repeats)]
        memory = _pss_mb(slot.ministack.pid) + _pss_mb(slot.worker_pid)
        cycles = [_cycle(pool) for _ in range(2 * repeats)]
    finally:
        pool.stop()
    warm = ours["warm"]
    assert isinstance(warm, dict)
    return {
        "host": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "slots": slots,
        "sandbox": sandbox,
        "start_ms": round(start_ms),
        "executor": ours,
        "aws_program": _spread(program),
        "times_faster": round(statistics.median(program) / warm["median_ms"], 1),
        "state_call": _spread(state),
        "reset": _spread(reset),
        "acquire": _spread([cycle[0] for cycle in cycles]),
        "release": _spread([cycle[1] for cycle in cycles]),
        "pss_mb_per_slot": round(memory, 1),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sandbox", choices=SANDBOX_MODES, default="auto")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.slots, arguments.repeats, arguments.sandbox), indent=2))


if __name__ == "__main__":
    main()
