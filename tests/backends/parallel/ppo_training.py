"""Five steps of PPO with a tiny actor and a tiny critic: alone and on ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from realhf.algorithms.critic import CriticInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.api.model import CallContext, Model
from realhf.api.parallel import Parallel
from realhf.backends.parallel.process_groups import GroupRanks, World
from realhf.backends.training.value_head import ValueModel
from tests.backends.parallel import training

PPO = {"algo": "ppo", "gae_lambda": 0.9, "ppo_n_minibatches": 2, "kl_ctl": 0.1, "kl_target": 1.0, "kl_horizon": 50.0}


def alone() -> list[dict[str, float]]:
    """The statistics of both train calls of each step, of one worker."""
    return _steps(training.alone(training.tiny_model()), training.alone(ValueModel(training.tiny_model())))


def on_ranks(world: World, rank: int, size: int, parallel: Parallel) -> list[dict[str, float]]:
    """The same of a rank, which is given the whole batch."""
    actor = training.engine_on(world, size, parallel, training.tiny_model())
    return _steps(actor, training.engine_on(world, size, parallel, ValueModel(training.tiny_model())))


def _steps(actor: Any, critic: Any) -> list[dict[str, float]]:
    policy, values, found = PolicyGradientInterface(PPO), CriticInterface(PPO), []
    for step in range(len(training.GROUPS)):
        batch, context = training.batch(step), CallContext(step, 1000 + step, training.SPEC, Path())
        actor.version = critic.version = step
        with _together(critic, f"critic_inf {step}"):
            batch = batch.update(values.inference(Model("critic", critic, None), batch, context)[0])
        with _together(actor, f"actor_train {step}"):
            of_actor = policy.train_step(Model("actor", actor, None), batch, context)
        with _together(critic, f"critic_train {step}"):
            of_critic = values.train_step(Model("critic", critic, None), batch, context)
        actor.version = critic.version = step + 1
        found.append({**of_actor, **{f"critic/{name}": value for name, value in of_critic.items()}})
    return found


def _together(engine: Any, what: str) -> contextlib.AbstractContextManager[Any]:
    return engine.ranks.together(what) if isinstance(engine.ranks, GroupRanks) else contextlib.nullcontext()
