"""Weighs the tokens of a minibatch: how the losses of tokens become one number (``ppo.loss_agg``).

``AGGREGATIONS`` is the one table of it: the option's values, docs/algorithms.md and the weights come from its rows.
Imports no torch: a row computes with whatever tensors it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Unit:
    """Says of which rollout, turn or prompt each token is: ``index`` i64 (n,), ``size`` numbers above all of them."""

    index: Tensor
    size: int


@dataclass(frozen=True)
class TokenCounts:
    """Counts the tokens of ``mask``, bool (n,), by what they belong to. ``constant`` is ``ppo.loss_scale_len``.

    Every count is f64, at least 1, so that it may divide: a scalar, or (n,) where it is one for each token."""

    mask: Tensor
    rollout: Unit
    prompt: Unit
    turn: Unit | None = None
    constant: int = 1

    @cached_property
    def tokens(self) -> Tensor:
        """T, all tokens."""
        return self.mask.double().sum().clamp(min=1)

    def of(self, unit: Unit) -> Tensor:
        """How many tokens the rollout, turn or prompt of each token has, (n,)."""
        return self._count(unit)[unit.index].clamp(min=1)

    def number(self, unit: Unit) -> Tensor:
        """How many rollouts, turns or prompts have a token."""
        return (self._count(unit) > 0).sum().clamp(min=1).double()

    @property
    def turns(self) -> Unit:
        """The turns. Raises ValueError where nobody said which turn a token is of."""
        if self.turn is None:
            raise ValueError("a ppo.loss_agg that counts turns needs the key turn_ids")
        return self.turn

    @cached_property
    def turns_of_rollout(self) -> Tensor:
        """How many turns with a token the rollout of each token has, (n,)."""
        first = self.mask.double() / self.of(self.turns)
        count = first.new_zeros(self.rollout.size).index_add(0, self.rollout.index, first)
        return count[self.rollout.index].round().clamp(min=1)

    def _count(self, unit: Unit) -> Tensor:
        mask = self.mask.double()
        return mask.new_zeros(unit.size).index_add(0, unit.index, mask)


@dataclass(frozen=True)
class Aggregation:
    """Describes one way: ``weight`` returns what multiplies the loss of each token, f64, a scalar or (n,); ``formula``
    says it in the letters of ``LETTERS``. ``by_turn``: it needs to know the turn of every token."""

    weight: Callable[[TokenCounts], Tensor]
    formula: str
    source: str
    when: str
    by_turn: bool = False


LETTERS = (
    "T tokens, S rollouts, K turns and P prompts (groups) with a trained token; o_i are the tokens of rollout i, K_i "
    "its turns, t the tokens of a turn, T_g those of a group. All are counted over the whole minibatch, before "
    "anything is left out for having no advantage"
)

AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType(
    {
        "token_mean": Aggregation(
            lambda n: 1 / n.tokens,
            "1 / T",
            "Yu et al. 2025, DAPO, eq. 8; PPO",
            "every token counts the same, so long rollouts count more",
        ),
        "seq_mean_token_mean": Aggregation(
            lambda n: 1 / (n.number(n.rollout) * n.of(n.rollout)),
            "1 / (S abs(o_i))",
            "Shao et al. 2024, GRPO, eq. 3",
            "every rollout counts the same; a long wrong one is punished less per token",
        ),
        "seq_mean_token_sum": Aggregation(
            lambda n: 1 / n.number(n.rollout),
            "1 / S",
            "Williams 1992, REINFORCE",
            "the gradient of the mean return itself; its size grows with the length",
        ),
        "constant": Aggregation(
            lambda n: 1 / (n.number(n.rollout) * n.constant),
            "1 / (S loss_scale_len)",
            "Liu et al. 2025, Dr. GRPO",
            "that, with a size that does not depend on the batch",
        ),
        "prompt_mean_token_mean": Aggregation(
            lambda n: 1 / (n.number(n.prompt) * n.of(n.prompt)),
            "1 / (P T_g)",
            "Khatri et al. 2025, ScaleRL",
            "every task counts the same, however long its rollouts are",
        ),
        "turn_mean_token_mean": Aggregation(
            lambda n: 1 / (n.number(n.turns) * n.of(n.turns)),
            "1 / (K abs(t))",
            "the token mean with turns as actions",
            "every turn counts the same: a long thought does not outweigh a short command",
            by_turn=True,
        ),
        "seq_mean_turn_mean": Aggregation(
            lambda n: 1 / (n.number(n.rollout) * n.turns_of_rollout * n.of(n.turns)),
            "1 / (S K_i abs(t))",
            "the GRPO mean with turns as actions",
            "every rollout counts the same, and in it every turn",
            by_turn=True,
        ),
    }
)
