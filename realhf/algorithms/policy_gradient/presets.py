"""Lists the algorithms as rows of a table (docs/reference/dataflow.md 10): what each chooses differently from GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "adv_estimator": "grpo",
        "ratio": "token",
        "loss": "ppo",
        "eps_clip": 0.2,
        "eps_clip_higher": 0.2,
        "loss_agg": "seq_mean_token_mean",
        "kl_ctl": 0.0,
        "kl_loss_coef": 0.0,
        "kl_estimator": "k3",
        "adv_norm": False,
    }
)
"""What an option that is None becomes, unless the preset says otherwise."""

_NO_CLIPPING = {"loss": "reinforce", "loss_agg": "token_mean", "eps_clip_higher": None}
"""With another loss, ``eps_clip_higher`` is ``eps_clip``."""

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "grpo": {},
        "drgrpo": {"adv_estimator": "grpo_nostd", "loss_agg": "constant"},
        "dapo": {"eps_clip_higher": 0.28, "loss_agg": "token_mean"},
        "gspo": {"ratio": "sequence", "eps_clip": 3e-4, "eps_clip_higher": 4e-4},
        "cispo": {"loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 4.0, "loss_agg": "token_mean"},
        "rloo": {**_NO_CLIPPING, "adv_estimator": "rloo"},
        "reinforce": {**_NO_CLIPPING, "adv_estimator": "reinforce"},
        "reinforce_pp": {
            "adv_estimator": "reinforce_pp",
            "loss_agg": "token_mean",
            "kl_ctl": 0.01,
            "kl_estimator": "k1",
            "adv_norm": True,
        },
        "ppo": {
            "adv_estimator": "gae",
            "loss_agg": "token_mean",
            "kl_ctl": 0.01,
            "kl_estimator": "k1",
            "adv_norm": True,
        },
    }
)
"""``dapo`` is its loss: clip-higher and token mean. ``rloo`` takes its KL in the reward: set ``kl_ctl``."""
