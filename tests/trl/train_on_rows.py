"""Three steps of TRL's SFTTrainer or DPOTrainer on all rows of a file, on CPU.

    python train_on_rows.py sft|dpo INPUT.json OUTPUT.json

Runs in .venv-trl. INPUT holds ``model`` (a folder), ``rows``, ``lr`` and ``options`` of the
trainer's configuration; OUTPUT gets the ``losses`` of the steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

STEPS = 3


def main(mode: str, given: Path, found: Path) -> None:
    job = json.loads(given.read_text())
    make_config, base = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}[mode]
    losses: list[float] = []

    class Recording(base):  # type: ignore[misc, valid-type]
        """The trainer, which rounds the losses that it logs."""

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            output_dir=folder,
            per_device_train_batch_size=len(job["rows"]),
            max_steps=STEPS,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-5,
            max_grad_norm=1.0,
            optim="adamw_torch",
            gradient_checkpointing=False,
            max_length=None,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            **job["options"],
        )
        trainer = Recording(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32"),
            args=config,
            train_dataset=Dataset.from_list(job["rows"]),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
        )
        trainer.train()
    found.write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
