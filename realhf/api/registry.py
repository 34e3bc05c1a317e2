"""Named parts: interfaces, backends, data sources, advantage estimators and losses.

A registry maps a name to an object, or to a ``"module:attribute"`` string that is imported on first
use, so that naming a part costs no import of torch. Built-in parts are listed here; an experiment
file adds its own with ``@interfaces.register("name")``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Registry:
    """Name to object; an unknown name lists the known ones, a second registration is an error."""

    def __init__(self, kind: str, builtin: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(builtin or {})

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an object under ``name``. Raises ValueError if the name is taken."""

        def add(item: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            self._entries[name] = item
            return item

        return add

    def register_lazy(self, name: str, path: str) -> None:
        """Add ``"module:attribute"`` under ``name``; imported when first asked for."""
        self.register(name)(path)

    def get(self, name: str) -> Any:
        """The object called ``name``. Raises KeyError that names close and known names."""
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise KeyError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(sorted(self._entries))})")
        item = self._entries[name]
        if isinstance(item, str):
            module, _, attribute = item.partition(":")
            item = self._entries[name] = getattr(importlib.import_module(module), attribute)
        return item

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


interfaces = Registry(
    "interface",
    {
        "env_rollout": "realhf.rollout.interface:EnvRolloutInterface",
        "outcome_reward": "realhf.algorithms.reward:OutcomeRewardInterface",
        "logprob": "realhf.algorithms.logprob:LogprobInterface",
        "policy_gradient": "realhf.algorithms.policy_gradient:PolicyGradientInterface",
        "sft": "realhf.algorithms.sft:SFTInterface",
        "trajectory_stream": "realhf.trajectory.stream_interface:TrajectoryStreamInterface",
    },
)
backends = Registry("backend", {"torch": "realhf.backends.torch_backend:TorchBackend"})
sources = Registry(
    "data source",
    {
        "task_curriculum": "realhf.env.task_source:TaskCurriculumSource",
        "jsonl_chat": "realhf.data.chat_dataset:ChatDatasetSource",
        "trajectory_slots": "realhf.trajectory.batch_slots:BatchSlotSource",
    },
)
datasets = Registry("dataset", {"jsonl_chat": "realhf.data.chat_dataset:ChatDataset"})
advantage_estimators = Registry(
    "advantage estimator",
    {
        "grpo": "realhf.algorithms.advantages:grpo",
        "grpo_nostd": "realhf.algorithms.advantages:grpo_nostd",
        "rloo": "realhf.algorithms.advantages:rloo",
        "reinforce": "realhf.algorithms.advantages:reinforce",
        "reinforce_pp": "realhf.algorithms.advantages:reinforce_pp",
        "reinforce_pp_baseline": "realhf.algorithms.advantages:reinforce_pp_baseline",
    },
)
policy_losses = Registry(
    "policy loss",
    {
        "ppo": "realhf.algorithms.losses:ppo_loss",
        "cispo": "realhf.algorithms.losses:cispo_loss",
        "reinforce": "realhf.algorithms.losses:reinforce_loss",
    },
)
