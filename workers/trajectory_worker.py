"""The trajectory server as a process of a training run.

    python -m workers.trajectory_worker --master tcp://... --run-id ... --name trajectory/0 [flags of run-api]

It registers its address with the master and ends with the run. To serve alone, use ``run-api``.
"""

from __future__ import annotations

import argparse
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import uvicorn

import realhf
from realhf.base import process_clock
from realhf.base.loopback import is_loopback_host
from realhf.scheduler.child import leave
from realhf.scheduler.process import run_guarded
from realhf.trajectory.http.cli import uvicorn_config
from realhf.trajectory.http.config import TrajectoryConfig, add_arguments, resolve
from realhf.transport.network import Network
from workers.worker_main import add_key_file, follow_master, keys_in, own_number, reachable

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0
"""The server itself gives up a store that hangs before that."""
BACKLOG = 2048
REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where processes of this machine find a server that listens everywhere."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the master says bye. Returns the exit code."""
    arguments = command_line().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return run_guarded(lambda: start(arguments))


def command_line() -> argparse.ArgumentParser:
    """Flags of the server, and those that a launcher gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    add_arguments(parser.add_argument_group("settings"))
    run = parser.add_argument_group("the training run")
    run.add_argument("--master", required=True, help="endpoint of the master worker")
    run.add_argument("--run-id", required=True, help="run that the master belongs to")
    add_key_file(run)
    run.add_argument("--name", default="trajectory/0", help="name of this worker in the roster")
    return parser


def start(arguments: argparse.Namespace) -> None:
    """Serve with these flags; a run with keys listens where others reach it, and wants their token. Raises ConfigError,
    ValueError for a name without a number, and what ``serve`` raises."""
    own_number(arguments)
    keys = keys_in(arguments.key_file)
    network, config = reachable(arguments.master, keys), resolve(arguments)
    if keys is not None:
        host = network.host if is_loopback_host(config.host) else config.host
        config = replace(config, host=host, token=config.token if config.has_tokens else keys.token)
    serve(config, arguments, network)


def serve(config: TrajectoryConfig, arguments: argparse.Namespace, network: Network) -> None:
    """Serve in a thread, follow the master in this one. Raises RuntimeError (port taken, the store does not open) or
    MasterLost."""
    from realhf.trajectory.http.server import create_app

    listener = listen(config.host, config.port)
    server = uvicorn.Server(uvicorn_config(config, create_app(config)))
    thread = threading.Thread(target=server.run, args=([listener],), name="trajectory-server", daemon=True)
    thread.start()
    try:
        _wait_until_started(server, thread)
        host, port = listener.getsockname()[:2]
        host = str(REACHED_AT.get(host, host))
        scheme = "https" if server.config.is_ssl else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"trajectory server at {network.public_url(url)}", flush=True)
        follow_master("trajectory", url, thread.join, arguments, network)
        if not thread.is_alive():
            raise RuntimeError("the HTTP server ended unexpectedly; its log tells why")
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
        if thread.is_alive():
            logger.error("the trajectory server did not stop in %.0f s; the process ends without it", STOP_TIMEOUT_S)
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises RuntimeError that names the flag."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RuntimeError(f"cannot listen on {host}:{port} (--port): {error.strerror}") from None


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = process_clock.now() + START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or process_clock.now() > deadline:
            raise RuntimeError("the server did not start; its log tells why")
        time.sleep(0.02)


if __name__ == "__main__":
    leave(main())  # a server that never stops must not run on while the interpreter is taken down
