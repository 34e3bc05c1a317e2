"""Model roles, their optimizer, and the small policy that is made here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from realhf.api.config.option import option, section

_NO_ADAPTERS = "there are no adapters with rank 0"


class LRSchedule(Enum):
    """What the learning rate does after its warm-up: it stays, or decays to 0 at the last train step."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class OptimizerConfig:
    """AdamW. Warm-up and decay are fractions of total_train_steps."""

    lr: float = option(1e-6, "The learning rate after the warm-up.", above=0, on_resume="warns")
    weight_decay: float = option(0.05, "Every update shrinks the weights by this times the learning rate.", at_least=0)
    beta1: float = option(
        0.9, "This much of the running mean of the gradients stays in every update.", at_least=0, at_most=1
    )
    beta2: float = option(
        0.95, "This much of the running mean of the squared gradients stays in every update.", at_least=0, at_most=1
    )
    eps: float = option(1e-5, "AdamW adds this to the denominator of every update.", at_least=0)
    warmup_steps_proportion: float = option(
        0.001, "The learning rate rises from 0 over this fraction of the steps.", at_least=0, at_most=1
    )
    lr_scheduler_type: LRSchedule = option(LRSchedule.constant, "The learning rate follows this after the warm-up.")
    gradient_clipping: float = option(
        1.0, "A gradient with a larger norm is scaled down to this norm; 0 never scales.", at_least=0
    )
    offload: bool = option(
        False,
        "The moments of AdamW are in the memory of the host between steps; on GPUs, by backends torch and ddp.",
        on_resume="free",
    )


@dataclass
class ParallelConfig:
    """How several workers of a role share its training; the product is the number of its workers."""

    dp: int = option(
        0, "So many copies of the model share the sequences of a batch; 0: as many as the workers allow.", at_least=0
    )
    fsdp: int = option(
        0, "Every copy is cut over so many workers; 0: over all of them by backend fsdp2, else over one.", at_least=0
    )
    tp: int = option(1, "Every layer is cut over so many workers; no backend does this yet.", at_least=1)


@dataclass
class LoraConfig:
    """Low-rank adapters on linear layers, which train in place of the weights that they stand beside."""

    rank: int = option(
        0, "Adapters of this rank train and all other weights stay as they are; 0 trains all weights.", at_least=0
    )
    alpha: float = option(
        32.0,
        "The product of an adapter counts this many times, divided by actor.lora.rank.",
        above=0,
        idle=_NO_ADAPTERS,
    )
    targets: list[str] = option(
        [],
        "Linear layers of the blocks with these names, or ends of names, have adapters, e.g. [q_proj, v_proj]; none "
        "named: all of them.",
        idle=_NO_ADAPTERS,
    )
    dropout: float = option(
        0.0,
        "In train steps an adapter does not see this share of its inputs; supervised training only.",
        at_least=0,
        at_most=0.9,
        idle=_NO_ADAPTERS,
    )

    def chosen(self) -> LoraConfig | None:
        """The same options as plain values; None, and only ``rank`` is read, where there are no adapters."""
        return LoraConfig(self.rank, self.alpha, list(self.targets), self.dropout) if self.rank else None


@dataclass
class ModelConfig:
    """A model role: where its weights come from, who holds them, and how they train."""

    path: str = option("builtin", "The model is 'builtin' (the small policy made here), a folder, or a hub id.")
    warm_start: bool = option(
        False,
        "A model of actor.path is trained on demonstrations first, as the section warm_start says; the built-in policy "
        "always is.",
        idle="it is about a model of one's own, in an experiment that does not itself train on demonstrations",
    )
    workers: list[int] = option(
        [0], "The model workers with these indices hold the model.", at_least=0, on_resume="free"
    )
    backend: str = option(
        "torch",
        "This backend trains the model: torch on one worker, ddp with a copy on each of several, fsdp2 with the model "
        "cut over several.",
        registry="backends",
        on_resume="free",
    )
    parallel: ParallelConfig = section(ParallelConfig, on_resume="free")
    dtype: str = option(
        "float32",
        "Weights have this type; float16 would need a loss scale, which no backend has.",
        choices=("float32", "bfloat16"),
    )
    gradient_checkpointing: bool = option(
        False,
        "Activations are computed again in the backward pass, which saves memory and costs time.",
        on_resume="free",
    )
    compile: bool = option(
        False,
        "The blocks of the model are compiled by torch.compile for training and scoring: the first steps take minutes, "
        "and a compiler must be there (g++ on the CPU, triton on GPUs).",
        on_resume="free",
    )
    chat_template_kwargs: dict[str, Any] = option(
        {}, "Every text is rendered with these variables of the chat template, e.g. {enable_thinking: false}."
    )
    optimizer: OptimizerConfig = section(OptimizerConfig)
    lora: LoraConfig = section(LoraConfig)


@dataclass
class ReferenceConfig:
    """The frozen reference policy: the actor's first weights. With adapters it is the actor with its adapters off, on
    the workers that hold the actor."""

    workers: list[int] = option([0], "The model workers with these indices hold the reference.", at_least=0)


@dataclass
class BuiltinModelConfig:
    """The small policy for machines without downloads (a Qwen3 configuration)."""

    vocab_size: int = option(1536, "The tokenizer learns this many tokens.", at_least=1)
    hidden_size: int = option(128, "The hidden states are this wide: num_heads times an even head width.", at_least=1)
    num_layers: int = option(4, "The policy has this many layers.", at_least=1)
    num_heads: int = option(4, "Every layer has this many attention heads.", at_least=1)
    intermediate_size: int = option(384, "The feed-forward networks are this wide.", at_least=1)
    max_positions: int = option(1024, "The context holds this many tokens.", at_least=1)
