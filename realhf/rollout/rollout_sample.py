"""Conversion of rollout outcomes into a ``SequenceSample`` (docs/reference/dataflow.md 2) and into
text."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from realhf.api.keys import FEEDBACK_PROMPT, ROLLOUT_KEY, UNMASKED_LOGPROBS
from realhf.api.rollout import RolloutOutcome
from realhf.api.sample import Lengths, SequenceSample

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that are escaped: control characters except line ends and tabs, direction marks,
zero-width characters and lone surrogates. Terminals execute or hide some of them, and surrogates
cannot be encoded."""


def transcript(outcome: RolloutOutcome, *, header: str = "") -> str:
    """Return the turns of an episode as text, with its outcome in the first line.

    The text is safe to print and to write: invisible characters are escaped, as in ``\\x1b``.
    """
    reward = "no reward" if outcome.reward is None else f"reward {outcome.reward:.2f}"
    lines = [
        f"=== {header}: {outcome.group} task {outcome.task_id} (seed {outcome.seed}), "
        f"{outcome.status}, {reward}"
    ]
    if outcome.task_text:
        lines.append(f"task: {outcome.task_text}")
    for turn in outcome.turns:
        lines.append(f"  $ {turn.text.strip()}")
        if turn.output:
            lines.append(f"    {turn.output.strip()}")
    if outcome.message:
        lines.append(f"  {outcome.message}")
    return _UNSEEN.sub(_escape, "\n".join(lines).replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


OUTCOME_CODES = {
    "internal": 3,
    "unavailable": 3,
    "lost": 3,
    "capacity": 3,
    "policy": 5,
    "timeout": 6,
    "agent": 7,
}
"""Codes of failed episodes in the key ``outcome``; 0 marks a valid episode (achieved or
truncated)."""
FILTERED = 2
"""Code of a valid episode in a group with too few valid ones."""
Array = np.ndarray[Any, Any]
_KEYS = {
    "packed_input_ids": ("i64", "L"),
    "prompt_mask": ("bool", "L"),
    "loss_mask": ("bool", "L"),
    "packed_logprobs": ("f32", "L-1"),
    "packed_versions": ("i32", "L-1"),
    "env_rewards": ("f32", "1"),
    "seq_no_eos_mask": ("bool", "1"),
    "outcome": ("u8", "1"),
    "rollout_index": ("i32", "1"),
}
"""Dtype and length rule of each key."""
_TURN_KEYS = {
    "turn_ids": ("i32", "L"),
    "turn_rewards": ("f32", "turns"),
    "turn_states": ("i64", "turns"),
}
"""Dtype and length rule of each optional key about turns."""
_NO_LOGPROB = array("f", [0.0])
_NO_VERSION = array("i", [-1])


def outcomes_to_sample(
    ids: Sequence[str],
    groups: Sequence[Sequence[RolloutOutcome]],
    *,
    min_group_size: int = 1,
    turns: bool = False,
    feedback: bool = False,
    unmasked: bool = False,
) -> SequenceSample:
    """Return one sample for each group of rollouts.

    A group with fewer than ``min_group_size`` valid rollouts has an empty loss mask, as has every
    failed rollout; both keep their tokens. A sample has one inner sequence of L tokens for each
    rollout, followed by one for each of its branches. Keys:

    - ``packed_input_ids`` i64 [L]; ``prompt_mask``, ``loss_mask`` bool [L];
    - ``packed_logprobs`` f32 [L-1]; ``packed_versions`` i32 [L-1];
    - ``env_rewards`` f32 [1]; ``outcome`` u8 [1];
    - ``seq_no_eos_mask`` bool [1]: ended by a limit of tokens, not of turns;
    - ``rollout_index`` i32 [1]: number of the rollout in the group, the same for its branches;
    - with ``turns``: ``turn_ids`` i32 [L], the turn of each sampled token and -1 elsewhere;
      ``turn_rewards`` f32 and ``turn_states`` i64 [turns of the episode, at least one];
    - with ``unmasked``: ``unmasked_logprobs`` f32 [L-1], the log-probabilities without token masks;
    - with ``feedback``: ``feedback_prompt_ids`` i64, the prompt of the row with feedback in it, or
      a single -1.

    The metadata ``rewards`` and ``achieved`` are JSON lists with an entry for each rollout, null
    for a failed one; ``branch_rewards`` is a JSON list of the rewards of all valid branches.
    """
    import torch

    packed = _PackedColumns()
    coded_groups = [_code_rows(group, min_group_size) for group in groups]
    for rows in coded_groups:
        for outcome, code in rows:
            packed.add(outcome, code)
    rollouts = [outcome for rows in coded_groups for outcome, _ in rows]
    truncated = [outcome.truncated for outcome in rollouts]
    arrays: dict[str, Array] = {
        "packed_input_ids": np.asarray(packed.ids),
        "prompt_mask": np.frombuffer(packed.prompt_mask, dtype=np.bool_),
        "loss_mask": np.frombuffer(packed.loss_mask, dtype=np.bool_),
        "packed_logprobs": np.asarray(packed.logprobs),
        "packed_versions": np.asarray(packed.versions),
        "env_rewards": np.array([outcome.reward or 0.0 for outcome in rollouts], dtype=np.float32),
        "seq_no_eos_mask": np.array(truncated, dtype=np.bool_),
        "outcome": np.array(packed.codes, dtype=np.uint8),
        ROLLOUT_KEY: np.array(
            [
                number
                for group in groups
                for number, one in enumerate(group)
                for _ in (one, *one.branches)
            ],
            dtype=np.int32,
        ),
    }
    offsets = np.cumsum([0, *(len(rows) for rows in coded_groups)], dtype=np.int64)
    values = np.array(packed.lengths, dtype=np.int64)
    by_rule = {
        "L": Lengths(values, offsets),
        "L-1": Lengths(values - 1, offsets),
        "1": Lengths(np.ones_like(values), offsets),
    }
    keys = _KEYS
    if turns:
        keys = _KEYS | _TURN_KEYS
        turn_arrays, counts = _pack_turns([row for rows in coded_groups for row in rows], packed)
        arrays |= turn_arrays
        by_rule["turns"] = Lengths(counts, offsets)
    if unmasked:
        keys = keys | {UNMASKED_LOGPROBS: ("f32", "L-1")}
        arrays[UNMASKED_LOGPROBS] = np.asarray(packed.unmasked_logprobs)
    if feedback:
        keys = keys | {FEEDBACK_PROMPT: ("i64", "feedback")}
        prompts = [
            list(row.feedback_prompt) if code == 0 and row.feedback_prompt else [-1]
            for rows in coded_groups
            for row, code in rows
        ]
        arrays[FEEDBACK_PROMPT] = np.array(
            [token for prompt in prompts for token in prompt], dtype=np.int64
        )
        by_rule["feedback"] = Lengths(
            np.array([len(prompt) for prompt in prompts], dtype=np.int64), offsets
        )
    metadata = {
        "rewards": [json.dumps([outcome.reward for outcome in group]) for group in groups],
        "achieved": [
            json.dumps([outcome.achieved if outcome.valid else None for outcome in group])
            for group in groups
        ],
        "branch_rewards": [
            json.dumps([row.reward for outcome in group for row in outcome.branches if row.valid])
            for group in groups
        ],
    }
    return SequenceSample.from_lengths(
        tuple(ids),
        {key: by_rule[rule] for key, (_, rule) in keys.items()},
        {key: dtype for key, (dtype, _) in keys.items()},
        dict.fromkeys(keys, ()),
        {key: torch.from_numpy(array) for key, array in arrays.items()},
        metadata,
    )


class _PackedColumns:
    """Columns of all tokens, concatenated over the rollouts."""

    def __init__(self) -> None:
        self.ids = array("q")
        self.prompt_mask = bytearray()
        self.loss_mask = bytearray()
        self.logprobs = array("f")
        self.unmasked_logprobs = array("f")
        self.versions = array("i")
        self.codes: list[int] = []
        self.lengths: list[int] = []

    def add(self, outcome: RolloutOutcome, code: int) -> None:
        """Append a rollout. It has a loss mask only if ``code`` is 0.

        A rollout that failed before its first prompt gets one token, so that it is not empty.
        Position t of the shifted columns belongs to the prediction of token t+1.
        """
        n_prompt = len(outcome.prompt_ids)
        n_completion = len(outcome.completion_ids)
        length = n_prompt + n_completion or 1
        self.ids += array("q", outcome.prompt_ids)
        self.ids += array("q", outcome.completion_ids)
        if not n_prompt + n_completion:
            self.ids.append(0)
        self.prompt_mask += b"\1" * n_prompt + bytes(length - n_prompt)
        is_trained = code == 0
        n_before = length - n_completion if is_trained else length
        self.loss_mask += bytes(n_before)
        self.logprobs += _NO_LOGPROB * (n_before - 1)
        self.unmasked_logprobs += _NO_LOGPROB * (n_before - 1)
        self.versions += _NO_VERSION * (n_before - 1)
        if is_trained:
            first = 0 if n_before else 1  # without a prompt the first token has no prediction
            self.loss_mask += bytes(outcome.loss_mask)
            unmasked = outcome.unmasked_logprobs or outcome.logprobs
            self.logprobs += array("f", outcome.logprobs[first:])
            self.unmasked_logprobs += array("f", unmasked[first:])
            self.versions += array("i", outcome.versions[first:])
        self.codes.append(code)
        self.lengths.append(length)


def _pack_turns(
    rows: Sequence[tuple[RolloutOutcome, int]], packed: _PackedColumns
) -> tuple[dict[str, Array], Array]:
    """Return ``turn_ids``, ``turn_rewards`` and ``turn_states`` of all rows, and the number of
    rewards of each row.

    A row that is not trained on has no turns and one reward of 0, so that no row is empty.
    """
    ids = np.full(len(packed.ids), -1, dtype=np.int32)
    rewards = array("f")
    states = array("q")
    counts = []
    end = 0
    for (outcome, code), length in zip(rows, packed.lengths, strict=True):
        end += length
        turn_rewards = list(outcome.turn_rewards) if code == 0 else []
        if turn_rewards:
            # Number of turns that begin at each position; their running sum numbers the turn of
            # each token.
            begins = np.zeros(len(outcome.completion_ids) + 1, dtype=np.int32)
            np.add.at(begins, np.asarray(outcome.turn_starts, dtype=np.int64), 1)
            turn = begins[:-1].cumsum() - 1 + outcome.first_turn
            ids[end - len(turn) : end] = np.where(
                np.asarray(outcome.loss_mask, dtype=np.bool_), turn, -1
            )
        rewards += array("f", turn_rewards or [0.0])
        states += array("q", outcome.turn_states if turn_rewards else [0])
        counts.append(len(turn_rewards) or 1)
    arrays = {
        "turn_ids": ids,
        "turn_rewards": np.asarray(rewards),
        "turn_states": np.asarray(states),
    }
    return arrays, np.array(counts, dtype=np.int64)


def _code_rows(
    group: Sequence[RolloutOutcome], min_group_size: int
) -> list[tuple[RolloutOutcome, int]]:
    """Return the trajectories of a group with their outcome codes: each rollout, followed by its
    branches."""
    is_large_enough = sum(outcome.valid for outcome in group) >= min_group_size
    valid_code = 0 if is_large_enough else FILTERED
    rows = [row for outcome in group for row in (outcome, *outcome.branches)]
    return [(row, valid_code if row.valid else OUTCOME_CODES[row.status]) for row in rows]
