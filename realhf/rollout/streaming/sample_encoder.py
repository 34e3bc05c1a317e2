"""Encodes a played group as the frames that are streamed: its tokens, what the calls that left the graph make of them,
and how it went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from realhf.api.mfc import MFCDef
from realhf.api.model import CallContext
from realhf.api.streaming import RolloutLease
from realhf.builtins import interfaces
from realhf.rollout.episode.rollout_sample import outcomes_to_sample
from realhf.rollout.episode.transcript import transcript
from realhf.rollout.players.group_player import PlayedGroup
from realhf.transport.codec import encode_sample


class SampleEncoder:
    """Encodes played groups. ``calls`` are run on every sample, in order: inferences that need no weights, such as the
    reward.

    ``turns``: with the keys ``TURN_KEYS``. ``transcripts``: of every ``batch_size`` samples this many carry the
    text of their first rollout.
    """

    def __init__(
        self,
        calls: Sequence[MFCDef],
        context: CallContext,
        *,
        min_group_size: int,
        transcripts: int,
        batch_size: int,
        turns: bool = False,
    ) -> None:
        self._calls = [(call, interfaces.get(call.interface)(**call.interface_args)) for call in calls]
        self._context = context
        self._min_group_size, self._turns = min_group_size, turns
        self._transcripts, self._batch_size = transcripts, batch_size

    def __call__(self, lease: RolloutLease, played: PlayedGroup) -> list[Any]:
        """Return the frames of the sample; metadata ``rollout`` is JSON of ``PlayedGroup.statistics``."""
        sample = outcomes_to_sample(
            [lease.id], [played.outcomes], min_group_size=self._min_group_size, turns=self._turns
        )
        for call, interface in self._calls:
            outputs, _ = interface.inference(None, sample.select(call.input_keys), self._context)
            sample = sample.update(outputs)
        shown = lease.order % self._batch_size < self._transcripts
        notes = {
            "rollout": [json.dumps(played.statistics(), separators=(",", ":"))],
            "episode": [transcript(played.outcomes[0], header=f"sample {lease.id}") if shown else ""],
        }
        return encode_sample(sample.annotated(notes))
