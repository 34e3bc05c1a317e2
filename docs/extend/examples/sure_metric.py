"""A metric of one's own: how many of the trained tokens had a probability above one half before the step."""

from __future__ import annotations

import math
from typing import Any

from realhf.api.model import CallContext, Model
from realhf.api.sample import SequenceSample
from realhf.registry import interfaces


@interfaces.register("sft_with_sure")
class SftWithSure:
    """The built-in supervised step, with ``sure`` among its metrics. Arguments are those of ``sft``."""

    def __init__(self, **args: Any) -> None:
        from realhf.algorithms.sft import SFTInterface  # it imports torch, which the master does without

        self._sft = SFTInterface(**args)

    def train_step(self, model: Model, sample: SequenceSample, context: CallContext) -> dict[str, Any]:
        """Measure, then train. What is returned here is logged as ``<call>/<name>``."""
        logprobs = model.engine.logprobs(sample, temperature=1.0, mb_spec=context.mb_spec)
        sure = float((logprobs > math.log(0.5)).double().mean())
        return {**self._sft.train_step(model, sample, context), "sure": sure}

    def state_dict(self) -> dict[str, Any]:
        """Return what the built-in step keeps from step to step."""
        return self._sft.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was made."""
        self._sft.load_state_dict(state)
