"""Batched scoring against one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from realhf.api.sample import SequenceSample
from realhf.backends.training.packed_forward import Heads, PackedForward

GROUPS = [[40, 3, 1], [17], [2, 60, 33, 33]]


def one_by_one(model: Any, sample: SequenceSample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropies, start = [], [], 0
    for length in [n for group in GROUPS for n in group]:
        ids = sample["packed_input_ids"][start : start + length]
        log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].double() / temperature, -1)
        wanted = sample["loss_mask"][start + 1 : start + length]
        logprobs.append(torch.where(wanted, log_p.gather(1, ids[1:, None])[:, 0], 0.0))
        entropies.append(torch.where(wanted, -(log_p.exp() * log_p).sum(-1), 0.0))
        start += length
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_equals_one_sequence_at_a_time(tiny_model: Any, ragged_sample: Any, architecture: str) -> None:
    model, sample = tiny_model(architecture), ragged_sample(GROUPS)
    logprobs, entropies = PackedForward(model)(sample).logprobs(temperature=0.8, with_entropy=True)
    expected, expected_entropies = one_by_one(model, sample, 0.8)
    assert logprobs.dtype == torch.float32 and entropies is not None
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies.double(), expected_entropies, atol=1e-4, rtol=0)


def test_gradient_is_the_same_without_a_plain_head(tiny_model: Any, ragged_sample: Any) -> None:
    sample = ragged_sample(GROUPS)

    def gradient(plain: bool) -> torch.Tensor:
        model = tiny_model()
        forward = PackedForward(model)
        assert forward.heads.language is not None
        if not plain:
            forward.heads = Heads()
        logprobs, _ = forward(sample).logprobs(temperature=0.8)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    torch.testing.assert_close(gradient(False), gradient(True), atol=1e-4, rtol=1e-4)


def test_without_mask_every_token_is_scored(tiny_model: Any, ragged_sample: Any) -> None:
    sample = ragged_sample(GROUPS).select(["packed_input_ids"])
    logprobs, _ = PackedForward(tiny_model())(sample).logprobs()
    assert logprobs.shape == (sum(map(sum, GROUPS)) - 8,) and bool((logprobs < 0).all())


def test_bad_input_is_refused(tiny_model: Any, ragged_sample: Any) -> None:
    forward = PackedForward(tiny_model())
    with pytest.raises(ValueError, match="empty sequence"):
        forward(ragged_sample([[3, 0]]))
    with pytest.raises(ValueError, match="temperature"):
        forward(ragged_sample([[3]])).logprobs(temperature=0.0)
