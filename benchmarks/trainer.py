"""GRPO steps of this engine beside those of TRL's GRPOTrainer: tokens per second, seconds, peak
memory.

    python benchmarks/trainer.py [--case builtin smollm2] [--pairs 5] [--threads 1] [--trl-python .venv-trl/bin/python]

``make test-trl`` installs TRL 1.16.0 into ``.venv-trl``. ``builtin`` is the built-in policy with
random weights (1 M parameters; 16 tasks x 8 rollouts, 96 tokens each), ``smollm2`` the model of
``make model`` (135 M; 2 x 8, 48 each); the prompts are tasks of the AWS environment in the chat
format of the model.

Each side has a process of its own, which loads the same folder and holds its weights until the end.
Both get the same prompts and the same number of threads, and take turns, a step each. A ratio is
that of such a pair; in brackets stand the least and the greatest. A step is generation of exactly
so many tokens for each rollout (the end token is banned until then, on both sides), rewards,
advantages, one gradient over the whole batch, and one AdamW update in fp32: the GRPO loss with
clipping, mean over tokens and then over sequences, no reference model, and a reward that gives
every rollout an advantage. The two compute the same: the first step trains on completions drawn
beforehand, and the run ends with an error if the norms of its gradients differ by more than 0.1 %.
It and a second one that generates are not counted.

TRL's settings are the best we found for it on a CPU: fp32 (bf16 is emulated there), no gradient
checkpointing, no vLLM server, the chunked head that it always uses, the fused AdamW, and
``--trl-batch`` rollouts in a micro-batch (32 and 16 unless told; other numbers were not compared;
fewer take less memory). Ours are the defaults of a run, with ``mb_spec.max_tokens_per_mb`` as the
model's configuration has it (``--budget``).

Train speed counts sampled tokens by the seconds that a step takes after generation and reward. Peak
memory is the sum of the largest resident sizes of a side's processes, its libraries included.
Beside the ratio of wall-clock seconds stands that of CPU seconds, which other programs on the
machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from harness.step_lines import END, GIVEN, STEP

from realhf.api.config import BuiltinModelConfig
from realhf.aws.environment import SYSTEM_PROMPT
from realhf.aws.tasks.loader import instantiate, load_templates

HERE = Path(__file__).parent
OURS = "realhf"
TRL = "trl"
OPTIMIZER = {
    "lr": 1e-5,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "gradient_clipping": 1.0,
}
MAX_APART = 1e-3
ANSWER_S = 3600.0


@dataclass(frozen=True)
class Case:
    """Workload: ``prompts`` tasks with ``group`` rollouts of ``tokens`` tokens. ``budget`` and
    ``trl_batch`` limit the micro-batches of the two sides. ``step`` and ``memory``: goals, the
    highest acceptable ratios to TRL's step time and peak memory."""

    prompts: int
    group: int
    tokens: int
    budget: int
    trl_batch: int
    step: float
    memory: float
    folder: Path | None = None


CASES = {
    "builtin": Case(16, 8, 96, 2048, 32, step=0.45, memory=0.6),
    "smollm2": Case(2, 8, 48, 2048, 16, step=0.5, memory=0.7, folder=Path("models/smollm2_135m")),
}
TRAIN = 2.2
"""Goal for the train speed, as a multiple of TRL's."""


class Side:
    """One of the two programs as a child process."""

    def __init__(
        self, name: str, python: Path, setup: Path, threads: int, log: TextIO, stack: ExitStack
    ) -> None:
        self.name = name
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [str(python), str(HERE / "harness" / f"{name}_steps.py"), str(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        self._log = log.name
        stack.callback(self._end)

    def _end(self) -> None:
        try:
            self._process.communicate(f"{END}\n", timeout=30)
        except (subprocess.TimeoutExpired, BrokenPipeError, ValueError):
            self._process.kill()
            self._process.wait()

    def answer(self) -> dict[str, float]:
        """Wait for the next answer. Raises RuntimeError with the end of the log if the program has
        ended."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        if not ready:
            raise RuntimeError(
                f"{self.name} did not answer within {ANSWER_S:g} s; its output is in {self._log}"
            )
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(Path(self._log).read_text(encoding="utf-8").splitlines()[-15:])
            raise RuntimeError(f"{self.name} has ended:\n{tail}")
        return json.loads(line)

    def step(self, order: str) -> dict[str, float]:
        """Take one step and return its measurements."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return self.answer()


def builtin_folder(folder: Path) -> Path:
    """Write the built-in policy with random weights to ``folder`` and return it. Its tokenizer is
    trained on the tasks and their solutions."""
    from realhf.backends.builtin_policy import build_model, train_tokenizer

    config = BuiltinModelConfig()
    tasks = [
        instantiate(template.task_id, seed) for template in load_templates() for seed in range(20)
    ]
    texts = [text for task in tasks for text in (task.description, *task.solution)]
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_positions)
    model = build_model(
        config, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=1
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def setup_of(case: Case, folder: Path, threads: int) -> dict[str, Any]:
    """Return the settings that both sides read: model, prompts, lengths, optimizer options and
    completions for the first step."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(1)
    tasks = [
        instantiate(template.task_id, 0) for template in rng.sample(load_templates(), case.prompts)
    ]
    prompts = [
        tokenizer.apply_chat_template(
            [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": task.description},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        for task in tasks
    ]
    special = set(tokenizer.all_special_ids)
    words = [i for i in range(len(tokenizer)) if i not in special]
    return {
        "model": str(folder),
        "prompts": prompts,
        "group": case.group,
        "tokens": case.tokens,
        "budget": case.budget,
        "trl_batch": case.trl_batch,
        "threads": threads,
        "optimizer": OPTIMIZER,
        "given": [rng.choices(words, k=case.tokens) for _ in range(case.prompts * case.group)],
    }


def measure(
    case: Case, setup: dict[str, Any], args: argparse.Namespace, stack: ExitStack
) -> dict[str, list[Any]]:
    """Return the measured steps of both sides. Raises RuntimeError if the two do not compute the
    same."""
    work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (work / "setup.json").write_text(json.dumps(setup), encoding="utf-8")
    pythons = {OURS: Path(sys.executable), TRL: args.trl_python}
    sides = []
    for name, python in pythons.items():
        log = stack.enter_context((work / f"{name}.txt").open("w", encoding="utf-8"))
        sides.append(Side(name, python, work / "setup.json", args.threads, log, stack))
    ready = {side.name: side.answer() for side in sides}
    if len({answer["prompt_tokens"] for answer in ready.values()}) > 1:
        raise RuntimeError(f"the sides read the prompts as different tokens: {ready}")
    norms = {side.name: side.step(GIVEN)["grad_norm"] for side in sides}
    if abs(norms[OURS] / norms[TRL] - 1) > MAX_APART:
        raise RuntimeError(
            f"the sides do not compute the same: their gradients have the norms {norms}"
        )
    print(
        f"  {ready[OURS]['prompt_tokens']:.0f} tokens of prompts; loaded, {OURS} has "
        f"{_mib(ready[OURS]['peak'])} and "
        f"{TRL} {_mib(ready[TRL]['peak'])}; norm of the same gradient {norms[OURS]:.6f} and "
        f"{norms[TRL]:.6f}",
        flush=True,
    )
    for side in sides:
        side.step(STEP)
    found: dict[str, list[Any]] = {OURS: [], TRL: []}
    for pair in range(args.pairs):
        for side in sides if pair % 2 == 0 else sides[::-1]:
            step = side.step(STEP)
            if step["sampled"] != case.prompts * case.group * case.tokens:
                raise RuntimeError(f"{side.name} sampled {step['sampled']} tokens")
            found[side.name].append(step)
    return found


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(case: Case, found: dict[str, list[Any]]) -> dict[str, Any]:
    """Print the results of a case and return them."""
    rows: dict[str, Any] = {}

    def row(
        name: str, unit: str, of: Any, cpu: Any = None, least: float = 0.0, most: float = 0.0
    ) -> None:
        ours, theirs = ([of(step) for step in found[side]] for side in (OURS, TRL))
        ratio = spread([a / b for a, b in zip(ours, theirs, strict=True)])
        rows[name] = {OURS: spread(ours), TRL: spread(theirs), "ratio": ratio}
        line = (
            f"  {name:14} {statistics.median(ours):9.1f} {statistics.median(theirs):9.1f} {unit:9} "
        )
        line += f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        if cpu is not None:
            by_cpu = spread([cpu(a) / cpu(b) for a, b in zip(found[OURS], found[TRL], strict=True)])
            rows[name]["cpu_ratio"] = by_cpu
            line += f"; by CPU {by_cpu['median']:.2f} ({by_cpu['min']:.2f} to {by_cpu['max']:.2f})"
        if least or most:
            held = ratio["median"] >= least if least else ratio["median"] <= most
            line += (
                f"; asked {'>=' if least else '<='} {least or most:g}: {'yes' if held else 'no'}"
            )
        print(line, flush=True)

    print(f"  {'':14} {OURS:>9} {TRL:>9} {'':9} ratio")
    row(
        "generation",
        "tokens/s",
        lambda s: s["sampled"] / s["generate_s"],
        lambda s: 1 / s["generate_cpu_s"],
    )
    row(
        "train step",
        "tokens/s",
        lambda s: s["sampled"] / s["train_s"],
        lambda s: 1 / s["train_cpu_s"],
        least=TRAIN,
    )
    row("whole step", "s", lambda s: s["step_s"], lambda s: s["step_cpu_s"], most=case.step)
    row("peak memory", "MiB", lambda s: s["peak"] / 2**20, most=case.memory)
    return rows


def main() -> int:
    """Run the benchmark. Return 2 if a side is missing or fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each side's arithmetic")
    parser.add_argument("--trl-python", type=Path, default=Path(".venv-trl/bin/python"))
    parser.add_argument("--trl-batch", type=int, help="rollouts in a micro-batch of TRL")
    parser.add_argument("--budget", type=int, help="our mb_spec.max_tokens_per_mb")
    parser.add_argument("--model", type=Path, help="the folder of the case smollm2")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if not args.trl_python.exists():
        print(f"no {args.trl_python}: `make test-trl` installs TRL", file=sys.stderr)
        return 2
    figures: dict[str, Any] = {"threads": args.threads, "pairs": args.pairs}
    for name in args.case:
        case = CASES[name]
        case = replace(
            case, trl_batch=args.trl_batch or case.trl_batch, budget=args.budget or case.budget
        )
        with ExitStack() as stack:
            folder = case.folder and (args.model or case.folder)
            if folder is None:
                folder = builtin_folder(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            elif not folder.exists():
                print(f"no {folder}: run `make model` to create it", file=sys.stderr)
                return 2
            print(
                f"{name}: {case.prompts} prompts x {case.group} rollouts x {case.tokens} tokens, "
                f"{args.threads} "
                f"threads, {args.pairs} pairs, micro-batches of {case.budget} positions or "
                f"{case.trl_batch} rollouts",
                flush=True,
            )
            try:
                figures[name] = table(
                    case, measure(case, setup_of(case, folder, args.threads), args, stack)
                )
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 2
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
