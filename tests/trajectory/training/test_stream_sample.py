"""Groups of a batch as samples: every key, what is left out and why, and what the producers did not
say."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from realhf.algorithms.inference import OutcomeRewardInterface
from realhf.algorithms.options import PolicyGradientOptions
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.train_step import minibatches
from realhf.api.model import CallContext
from realhf.api.rollout import RolloutOutcome
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.rollout.rollout_sample import outcomes_to_sample
from realhf.trajectory.client.encoding import decode_batch, encode_groups, group_of
from realhf.trajectory.training.stream_sample import Converted, RowLimits, groups_to_sample
from realhf.trajectory.wire import encode
from realhf.trajectory.wire.msgpack_groups import read_group

LIMITS = RowLimits(vocab_size=100, max_tokens=8, min_group_size=2)


def no_rescore(sample: SequenceSample) -> torch.Tensor:
    raise AssertionError("nothing is missing")


def converted(
    *groups: dict[str, Any], places: int = 3, limits: RowLimits = LIMITS, rescore: Any = no_rescore
) -> Converted:
    ids = [f"slot{i}@{i}" for i in range(places)]
    return groups_to_sample(ids, groups, limits, version=7, rescore=rescore)


def plain(n: int = 2, **changed: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3, 4]] * n, "masks": [[-100, -100, 3, 4]] * n, "scores": [float(i) for i in range(n)],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * n, "env_id": 0, "overrides": None, **changed,
    }  # fmt: skip


def outcome(status: str, reward: float | None, n: int) -> RolloutOutcome:
    mask = [i % 3 != 2 for i in range(n)]
    return RolloutOutcome(
        status, [1, 2, 3], list(range(10, 10 + n)), [-0.1 * (i + 1) if on else 0.0 for i, on in enumerate(mask)],
        [4 if on else -1 for on in mask], mask, reward, reward == 1.0, 0.0, (), 5, "warmup", 9,
    )  # fmt: skip


def test_pushed_episodes_arrive_as_if_played_here():
    """The same tensors as the rollout interface makes of them, over the binary wire."""
    groups = [
        [outcome("achieved", 1.0, 4), outcome("max_turns", 0.25, 3)],
        [outcome("finished", 0.5, 2)] * 2,
    ]
    pieces = []
    for played in groups:
        group = group_of(played)
        assert group is not None
        body, _ = encode_groups([group], listed=False, binary=True, compression="none")
        packed = read_group(body, ["body"])
        pieces.append((packed.present, packed.data))
    batch = decode_batch(b"".join(encode.msgpack_pieces(pieces)), "application/msgpack", "url")[
        "batch"
    ]
    found = converted(*batch, places=2, limits=RowLimits(100, 64, 2)).sample
    expected = outcomes_to_sample(found.ids, groups)
    assert found.keys == expected.keys
    for key in sorted(expected.keys - {"prompt_mask"}):
        assert torch.equal(found[key], expected[key]), key
        assert found.seqlens[key] == expected.seqlens[key]
    assert found.metadata["rewards"] == expected.metadata["rewards"]
    assert group_of([outcome("env_error", None, 2)]) is None
    assert (
        len(
            (group_of([outcome("env_error", None, 2), outcome("achieved", 1.0, 2)]) or {})["tokens"]
        )
        == 1
    )


def test_places_without_a_group_hold_nothing():
    found = converted(plain(2), plain(3), places=5)
    assert found.sample.seqlens["packed_input_ids"] == [[4, 4], [4, 4, 4], [], [], []]
    assert found.sample.seqlens["packed_logprobs"] == [[3, 3], [3, 3, 3], [], [], []]
    assert found.sample["packed_logprobs"].tolist() == [0.0, -0.5, -0.25] * 5
    assert found.sample["packed_versions"].tolist() == [-1, 7, 7] * 5
    assert found.sample["env_rewards"].tolist() == [0.0, 1.0, 0.0, 1.0, 2.0]
    assert found.sample.metadata["rewards"][1:3] == ["[0.0, 1.0, 2.0]", "[]"]
    assert not found.problems and not found.rescored


@pytest.mark.parametrize(("changed", "reason"), [
    ({"tokens": [[1] * 9, [1, 2], [1, 2]]}, "too_long"), ({"tokens": [[], [1, 2], [1, 2]]}, "no_tokens"),
    ({"tokens": [[1, 100], [1, 2], [1, 2]]}, "unknown_tokens"),
    ({"tokens": [[-1, 1], [1, 2], [1, 2]]}, "unknown_tokens"),
    ({"tokens": [[2**70, 1], [1, 2], [1, 2]]}, "unknown_tokens"), ({"masks": [[1], [1, 2], [1, 2]]}, "wrong_masks"),
    ({"scores": [1e39, 1.0, 0.5]}, "wrong_score"), ({"scores": [-1e20, 1.0, 0.5]}, "wrong_score"),
    ({"inference_logprobs": [[-1.0]] + [[-1.0] * 2] * 2}, "wrong_logprobs"),
    ({"inference_logprobs": [[-1e300] * 2] + [[-1.0] * 2] * 2}, "wrong_logprobs"),
])  # fmt: skip
def test_a_sequence_of_the_wrong_shape_teaches_nothing(changed, reason):
    good = {
        "tokens": [[1, 2]] * 3,
        "masks": [[1, 2]] * 3,
        "scores": [0.0, 1.0, 0.5],
        "inference_logprobs": [[-1.0, -1.0]] * 3,
    }
    found = converted(plain(**(good | changed)))
    assert found.problems == {reason: 1}
    assert found.sample["outcome"].tolist() == [2, 0, 0]
    assert not found.sample["loss_mask"][0]
    assert json.loads(found.sample.metadata["rewards"][0]) == [None, 1.0, 0.5]


def test_too_few_sequences_teach_nothing():
    found = converted(plain(3, scores=[1.0]), plain(1), plain(2))
    assert found.problems == {"no_score": 2, "small_groups": 1}
    assert found.sample["outcome"].tolist() == [2, 2, 2, 0, 0]
    assert not found.sample["loss_mask"][:3].any()
    with pytest.raises(ValueError, match="4 groups for 3 places"):
        converted(*[plain(2)] * 4)


def test_overrides_of_a_sequence():
    found = converted(
        plain(
            2,
            overrides=[{"set_advantage_to_zero": True}, {"truncated": True}],
            policy_version=2**40,
        )
    )
    assert found.sample["loss_mask"].tolist() == [False] * 4 + [False, False, True, True]
    assert found.sample["seq_no_eos_mask"].tolist() == [False, True]
    assert found.sample["outcome"].tolist() == [0, 0]
    assert found.sample["packed_versions"].tolist() == [-1, -1, -1, -1, 2**31 - 1, 2**31 - 1]


def test_a_producer_says_which_sequences_are_rows_of_one_rollout():
    """They are one member of their group, which then is too small; without a word each is a
    rollout."""
    rows = [{"rollout": "a"}, {}, {"rollout": "a"}, {"rollout": 1}, {"rollout": "1"}]
    assert converted(plain(5, overrides=rows)).sample["rollout_index"].tolist() == [0, 1, 0, 2, 3]
    found = converted(plain(2), plain(2, overrides=[{"rollout": 3}] * 2)).sample
    assert found["rollout_index"].tolist() == [0, 1, 0, 0] and found["outcome"].tolist() == [
        0,
        0,
        2,
        2,
    ]


def test_missing_log_probabilities_are_computed_and_others_kept():
    asked = []

    def rescore(sample: SequenceSample) -> torch.Tensor:
        asked.append(sample)
        return torch.full((sample.n_tokens("packed_input_ids") - 4,), -9.0)

    found = converted(plain(2), plain(2, inference_logprobs=None), rescore=rescore)
    assert found.rescored == 2
    assert asked[0].keys == {"packed_input_ids", "loss_mask"}
    assert found.sample["packed_logprobs"].tolist() == [0.0, -0.5, -0.25] * 2 + [-9.0] * 6


def test_the_grpo_interface_takes_it_empty_places_and_all(tmp_path):
    """Advantages come from the groups, and the places without one change no figure."""
    context = CallContext(0, 1, MicroBatchSpec(), tmp_path)
    for n in (1, 2):
        ppo = PolicyGradientInterface(PolicyGradientOptions(ppo_n_minibatches=n))
        found = []
        for places in (2, 6):
            sample = converted(plain(2), plain(3), places=places).sample
            rewards, _ = OutcomeRewardInterface().inference(None, sample, context)  # type: ignore[arg-type]
            prepared, stats = ppo.prepare(sample.update(rewards))
            parts = minibatches(prepared, n, (3,))
            assert sum(part is not None for part in map(ppo._select_trained, parts)) > 0
            found.append((stats, prepared["advantages"].tolist()))
        assert found[0] == found[1]
        assert found[0][0]["n_groups"] == 2 and found[0][0]["n_sequences"] == 5
        assert np.count_nonzero(found[0][1]) == 8
