"""The engine of a bigram model: row t of a table holds the logits of the token that follows token t."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.algorithms.sequences import PredictedTokens
from realhf.api.model import GenerationEngine, LossFn, TrainResult
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.micro_batches import micro_batches


class BigramEngine:
    """An ``Engine`` that trains and scores on the CPU. It has no tokenizer and does not generate."""

    tokenizer = None
    version = 0

    def __init__(self, vocabulary: int, lr: float) -> None:
        self.table = torch.zeros(vocabulary, vocabulary, requires_grad=True)
        self._optimizer = torch.optim.Adam([self.table], lr=lr)

    def train_batch(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        *,
        temperature: float,
        mb_spec: MicroBatchSpec,
        with_entropy: bool = False,
    ) -> TrainResult:
        """Add up loss, statistics and gradient over the micro-batches, then take one step if all is finite."""
        stats: dict[str, float] = {"loss": 0.0}
        self._optimizer.zero_grad()
        for part in micro_batches(sample, mb_spec):
            logprobs, entropy = self._score(part, temperature)
            loss, numbers = loss_fn(logprobs, part, entropy if with_entropy else None)
            loss.backward()
            for name, value in {**numbers, "loss": float(loss)}.items():
                before = stats.get(name)
                join = max if name.endswith("_max") else float.__add__
                stats[name] = value if before is None else join(before, value)
        assert self.table.grad is not None
        norm = float(self.table.grad.norm())
        if skipped := not math.isfinite(stats["loss"] + norm):
            return TrainResult(stats, norm, skipped)
        self._optimizer.step()
        return TrainResult(stats, norm, skipped)

    def logprobs(self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec) -> Tensor:
        """Log-probabilities of the sample's own tokens, f32 (sum of L-1,), in one batch: the table is small."""
        del mb_spec
        with torch.no_grad():
            return self._score(sample, temperature)[0]

    def _score(self, sample: SequenceSample, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the predicted tokens, f32 (sum of L-1,), 0 outside the loss mask."""
        ids = sample["packed_input_ids"]
        ends = torch.from_numpy(np.cumsum(sample.lengths("packed_input_ids").values)) - 1
        inside = torch.ones(len(ids), dtype=torch.bool)
        inside[ends] = False  # the last token of a sequence predicts nothing
        logits = self.table[ids[inside]].div(temperature).log_softmax(-1)
        following = ids[1:][inside[:-1]]
        mask = PredictedTokens.of(sample).mask
        logprobs = logits.gather(-1, following[:, None]).squeeze(-1)
        entropy = -(logits.exp() * logits).sum(-1)
        return torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)

    def generator(self) -> GenerationEngine:
        """Refuse: no call of the experiment generates."""
        raise NotImplementedError("a bigram engine does not generate")

    def weights(self) -> dict[str, Tensor]:
        """Return the table, which generation workers get as it is."""
        return {"logits": self.table.detach()}

    def save_checkpoint(self, folder: Path) -> None:
        """Write what training needs to go on to the last bit."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"table": self.table.detach(), "optimizer": self._optimizer.state_dict()}, folder / "bigram.pt")

    def load_checkpoint(self, folder: Path) -> None:
        """Read what ``save_checkpoint`` wrote."""
        state: dict[str, Any] = torch.load(folder / "bigram.pt", weights_only=True)
        with torch.no_grad():
            self.table.copy_(state["table"])
        self._optimizer.load_state_dict(state["optimizer"])

    def export_hf(self, folder: Path) -> None:
        """Refuse: transformers knows no such model. An experiment without ``export_role`` does not ask for it."""
        raise NotImplementedError(f"a bigram model cannot be exported to {folder}")
