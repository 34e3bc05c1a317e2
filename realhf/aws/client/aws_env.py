"""Is the client of the AWS environment: one session, async and sync.

    async with AwsEnv("http://127.0.0.1:8100") as env:
        result = await env.reset(task_id=1, seed=3)
        result = await env.step("aws s3api list-buckets")

    with AwsEnv("http://127.0.0.1:8100").sync() as env:
        result = env.reset(task_id=1, seed=3)

Other OpenEnv servers are served too: an action may be a mapping, and fields that are not AWS's are attributes of the
observation. Source: docs/reference/environment.md 2.4, 10.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from realhf.api.environment import StepResult
from realhf.aws.models import AwsAction, AwsObservation, AwsState, AwsStepResult
from realhf.base.loop_thread import BlockingFace, blocking
from realhf.base.tls import believing
from realhf.env.openenv_client import OpenEnvClient, fetch_metadata

Action = AwsAction | str | Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


class AwsEnv:
    """Drives one session. Use it on one event loop, one request at a time.

    Args:
        base_url: ``http(s)://`` or ``ws(s)://`` address of the server. token: its bearer token, if it wants one.
        ca_file: PEM file with whom an https server is checked by ("": as this machine does, or SSL_CERT_FILE).
        connect_timeout_s: handshake and state probe. message_timeout_s: each request.
        session: an open session to use instead of one of its own.

    Requests raise EnvError (the session goes on), MessageTimeout, ConnectionLost, and ConnectionPoisoned from then on,
    until ``connect`` opens a new session.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        session: OpenEnvClient | None = None,
        ca_file: str = "",
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self._session = session
        tls = believing(ca_file) if ca_file else None
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
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return self._session is not None and self._session.usable

    async def connect(self) -> None:
        """Open the session: handshake and a state round trip. Does nothing when it is open. Raises CapacityError or
        ConnectError."""
        if self._session is None:
            self.metadata = await self._describe()
            self._session = self._client(correlate=self.metadata.get("correlation") is True)
        await self._session.connect()

    async def reset(self, **arguments: Any) -> AwsStepResult:
        """Start an episode: ``task_id``, ``task``, ``seed``, ``episode_id``, ``chaos``. Connects the first time."""
        if self._session is None:
            await self.connect()
        return parse_result(await self._open().reset(**arguments))

    async def step(self, action: Action) -> AwsStepResult:
        """Run a command line."""
        return parse_result(await self._open().step(action.command if isinstance(action, AwsAction) else action))

    async def state(self) -> AwsState:
        """Return the state of the session."""
        if self._session is None:
            await self.connect()
        return AwsState.model_validate(await self._open().state())

    async def close(self) -> None:
        """End the session; harmless when repeated or when the server is gone."""
        if self._session is not None:
            await self._session.close()

    def sync(self) -> SyncAwsEnv:
        """Return the same client for blocking code, with an event loop of its own."""
        return SyncAwsEnv(self)

    async def __aenter__(self) -> AwsEnv:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> OpenEnvClient:
        if self._session is None:
            raise RuntimeError("the session is not open; call connect() or reset() first")
        return self._session


class SyncAwsEnv(BlockingFace[AwsEnv]):
    """``AwsEnv`` with blocking methods. Its thread answers the server's pings while the caller is busy; after ``close``
    ``connect`` opens a new session."""

    connect = blocking(AwsEnv.connect)
    reset = blocking(AwsEnv.reset)
    step = blocking(AwsEnv.step)
    state = blocking(AwsEnv.state)

    def __init__(self, env: AwsEnv) -> None:
        super().__init__(env, "aws-env")

    @property
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return self.thread.alive and self.inner.usable

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server reported at connecting; {} before."""
        return self.inner.metadata

    def __enter__(self) -> Self:
        self.connect()
        return self

    def run(
        self, method: Callable[Concatenate[AwsEnv, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a method of the client to its end. Raises RuntimeError in a coroutine, and in a forked child of a process
        that has opened the session."""
        in_child = self.thread.pid != os.getpid() and not self.inner.usable
        if in_child or not self._finalizer.alive:
            super().__init__(self.inner, "aws-env")
        self.thread.check_caller()
        return super().run(method, *args, **kwargs)


def parse_result(result: StepResult) -> AwsStepResult:
    """Return the typed reply; fields that are not AWS's are kept."""
    return AwsStepResult(AwsObservation.model_validate(result.observation), result.reward, result.done)
