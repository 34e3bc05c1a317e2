"""The engine of a bigram model: row t of a table holds the logits of the token that follows token t."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from realhf.algorithms.train_step import PredictedTokens
from realhf.api.model import GenerationEngine, LossFn, PostFn, TrainResult, logprobs_by
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.micro_batches import Ranks, StepAccount, split_micro_batches
from realhf.backends.training.packed_forward import Heads, PackedOutputs, ScoredRows


class BigramEngine:
    """An ``Engine`` that trains and scores on the CPU. It has no tokenizer and does not generate."""

    tokenizer = None
    version = 0

    def __init__(self, vocabulary: int, lr: float) -> None:
        self.table = torch.zeros(vocabulary, vocabulary, requires_grad=True)
        self._optimizer = torch.optim.Adam([self.table], lr=lr)

    def train_batch(
        self, sample: SequenceSample, loss_fn: LossFn, *, mb_spec: MicroBatchSpec, normaliser: float = 1.0
    ) -> TrainResult:
        """Add up loss, statistics and gradient over the micro-batches, then take one step if all is finite."""
        account = StepAccount(self._shifted(sample))
        self._optimizer.zero_grad()
        for part in split_micro_batches(sample, mb_spec, Ranks()):
            outputs = self._outputs(part.sample)
            loss, numbers = loss_fn(outputs, part.sample)
            loss = loss / normaliser
            loss.backward()
            account.add(part, float(loss), numbers, outputs.kept)
        stats, _, kept = account.sum_over(Ranks())
        assert self.table.grad is not None
        norm = float(self.table.grad.norm())
        if skipped := not math.isfinite(stats["loss"] + norm):
            return TrainResult(stats, norm, skipped, kept)
        self._optimizer.step()
        return TrainResult(stats, norm, skipped, kept)

    def forward(self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec) -> Tensor:
        """What ``post_fn`` makes of the sample, f32 (sum of L-1,), in one micro-batch: the table is small."""
        del mb_spec
        with torch.no_grad():
            return post_fn(self._outputs(sample), sample)

    def logprobs(self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec) -> Tensor:
        """Log-probabilities of the sample's own tokens, f32 (sum of L-1,), 0 outside the loss mask."""
        return logprobs_by(self, sample, temperature=temperature, mb_spec=mb_spec)

    def _outputs(self, sample: SequenceSample) -> PackedOutputs:
        """A token's hidden state is its row of the unit matrix, so the table, transposed, is the weight of the head."""
        ids = sample["packed_input_ids"]
        ends = torch.from_numpy(np.cumsum(sample.lengths("packed_input_ids").values)) - 1
        inside = torch.ones(len(ids), dtype=torch.bool)
        inside[ends] = False  # the last token of a sequence predicts nothing
        asked = PredictedTokens.from_sample(sample).mask
        hidden = functional.one_hot(ids[inside][asked], len(self.table)).float()
        rows = ScoredRows(hidden, ids[1:][inside[:-1]][asked], asked.nonzero()[:, 0])
        return PackedOutputs(rows, len(asked), Heads(language=lambda: self.table.T), self.table.device)

    def _shifted(self, sample: SequenceSample) -> int:
        return len(PredictedTokens.from_sample(sample).mask)

    def generator(self) -> GenerationEngine:
        """Refuse: no call of the experiment generates."""
        raise NotImplementedError("a bigram engine does not generate")

    def weights(self) -> dict[str, Tensor]:
        """Return the table, which generation workers get as it is."""
        return {"logits": self.table.detach()}

    def save_checkpoint(self, folder: Path) -> None:
        """Write into a file what training needs to go on to the last bit."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {"table": self.table.detach(), "optimizer": self._optimizer.state_dict()}
        torch.save(state, folder / "bigram.pt")

    def load_checkpoint(self, folder: Path) -> None:
        """Read what ``save_checkpoint`` wrote."""
        state: dict[str, Any] = torch.load(folder / "bigram.pt", weights_only=True)
        with torch.no_grad():
            self.table.copy_(state["table"])
        self._optimizer.load_state_dict(state["optimizer"])

    def export_hf(self, folder: Path) -> None:
        """Refuse: transformers knows no such model. An experiment without ``export_role`` does not ask for it."""
        raise NotImplementedError(f"a bigram model cannot be exported to {folder}")
