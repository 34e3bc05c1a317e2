"""The environment server process.

Stands alone (``aws-env --port 8000 --pool-size 8``, or ``python -m workers.env_worker``) or belongs to a run
(``--master tcp://... --run-id ... --name env/0``), where it registers its address and ends with the run.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import realhf
from realhf.aws.episode.player import EpisodePlayer
from realhf.aws.playground.routes import mount
from realhf.aws.real_aws.account import RealAwsPool
from realhf.aws.simulator.configured_pool import output_limits, simulator_pool
from realhf.aws.simulator.pool import MiniStackPool
from realhf.env.server.config import ConfigError, ServerConfig, add_arguments, aws_endpoints, resolve
from realhf.env.server.server import EnvServer, listen
from realhf.scheduler.failure import run_guarded
from realhf.transport.rpc.worker import RpcWorker


class Interrupted(Exception):
    """SIGTERM or SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, the end of the run or an error. Returns the exit code."""
    arguments = command_line().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.master:
        return run_guarded(lambda: serve(resolve(arguments), arguments.master, arguments.run_id, arguments.name))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _interrupt(stop))
    try:
        serve(resolve(arguments))
    except Interrupted:
        return 0
    except (ConfigError, OSError, RuntimeError) as error:
        print(f"aws-env: {error}", file=sys.stderr)
        return 1
    return 0


def command_line() -> argparse.ArgumentParser:
    """Flags of the server, and those that a launcher gives."""
    parser = argparse.ArgumentParser(
        prog="aws-env",
        description="Serve AWS episodes on MiniStack over the OpenEnv wire, one simulator per session. Every setting "
        "is also a variable, named in brackets; a flag wins over it.",
    )
    parser.add_argument("--version", action="version", version=f"aws-env {realhf.__version__}")
    add_arguments(parser.add_argument_group("settings"))
    run = parser.add_argument_group("as part of a training run")
    run.add_argument("--master", default="", help="endpoint of the master worker (none: stand alone)")
    run.add_argument("--run-id", default="", help="run that the master belongs to")
    run.add_argument("--name", default="env/0", help="name of this worker in the roster")
    return parser


def _interrupt(stop: threading.Event) -> None:
    """The first signal unwinds the main thread; later ones do not disturb the clean-up."""
    if not stop.is_set():
        stop.set()
        raise Interrupted


def serve(config: ServerConfig, master: str = "", run_id: str = "", name: str = "") -> None:
    """Start the pool and the server, then wait for the end: for ever, or until the master says bye. Raises
    OSError (port taken), RuntimeError (MiniStack does not come up) or MasterLost."""
    listener = listen(config.host, config.port)
    pool = make_pool(config)
    chaos = config.enable_chaos and config.backend_type == "simulator"

    def make_player(slot: Any) -> EpisodePlayer:
        return EpisodePlayer(slot, config.max_steps, reward_mode=config.reward_mode, chaos=chaos)

    server = EnvServer(pool, make_player, config, listener, mount)
    try:
        pool.start()
        server.start()
        print(pool.containment(), flush=True)
        if simulated := config.injected.described():
            print(f"aws-env: SIMULATED trouble: {simulated}", flush=True)
        print(f"aws-env: serving {config.pool_size} sessions at {server.url}", flush=True)
        if master:
            _follow_master(server, master, run_id, name)
        else:
            server.ended.wait()
        if server.ended.is_set():
            raise RuntimeError("the HTTP server ended unexpectedly; its log tells why")
    finally:
        server.stop()
        pool.stop()
        listener.close()


def make_pool(config: ServerConfig) -> MiniStackPool | RealAwsPool:
    """Simulators, or the real account where that is confirmed."""
    if config.backend_type == "aws":
        return RealAwsPool(config.allow_real_aws, config.allow_file, output_limits(config), aws_endpoints())
    return simulator_pool(config, config.pool_size, config.ministack_base_port)


def _follow_master(server: EnvServer, master: str, run_id: str, name: str) -> None:
    index = name.rpartition("/")[2]
    if not index.isdigit():
        raise ConfigError(f"--name is {name!r}; it must end in /<number>")
    worker = RpcWorker(name, "env", int(index), run_id, master, ordered={}, endpoints={"env": server.url})
    threading.Thread(target=lambda: (server.ended.wait(), worker.stop()), name="watch-server", daemon=True).start()
    worker.run()


if __name__ == "__main__":
    sys.exit(main())
