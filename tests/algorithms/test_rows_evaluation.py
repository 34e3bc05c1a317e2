"""The evaluation on held-out rows against plain formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realhf.algorithms.rows_evaluation import RowsEvaluation
from realhf.base.dataclass_json import to_json_value
from realhf.data.row_formats import PREFERENCE, SUPERVISED
from realhf.data.tokenized_rows import PackedRow, RowsSummary, TokenRow, pack_rows
from tests.algorithms.tiny_policy import context, tiny_actor


def write_rows(folder: Path, kind: str, per_row: int) -> list[TokenRow]:
    """Write 70 random rows, more than are evaluated at once; return their sequences."""
    draw = np.random.default_rng(0)
    sequences = []
    for _ in range(70 * per_row):
        n = int(draw.integers(3, 12))
        mask = [False, True, *(draw.random(n - 2) < 0.6).tolist()]
        sequences.append(TokenRow(draw.integers(0, 50, n).tolist(), mask))
    rows = [sequences[start : start + per_row] for start in range(0, len(sequences), per_row)]
    packed = pack_rows([PackedRow.of(row) for row in sequences_of_row] for sequences_of_row in rows)
    np.savez(folder / "held_out.npz", **packed)  # type: ignore[arg-type]
    summary = RowsSummary(kind, 0, 70, 0, 0, 0, 11, "")
    (folder / "rows.json").write_text(json.dumps(to_json_value(summary)))
    return sequences


@torch.no_grad()
def expected_tokens(model: Any, row: TokenRow) -> tuple[list[float], int]:
    """Log-probabilities of the trained tokens, and how many of them are the most likely ones."""
    log_p = model.engine.model(torch.tensor([row.ids])).logits[0].float().log_softmax(-1)
    places = [place for place in range(1, len(row.ids)) if row.mask[place]]
    return (
        [float(log_p[place - 1, row.ids[place]]) for place in places],
        sum(int(log_p[place - 1].argmax()) == row.ids[place] for place in places),
    )


def test_loss_and_token_accuracy(tmp_path: Path):
    model = tiny_actor()
    rows = write_rows(tmp_path, SUPERVISED, 1)
    found = RowsEvaluation().evaluate(model, {"rows": str(tmp_path)}, context(tmp_path, 3))
    tokens = [expected_tokens(model, row) for row in rows]
    n_tokens = sum(len(logprobs) for logprobs, _ in tokens)
    assert sum(hits for _, hits in tokens) > 0
    assert found["rows"]["overall"] == {
        "loss": pytest.approx(-sum(sum(logprobs) for logprobs, _ in tokens) / n_tokens, abs=1e-5),
        "token_accuracy": pytest.approx(sum(hits for _, hits in tokens) / n_tokens),
        "rows": 70,
        "version": 3,
    }


@pytest.mark.slow
def test_pairs_are_compared_with_the_model_before_training(tmp_path: Path):
    model = tiny_actor()
    rows = write_rows(tmp_path, PREFERENCE, 2)
    evaluation = RowsEvaluation(beta=0.5)
    args = {"rows": str(tmp_path)}
    with pytest.raises(RuntimeError, match=r"held_out_reference\.json is missing"):
        evaluation.evaluate(model, args, context(tmp_path, 1))
    before = evaluation.evaluate(model, args, context(tmp_path, 0))["rows"]["overall"]
    assert before["loss"] == pytest.approx(math.log(2))
    assert (before["reward_accuracy"], before["reward_margin"]) == (0.5, 0.0)
    reference = torch.tensor([sum(expected_tokens(model, row)[0]) for row in rows])
    with torch.no_grad():
        for parameter in model.engine.model.parameters():  # type: ignore[attr-defined]
            parameter.mul_(1.3)
    # A resumed run builds the interface again.
    after = RowsEvaluation(beta=0.5).evaluate(model, args, context(tmp_path, 2))["rows"]["overall"]
    totals = torch.tensor([sum(expected_tokens(model, row)[0]) for row in rows])
    rewards = 0.5 * (totals - reference).reshape(-1, 2)
    margin = rewards[:, 0] - rewards[:, 1]
    assert after["reward_margin"] == pytest.approx(float(margin.mean()), abs=1e-4)
    assert after["reward_accuracy"] == pytest.approx(float((margin > 0).float().mean()))
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    assert after["loss"] == pytest.approx(float(loss), abs=1e-4)
    summary = json.loads((tmp_path / "rows.json").read_text())
    (tmp_path / "rows.json").write_text(json.dumps({**summary, "digest": "other"}))
    with pytest.raises(RuntimeError, match=r"held_out_reference\.json belongs to other rows"):
        evaluation.evaluate(model, args, context(tmp_path, 2))
