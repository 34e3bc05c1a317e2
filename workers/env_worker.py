"""Environment server process.

It runs stand-alone (``aws-env --port 8000 --pool-size 8``, or ``python -m workers.env_worker``) or
as part of a run (``--master tcp://... --run-id ... --name env/0``), in which case it registers its
address and ends with the run. With ``--env NAME`` it serves that environment, a registered one or
``file.py:Name``; without it, AWS.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import NamedTuple

import realhf
from realhf.base.loopback import is_loopback_host
from realhf.base.tls import in_memory_file
from realhf.env.server.config import ServerConfig
from realhf.env.server.interfaces import ServedEnvironment
from realhf.env.server.server import EnvServer, listen
from realhf.scheduler.process import STOP_WITHIN_S, run_guarded
from realhf.transport.network import Network
from realhf.web.settings import SettingError
from workers.worker_main import add_key_file, follow_master, read_keys, server_network


class ServerInterrupted(Exception):
    """Raised when SIGTERM or SIGINT was received."""


class ServerProgram(NamedTuple):
    """A kind of environment server."""

    name: str
    """Name of the command, for messages."""
    about: str
    """Description for ``--help``."""
    config: type[ServerConfig]
    """Class of the server's settings."""
    prepare: Callable[[argparse.Namespace, ServerConfig], tuple[ServedEnvironment, ServerConfig]]
    """Function that creates the environment from the parsed arguments and the settings. It returns
    the environment and the settings, which it may have adapted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives, the run ends or an error occurs.

    Returns the exit code: 0 after a signal or the end of the run, 2 for an error in the settings, 1
    if the environment fails.
    """
    program = choose_program(argv)
    arguments = build_parser(program).parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if arguments.master:
        return run_guarded(lambda: serve(program, arguments))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _interrupt(stop))
    try:
        serve(program, arguments)
    except ServerInterrupted:
        return 0
    except (SettingError, OSError, ValueError) as error:
        print(f"{program.name}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"{program.name}: {error}", file=sys.stderr)
        return 1
    return 0


def choose_program(argv: Sequence[str] | None) -> ServerProgram:
    """Return the kind of server that the command line selects. Only the code of that server is
    imported."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env", default="")
    if not first.parse_known_args(argv)[0].env:
        from realhf.aws.server import program

        return ServerProgram("aws-env", program.ABOUT, program.AwsServerConfig, program.prepare)
    from realhf.env.server.spec import program

    return ServerProgram("env_worker", program.ABOUT, program.SpecServerConfig, program.prepare)


def build_parser(program: ServerProgram) -> argparse.ArgumentParser:
    """Return a parser for the server's flags and for the flags that a launcher passes."""
    parser = argparse.ArgumentParser(
        prog=program.name,
        description=f"{program.about} Every setting is also a variable, named in brackets; a flag "
        f"wins over it.",
    )
    parser.add_argument(
        "--version", action="version", version=f"{program.name} {realhf.__version__}"
    )
    environment = parser.add_argument_group("environment")
    about = (
        "environment to serve: a registered name, FILE.py:Name or module:Name (without: AWS; its "
        "settings differ)"
    )
    environment.add_argument("--env", default="", metavar="NAME", help=about)
    about = "option of the environment, with --env; as often as needed"
    environment.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help=about
    )
    program.config.add_arguments(parser.add_argument_group("settings"))
    run = parser.add_argument_group("as part of a training run")
    run.add_argument(
        "--master", default="", help="endpoint of the master worker (none: stand alone)"
    )
    run.add_argument("--run-id", default="", help="run that the master belongs to")
    add_key_file(run)
    run.add_argument("--name", default="env/0", help="name of this worker in the roster")
    return parser


def _interrupt(stop: threading.Event) -> None:
    """Signal handler that raises ServerInterrupted in the main thread at the first signal and
    ignores later ones, so that they do not interrupt the clean-up."""
    if not stop.is_set():
        stop.set()
        raise ServerInterrupted


def serve(program: ServerProgram, arguments: argparse.Namespace) -> None:
    """Start the environment and the server, and serve until the master says goodbye; without a
    master, serve forever.

    Raises SettingError, OSError (port in use), RuntimeError (the environment cannot be started) or
    MasterLost.
    """
    keys = read_keys(arguments.key_file)
    network = server_network(arguments.master, keys)
    config = program.config.resolve(arguments)
    with ExitStack() as stack:
        if keys is not None:
            host = network.host if is_loopback_host(config.host) else config.host
            config = replace(config, host=host, token=keys.token)
            if not is_loopback_host(host):
                path = stack.enter_context(in_memory_file(keys.certificate + keys.certificate_key))
                config = replace(config, tls_cert=path, tls_key=path)
        listener = stack.enter_context(closing(listen(config.host, config.port)))
        served, config = program.prepare(arguments, config)
        _serve(
            program.name, served, EnvServer(served, config, listener), config, arguments, network
        )


def _serve(
    name: str,
    served: ServedEnvironment,
    server: EnvServer,
    config: ServerConfig,
    arguments: argparse.Namespace,
    network: Network,
) -> None:
    try:
        served.pool.start()
        server.start()
        print(served.announcement(), flush=True)
        if simulated := config.injected.describe():
            print(f"{name}: SIMULATED trouble: {simulated}", flush=True)
        print(f"{name}: serving {config.pool_size} sessions at {server.url}", flush=True)
        if served.home != ServedEnvironment.home:
            print(f"{name}: a page for people at {server.url}{served.home}", flush=True)
        if arguments.master:
            follow_master("env", server.url, server.ended.wait, arguments, network)
        else:
            server.ended.wait()
        if server.ended.is_set():
            raise RuntimeError("the HTTP server ended unexpectedly; its log tells why")
    finally:
        server.stop()
        served.pool.stop()
        if arguments.env:
            # Threads of the environment that still run may keep the process from exiting. SIGALRM
            # ends it in that case.
            signal.alarm(STOP_WITHIN_S)


if __name__ == "__main__":
    sys.exit(main())
