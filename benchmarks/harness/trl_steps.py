"""Program that trains with TRL's GRPOTrainer one step at a time, for ``benchmarks/trainer.py``.

    .venv-trl/bin/python trl_steps.py SETUP.json

It runs in TRL's own Python environment, so it imports nothing from realhf. The settings are those
that one would choose on a CPU: fp32, fused AdamW, no gradient checkpointing, no vLLM, no reference
model, no output files. TRL computes log-probabilities in chunks, without the logits of a whole
batch; the kernels of Liger and of the hub need a GPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step_lines import GIVEN, Lines, peak_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer


def alternating(completions: list[str], **_: Any) -> list[float]:
    """Return reward 0 and 1 in turns, so that every completion of a group has a non-zero
    advantage."""
    return [float(i % 2) for i in range(len(completions))]


class Steps(TrainerCallback):
    """Callback that waits for the parent process before each step, and reports the measurements to
    it afterwards."""

    def __init__(self, lines: Lines, trainer_of: Any) -> None:
        self._lines = lines
        self._trainer_of = trainer_of
        self._orders: Iterator[str] = lines.orders()
        self._began = self._used = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Wait for the parent's next order."""
        order = next(self._orders, None)
        if order is None:
            raise KeyboardInterrupt("the parent has ended")
        trainer = self._trainer_of()
        trainer.use_given = order == GIVEN
        trainer.generated = (0.0, 0.0)
        trainer.prepared = (0.0, 0.0)
        self._began, self._used = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Store the measured times. They are reported in ``on_log``, which also has the gradient
        norm."""
        step = time.perf_counter() - self._began
        cpu = time.process_time() - self._used
        trainer = self._trainer_of()
        self._times = {
            "generate_s": trainer.generated[0],
            "train_s": step - trainer.prepared[0],
            "step_s": step,
            "generate_cpu_s": trainer.generated[1],
            "train_cpu_s": cpu - trainer.prepared[1],
            "step_cpu_s": cpu,
            "sampled": trainer.sampled,
        }

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Report the step to the parent."""
        if logs is not None and "grad_norm" in logs:
            self._lines.answer(**self._times, grad_norm=float(logs["grad_norm"]), peak=peak_bytes())


class MeasuredTrainer(GRPOTrainer):
    """TRL's trainer, which also measures the time of generation. If the parent demands it, it uses
    given completions instead of generating."""

    given: list[list[int]]
    use_given = False
    sampled = 0
    generated = prepared = (0.0, 0.0)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        used = time.process_time()
        found = (
            (self.given, None) if self.use_given else super()._generate_single_turn(*args, **kwargs)
        )
        self.generated = time.perf_counter() - began, time.process_time() - used
        self.sampled = sum(map(len, found[0]))
        return found

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        began = time.perf_counter()
        used = time.process_time()
        found = super()._prepare_inputs(generation_batch)
        wall, cpu = self.prepared
        self.prepared = wall + time.perf_counter() - began, cpu + time.process_time() - used
        return found


def trainer_of(setup: dict[str, Any], out: str) -> MeasuredTrainer:
    """Return the trainer that ``setup`` describes."""
    tokenizer = AutoTokenizer.from_pretrained(setup["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32)
    optimizer = setup["optimizer"]
    sequences = len(setup["prompts"]) * setup["group"]
    config = GRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        per_device_train_batch_size=setup["trl_batch"],
        gradient_accumulation_steps=sequences // setup["trl_batch"],
        num_generations=setup["group"],
        max_completion_length=setup["tokens"],
        generation_kwargs={"min_new_tokens": setup["tokens"]},
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        epsilon=0.2,
        num_iterations=1,
        shuffle_dataset=False,
        optim="adamw_torch_fused",
        learning_rate=optimizer["lr"],
        weight_decay=optimizer["weight_decay"],
        adam_beta1=optimizer["beta1"],
        adam_beta2=optimizer["beta2"],
        adam_epsilon=optimizer["eps"],
        max_grad_norm=optimizer["gradient_clipping"],
        lr_scheduler_type="constant",
        max_steps=1 << 20,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    prompts = Dataset.from_dict({"prompt": setup["prompts"]})
    trainer = MeasuredTrainer(
        model, alternating, config, train_dataset=prompts, processing_class=tokenizer
    )
    trainer.given = setup["given"]
    return trainer


def main() -> None:
    """Take steps on the parent's orders."""
    lines = Lines()
    setup = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(setup["threads"])
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as out:
        trainer = trainer_of(setup, out)
        trainer.add_callback(Steps(lines, lambda: trainer))
        ids = trainer.processing_class(setup["prompts"])["input_ids"]
        lines.answer(prompt_tokens=setup["group"] * sum(map(len, ids)), peak=peak_bytes())
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()


if __name__ == "__main__":
    main()
