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
from functools import partial
from typing import Any, TypeVar

from realhf.api.environment import AssistantMessage, EnvironmentFailure, EnvironmentSpec, Opening, Turn
from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.environment import SYSTEM_PROMPT, AwsOptions, AwsTaskSet
from realhf.aws.episode.episode import DEFAULT_MAX_STEPS, NOT_RUNNING, Episode, EpisodeError, StepData
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
from realhf.base import process_clock
from realhf.env.loader.threads import Threads

T = TypeVar("T")
MESSAGE_TIMEOUT_S = 120.0
"""A reset or a command takes at most this long: more than the deadlines of the simulator and of the CLI worker."""
_RETURN_S = 60.0
"""A slot is waited for this long after its episode."""
_LOG = logging.getLogger(__name__)


class _Seat:
    """Holds a slot and the episode in it, from the first reset on. Its methods block; use one thread at a time.
    ``returned`` is one for each slot of the pool that no seat holds."""

    def __init__(self, pool: MiniStackPool, returned: threading.Semaphore, max_steps: int) -> None:
        self._pool, self._returned, self._max_steps = pool, returned, max_steps
        self._slot: Slot | None = None
        self._episode: Episode | None = None

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[StepData, list[Mapping[str, Any]]]:
        """Begin an episode; returns its first observation and what the calls of the set-up answered. Raises
        EnvironmentFailure where no slot is to be had."""
        if self._episode is None:
            try:
                self._slot = self._pool.acquire()
            except SimulatorLost:
                raise
            except RuntimeError as error:
                raise EnvironmentFailure("capacity", str(error)) from error
            self._returned.acquire()
            self._episode = Episode(self._slot, self._max_steps)
        found = self._episode.reset(Task.from_json(task["task"]), seed, chaos=task.get("chaos"))
        return found, [*self._episode.setup_answers]

    def step(self, command: str) -> StepData:
        """Run a command."""
        if self._episode is None:
            raise EpisodeError(NOT_RUNNING)
        return self._episode.step(command)

    def release(self) -> None:
        """Scrub the slot and give it back; harmless when repeated."""
        slot, self._slot, self._episode = self._slot, None, None
        if slot is not None:
            try:
                self._pool.release(slot)
            finally:
                self._returned.release()


class PooledEnvironment:
    """Plays episodes on a slot that is leased at the first reset, in ``threads``: commands block. After a failure
    ``close`` gives the slot back; where a command is given up, its thread does, once it is over."""

    def __init__(
        self, make_seat: Callable[[], _Seat], threads: Threads, observation_chars: int, show_ids: bool
    ) -> None:
        self._make_seat, self._threads = make_seat, threads
        self._chars, self._show_ids = observation_chars, show_ids
        self._seat: _Seat | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode of the whole ``task`` (``Task.to_json``), perturbed where ``chaos`` says so."""
        seat = self._seat = self._seat or self._make_seat()
        found, answers = await self._run(seat, lambda: seat.reset(task, seed))
        info = {"observation": found.observation, "setup_answers": answers, **replay_of(task)}
        return task_opening(found.observation, info=info)

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
            show_ids=self._show_ids,
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
    show_ids: bool = False,
) -> Iterator[EnvironmentSpec]:
    """Yield the AWS environment on the slots of a started pool. At the end it waits until all slots are given back, so
    close the environments before.

    Args:
        max_steps: the environment ends an episode after this many commands.
        observation_chars: what the policy reads of an answer.
        show_ids: whether it reads the ids in it, see ``normalise``.
    """
    returned, threads, options = threading.Semaphore(pool.size), Threads("aws", pool.size), AwsOptions()
    make_seat = partial(_Seat, pool, returned, max_steps)
    try:
        yield EnvironmentSpec(
            "aws",
            make=lambda address: PooledEnvironment(make_seat, threads, observation_chars, show_ids),
            tasks=lambda split: AwsTaskSet(options, split),
            system_prompt=SYSTEM_PROMPT,
            concurrency=pool.size,
        )
    finally:
        end = process_clock.now() + _RETURN_S
        if not all(returned.acquire(timeout=max(0.0, end - process_clock.now())) for _ in range(pool.size)):
            _LOG.warning("slots of the pool were not given back within %g s after their episodes", _RETURN_S)
