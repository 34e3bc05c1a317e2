"""Where the sequences of a packed row are, and that attention over them sees what each sequence would see alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from realhf.backends.training.varlen_attention import packed_layout, plain_attention

CPU = torch.device("cpu")


def test_sequences_of_their_own_need_no_list_of_keys() -> None:
    lay = packed_layout([np.arange(3), np.arange(3, 8)], [0, 0], plain_attention)
    assert lay.ends_q.tolist() == lay.ends_k.tolist() == [0, 3, 8] and lay.ends_q.dtype == torch.int32
    assert (lay.longest_q, lay.longest_k, lay.keys) == (5, 5, None)


def test_a_branch_has_its_own_queries_and_the_keys_of_its_whole_path() -> None:
    """Stem 0 to 3, then two branches of it; the third sequence is a part of the second and computes nothing."""
    paths = [np.array([0, 1, 2, 3, 4]), np.array([0, 1, 2, 5, 6, 7]), np.array([0, 1, 2, 5]), np.array([8, 9])]
    lay = packed_layout(paths, [0, 3, 4, 0], plain_attention)
    assert lay.ends_q.tolist() == [0, 5, 8, 10]
    assert lay.ends_k.tolist() == [0, 5, 11, 13]
    assert (lay.longest_q, lay.longest_k) == (5, 6)
    assert lay.keys is not None and lay.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="must lie behind each other"):
        packed_layout([np.array([0, 1]), np.array([3, 4])], [0, 0], plain_attention)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_a_tree_is_that_of_each_sequence(window: int | None) -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(8, heads, 4, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    paths = [np.array([0, 1, 2, 3, 4]), np.array([0, 1, 2, 5, 6, 7])]
    lay = packed_layout(paths, [0, 3], plain_attention).to(CPU)
    found = lay.attend(query, key, value, window, 0.3)
    for path, first in zip(paths, (0, 3), strict=True):
        for t in range(first, len(path)):
            seen = path[max(0, t + 1 - (window or 99)) : t + 1]
            for head in range(4):
                scores = (key[seen, head // 2] @ query[path[t], head]) * 0.3
                expected = scores.softmax(0) @ value[seen, head // 2]
                torch.testing.assert_close(found[path[t], head], expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_shared_prefix_are_rounded_once() -> None:
    """In bf16 the gradient of a prefix is the exact sum over its branches, but for one rounding."""
    paths = [np.array([0, 1, 2, 3 + branch]) for branch in range(100)]
    lay = packed_layout(paths, [0] + [3] * 99, plain_attention)
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
