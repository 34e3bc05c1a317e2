"""``ref_inf`` alone on a worker: log-probabilities of the reference, at the temperature of
sampling."""

import pytest
import torch

from tests.mfc.graph_calls import TEMPERATURE
from tests.mfc.mfc_bench import as_lists, random_tokens, replaced, sequences, shortened

GROUPS = [[9, 30, 2], [17, 17, 5], [4, 4, 11]]
SHIFTED = [[8, 29, 1], [16, 16, 4], [3, 3, 10]]


def test_it_is_the_log_softmax_of_a_plain_forward_of_the_model(bench, expected_logprobs):
    sample = random_tokens(GROUPS)
    outputs, stats = bench.run("ref_inf", sample)
    assert outputs.ids == sample.ids and as_lists(outputs.seqlens) == {
        "packed_ref_logprobs": SHIFTED
    }
    assert outputs["packed_ref_logprobs"].dtype == torch.float32
    masks = [mask[1:] for mask in sequences(sample, "loss_mask")]
    scored = expected_logprobs(sample, TEMPERATURE)
    expected = torch.cat(
        [torch.where(mask, row, 0.0) for mask, row in zip(masks, scored, strict=True)]
    )
    assert expected[expected != 0].std() > 1, "the model is not indifferent"
    torch.testing.assert_close(outputs["packed_ref_logprobs"], expected, atol=1e-4, rtol=1e-4)
    assert stats["n_tokens"] == sum(map(sum, GROUPS))


def test_samples_of_several_owners_are_joined_in_the_order_of_the_call(bench):
    """Each owner has some keys of some samples, so that the call fetches from both."""
    sample = random_tokens(GROUPS, seed=1)
    of_one = bench.run("ref_inf", sample, n_owners=1).outputs
    assert torch.equal(
        bench.run("ref_inf", sample).outputs["packed_ref_logprobs"], of_one["packed_ref_logprobs"]
    )
    turned = bench.run("ref_inf", sample.reorder([2, 0, 1])).outputs
    assert turned.ids == (sample.ids[2], sample.ids[0], sample.ids[1])
    torch.testing.assert_close(
        turned.reorder([1, 2, 0])["packed_ref_logprobs"],
        of_one["packed_ref_logprobs"],
        atol=1e-5,
        rtol=0,
    )


def test_a_sample_scores_the_same_in_any_company(bench):
    sample = random_tokens(GROUPS)
    together = bench.run("ref_inf", sample).outputs.select_ids([1])
    alone = bench.run("ref_inf", sample.select_ids([1])).outputs
    torch.testing.assert_close(
        alone["packed_ref_logprobs"], together["packed_ref_logprobs"], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda sample: replaced(sample, "packed_input_ids", sample["packed_input_ids"] + 396),
            "packed_input_ids of sample 's0@2' has the token",
        ),
        (
            lambda sample: replaced(sample, "packed_input_ids", sample["packed_input_ids"].float()),
            "packed_input_ids of sample 's0@2' is f32, not i64",
        ),
        (
            lambda sample: replaced(
                sample, "loss_mask", torch.full((sample.n_tokens("loss_mask"),), torch.nan)
            ),
            "loss_mask of sample 's0@2' is f32, not bool",
        ),
        (
            lambda sample: shortened(sample, "loss_mask"),
            "loss_mask of sample 's2@2' has 10 entries for a sequence of 11 tokens",
        ),
    ],
    ids=["unknown token", "tokens that are no integers", "a mask of NaN", "a short mask"],
)
def test_a_bad_input_is_one_error_and_the_next_call_is_served(bench, spoil, words):
    sample = random_tokens(GROUPS, seed=2)
    before = bench.run("ref_inf", sample).outputs
    assert words in bench.error_of("ref_inf", spoil(sample))
    assert torch.equal(
        bench.run("ref_inf", sample).outputs["packed_ref_logprobs"], before["packed_ref_logprobs"]
    )


def test_a_key_that_its_owner_does_not_have_is_named(bench):
    sample = random_tokens(GROUPS, seed=3)
    line = bench.error_of("ref_inf", sample, lost="loss_mask")
    assert "DataMissing" in line and "does not hold loss_mask of s0@3" in line
    assert bench.run("ref_inf", sample).stats["n_tokens"] == sum(map(sum, GROUPS))


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_call_is_named(bench):
    sample = random_tokens(GROUPS, seed=4)
    assert "'model_worker/1' died" in bench.error_of_kill("ref_inf", sample)
    assert bench.run("ref_inf", sample).stats["n_tokens"] == sum(map(sum, GROUPS))
