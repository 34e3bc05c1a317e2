"""Start-up code that all worker processes share: command line, the run's plan, plugins, network and
registration."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import realhf
from realhf.api.config import NetworkConfig
from realhf.api.experiment import RunPlan
from realhf.base.plugin import load_plugin
from realhf.scheduler.process import run_guarded
from realhf.transport.network import LOOPBACK, Network, RunKeys
from realhf.transport.rpc_worker import RpcWorker

_CHATTY = ("httpx", "httpx2")
"""Libraries that log a line for every request. Their log level is raised to WARNING."""


def add_key_file(parser: Any) -> None:
    """Add the flag ``--key-file``. The keys themselves never appear on a command line."""
    parser.add_argument(
        "--key-file", type=Path, help="file with the keys of the run (none: it is on the loopback)"
    )


def read_keys(file: Path | None) -> RunKeys | None:
    """Read the run's keys from a file; return None if ``file`` is None. Raises NetworkError, which
    names the file."""
    return RunKeys.read(file) if file is not None else None


def server_network(master: str, keys: RunKeys | None) -> Network:
    """Return the network of a server that is not part of a plan.

    The server listens on the address from which it reaches the master at ``master``. Without a
    master or without keys it listens on the loopback interface.
    """
    return (
        Network.for_worker(NetworkConfig(), keys, master)
        if master and keys is not None
        else LOOPBACK
    )


def parse_index(arguments: argparse.Namespace) -> int:
    """Return the number at the end of a worker's name, such as 0 for ``--name env/0``. Raises
    ValueError."""
    index = arguments.name.rpartition("/")[2]
    if not index.isdigit():
        raise ValueError(f"--name is {arguments.name!r}; it must end in /<number>")
    return int(index)


def follow_master(
    kind: str,
    url: str,
    wait_until_ended: Callable[[], object],
    arguments: argparse.Namespace,
    network: Network,
) -> None:
    """Register the server at ``url`` with the master, and serve until the master says goodbye or
    the server ends.

    ``wait_until_ended()`` must block until the server has ended. Raises ValueError for a worker
    name without a number, and MasterLost.
    """
    worker = RpcWorker(
        arguments.name,
        kind,
        parse_index(arguments),
        arguments.run_id,
        arguments.master,
        ordered={},
        endpoints={kind: network.public_url(url)},
        network=network,
    )
    threading.Thread(
        target=lambda: (wait_until_ended(), worker.stop()), name="watch-server", daemon=True
    ).start()
    worker.run()


def worker_network(plan: RunPlan, arguments: argparse.Namespace) -> Network:
    """Return the network of a worker. Raises NetworkError if required keys are missing or there is
    no route to the master."""
    return Network.for_worker(plan.network, read_keys(arguments.key_file), arguments.master)


def run_planned(
    description: str,
    work: Callable[[RunPlan, argparse.Namespace], None],
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Parse a worker's command line, load the plan and its plugins, and run ``work(plan,
    arguments)``.

    ``description`` is the text for ``--help``; ``add_flags(parser)`` may add flags. Returns the
    exit code.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with plan.json")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--master", required=True, help="the master's endpoint")
    parser.add_argument("--index", type=int, required=True)
    add_key_file(parser)
    if add_flags is not None:
        add_flags(parser)
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)

    def load_and_work() -> None:
        plan = RunPlan.read(arguments.run_dir)
        for plugin in plan.plugins:
            load_plugin(plugin)
        work(plan, arguments)

    return run_guarded(load_and_work, arguments.run_dir)
