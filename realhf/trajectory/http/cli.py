"""The command ``run-api``: the trajectory server, with the flags of the original server and more.

``python -m realhf.trajectory`` is the same.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import realhf
from realhf.base.event_loops import NEW_EVENT_LOOP
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.web.certificates import plaintext_warning, server_files
from realhf.web.connections import guarded_http
from realhf.web.settings import SettingError

if TYPE_CHECKING:
    import uvicorn

_LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until a signal stops it. Returns the exit code."""
    arguments = command_line().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config = TrajectoryConfig.resolve(arguments)
        if arguments.reload:
            import uvicorn

            os.environ.update(config.to_environment())
            uvicorn.run(
                "realhf.trajectory.http.server:app",
                host=config.host,
                port=config.port,
                reload=True,
                http="realhf.web.connections:GuardedProtocol",
                access_log=False,
                **server_files(config.tls_cert, config.tls_key),  # pyright: ignore[reportArgumentType]
            )
            return 0
        return serve(config)
    except (SettingError, OSError) as error:
        print(f"run-api: {error}", file=sys.stderr)
        return 2


def serve(config: TrajectoryConfig) -> int:
    """Run the server in this process; return the exit code. Raises SettingError."""
    import uvicorn

    from realhf.trajectory.http.server import create_app

    server = uvicorn.Server(uvicorn_config(config, create_app(config)))
    try:
        server.run()
    except SystemExit:  # uvicorn has logged why it did not start
        return 2
    return 0 if server.started else 2


def uvicorn_config(config: TrajectoryConfig, app: Any) -> uvicorn.Config:
    """Return the uvicorn settings of the server. Logs a warning if other machines can reach it
    without TLS."""
    import uvicorn

    if warning := plaintext_warning(config.host, config.tls_cert, config.tls_names):
        _LOG.warning(warning)
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=guarded_http(),
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=5,
        log_level="info",
        **{"loop": NEW_EVENT_LOOP, **server_files(config.tls_cert, config.tls_key)},  # pyright: ignore[reportArgumentType]
    )


def command_line() -> argparse.ArgumentParser:
    """Return the parser of ``run-api``."""
    parser = argparse.ArgumentParser(
        prog="run-api",
        description="Serve the Atropos Trajectory Handler API: environments push scored groups, "
        "trainers pull batches, "
        "nothing is lost. Every setting is also a variable, named in brackets; a flag wins over "
        "it.",
    )
    parser.add_argument("--version", action="version", version=f"run-api {realhf.__version__}")
    parser.add_argument(
        "--reload", action="store_true", help="restart when the code changes (development)"
    )
    TrajectoryConfig.add_arguments(parser.add_argument_group("settings"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
