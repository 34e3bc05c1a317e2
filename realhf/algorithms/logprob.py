"""Scores a batch with the current weights of a role, e.g. the reference policy."""

from __future__ import annotations

from typing import Any

from realhf.api.model import CallContext, Model
from realhf.api.sample import SequenceSample


class LogprobInterface:
    """Computes ``output_key`` from ``packed_input_ids`` (and ``loss_mask``): f32, L-1 per sequence, the log-probability
    of every trainable token at ``temperature``, which must be the sampling temperature."""

    def __init__(self, output_key: str = "packed_ref_logprobs", temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self._key, self._temperature = output_key, temperature

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the sample of ``output_key`` and the statistic ``n_tokens``, the number of tokens of the scored
        sequences."""
        logprobs = model.engine.logprobs(sample, temperature=self._temperature, mb_spec=context.mb_spec)
        lengths = [[length - 1 for length in inner] for inner in sample.seqlens["packed_input_ids"]]
        out = SequenceSample.from_tensors(sample.ids, {self._key: logprobs}, {self._key: lengths})
        return out, {"n_tokens": float(sample.n_tokens("packed_input_ids"))}

    def state_dict(self) -> dict[str, Any]:
        """Return {}: the interface has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the interface has no state."""
        del state
