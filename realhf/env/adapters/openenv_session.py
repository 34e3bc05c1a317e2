"""Keeps one session on an OpenEnv server: opened when it is needed, on the first server that has one; every way in
which it fails has its kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from realhf.api.env import StepResult
from realhf.api.environment import EnvironmentFailure
from realhf.env.client.openenv_client import CapacityError, EnvError, OpenEnvClient
from realhf.env.doors.checks import BrokenContract, checked_number
from realhf.env.doors.values import shown

REFUSED = "VALIDATION_ERROR"
"""The code of an error that is about what was sent."""
_OF_THE_ROW = ("id", "group")
"""Columns that name a row and are not for the server."""


def reset_data(task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What a reset is given: the columns of the row, and the seed."""
    return {name: value for name, value in task.items() if name not in _OF_THE_ROW} | {"seed": seed}


class Session:
    """One session after another. ``clients`` make a connection to each server, the one to try first at the beginning;
    ``opened`` prepares each new one."""

    def __init__(
        self, clients: Sequence[Callable[[], OpenEnvClient]], opened: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._clients, self._opened = clients, opened
        self._client: OpenEnvClient | None = None

    async def reset(self, data: Mapping[str, Any]) -> StepResult:
        """Begin an episode; a session that the server closed in silence is opened anew. Raises EnvironmentFailure."""
        kept = self._client is not None and self._client.usable
        try:
            return await self._begun(data)
        except EnvironmentFailure as failure:
            if failure.kind != "lost" or not kept:
                raise
            return await self._begun(data)

    async def step(
        self, action: Mapping[str, Any], told: Callable[[EnvError], bool] = lambda error: False
    ) -> StepResult:
        """Take an action. Raises EnvironmentFailure, or the EnvError for which ``told`` holds."""
        if self._client is None:
            raise EnvironmentFailure("lost", "there is no session: reset comes first")
        return _checked(await _asked(self._client.step(action), told))

    async def close(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _begun(self, data: Mapping[str, Any]) -> StepResult:
        client = await self._connected()
        return _checked(await _asked(client.reset(**data)))

    async def _connected(self) -> OpenEnvClient:
        """The session, or a new one on the first server that has one."""
        if self._client is not None and self._client.usable:
            return self._client
        await self.close()
        refusals: list[Exception] = []
        for make in self._clients:
            client = make()
            try:
                await client.connect()
            except ConnectionError as error:
                refusals.append(error)
                continue
            self._client = client
            try:
                if self._opened is not None:
                    await self._opened()
            except BaseException:
                await self.close()
                raise
            return client
        for error in refusals:
            if isinstance(error, CapacityError):
                raise EnvironmentFailure("capacity", f"{error} (env.sessions: how many a server has)") from error
        raise EnvironmentFailure("lost", "; ".join(str(error) for error in refusals)) from refusals[0]


async def _asked(answer: Awaitable[StepResult], told: Callable[[EnvError], bool] = lambda error: False) -> StepResult:
    """Await an answer. Raises the EnvError that is for the policy; what went wrong otherwise is EnvironmentFailure."""
    try:
        return await answer
    except EnvError as error:
        if error.retryable:
            raise EnvironmentFailure("unavailable", str(error)) from error
        if told(error):
            raise
        raise EnvironmentFailure(error.kind or "internal", f"the server reported {error}") from error
    except TimeoutError as error:
        raise EnvironmentFailure("timeout", f"{error} (env.timeout_s)") from error
    except ConnectionError as error:
        raise EnvironmentFailure("lost", str(error)) from error


def _checked(result: StepResult) -> StepResult:
    """The answer of a server that speaks the wire. Raises EnvironmentFailure for what no server may say."""
    if not isinstance(result.done, bool):
        raise EnvironmentFailure("internal", f"the server's done must be true or false, not {shown(result.done)}")
    if not isinstance(result.observation, Mapping):
        raise EnvironmentFailure("internal", f"the server's observation must be a map, not {shown(result.observation)}")
    try:
        reward = None if result.reward is None else checked_number(result.reward, "the server's reward")
    except BrokenContract as error:
        raise EnvironmentFailure("internal", str(error)) from None
    return StepResult(result.observation, reward, result.done)
