"""``ref_inf`` alone on a worker: the log-probabilities of the reference."""

import pytest
import torch

from experiments.policy_gradient import config_class, ref_inf
from realhf.api.config import GenConfig, MicroBatchConfig
from realhf.api.experiment import ModelSpec
from realhf.api.sample import SequenceSample
from tests.mfc.mfc_bench import as_lists, sequences

pytestmark = pytest.mark.slow

TEMPERATURE = 0.7
GROUPS = [[9, 30, 2], [17, 17, 5]]


@pytest.fixture(scope="module")
def bench(make_bench, policy):
    config = config_class("aws")(
        experiment="grpo_aws", gen=GenConfig(temperature=TEMPERATURE), mb_spec=MicroBatchConfig(max_tokens_per_mb=32)
    )
    return make_bench(ref_inf(config), ModelSpec("ref", str(policy)))


def tokens(groups, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = sum(map(sum, groups))
    tensors = {
        "packed_input_ids": torch.randint(4, 400, (n,), generator=generator),
        "loss_mask": torch.rand(n, generator=generator) < 0.6,
    }
    return SequenceSample.from_tensors(
        [f"s{i}@{seed}" for i in range(len(groups))], tensors, dict.fromkeys(tensors, groups)
    )


def test_it_is_the_log_softmax_of_the_models_own_forward(bench, expected_logprobs):
    sample = tokens(GROUPS)
    outputs, stats = bench.infer(sample)
    assert as_lists(outputs.seqlens) == {"packed_ref_logprobs": [[8, 29, 1], [16, 16, 4]]}
    assert outputs.ids == sample.ids and outputs["packed_ref_logprobs"].dtype == torch.float32
    expected = torch.cat(
        [
            torch.where(mask[1:], logprobs, 0.0)
            for mask, logprobs in zip(
                sequences(sample, "loss_mask"), expected_logprobs(sample, temperature=TEMPERATURE), strict=True
            )
        ]
    )
    assert expected[expected != 0].std() > 1, "the model is not indifferent"
    torch.testing.assert_close(outputs["packed_ref_logprobs"], expected, atol=1e-4, rtol=1e-4)
    assert stats["n_tokens"] == 80


def test_a_sample_scores_the_same_in_any_company(bench):
    together, _ = bench.infer(tokens(GROUPS))
    sample = tokens(GROUPS).select_ids([1])
    alone, _ = bench.infer(sample)
    torch.testing.assert_close(alone["packed_ref_logprobs"], together["packed_ref_logprobs"][-36:], atol=1e-5, rtol=0)


def test_the_reference_does_not_move(bench, policy, expected_logprobs):
    bench.infer(tokens(GROUPS, seed=1), step=5, seed=2)
    sample, exported = tokens(GROUPS, seed=2), bench.export("ref")
    for before, after in zip(expected_logprobs(sample), expected_logprobs(sample, folder=exported), strict=True):
        assert torch.equal(before, after)
