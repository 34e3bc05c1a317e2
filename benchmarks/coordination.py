"""What the machinery around one asynchronous trajectory costs: CPU of all processes, and
trajectories per second.

    python benchmarks/coordination.py [--in-flight 10 100 1000 10000] [--windows 5] [--seconds 3] [--json FILE]

The run is ``experiment=grpo_aws_async`` in four processes. Real are: the master's admission,
service, journal on disk, straggler gate, buffer, executor and checkpoint records; the rollout
worker's loop, encoding and stream; the model worker's ``StreamDataset`` with its payload log on
disk and tensor store, and the calls with their data. Engine, environment, training and weights are
fakes that answer at once (``harness/coordination_workers.py``).

A trajectory is one episode of two turns and about 100 tokens; groups have 8. ``in flight``:
episodes admitted and not finished, kept at that number. CPU is user and system time of every
process, after a warm-up. The table shows medians over the windows and the range. Verdicts: at most
200 us of CPU per trajectory in all processes together, at least 3,000 trajectories per second, and
the CPU at the largest number in flight at most 1.25 times that at the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

from realhf.api.experiment import RunPlan
from realhf.api.graph import build_graph
from realhf.base.event_loops import new_event_loop
from realhf.dataflow.function_executor import FunctionExecutor
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts, RolloutPlan
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.registry import sources
from realhf.transport.roster import WorkerInfo
from realhf.transport.rpc_master import RpcMaster

WORKERS = ("model_worker", "rollout_worker", "generation")
GROUP = 8
START_S = 120.0
GOAL_US = 200.0
GOAL_PER_S = 3000.0
GOAL_FLAT = 1.25
ENDLESS = 1_000_000


def make_plan(folder: Path, episodes: int, batch: int) -> tuple[RunPlan, int]:
    """Return the plan of a run with this number of episodes in flight, and the number of groups."""
    groups = -(-episodes // GROUP)
    eta = 1 + -(-groups // batch)
    composed = compose_config(
        [
            "experiment=grpo_aws_async",
            f"fileroot={folder}",
            f"dataset.train_bs_n_seqs={batch}",
            f"ppo.group_size={GROUP}",
            f"env.pool_size={groups * GROUP}",
            f"rollout.sessions={groups * GROUP}",
            f"async_rl.max_head_offpolicyness={eta}",
            f"total_train_steps={ENDLESS}",
        ]
    )
    plan = build_experiment(composed).plan(build_experiment(composed).spec, time.time())
    plan.spec.run_dir.mkdir(parents=True)
    plan.write()
    return plan, groups


FAKE_ENVIRONMENT = WorkerInfo(
    "env/0", "env", 0, "localhost", 0, endpoints={"env": "http://127.0.0.1:1"}
)
"""Registered environment server. Rollouts wait until there is one; the fake players never call
it."""


class Run:
    """The master's side of one run, in this process."""

    def __init__(self, plan: RunPlan, groups: int) -> None:
        self._plan = plan
        self._groups = groups
        self._processes: dict[str, psutil.Process] = {"master": psutil.Process()}
        self._step = 0
        self._in_flight: list[int] = []

    async def measure(
        self, warm_up_s: float, windows: int, seconds: float
    ) -> list[dict[str, float]]:
        """Return one row per window: CPU microseconds per episode of each process, episodes per
        second, mean number of episodes in flight."""
        async with AsyncExitStack() as stack:
            rpc = RpcMaster("bench", on_death=self._died, on_join=self._joined)
            self._rollouts: AsyncRollouts | None = None
            await rpc.start()
            stack.push_async_callback(rpc.close)
            stack.callback(self._stop)
            self._spawn(rpc.endpoint)
            names = ["model_worker/0", "rollout_worker/0", "generation/0"]
            await rpc.wait_for(names, START_S)
            self._rollouts = rollouts = await self._open(rpc)
            stack.push_async_callback(rollouts.close)
            self._executor = self._make_executor(rpc, rollouts)
            await stack.enter_async_context(self._executor)
            await rollouts.start()
            await self._steps(warm_up_s)
            print("... warm: measuring", file=sys.stderr, flush=True)
            return [await self._window(seconds) for _ in range(windows)]

    def _spawn(self, endpoint: str) -> None:
        for kind in WORKERS:
            with (self._plan.spec.run_dir / f"{kind}.log").open("wb") as log:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.harness.coordination_workers",
                    kind,
                    "--run-dir",
                    str(self._plan.spec.run_dir),
                    "--run-id",
                    "bench",
                    "--master",
                    endpoint,
                    "--in-flight",
                    str(self._groups),
                ]
                root = Path(__file__).resolve().parents[1]
                self._processes[kind] = psutil.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, cwd=root
                )

    def _stop(self) -> None:
        for kind in WORKERS:
            self._processes[kind].kill()
            self._processes[kind].wait()

    def _joined(self, info: Any) -> None:
        if self._rollouts is not None:
            self._rollouts.worker_joined(info)

    def _died(self, name: str, reason: str) -> None:
        if self._rollouts is not None:
            self._rollouts.worker_left(name, reason)

    async def _open(self, rpc: RpcMaster) -> AsyncRollouts:
        spec = self._plan.spec
        assert spec.rollout is not None
        plan = RolloutPlan(
            spec.rollout,
            ["model_worker/0"],
            spec.n_seqs,
            spec.total_train_steps,
            0,
            spec.run_dir / "journal",
            "bench",
            30.0,
            60.0,
        )
        source = sources.get(spec.source.name)(seed=spec.seed, **spec.source.args)
        rollouts = await AsyncRollouts.open(plan, rpc, source)
        for info in [*rpc.roster.values(), FAKE_ENVIRONMENT]:
            rollouts.worker_joined(info)
        return rollouts

    def _make_executor(self, rpc: RpcMaster, rollouts: AsyncRollouts) -> FunctionExecutor:
        spec = self._plan.spec
        graph = build_graph(spec.mfcs, spec.source.keys, spec.log_keys, roles=spec.models.keys())
        workers = {role: ["model_worker/0"] for role in spec.models}
        return FunctionExecutor(
            graph,
            rpc,
            rollouts.control,
            workers=workers,
            seed=spec.seed,
            make_loader=rollouts.loader,
        )

    async def _steps(self, seconds: float) -> int:
        """Train for ``seconds`` and return the number of trained samples."""
        assert self._rollouts is not None
        until = time.monotonic() + seconds
        trained = 0
        while time.monotonic() < until:
            report = await self._executor.execute_step(self._step)
            self._step += 1
            await self._rollouts.publish(self._step)
            await self._rollouts.step_metrics(report)
            if self._step % self._plan.exp_ctrl.ckpt_freq_steps == 0:
                await self._rollouts.prepare_checkpoint()
                await self._rollouts.checkpoint_committed(self._step, f"step-{self._step}")
            trained += report.n_samples
            self._in_flight.append(self._rollouts.control.staleness.running)
        return trained

    async def _window(self, seconds: float) -> dict[str, float]:
        before = self._cpu()
        began = time.perf_counter()
        self._in_flight.clear()
        episodes = GROUP * await self._steps(seconds)
        wall = time.perf_counter() - began
        after = self._cpu()
        row = {kind: 1e6 * (after[kind] - before[kind]) / episodes for kind in self._processes}
        return {
            **row,
            "all": sum(row.values()),
            "per_s": episodes / wall,
            "steps_per_s": len(self._in_flight) / wall,
            "cores": sum(after.values()) / wall - sum(before.values()) / wall,
            "in_flight": GROUP * statistics.fmean(self._in_flight),
        }

    def _cpu(self) -> dict[str, float]:
        return {kind: sum(process.cpu_times()[:2]) for kind, process in self._processes.items()}


def measure(episodes: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return one row per window of a run with this number of episodes in flight. If the run fails,
    print its logs and raise its error."""
    folder = Path(tempfile.mkdtemp(prefix="coordination-", dir=args.folder))
    try:
        plan, groups = make_plan(folder, episodes, args.batch)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(Run(plan, groups).measure(args.warm_up, args.windows, args.seconds))
    except BaseException:
        for log in folder.rglob("*.log"):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def spread(rows: Sequence[dict[str, float]], name: str) -> str:
    """Return the median and range of a column as text."""
    values = [row[name] for row in rows]
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"


def verdicts(results: dict[int, list[dict[str, float]]]) -> dict[str, bool]:
    """Return for each goal whether it is reached."""
    cpu = {
        episodes: statistics.median(row["all"] for row in rows)
        for episodes, rows in results.items()
    }
    speed = [statistics.median(row["per_s"] for row in rows) for rows in results.values()]
    return {
        f"at most {GOAL_US:g} us of CPU per trajectory": max(cpu.values()) <= GOAL_US,
        f"at least {GOAL_PER_S:g} trajectories per second": min(speed) >= GOAL_PER_S,
        f"flat within {GOAL_FLAT:g}": cpu[max(cpu)] <= GOAL_FLAT * cpu[min(cpu)],
    }


def show(results: dict[int, list[dict[str, float]]]) -> None:
    """Print the table."""
    names = {
        "in_flight": "in flight",
        "master": "master us",
        "model_worker": "model worker us",
        "rollout_worker": "rollout worker us",
        "generation": "generation us",
        "all": "all us",
        "per_s": "per s",
        "steps_per_s": "steps/s",
    }
    print("  ".join(f"{title:>22}" for title in names.values()))
    for rows in results.values():
        print("  ".join(f"{spread(rows, name):>22}" for name in names))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status: 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--in-flight", type=int, nargs="+", default=[10, 100, 1000, 10_000], help="episodes"
    )
    parser.add_argument("--batch", type=int, default=64, help="groups of a train step")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the run's files go (default: the system's temporary folder)",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    results: dict[int, list[dict[str, float]]] = {}
    gc.freeze()
    for episodes in args.in_flight:
        results[episodes] = measure(episodes, args)
    host = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }
    print(
        f"{host['cpus']} CPUs, load average {host['load'][0]:.1f}, batches of {args.batch} groups "
        f"of {GROUP}"
    )
    show(results)
    reached = verdicts(results)
    for verdict, ok in reached.items():
        print(f"{verdict}: {'reached' if ok else 'missed'}")
    if args.json:
        args.json.write_text(
            json.dumps({"host": host, "rows": results, "verdicts": reached}, indent=1) + "\n"
        )
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
