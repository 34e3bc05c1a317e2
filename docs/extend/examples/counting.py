"""An experiment made of a source, a backend and a metric of one's own, each in a file beside this one."""

from __future__ import annotations

from pathlib import Path

from realhf.api.config import ExperimentConfig, run_folder
from realhf.api.experiment import ExperimentSpec, InterfaceType, MFCDef, ModelSpec, SourceSpec
from realhf.base.plugin import load_plugin

for part in ("counting_source", "bigram_backend", "sure_metric"):
    load_plugin(Path(__file__).with_name(f"{part}.py"))

VOCABULARY, LENGTH = 10, 8


def build(config: ExperimentConfig) -> ExperimentSpec:
    """Build one call: a supervised step on the sequences that the source draws."""
    n_seqs = config.dataset.train_bs_n_seqs
    actor = ModelSpec(
        "actor",
        path="",
        trainable=True,
        backend="bigram",
        backend_args={"vocabulary": VOCABULARY},
        optimizer=config.actor.optimizer,
    )
    train = MFCDef(
        "actor_train",
        "actor",
        InterfaceType.TRAIN_STEP,
        "sft_with_sure",
        n_seqs=n_seqs,
        input_keys=("packed_input_ids",),
        timeout_s=config.rpc.call_timeout_s,
    )
    return ExperimentSpec(
        name="counting",
        models={"actor": actor},
        mfcs=(train,),
        source=SourceSpec("counting", {"vocabulary": VOCABULARY, "length": LENGTH}, keys=("packed_input_ids",)),
        n_seqs=n_seqs,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
    )
