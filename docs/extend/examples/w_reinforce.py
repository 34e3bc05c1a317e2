"""W-REINFORCE: what failed is pushed down in full, what succeeded is pushed up a little, which keeps the policy diverse
(Zhu et al. 2025, The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from realhf.api.algorithm import Algorithm
from realhf.api.option import option


@dataclass
class WeightedReinforceOptions:
    """A rollout that reached ``success_from`` has the advantage ``positive_weight``, every other one -1."""

    positive_weight: float = option(
        0.1, "The advantage of a success; with 0 failures alone teach.", at_least=0, at_most=1
    )
    success_from: float = option(0.5, "A reward of at least this is a success.")


def weighted(scores: Any, valid: Any, group: Any, own: WeightedReinforceOptions) -> Any:
    """Return the weight of a success or -1, whatever the others of the group did."""
    import torch

    signed = torch.where(scores >= own.success_from, own.positive_weight, -1.0)
    return torch.where(valid, signed, 0.0)


W_REINFORCE = Algorithm(
    preset={"loss": "reinforce", "loss_agg": "token_mean"},
    advantages=weighted,
    options=WeightedReinforceOptions,
    compares=False,
)
