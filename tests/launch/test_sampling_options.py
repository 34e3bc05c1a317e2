"""Sampling that cuts the distribution is refused for training, before anything starts."""

from dataclasses import asdict

import pytest

from realhf.api.config import GenConfig
from realhf.api.experiment import RolloutOptions
from realhf.launch.__main__ import main
from realhf.rollout.interface import EnvRolloutInterface
from realhf.rollout.player import make_agent


@pytest.mark.parametrize("experiment", ["grpo_aws", "grpo_aws_async", "reinforce_aws"])
def test_a_cut_distribution_is_refused_with_the_reason(capsys, experiment):
    options = ["gen.top_p=0.9", "gen.top_k=20", "gen.min_new_tokens=2"]
    assert main([f"experiment={experiment}", "mode=check", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [sum(option in line for line in lines) for option in options] == [1, 1, 1]
    assert len(lines) == 3 and all("log-probabilities" in line for line in lines)


def test_rollouts_for_training_refuse_it_too_and_evaluation_does_not():
    gen = asdict(GenConfig(top_p=0.9))
    interface = EnvRolloutInterface(environment="aws", group_size=2, sessions=2, gen=gen)
    with pytest.raises(ValueError, match=r"gen.top_p=0.9.*whole distribution"):
        interface.generate(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="training samples from the whole"):
        make_agent(
            "", None, "", RolloutOptions.from_args({"environment": "aws", "group_size": 2, "sessions": 2, "gen": gen})
        )  # type: ignore[arg-type]
    assert GenConfig(temperature=0.3, max_new_tokens=9).truncations() == []


@pytest.mark.parametrize("dtype", ["float16", "float8"])
def test_a_dtype_that_cannot_be_trained_is_refused(capsys, dtype):
    assert main(["experiment=grpo_aws", "mode=check", f"actor.dtype={dtype}"]) == 2
    assert f"actor.dtype={dtype}: unknown (known: float32, bfloat16)" in capsys.readouterr().err
