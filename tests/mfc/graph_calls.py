"""The calls that the bench runs, and the models that they run on, built as the experiments build
them."""

from __future__ import annotations

from dataclasses import replace

from experiments.policy_gradient import actor_gen as actor_gen_of
from experiments.policy_gradient import (
    actor_inf,
    build_training_graph,
    config_class,
    policy_options,
)
from experiments.sft import InitialWeights
from realhf.algorithms.options import PolicyGradientOptions
from realhf.algorithms.role_options import CriticConfig, CriticOptimizerConfig
from realhf.api.config import (
    GenConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
)
from realhf.aws.environment import AwsOptions

GROUP = 3
SESSIONS = 3
MAX_TURNS = 2
MAX_NEW = 40
TEMPERATURE = 0.8
SCALING = 2.0
BIAS = -0.25
CLIP = 1.25
"""Of rewards."""
EPS_CLIP = 0.2
EPS_CLIP_HIGHER = 0.3
KL_LOSS = 0.05
ACTOR_STEP = OptimizerConfig(
    lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-4, gradient_clipping=0.05
)
KL_REWARD = 0.1
DISCOUNT = 0.9
LAMBDA = 0.8
CRITIC_STEP = CriticOptimizerConfig(
    lr=2e-3, weight_decay=0.0, beta1=0.9, beta2=0.99, eps=1e-4, gradient_clipping=0.0
)
OVERLONG_LENGTH = 20
OVERLONG_BUFFER = 0.5
TRAIN_GROUPS = [[12, 20, 15, 9], [10, 18, 14, 11]]
TRAIN_REWARDS = [1.0, 0.0, 0.25, 0.0, 0.5, 0.5, 0.5, 0.5]
TRAIN_OUTCOME = [0, 0, 0, 3, 0, 0, 0, 0]
MAX_TOKENS = 48
"""Of a micro-batch, so that each batch of the tests has several."""


def graph_calls(policy, critic):
    """(models by role, calls): those of a GRPO run with a KL term, ``actor_inf``, those that PPO
    adds to it, and ``rew_inf`` once more with a penalty for length. ``policy`` and ``critic`` are
    folders."""
    common = {
        "env": AwsOptions(pool_size=SESSIONS),
        "gen": GenConfig(max_new_tokens=MAX_NEW, temperature=TEMPERATURE),
        "rollout": RolloutConfig(max_turns=MAX_TURNS),
        "mb_spec": MicroBatchConfig(max_tokens_per_mb=MAX_TOKENS),
    }
    rewards = {"reward_scaling": SCALING, "reward_bias": BIAS, "max_reward_clip": CLIP}
    grpo = config_class("aws")(
        experiment="grpo_aws",
        actor=ModelConfig(optimizer=ACTOR_STEP),
        ppo=PolicyGradientOptions(
            group_size=GROUP,
            kl_loss_coef=KL_LOSS,
            eps_clip=EPS_CLIP,
            eps_clip_higher=EPS_CLIP_HIGHER,
            **rewards,
        ),
        **common,
    )
    ppo = config_class("aws")(
        experiment="ppo",
        ppo=PolicyGradientOptions(
            algo="ppo", kl_ctl=KL_REWARD, discount=DISCOUNT, gae_lambda=LAMBDA
        ),
        critic=CriticConfig(path=str(critic), optimizer=CRITIC_STEP),
        **common,
    )
    long = replace(
        grpo,
        ppo=PolicyGradientOptions(
            overlong_length=OVERLONG_LENGTH, overlong_buffer=OVERLONG_BUFFER, **rewards
        ),
    )
    first = InitialWeights(str(policy))
    models, calls = build_training_graph(grpo, policy_options(grpo), first)
    of_ppo, ppo_calls = build_training_graph(ppo, policy_options(ppo), first)
    _, long_calls = build_training_graph(long, policy_options(long), first)
    calls += [
        actor_gen_of(grpo, policy_options(grpo)),
        actor_inf(grpo),
        *(call for call in ppo_calls if call.model_role == "critic"),
        *(replace(call, name="rew_inf_overlong") for call in long_calls if call.name == "rew_inf"),
    ]
    return {**models, "critic": of_ppo["critic"]}, calls
