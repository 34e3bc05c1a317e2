"""Registries of named parts: interfaces, backends, data sources, datasets, environments, advantage
estimators, policy losses and schedulers.

Built-in parts are listed as strings and imported on first use, so that this module does not import
torch. An experiment file adds its own parts with ``@interfaces.register("name")``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")


class Registry:
    """Mapping from names to objects. Entries given as strings are imported on first use. A name can
    be registered only once."""

    def __init__(self, kind: str, builtin: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(builtin or {})

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under ``name``. It raises ValueError if the
        name is taken."""

        def add(item: T) -> T:
            """Register ``item`` under the decorator's name and return it."""
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            self._entries[name] = item
            return item

        return add

    def get(self, name: str) -> Any:
        """Return the object with this name. Raises KeyError for an unknown name; the message lists
        the known names and suggests a similar one."""
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise KeyError(
                f"unknown {self.kind} {name!r}{hint} (known: {', '.join(sorted(self._entries))})"
            )
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
        "critic": "realhf.algorithms.critic:CriticInterface",
        "env_rollout": "realhf.rollout.interface:EnvRolloutInterface",
        "outcome_reward": "realhf.algorithms.inference:OutcomeRewardInterface",
        "logprob": "realhf.algorithms.inference:LogprobInterface",
        "policy_gradient": "realhf.algorithms.policy_gradient:PolicyGradientInterface",
        "self_teacher": "realhf.algorithms.self_distillation:SelfTeacherInterface",
        "served_logprob": "realhf.backends.vllm.served_logprobs:ServedLogprobInterface",
        "dpo": "realhf.algorithms.preference:DPOInterface",
        "reward_model": "realhf.algorithms.preference:RewardModelInterface",
        "rows_evaluation": "realhf.algorithms.rows_evaluation:RowsEvaluation",
        "sft": "realhf.algorithms.sft:SFTInterface",
        "trajectory_stream": "realhf.trajectory.training.stream_interface:TrajectoryStreamInterface",
    },
)
backends = Registry(
    "backend",
    {
        "torch": "realhf.backends.training.torch_backend:TorchBackend",
        "ddp": "realhf.backends.parallel.ddp:DdpBackend",
        "fsdp2": "realhf.backends.parallel.fsdp:FsdpBackend",
    },
)
sources = Registry(
    "data source",
    {
        "tasks": "realhf.env.curriculum:TaskSource",
        "jsonl_chat": "realhf.data.chat_dataset:ChatDatasetSource",
        "mixture": "realhf.env.mixture_source:MixtureSource",
        "tokenized_rows": "realhf.data.tokenized_rows:TokenizedRowsSource",
        "trajectory_slots": "realhf.trajectory.training.stream_interface:BatchSlotSource",
    },
)
datasets = Registry(
    "dataset",
    {
        "jsonl_chat": "realhf.data.chat_dataset:ChatDataset",
        "tokenized_rows": "realhf.data.tokenized_rows:TokenizedRows",
    },
)
advantage_estimators = Registry(
    "advantage estimator",
    {
        "gae": "realhf.algorithms.advantages:reinforce_pp",
        "grpo": "realhf.algorithms.advantages:grpo",
        "grpo_nostd": "realhf.algorithms.advantages:grpo_nostd",
        "maxrl": "realhf.algorithms.advantages:maxrl",
        "pass_at_k": "realhf.algorithms.advantages:pass_at_k",
        "rloo": "realhf.algorithms.advantages:rloo",
        "reinforce": "realhf.algorithms.advantages:reinforce",
        "reinforce_pp": "realhf.algorithms.advantages:reinforce_pp",
        "reinforce_pp_baseline": "realhf.algorithms.advantages:grpo_nostd",
    },
)
environments = Registry(
    "environment",
    {
        "aws": "realhf.aws.environment:DEFINITION",
        "countdown": "realhf.environments.countdown:DEFINITION",
        "files": "realhf.environments.files:DEFINITION",
        "gymnasium": "realhf.env.adapters.gymnasium_text:DEFINITION",
        "harbor": "realhf.env.harbor.definition:DEFINITION",
        "mcp": "realhf.env.adapters.mcp_tools:DEFINITION",
        "openenv": "realhf.env.adapters.openenv:DEFINITION",
        "reasoning_gym": "realhf.env.adapters.reasoning_gym:DEFINITION",
        "sql": "realhf.environments.sql:DEFINITION",
        "textarena": "realhf.env.adapters.textarena:DEFINITION",
        "verifiers": "realhf.env.adapters.verifiers_environment:DEFINITION",
    },
)
policy_losses = Registry(
    "policy loss",
    {
        "ppo": "realhf.algorithms.policy_loss:ppo_loss",
        "cispo": "realhf.algorithms.policy_loss:cispo_loss",
        "reinforce": "realhf.algorithms.policy_loss:reinforce_loss",
    },
)
schedulers = Registry(
    "scheduler",
    {
        "join": "realhf.cluster.scheduler:DEFINITION",
        "local": "realhf.scheduler.local:DEFINITION",
        "ray": "realhf.cluster.engines.ray:DEFINITION",
        "slurm": "realhf.cluster.engines.slurm:DEFINITION",
    },
)
REGISTRIES: Mapping[str, Registry] = MappingProxyType(
    {
        "interfaces": interfaces,
        "backends": backends,
        "sources": sources,
        "datasets": datasets,
        "environments": environments,
        "advantage_estimators": advantage_estimators,
        "policy_losses": policy_losses,
        "schedulers": schedulers,
    }
)
"""All registries by name. Options refer to a registry with ``registry=NAME``."""


def registered_names(registry: str) -> Sequence[str]:
    """Return the names that are currently registered. Raises KeyError for an unknown registry."""
    return [*REGISTRIES[registry]]
