"""Group of N sessions of one environment server that are used together, with its failure handling
and statistics.

Its coroutines run on the event loop that owns the sockets. Either all sessions connect or none
does. The reward of a failed environment is None, never 0. Source: docs/reference/environment.md 9.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from realhf.api.environment import is_finite
from realhf.api.rollout import POLICY_FAILED
from realhf.base import process_clock
from realhf.base.tls import context_trusting
from realhf.env.openenv_client import (
    CapacityError,
    ConnectError,
    EnvError,
    OpenEnvClient,
    StepResult,
    failure_kind,
    fetch_metadata,
)

DEFAULT_URL = "http://127.0.0.1:8100"
ON_FAILURE = ("drop", "retry", "raise")
"""What to do with a rollout whose environment failed: leave it out, play it once more, or raise an
error."""
FAILURES = (ConnectionError, TimeoutError, EnvError)
"""Errors of an environment or of the connection to it. Any other error is a bug in the caller's
code."""


@dataclass(frozen=True)
class RolloutFailure:
    """Result of a failed rollout, in place of an outcome."""

    status: str
    """One of ``realhf.api.rollout.FAILURE_STATUSES``."""
    message: str
    """Error text."""
    valid: bool = False
    """Always False."""
    reward: None = None
    """Always None."""
    achieved: bool = False
    """Always False."""


class PoolClosed(RuntimeError):
    """The pool was closed, or never connected."""


class GroupError(RuntimeError):
    """Some rollouts of a group failed. ``outcomes``: one entry per rollout in order, with a
    RolloutFailure for each failed one."""

    def __init__(self, message: str, outcomes: Sequence[Any]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


class GroupResetError(GroupError):
    """Not all sessions of a group could be reset to the task."""


def as_failure(error: BaseException) -> RolloutFailure:
    """Return a RolloutFailure for ``error``. Errors that are not in FAILURES are attributed to the
    policy."""
    status = failure_kind(error) if isinstance(error, FAILURES) else POLICY_FAILED
    return RolloutFailure(status, str(error) or type(error).__name__)


def describe_failures(outcomes: Sequence[Any]) -> str:
    """Return a string for an error message that lists the failed outcomes."""
    named = [
        f"{i}: {o.status} ({o.message})"
        for i, o in enumerate(outcomes)
        if getattr(o, "valid", True) is False
    ]
    return "; ".join(named)


class ResultSink(Protocol):
    """Receiver of group results, such as a curriculum."""

    def record_result(self, task: Any, achieved: bool | float | None, reward: float = 0.0) -> None:
        """Record the result of a group. ``achieved``: fraction of its valid rollouts that solved
        the task, None if no rollout is valid. ``reward``: their mean reward."""
        ...


@dataclass(frozen=True)
class GroupSummary:
    """Statistics of a group."""

    size: int
    """Number of rollouts."""
    valid: int
    """Number of valid rollouts."""
    achieved: float
    """Fraction of the valid rollouts that solved the task; 0.0 if none is valid."""
    mean: float
    """Mean reward of the valid rollouts; 0.0 if none is valid."""
    std: float
    """Population standard deviation of the valid rollouts' rewards; 0.0 if none is valid."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of failed rollouts for each failure status."""

    @property
    def trainable(self) -> bool:
        """Whether advantages are defined: at least two rollouts are valid."""
        return self.valid >= 2


def record_group(
    curriculum: ResultSink | None,
    task: Any,
    results: Sequence[Any],
    success_threshold: float = 0.99,
) -> GroupSummary:
    """Report a group's results to the curriculum, if there is one, and return their statistics.

    ``results`` are rewards, or outcomes with ``valid``, ``reward``, ``achieved`` and ``status``.
    None, NaN and failed outcomes are left out, never counted as zeros. A plain reward counts as a
    success if it is at least ``success_threshold``.
    """
    entries = [_parse_result(result, success_threshold) for result in results]
    valid = [(reward, achieved) for reward, achieved, _ in entries if reward is not None]
    rewards = [reward for reward, _ in valid]
    achieved = sum(achieved for _, achieved in valid) / len(valid) if valid else None
    mean = statistics.fmean(rewards) if rewards else 0.0
    if curriculum is not None:
        curriculum.record_result(task, achieved, mean)
    return GroupSummary(
        size=len(entries),
        valid=len(valid),
        achieved=achieved or 0.0,
        mean=mean,
        std=statistics.pstdev(rewards) if rewards else 0.0,
        failures=dict(Counter(status for reward, _, status in entries if reward is None)),
    )


def _parse_result(result: Any, threshold: float) -> tuple[float | None, bool, str]:
    """Return (reward or None, achieved, failure status) of one result."""
    if result is None:
        return None, False, "missing"
    if isinstance(result, int | float):
        reward = float(result)
        return (
            (None, False, "not_finite")
            if not is_finite(reward)
            else (reward, reward >= threshold, "")
        )
    if not result.valid or result.reward is None or not is_finite(result.reward):
        return None, False, result.status
    return float(result.reward), bool(result.achieved), ""


def episode_return(rewards: Sequence[float], reward_mode: str) -> float:
    """Return the score of an episode from the rewards of its steps: the last one in ``level`` mode,
    otherwise their sum."""
    return (rewards[-1] if rewards else 0.0) if reward_mode == "level" else float(sum(rewards))


T = TypeVar("T")
_REOPEN_S = 5.0
"""How long to retry replacing a lost session while the server is full, in seconds."""


class SessionGroup:
    """N sessions that are connected, reset and stepped together. ``clients`` are the sessions, []
    until connected; a lost session is reopened in its place.

    Args:
        base_url: address of the environment server, see ``AwsEnv``.
        size: number of sessions, at most the server's pool size.
        curriculum: receives the result of a group from ``record_group_result``, and from nothing
            else.
        connect_timeout_s: deadline for opening all sessions, in seconds.
        message_timeout_s: deadline for each reset or step, in seconds.
        retry_capacity_s: how long to retry connecting while the server is full, in seconds.
        on_failure: what to do when an environment fails, one of ON_FAILURE.
        token: bearer token of the server.
        ca_file: PEM file of the certificate authority, see ``AwsEnv``.
    """

    def __init__(
        self,
        base_url: str,
        size: int = 8,
        curriculum: ResultSink | None = None,
        *,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        retry_capacity_s: float = 0.0,
        on_failure: str = "drop",
        token: str | None = None,
        ca_file: str = "",
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one session, not {size}")
        if on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure is {on_failure!r}; allowed: {', '.join(ON_FAILURE)}")
        self.size = size
        self.on_failure = on_failure
        self.clients: list[OpenEnvClient] = []
        self.metadata: dict[str, Any] = {}
        self.closed = False
        self.message_timeout_s = message_timeout_s
        self._curriculum = curriculum
        self._retry_capacity_s = retry_capacity_s
        tls = context_trusting(ca_file) if ca_file else None
        self._describe = partial(fetch_metadata, base_url, token, min(20.0, connect_timeout_s), tls)
        self._client = partial(
            OpenEnvClient,
            base_url,
            connect_timeout_s=connect_timeout_s,
            message_timeout_s=message_timeout_s,
            token=token,
            tls=tls,
        )

    @property
    def reward_mode(self) -> str:
        """How the server computes rewards: ``potential`` (the rewards of an episode sum to its
        score) or ``level`` (the last reward is the score)."""
        return str(self.metadata.get("reward_mode", "potential"))

    def check_connected(self) -> None:
        """Raise PoolClosed if the group is closed or was never connected."""
        if self.closed:
            raise PoolClosed("the pool is closed")
        if not self.clients:
            raise PoolClosed("the pool is not connected; call connect() first")

    async def connect(self) -> None:
        """Open all sessions or none. Does nothing if they are open. A failed call can be repeated.

        If a session cannot be opened, the others are closed again and its error is raised,
        CapacityError or ConnectError.
        """
        if self.closed:
            raise PoolClosed("the pool is closed")
        if self.clients:
            return
        self.metadata = await self._describe()
        self.clients = await _open_with_retries(self._open_all, self._retry_capacity_s)

    async def _open_all(self) -> list[OpenEnvClient]:
        correlate = self.metadata.get("correlation") is True
        clients = [self._client(correlate=correlate) for _ in range(self.size)]
        tasks = [asyncio.ensure_future(client.connect()) for client in clients]
        try:
            await asyncio.gather(*tasks)
            _check_distinct(clients)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
            raise
        return clients

    async def reopen(self, client: OpenEnvClient) -> None:
        """Replace a lost session with a new one. While the server has not noticed the loss and is
        full, this is retried for some seconds. Raises ConnectionError."""
        await client.close()
        await _open_with_retries(client.connect, _REOPEN_S)

    async def reopen_lost(self) -> None:
        """Reopen the lost sessions. Raises the last ConnectionError if no session is usable
        afterwards."""
        self.check_connected()
        last_error: ConnectionError | None = None
        for client in self.clients:
            if not client.usable:
                try:
                    await self.reopen(client)
                except ConnectionError as error:
                    last_error = error
        if last_error is not None and not any(client.usable for client in self.clients):
            raise last_error

    async def reset(self, arguments: Mapping[str, Any]) -> list[StepResult]:
        """Reset every session with the same arguments. Raises GroupResetError with all outcomes if
        a reset fails or the sessions show different tasks; the other resets have completed by
        then."""
        await self.reopen_lost()
        outcomes = await asyncio.gather(
            *(_await_outcome(client.reset(**arguments)) for client in self.clients)
        )
        results = [outcome for outcome in outcomes if isinstance(outcome, StepResult)]
        if len(results) < len(outcomes):
            raise GroupResetError(
                f"not every session was reset: {describe_failures(outcomes)}", outcomes
            )
        texts = {(result.observation.get("task") or {}).get("description") for result in results}
        if len(texts) > 1:
            raise GroupResetError(
                f"the sessions of the group show {len(texts)} different tasks", outcomes
            )
        return results

    async def step(self, actions: Sequence[str | None]) -> list[StepResult | RolloutFailure | None]:
        """Run one command per session, concurrently, and return the results in the order of the
        sessions. None instead of a command skips the session. Raises ValueError when the lengths
        differ."""
        self.check_connected()
        if len(actions) != self.size:
            raise ValueError(f"{len(actions)} actions for {self.size} sessions")
        return list(await asyncio.gather(*map(_step_one, self.clients, actions)))

    def record_group_result(
        self, task: Any, results: Sequence[Any], success_threshold: float = 0.99
    ) -> GroupSummary:
        """Report a group's results to the curriculum and return their statistics, see
        ``record_group``. Nothing else in the group reports to the curriculum."""
        return record_group(self._curriculum, task, results, success_threshold)

    async def close(self) -> None:
        """Close every session. Idempotent, and harmless if the server is gone."""
        self.closed = True
        await asyncio.gather(*(client.close() for client in self.clients), return_exceptions=True)


async def _step_one(
    client: OpenEnvClient, action: str | None
) -> StepResult | RolloutFailure | None:
    return None if action is None else await _await_outcome(client.step(action))


async def _await_outcome(answer: Awaitable[StepResult]) -> StepResult | RolloutFailure:
    """Await an answer. Return a RolloutFailure if the environment failed."""
    try:
        return await answer
    except FAILURES as error:
        return as_failure(error)


def reset_arguments(task: Any, seed: int | None, chaos: bool) -> dict[str, Any]:
    """Return the keyword arguments of a reset to a task. ``task``: a ``Task`` (any object with
    ``to_json`` and ``seed``), or a mapping such as ``{"task_id": 3}``. ``seed`` None: the task's
    own seed."""
    if isinstance(task, Mapping):
        arguments = {"chaos": chaos, **task}
    else:
        arguments = {"task": task.to_json(), "seed": task.seed, "chaos": chaos}
    return arguments if seed is None else arguments | {"seed": seed}


def _check_distinct(clients: Sequence[OpenEnvClient]) -> None:
    """Raise ConnectError if two sessions share a simulator: each would see the other's
    resources."""
    slots = [client.probe["slot_id"] for client in clients if "slot_id" in client.probe]
    if len(set(slots)) < len(slots):
        raise ConnectError(f"the server gave several sessions the same slot: {sorted(slots)}")


async def _open_with_retries(open_session: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Open a session (or a group of them). While the server is full, retry for ``patience_s``
    seconds."""
    deadline = process_clock.now() + patience_s
    while True:
        try:
            return await open_session()
        except CapacityError as error:
            if process_clock.now() + error.retry_after_s > deadline:
                raise
            await asyncio.sleep(error.retry_after_s)
