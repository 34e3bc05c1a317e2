"""An experiment outside the package: its own backend, interface and data source, no language model.

The "weights" are one number that every train step adds to; behaviour at a step is chosen by
``experiment_name``, e.g. ``slow`` sleeps inside the train step, ``ends`` has five numbers only and
takes long to evaluate in the middle, ``paced`` takes its time with every step, and ``peaks`` is
best when its weight is 10.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from realhf.api.config import ExperimentConfig, run_folder
from realhf.api.experiment import (
    EvaluationSpec,
    ExperimentSpec,
    InterfaceType,
    MFCDef,
    ModelSpec,
    SourceSpec,
)
from realhf.api.source import SourceItem
from realhf.registry import backends, interfaces, sources


def fill(folder: Path) -> None:
    """Leave no byte on the disk of a folder, which has to be small."""
    assert shutil.disk_usage(folder).total < 1 << 24
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


class ToyEngine:
    version = 0
    tokenizer = None
    weight = 0.0

    def weights(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, folder: Path) -> None:
        (folder / "weight.json").write_text(json.dumps(self.weight))

    def load_checkpoint(self, folder: Path) -> None:
        self.weight = json.loads((folder / "weight.json").read_text())

    def export_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weight.json").write_text(json.dumps(self.weight))


@backends.register("toy")
class ToyBackend:
    def build(self, spec: ModelSpec, *, seed: int, total_train_steps: int) -> ToyEngine:
        del seed, total_train_steps
        if spec.path.endswith("broken"):
            raise ValueError(f"actor.path={spec.path}: this model is broken")
        return ToyEngine()


@interfaces.register("toy_train")
class ToyTrain:
    def __init__(self, behaviour: str = "") -> None:
        self._behaviour = behaviour

    def train_step(self, model: Any, sample: Any, context: Any) -> dict[str, Any]:
        model.engine.weight += float(sample["number"].sum())
        if self._behaviour == "slow" and context.step == 1:
            time.sleep(600)
        if self._behaviour == "paced":
            time.sleep(0.4)
        if self._behaviour == "fills" and context.step == 1:
            fill(context.run_dir)
        if self._behaviour == "fails" and context.step == 1:
            raise RuntimeError("the toy fell over")
        skipped = self._behaviour in ("skips", "stops") and context.step == 1
        stats = {
            "loss": model.engine.weight,
            "skipped": skipped,
            "mismatch_kl": 0.5,
            "episodes": ["an episode"],
        }
        return (
            {**stats, "stop": "it was skipped"} if self._behaviour == "stops" and skipped else stats
        )

    def evaluate(self, model: Any, args: Any, context: Any) -> dict[str, Any]:
        if self._behaviour == "ends" and context.step == 1:
            time.sleep(8)
        success = min(1.0, model.engine.weight / 100)
        if self._behaviour == "peaks":
            success = 1.0 - abs(model.engine.weight - 10.0) / 100
        entry = {"success": success, "low": 0.0, "high": 1.0, "episodes": args["n"]}
        return {
            "sampled": {"overall": entry, "easy": entry},
            "greedy": {"overall": entry, "easy": entry},
        }

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


@sources.register("toy_numbers")
class ToyNumbers:
    def __init__(self, seed: int, limit: int = 10**9) -> None:
        self._next = seed
        self._end = seed + limit

    def next_batch(self, n: int) -> list[SourceItem]:
        n = min(n, self._end - self._next)
        self._next += n
        return [SourceItem(f"n{i}", {}, {"number": [i]}) for i in range(self._next - n, self._next)]

    def record(self, results: Any) -> None:
        del results

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def stats(self) -> dict[str, float]:
        return {"drawn": float(self._next)}


def build(config: ExperimentConfig) -> ExperimentSpec:
    args = {"behaviour": config.experiment_name}
    n = config.dataset.train_bs_n_seqs
    numbers = {"limit": 5} if config.experiment_name == "ends" else {}
    return ExperimentSpec(
        name="toy",
        models={"actor": ModelSpec("actor", config.actor.path, trainable=True, backend="toy")},
        mfcs=(
            MFCDef(
                "actor_train",
                "actor",
                InterfaceType.TRAIN_STEP,
                "toy_train",
                args,
                n_seqs=n,
                input_keys=("number",),
                timeout_s=config.rpc.call_timeout_s,
            ),
        ),
        source=SourceSpec("toy_numbers", numbers, ("number",)),
        n_seqs=n,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
        export_role="actor",
        evaluation=EvaluationSpec(
            "actor", "toy_train", args, {"n": 400}, every_steps=config.evaluation.every_steps
        ),
    )
