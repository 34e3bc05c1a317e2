"""Evaluation of a model on the rows of a data file that are held out from training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realhf.algorithms.preference import pair_loss
from realhf.algorithms.train_step import PredictedTokens
from realhf.api.evaluation import Report
from realhf.api.model import CallContext, ForwardOutputs, Model
from realhf.api.sample import SequenceSample
from realhf.base.files import write_atomic
from realhf.data.row_formats import PREFERENCE
from realhf.data.tokenized_rows import HELD_OUT, RowsSummary, TokenizedRows

REFERENCE_FILE = "held_out_reference.json"
"""File in the run folder with the log-probabilities of the held-out rows before training."""
ROWS = "rows"
"""Name of the results in a ``Report``."""
_ROWS_AT_ONCE = 64
"""Number of rows whose tensors exist at once."""


class RowsEvaluation:
    """Evaluation on held-out rows.

    Supervised rows have a ``loss`` (negative log-likelihood per trained token, nats) and a
    ``token_accuracy`` (fraction of the trained tokens that are the most likely ones). Rows of
    preferences have the ``loss`` of DPO, a ``reward_accuracy`` (fraction of the rows whose chosen
    sequence has the higher reward; a tie counts half) and a ``reward_margin`` (mean difference of
    the rewards). A sequence's reward is ``beta`` times the difference between its log-probability
    and that before training.
    """

    def __init__(self, beta: float = 0.1, smoothing: float = 0.0) -> None:
        self._beta = beta
        self._smoothing = smoothing

    def evaluate(self, model: Model, args: dict[str, Any], context: CallContext) -> Report:
        """Return the results as {"rows": {"overall": {name: number}}}.

        ``args``: the folder ``rows`` with the tokenised rows. The evaluation before the first step
        keeps the log-probabilities of preferences in the run folder. Raises RuntimeError if a later
        one does not find them, or finds those of other rows.
        """
        folder = Path(args["rows"])
        dataset = TokenizedRows(str(folder), part=HELD_OUT)
        scores: list[Tensor] = []
        n_tokens = 0
        n_hits = 0

        def score(outputs: ForwardOutputs, part: SequenceSample) -> Tensor:
            nonlocal n_hits
            del part
            n_hits += int((outputs.most_likely() == outputs.target).sum())
            return outputs.logprobs()[0]

        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            numbers = range(start, min(start + _ROWS_AT_ONCE, len(dataset)))
            sample = dataset.load([str(number) for number in numbers], numbers)
            inputs = sample.select({"packed_input_ids", "loss_mask"})
            logprobs = model.engine.forward(inputs, score, mb_spec=context.mb_spec)
            tokens = PredictedTokens.from_sample(inputs)
            sums = torch.zeros(tokens.n_sequences, dtype=torch.float64)
            scores.append(sums.index_add(0, tokens.sequence, logprobs.double()))
            n_tokens += int(tokens.mask.sum())
        totals = torch.cat(scores)
        results: dict[str, float]
        summary = RowsSummary.read(folder)
        if summary.kind == PREFERENCE:
            results = self._compare(totals, summary.digest, context)
        else:
            results = {
                "loss": -float(totals.sum()) / n_tokens,
                "token_accuracy": n_hits / n_tokens,
            }
        overall = {**results, "rows": len(dataset), "version": context.step}
        return {ROWS: {"overall": overall}}

    def _compare(self, totals: Tensor, digest: str, context: CallContext) -> dict[str, float]:
        """Return the results of preferences, given the log-probabilities f64 (2 n,) of the chosen
        and the rejected sequence of each row, and the digest of the rows."""
        file = context.run_dir / REFERENCE_FILE
        if context.step == 0:
            write_atomic(file, json.dumps({"rows": digest, "logprobs": totals.tolist()}))
        try:
            kept = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            raise RuntimeError(
                f"{file} is missing: the held-out rows are compared with the model before training"
            ) from None
        if kept["rows"] != digest:
            raise RuntimeError(
                f"{file} belongs to other rows: dataset.path has changed since the run started"
            )
        reference = torch.tensor(kept["logprobs"], dtype=torch.float64)
        rewards = self._beta * (totals - reference).reshape(-1, 2)
        margin = rewards[:, 0] - rewards[:, 1]
        correct = (margin > 0).double() + 0.5 * (margin == 0).double()
        return {
            "loss": float(pair_loss(margin, self._smoothing)[0].mean()),
            "reward_accuracy": float(correct.mean()),
            "reward_margin": float(margin.mean()),
        }
