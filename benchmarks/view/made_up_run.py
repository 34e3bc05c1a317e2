"""Writes a run that nobody trained, for measuring and testing how runs are shown: its numbers and
words are invented.

    python -m benchmarks.view.made_up_run FOLDER [--rollouts 100000]

Its rollouts are written by the same code as real ones: groups of eight, a twentieth with their
tokens, two in a hundred failed, tasks that are learned, that are forgotten and that are never
solved.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.monitor.rollouts.format import (
    FORMAT,
    PLAY,
    TRAIN,
    Header,
    PlayLine,
    TrainLine,
    encode_record,
)
from realhf.monitor.rollouts.writer import ShardWriter

GROUP = 8
GROUPS_OF_A_STEP = 16
TASKS = 250
TEMPLATES = 50
TOKENS_EVERY = 20
HOSTILE = (
    "<img src=x "
    "onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x00\x1b[31m\u202e"
)
_MEMBER = 64
_KINDS = ("beginner", "intermediate", "advanced", "expert", "warmup")


class MadeUpRun:
    """Run folder with invented data, written step by step to ``folder``. The same ``seed`` gives
    the same rollouts.

    ``longest``: number of tokens of the first rollout of each step, which is recorded with its
    tokens. ``info``: the environment's information for people about the episode, and about its last
    turn.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 1,
        failing: float = 0.02,
        longest: int = 0,
        info: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
    ) -> None:
        self._folder = folder
        self._longest = longest
        self._info = info
        self._failing = failing
        self._random = random.Random(seed)
        self._step = 0
        self._untrained: list[TrainLine] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(
            f"experiment: made_up\nseed: {seed}\nppo:\n  lr: {seed / 1000}\n"
        )
        header = {
            "rollouts": FORMAT,
            "writer": f"made-up-{seed}",
            "worker": "made-up/0",
            "began": time.time(),
        }
        self._shards = {
            family: ShardWriter(folder / "rollouts", Header(family=family, **header))
            for family in (PLAY, TRAIN)
        }

    def add_step(
        self, n_groups: int = GROUPS_OF_A_STEP, of: int = 100, *, train: bool = True
    ) -> None:
        """Write a step with ``n_groups`` groups. ``of``: number of steps over which the success
        rates of the tasks change from their initial to their final values. Without ``train``, the
        rollouts are only played until ``train`` is called."""
        self._step += 1
        lines: list[tuple[PlayLine, TrainLine | None]] = []
        for number in range(n_groups):
            lines += self._group(number, min(1.0, self._step / of))
        if self._longest:
            for line in lines[0]:
                if line is not None:
                    line.has_tokens = True
            lines[0][0].length = self._longest
            if lines[0][1] is not None:
                lines[0][1].n_tokens = self._longest
        for start in range(0, len(lines), _MEMBER):
            part = lines[start : start + _MEMBER]
            for line, _ in part:
                self._shards[PLAY].add(self._played(line), line)
            self._shards[PLAY].flush()
            self._untrained += [line for _, line in part if line is not None]
            if train:
                self.train()
        valid = [line for line, _ in lines if line.reward is not None]
        metrics = {
            "reward/mean": sum(line.reward or 0.0 for line in valid) / max(1, len(valid)),
            "success/overall": sum(line.success for line in valid) / max(1, len(valid)),
            "rollouts/played": len(lines),
            "rollouts/failed": len(lines) - len(valid),
            "time/step": 1.0,
        }
        with (self._folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self._step, **metrics}) + "\n")

    def train(self) -> None:
        """Write the trainer's records of the rollouts that were only played so far."""
        trained = self._untrained
        self._untrained = []
        for line in trained:
            self._shards[TRAIN].add(self._trained(line) if line.has_tokens else None, line)
        self._shards[TRAIN].flush()

    def close(self) -> None:
        """Close the files."""
        for shards in self._shards.values():
            shards.close()

    def _group(self, number: int, share: float) -> list[tuple[PlayLine, TrainLine | None]]:
        task = self._random.randrange(TASKS)
        chance = {0: 0.02, 1: 1 - share, 2: share}.get(task % 5, 0.3 + 0.5 * share)
        sample = f"task-{task:03d}@{self._step}-{number}"
        return [self._row(f"{sample}/{row}", task, chance) for row in range(GROUP)]

    def _row(self, name: str, task: int, chance: float) -> tuple[PlayLine, TrainLine | None]:
        draw = self._random.random
        failure = ("simulator", "timeout")[task % 2] if draw() < self._failing else None
        success = failure is None and draw() < chance
        reward = (
            None if failure else 1.0 if success else round(draw() * 0.4, 3) if draw() < 0.5 else 0.0
        )
        tokens = self._random.randrange(TOKENS_EVERY) == 0
        play = PlayLine(
            id=name, time=1.7e9 + self._step, step=self._step, version=self._step - 1, task=f"task-{task:03d}",
            template=f"kind-{task % TEMPLATES:02d}",
            group=_KINDS[task % 5], env="made_up", reward=reward, success=success, length=20 + int(180 * draw()),
            turns=1 + int(5 * draw()), truncated=failure is None and not success and draw() < 0.1, failure=failure,
            seconds=round(3 * draw(), 2), has_tokens=tokens,
        )  # fmt: skip
        if failure:
            return play, None
        train = TrainLine(
            id=name, time=1.7e9 + self._step, step=self._step, version=self._step,
            advantage=round(2 * draw() - 1, 4), mismatch=round(1e-4 * draw(), 7),
            ratio_max=round(1 + 0.3 * draw(), 4), clip_fraction=round(0.1 * draw(), 4),
            n_tokens=play.length, staleness=int(2 * draw()), has_tokens=tokens,
        )  # fmt: skip
        return play, train

    def _played(self, line: PlayLine) -> bytes:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You operate an account."},
            {"role": "user", "content": f"Do {line.task}. {HOSTILE if line.row == 0 else ''}"},
        ]
        for turn in range(line.turns):
            call = {
                "id": f"c{turn}",
                "name": "shell",
                "arguments": {"command": f"aws s3 ls bucket-{turn}"},
            }
            said = f"I look at it, {turn}."
            messages.append(
                {"role": "assistant", "content": said, "tool_calls": [call], "turn": turn}
            )
            messages.append(
                {"role": "tool", "content": "An error occurred" if line.failure else "bucket\n" * 6}
            )
        turn = {
            "reward": 0.0,
            "version": [line.version, line.version],
            "n_tokens": 9,
            "info": {"progress": 0.5},
        }
        record = {
            "id": line.id, "task": line.task, "group": line.group, "seed": 1, "env": line.env, "split": line.split,
            "step": line.step, "status": line.failure or "finished", "message": "", "reward": line.reward,
            "rewards": {}, "messages": messages, "turns": [turn] * line.turns,
        }  # fmt: skip
        if self._info is not None:
            record["info"] = self._info[0]
            record["turns"] = [*record["turns"][:-1], turn | {"info": self._info[1]}]
        if line.has_tokens:
            record["tokens"] = {
                "prompt_ids": list(range(10)), "ids": list(range(line.length)),
                "logprobs": [-round(self._random.random(), 4) for _ in range(line.length)], "mask": [1] * line.length,
                "versions": [line.version] * line.length, "turn_starts": [0],
                "texts": [f" word{place}" for place in range(line.length)],
            }  # fmt: skip
        return encode_record(record)

    def _trained(self, line: TrainLine) -> bytes:
        size = line.n_tokens
        draw = self._random.random
        old = [-round(draw(), 4) for _ in range(size)]
        return encode_record({
            "id": line.id, "step": line.step, "version": line.version, "first_token": 10, "mask": [1] * size,
            "old": old, "before": old, "new": old, "ratio": [round(0.9 + 0.2 * draw(), 4) for _ in range(size)],
            "advantage": [line.advantage] * size, "clipped": [int(draw() < 0.05) for _ in range(size)],
        })  # fmt: skip


def write_run(folder: Path, rollouts: int) -> None:
    """Write a run with about ``rollouts`` rollouts to ``folder``."""
    run = MadeUpRun(folder)
    steps = max(1, rollouts // (GROUP * GROUPS_OF_A_STEP))
    left = max(1, rollouts // GROUP)
    for number in range(steps):
        run.add_step(left // (steps - number), steps)
        left -= left // (steps - number)
    run.close()


def main() -> None:
    """Write a run of the size given on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=100_000)
    given = parser.parse_args()
    write_run(given.folder, given.rollouts)


if __name__ == "__main__":
    main()
