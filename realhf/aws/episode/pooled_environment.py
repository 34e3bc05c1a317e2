"""The AWS environment without a server: episodes run in this process, on slots of a MiniStackPool.

The policy reads the same text as in the environment on a server (``realhf.aws.messages``). Scripted
agents and evaluations can read more. The ``info`` of an opening and of a command's answer contains
the whole ``observation``; that of an opening also contains ``setup_answers``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from realhf.api.environment import (
    AssistantMessage,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Turn,
)
from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.environment import SYSTEM_PROMPT, AwsOptions, AwsTaskSet
from realhf.aws.episode.episode import (
    DEFAULT_MAX_STEPS,
    NOT_RUNNING,
    Episode,
    EpisodeError,
    StepData,
)
from realhf.aws.messages import (
    NO_COMMAND,
    OBSERVATION_CHARS,
    command_of,
    command_turn,
    message_turn,
    replay_of,
    task_opening,
    turn_info,
)
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.task import Task, TaskError
from realhf.base import process_clock
from realhf.env.loader.threads import Threads

T = TypeVar("T")
MESSAGE_TIMEOUT_S = 120.0
"""Seconds that a reset or a command may take. This is longer than the deadlines of simulator and
CLI worker."""
_RETURN_S = 60.0
"""Seconds to wait on exit for the slots to be returned."""
_LOG = logging.getLogger(__name__)


class SlotSession:
    """One session on a slot, which is leased at the first reset. Its methods block. Not
    thread-safe.

    ``returned``: semaphore with one permit for each slot of the pool that no session holds.
    """

    def __init__(self, pool: MiniStackPool, returned: threading.Semaphore, max_steps: int) -> None:
        self._pool = pool
        self._returned = returned
        self._max_steps = max_steps
        self._slot: Slot | None = None
        self._episode: Episode | None = None

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[StepData, list[Mapping[str, Any]]]:
        """Start an episode and return (first observation, answers to the set-up calls). Raises
        EnvironmentFailure if no slot is free."""
        if self._episode is None:
            try:
                self._slot = self._pool.acquire()
            except SimulatorLost:
                raise
            except RuntimeError as error:
                raise EnvironmentFailure("capacity", str(error)) from error
            self._returned.acquire()
            self._episode = Episode(self._slot, self._max_steps)
        first = self._episode.reset(Task.from_json(task["task"]), seed, chaos=task.get("chaos"))
        return first, [*self._episode.setup_answers]

    def step(self, command: str) -> StepData:
        """Run a command and return the result. Raises EpisodeError before the first reset."""
        if self._episode is None:
            raise EpisodeError(NOT_RUNNING)
        return self._episode.step(command)

    def release(self) -> None:
        """Return the slot to the pool, which scrubs it. Idempotent."""
        slot = self._slot
        self._slot = None
        self._episode = None
        if slot is not None:
            try:
                self._pool.release(slot)
            finally:
                self._returned.release()


class PooledEnvironment:
    """An environment that plays its episodes on one slot of the pool, leased at the first reset.

    Commands block, so they run in ``threads``. ``close`` returns the slot, also after a failure. If
    a command is cancelled, its thread returns the slot when the command ends.
    """

    def __init__(
        self,
        open_session: Callable[[], SlotSession],
        threads: Threads,
        observation_chars: int,
        show_ids: bool,
    ) -> None:
        self._open_session = open_session
        self._threads = threads
        self._chars = observation_chars
        self._show_ids = show_ids
        self._session: SlotSession | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode of ``task``, which is a complete task (``Task.to_json``). Chaos is on if
        ``task["chaos"]`` is true."""
        session = self._session = self._session or self._open_session()
        first, answers = await self._run(session, lambda: session.reset(task, seed))
        info = {"observation": first.observation, "setup_answers": answers, **replay_of(task)}
        return task_opening(first.observation, info=info)

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the command in the policy's turn. A turn without a command runs nothing."""
        command = command_of(message)
        if command is None:
            return message_turn(NO_COMMAND)
        session = self._session
        if session is None:
            raise EnvironmentFailure("lost", "no episode is running")
        result = await self._run(session, lambda: session.step(command))
        return command_turn(
            result.observation,
            result.reward,
            result.done,
            observation_chars=self._chars,
            show_ids=self._show_ids,
            info=turn_info(command, result.observation),
        )

    async def close(self) -> None:
        """Return the slot to the pool."""
        session = self._session
        self._session = None
        if session is not None:
            await self._threads.run(session.release, after=session.release)

    async def _run(self, session: SlotSession, work: Callable[[], T]) -> T:
        """Run a blocking method of the session in a thread. Raises EnvironmentFailure."""
        try:
            return await self._threads.run(work, after=session.release)
        except asyncio.CancelledError:
            self._session = None  # the thread gives the slot back
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
    """Context manager that provides the AWS environment on the slots of a started pool.

    On exit it waits until all slots are returned, so close the environments first.

    Args:
        max_steps: number of commands after which the environment ends an episode.
        observation_chars: maximum number of characters of an answer that the policy reads.
        show_ids: whether the policy reads generated ids unchanged, see ``normalise``.
    """
    returned = threading.Semaphore(pool.size)
    threads = Threads("aws", pool.size)
    options = AwsOptions()
    open_session = partial(SlotSession, pool, returned, max_steps)
    try:
        yield EnvironmentSpec(
            "aws",
            make=lambda address: PooledEnvironment(
                open_session, threads, observation_chars, show_ids
            ),
            tasks=lambda split: AwsTaskSet(options, split),
            system_prompt=SYSTEM_PROMPT,
            concurrency=pool.size,
        )
    finally:
        end = process_clock.now() + _RETURN_S
        if not all(
            returned.acquire(timeout=max(0.0, end - process_clock.now())) for _ in range(pool.size)
        ):
            _LOG.warning(
                "slots of the pool were not given back within %g s after their episodes", _RETURN_S
            )
