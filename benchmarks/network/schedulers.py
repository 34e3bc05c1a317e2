"""The same synchronous run started in several ways, in turns: are losses identical, what does a
step cost?

    python -m benchmarks.network.schedulers [--rounds 3] [--steps 12] [--schedulers local join ray] [--json FILE]

The run is GRPO on SQL tasks with a small untaught policy, on one machine. With ``join`` the worker
that trains runs below a host agent that has joined over the loopback, with ``hosts`` below one in
another network namespace, over a cable and encrypted; with ``ray`` below one that Ray has placed.
Losses, and everything else in ``metrics.jsonl`` but times, are compared to the last bit, step by
step, with those of the first run. The cost of a step is the median over all but the first two steps
of a run; printed is its ratio to that of the first way in the same round. ``ray`` needs Ray,
``hosts`` needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.network.hosts import two_hosts
from realhf.base.loopback import free_port
from realhf.cluster.cluster_keys import add_hosts, make_keys
from realhf.transport.network import write_private

STEP_SECONDS = "time/step"
RUN_S = 900
END_S = 60
ROOT = Path(__file__).resolve().parents[2]
TRAINER = "trainer"
WAYS = ("local", "join", "hosts", "ray")
APART = "apart"
"""Variant in which the second of two ranks is on another host of a trusted network. Its results are
equal up to rounding, not bit for bit."""
OPTIONS = (
    "experiment=grpo",
    "env=sql",
    "dataset.train_bs_n_seqs=4",
    "ppo.group_size=4",
    "ppo.entropy_coef=0.01",
    "gen.max_new_tokens=32",
    "rollout.max_turns=2",
    "rollout.max_total_tokens=640",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
    "torch_threads=1",
    "monitor.trackers=[]",
    "monitor.progress=false",
)


def policy(folder: Path) -> Path:
    """Create a small policy and return its folder."""
    from realhf.api.config import BuiltinModelConfig
    from realhf.backends.builtin_policy import build_builtin_policy

    talk = {
        "messages": [
            {"role": "user", "content": "How many rows?"},
            {"role": "assistant", "content": "SELECT 1"},
        ]
    }
    (folder / "talks.jsonl").write_text(json.dumps(talk) + "\n")
    sizes = BuiltinModelConfig(
        vocab_size=300, hidden_size=128, num_layers=4, num_heads=4, intermediate_size=256
    )
    build_builtin_policy(folder / "talks.jsonl", folder / "policy", sizes, seed=3)
    return folder / "policy"


@dataclass(frozen=True)
class Way:
    """How a run is started: launcher options and words before its command, and the same for a host
    agent, if one has to be started by hand."""

    options: tuple[str, ...] = ()
    enter: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()
    agent_enter: tuple[str, ...] = ()


@contextlib.contextmanager
def way_of(name: str, folder: Path) -> Iterator[Way]:
    """Context manager that sets up what a way of starting needs, and removes it at the end. Raises
    NoNamespaces with the reason."""
    key = folder / "key"
    if name == "local":
        yield Way()
    elif name == "ray":
        ray = (
            "scheduler=ray",
            "network.bind=127.0.0.1",
            "scheduler.players=0",
            "scheduler.trainer_cpus=1",
        )
        # Ray itself takes a minute to start on a busy machine
        ray += (f"scheduler.wait_s={RUN_S / 2:g}",)
        yield Way((*ray, f"scheduler.key_file={key}", "scheduler.port=0"))
    elif name == "join":
        yield _joined("127.0.0.1", free_port(), key, folder)
    else:
        with two_hosts() as (here, there):
            way = _joined(
                here.address, 7788, key, folder, here.enter, there.enter, apart=name == APART
            )
            yield way


def _joined(
    address: str,
    port: int,
    key: Path,
    folder: Path,
    enter: Sequence[str] = (),
    agent_enter: Sequence[str] = (),
    *,
    apart: bool = False,
) -> Way:
    make_keys(key)
    own = key.with_name(f"{key.name}-{TRAINER}")
    write_private(own, add_hosts(key, [TRAINER]).text())
    options = (
        *(
            "scheduler=join",
            f"network.bind={address}",
            f"scheduler.port={port}",
            f"scheduler.key_file={key}",
        ),
        f"scheduler.hosts=[{TRAINER}]",
        f"scheduler.placement={{model_worker{'/1' if apart else ''}:{TRAINER}}}",
    )
    agent = ("--join", f"tcp://{address}:{port}", "--key-file", str(own), "--host-agent")
    agent += ("--folder", str(folder / "host"), "--linger-s", "2")
    return Way(options, tuple(enter), agent, tuple(agent_enter))


def run(name: str, folder: Path, actor: Path, steps: int, *options: str) -> list[dict[str, Any]]:
    """Run once with the additional ``options`` and return the metrics of the steps. Raises
    NoNamespaces, or RuntimeError with the launcher's last output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with way_of(name, folder) as way, contextlib.ExitStack() as stack:
        given = [
            *OPTIONS,
            f"fileroot={folder / 'runs'}",
            f"actor.path={actor}",
            f"total_train_steps={steps}",
        ]
        command = [
            *way.enter,
            sys.executable,
            "-m",
            "realhf.launch",
            *given,
            *way.options,
            *options,
        ]
        if way.agent:
            words = [*way.agent_enter, sys.executable, "-m", "realhf.worker", *way.agent]
            log = stack.enter_context((folder / "agent.log").open("wb"))
            agent = subprocess.Popen(words, stdout=log, stderr=log, env=environment, cwd=ROOT)
            stack.callback(_end, agent)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            env=environment,
            cwd=ROOT,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-2000:]}")
    (path,) = (folder / "runs").glob("*/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a host agent, which ends with its run; terminate it if the run failed."""
    try:
        process.wait(END_S / 4)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(END_S)


def losses(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of each step without those that depend on time or host."""
    clocked = ("time/", "host/", "throughput/")
    return [
        {key: value for key, value in row.items() if not key.startswith(clocked)} for row in rows
    ]


def main() -> int:
    """Run the benchmark and print the results. Return 0 if all losses are identical."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--schedulers", nargs="+", choices=WAYS, default=["local", "join", "ray"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in args.schedulers}
    first: list[dict[str, Any]] | None = None
    same = True
    with tempfile.TemporaryDirectory() as base:
        actor = policy(Path(base))
        for number in range(args.rounds):
            for way in args.schedulers:
                folder = Path(base) / f"{way}-{number}"
                folder.mkdir()
                rows = run(way, folder, actor, args.steps)
                found = losses(rows)
                first = first if first is not None else found
                identical = found == first and any(row["policy/loss"] for row in found)
                same &= identical
                seconds[way].append(statistics.median(row[STEP_SECONDS] for row in rows[2:]))
                print(
                    f"{way:6} {seconds[way][-1]:.4f} s a step, losses "
                    f"{'identical' if identical else 'DIFFER'}",
                    flush=True,
                )
    for way in args.schedulers[1:]:
        ratios = [
            mine / theirs
            for mine, theirs in zip(seconds[way], seconds[args.schedulers[0]], strict=True)
        ]
        print(
            f"{way} / {args.schedulers[0]}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f})"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"cores": os.cpu_count(), "seconds": seconds, "identical": same})
        )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
