"""The master's side of ``python -m benchmarks.scale``. Everything in this process is as in a real
run, except that no model is trained."""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.process_figures import descriptors, resident_bytes, thread_seconds
from realhf.api.experiment import RunPlan
from realhf.api.graph import build_graph
from realhf.api.source import ResultSink, SampleResult
from realhf.dataflow.function_executor import FunctionExecutor
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts, RolloutPlan
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.registry import sources
from realhf.transport.roster import WorkerInfo
from realhf.transport.rpc_master import RpcMaster

ENDLESS = 1_000_000
RUN_ID = "scale"
ENVIRONMENT = WorkerInfo("env/0", "env", 0, "localhost", 0, endpoints={"env": "http://127.0.0.1:1"})
"""Registered environment server. Rollouts wait until there is one; the simulated workers never call
it."""
SPARE_DESCRIPTORS = 500
REPEATED_LOOK_S = 0.05


def say(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def make_plan(folder: Path, args: Namespace) -> RunPlan:
    """Return the plan of a run with the configured number of samples in flight."""
    samples = -(-args.episodes // args.group)
    composed = compose_config(
        [
            "experiment=grpo_aws_async",
            f"fileroot={folder}",
            f"dataset.train_bs_n_seqs={args.batch}",
            f"ppo.group_size={args.group}",
            f"async_rl.max_concurrent_rollouts={samples}",
            f"async_rl.max_head_offpolicyness={2 + 2 * -(-samples // args.batch)}",
            "async_rl.keep_journal=true",
            f"total_train_steps={ENDLESS}",
        ]
    )
    plan = build_experiment(composed).plan(build_experiment(composed).spec, time.time())
    plan.spec.run_dir.mkdir(parents=True)
    plan.write()
    return plan


@dataclass(frozen=True)
class Connections:
    """Number of connections to the master, by kind, from all simulated workers together."""

    admission: int
    rpc: int

    @staticmethod
    def that_fit(workers: int, parts: int) -> Connections:
        """Return one connection of each kind per worker or, if the descriptor limit does not allow
        that, as many as possible, with priority for admission."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        own = min(limit, parts * limit // 2)
        if 4 * workers <= limit and 8 * workers <= parts * limit:
            return Connections(workers, workers)
        return Connections(min(workers, own - 4 * parts), parts)

    def words(self) -> str:
        """Return the numbers as text."""
        return f"{self.admission} for admission, {2 * self.rpc} for RPC, {self.rpc} for heartbeats"


class NotedResults:
    """Result sink that forwards the results of training and records the age of each trained sample,
    in versions."""

    def __init__(self, results: ResultSink) -> None:
        self._results = results
        self.ages: list[int] = []
        self.step = 0

    def record(self, results: Sequence[SampleResult]) -> None:
        """Forward the results of a trained step and record the ages of its samples."""
        self.ages += [self.step - int(result.metadata["admitted"]) for result in results]
        self.step += 1
        self._results.record(results)

    def stats(self) -> dict[str, float]:
        """Return the statistics of the wrapped sink."""
        return self._results.stats()


class Simulation:
    """One simulated run. ``measure`` returns its measurements."""

    def __init__(self, plan: RunPlan, args: Namespace) -> None:
        self._plan = plan
        self._args = args
        self._samples = -(-args.episodes // args.group)
        self._connections = Connections.that_fit(args.workers, args.processes)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._parts: list[subprocess.Popen[bytes]] = []
        self._rollouts: AsyncRollouts | None = None
        self._deaths: deque[float] = deque()
        self._step = 0

    async def measure(self) -> dict[str, Any]:
        """Run the simulation and return all measurements. Raises the error that ended it early."""
        async with AsyncExitStack() as stack:
            beat_s = self._args.heartbeat
            rpc = RpcMaster(
                RUN_ID,
                heartbeat_s=beat_s,
                dead_after_s=4 * beat_s,
                on_death=self._died,
                on_join=self._joined,
            )
            await rpc.start()
            stack.push_async_callback(rpc.close)
            stack.callback(self._stop)
            figures: dict[str, Any] = {"connections": vars(self._connections)}
            figures["registration"] = await self._register(rpc)
            self._rollouts = rollouts = await self._open(rpc)
            stack.push_async_callback(rollouts.close)
            await rollouts.start()
            figures["memory"] = await self._fill()
            figures["idle"] = await self._rest()
            executor = self._make_executor(rpc, rollouts)
            await stack.enter_async_context(executor)
            self._tell("finish")
            say("... every sample in flight is admitted; training, to warm up")
            await self._steps(executor, self._args.warm_up)
            figures["windows"] = [
                await self._window(executor, n) for n in range(self._args.windows)
            ]
            if self._args.lose > 0:
                figures["recovery"] = await self._recover(executor)
            figures["totals"] = rollouts._ledger.state.totals()
            return figures

    # ---- processes

    async def _register(self, rpc: RpcMaster) -> dict[str, float]:
        """Start the simulated workers and wait until all have registered. Return the wall time and
        the master's CPU time for that."""
        say(f"... {self._args.workers} workers register over {self._connections.words()}")
        before = sum(thread_seconds().values())
        began = time.monotonic()
        args = self._args
        lines = self._connections
        first = 0
        trainer = {
            "run-dir": self._plan.spec.run_dir,
            "generation": args.generation,
            "patience": args.patience,
        }
        self._spawn("trainer", trainer, rpc.endpoint)
        for n in range(args.processes):
            count = args.workers * (n + 1) // args.processes - first
            share = count / args.workers
            fields = {
                "part": n,
                "first": first,
                "workers": count,
                "in-flight": round(self._samples * share),
                "slots": -(-self._samples // args.workers),
                "lines": max(1, round(lines.admission * share)),
                "rpc-lines": count if lines.rpc == args.workers else 1,
            }
            self._parts.append(self._spawn("workers", fields, rpc.endpoint))
            first += count
        names = [f"rollout_worker/{n}" for n in range(args.workers)]
        names += ["model_worker/0", *(f"generation/{n}" for n in range(args.generation))]
        await rpc.wait_for(names, args.patience)
        wall = time.monotonic() - began
        cpu = sum(thread_seconds().values()) - before
        say(f"... registered after {wall:.1f} s, {cpu:.1f} s of the master's CPU")
        return {"wall_s": wall, "master_cpu_s": cpu}

    def _spawn(self, module: str, fields: dict[str, Any], endpoint: str) -> subprocess.Popen[bytes]:
        options = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
        log = self._plan.spec.run_dir / f"{module}-{len(self._processes)}.log"
        command = [
            sys.executable,
            "-m",
            f"benchmarks.scale.{module}",
            "--run-id",
            RUN_ID,
            "--master",
            endpoint,
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, *options],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).resolve().parents[2],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._processes.append(process)
        return process

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _tell(self, word: str) -> None:
        for part in self._parts:
            assert part.stdin is not None
            part.stdin.write(f"{word}\n".encode())
            part.stdin.flush()

    def _joined(self, info: WorkerInfo) -> None:
        if self._rollouts is not None:
            self._rollouts.worker_joined(info)

    def _died(self, name: str, reason: str) -> None:
        self._deaths.append(time.monotonic())
        if self._rollouts is not None:
            self._rollouts.worker_left(name, reason)

    async def _open(self, rpc: RpcMaster) -> AsyncRollouts:
        spec = self._plan.spec
        assert spec.rollout is not None
        folder = spec.run_dir / "journal"
        patience = self._args.patience
        plan = RolloutPlan(
            spec.rollout,
            ["model_worker/0"],
            spec.n_seqs,
            ENDLESS,
            0,
            folder,
            RUN_ID,
            patience,
            patience,
            archive=True,
        )
        source = sources.get(spec.source.name)(seed=spec.seed, **spec.source.args)
        rollouts = await AsyncRollouts.open(plan, rpc, source, say)
        for info in [*rpc.roster.values(), ENVIRONMENT]:
            rollouts.worker_joined(info)
        return rollouts

    def _make_executor(self, rpc: RpcMaster, rollouts: AsyncRollouts) -> FunctionExecutor:
        spec = self._plan.spec
        graph = build_graph(spec.mfcs, spec.source.keys, spec.log_keys, roles=spec.models.keys())
        workers = {role: ["model_worker/0"] for role in spec.models}
        self._results = NotedResults(rollouts.control)
        timeout_s = self._args.patience
        return FunctionExecutor(
            graph,
            rpc,
            self._results,
            workers=workers,
            seed=spec.seed,
            make_loader=rollouts.loader,
            control_timeout_s=timeout_s,
        )

    # ---- figures

    async def _until(self, done: Any, what: str) -> None:
        async with asyncio.timeout(self._args.patience):
            while not done():
                for process in self._processes:
                    if process.poll() is not None:
                        raise RuntimeError(
                            f"a simulated process ended while {what}; its log is in the run folder"
                        )
                await asyncio.sleep(REPEATED_LOOK_S)

    async def _fill(self) -> dict[str, float]:
        """Let every sample in flight be admitted. Return the cost in time and memory."""
        wanted = self._connections.admission + 3 * self._connections.rpc
        await self._until(lambda: descriptors() >= wanted, "workers connected")
        await asyncio.sleep(1.0)
        memory = resident_bytes()
        before = thread_seconds()
        began = time.monotonic()
        self._tell("ask")
        await self._until(lambda: self._control.in_play >= self._samples, "samples were admitted")
        cpu = _grown(before, thread_seconds())
        wall = time.monotonic() - began
        each = (resident_bytes() - memory) / self._args.episodes
        say(
            f"... {self._args.episodes} episodes in flight: {each:.0f} bytes of the master's "
            f"memory for each"
        )
        return {
            "bytes_per_episode": each,
            "before_bytes": memory,
            "wall_s": wall,
            "loop_us_per_episode": 1e6 * cpu["loop"] / self._args.episodes,
        }

    async def _rest(self) -> dict[str, float]:
        """Return the CPU seconds per second while everything is in flight and no sample is
        finished."""
        before = thread_seconds()
        began = time.monotonic()
        await asyncio.sleep(self._args.idle)
        cpu = _grown(before, thread_seconds())
        wall = time.monotonic() - began
        say(f"... {sum(cpu.values()) / wall:.3f} of a core while nothing is finished")
        return {"loop": cpu["loop"] / wall, "all": sum(cpu.values()) / wall}

    @property
    def _control(self) -> Any:
        assert self._rollouts is not None
        return self._rollouts.control

    async def _steps(self, executor: FunctionExecutor, seconds: float) -> int:
        """Train for ``seconds`` and return the number of steps."""
        assert self._rollouts is not None
        until = time.monotonic() + seconds
        steps = 0
        while time.monotonic() < until:
            report = await executor.execute_step(self._step)
            self._step += 1
            steps += 1
            await self._rollouts.publish(self._step)
            await self._rollouts.step_metrics(report)
            if self._step % self._plan.exp_ctrl.ckpt_freq_steps == 0:
                await self._rollouts.prepare_checkpoint()
                await self._rollouts.checkpoint_committed(self._step, f"step-{self._step}")
        return steps

    async def _window(self, executor: FunctionExecutor, number: int) -> dict[str, float]:
        """Return the measurements of one time window, per episode."""
        staleness = self._control.staleness
        group = self._args.group
        self._results.ages.clear()
        running: list[int] = []
        looks = asyncio.create_task(_sampled(lambda: staleness.running, running))
        counted = (staleness.admitted, staleness.accepted)
        before = thread_seconds()
        began = time.monotonic()
        steps = await self._steps(executor, self._args.seconds)
        cpu = _grown(before, thread_seconds())
        wall = time.monotonic() - began
        looks.cancel()
        admitted = group * (staleness.admitted - counted[0])
        accepted = group * (staleness.accepted - counted[1])
        loop = cpu["loop"]
        everything = sum(cpu.values())
        row = {
            "per_loop_second": accepted / loop,
            "per_master_second": accepted / everything,
            "loop_us": 1e6 * loop / accepted,
            "master_us": 1e6 * everything / accepted,
            "per_second": accepted / wall,
            "admitted": admitted,
            "accepted": accepted,
            "steps": steps,
            "in_flight": group * statistics.fmean(running or [staleness.running]),
            "age_mean": statistics.fmean(self._results.ages or [0]),
            "age_max": max(self._results.ages, default=0),
            **{f"{name}_s": seconds for name, seconds in sorted(cpu.items())},
        }
        say(
            f"... window {number + 1}: {row['per_master_second']:,.0f} episodes per CPU second of "
            f"the master "
            f"({row['per_loop_second']:,.0f} of its loop), {row['per_second']:,.0f} per second here"
        )
        return row

    async def _recover(self, executor: FunctionExecutor) -> dict[str, float]:
        """Let a share of the workers vanish. Return the time until all deaths were noticed, and the
        time until as many samples were in flight as before and none of the lost samples was still
        waiting."""
        count = (
            round(self._args.workers * self._args.lose)
            // self._args.processes
            * self._args.processes
        )
        say(f"... {count} workers vanish")
        training = asyncio.create_task(self._steps(executor, self._args.patience))
        control, before, began = self._control, thread_seconds(), time.monotonic()
        in_flight = self._control.staleness.running
        lost_before = control.lost_attempts
        self._deaths.clear()
        self._tell(f"drop {count // self._args.processes}")

        def recovered() -> bool:
            """Return whether all lost samples are in flight again."""
            if training.done():
                training.result()
            waiting = control.counters()["waiting"]
            return (
                len(self._deaths) >= count
                and not waiting
                and control.staleness.running >= 0.95 * in_flight
            )

        try:
            await self._until(recovered, "it recovered")
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
        cpu = _grown(before, thread_seconds())
        wall = time.monotonic() - began
        found = {
            "workers_lost": count,
            "samples_lost": control.lost_attempts - lost_before,
            "first_noticed_s": self._deaths[0] - began,
            "last_noticed_s": self._deaths[-1] - began,
            "recovered_s": wall,
            "loop_s": cpu["loop"],
        }
        say(
            f"... recovered after {wall:.1f} s; the deaths were known after "
            f"{found['last_noticed_s']:.1f} s"
        )
        return found


async def _sampled(look: Any, into: list[int]) -> None:
    while True:
        into.append(look())
        await asyncio.sleep(0.1)


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0.0) for name in after}
