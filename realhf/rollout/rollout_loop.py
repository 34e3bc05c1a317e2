"""Loop of a rollout worker: lease a sample, play it, encode it and stream it
(docs/reference/dataflow.md 9).

``RolloutLoop.run``
  produces: streamed samples, and results of evaluation shares;
  waits for: leases from the master while a player is idle, otherwise for the samples being played;
  unblocked by: a lease or, every ``HOLD_S`` seconds, an empty answer; the samples' deadlines;
      credits of the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from realhf.api.calls import (
    ALLOCATE,
    EVALUATED,
    REJECTED,
    SAMPLE_REJECTED,
    AllocateRequest,
    EvaluatedRequest,
    EvaluationPart,
    RejectedRequest,
    RolloutLease,
)
from realhf.api.evaluation import EpisodeResult
from realhf.api.experiment import MFCDef
from realhf.api.model import CallContext
from realhf.api.trace import Tracer
from realhf.registry import interfaces
from realhf.rollout.feedback import Feedback
from realhf.rollout.group_player import GroupFailed, GroupPlayer, PlayedGroup, play_within_deadline
from realhf.rollout.rollout_sample import outcomes_to_sample, transcript
from realhf.transport.codec import encode_sample
from realhf.transport.errors import ProtocolError
from realhf.transport.service import ServiceClient


class SampleEncoder:
    """Encoder of played groups as frames for the stream.

    Args:
        calls: Inference calls that need no weights, such as the reward; each is run on every
            sample, in order.
        turns: Whether to add the keys about turns.
        unmasked: Whether to add the key ``unmasked_logprobs``.
        feedback: Builder of the key ``feedback_prompt_ids``; None to leave it out.
        batch_size: Number of samples in a batch.
        transcripts: Number of samples per batch that carry the text of their first rollout.
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
        feedback: Feedback | None = None,
        unmasked: bool = False,
    ) -> None:
        self._feedback = feedback
        self._calls = [
            (call, interfaces.get(call.interface)(**call.interface_args)) for call in calls
        ]
        self._context = context
        self._min_group_size = min_group_size
        self._turns = turns
        self._unmasked = unmasked
        self._transcripts = transcripts
        self._batch_size = batch_size

    def __call__(self, lease: RolloutLease, played: PlayedGroup) -> list[Any]:
        """Return the frames of the sample. Its metadata ``rollout`` is the JSON of
        ``PlayedGroup.statistics``."""
        outcomes = played.outcomes if self._feedback is None else self._feedback(played.outcomes)
        sample = outcomes_to_sample(
            [lease.id],
            [outcomes],
            min_group_size=self._min_group_size,
            turns=self._turns,
            feedback=self._feedback is not None,
            unmasked=self._unmasked,
        )
        for call, interface in self._calls:
            outputs, _ = interface.inference(None, sample.select(call.input_keys), self._context)
            sample = sample.update(outputs)
        has_transcript = lease.order % self._batch_size < self._transcripts
        metadata = {
            "rollout": [json.dumps(played.statistics(), separators=(",", ":"))],
            "episode": [
                transcript(played.outcomes[0], header=f"sample {lease.id}")
                if has_transcript
                else ""
            ],
        }
        return encode_sample(sample.annotated(metadata))


_log = logging.getLogger(__name__)
HOLD_S = 30.0
"""Seconds for which the master may hold a request for samples before it must answer that none is
available yet."""
Encode = Callable[[RolloutLease, PlayedGroup], Sequence[Any]]
"""Function that encodes a finished sample as frames for the stream."""


class Stream(Protocol):
    """Interface for sending finished samples, such as ``StreamProducer``."""

    async def push(self, id: str, attempt: int, frames: Sequence[Any], *, timeout_s: float) -> None:
        """Wait for a credit, then send one attempt at a sample. The buffers must not change until
        the sample is acknowledged.

        Raises TimeoutError if no credit arrives within ``timeout_s`` seconds, and ProtocolError if
        the frames exceed the limits of the wire format.
        """
        ...


class RolloutLoop:
    """Loop that plays one sample at a time on each player.

    If a group or a player fails, or a sample cannot be encoded, the attempt is reported to the
    master as failed and the loop continues.
    """

    def __init__(
        self,
        control: ServiceClient,
        stream: Stream,
        players: Sequence[GroupPlayer],
        encode: Encode,
        *,
        tracer: Tracer,
        timeout_s: float,
    ) -> None:
        self._control = control
        self._stream = stream
        self._encode = encode
        self._idle = list(players)
        self._players = {
            id(player): (player, f"player {number}") for number, player in enumerate(players)
        }
        """Each player, keyed by its ``id()``, with its name in traces."""
        self._tracer = tracer
        self._timeout_s = timeout_s
        self._playing: set[asyncio.Task[None]] = set()
        self._player_idle = asyncio.Event()
        self.played = 0
        """Number of samples that have been streamed."""

    async def run(self) -> None:
        """Play until the master has no more samples, then finish the samples being played.

        Raises TransportError when the connection to the master or the stream is lost.
        """
        try:
            while await self._take_leases():
                pass
            while self._playing:
                await asyncio.wait(self._playing, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failures()
        finally:
            for task in self._playing:
                task.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)
            await asyncio.gather(
                *(player.close() for player, _ in self._players.values()), return_exceptions=True
            )

    async def _take_leases(self) -> bool:
        """Request a sample for each idle player and start playing it; return False when there are
        no more samples."""
        while not self._idle:
            self._player_idle.clear()
            await self._player_idle.wait()
        self._raise_failures()
        request = AllocateRequest(len(self._idle), HOLD_S)
        answer = await self._control.ask(ALLOCATE, request, timeout_s=HOLD_S + self._timeout_s)
        for lease in answer.leases or ():
            self._playing.add(asyncio.create_task(self._play_sample(self._idle.pop(), lease)))
        for part in answer.evaluation:
            self._playing.add(asyncio.create_task(self._play_share(self._idle.pop(), part)))
        return answer.leases is None or bool(answer.leases)

    def _raise_failures(self) -> None:
        for task in [task for task in self._playing if task.done()]:
            self._playing.discard(task)
            task.result()

    async def _play_sample(self, player: GroupPlayer, lease: RolloutLease) -> None:
        started_ns = time.time_ns()
        try:
            frames = await self._play_and_encode(player, lease)
            if frames is not None:
                await self._push(lease, frames)
        finally:
            line = self._players[id(player)][1]
            self._tracer.record(
                "sample", started_ns, time.time_ns(), line=line, id=lease.id, attempt=lease.attempt
            )
            self._idle.append(player)
            self._player_idle.set()

    async def _play_share(self, player: GroupPlayer, part: EvaluationPart) -> None:
        """Play a share of an evaluation and report its results to the master."""
        started_ns = time.time_ns()
        results: list[EpisodeResult] = []
        error = ""
        try:
            async with asyncio.timeout(part.deadline_s):
                results = await player.evaluate(part)
        except TimeoutError:
            error = f"not over after {part.deadline_s:g} s"
        except Exception as failure:
            _log.warning(
                "a share of an evaluation failed: %s",
                failure,
                exc_info=not isinstance(failure, GroupFailed),
            )
            error = f"{type(failure).__name__}: {failure}"
        request = EvaluatedRequest(part.evaluation, part.part, part.greedy, results, error)
        try:
            await self._control.ask(EVALUATED, request, timeout_s=self._timeout_s)
        finally:
            line = self._players[id(player)][1]
            self._tracer.record(
                "evaluation",
                started_ns,
                time.time_ns(),
                line=line,
                part=part.part,
                version=part.version,
            )
            self._idle.append(player)
            self._player_idle.set()

    async def _play_and_encode(
        self, player: GroupPlayer, lease: RolloutLease
    ) -> Sequence[Any] | None:
        """Play a sample and return its frames; None after a failure, which is reported to the
        master."""
        try:
            return self._encode(lease, await play_within_deadline(player, lease))
        except GroupFailed as error:
            await self._report_failure(lease, error.outcome, str(error))
        except Exception as error:
            _log.exception("sample %s failed", lease.id)
            await self._report_failure(lease, SAMPLE_REJECTED, f"{type(error).__name__}: {error}")
        return None

    async def _push(self, lease: RolloutLease, frames: Sequence[Any]) -> None:
        try:
            await self._stream.push(lease.id, lease.attempt, frames, timeout_s=self._timeout_s)
        except (
            ProtocolError,
            TimeoutError,
        ) as error:  # too large for the wire format, or the trainer accepts no samples
            _log.error("sample %s was not sent: %s", lease.id, error)
            await self._report_failure(lease, SAMPLE_REJECTED, f"{type(error).__name__}: {error}")
        else:
            self.played += 1

    async def _report_failure(self, lease: RolloutLease, outcome: str, message: str) -> None:
        request = RejectedRequest(lease.id, lease.attempt, outcome, message)
        await self._control.ask(REJECTED, request, timeout_s=self._timeout_s)
