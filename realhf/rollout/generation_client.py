"""Gets tokens from generation workers: it decides which worker is asked, and what happens when one dies.

Source: docs/reference/dataflow.md 9.
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
"""After this many errors of living workers a request is given up."""
_DEATHS = 4
"""After this many dead workers a request is given up: it may be what kills them, and the next must be spared."""
_RECONNECT_S = 1.0
"""Seconds after a connection broke until a worker that is still registered is tried again."""


class _Worker:
    """A generation worker as this client sees it."""

    def __init__(self, client: ServiceClient) -> None:
        self.client = client
        self.tokens = 0


class GenerationClient:
    """Is a ``TokenSource`` over all generation workers of the roster.

    A slot stays with the worker that holds its keys and values; a new one goes to the worker with the fewest tokens in
    hand. When a worker dies nothing is lost: the request holds all tokens so far and is sent to another, within
    ``timeout_s`` of its start and a few times at most.
    """

    def __init__(self, name: str, run_id: str, *, timeout_s: float, network: Network = LOOPBACK) -> None:
        self._name, self._run_id, self._timeout_s, self._network = name, run_id, timeout_s, network
        self._workers: dict[str, _Worker] = {}
        self._registered: dict[str, str] = {}
        self._closed = False
        self._home: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._freeing: set[asyncio.Task[None]] = set()
        self.rerouted = 0

    def update(self, endpoints: Mapping[str, str]) -> None:
        """Set which generation workers are registered now: name -> endpoint."""
        self._registered = {} if self._closed else {endpoint: name for name, endpoint in endpoints.items()}
        for endpoint in set(self._workers) - set(self._registered):
            self._drop(endpoint, self._workers[endpoint])
        for endpoint in self._registered:
            self._connect(endpoint)

    async def generate(self, request: GenRequest, among: Collection[str] | None = None) -> GenOutput:
        """Return the rest of a turn, from one of the generation workers with the names ``among``, where they are given.
        Raises GenerationFailed."""
        deadline, failures = process_clock.now() + self._timeout_s, 0
        lost: set[str] = set()
        asked = GenerateRequest(**{**vars(request), "token_ids": list(request.token_ids)})
        while True:
            endpoint = await self._endpoint(request.slot, deadline, among)
            worker = self._workers[endpoint]
            worker.tokens += len(request.token_ids)
            try:
                left = max(0.0, deadline - process_clock.now())
                answer = await worker.client.ask(GENERATE, asked, timeout_s=left)
                return GenOutput(**asdict(answer))
            except PeerLost as error:
                self._drop(endpoint, worker)
                lost.add(endpoint)
                if len(lost) == _DEATHS:
                    raise GenerationFailed(f"{_DEATHS} generation workers died while they had it: {error}") from error
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
        """Forget the episodes in these slots: they are over. It is sent at once: what the next episode in a slot asks
        for comes after it, and is not forgotten with the one before."""
        by_worker: dict[str, list[int]] = {}
        for slot in slots:
            endpoint = self._home.pop(slot, None)
            if endpoint in self._workers:
                by_worker.setdefault(endpoint, []).append(slot)
        for endpoint, mine in by_worker.items():
            try:
                answer = self._workers[endpoint].client.begin(FREE.name, pack_payload(FREE.pack(FreeRequest(mine))))
            except PeerLost:
                continue
            task = asyncio.create_task(self._answered(answer))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    def close(self) -> None:
        """Close all connections; requests in flight and later ones fail."""
        self._closed = True
        self.update({})
        self._wake()

    async def _answered(self, request: asyncio.Future[Any]) -> None:
        """Wait for the answer, whatever it is."""
        with contextlib.suppress(PeerLost, TimeoutError, ServiceError):
            await asyncio.wait_for(request, self._timeout_s)

    async def _endpoint(self, slot: int, deadline: float, among: Collection[str] | None) -> str:
        """Return the worker of a slot; waits for one to join where there is none. Raises GenerationFailed, at once when
        none of ``among`` is registered."""
        while not (allowed := self._connected(among)):
            if self._closed:
                raise GenerationFailed("the client of the generation workers is closed")
            if among is not None and not set(among) & set(self._registered.values()):
                raise GenerationFailed(f"no generation worker that keeps these weights is left of {', '.join(among)}")
            try:
                async with asyncio.timeout(deadline - process_clock.now()):
                    await self._changed.wait()
            except TimeoutError:
                raise GenerationFailed(f"no generation worker was there for {self._timeout_s:g} s") from None
        home = self._home.get(slot)
        if home not in allowed:
            home = min(allowed, key=self._load)
            self._home[slot] = home
        return home

    def _connected(self, among: Collection[str] | None) -> list[str]:
        """Return the endpoints of the workers that may be asked now."""
        return [end for end in self._workers if among is None or self._registered.get(end) in among]

    def _load(self, endpoint: str) -> tuple[int, str]:
        return self._workers[endpoint].tokens, endpoint

    def _connect(self, endpoint: str) -> None:
        """Connect to a worker if it is registered and not connected."""
        if endpoint in self._registered and endpoint not in self._workers:
            client = ServiceClient(endpoint, self._registered[endpoint], self._name, self._run_id, self._network)
            self._workers[endpoint] = _Worker(client)
            self._wake()

    def _drop(self, endpoint: str, worker: _Worker) -> None:
        """Close the connection to a worker; its requests fail with PeerLost. A later connection to the same worker
        stays."""
        worker.client.close()
        if self._workers.get(endpoint) is worker:
            del self._workers[endpoint]
            asyncio.get_running_loop().call_later(_RECONNECT_S, self._connect, endpoint)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ConstrainedTokens:
    """Wraps a ``TokenSource`` whose requests get these ``fields``, of ``GenRequest``, whoever makes them. A
    ``GenerationClient`` is asked for workers with the names ``among`` alone."""

    def __init__(self, tokens: TokenSource, among: Collection[str] | None = None, **fields: Any) -> None:
        self._tokens, self._fields = tokens, fields
        self._generate: Callable[..., Awaitable[GenOutput]] = tokens.generate
        self._among = () if among is None else (frozenset(among),)

    async def generate(self, request: GenRequest) -> GenOutput:
        """See ``TokenSource``."""
        return await self._generate(replace(request, **self._fields), *self._among)

    def free(self, slots: Sequence[int]) -> None:
        """See ``TokenSource``."""
        self._tokens.free(slots)


def answer_of(output: GenOutput) -> GenerateAnswer:
    """Return what a generation worker replies; the client goes on with an aborted turn."""
    answer = GenerateAnswer(**vars(output))
    return msgspec.structs.replace(answer, finish_reason="interrupted") if output.finish_reason == "aborted" else answer


def request_of(asked: GenerateRequest, slot: int) -> GenRequest:
    """Return the request of a client, in a slot of the worker's own."""
    return GenRequest(**{**asdict(asked), "slot": slot})
