"""Keeps the weight of the KL term in the reward, fixed or steered towards a target."""

from __future__ import annotations

import math

from realhf.algorithms.policy_gradient.options import ResolvedOptions

_MOST_ERROR = 0.2


class KLController:
    """Holds ``value``, which multiplies the KL divergence in the reward; it starts as ``ppo.kl_ctl``.

    With ``ppo.kl_target`` every train step moves it: value *= 1 + clip(kl / target - 1, +-0.2) * min(1, n / horizon),
    where ``kl`` (nats) is the mean over the step's ``n`` trainable rollouts of what a rollout's sampled tokens sum
    to. So a step changes it by a fifth at most, and it stays above 0.
    Source: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences.
    """

    def __init__(self, options: ResolvedOptions) -> None:
        self.value = options.kl_ctl
        self._target, self._horizon = options.kl_target, options.kl_horizon

    def observe(self, kl: float, n: int) -> None:
        """Take in the mean divergence of a step's ``n`` trainable rollouts, from which the next step's weight follows.
        One that is not finite moves nothing."""
        if self._target is None or n == 0 or not math.isfinite(kl):
            return
        error = min(_MOST_ERROR, max(-_MOST_ERROR, kl / self._target - 1))
        self.value *= 1 + error * min(1.0, n / self._horizon)
