"""Client of the generation workers: routing of requests, and failover when a worker dies.

Source: docs/reference/dataflow.md 9.

``GenerationClient.generate``
  produces: the rest of a turn;
  waits for: a registered worker, then its answer;
  unblocked by: ``update``, the answer, the death of the worker (the request is sent to another one), or the timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec.structs import asdict

from realhf.api.calls import FREE, GENERATE, FreeRequest, GenerateAnswer, GenerateRequest
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.base import process_clock
from realhf.transport.envelope import pack_payload
from realhf.transport.errors import PeerLost, RpcTimeout
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.service import ServiceClient, ServiceError

_ATTEMPTS = 3
"""Number of errors of living workers after which the client gives up a request."""
_DEATHS = 4
"""Number of worker deaths after which the client gives up a request, because the request may be the
cause."""
_RECONNECT_S = 1.0
"""Seconds to wait after a broken connection before reconnecting to a worker that is still
registered."""


class _ConnectedWorker:
    """Connection to a generation worker."""

    def __init__(self, client: ServiceClient) -> None:
        self.client = client
        self.tokens = 0
        """Number of prompt tokens of the requests in flight."""


class GenerationClient:
    """``TokenSource`` that uses all generation workers of the roster.

    A slot stays with the worker that caches its keys and values; a new slot goes to the worker with
    the fewest tokens in flight. When a worker dies, its requests are sent to another worker. They
    contain all tokens so far. This is done at most a few times, and within ``timeout_s`` of a
    request's start.
    """

    def __init__(
        self, name: str, run_id: str, *, timeout_s: float, network: Network = LOOPBACK
    ) -> None:
        self._name = name
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._network = network
        self._workers: dict[str, _ConnectedWorker] = {}
        """Connected workers by endpoint."""
        self._registered: dict[str, str] = {}
        """Names of the registered workers by endpoint."""
        self._closed = False
        self._home: dict[int, str] = {}
        """Endpoint of the worker assigned to each slot."""
        self._changed = asyncio.Event()
        """Set when a worker is connected, then replaced by a new event."""
        self._freeing: set[asyncio.Task[None]] = set()
        self.rerouted = 0
        """Number of requests that were sent to another worker after a death."""

    def update(self, endpoints: Mapping[str, str]) -> None:
        """Set the registered generation workers, as a map from name to endpoint."""
        self._registered = (
            {} if self._closed else {endpoint: name for name, endpoint in endpoints.items()}
        )
        for endpoint in set(self._workers) - set(self._registered):
            self._drop(endpoint, self._workers[endpoint])
        for endpoint in self._registered:
            self._connect(endpoint)

    async def generate(
        self, request: GenRequest, among: Collection[str] | None = None
    ) -> GenOutput:
        """Return the rest of a turn from one of the generation workers; if ``among`` is given, from
        one of those names.

        Raises GenerationFailed.
        """
        deadline = process_clock.now() + self._timeout_s
        failures = 0
        lost: set[str] = set()
        message = GenerateRequest(**{**vars(request), "token_ids": list(request.token_ids)})
        while True:
            endpoint = await self._choose_endpoint(request.slot, deadline, among)
            worker = self._workers[endpoint]
            worker.tokens += len(request.token_ids)
            try:
                remaining_s = max(0.0, deadline - process_clock.now())
                answer = await worker.client.ask(GENERATE, message, timeout_s=remaining_s)
                return GenOutput(**asdict(answer))
            except PeerLost as error:
                self._drop(endpoint, worker)
                lost.add(endpoint)
                if len(lost) == _DEATHS:
                    raise GenerationFailed(
                        f"{_DEATHS} generation workers died while they had it: {error}"
                    ) from error
                self.rerouted += 1
            except ServiceError as error:
                failures += 1
                if failures == _ATTEMPTS:
                    raise GenerationFailed(str(error)) from error
            except RpcTimeout as error:
                raise GenerationFailed(str(error)) from error
            finally:
                worker.tokens -= len(request.token_ids)

    def free(self, slots: Sequence[int]) -> None:
        """Free the cache entries of these slots, whose episodes have finished.

        The messages are sent at once, so that they precede the requests of the next episodes in
        these slots.
        """
        by_worker: dict[str, list[int]] = {}
        for slot in slots:
            endpoint = self._home.pop(slot, None)
            if endpoint in self._workers:
                by_worker.setdefault(endpoint, []).append(slot)
        for endpoint, worker_slots in by_worker.items():
            payload = pack_payload(FREE.pack(FreeRequest(worker_slots)))
            try:
                answer = self._workers[endpoint].client.begin(FREE.name, payload)
            except PeerLost:
                continue
            task = asyncio.create_task(self._await_answer(answer))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    def close(self) -> None:
        """Close all connections; running and later requests fail."""
        self._closed = True
        self.update({})
        self._wake()

    async def _await_answer(self, request: asyncio.Future[Any]) -> None:
        """Wait for the answer to a request, ignoring errors."""
        with contextlib.suppress(PeerLost, TimeoutError, ServiceError):
            await asyncio.wait_for(request, self._timeout_s)

    async def _choose_endpoint(
        self, slot: int, deadline: float, among: Collection[str] | None
    ) -> str:
        """Return the endpoint of the worker for a slot, after waiting until one is connected.

        Raises GenerationFailed after the deadline, or at once if none of ``among`` is registered.
        """
        while not (allowed := self._connected_endpoints(among)):
            if self._closed:
                raise GenerationFailed("the client of the generation workers is closed")
            if among is not None and not set(among) & set(self._registered.values()):
                raise GenerationFailed(
                    f"no generation worker that keeps these weights is left of {', '.join(among)}"
                )
            try:
                async with asyncio.timeout(deadline - process_clock.now()):
                    await self._changed.wait()
            except TimeoutError:
                raise GenerationFailed(
                    f"no generation worker was there for {self._timeout_s:g} s"
                ) from None
        home = self._home.get(slot)
        if home not in allowed:
            home = min(allowed, key=self._load)
            self._home[slot] = home
        return home

    def _connected_endpoints(self, among: Collection[str] | None) -> list[str]:
        """Return the endpoints of the connected workers, only those named in ``among`` if it is
        given."""
        return [end for end in self._workers if among is None or self._registered.get(end) in among]

    def _load(self, endpoint: str) -> tuple[int, str]:
        return self._workers[endpoint].tokens, endpoint

    def _connect(self, endpoint: str) -> None:
        """Connect to a worker if it is registered and not yet connected."""
        if endpoint in self._registered and endpoint not in self._workers:
            client = ServiceClient(
                endpoint, self._registered[endpoint], self._name, self._run_id, self._network
            )
            self._workers[endpoint] = _ConnectedWorker(client)
            self._wake()

    def _drop(self, endpoint: str, worker: _ConnectedWorker) -> None:
        """Close a connection, and reconnect later if the worker is still registered. Requests on
        the connection fail with PeerLost.

        If there already is a newer connection to the same endpoint, that one is kept.
        """
        worker.client.close()
        if self._workers.get(endpoint) is worker:
            del self._workers[endpoint]
            asyncio.get_running_loop().call_later(_RECONNECT_S, self._connect, endpoint)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ConstrainedTokens:
    """``TokenSource`` that sets ``fields`` of every ``GenRequest`` before it passes it on to
    ``tokens``.

    With ``among``, ``tokens`` must be a ``GenerationClient``, which then uses only the workers with
    these names.
    """

    def __init__(
        self, tokens: TokenSource, among: Collection[str] | None = None, **fields: Any
    ) -> None:
        self._tokens = tokens
        self._fields = fields
        self._generate: Callable[..., Awaitable[GenOutput]] = tokens.generate
        self._among = () if among is None else (frozenset(among),)

    async def generate(self, request: GenRequest) -> GenOutput:
        """Return the rest of a turn. Raises GenerationFailed."""
        return await self._generate(replace(request, **self._fields), *self._among)

    def free(self, slots: Sequence[int]) -> None:
        """Free the cache entries of these slots."""
        self._tokens.free(slots)


def build_answer(output: GenOutput) -> GenerateAnswer:
    """Convert an engine's output to the answer message of a generation worker. An aborted turn is
    "interrupted", so that the client continues it."""
    answer = GenerateAnswer(**vars(output))
    return (
        msgspec.structs.replace(answer, finish_reason="interrupted")
        if output.finish_reason == "aborted"
        else answer
    )


def build_request(message: GenerateRequest, slot: int) -> GenRequest:
    """Convert a client's message to an engine's request, with the slot number that this worker
    uses."""
    return GenRequest(**{**asdict(message), "slot": slot})
