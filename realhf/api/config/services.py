"""Checkpoints, the control plane, and what a person sees: options that the launcher itself reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from realhf.api.config.option import option


@dataclass
class SchedulerConfig:
    """How the processes of a run are started. The scheduler that is chosen brings options of its own."""

    path: str = option("local", "The scheduler: a registered name, or FILE.py:Name for one of your own.")


@dataclass
class AllocationConfig:
    """Which GPUs the workers of a run get."""

    gpus: list[int] = option(
        [],
        "Model workers, then generation workers, get one of these GPUs each, numbered from 0 among those that the "
        "launcher sees (CUDA_VISIBLE_DEVICES, where it is set); with none named, all of those are dealt out, and "
        "generation gets others than training where there are enough.",
        at_least=0,
    )
    share: bool = option(
        False, "Generation workers get the GPUs of the model workers, in turn, instead of further ones."
    )

    def problems(self, name: str) -> Iterator[str]:
        """A GPU is named once, and sharing is about named ones."""
        if len(set(self.gpus)) < len(self.gpus):
            yield f"{name}.gpus={self.gpus}: give different GPUs"
        if self.share and not self.gpus:
            yield f"{name}.share: has no effect without {name}.gpus"


@dataclass
class CheckpointConfig:
    """Recovery checkpoints."""

    ckpt_freq_steps: int = option(5, "A checkpoint is written every so many steps.", at_least=1)
    keep: int = option(2, "This many checkpoints stay on the disk.", at_least=1)


@dataclass
class RpcConfig:
    """Deadlines of the control plane."""

    connect_timeout_s: float = option(120.0, "A worker comes up within these seconds.", above=0)
    control_timeout_s: float = option(30.0, "A worker answers a control message within these seconds.", above=0)
    call_timeout_s: float = option(1800.0, "A call of the graph ends within these seconds.", above=0)
    heartbeat_s: float = option(2.0, "A worker shows that it lives every so many seconds.", above=0)
    dead_after_s: float = option(8.0, "A worker that was silent for these seconds counts as dead.", above=0)
    shm: bool = option(True, "Tensors move between workers of a host through shared memory.")

    def problems(self, name: str) -> Iterator[str]:
        """A worker must get the chance to send a heartbeat."""
        if self.dead_after_s <= self.heartbeat_s:
            limit = f"{name}.dead_after_s={self.dead_after_s:g}"
            yield f"{name}.heartbeat_s={self.heartbeat_s:g}: must be less than {limit}"


ALL_ROLLOUTS = "all"
"""The value of ``monitor.rollouts`` that keeps every rollout."""


TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass
class MonitorConfig:
    """What a person sees of a run."""

    progress: bool = option(True, "A live display shows the run.")
    trackers: list[str] = option(
        ["tensorboard"],
        "Metrics, evaluations and configuration go to these as well; each but tensorboard is an extra of the package.",
        choices=TRACKERS,
    )
    episodes_per_step: int = option(2, "This many sampled episodes of a step are written as text.", at_least=0)
    rollouts: str = option(
        ALL_ROLLOUTS,
        "Rollouts are kept in the run folder: all, 0 for none, or about so many of a step, in whole groups.",
    )
    rollout_tokens: float = option(
        0.25,
        "Of the groups whose rollouts are kept, this share keeps every token's log-probabilities, ratio and advantage.",
        at_least=0,
        at_most=1,
    )
    rollout_bytes: int = option(
        2 * 2**30, "Recording of rollouts stops when their folder holds so many bytes.", at_least=0
    )
    episodes_every_steps: int = option(
        20, "The trackers get transcripts of every so many steps; 0 of the first step only.", at_least=0
    )

    def problems(self, name: str) -> Iterator[str]:
        """Rollouts are counted, or all of them are kept."""
        if self.rollouts != ALL_ROLLOUTS and not (self.rollouts.isascii() and self.rollouts.isdigit()):
            yield f"{name}.rollouts={self.rollouts}: must be all, or a number of rollouts for each step (0 for none)"
