"""Program that takes GRPO steps with our engine one at a time, for ``benchmarks/trainer.py``.

    python realhf_steps.py SETUP.json

A step does what a worker does for the calls ``actor_gen`` and ``actor_train`` of a run, but without
an environment: it generates with the engine embedded in the trainer, and trains on the batch with
the policy-gradient interface.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from step_lines import GIVEN, Lines, peak_bytes

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.api.config import GenConfig, OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import CallContext, GenOutput, GenRequest, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.torch_backend import TorchBackend


class Steps:
    """Model and interface that take the steps. ``setup``: the settings that
    ``benchmarks/trainer.py`` writes for both sides."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        optimizer = OptimizerConfig(**setup["optimizer"], warmup_steps_proportion=0.0)
        spec = ModelSpec("actor", setup["model"], optimizer=optimizer, trainable=True)
        self._engine = TorchBackend("cpu").build(spec, seed=1, total_train_steps=1 << 20)
        tokenizer: Any = self._engine.tokenizer
        self._model = Model("actor", self._engine, tokenizer)
        self._stops = (tokenizer.eos_token_id,)
        prompts = [tokenizer(text)["input_ids"] for text in setup["prompts"]]
        self.prompts = [ids for ids in prompts for _ in range(setup["group"])]
        self._interface = PolicyGradientInterface({"algo": "grpo", "group_size": setup["group"]})

    def step(self, number: int, *, given: bool) -> dict[str, float]:
        """Take step ``number`` and return its times and statistics. ``given``: whether to train on
        given completions instead of generating."""
        began = time.perf_counter()
        used = time.process_time()
        logprobs, completions = self._given() if given else self._generated(number)
        generated = time.perf_counter()
        cpu_generated = time.process_time()
        stats = self._interface.train_step(
            self._model, self._batch(completions, logprobs), self._context(number)
        )
        self._engine.version = number + 1
        ended = time.perf_counter()
        return {
            "generate_s": generated - began,
            "train_s": ended - generated,
            "step_s": ended - began,
            "generate_cpu_s": cpu_generated - used,
            "train_cpu_s": time.process_time() - cpu_generated,
            "step_cpu_s": time.process_time() - used,
            "sampled": sum(map(len, completions)),
            "grad_norm": stats["grad_norm"],
            "peak": peak_bytes(),
        }

    def _generated(self, number: int) -> tuple[list[list[float]], list[list[int]]]:
        n = self._setup["tokens"]
        config = GenConfig(max_new_tokens=n, min_new_tokens=n)
        requests = [
            GenRequest(i, ids, seed=(number << 20) + i) for i, ids in enumerate(self.prompts)
        ]
        made: list[GenOutput] = self._engine.generator().generate(
            requests, config, stop_ids=self._stops, seed=number
        )
        return [output.logprobs for output in made], [output.token_ids for output in made]

    def _given(self) -> tuple[list[list[float]], list[list[int]]]:
        """Return the given completions and their log-probabilities under the current weights."""
        completions = self._setup["given"]
        blank = self._batch(completions, [[0.0] * len(ids) for ids in completions])
        found = self._engine.logprobs(blank, temperature=1.0, mb_spec=self._spec)
        lengths = [
            len(prompt) + len(ids) - 1
            for prompt, ids in zip(self.prompts, completions, strict=True)
        ]
        parts = found.split(lengths)
        return [
            part[-len(ids) :].tolist() for part, ids in zip(parts, completions, strict=True)
        ], completions

    def _batch(self, completions: list[list[int]], logprobs: list[list[float]]) -> SequenceSample:
        group = self._setup["group"]
        ids = []
        mask = []
        behaviour = []
        lengths = []
        for prompt, completion, found in zip(self.prompts, completions, logprobs, strict=True):
            ids += [*prompt, *completion]
            mask += [False] * len(prompt) + [True] * len(completion)
            behaviour += [0.0] * (len(prompt) - 1) + found
            lengths.append(len(prompt) + len(completion))
        in_groups = [lengths[i : i + group] for i in range(0, len(lengths), group)]
        rewards = [float(i % 2) for i in range(len(lengths))]
        data = {
            "packed_input_ids": torch.tensor(ids),
            "loss_mask": torch.tensor(mask),
            "packed_logprobs": torch.tensor(behaviour),
            "rewards": torch.tensor(rewards),
        }
        seqlens = {
            "packed_input_ids": in_groups,
            "loss_mask": in_groups,
            "packed_logprobs": [[n - 1 for n in part] for part in in_groups],
            "rewards": [[1] * len(part) for part in in_groups],
        }
        return SequenceSample.from_tensors([str(i) for i in range(len(in_groups))], data, seqlens)

    @property
    def _spec(self) -> MicroBatchSpec:
        return MicroBatchSpec(1, self._setup["budget"])

    def _context(self, number: int) -> CallContext:
        return CallContext(number, number, self._spec, Path("."))


def main() -> None:
    """Take steps on the parent's orders."""
    lines = Lines()
    setup = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(setup["threads"])
    steps = Steps(setup)
    lines.answer(prompt_tokens=sum(map(len, steps.prompts)), peak=peak_bytes())
    for number, order in enumerate(lines.orders()):
        lines.answer(**steps.step(number, given=order == GIVEN))


if __name__ == "__main__":
    main()
