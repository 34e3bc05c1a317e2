"""The losses against loops in float64 over single positions, written from the client's
documentation, gradients too."""

from __future__ import annotations

import math

import pytest
import torch

from realhf.tinker.losses import HIGH, LOSSES, LOW, SEQUENCE_MASK, find_loss

LENGTHS = (5, 1, 7, 3)
N = sum(LENGTHS)


def data(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rand = lambda: torch.rand(N, generator=draw, dtype=torch.float64)
    logprobs = -3 * rand() - 0.05
    inputs = {
        "weights": rand() - 0.3,
        "logprobs": logprobs + 0.8 * (rand() - 0.5),
        "advantages": 2 * rand() - 1,
        SEQUENCE_MASK: (rand() > 0.4).double(),
    }
    inputs[SEQUENCE_MASK][LENGTHS[0]] = 0.0  # the second sequence has no marked position
    return (
        logprobs,
        inputs,
        torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
    )


def by_hand(name, p, inputs, sequence, settings):
    """Loss and slope of every position."""
    found = []
    for t in range(N):
        given = {key: float(values[t]) for key, values in inputs.items()}
        own = float(p[t])
        reference = given.get("logprobs", 0.0)
        advantage = given.get("advantages", 0.0)
        low = given.get(LOW, settings.get(LOW))
        high = given.get(HIGH, settings.get(HIGH))
        ratio = math.exp(own - reference)
        if name == "gspo":
            marked = [
                s for s in range(N) if sequence[s] == sequence[t] and inputs[SEQUENCE_MASK][s] != 0
            ]
            apart = [float(p[s]) - float(inputs["logprobs"][s]) for s in marked]
            ratio = math.exp(sum(apart) / len(apart)) if apart else 1.0
        if name == "cross_entropy":
            found.append((-own * given["weights"], -given["weights"]))
        elif name == "importance_sampling":
            found.append((-ratio * advantage, -ratio * advantage))
        elif name == "cispo":
            clipped = min(max(ratio, low), high)
            found.append((-clipped * own * advantage, -clipped * advantage))
        elif name == "dro":
            apart = own - reference
            found.append(
                (
                    -own * advantage + settings["beta"] / 2 * apart**2,
                    -advantage + settings["beta"] * apart,
                )
            )
        else:
            clipped = min(max(ratio, low), high)
            if ratio * advantage <= clipped * advantage:
                found.append((-ratio * advantage, -ratio * advantage))
            else:
                found.append((-clipped * advantage, 0.0))
    return found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("thresholds", [False, True])
def test_a_loss_is_what_its_definition_says(name, seed, thresholds):
    """Value and slope at every position, with random settings, and with thresholds of single
    positions."""
    p, inputs, sequence = data(seed)
    draw = torch.Generator().manual_seed(seed)
    config = (
        {
            key: float(value) * (0.8 + 0.4 * float(torch.rand((), generator=draw)))
            for key, value in LOSSES[name].settings.items()
        }
        if seed
        else {}
    )
    config = {
        key: min(value, 0.9) if key == LOW else max(value, 0.95) if key == HIGH else value
        for key, value in config.items()
    }
    loss, settings = find_loss(name, config)
    if thresholds:
        if not loss.takes:
            pytest.skip("this loss clips nothing")
        inputs[LOW], inputs[HIGH] = (
            0.7 + 0.2 * inputs["weights"].abs(),
            1.0 + 0.3 * inputs["weights"].abs(),
        )
    assert set(settings) == set(loss.settings)
    leaf = p.clone().requires_grad_()
    values = loss.compute(leaf, inputs, sequence, settings)
    values.sum().backward()
    expected = torch.tensor(by_hand(name, p, inputs, sequence, settings), dtype=torch.float64)
    torch.testing.assert_close(values.detach(), expected[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(leaf.grad, expected[:, 1], rtol=1e-12, atol=1e-12)


def test_cross_entropy_takes_several_targets_for_a_position():
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    loss, settings = find_loss("cross_entropy", {})
    loss.compute(logprobs, {"weights": weights}, torch.tensor([0, 0]), settings).sum().backward()
    assert torch.equal(logprobs.grad, -weights)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        (
            "stable_reinforce",
            {},
            "'stable_reinforce' is not carried by this server: its formula is not public",
        ),
        ("custom", {}, "forward_backward_custom"),
        ("dpo", {}, "there are cross_entropy, importance_sampling"),
        ("ppo", {"beta": 1.0}, "ppo has no setting 'beta'"),
        ("dro", {"beta": math.nan}, "beta must be a finite number"),
        ("dro", {"beta": "0.1"}, "beta must be a finite number"),
        ("ppo", {LOW: 1.3}, "clip_low_threshold 1.3 must be from 0 to clip_high_threshold 1.2"),
    ],
)
def test_what_is_not_carried_is_refused_by_name(name, config, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        find_loss(name, config)
