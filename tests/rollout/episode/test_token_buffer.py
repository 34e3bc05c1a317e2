"""Token accounting of one episode."""

from __future__ import annotations

import pytest

from realhf.api.model import GenOutput
from realhf.rollout.episode import TokenBuffer


def turn(ids: list[int], version: int = 3) -> GenOutput:
    return GenOutput(ids, [-0.5] * len(ids), [version] * len(ids), "stop")


def test_an_episode_keeps_every_id_in_place() -> None:
    buffer = TokenBuffer([1, 2, 3], 20)
    buffer.append_policy(turn([4, 5], version=1))
    buffer.append_environment([6, 7, 8])
    assert buffer.prefix() == [1, 2, 3, 4, 5, 6, 7, 8]
    buffer.append_policy(turn([9], version=2))
    buffer.check()
    assert buffer.completion_ids == [4, 5, 6, 7, 8, 9]
    assert buffer.loss_mask == [True, True, False, False, False, True]
    assert buffer.logprobs == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    assert buffer.versions == [1, 1, -1, -1, -1, 2]
    assert buffer.room == 11


def test_what_breaks_the_accounting_is_refused() -> None:
    buffer = TokenBuffer([1], 4)
    with pytest.raises(ValueError, match="follow a policy turn"):
        buffer.append_environment([2])
    with pytest.raises(ValueError, match="1 logprobs"):
        buffer.append_policy(GenOutput([2, 3], [0.0], [0, 0], "stop"))
    with pytest.raises(ValueError, match="leaves 3"):
        buffer.append_policy(turn([2, 3, 4, 5]))
    buffer.append_policy(turn([2]))
    with pytest.raises(ValueError, match="follows the prompt or an observation"):
        buffer.append_policy(turn([2]))
    buffer.append_environment([3])
    with pytest.raises(AssertionError, match="after the last policy turn"):
        buffer.check()
    with pytest.raises(ValueError, match="no tokens"):
        TokenBuffer([], 4)
