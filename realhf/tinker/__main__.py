"""Implements ``train-api``: the training API of the client ``tinker``, served out of one folder
with a model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

import uvicorn
from starlette.types import ASGIApp

from realhf.base.event_loops import ClockedLoop
from realhf.base.installation import require_modules
from realhf.tinker.options import ServerOptions, read_options
from realhf.web.certificates import plaintext_warning, server_files
from realhf.web.connections import HandshakeLoop, guarded_http, use_all_descriptors
from realhf.web.settings import SettingError

_log = logging.getLogger("realhf.tinker")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        options = read_options(arguments)
        options.api_keys()
        require_modules("tinker", "tinker")
        require_modules("lora", "peft")
        use_all_descriptors()
        with asyncio.Runner(
            loop_factory=HandshakeLoop if options.tls_cert else ClockedLoop
        ) as runner:
            return runner.run(serve(options))
    except (SettingError, ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        print(f"train-api: {error}", file=sys.stderr)
        return 2


async def serve(options: ServerOptions) -> int:
    """Load the model, then serve until a signal, or until the server has to stop because of an
    error."""
    from realhf.tinker.routes import build_app
    from realhf.tinker.service import TrainingService

    if warning := plaintext_warning(options.host, options.tls_cert, options.tls_names):
        _log.warning(warning)
    listener = socket.create_server((options.host, options.port))
    service = TrainingService(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        opening = asyncio.ensure_future(service.open())
        await _wait_for_first(opening, stop.wait())
        if not opening.done():
            opening.cancel()
            return 0
        await opening
        server = _Server(uvicorn_config(build_app(service), options))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        scheme = "https" if options.tls_cert else "http"
        print(f"train-api: {scheme}://{options.host}:{listener.getsockname()[1]}", flush=True)
        await _wait_for_first(serving, stop.wait(), service.ended.wait())
        server.should_exit = True
        await asyncio.wait((serving,), timeout=5.0)
    finally:
        listener.close()
        await service.close()
    if service.failure:
        print(f"train-api: {service.failure}", file=sys.stderr)
    return 1 if service.failure else 0


def uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    """Return the uvicorn settings of the server."""
    return uvicorn.Config(
        app,
        http=guarded_http(),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        **server_files(options.tls_cert, options.tls_key),  # pyright: ignore[reportArgumentType]
    )


async def _wait_for_first(*waits: object) -> None:
    """Wait for the first of several awaitables and cancel the others, except for tasks that belong
    to the caller."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[arg-type]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, task in zip(waits, tasks, strict=True):
            if wait is not task:
                task.cancel()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because ``serve`` handles signals."""
        yield


if __name__ == "__main__":
    sys.exit(main())
