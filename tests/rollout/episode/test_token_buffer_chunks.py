"""A turn that the engine delivers in parts is one turn."""

import pytest

from realhf.api.env import StepResult
from realhf.api.model import GenOutput
from realhf.rollout.episode.rollout_state import Limits, RolloutRequest, RolloutState


class LetterChat:
    """Ids are code points; 0 ends a turn. Stands in for a tokenizer, which this behaviour does not need."""

    stop_ids = (0,)

    def first(self, task: str) -> list[int]:
        return [ord(c) for c in task]

    def following(self, observation: str, *, ended: bool) -> list[int]:
        return [*([] if ended else [0]), *(ord(c) for c in f"|{observation}|")]

    def decode(self, token_ids) -> str:
        return "".join(chr(i) for i in token_ids if i)


def part(text: str, reason: str) -> GenOutput:
    ids = [ord(c) for c in text] + ([0] if reason == "stop" else [])
    return GenOutput(ids, [-1.0] * len(ids), [0] * len(ids), reason)


@pytest.fixture
def state() -> RolloutState:
    rollout = RolloutState(RolloutRequest(0, {}, 0), LetterChat(), Limits(2, 200, 20, 80))
    rollout.start(StepResult({"task": {"description": "list", "task_id": 1, "difficulty": "warmup"}}, None, False))
    return rollout


def test_parts_join_to_one_turn(state: RolloutState) -> None:
    state.take_turn(part("aws s3", "interrupted"))
    assert state.command is None and not state.status and not state.turns
    assert state.request(3).sampled == 6
    assert state.request(3).token_ids[-6:] == [ord(c) for c in "aws s3"]
    state.take_turn(part(" ls", "stop"))
    assert state.command == "aws s3 ls"
    assert state.request(3).sampled == 0


def test_a_whole_turn_after_a_turn_is_refused(state: RolloutState) -> None:
    state.take_turn(part("aws s3 ls", "stop"))
    with pytest.raises(ValueError, match="follows the prompt or an observation"):
        state.take_turn(part("aws s3 ls", "stop"))
