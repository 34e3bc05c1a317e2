"""Puts the parts of the environment server together and serves them on a thread (docs/reference/environment.md 2)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from realhf.base.http_guard import guarded_http
from realhf.base.tls import in_the_clear, server_files
from realhf.env.server import wire
from realhf.env.server.capacity import SlotLeases, watch_loop_lag
from realhf.env.server.config import ServerConfig
from realhf.env.server.http_routes import StatelessPlayer, build_app
from realhf.env.server.metrics import ServerMetrics
from realhf.env.server.served import ServedEnvironment
from realhf.env.server.session_endpoint import SessionEndpoint

_LOG = logging.getLogger(__name__)


class PortTaken(OSError):
    """The server's port is in use."""


def listen(host: str, port: int) -> socket.socket:
    """Return a bound, listening socket whose connections notice a half-open peer. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_NODELAY", 1)):
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {host}:{port} (--port): {error.strerror}") from None
    ours = weakref.ref(listener)
    os.register_at_fork(after_in_child=lambda: _leave_port(ours()))
    return listener


def _leave_port(listener: socket.socket | None) -> None:
    """Close what belongs to the server's port, in a process that an environment's code forked: the port would stay
    taken as long as that lives, and a client would not see that its session ended."""
    if listener is None or listener.fileno() < 0:
        return
    port = listener.getsockname()[1]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as probe:
                    inherited = probe.family == listener.family and probe.getsockname()[1] == port
                if inherited:
                    os.close(int(name))


class EnvServer:
    """Serves the application on its own thread, so that the main thread is free for signals and RPC. ``ended`` is set
    when that thread is over."""

    def __init__(self, served: ServedEnvironment, config: ServerConfig, listener: socket.socket) -> None:
        pool = served.pool
        self._metrics = ServerMetrics(pool.metrics, served.slots_are, served.slot_label)
        self._threads = ThreadPoolExecutor(config.pool_size + 2, thread_name_prefix="env-session")
        leases = SlotLeases(pool, config.pool_size, self._threads, self._metrics)
        self._endpoint = SessionEndpoint(leases, served, self._threads, config, self._metrics)
        stateless = StatelessPlayer(leases, served.make_player, self._threads)
        app = build_app(served, leases, self._endpoint, stateless, config, self._metrics)
        self._page = served.mount(app)
        if warning := in_the_clear(config.host, config.tls_cert, config.tls_names):
            _LOG.warning(warning)
        self._listener = listener
        self._address = listener.getsockname()[:2]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=guarded_http("h11"),
                ws="websockets-sansio",
                ws_max_size=wire.MAX_FRAME_BYTES,
                ws_ping_interval=config.ws_ping_interval_s,
                ws_ping_timeout=config.ws_ping_timeout_s,
                ws_per_message_deflate=False,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=2,
                **{"loop": "uvloop", **server_files(config.tls_cert, config.tls_key)},  # pyright: ignore[reportArgumentType]
            )
        )
        self.ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="env-server", daemon=True)

    @property
    def url(self) -> str:
        """Base address of the server."""
        host, port = self._address
        scheme = "https" if self._server.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def start(self, timeout_s: float = 10.0) -> None:
        """Start to serve. Raises RuntimeError when the server does not come up."""
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            if time.monotonic() > deadline or self.ended.is_set():
                raise RuntimeError(f"the environment server did not start within {timeout_s:g} s")
            time.sleep(0.005)

    def stop(self, timeout_s: float = 9.0) -> None:
        """Close sessions with 1001 and stop serving."""
        deadline = time.monotonic() + timeout_s
        if self._loop is not None and not self.ended.is_set():
            try:
                asyncio.run_coroutine_threadsafe(self._endpoint.stop(), self._loop).result(timeout_s)
            except TimeoutError:
                _LOG.error("sessions did not end within %g s", timeout_s)
            self._server.should_exit = True
            self._thread.join(max(0.5, deadline - time.monotonic()))
        if self._page is not None:
            self._page.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve())
        finally:
            self._threads.shutdown(wait=False)
            self.ended.set()

    async def _serve(self) -> None:
        watch = asyncio.create_task(watch_loop_lag(self._metrics))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            watch.cancel()
