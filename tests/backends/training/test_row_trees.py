"""Attention over rows that share prefixes, by pieces: it equals attention under the mask that says the same."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from realhf.backends.training import tree_attention
from realhf.backends.training.sequence_packing import Row, RowLayout, layout, shared_rows, visible
from realhf.backends.training.tree_attention import RowTrees, row_tree_attention

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9)


def attended(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, **how: object) -> list[Tensor]:
    """Output and gradients; ``how`` is what the attention is told."""
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    mask = how.pop("attention_mask", None)
    out, _ = row_tree_attention(nn.Identity(), *inputs, mask, **how)  # type: ignore[arg-type]
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs)]  # type: ignore[list-item]


def trees_of(tokens: list[np.ndarray], most: int = 4096) -> tuple[RowTrees, list[Row], list[RowLayout]]:
    """The rows of some sequences, and what their columns see."""
    rows = shared_rows(range(len(tokens)), tokens, most)
    layouts = [layout(row, tokens) for row in rows]
    width = max(row.length for row in rows)
    return RowTrees([lay.columns for lay in layouts], [row.shared for row in rows], width), rows, layouts


def products(trees: RowTrees) -> int:
    """How many pairs of a query and a key are multiplied, those that a mask hides included."""
    shapes = zip(trees.queries.shapes, trees.keys.shapes, strict=True)
    return sum(count * queries * keys for (count, queries), (_, keys) in shapes)


@given(SEQUENCES, st.integers(3, 40), st.sampled_from([1.0, 1.3, 2.0, 4.0]))
@settings(max_examples=60, deadline=None)
def test_pieces_equal_the_mask(drawn: list[list[int]], most: int, gathered: float) -> None:
    """For any trees, in rows of different length, with fewer heads of keys than of queries; in bundles where few keys
    may be copied."""
    with mock.patch.object(tree_attention, "MOST_GATHERED", gathered):
        trees, rows, layouts = trees_of([np.asarray(sequence) for sequence in drawn], most)
    width = trees.shape[1]
    g = torch.Generator().manual_seed(len(drawn))
    query, key, value = (torch.randn(len(rows), heads, width, 4, generator=g) for heads in (4, 2, 2))
    seen = torch.from_numpy(np.stack([visible(row, lay, width) for row, lay in zip(rows, layouts, strict=True)]))
    real = torch.tensor([[column < row.length for column in range(width)] for row in rows])[..., None, None]
    grad = torch.randn(len(rows), width, 4, 4, generator=g) * real
    repeated = [x.repeat_interleave(2, 1) for x in (key, value)]
    mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None]
    expected = attended(query, *repeated, grad, attention_mask=mask)
    expected[2:] = [x.view(len(rows), 2, 2, width, 4).sum(2) for x in expected[2:]]
    found = attended(query, key, value, grad, row_trees=trees)
    found[0], expected[0] = found[0] * real, expected[0] * real
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def answers(number: int, length: int, prompt: int) -> list[np.ndarray]:
    """A prompt and answers that part at their first token."""
    return [np.r_[np.zeros(prompt, np.int64), 1 + answer, np.zeros(length - 1, np.int64)] for answer in range(number)]


def stairs(depth: int, branch: int) -> list[np.ndarray]:
    """Branches at every step of a way, before the way in the order of sequences (token 0) or behind it (token 2)."""
    return [np.r_[np.ones(step, np.int64), np.full(4, branch)] for step in range(1, depth)]


@pytest.mark.parametrize(
    ("tokens", "most_work"),
    [
        (answers(64, 30, 1000), 1.3),
        (answers(256, 2, 1500), 1.3),
        (answers(8, 200, 400), 1.0),
        (stairs(300, 0), 2.6),
        (stairs(300, 2), 2.6),
    ],
    ids=["short answers", "two tokens", "the default job", "stairs", "stairs backwards"],
)
def test_a_long_prefix_is_copied_a_few_times_however_many_answers_follow(
    tokens: list[np.ndarray], most_work: float
) -> None:
    """Where copying it for every answer was too much, a mask as wide as the row was computed, three times the products
    that were needed and more."""
    trees, (row,), (lay,) = trees_of(tokens)
    pieces = tree_attention.pieces_of([lay.columns], [row.shared], row.length)
    needed = sum(piece.products for piece in pieces)
    assert sum(piece.own for piece in pieces) == row.length and len(trees.keys.index) <= 4 * row.length
    assert needed <= products(trees) <= most_work * needed
    assert products(trees) < 0.85 * row.length**2, "a mask as wide as the row"


def test_gradients_of_a_shared_prefix_are_rounded_once() -> None:
    """In bf16 a hundred branches added to the gradients of their prefix one by one, each sum rounded."""
    tokens = [np.concatenate([np.zeros(6, dtype=np.int64), [1 + branch]]) for branch in range(100)]
    with mock.patch.object(tree_attention, "MOST_GATHERED", 100):
        trees, (row,), _ = trees_of(tokens)
    g = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, heads, row.length, 8, generator=g).bfloat16() for heads in (4, 2, 2))
    grad = (torch.randn(1, row.length, 4, 8, generator=g) + 0.5).bfloat16()
    exact = attended(query.double(), key.double(), value.double(), grad.double(), row_trees=trees)[3]
    found = attended(query, key, value, grad, row_trees=trees)[3]
    prefix = slice(0, 6)
    off = (found.double() - exact)[:, :, prefix].norm() / exact[:, :, prefix].norm()
    assert found.dtype == torch.bfloat16 and float(off) < 0.005


def test_a_layer_that_wants_more_is_refused() -> None:
    """Then the model is tried under a mask."""
    trees, x = RowTrees([[np.arange(3)]], [[0]], 3), torch.zeros(1, 2, 3, 4)
    for more in ({"sliding_window": 2}, {"dropout": 0.1}, {"softcap": 30.0}):
        with pytest.raises(ValueError, match="more than attention over trees"):
            row_tree_attention(nn.Identity(), x, x, x, None, row_trees=trees, **more)
