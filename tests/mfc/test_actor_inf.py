"""``actor_inf`` alone on a worker: log-probabilities of the policy that is about to train."""

import pytest
import torch

from tests.mfc.graph_calls import TEMPERATURE
from tests.mfc.mfc_bench import as_lists, random_tokens, sequences, shortened

pytestmark = pytest.mark.slow

GROUPS = [[12, 7], [9, 20]]


def expected_of(sample, logprobs):
    """The log-probabilities of the sampled tokens, 0 elsewhere."""
    masks = [mask[1:] for mask in sequences(sample, "loss_mask")]
    return torch.cat(
        [torch.where(mask, row, 0.0) for mask, row in zip(masks, logprobs, strict=True)]
    )


def test_sampled_tokens_are_scored_at_the_training_temperature(bench, expected_logprobs):
    sample = random_tokens(GROUPS)
    outputs, stats = bench.run("actor_inf", sample, step=3)
    assert as_lists(outputs.seqlens) == {"proximal_logprobs": [[11, 6], [8, 19]]}
    assert outputs["proximal_logprobs"].dtype == torch.float32
    expected = expected_of(sample, expected_logprobs(sample, TEMPERATURE))
    assert expected[expected != 0].std() > 1, "the model is not indifferent"
    torch.testing.assert_close(outputs["proximal_logprobs"], expected, atol=1e-4, rtol=1e-4)
    assert stats["n_tokens"] == sum(map(sum, GROUPS))


def test_it_follows_the_policy_as_that_trains_and_the_reference_does_not(
    fresh, train_sample, expected_logprobs
):
    sample = random_tokens(GROUPS, seed=1)
    before = fresh.run("actor_inf", sample).outputs["proximal_logprobs"]
    reference = fresh.run("ref_inf", sample).outputs["packed_ref_logprobs"]
    assert torch.equal(before, reference), "both begin with the same weights"
    fresh.run("actor_train", train_sample())
    after = fresh.run("actor_inf", sample, step=1).outputs["proximal_logprobs"]
    trained = fresh.export("actor", "followed")
    expected = expected_of(sample, expected_logprobs(sample, TEMPERATURE, trained))
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    assert float((after - before).abs().max()) > 1e-3
    assert torch.equal(
        fresh.run("ref_inf", sample, step=1).outputs["packed_ref_logprobs"], reference
    )


def test_samples_of_several_owners_are_joined(bench):
    sample = random_tokens(GROUPS, seed=2)
    of_one = bench.run("actor_inf", sample, n_owners=1).outputs["proximal_logprobs"]
    assert torch.equal(bench.run("actor_inf", sample).outputs["proximal_logprobs"], of_one)


def test_a_bad_input_is_one_error_and_the_next_call_is_served(bench):
    sample = random_tokens(GROUPS, seed=3)
    assert "does not hold packed_input_ids of s" in bench.error_of(
        "actor_inf", sample, lost="packed_input_ids"
    )
    assert "loss_mask of sample 's1@3' has 19 entries" in bench.error_of(
        "actor_inf", shortened(sample, "loss_mask")
    )
    assert bench.run("actor_inf", sample).stats["n_tokens"] == sum(map(sum, GROUPS))


def test_a_worker_that_is_killed_in_the_call_is_named(bench):
    assert "'model_worker/1' died" in bench.error_of_kill(
        "actor_inf", random_tokens(GROUPS, seed=4)
    )
