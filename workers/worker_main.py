"""How a worker of a run begins: its command line, the plan of the run, what the plan's plugins register."""

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
"""Libraries that write a line about every request."""


def add_key_file(parser: Any) -> None:
    """Add the flag that says where the keys of a run are; they themselves are on no command line."""
    parser.add_argument("--key-file", type=Path, help="file with the keys of the run (none: it is on the loopback)")


def keys_in(file: Path | None) -> RunKeys | None:
    """Return the keys in a file, None where there is none. Raises NetworkError naming the file."""
    return RunKeys.read(file) if file is not None else None


def reachable(master: str, keys: RunKeys | None) -> Network:
    """Return the network of a server that no plan describes: it listens on the address from which it reaches the master
    at ``master``; on the loopback without one or without keys."""
    return Network.of_worker(NetworkConfig(), keys, master) if master and keys is not None else LOOPBACK


def own_number(arguments: argparse.Namespace) -> int:
    """Return the number of a worker, with which its name ends. Raises ValueError."""
    index = arguments.name.rpartition("/")[2]
    if not index.isdigit():
        raise ValueError(f"--name is {arguments.name!r}; it must end in /<number>")
    return int(index)


def follow_master(
    kind: str, url: str, ended: Callable[[], object], arguments: argparse.Namespace, network: Network
) -> None:
    """Register the server at ``url`` with the master, and follow it until it says bye or ``ended()`` returns: it waits
    for the end of the server. Raises ValueError for a name without a number, and MasterLost."""
    worker = RpcWorker(
        arguments.name,
        kind,
        own_number(arguments),
        arguments.run_id,
        arguments.master,
        ordered={},
        endpoints={kind: network.public_url(url)},
        network=network,
    )
    threading.Thread(target=lambda: (ended(), worker.stop()), name="watch-server", daemon=True).start()
    worker.run()


def network_of(plan: RunPlan, arguments: argparse.Namespace) -> Network:
    """Return the network of a worker. Raises NetworkError when it has no keys and needs them, or no way to the
    master."""
    return Network.of_worker(plan.network, keys_in(arguments.key_file), arguments.master)


def run_planned(
    about: str,
    work: Callable[[RunPlan, argparse.Namespace], None],
    more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Read ``--run-dir --run-id --master --index --key-file`` and what ``more`` adds, and run ``work(plan,
    arguments)``; the exit code."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with plan.json")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--master", required=True, help="the master's endpoint")
    parser.add_argument("--index", type=int, required=True)
    add_key_file(parser)
    if more is not None:
        more(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)

    def begin() -> None:
        plan = RunPlan.read(arguments.run_dir)
        for plugin in plan.plugins:
            load_plugin(plugin)
        work(plan, arguments)

    return run_guarded(begin, arguments.run_dir)
