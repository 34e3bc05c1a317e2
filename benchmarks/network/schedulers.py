"""The same synchronous run started by ``local`` and by ``ray``, in turns: are losses identical, what does a step cost?

    python -m benchmarks.network.schedulers [--rounds 3] [--steps 12] [--schedulers local ray] [--json FILE]

The run is GRPO on SQL tasks with a small untaught policy, on one machine, its network on the loopback. With ``ray`` the
worker that trains runs below a host agent that Ray has placed. Losses, and everything else in ``metrics.jsonl`` but
times, are compared to the last bit, step by step, with those of the first run. The cost of a step is the median over
all but the first two steps of a run; printed is its ratio to that of ``local`` in the same round. Ray is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEP_SECONDS = "time/step"
RUN_S = 900
WAYS: dict[str, tuple[str, ...]] = {
    "local": (),
    "ray": ("scheduler=ray", "network.bind=127.0.0.1", "scheduler.players=0", "scheduler.trainer_cpus=1"),
}
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
    "monitor.tensorboard=false",
    "monitor.progress=false",
    "monitor.plot_every_steps=0",
)


def policy(folder: Path) -> Path:
    """Make a small policy; its folder."""
    from realhf.api.config import BuiltinModelConfig
    from realhf.backends.builtin_policy import build_builtin_policy

    talk = {"messages": [{"role": "user", "content": "How many rows?"}, {"role": "assistant", "content": "SELECT 1"}]}
    (folder / "talks.jsonl").write_text(json.dumps(talk) + "\n")
    sizes = BuiltinModelConfig(vocab_size=300, hidden_size=128, num_layers=4, num_heads=4, intermediate_size=256)
    build_builtin_policy(folder / "talks.jsonl", folder / "policy", sizes, seed=3)
    return folder / "policy"


def run(way: str, folder: Path, actor: Path, steps: int) -> list[dict[str, Any]]:
    """Run once; the metrics of its steps. Raises RuntimeError with the launcher's last words."""
    given = [*OPTIONS, f"fileroot={folder}", f"actor.path={actor}", f"total_train_steps={steps}", *WAYS[way]]
    if way != "local":
        given.append(f"scheduler.key_file={folder / 'key'}")
        given.append("scheduler.port=0")
    command = [sys.executable, "-m", "realhf.launch", *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{way}: {(done.stdout + done.stderr)[-2000:]}")
    (path,) = folder.glob("*/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each step has computed: everything but how long it took."""
    return [{key: value for key, value in row.items() if not key.startswith(("time/", "throughput/"))} for row in rows]


def main() -> int:
    """Measure and print. Returns 0 when all losses are identical."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--schedulers", nargs="+", choices=[*WAYS], default=[*WAYS])
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
                    f"{way:6} {seconds[way][-1]:.4f} s a step, losses {'identical' if identical else 'DIFFER'}",
                    flush=True,
                )
    for way in args.schedulers[1:]:
        ratios = [mine / theirs for mine, theirs in zip(seconds[way], seconds[args.schedulers[0]], strict=True)]
        print(f"{way} / {args.schedulers[0]}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if args.json:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "seconds": seconds, "identical": same}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
