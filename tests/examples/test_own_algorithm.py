"""The example of an algorithm of one's own: its option is checked, listed, and reaches the advantages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.policy_loss import ADVANTAGES
from realhf.api.sample import SequenceSample
from realhf.base.plugin import load_plugin
from realhf.launch.__main__ import main
from realhf.registry import interfaces

FILE = Path(__file__).resolve().parents[2] / "examples" / "own_algorithm.py"
ARGUMENTS = [f"+experiment_path={FILE}", "mode=check"]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The module, as the launcher and the workers import it."""
    yield load_plugin(FILE)


def two_groups() -> SequenceSample:
    """Two groups of two sequences of four tokens, of which all but the first are trained; each has one failure."""
    tensors = {
        "packed_input_ids": torch.arange(16),
        "loss_mask": torch.tensor([False, True, True, True] * 4),
        "packed_logprobs": -torch.ones(12),
        "rewards": torch.tensor([1.0, 0.0, 0.25, 0.75]),
        "outcome": torch.zeros(4, dtype=torch.uint8),
    }
    shapes = {"packed_logprobs": 3, "rewards": 1, "outcome": 1}
    return SequenceSample.from_tensors(["a", "b"], tensors, {key: [[shapes.get(key, 4)] * 2] * 2 for key in tensors})


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_failures_count_as_much_as_the_option_says(example: ModuleType, weight: float) -> None:
    """Positive advantages stay those of GRPO, negative ones are multiplied by the weight; 1 is GRPO itself."""
    plain = PolicyGradientInterface({"algo": "grpo"}).prepare(two_groups())[0][ADVANTAGES]
    own = interfaces.get("lenient_policy_gradient")({"failure_weight": weight}, ppo={"algo": "grpo"})
    prepared, stats = own.prepare(two_groups())
    assert (plain < 0).sum() == stats["n_failed"] == 6 and (plain > 0).sum() == 6
    assert torch.equal(prepared[ADVANTAGES], torch.where(plain < 0, weight * plain, plain))


def test_its_graph_is_that_of_grpo_with_its_own_train_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher takes the file and its option, and counts GRPO's four calls."""
    assert main([*ARGUMENTS, "algorithm.failure_weight=0.25"]) == 0
    assert "own_algorithm: 4 calls" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("algorithm.failure_wieght=0.5", "did you mean 'algorithm.failure_weight'?"),
        ("algorithm.failure_weight=2", "algorithm.failure_weight=2.0: must be between 0 and 1. A negative advantage"),
    ],
)
def test_a_mistake_in_its_option_is_refused(capsys: pytest.CaptureFixture[str], option: str, said: str) -> None:
    """A misspelt name and a value out of bounds end the launch with the option's own text."""
    assert main([*ARGUMENTS, option]) == 2
    assert said in capsys.readouterr().err
