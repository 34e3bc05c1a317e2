"""The parts that have a name: interfaces, backends, data sources, datasets, environments, advantage estimators, policy
losses and schedulers.

Built-in parts are listed here as text, so that this module knows everybody and imports nobody. An experiment file adds
its own with ``@interfaces.register("name")``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from realhf.api.registry import Registry

interfaces = Registry(
    "interface",
    {
        "critic": "realhf.algorithms.critic.interface:CriticInterface",
        "env_rollout": "realhf.rollout.interface:EnvRolloutInterface",
        "outcome_reward": "realhf.algorithms.reward:OutcomeRewardInterface",
        "logprob": "realhf.algorithms.logprob:LogprobInterface",
        "policy_gradient": "realhf.algorithms.policy_gradient.interface:PolicyGradientInterface",
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
        "trajectory_slots": "realhf.trajectory.training.stream_interface:BatchSlotSource",
    },
)
datasets = Registry("dataset", {"jsonl_chat": "realhf.data.chat_dataset:ChatDataset"})
advantage_estimators = Registry(
    "advantage estimator",
    {
        "gae": "realhf.algorithms.policy_gradient.advantages:gae",
        "grpo": "realhf.algorithms.policy_gradient.advantages:grpo",
        "grpo_nostd": "realhf.algorithms.policy_gradient.advantages:grpo_nostd",
        "rloo": "realhf.algorithms.policy_gradient.advantages:rloo",
        "reinforce": "realhf.algorithms.policy_gradient.advantages:reinforce",
        "reinforce_pp": "realhf.algorithms.policy_gradient.advantages:reinforce_pp",
        "reinforce_pp_baseline": "realhf.algorithms.policy_gradient.advantages:reinforce_pp_baseline",
    },
)
environments = Registry(
    "environment",
    {
        "aws": "realhf.aws.environment:DEFINITION",
        "countdown": "realhf.environments.countdown:DEFINITION",
        "files": "realhf.environments.files:DEFINITION",
        "gymnasium": "realhf.env.adapters.gymnasium_text:DEFINITION",
        "openenv": "realhf.env.adapters.openenv:DEFINITION",
        "sql": "realhf.environments.sql:DEFINITION",
        "verifiers": "realhf.env.adapters.verifiers_environment:DEFINITION",
    },
)
policy_losses = Registry(
    "policy loss",
    {
        "ppo": "realhf.algorithms.policy_gradient.losses:ppo_loss",
        "cispo": "realhf.algorithms.policy_gradient.losses:cispo_loss",
        "reinforce": "realhf.algorithms.policy_gradient.losses:reinforce_loss",
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
"""By the name that an option gives as ``registry=``."""


def registered_names(registry: str) -> Sequence[str]:
    """The names that are known to a registry now. Raises KeyError for a registry that does not exist."""
    return [*REGISTRIES[registry]]
