"""Trajectory server as a process of a training run.

    python -m workers.trajectory_worker --master tcp://... --run-id ... --name trajectory/0 [flags of run-api]

It registers its address with the master and ends with the run. For a stand-alone server, use
``run-api``.
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
from realhf.scheduler.child import exit_process
from realhf.scheduler.process import run_guarded
from realhf.trajectory.http.cli import uvicorn_config
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.transport.network import Network
from workers.worker_main import add_key_file, follow_master, parse_index, read_keys, server_network

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 60.0
"""Seconds within which the server must start."""
STOP_TIMEOUT_S = 40.0
"""Seconds within which the server must stop. This is longer than the time after which the server
abandons a store that hangs."""
BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""
REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Local address at which a server is reached that listens on all addresses."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the master says goodbye. Returns the exit code."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return run_guarded(lambda: start(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return a parser for the server's flags and for the flags that a launcher passes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    TrajectoryConfig.add_arguments(parser.add_argument_group("settings"))
    run = parser.add_argument_group("the training run")
    run.add_argument("--master", required=True, help="endpoint of the master worker")
    run.add_argument("--run-id", required=True, help="run that the master belongs to")
    add_key_file(run)
    run.add_argument("--name", default="trajectory/0", help="name of this worker in the roster")
    return parser


def start(arguments: argparse.Namespace) -> None:
    """Serve with the parsed flags. In a run with keys, listen on the network and require the run's
    token.

    Raises SettingError, ValueError for a name without a number, and the errors of ``serve``.
    """
    parse_index(arguments)
    keys = read_keys(arguments.key_file)
    network = server_network(arguments.master, keys)
    config = TrajectoryConfig.resolve(arguments)
    if keys is not None:
        host = network.host if is_loopback_host(config.host) else config.host
        config = replace(config, host=host, token=config.token if config.has_tokens else keys.token)
    serve(config, arguments, network)


def serve(config: TrajectoryConfig, arguments: argparse.Namespace, network: Network) -> None:
    """Run the server in another thread, and follow the master in this one.

    Raises RuntimeError (port in use, or the store cannot be opened) or MasterLost.
    """
    from realhf.trajectory.http.server import create_app

    listener = listen(config.host, config.port)
    server = uvicorn.Server(uvicorn_config(config, create_app(config)))
    thread = threading.Thread(
        target=server.run, args=([listener],), name="trajectory-server", daemon=True
    )
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
            logger.error(
                "the trajectory server did not stop in %.0f s; the process ends without it",
                STOP_TIMEOUT_S,
            )
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises RuntimeError, which names the flag, if the address cannot
    be used."""
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
    # Exit immediately: a server thread that never stops must not run during interpreter shutdown.
    exit_process(main())
