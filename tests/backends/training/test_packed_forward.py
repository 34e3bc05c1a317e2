"""Batched scoring against one sequence at a time; heads that are a projection and a bit more are
known by what they do, and scored without the logits of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, PhiConfig

from realhf.api.sample import SequenceSample
from realhf.backends.training import selected_logprobs as module
from realhf.backends.training.packed_forward import Heads, PackedForward
from tests.backends.conftest import VOCABULARY

GROUPS = [[40, 3, 1], [17], [2, 60, 33, 33]]


def one_by_one(model: Any, sample: SequenceSample, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = []
    entropies = []
    start = 0
    for length in [n for group in GROUPS for n in group]:
        ids = sample["packed_input_ids"][start : start + length]
        log_p = torch.log_softmax(
            model(input_ids=ids[None]).logits[0, :-1].double() / temperature, -1
        )
        wanted = sample["loss_mask"][start + 1 : start + length]
        logprobs.append(torch.where(wanted, log_p.gather(1, ids[1:, None])[:, 0], 0.0))
        entropies.append(torch.where(wanted, -(log_p.exp() * log_p).sum(-1), 0.0))
        start += length
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_equals_one_sequence_at_a_time(
    tiny_model: Any, ragged_sample: Any, architecture: str
) -> None:
    model = tiny_model(architecture)
    sample = ragged_sample(GROUPS)
    logprobs, entropies = PackedForward(model)(sample).logprobs(temperature=0.8, with_entropy=True)
    expected, expected_entropies = one_by_one(model, sample, 0.8)
    assert logprobs.dtype == torch.float32 and entropies is not None
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies.double(), expected_entropies, atol=1e-4, rtol=0)


def test_gradient_is_the_same_without_a_plain_head(tiny_model: Any, ragged_sample: Any) -> None:
    sample = ragged_sample(GROUPS)

    def gradient(plain: bool) -> Tensor:
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


KINDS: dict[str, tuple[Any, dict[str, Any], tuple[bool, float, float | None]]] = {
    "granite": (GraniteConfig, {"logits_scaling": 3.0}, (False, 1 / 3.0, None)),
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 30.0, "head_dim": 8}, (False, 1.0, 30.0)),
    "cohere": (CohereConfig, {"logit_scale": 0.25}, (False, 0.25, None)),
    "phi": (PhiConfig, {}, (True, 1.0, None)),
}
"""Configuration, what it has beside the shape, and bias, factor and bound of the head."""
BATCH = [[40, 3, 1], [17], [2, 33]]


def made(kind: str) -> Any:
    config, more, _ = KINDS[kind]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config(**shape, eos_token_id=2, **more),
        attn_implementation="eager" if kind == "gemma2" else "sdpa",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else parameter.add_(
                0.5 * name.endswith("lm_head.bias")
            )
    return model.eval()


def scored(kind: str, sample: Any, *, known: bool) -> tuple[Tensor, Tensor, Tensor]:
    model = made(kind)
    forward = PackedForward(model)
    assert (forward.heads.bias is not None, forward.heads.factor, forward.heads.cap) == KINDS[kind][
        2
    ]
    forward.heads = forward.heads if known else Heads()
    logprobs, entropy = forward(sample).logprobs(temperature=0.7, with_entropy=True)
    assert entropy is not None
    ((logprobs + 0.1 * entropy) * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs, entropy, torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("kind", list(KINDS))
def test_chunks_score_as_the_model_itself(
    kind: str, ragged_sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities, entropies and the gradient of every weight."""
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 7)
    for found, expected in zip(
        scored(kind, ragged_sample(BATCH), known=True),
        scored(kind, ragged_sample(BATCH), known=False),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_head_that_does_something_else_is_not_known() -> None:
    """A bound that the configuration does not tell shows in large logits only."""
    model = made("gemma2")
    whole = model.forward
    model.config.final_logit_softcapping = None
    assert PackedForward(model).heads.language is not None

    def bounded(*args: Any, **given: Any) -> Any:
        output = whole(*args, **given)
        output.logits = 50.0 * torch.tanh(output.logits / 50.0)
        return output

    model.forward = bounded
    assert PackedForward(model).heads == Heads()


@pytest.mark.parametrize(("known", "share"), [(True, 0.1), (False, 1.0)])
def test_the_graph_holds_no_logits(
    ragged_sample: Any, monkeypatch: pytest.MonkeyPatch, known: bool, share: float
) -> None:
    """What scoring keeps for the backward pass is a small part of the logits, not several times as
    much."""
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 16)
    forward = PackedForward(made("granite"))
    forward.heads = forward.heads if known else Heads()
    sample = ragged_sample([[300, 300]]).select(["packed_input_ids"])
    held = {}
    outputs = forward(sample)

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim and tensor.shape[-1] == VOCABULARY:
            held[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = outputs.logprobs(with_entropy=True)
    assert logprobs.requires_grad
    logits = 598 * VOCABULARY
    assert sum(held.values()) <= share * logits if known else sum(held.values()) >= share * logits
