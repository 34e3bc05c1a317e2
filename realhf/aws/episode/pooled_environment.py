"""Brings AWS behind the contract without a server: episodes are played in this process, on slots of a MiniStackPool.

What a policy reads is what it reads of the environment on a server (``realhf.aws.messages``). Scripted agents and
evaluations read more: ``info`` of an opening and of the answer to a command holds the whole ``observation``, that of an
opening also ``setup_answers``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from realhf.api.environment import AssistantMessage, EnvironmentFailure, EnvironmentSpec, Opening, Turn
from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.environment import SYSTEM_PROMPT, AwsOptions, AwsTaskSet
from realhf.aws.episode.episode import DEFAULT_MAX_STEPS, Episode, EpisodeError, StepData
from realhf.aws.messages import (
    NO_COMMAND,
    OBSERVATION_CHARS,
    command_of,
    command_turn,
    replay_of,
    task_opening,
    told,
    told_people,
)
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.task import Task, TaskError
from realhf.env.loader.threads import Threads

T = TypeVar("T")
MESSAGE_TIMEOUT_S = 120.0
"""A reset or a command takes at most this long: more than the deadlines of the simulator and of the CLI worker."""
_RETURN_S = 60.0
"""A slot is waited for this long after its episode."""
_LOG = logging.getLogger(__name__)


class _Leases:
    """Counts the slots that episodes hold."""

    def __init__(self, pool: MiniStackPool) -> None:
        self._pool = pool
        self._held = 0
        self._changed = threading.Condition()

    def take(self) -> Slot:
        """Lease a slot. Raises EnvironmentFailure."""
        try:
            slot = self._pool.acquire()
        except SimulatorLost as error:
            raise EnvironmentFailure("lost", str(error)) from error
        except RuntimeError as error:
            raise EnvironmentFailure("capacity", str(error)) from error
        with self._changed:
            self._held += 1
        return slot

    def give_back(self, slot: Slot) -> None:
        """Scrub a slot and give it back."""
        try:
            self._pool.release(slot)
        finally:
            with self._changed:
                self._held -= 1
                self._changed.notify_all()

    def wait_for_all(self, timeout_s: float) -> bool:
        """Return whether all slots were given back in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held == 0, timeout_s)


class _Seat:
    """Holds a slot and the episode in it, from the first reset on. Its methods block; use one thread at a time."""

    def __init__(self, leases: _Leases, max_steps: int) -> None:
        self._leases, self._max_steps = leases, max_steps
        self._slot: Slot | None = None
        self._episode: Episode | None = None

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[StepData, list[Mapping[str, Any]]]:
        """Begin an episode; returns its first observation and what the calls of the set-up answered."""
        if self._episode is None:
            self._slot = self._leases.take()
            self._episode = Episode(self._slot, self._max_steps)
        found = self._episode.reset(Task.from_json(task["task"]), seed, chaos=task.get("chaos"))
        return found, [*self._episode.setup_answers]

    def step(self, command: str) -> StepData:
        """Run a command."""
        if self._episode is None:
            raise EpisodeError("no episode is running; call reset first")
        return self._episode.step(command)

    def release(self) -> None:
        """Give the slot back; harmless when repeated."""
        slot, self._slot, self._episode = self._slot, None, None
        if slot is not None:
            self._leases.give_back(slot)


class PooledEnvironment:
    """Plays episodes on a slot that is leased at the first reset, in ``threads``: commands block. After a failure
    ``close`` gives the slot back; where a command is given up, its thread does, once it is over."""

    def __init__(
        self, leases: _Leases, threads: Threads, max_steps: int, observation_chars: int, desired_state: bool
    ) -> None:
        self._leases, self._threads, self._max_steps = leases, threads, max_steps
        self._chars, self._desired_state = observation_chars, desired_state
        self._seat: _Seat | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode of the whole ``task`` (``Task.to_json``), perturbed where ``chaos`` says so."""
        seat = self._seat = self._seat or _Seat(self._leases, self._max_steps)
        found, answers = await self._run(seat, lambda: seat.reset(task, seed))
        info = {"observation": found.observation, "setup_answers": answers, **replay_of(task)}
        return task_opening(found.observation, desired_state=self._desired_state, info=info)

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the command of the turn; without one, nothing is run."""
        command = command_of(message)
        if command is None:
            return told(NO_COMMAND)
        seat = self._seat
        if seat is None:
            raise EnvironmentFailure("lost", "no episode is running")
        found = await self._run(seat, lambda: seat.step(command))
        return command_turn(
            found.observation,
            found.reward,
            found.done,
            observation_chars=self._chars,
            info=told_people(command, found.observation),
        )

    async def close(self) -> None:
        """Give the slot back."""
        seat, self._seat = self._seat, None
        if seat is not None:
            await self._threads.run(seat.release, after=seat.release)

    async def _run(self, seat: _Seat, work: Callable[[], T]) -> T:
        """Run blocking work of the seat in a thread. Raises EnvironmentFailure."""
        try:
            return await self._threads.run(work, after=seat.release)
        except asyncio.CancelledError:
            self._seat = None  # the thread gives the slot back
            raise
        except SimulatorLost as error:
            raise EnvironmentFailure("lost", str(error)) from error
        except (EpisodeError, TaskError) as error:
            raise EnvironmentFailure("internal", str(error)) from error


@contextmanager
def pooled_environment(
    pool: MiniStackPool,
    *,
    max_steps: int = DEFAULT_MAX_STEPS,
    observation_chars: int = OBSERVATION_CHARS,
    desired_state: bool = False,
) -> Iterator[EnvironmentSpec]:
    """Yield the AWS environment on the slots of a started pool. At the end it waits until all slots are given back, so
    close the environments before.

    Args:
        max_steps: the environment ends an episode after this many commands.
        observation_chars: what the policy reads of an answer.
        desired_state: whether it also reads what the account should look like, where the task says so.
    """
    leases, threads = _Leases(pool), Threads("aws", pool.size)
    options = AwsOptions()
    try:
        yield EnvironmentSpec(
            "aws",
            make=lambda address: PooledEnvironment(leases, threads, max_steps, observation_chars, desired_state),
            tasks=lambda split: AwsTaskSet(options, split),
            system_prompt=SYSTEM_PROMPT,
            concurrency=pool.size,
        )
    finally:
        if not leases.wait_for_all(_RETURN_S):
            _LOG.warning("slots of the pool were not given back within %g s after their episodes", _RETURN_S)
