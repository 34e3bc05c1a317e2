"""Wraps a ``ServiceClient``, on an event loop of its own, for code that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from realhf.base.messages import Call
from realhf.transport.errors import PeerLost, RpcTimeout
from realhf.transport.event_loop import new_event_loop
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.service.client import A, Q, ServiceClient

_GRACE_S = 5.0


class BlockingServiceClient:
    """Takes the same arguments and raises the same errors as ``ServiceClient``; any thread may use it."""

    def __init__(self, endpoint: str, peer: str, client: str, run_id: str, network: Network = LOOPBACK) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._closed = False
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client of {peer}", daemon=True)
        self._thread.start()
        self._client = self._on_loop(self._make(endpoint, peer, client, run_id, network), _GRACE_S)

    def request(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """See ``ServiceClient.request``."""
        return self._on_loop(self._client.request(method, payload, timeout_s=timeout_s), timeout_s + _GRACE_S)

    def ask(self, call: Call[Q, A], request: Q, *, timeout_s: float) -> A:
        """See ``ServiceClient.ask``."""
        return self._on_loop(self._client.ask(call, request, timeout_s=timeout_s), timeout_s + _GRACE_S)

    def close(self) -> None:
        """Close the client; requests in flight fail with PeerLost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with contextlib.suppress(FutureTimeout):
            ended.result(_GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        """End the requests, and let their callers learn of it, before the loop stops."""
        self._client.close()
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*requests, return_exceptions=True)

    @staticmethod
    async def _make(endpoint: str, peer: str, client: str, run_id: str, network: Network) -> ServiceClient:
        return ServiceClient(endpoint, peer, client, run_id, network)

    def _on_loop(self, coroutine: Any, timeout_s: float) -> Any:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise PeerLost(f"the client of {self._peer} is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except RpcTimeout:
            raise
        except FutureTimeout:
            raise RpcTimeout(f"{self._peer} did not answer within {timeout_s:g} s") from None
