"""Batches of grouped rollouts."""

import pytest
import torch

from realhf.api.sample import SequenceSample


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def rollout_batch():
    """rollout_batch(groups, rewards, outcome) -> a complete train input with these lengths and
    scores."""

    def build(groups, rewards, outcome=None, seed=0):
        g = torch.Generator().manual_seed(seed)
        lengths = [n for group in groups for n in group]
        total = sum(lengths)
        n = len(lengths)
        mask = torch.rand(total, generator=g) < 0.6
        tensors = {
            "packed_input_ids": torch.randint(0, 50, (total,), generator=g),
            "loss_mask": mask,
            "packed_logprobs": -3 * torch.rand(total - n, generator=g),
            "packed_ref_logprobs": -3 * torch.rand(total - n, generator=g),
            "rewards": torch.tensor(rewards),
            "outcome": torch.tensor(outcome or [0] * n, dtype=torch.uint8),
        }
        shifted = [[m - 1 for m in group] for group in groups]
        single = [[1] * len(group) for group in groups]
        seqlens = {
            "packed_input_ids": groups,
            "loss_mask": groups,
            "packed_logprobs": shifted,
            "packed_ref_logprobs": shifted,
            "rewards": single,
            "outcome": single,
        }
        return SequenceSample.from_tensors([f"t{i}" for i in range(len(groups))], tensors, seqlens)

    return build
