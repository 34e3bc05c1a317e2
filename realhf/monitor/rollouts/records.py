"""Conversion of the selected samples' rollouts, both as played and as trained on, to records and
index lines.

The selection depends only on the sample's id. So all processes that see a sample make the same
decision without communication, and a group is recorded completely or not at all.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realhf.api.config import ALL_ROLLOUTS, MonitorConfig
from realhf.api.rollout import PlayedTurn, RolloutOutcome
from realhf.api.trace import PlayedSample, TrainedRows
from realhf.monitor.rollouts.format import (
    PlayLine,
    TrainLine,
    encode_record,
    repair_text,
    shorten_text,
)

_RANGE = float(1 << 64)


@dataclass(frozen=True)
class Selection:
    """Rule that selects the samples to record."""

    share: float = 1.0
    """Fraction of the samples, from 0 to 1."""
    token_share: float = 1.0
    """Fraction of the selected samples whose tokens are recorded as well."""

    def selects(self, key: str) -> bool:
        """Return whether the rollouts of the sample with this key are recorded."""
        return self.share >= 1 or (
            self.share > 0 and _hash_to_unit_interval("rollout", key) < self.share
        )

    def selects_tokens(self, key: str) -> bool:
        """Return whether the tokens of a selected sample are recorded."""
        return self.token_share >= 1 or (
            self.token_share > 0 and _hash_to_unit_interval("tokens", key) < self.token_share
        )


def build_selection(config: MonitorConfig, *, n_seqs: int, group_size: int) -> Selection:
    """Return the selection that ``monitor.rollouts`` and ``monitor.rollout_tokens`` specify.

    n_seqs: number of samples in a step, which have ``group_size`` rollouts each. If
    ``monitor.rollouts`` is a number, it is rounded up to whole groups.
    """
    if config.rollouts == ALL_ROLLOUTS:
        return Selection(1.0, config.rollout_tokens)
    groups = math.ceil(int(config.rollouts) / max(1, group_size))
    return Selection(min(1.0, groups / max(1, n_seqs)), config.rollout_tokens)


def _hash_to_unit_interval(purpose: str, key: str) -> float:
    """Hash two strings to a number in [0, 1)."""
    digest = hashlib.blake2b(
        f"{purpose}/{key}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") / _RANGE


MAX_TEXT_CHARACTERS = 2**20
"""Maximum number of characters in a message."""
INFO_BYTES = 16 * 1024
"""Maximum size in bytes of the ``info`` that an environment gives for one turn."""
_DIGITS = 5
"""Decimal places of recorded numbers."""
_MAX_INFO_VALUES = 32
"""Maximum number of values in an ``info`` for each value to be shortened separately."""
Texts = Callable[[Sequence[int]], list[str]]


def play_records(sample: PlayedSample, *, with_tokens: bool) -> Iterator[tuple[bytes, PlayLine]]:
    """Yield (record, index line) for each row of a sample. A rollout is followed by its
    branches."""
    row = 0
    for outcome in sample.rollouts:
        main = row
        for part in (outcome, *outcome.branches):
            line = _play_line(sample, part, row, None if part is outcome else main)
            line.has_tokens = with_tokens and bool(part.completion_ids)
            texts = sample.texts if line.has_tokens else None
            yield encode_record(_play_record(sample, part, line, texts)), line
            row += 1


def _play_line(
    sample: PlayedSample, outcome: RolloutOutcome, row: int, branch: int | None
) -> PlayLine:
    return PlayLine(
        id=f"{repair_text(sample.id)}/{row}",
        time=round(time.time(), 3),
        step=sample.step,
        version=min((version for version in set(outcome.versions) if version >= 0), default=None),
        task=shorten_text(outcome.task_id),
        template=shorten_text(outcome.template),
        group=shorten_text(outcome.group),
        env=shorten_text(sample.env),
        split=sample.split,
        reward=None if outcome.reward is None else float(outcome.reward),
        success=outcome.achieved and outcome.valid,
        length=sum(outcome.loss_mask),
        turns=len(outcome.turns),
        truncated=outcome.valid and outcome.truncated,
        failure=None if outcome.valid else outcome.status,
        attempt=sample.attempt,
        branch=branch,
        seconds=round(outcome.timings.get("wall_s", 0.0), 3),
    )


def _play_record(
    sample: PlayedSample, outcome: RolloutOutcome, line: PlayLine, texts: Texts | None
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": line.id,
        "task": outcome.task_id,
        "group": outcome.group,
        "seed": outcome.seed,
        "env": sample.env,
        "split": sample.split,
        "step": sample.step,
        "attempt": sample.attempt,
        "status": outcome.status,
        "message": _limit_text(outcome.message),
        "reward": outcome.reward,
        "rewards": dict(outcome.rewards),
        "metrics": dict(outcome.metrics),
        "success": line.success,
        "timings": outcome.timings,
        "sampling": dict(sample.sampling),
        "tools": limit_size(list(outcome.tools)),
        "info": _limit_info(outcome.info),
        "messages": list(_messages(outcome)),
        "turns": [_turn_record(outcome, number, turn) for number, turn in enumerate(outcome.turns)],
    }
    if outcome.steps:
        record["steps"] = [_step_record(turn) for turn in outcome.steps]
    if line.has_tokens:
        record["tokens"] = _token_record(outcome, texts)
    return record


def _messages(outcome: RolloutOutcome) -> Iterator[dict[str, Any]]:
    """Yield the messages of the conversation: the opening messages, then each turn followed by the
    environment's answer.

    A message of the policy contains the number of its turn as ``turn``.
    """
    for message in outcome.opening:
        yield _message(message)
    if not outcome.opening and outcome.task_text:
        yield {"role": "user", "content": _limit_text(outcome.task_text)}
    for number, turn in enumerate(outcome.turns):
        yield _policy_message(turn) | {"turn": number}
        if turn.messages:
            yield from (_message(message) for message in turn.messages)
        elif turn.output:
            yield {"role": "user", "content": _limit_text(turn.output)}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    known = {
        "role": str(message.get("role") or "user"),
        "content": _limit_text(content) if content else "",
    }
    return known | {name: value for name, value in message.items() if name not in known}


def _policy_message(turn: PlayedTurn) -> dict[str, Any]:
    """Return a policy turn as a message. If the turn's complete output differs from ``content``, it
    is included as ``text``."""
    policy_turn = turn.policy_turn
    if policy_turn is None:
        return {"role": "assistant", "content": _limit_text(turn.text)}
    message: dict[str, Any] = {"role": "assistant", "content": _limit_text(policy_turn.content)}
    if policy_turn.reasoning:
        message["reasoning"] = _limit_text(policy_turn.reasoning)
    if policy_turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": limit_size(call.arguments)}
            | ({"text": _limit_text(call.text), "problem": call.problem} if call.problem else {})
            for call in policy_turn.tool_calls
        ]
    if policy_turn.text and policy_turn.text != policy_turn.content:
        message["text"] = _limit_text(policy_turn.text)
    return message


def _turn_record(outcome: RolloutOutcome, number: int, turn: PlayedTurn) -> dict[str, Any]:
    """Return the record of a turn: its numbers, and ``version`` and ``n_tokens`` if the row
    contains the turn's tokens."""
    rewards = outcome.turn_rewards
    record: dict[str, Any] = {"reward": rewards[number] if number < len(rewards) else turn.reward}
    record |= _environment_fields(turn)
    place = number - outcome.first_turn
    if 0 <= place < len(outcome.turn_starts):
        start = outcome.turn_starts[place]
        end = (
            outcome.turn_starts[place + 1]
            if place + 1 < len(outcome.turn_starts)
            else len(outcome.completion_ids)
        )
        last = next(
            (version for version in reversed(outcome.versions[start:end]) if version >= 0), -1
        )
        record["version"] = [outcome.versions[start], last]
        record["n_tokens"] = sum(outcome.loss_mask[start:end])
    return record


def _step_record(turn: PlayedTurn) -> dict[str, Any]:
    messages = [_message(message) for message in turn.messages]
    return {
        "said": _limit_text(turn.text),
        "messages": messages,
        "reward": turn.reward,
        **_environment_fields(turn),
    }


def _environment_fields(turn: PlayedTurn) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if turn.rewards:
        fields["rewards"] = dict(turn.rewards)
    if turn.metrics:
        fields["metrics"] = dict(turn.metrics)
    if turn.info:
        fields["info"] = _limit_info(turn.info)
    return fields


def _limit_info(info: Mapping[str, Any]) -> Any:
    """Return an ``info`` whose size is limited to approximately ``INFO_BYTES``.

    If it is larger, its largest values are shortened to the space that the smaller ones leave. If
    it has more than ``_MAX_INFO_VALUES`` values, or very long names, the whole ``info`` is replaced
    by a shortened string.
    """
    as_text = limit_size(info)
    if as_text is info or len(info) > _MAX_INFO_VALUES:
        return as_text
    sizes = sorted((len(encode_record(value)), name) for name, value in info.items())
    limited = dict[str, Any]()
    left = INFO_BYTES
    for place, (size, name) in enumerate(sizes):
        share = left // (len(sizes) - place)
        limited[name] = limit_size(info[name], share)
        left -= min(size, share)
    return (
        {name: limited[name] for name in info}
        if len(encode_record(limited)) <= 2 * INFO_BYTES
        else as_text
    )


def _token_record(outcome: RolloutOutcome, texts: Texts | None) -> dict[str, Any]:
    """Return the token ids of prompt and completion, and the engine's data for each token of the
    completion."""
    record: dict[str, Any] = {
        "prompt_ids": outcome.prompt_ids,
        "ids": outcome.completion_ids,
        "logprobs": [round(value, _DIGITS) for value in outcome.logprobs],
        "mask": [int(value) for value in outcome.loss_mask],
        "versions": outcome.versions,
        "turn_starts": list(outcome.turn_starts),
    }
    if texts is not None:
        record["prompt_texts"] = texts(outcome.prompt_ids)
        record["texts"] = texts(outcome.completion_ids)
    return record


def _limit_text(text: Any) -> Any:
    """Limit the size of a message's content: omit the middle of a very long string, and limit other
    content (a list of parts) with ``limit_size``."""
    if not isinstance(text, str):
        return limit_size(text, MAX_TEXT_CHARACTERS)
    if len(text) <= MAX_TEXT_CHARACTERS:
        return text
    half = MAX_TEXT_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are not kept]\n{text[-half:]}"


def limit_size(value: Any, max_bytes: int = INFO_BYTES) -> Any:
    """Return a value unchanged if its JSON has at most ``max_bytes`` bytes; otherwise a string with
    the beginning of its JSON and a note."""
    if not value:
        return value
    encoded = encode_record(value)
    if len(encoded) <= max_bytes:
        return value
    return f"{encoded[:max_bytes].decode('utf-8', 'replace')} [{len(encoded) - max_bytes} bytes are not kept]"


Array = np.ndarray[Any, Any]


def train_records(
    rows: TrainedRows, selection: Selection
) -> Iterator[tuple[bytes | None, TrainLine]]:
    """Yield (record, index line) for each row of the selected samples. The record is None if tokens
    are not recorded."""
    ends = np.cumsum(np.asarray(rows.lengths, dtype=np.int64))
    number = 0
    now = round(time.time(), 3)
    for sample, count in zip(rows.ids, rows.rows, strict=True):
        chosen = selection.selects(sample)
        with_tokens = chosen and selection.selects_tokens(sample)
        for row in range(int(count)):
            if chosen:
                part = slice(int(ends[number] - rows.lengths[number]), int(ends[number]))
                line = _train_line(rows, part, f"{repair_text(sample)}/{row}", now)
                line.has_tokens = with_tokens and line.n_tokens > 0
                yield (
                    encode_record(_train_record(rows, part, line)) if line.has_tokens else None,
                    line,
                )
            number += 1


def _train_line(rows: TrainedRows, part: slice, name: str, now: float) -> TrainLine:
    mask = rows.mask[part]
    line = TrainLine(
        id=name, time=now, step=rows.step + 1, version=rows.step, n_tokens=int(mask.sum())
    )
    if not line.n_tokens:
        return line
    line.advantage = _number(rows.advantages[part][mask].mean())
    current = rows.current[part][mask]
    before = rows.before[part][mask]
    if not np.isnan(current).all():
        line.ratio_max = _number(rows.ratio[part][mask].max())
        line.clip_fraction = _number(rows.clipped[part][mask].mean())
    if not np.isnan(before).all():
        line.mismatch = _number(np.abs(before - rows.behaviour[part][mask]).mean())
    if rows.versions is not None:
        known = rows.versions[part][mask]
        known = known[known >= 0]
        line.staleness = int(rows.step - known.min()) if len(known) else None
    return line


def _train_record(rows: TrainedRows, part: slice, line: TrainLine) -> dict[str, Any]:
    """Return the columns of a row from its first trained token on.

    Entry k belongs to the token ``first_token + k`` of the row, counted from the first token of the
    prompt.
    """
    first = int(np.flatnonzero(rows.mask[part])[0])
    inner = slice(part.start + first, part.stop)
    return {
        "id": line.id,
        "step": line.step,
        "version": line.version,
        "first_token": first + 1,
        "mask": rows.mask[inner].astype(np.int8).tolist(),
        "old": _column(rows.behaviour[inner], rows.mask[inner]),
        "before": _column(rows.before[inner], rows.mask[inner]),
        "new": _column(rows.current[inner], rows.mask[inner]),
        "ratio": _column(rows.ratio[inner], rows.mask[inner]),
        "advantage": _column(rows.advantages[inner], rows.mask[inner]),
        "clipped": rows.clipped[inner].astype(np.int8).tolist(),
    }


def _column(values: Array, mask: Array) -> list[float | None] | None:
    """Return a column as rounded numbers, with 0 for untrained tokens; None if no value is
    known."""
    if np.isnan(values[mask]).all():
        return None
    return np.where(mask, values, 0.0).astype(np.float64).round(_DIGITS).tolist()


def _number(value: Any) -> float | None:
    number = float(value)
    return round(number, 6) if np.isfinite(number) else None
