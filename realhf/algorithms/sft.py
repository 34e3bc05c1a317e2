"""Supervised fine-tuning (SFT) on the trainable tokens of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from realhf.algorithms.train_step import (
    NonFiniteGuard,
    PredictedTokens,
    replace_keys,
    token_weights,
    weighted_sum,
)
from realhf.api.model import POSITIONS, CallContext, ForwardOutputs, Model
from realhf.api.sample import SequenceSample


class SFTInterface:
    """Train call of SFT: one optimizer step on the negative log-likelihood of the trainable tokens.

    Reads ``packed_input_ids`` and ``loss_mask``. ``loss_agg`` is a key of ``AGGREGATIONS``;
    ``token_mean`` is -sum(mask * logprob) / T (docs/reference/dataflow.md 10).
    """

    def __init__(self, loss_agg: str = "token_mean", max_nonfinite_steps: int = 3) -> None:
        self._aggregation = loss_agg
        self._guard = NonFiniteGuard(max_nonfinite_steps)

    def train_step(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> dict[str, Any]:
        """Train one step.

        Returns the statistics ``loss``, ``nll``, ``grad_norm``, ``lr``, ``n_tokens``,
        ``positions_per_token`` and ``skipped``. After ``max_nonfinite_steps`` consecutive updates
        without a finite gradient, the statistic ``stop`` contains the reason.
        """
        tokens = PredictedTokens.from_sample(sample)
        weights = token_weights(tokens, self._aggregation)
        keys = [key for key in ("packed_input_ids", "loss_mask") if key in sample.keys]
        batch = replace_keys(sample.select(keys), shifted={"loss_weights": weights})
        result = model.engine.train_batch(batch, self.loss, mb_spec=context.mb_spec)
        self._guard.observe(result)
        stats = dict(result.stats)
        n_tokens = max(1.0, stats["n_tokens"])
        stats["nll"] = stats["nll"] / n_tokens
        if POSITIONS in stats:
            stats["positions_per_token"] = stats.pop(POSITIONS) / n_tokens
        return {
            **stats,
            "grad_norm": result.grad_norm,
            "skipped": float(result.skipped),
            **self._guard.stop_statistics(),
        }

    def evaluate(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> dict[str, float]:
        """Return the ``nll`` per trainable token (nats) and ``n_tokens``. Makes no update."""
        logprobs = model.engine.logprobs(sample, temperature=1.0, mb_spec=context.mb_spec)
        mask = PredictedTokens.from_sample(sample).mask
        n_tokens = int(mask.sum())
        return {
            "nll": -float(logprobs[mask].double().sum()) / max(1, n_tokens),
            "n_tokens": float(n_tokens),
        }

    def loss(
        self, outputs: ForwardOutputs, part: SequenceSample
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a microbatch and the sums of its statistics (a ``LossFn``)."""
        return self.loss_of(outputs.logprobs()[0], part)

    def loss_of(self, logprobs: Tensor, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a microbatch from the log-probabilities of its tokens, f32 (L-1)."""
        mask = PredictedTokens.from_sample(part).mask.to(logprobs.device)
        total = -weighted_sum(logprobs, part["loss_weights"].to(logprobs.device), mask)
        nll = -float(torch.where(mask, logprobs.detach(), 0.0).double().sum())
        return total, {"nll": nll, "n_tokens": float(mask.sum())}

    def state_dict(self) -> dict[str, Any]:
        """Return the count of consecutive updates without a finite gradient."""
        return {"nonfinite_in_a_row": self._guard.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``. Raises KeyError without ``nonfinite_in_a_row``."""
        self._guard.in_a_row = int(state["nonfinite_in_a_row"])
