"""``actor_inf`` alone on a worker: the log-probabilities of the policy that is about to train."""

import pytest
import torch

from experiments.policy_gradient import actor_inf, actor_model, config_class
from realhf.api.config import GenConfig
from realhf.api.sample import SequenceSample
from tests.mfc.mfc_bench import as_lists, sequences

pytestmark = pytest.mark.slow

TEMPERATURE = 0.8
GROUPS = [[12, 7], [9, 20]]


@pytest.fixture(scope="module")
def bench(make_bench, policy):
    config = config_class("aws")(experiment="grpo_aws", gen=GenConfig(temperature=TEMPERATURE))
    return make_bench(actor_inf(config), actor_model(config, str(policy)))


def test_sampled_tokens_are_scored_at_the_training_temperature(bench, expected_logprobs):
    generator = torch.Generator().manual_seed(0)
    n = sum(map(sum, GROUPS))
    tensors = {
        "packed_input_ids": torch.randint(4, 400, (n,), generator=generator),
        "loss_mask": torch.rand(n, generator=generator) < 0.5,
    }
    sample = SequenceSample.from_tensors(["a", "b"], tensors, dict.fromkeys(tensors, GROUPS))
    outputs, _ = bench.infer(sample, step=3)
    assert as_lists(outputs.seqlens) == {"proximal_logprobs": [[11, 6], [8, 19]]}
    expected = torch.cat(
        [
            torch.where(mask[1:], logprobs, 0.0)
            for mask, logprobs in zip(
                sequences(sample, "loss_mask"), expected_logprobs(sample, temperature=TEMPERATURE), strict=True
            )
        ]
    )
    assert outputs["proximal_logprobs"].dtype == torch.float32 and expected[expected != 0].std() > 1
    torch.testing.assert_close(outputs["proximal_logprobs"], expected, atol=1e-4, rtol=1e-4)
