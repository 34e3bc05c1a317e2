"""Attention over rows that share prefixes, by pieces, and packed by a kernel with its proof: both
equal that of each sequence."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from realhf.backends.training import tree_attention, varlen_attention
from realhf.backends.training.sequence_packing import (
    PackedRow,
    RowLayout,
    build_row_layout,
    build_visibility,
    pack_shared_rows,
)
from realhf.backends.training.tree_attention import RowTrees, row_tree_attention
from realhf.backends.training.varlen_attention import (
    adapt_kernels,
    build_packed_layout,
    find_kernel,
    find_kernel_fault,
    reference_attention,
)

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9)


def attended(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, **how: object
) -> list[Tensor]:
    """Output and gradients; ``how`` is what the attention is told."""
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    mask = how.pop("attention_mask", None)
    out, _ = row_tree_attention(nn.Identity(), *inputs, mask, **how)  # type: ignore[arg-type]
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs)]  # type: ignore[list-item]


def trees_of(
    tokens: list[np.ndarray], most: int = 4096
) -> tuple[RowTrees, list[PackedRow], list[RowLayout]]:
    """The rows of some sequences, behind each other, and what their columns see."""
    rows = pack_shared_rows(range(len(tokens)), tokens, most)
    layouts = [build_row_layout(row, tokens) for row in rows]
    ends = np.cumsum([row.length for row in rows])
    paths = [
        [end - row.length + path for path in lay.columns]
        for end, row, lay in zip(ends, rows, layouts, strict=True)
    ]
    return RowTrees(paths, [row.shared for row in rows], int(ends[-1])), rows, layouts


def products(trees: RowTrees) -> int:
    """How many pairs of a query and a key are multiplied, those that a mask hides included."""
    shapes = zip(trees.queries.shapes, trees.keys.shapes, strict=True)
    return sum(count * queries * keys for (count, queries), (_, keys) in shapes)


@pytest.mark.slow
@given(SEQUENCES, st.integers(3, 40), st.sampled_from([1.0, 1.3, 2.0, 4.0]))
@settings(max_examples=60, deadline=None)
def test_pieces_equal_the_mask(drawn: list[list[int]], most: int, gathered: float) -> None:
    """For any trees, in rows of different length, with fewer heads of keys than of queries; in
    bundles where few keys may be copied."""
    with mock.patch.object(tree_attention, "MAX_GATHERED_PER_COLUMN", gathered):
        trees, rows, layouts = trees_of([np.asarray(sequence) for sequence in drawn], most)
    width = trees.columns
    g = torch.Generator().manual_seed(len(drawn))
    query, key, value = (torch.randn(1, heads, width, 4, generator=g) for heads in (4, 2, 2))
    own = [
        torch.from_numpy(build_visibility(row, lay, row.length))
        for row, lay in zip(rows, layouts, strict=True)
    ]
    seen = torch.block_diag(*own).bool()[None]
    grad = torch.randn(1, width, 4, 4, generator=g)
    repeated = [x.repeat_interleave(2, 1) for x in (key, value)]
    mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None]
    expected = attended(query, *repeated, grad, attention_mask=mask)
    expected[2:] = [x.view(1, 2, 2, width, 4).sum(2) for x in expected[2:]]
    found = attended(query, key, value, grad, row_trees=trees)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def answers(number: int, length: int, prompt: int) -> list[np.ndarray]:
    """A prompt and answers that part at their first token."""
    return [
        np.r_[np.zeros(prompt, np.int64), 1 + answer, np.zeros(length - 1, np.int64)]
        for answer in range(number)
    ]


def stairs(depth: int, branch: int) -> list[np.ndarray]:
    """Branches at every step of a way, before the way in the order of sequences (token 0) or behind
    it (token 2)."""
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
    """Where copying it for every answer was too much, a mask as wide as the row was computed, three
    times the products that were needed and more."""
    trees, (row,), (lay,) = trees_of(tokens)
    pieces = tree_attention.split_segments([lay.columns], [row.shared])
    needed = sum(piece.products for piece in pieces)
    assert (
        sum(piece.own for piece in pieces) == row.length and len(trees.keys.index) <= 4 * row.length
    )
    assert needed <= products(trees) <= most_work * needed
    assert products(trees) < 0.85 * row.length**2, "a mask as wide as the row"


def test_gradients_of_a_prefix_that_pieces_share_are_rounded_once() -> None:
    """In bf16 a hundred branches added to the gradients of their prefix one by one, each sum
    rounded."""
    tokens = [np.concatenate([np.zeros(6, dtype=np.int64), [1 + branch]]) for branch in range(100)]
    with mock.patch.object(tree_attention, "MAX_GATHERED_PER_COLUMN", 100):
        trees, (row,), _ = trees_of(tokens)
    g = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(1, heads, row.length, 8, generator=g).bfloat16() for heads in (4, 2, 2)
    )
    grad = (torch.randn(1, row.length, 4, 8, generator=g) + 0.5).bfloat16()
    exact = attended(query.double(), key.double(), value.double(), grad.double(), row_trees=trees)[
        3
    ]
    found = attended(query, key, value, grad, row_trees=trees)[3]
    prefix = slice(0, 6)
    off = (found.double() - exact)[:, :, prefix].norm() / exact[:, :, prefix].norm()
    assert found.dtype == torch.bfloat16 and float(off) < 0.005


def test_a_layer_that_wants_more_is_refused() -> None:
    """Then the model is tried under a mask."""
    trees = RowTrees([[np.arange(3)]], [[0]], 3)
    x = torch.zeros(1, 2, 3, 4)
    for more in ({"sliding_window": 2}, {"dropout": 0.1}, {"softcap": 30.0}):
        with pytest.raises(ValueError, match="features that attention over row trees lacks"):
            row_tree_attention(nn.Identity(), x, x, x, None, row_trees=trees, **more)


CPU = torch.device("cpu")


def computed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor, int, int],
    window: int | None,
    scale: float | None,
) -> Tensor:
    """What a ``varlen_attn`` gives, for as many heads of keys as of queries."""
    assert q.shape[1] == k.shape[1], "Expect query and key/value to have the same number of heads"
    return reference_attention(
        q, k, v, *ends, window, q.shape[-1] ** -0.5 if scale is None else scale
    )


def of_2_10(q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
            is_causal: bool = False, return_aux: Any = None) -> Tensor:  # fmt: skip
    assert is_causal
    return computed(q, k, v, (cu_seq_q, cu_seq_k, max_q, max_k), None, None)


def of_2_11(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert window_size[1] == 0
    window = None if window_size[0] < 0 else window_size[0] + 1
    return computed(q, k, v, (cu_seq_q, cu_seq_k, max_q, max_k), window, scale)


def of_2_13(
    q: Tensor, k: Tensor, v: Tensor, *ends: Any, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    assert enable_gqa == (q.shape[1] != k.shape[1])
    times = q.shape[1] // k.shape[1]
    return of_2_11(
        q,
        k.repeat_interleave(times, 1),
        v.repeat_interleave(times, 1),
        *ends,
        scale=scale,
        window_size=window_size,
    )


@pytest.mark.parametrize(("function", "ways"), [(of_2_10, 1), (of_2_11, 1), (of_2_13, 2)])
def test_every_signature_is_called_by_what_it_has(function: Any, ways: int) -> None:
    made = list(adapt_kernels(function))
    assert len(made) == ways
    assert [find_kernel_fault(one, CPU, torch.bfloat16) for one in made] == [""] * ways
    ends = torch.tensor([0, 3], dtype=torch.int32)
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, heads, 8, generator=draw) for heads in (4, 2, 2))
    for one in made:
        found = one(q, k, v, ends, ends, 3, 3, None, 0.1)
        torch.testing.assert_close(found, reference_attention(q, k, v, ends, ends, 3, 3, None, 0.1))
    if function is of_2_10:
        with pytest.raises(NotImplementedError, match="no windows"):
            made[0](q, k, v, ends, ends, 3, 3, 2, 0.1)


@pytest.mark.slow
def test_the_signature_of_the_installed_torch_is_known() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    assert 1 <= len(list(adapt_kernels(varlen.varlen_attn))) <= 2


def test_a_kernel_that_computes_something_else_is_found() -> None:
    def top_left(*given: Any) -> Tensor:
        """The first query sees the first key, instead of the last query the last key."""
        q, k, v, ends_q, ends_k, most_q, _, window, scale = given
        rows = [
            torch.arange(int(ends_k[i]), int(ends_k[i]) + int(ends_q[i + 1] - ends_q[i]))
            for i in range(3)
        ]
        chosen = torch.cat(rows)
        return reference_attention(
            q, k[chosen], v[chosen], ends_q, ends_q, most_q, most_q, window, scale
        )

    def wide_window(*given: Any) -> Tensor:
        *rest, window, scale = given
        return reference_attention(*rest, None if window is None else window + 1, scale)

    def no_gradient(q: Tensor, *given: Any) -> Tensor:
        return reference_attention(q.detach(), *given)

    def nan(q: Tensor, *given: Any) -> Tensor:
        return reference_attention(q, *given) * float("nan")

    def broken(*given: Any) -> Tensor:
        raise RuntimeError("No kernel\nfor this device")

    assert "outputs by" in find_kernel_fault(top_left, CPU, torch.bfloat16)
    assert "outputs by" in find_kernel_fault(wide_window, CPU, torch.bfloat16)
    assert find_kernel_fault(wide_window, CPU, torch.bfloat16).endswith("with a window")
    assert "gradients of queries by 1" in find_kernel_fault(no_gradient, CPU, torch.bfloat16)
    assert "is off" in find_kernel_fault(nan, CPU, torch.bfloat16)
    assert find_kernel_fault(broken, CPU, torch.bfloat16) == "fails: No kernel"


def test_a_kernel_is_tried_with_heads_as_wide_as_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was proven for heads of 64; a backward pass that is wrong, or missing, for wider ones went
    unseen."""

    def narrow(q: Tensor, *given: Any) -> Tensor:
        """Has gradients for heads of up to 64 only."""
        return reference_attention(q if q.shape[-1] <= 64 else q.detach(), *given)

    assert find_kernel_fault(narrow, CPU, torch.bfloat16) == ""
    assert "gradients of queries by 1" in find_kernel_fault(narrow, CPU, torch.bfloat16, 128)
    sizes: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(
        varlen_attention,
        "find_kernel_fault",
        lambda *given: sizes.append(given[-1]) or "is off: outputs",
    )
    assert (
        "for heads of 256, is off" in find_kernel(torch.device("cuda:0"), torch.bfloat16, (256,))[1]
    )
    assert {*sizes} == {256}
    sizes.clear()
    fails = lambda *given: sizes.append(given[-1]) or ("is off" if given[-1] > 128 else "")
    monkeypatch.setattr(varlen_attention, "find_kernel_fault", fails)
    assert (
        "for heads of 256, is off"
        in find_kernel(torch.device("cuda:0"), torch.bfloat16, (64, 256))[1]
    )
    assert {*sizes} == {64, 256}, "layers may have heads of different widths"


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_the_plain_computation_is_dense_attention_with_its_gradients(head_size: int) -> None:
    """What kernels are compared with, for every width of heads: shared keys, fewer heads of keys,
    fp32."""
    draw = torch.Generator().manual_seed(head_size)
    paths = [np.array([0, 1, 2, 3, 4]), np.array([0, 1, 2, 5, 6, 7])]
    lay = build_packed_layout(paths, [0, 3], reference_attention)
    given = [
        torch.randn(8, heads, head_size, generator=draw).requires_grad_() for heads in (4, 2, 2)
    ]
    weights = torch.randn(8, 4, head_size, generator=draw)
    output = lay.attend(given[0], given[1], given[2], None, head_size**-0.5)
    found = [output, *torch.autograd.grad((output * weights).sum(), given)]
    parts = []
    for path in paths:
        q, k, v = (x[torch.from_numpy(path)].transpose(0, 1)[None] for x in given)
        dense = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        parts.append(dense[0].transpose(0, 1))
    output = torch.cat([parts[0], parts[1][3:]])
    expected = [output, *torch.autograd.grad((output * weights).sum(), given)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_where_there_is_none_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:0")
    assert find_kernel(CPU, torch.bfloat16) == (None, "")
    assert find_kernel(cuda, torch.float32)[1].endswith("the model has float32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert find_kernel(cuda, torch.bfloat16)[1].endswith("capability 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen_attention, "find_kernel_fault", lambda *_: "is off: outputs")
    found, reason = find_kernel(cuda, torch.bfloat16)
    assert found is None and reason.endswith("is off: outputs")
    monkeypatch.setattr(varlen_attention, "find_kernel_fault", lambda *_: "")
    assert find_kernel(cuda, torch.bfloat16)[0] is not None


def test_sequences_of_their_own_need_no_list_of_keys() -> None:
    lay = build_packed_layout([np.arange(3), np.arange(3, 8)], [0, 0], reference_attention)
    assert (
        lay.ends_q.tolist() == lay.ends_k.tolist() == [0, 3, 8] and lay.ends_q.dtype == torch.int32
    )
    assert (lay.longest_q, lay.longest_k, lay.keys) == (5, 5, None)


def test_a_branch_has_its_own_queries_and_the_keys_of_its_whole_path() -> None:
    """Stem 0 to 3, then two branches of it; the third sequence is a part of the second and computes
    nothing."""
    paths = [
        np.array([0, 1, 2, 3, 4]),
        np.array([0, 1, 2, 5, 6, 7]),
        np.array([0, 1, 2, 5]),
        np.array([8, 9]),
    ]
    lay = build_packed_layout(paths, [0, 3, 4, 0], reference_attention)
    assert lay.ends_q.tolist() == [0, 5, 8, 10]
    assert lay.ends_k.tolist() == [0, 5, 11, 13]
    assert (lay.longest_q, lay.longest_k) == (5, 6)
    assert lay.keys is not None and lay.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="must lie behind each other"):
        build_packed_layout([np.array([0, 1]), np.array([3, 4])], [0, 0], reference_attention)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_a_tree_is_that_of_each_sequence(window: int | None) -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(8, heads, 4, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)
    )
    paths = [np.array([0, 1, 2, 3, 4]), np.array([0, 1, 2, 5, 6, 7])]
    lay = build_packed_layout(paths, [0, 3], reference_attention).to(CPU)
    found = lay.attend(query, key, value, window, 0.3)
    for path, first in zip(paths, (0, 3), strict=True):
        for t in range(first, len(path)):
            seen = path[max(0, t + 1 - (window or 99)) : t + 1]
            for head in range(4):
                scores = (key[seen, head // 2] @ query[path[t], head]) * 0.3
                expected = scores.softmax(0) @ value[seen, head // 2]
                torch.testing.assert_close(found[path[t], head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_a_prefix_that_packed_rows_share_are_rounded_once() -> None:
    """In bf16 the gradient of a prefix is the exact sum over its branches, but for one rounding."""
    paths = [np.array([0, 1, 2, 3 + branch]) for branch in range(100)]
    lay = build_packed_layout(paths, [0] + [3] * 99, reference_attention)
    draw = torch.Generator().manual_seed(2)
    tensors = [torch.randn(103, heads, 8, generator=draw).bfloat16() for heads in (4, 2, 2)]
    grad = (torch.randn(103, 4, 8, generator=draw) + 0.5).bfloat16()

    def of_values(dtype: torch.dtype) -> torch.Tensor:
        query, key, value = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        lay.attend(query, key, value, None, 0.3).backward(grad.to(dtype))
        assert value.grad is not None and value.grad.dtype == dtype
        return value.grad.double()

    exact = of_values(torch.float64)
    assert float((of_values(torch.bfloat16) - exact).norm() / exact.norm()) < 0.005
