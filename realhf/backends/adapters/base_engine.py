"""Scores with the base of a model that has adapters: a reference without weights of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from realhf.api.model import Forwards, LossFn, PostFn, logprobs_by
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.adapters.lora import LoraAdapters


class BaseEngine:
    """Implements ``Engine`` for a frozen role: ``engine`` with its ``adapters`` off, that is with the weights that it
    was loaded with. It only scores; ``version`` is its own."""

    def __init__(self, engine: Forwards, adapters: LoraAdapters, tokenizer: Any) -> None:
        self._engine, self._adapters, self.tokenizer = engine, adapters, tokenizer
        self.version = 0

    def forward(self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec) -> Tensor:
        """See ``Engine.forward``."""
        with self._adapters.off():
            return self._engine.forward(sample, post_fn, mb_spec=mb_spec)

    def logprobs(self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec) -> Tensor:
        """See ``Engine.logprobs``."""
        return logprobs_by(self, sample, temperature=temperature, mb_spec=mb_spec)

    def state(self) -> dict[str, Any]:
        """See ``Engine.state``; there is nothing to continue with."""
        return {"version": self.version}

    def train_batch(
        self, sample: SequenceSample, loss_fn: LossFn, *, mb_spec: MicroBatchSpec, normaliser: float = 1.0
    ) -> NoReturn:
        """Raise RuntimeError: a reference does not train."""
        self._refuse("train")

    def generator(self) -> NoReturn:
        """Raise RuntimeError: a reference does not generate."""
        self._refuse("generate")

    def weights(self) -> NoReturn:
        """Raise RuntimeError: the weights are those of the model's folder."""
        self._refuse("publish weights")

    def save_checkpoint(self, folder: Path) -> NoReturn:
        """Raise RuntimeError: nothing changes that could be saved."""
        self._refuse("save")

    def load_checkpoint(self, folder: Path) -> NoReturn:
        """Raise RuntimeError: nothing was saved."""
        self._refuse("load")

    def export_hf(self, folder: Path) -> NoReturn:
        """Raise RuntimeError: the weights are those of the model's folder."""
        self._refuse("export")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"a model with its adapters off does not {what}: it is the frozen base of another role")
