"""Aggregations of token losses into the loss of a minibatch (``ppo.loss_agg``).

``AGGREGATIONS`` is the only definition: the choices of the option, docs/algorithms.md and the
weights of the tokens are derived from it. This module imports no torch at run time.
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
    """Partition of the tokens of a minibatch into rollouts, turns or prompts."""

    index: Tensor
    """Index of the rollout, turn or prompt of each token in [0, size), i64 (n,)."""
    size: int
    """Upper bound of the indices."""


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of a minibatch per rollout, turn and prompt.

    Every count is f64 and at least 1, so that it can be a divisor. It is a scalar, or (n,) if it
    differs between tokens.
    """

    mask: Tensor
    """Which tokens train, bool (n,)."""
    rollout: Unit
    """The rollouts."""
    prompt: Unit
    """The prompts (groups of rollouts)."""
    turn: Unit | None = None
    """The turns of all rollouts; None if they are unknown."""
    constant: int = 1
    """Divisor ``ppo.loss_scale_len``, tokens."""

    @cached_property
    def n_tokens(self) -> Tensor:
        """T, the number of trained tokens, scalar."""
        return self.mask.double().sum().clamp(min=1)

    def tokens_in(self, unit: Unit) -> Tensor:
        """Return, for each token, the number of trained tokens in its rollout, turn or prompt,
        (n,)."""
        return self._count(unit)[unit.index].clamp(min=1)

    def number_of(self, unit: Unit) -> Tensor:
        """Return the number of rollouts, turns or prompts with at least one trained token,
        scalar."""
        return (self._count(unit) > 0).sum().clamp(min=1).double()

    @property
    def turns(self) -> Unit:
        """The turns. Raises ValueError if they are unknown."""
        if self.turn is None:
            raise ValueError("a ppo.loss_agg that counts turns needs the key turn_ids")
        return self.turn

    @cached_property
    def turns_in_rollout(self) -> Tensor:
        """For each token, the number of turns in its rollout with at least one trained token,
        (n,)."""
        # Each token adds 1 / (tokens of its turn), so every turn adds 1 up to rounding.
        share_of_turn = self.mask.double() / self.tokens_in(self.turns)
        count = share_of_turn.new_zeros(self.rollout.size).index_add(
            0, self.rollout.index, share_of_turn
        )
        return count[self.rollout.index].round().clamp(min=1)

    def _count(self, unit: Unit) -> Tensor:
        """Return the number of trained tokens of each rollout, turn or prompt, f64 (unit.size,)."""
        mask = self.mask.double()
        return mask.new_zeros(unit.size).index_add(0, unit.index, mask)


@dataclass(frozen=True)
class Aggregation:
    """A method of aggregating the losses of tokens."""

    weight: Callable[[TokenCounts], Tensor]
    """Function that returns the weight of each token's loss, f64, a scalar or (n,)."""
    formula: str
    """The weight as a formula with the symbols in ``LETTERS``."""
    source: str
    """Publication that introduced the method."""
    when: str
    """Effect and use of the method, for docs/algorithms.md."""
    by_turn: bool = False
    """Whether the turn of every token must be known."""


LETTERS = (
    "T tokens, S rollouts, K turns and P prompts (groups) with a trained token; o_i are the tokens "
    "of rollout i, K_i "
    "its turns, t the tokens of a turn, T_g those of a group. All are counted over the whole "
    "minibatch, before "
    "sequences without an advantage are dropped"
)
"""Explanation of the symbols used in the formulas, for docs/algorithms.md."""

AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType(
    {
        "token_mean": Aggregation(
            lambda n: 1 / n.n_tokens,
            "1 / T",
            "Yu et al. 2025, DAPO, eq. 8; PPO",
            "all tokens have the same weight, so long rollouts have more",
        ),
        "seq_mean_token_mean": Aggregation(
            lambda n: 1 / (n.number_of(n.rollout) * n.tokens_in(n.rollout)),
            "1 / (S abs(o_i))",
            "Shao et al. 2024, GRPO, eq. 3",
            "all rollouts have the same weight; a long wrong one is punished less per token",
        ),
        "seq_mean_token_sum": Aggregation(
            lambda n: 1 / n.number_of(n.rollout),
            "1 / S",
            "Williams 1992, REINFORCE",
            "the gradient of the mean return itself; its scale grows with the length",
        ),
        "constant": Aggregation(
            lambda n: 1 / (n.number_of(n.rollout) * n.constant),
            "1 / (S loss_scale_len)",
            "Liu et al. 2025, Dr. GRPO",
            "as seq_mean_token_sum, with a scale that does not depend on the batch",
        ),
        "prompt_mean_token_mean": Aggregation(
            lambda n: 1 / (n.number_of(n.prompt) * n.tokens_in(n.prompt)),
            "1 / (P T_g)",
            "Khatri et al. 2025, ScaleRL",
            "all tasks have the same weight, however long their rollouts are",
        ),
        "turn_mean_token_mean": Aggregation(
            lambda n: 1 / (n.number_of(n.turns) * n.tokens_in(n.turns)),
            "1 / (K abs(t))",
            "the token mean with turns as actions",
            "all turns have the same weight: long reasoning does not outweigh a short command",
            by_turn=True,
        ),
        "seq_mean_turn_mean": Aggregation(
            lambda n: 1 / (n.number_of(n.rollout) * n.turns_in_rollout * n.tokens_in(n.turns)),
            "1 / (S K_i abs(t))",
            "the GRPO mean with turns as actions",
            "all rollouts have the same weight, and within a rollout all turns",
            by_turn=True,
        ),
    }
)
