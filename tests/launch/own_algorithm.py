"""Supervised training that looks away from what the model knows already (a focal loss): an
algorithm of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import ExperimentConfig, run_folder
from realhf.api.experiment import ExperimentSpec, InterfaceType, MFCDef, ModelSpec, SourceSpec
from realhf.api.option import option, section
from realhf.api.sample import MicroBatchSpec
from realhf.base.dataclass_json import to_json_value
from realhf.registry import interfaces


@dataclass
class FocalOptions:
    """A token's loss is multiplied by (1 - probability) ** focus."""

    focus: float = option(
        2.0,
        "The larger it is, the less a likely token counts; 0 is the plain loss.",
        at_least=0,
        at_most=5,
    )
    chats: str = option("", "This JSON Lines file holds a conversation per line, under 'messages'.")


@dataclass
class Config(ExperimentConfig):
    """What every experiment has, and the section ``algorithm``."""

    algorithm: FocalOptions = section(FocalOptions)


@interfaces.register("focal_sft")
class FocalInterface(SFTInterface):
    """The supervised step with another loss. Options arrive as plain values."""

    def __init__(self, algorithm: dict[str, Any]) -> None:
        super().__init__()
        self._focus = FocalOptions(**algorithm).focus

    def loss_of(self, logprobs: Any, part: Any) -> tuple[Any, dict[str, float]]:
        """The focal loss of a micro-batch; what is reported stays the plain one."""
        _, stats = super().loss_of(logprobs, part)
        unlikely = (1 - logprobs.detach().exp()).clamp(0, 1) ** self._focus
        total, _ = super().loss_of(logprobs * unlikely, part)
        return total, stats | {"focus_sum": float(unlikely.sum())}


def build(config: Config) -> ExperimentSpec:
    """One call, on rows of the file."""
    rows = {"path": config.algorithm.chats}
    keys = ("packed_input_ids", "loss_mask")
    actor = ModelSpec("actor", config.actor.path, trainable=True, optimizer=config.actor.optimizer)
    train = MFCDef(
        "actor_train",
        "actor",
        InterfaceType.TRAIN_STEP,
        "focal_sft",
        {"algorithm": to_json_value(config.algorithm)},
        n_seqs=config.dataset.train_bs_n_seqs,
        input_keys=keys,
        mb_spec=MicroBatchSpec(config.mb_spec.n_mbs, config.mb_spec.max_tokens_per_mb),
        timeout_s=config.rpc.call_timeout_s,
    )
    return ExperimentSpec(
        name="focal",
        models={"actor": actor},
        mfcs=(train,),
        source=SourceSpec("jsonl_chat", rows, keys=keys, dataset_args=rows),
        n_seqs=config.dataset.train_bs_n_seqs,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
    )
