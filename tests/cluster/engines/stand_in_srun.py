#!/usr/bin/env python3
"""Stands in for Slurm's ``srun``: runs a command once for each task on this machine, each with its number and all of
the standard input. It ends when all tasks have, and ends them when it is told to."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--kill-on-bad-exit", choices=["0"], required=True)
    parser.add_argument("--overlap", action="store_true", required=True)
    parser.add_argument("--input", choices=["all"], required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    said = sys.stdin.buffer.read()
    tasks = []
    for number in range(given.ntasks):
        environment = {**os.environ, "SLURM_PROCID": str(number)}
        task = subprocess.Popen(given.command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        assert task.stdin is not None
        task.stdin.write(said)
        task.stdin.close()
        tasks.append(task)

    def end(number: int, frame: object) -> None:
        for task in tasks:
            task.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
