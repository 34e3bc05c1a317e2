"""Client of the AWS environment for one session, async and sync.

    async with AwsEnv("http://127.0.0.1:8100") as env:
        result = await env.reset(task_id=1, seed=3)
        result = await env.step("aws s3api list-buckets")

    with AwsEnv("http://127.0.0.1:8100").sync() as env:
        result = env.reset(task_id=1, seed=3)

It also works with other OpenEnv servers: an action may be a mapping, and unknown fields of a reply
become attributes of the observation. Source: docs/reference/environment.md 2.4, 10.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from realhf.aws.models import AwsAction, AwsObservation, AwsState, AwsStepResult
from realhf.base.loop_thread import BlockingFacade, blocking
from realhf.base.tls import context_trusting
from realhf.env.openenv_client import OpenEnvClient, StepResult, fetch_metadata

Action = AwsAction | str | Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


class AwsEnv:
    """One session of an environment server. Use it on one event loop, one request at a time.

    Args:
        base_url: ``http(s)://`` or ``ws(s)://`` address of the server.
        token: bearer token, if the server requires one.
        connect_timeout_s: deadline for the handshake and the first state request, in seconds.
        message_timeout_s: deadline for each request, in seconds.
        session: an existing session to use instead of opening one.
        ca_file: PEM file of the certificate authority for an https server ("": the system's, or
            SSL_CERT_FILE).

    A request raises EnvError for an error reply, after which the session stays usable. If it raises
    MessageTimeout or ConnectionLost, all later requests raise ConnectionPoisoned until ``connect``
    opens a new session.
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
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return self._session is not None and self._session.usable

    async def connect(self) -> None:
        """Open the session: handshake and one state request. Does nothing if it is open. Raises
        CapacityError or ConnectError."""
        if self._session is None:
            self.metadata = await self._describe()
            self._session = self._client(correlate=self.metadata.get("correlation") is True)
        await self._session.connect()

    async def reset(self, **arguments: Any) -> AwsStepResult:
        """Start an episode, connecting first if necessary. ``arguments``: ``task_id``, ``task``,
        ``seed``, ``episode_id``, ``chaos``."""
        if self._session is None:
            await self.connect()
        return parse_result(await self._open().reset(**arguments))

    async def step(self, action: Action) -> AwsStepResult:
        """Run a command line and return the reply."""
        return parse_result(
            await self._open().step(action.command if isinstance(action, AwsAction) else action)
        )

    async def state(self) -> AwsState:
        """Return the state of the session."""
        if self._session is None:
            await self.connect()
        return AwsState.model_validate(await self._open().state())

    async def close(self) -> None:
        """Close the session. Idempotent, and harmless if the server is gone."""
        if self._session is not None:
            await self._session.close()

    def sync(self) -> SyncAwsEnv:
        """Return a blocking client for this session, with an event loop of its own."""
        return SyncAwsEnv(self)

    async def __aenter__(self) -> AwsEnv:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _open(self) -> OpenEnvClient:
        if self._session is None:
            raise RuntimeError("the session is not open; call connect() or reset() first")
        return self._session


class SyncAwsEnv(BlockingFacade[AwsEnv]):
    """``AwsEnv`` with blocking methods. Its thread answers the server's pings while the caller does
    other work. After ``close``, ``connect`` opens a new session."""

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
        """Metadata that the server sent when the client connected; {} before that."""
        return self.inner.metadata

    def __enter__(self) -> Self:
        self.connect()
        return self

    def run(
        self,
        method: Callable[Concatenate[AwsEnv, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a coroutine method of the client and return its result. Raises RuntimeError if the
        caller is a coroutine, or a forked child of the process that opened the session."""
        in_child = self.thread.pid != os.getpid() and not self.inner.usable
        if in_child or not self._finalizer.alive:
            super().__init__(self.inner, "aws-env")
        self.thread.check_caller()
        return super().run(method, *args, **kwargs)


def parse_result(result: StepResult) -> AwsStepResult:
    """Return a reply with a typed observation. Unknown fields become extra attributes."""
    return AwsStepResult(
        AwsObservation.model_validate(result.observation), result.reward, result.done
    )
