"""Runs a rollout worker: takes a sample, plays it, encodes it and streams it, again (docs/reference/dataflow.md 9)."""

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
from realhf.rollout.group_player import GroupFailed, GroupPlayer, PlayedGroup, within
from realhf.rollout.rollout_sample import outcomes_to_sample, transcript
from realhf.transport.codec import encode_sample
from realhf.transport.errors import ProtocolError
from realhf.transport.service import ServiceClient


class SampleEncoder:
    """Encodes played groups. ``calls`` are run on every sample, in order: inferences that need no weights, such as the
    reward.

    ``turns``: with the keys ``TURN_KEYS``. ``feedback``: with ``feedback_prompt_ids``, as it tells rollouts.
    ``transcripts``: of every ``batch_size`` samples this many carry the text of their first rollout.
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
    ) -> None:
        self._feedback = feedback
        self._calls = [(call, interfaces.get(call.interface)(**call.interface_args)) for call in calls]
        self._context = context
        self._min_group_size, self._turns = min_group_size, turns
        self._transcripts, self._batch_size = transcripts, batch_size

    def __call__(self, lease: RolloutLease, played: PlayedGroup) -> list[Any]:
        """Return the frames of the sample; metadata ``rollout`` is JSON of ``PlayedGroup.statistics``."""
        told = self._feedback
        sample = outcomes_to_sample(
            [lease.id],
            [played.outcomes if told is None else told(played.outcomes)],
            min_group_size=self._min_group_size,
            turns=self._turns,
            feedback=told is not None,
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


_log = logging.getLogger(__name__)
HOLD_S = 30.0
"""Seconds that the master may hold a request for samples before it has to answer that there are none yet."""
Encode = Callable[[RolloutLease, PlayedGroup], Sequence[Any]]
"""Encodes a finished sample as the frames that are streamed."""


class Stream(Protocol):
    """Takes finished samples; ``StreamProducer`` is one."""

    async def push(self, id: str, attempt: int, frames: Sequence[Any], *, timeout_s: float) -> None:
        """Wait for a credit and send one attempt at a sample. The buffers must not change until it is acknowledged.
        Raises TimeoutError without a credit within ``timeout_s``, ProtocolError when the frames exceed the limits of
        the wire."""
        ...


class RolloutLoop:
    """Runs one sample on each player at a time. When an episode fails, a player breaks or a sample cannot be encoded,
    this attempt ends and is reported to the master; the loop goes on."""

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
        self._control, self._stream, self._encode = control, stream, encode
        self._idle = list(players)
        self._players = {id(player): (player, f"player {number}") for number, player in enumerate(players)}
        self._tracer, self._timeout_s = tracer, timeout_s
        self._playing: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self.played = 0

    async def run(self) -> None:
        """Work until the master gives no more samples; then what is in play is finished. Raises TransportError when
        master or stream are lost."""
        try:
            while await self._take():
                pass
            while self._playing:
                await asyncio.wait(self._playing, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failures()
        finally:
            for task in self._playing:
                task.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)
            await asyncio.gather(*(player.close() for player, _ in self._players.values()), return_exceptions=True)

    async def _take(self) -> bool:
        """Ask for as many samples as there are idle players; returns False when there are no more."""
        while not self._idle:
            self._freed.clear()
            await self._freed.wait()
        self._raise_failures()
        request = AllocateRequest(len(self._idle), HOLD_S)
        answer = await self._control.ask(ALLOCATE, request, timeout_s=HOLD_S + self._timeout_s)
        for lease in answer.leases or ():
            self._playing.add(asyncio.create_task(self._one(self._idle.pop(), lease)))
        for part in answer.evaluation:
            self._playing.add(asyncio.create_task(self._share(self._idle.pop(), part)))
        return answer.leases is None or bool(answer.leases)

    def _raise_failures(self) -> None:
        for task in [task for task in self._playing if task.done()]:
            self._playing.discard(task)
            task.result()

    async def _one(self, player: GroupPlayer, lease: RolloutLease) -> None:
        began = time.time_ns()
        try:
            frames = await self._finished(player, lease)
            if frames is not None:
                await self._push(lease, frames)
        finally:
            self._tracer.record(
                "sample", began, time.time_ns(), line=self._players[id(player)][1], id=lease.id, attempt=lease.attempt
            )
            self._idle.append(player)
            self._freed.set()

    async def _share(self, player: GroupPlayer, part: EvaluationPart) -> None:
        """Play a share of an evaluation and tell the master."""
        began, results, error = time.time_ns(), list[EpisodeResult](), ""
        try:
            async with asyncio.timeout(part.deadline_s):
                results = await player.evaluate(part)
        except TimeoutError:
            error = f"not over after {part.deadline_s:g} s"
        except Exception as failure:
            _log.warning("a share of an evaluation failed: %s", failure, exc_info=not isinstance(failure, GroupFailed))
            error = f"{type(failure).__name__}: {failure}"
        request = EvaluatedRequest(part.evaluation, part.part, part.greedy, results, error)
        try:
            await self._control.ask(EVALUATED, request, timeout_s=self._timeout_s)
        finally:
            line = self._players[id(player)][1]
            self._tracer.record("evaluation", began, time.time_ns(), line=line, part=part.part, version=part.version)
            self._idle.append(player)
            self._freed.set()

    async def _finished(self, player: GroupPlayer, lease: RolloutLease) -> Sequence[Any] | None:
        """Return the frames of the sample; None when the attempt failed and the master knows."""
        try:
            return self._encode(lease, await within(player, lease))
        except GroupFailed as error:
            await self._tell(lease, error.outcome, str(error))
        except Exception as error:
            _log.exception("sample %s failed", lease.id)
            await self._tell(lease, "rejected", f"{type(error).__name__}: {error}")
        return None

    async def _push(self, lease: RolloutLease, frames: Sequence[Any]) -> None:
        try:
            await self._stream.push(lease.id, lease.attempt, frames, timeout_s=self._timeout_s)
        except (ProtocolError, TimeoutError) as error:  # too large for the wire, or the trainer takes nothing
            _log.error("sample %s was not sent: %s", lease.id, error)
            await self._tell(lease, "rejected", f"{type(error).__name__}: {error}")
        else:
            self.played += 1

    async def _tell(self, lease: RolloutLease, outcome: str, message: str) -> None:
        request = RejectedRequest(lease.id, lease.attempt, outcome, message)
        await self._control.ask(REJECTED, request, timeout_s=self._timeout_s)
