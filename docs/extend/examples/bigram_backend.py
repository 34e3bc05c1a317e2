"""A backend under the name ``bigram``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realhf.api.experiment import ModelSpec
from realhf.base.plugin import load_plugin
from realhf.registry import backends


@backends.register("bigram")
class BigramBackend:
    """Builds engines of a bigram model with ``vocabulary`` tokens."""

    def __init__(self, *, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def build(self, spec: ModelSpec, *, seed: int, total_train_steps: int) -> Any:
        """Build the engine of one role. It begins with a table of zeros, so there is nothing to draw or to load."""
        del seed, total_train_steps
        if spec.optimizer is None:
            raise ValueError(f"{spec.role}: a bigram model is always trained and needs an optimizer")
        # The launcher and the master import this file as well. Only model workers come here, so only they load torch.
        engine = load_plugin(Path(__file__).with_name("bigram_engine.py"))
        return engine.BigramEngine(self._vocabulary, spec.optimizer.lr)
