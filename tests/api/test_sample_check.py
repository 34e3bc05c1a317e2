"""Registered keys have their type and as many entries as their sequence has tokens."""

import pytest
import torch

from realhf.api.sample import SequenceSample
from realhf.api.sample_check import check_standard_keys

TOKENS = [[3, 1], [4]]


def sample(**changes):
    """Two samples with a key of every rule; ``changes`` are (tensor, lengths) by key, None to leave
    one out."""
    columns = {
        "packed_input_ids": (torch.arange(8), TOKENS),
        "loss_mask": (torch.ones(8, dtype=torch.bool), TOKENS),
        "packed_logprobs": (torch.zeros(5), [[2, 0], [3]]),
        "rewards": (torch.zeros(3), [[1, 1], [1]]),
        "turn_rewards": (torch.zeros(6), [[1, 3], [2]]),
        "own_key": (torch.zeros(2, 7), [[1], [1]]),
        **changes,
    }
    columns = {key: column for key, column in columns.items() if column is not None}
    tensors = {key: tensor for key, (tensor, _) in columns.items()}
    lengths = {key: nested for key, (_, nested) in columns.items()}
    return SequenceSample.from_tensors(["a", "b"], tensors, lengths)


def test_what_is_as_registered_passes_with_and_without_tokens():
    check_standard_keys(sample())
    check_standard_keys(sample(packed_input_ids=None))
    check_standard_keys(
        sample(packed_input_ids=None, loss_mask=None, packed_logprobs=None, rewards=None)
    )
    check_standard_keys(SequenceSample.from_tensors(["a"], {}, {}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_mask": (torch.ones(8), TOKENS)}, "loss_mask of sample 'a' is f32, not bool"),
        (
            {"rewards": (torch.zeros(3, 2), [[1, 1], [1]])},
            r"rewards of sample 'a' is f32 of shape \[2\], not f32",
        ),
        (
            {"packed_logprobs": (torch.zeros(6), [[2, 0], [4]])},
            "packed_logprobs of sample 'b' has 4 entries for a sequence of 4 tokens, not 3",
        ),
        (
            {"loss_mask": (torch.ones(8, dtype=torch.bool), [[1, 3], [4]])},
            "loss_mask of sample 'a' has 1 entries for a sequence of 3 tokens, not 3",
        ),
        (
            {"rewards": (torch.zeros(3), [[1], [1, 1]])},
            "rewards of sample 'a' has 1 sequences, packed_input_ids has 2",
        ),
        (
            {
                "packed_input_ids": None,
                "loss_mask": None,
                "packed_logprobs": None,
                "rewards": (torch.zeros(1), [[0], [1]]),
            },
            "rewards of sample 'a' has 0 entries for a sequence, not 1",
        ),
    ],
    ids=["type", "shape", "too many", "moved", "sequences", "without tokens"],
)
def test_the_key_and_the_sample_that_differ_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        check_standard_keys(sample(**changes))
