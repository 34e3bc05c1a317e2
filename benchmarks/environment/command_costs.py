"""Where the CPU time of a command goes: by process and by stage, over the workload of env_step.

Two plays of the same 8 resets and 48 commands. One goes through the real server, as in
``env_step.py``, and tells the CPU time of each process. The other plays them in this process on one
slot, whose worker and simulator carry timers: thread clocks that are read where a stage begins and
ends, some twenty times a command (the last column says what they cost themselves). What no stage
claims is shown as the rest: event loops, waits, thread switches and the kernel's part of them.

    python benchmarks/environment/command_costs.py [--repeats 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[1:1] = [str(FOLDER.parent)]
import env_step  # noqa: E402  (the folder above is not a package)
from stage_timers import COSTS_PATH, StageTimers  # noqa: E402

from realhf.aws.cli import executor  # noqa: E402
from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool  # noqa: E402
from realhf.aws.episode import episode, world  # noqa: E402
from realhf.aws.episode.player import EpisodePlayer  # noqa: E402
from realhf.aws.grading import differences, grader  # noqa: E402
from realhf.aws.grading.tracker import Tracker  # noqa: E402
from realhf.aws.server.program import EnvServerProcess  # noqa: E402
from realhf.aws.simulator import pool as pool_module  # noqa: E402
from realhf.aws.simulator.ministack_process import MiniStackProcess  # noqa: E402
from realhf.aws.simulator.pool import MiniStackPool  # noqa: E402
from realhf.env.containment.fork_server import ForkServer  # noqa: E402

COMMANDS = env_step.SESSIONS * env_step.TURNS
WARM_UP = 3
REST = "rest: loops, waits, switches"
_TIMED = {
    "realhf.aws.cli.zygote": "timed_worker",
    "realhf.aws.simulator.ministack_server": "timed_simulator",
}
"""Modules that are started with timers, and the ones that do so."""
_ROLES = {"realhf.aws.cli.zygote": "CLI workers", "realhf.aws.simulator": "simulators"}
"""Processes by the module in their command line; the server's has another."""


class TimedForkServer(ForkServer):
    """Fork server of zygotes with timers."""

    def __init__(
        self, module: str, log: Any, environment: dict[str, str] | None, *rest: Any
    ) -> None:
        environment = dict(environment or {})
        environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{FOLDER}"
        super().__init__(_TIMED.get(module, module), log, environment, *rest)


def thread_times(pid: int) -> tuple[float, int]:
    """Return (CPU time in microseconds, number of voluntary switches) of all threads of a
    process."""
    spent = 0
    switches = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent += int((task / "schedstat").read_text().split()[0])
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue
        switches += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return spent / 1000, switches


def server_processes(root: int) -> dict[int, str]:
    """Return the role of each process of a server, by pid."""
    parents = {}
    lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            lines[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        parents[int(folder.name)] = int(status[1])
    roles = {}
    for pid in lines:
        above = pid
        while above not in (root, 0):
            above = parents.get(above, 0)
        if above == root:
            found = (role for module, role in _ROLES.items() if module in lines[pid])
            roles[pid] = next(found, "environment server")
    return roles


def measure_processes(repeats: int) -> dict[str, dict[str, float]]:
    """Return CPU time and switches per command of each kind of process, over the whole path."""
    tasks, scripts = env_step.workload()
    limits: dict[str, Any] = {
        "max_turns": env_step.TURNS,
        "max_total_tokens": 1 << 16,
        "turn_tokens": 512,
    }
    with (
        EnvServerProcess(env_step.SESSIONS) as server,
        MultiTurnEnvPool(server.url, env_step.SESSIONS, **limits) as pool,
    ):
        for _ in range(WARM_UP):
            env_step.play_ours(pool, tasks, scripts)
        roles = {**server_processes(server.process.pid), os.getpid(): "client and policy"}
        before = {pid: thread_times(pid) for pid in roles}
        for _ in range(repeats):
            env_step.play_ours(pool, tasks, scripts)
        after = {pid: thread_times(pid) for pid in roles}
    totals: dict[str, dict[str, float]] = {}
    for pid, role in roles.items():
        row = totals.setdefault(role, {"us": 0.0, "switches": 0.0})
        row["us"] += (after[pid][0] - before[pid][0]) / repeats / COMMANDS
        row["switches"] += (after[pid][1] - before[pid][1]) / repeats / COMMANDS
    return totals


def time_this_process() -> StageTimers:
    """Install timers in this process, which plays what the environment server does."""
    timers = StageTimers()
    timers.time(EpisodePlayer, "step", "episode: observation, reward, record")
    timers.time(EpisodePlayer, "reset", "reset: task and world")
    timers.time(executor, "check_command", "policy")
    timers.time(executor.CliExecutor, "_execute", "worker: frames, JSON and socket")
    timers.time(MiniStackProcess, "_request", "simulator: HTTP and socket")
    timers.time(world, "take_snapshot", "snapshot: read the records")
    timers.time(grader.EndStateGrader, "evaluate", "grading")
    timers.time(grader, "state_digest", "grading: digest of the account")
    timers.time(differences.EpisodeComparison, "judge", "grading")
    timers.time(Tracker, "record", "episode: observation, reward, record")
    timers.time(episode.Episode, "_observation", "episode: observation, reward, record")
    return timers


def measure_stages(repeats: int) -> dict[str, dict[str, float]]:
    """Return the CPU time per command in microseconds, by process and stage, of episodes that this
    process plays on one slot."""
    tasks, scripts = env_step.workload()
    resets = [{"task": task.to_json(), "chaos": False, "seed": task.seed} for task in tasks]
    pool_module.ForkServer = TimedForkServer  # type: ignore[misc]
    last: dict[int, Counter[str]] = {}
    workers: Counter[str] = Counter()
    parse = executor.parse_reply

    def parse_with_costs(data: Any, limits: Any) -> Any:
        # Workers are replaced now and then, so the differences from one reply to the next count.
        pid, spent_ns, calls, costs = data.pop("costs")
        told = Counter({**costs, "all": spent_ns, "calls": calls})
        workers.update(told)
        workers.subtract(last.get(pid, {}))
        last[pid] = told
        return parse(data, limits)

    executor.parse_reply = parse_with_costs
    pool = MiniStackPool(1)
    pool.start()
    try:
        slot = pool.acquire()
        player = EpisodePlayer(slot, env_step.TURNS, chaos=False)

        def play() -> None:
            for reset, script in zip(resets, scripts, strict=True):
                player.reset(reset)
                for command in script:
                    done = player.step({"command": command})[2]
                assert done

        def read() -> tuple[dict[str, float], dict[str, tuple[int, Mapping[str, int]]]]:
            calls, costs = json.loads(slot.ministack.ask("GET", COSTS_PATH, "s3"))
            worker_stages = dict(workers)
            spent = {
                "simulators": thread_times(slot.ministack.pid)[0],
                "CLI workers": worker_stages.pop("all", 0) / 1000,
                "environment server": time.thread_time_ns() / 1000,
            }
            stages = {
                "simulators": (calls, costs),
                "CLI workers": (worker_stages.pop("calls", 0), worker_stages),
                "environment server": (timers.calls, dict(timers.ns)),
            }
            return spent, stages

        for _ in range(WARM_UP):
            play()
        timers = time_this_process()
        play()
        spent_before, before = read()
        for _ in range(repeats):
            play()
        spent_after, after = read()
    finally:
        pool.stop()
    rows: dict[str, dict[str, float]] = {}
    for name, (calls, costs) in after.items():
        known = Counter(costs)
        known.subtract(before[name][1])
        row = {stage: ns / 1000 / repeats / COMMANDS for stage, ns in known.most_common()}
        whole = (spent_after[name] - spent_before[name]) / repeats / COMMANDS
        row[REST] = whole - sum(row.values())
        clock_us = 2 * clock_cost_us() * (calls - before[name][0]) / repeats / COMMANDS
        rows[name] = {**row, "all": whole, "of which timers": clock_us}
    return rows


def clock_cost_us() -> float:
    """Return what one reading of a thread's clock costs, in microseconds."""
    began = time.thread_time_ns()
    for _ in range(10_000):
        time.thread_time_ns()
    return (time.thread_time_ns() - began) / 10_000 / 1000


def print_tables(
    processes: Mapping[str, Mapping[str, float]], stages: Mapping[str, Mapping[str, float]]
) -> None:
    """Print both tables."""
    print(f"CPU of one command in microseconds ({COMMANDS} commands and their resets)")
    print(f"{'process':24} {'us':>8} {'share':>7} {'switches':>9}")
    total = sum(row["us"] for row in processes.values())
    for name, row in sorted(processes.items(), key=lambda item: -item[1]["us"]):
        share = row["us"] / total
        print(f"{name:24} {row['us']:8.0f} {share:7.1%} {row['switches']:9.1f}")
    print(f"{'all':24} {total:8.0f}")
    for name, row in stages.items():
        print(f"\n{name}, one slot alone")
        for stage, us in row.items():
            print(f"  {stage:40} {us:8.1f}")
    apart = processes["environment server"]["us"] - stages["environment server"]["all"]
    print(f"\nenvironment server beyond its episodes: web socket, JSON, threads {apart:14.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    processes = measure_processes(options.repeats)
    stages = measure_stages(options.repeats)
    print_tables(processes, stages)
    if options.json:
        figures = {"processes": processes, "stages": stages}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
