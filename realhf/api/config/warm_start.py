"""The supervised warm start of a policy."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.model import LRSchedule, OptimizerConfig
from realhf.api.config.option import option, section


@dataclass
class WarmStartOptimizerConfig(OptimizerConfig):
    """AdamW, over before the run begins: with another learning rate it would have begun elsewhere."""

    lr: float = option(1e-5, "The learning rate after the warm-up.", above=0, on_resume="refuses")


@dataclass
class WarmStartConfig:
    """Supervised warm start of a policy on episodes that a scripted solver really played.

    The demonstrations are of mixed quality, as logs of real operators are: some make a mistake and leave it at that,
    some make one and repair it. A warm start on perfect episodes only would leave reinforcement learning little to
    do."""

    episodes_per_task: int = option(45, "Every task template is demonstrated this many times.", at_least=1)
    habit_fraction: float = option(
        0.35, "This fraction of the demonstrations makes a mistake and leaves it at that.", at_least=0, at_most=1
    )
    recovery_fraction: float = option(
        0.15, "This fraction of the demonstrations makes a mistake and repairs it.", at_least=0, at_most=1
    )
    train_steps: int = option(400, "The warm start makes this many train steps.", at_least=1)
    batch_size: int = option(32, "Every step of the warm start trains on this many demonstrations.", at_least=1)
    optimizer: WarmStartOptimizerConfig = section(
        WarmStartOptimizerConfig,
        weight_decay=0.01,
        warmup_steps_proportion=0.05,
        lr_scheduler_type=LRSchedule.cosine,
    )
    cache_dir: str | None = option(
        None, "Warm starts are kept in this folder; without one in 'warm_start' below fileroot.", on_resume="free"
    )
