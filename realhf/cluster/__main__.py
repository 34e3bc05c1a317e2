"""Look at a running job and change its hosts, or make the keys that hosts need.

python -m realhf.cluster keys FILE --host NAME ...
python -m realhf.cluster status --join tcp://HOST:PORT --key-file FILE
python -m realhf.cluster add    --join tcp://HOST:PORT --key-file FILE --host NAME --kind rollout_worker --count 2
python -m realhf.cluster remove --join tcp://HOST:PORT --key-file FILE --host NAME
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import realhf
from realhf.base.text import escape_controls
from realhf.cluster.cluster_keys import HostKeys, add_hosts, make_keys
from realhf.cluster.messages import OperatorOrder
from realhf.cluster.operator import ask_launcher
from realhf.cluster.options import ELASTIC, HOST_NAME
from realhf.cluster.placement import LAUNCHER
from realhf.transport.errors import NetworkError, TransportError
from realhf.transport.network import write_private


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 1 if the launcher refuses the request or
    cannot be reached. An error is printed as one line on standard error."""
    arguments = _build_parser().parse_args(argv)
    try:
        if arguments.command == "keys":
            _make_keys(arguments.file, arguments.host, arguments.into)
            return 0
        order = None
        if arguments.command != "status":
            more = (
                getattr(arguments, "kind", ""),
                getattr(arguments, "count", 0),
                getattr(arguments, "new_keys", False),
            )
            order = OperatorOrder(arguments.host, *more)
        report = ask_launcher(arguments.join, arguments.key_file, arguments.command, order)
    except (TransportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        escape_controls("\n".join(report.lines)), file=sys.stderr if report.failed else sys.stdout
    )
    return int(report.failed)


def _make_keys(file: Path, hosts: Sequence[str], into: Path | None) -> None:
    """Generate keys for hosts, and print where they were written. Raises NetworkError or
    OSError."""
    for host in hosts:
        if not HOST_NAME.fullmatch(host) or host == LAUNCHER:
            raise NetworkError(f"--host {host!r}: no host can have this name")
    if into is not None and into.exists():
        raise FileExistsError(f"--into {into}: the file exists")
    if make_keys(file):
        print(f"{file}: keys of a cluster; they stay on this machine")
    elif not hosts:
        raise FileExistsError(
            f"{file} is there already; with --host NAME it gets the keys of a host"
        )
    if not hosts:
        return
    new_keys = add_hosts(file, dict.fromkeys(hosts))
    key_files = {
        host: file.with_name(f"{file.stem}-{host}{file.suffix}") for host in new_keys.hosts
    }
    for host, target in key_files.items() if into is None else ():
        target.unlink(missing_ok=True)  # its key was just replaced
        write_private(target, HostKeys(new_keys.server_public, {host: new_keys.hosts[host]}).text())
        print(f"{target}: the key of host {host}; copy it there, mode 600")
    if into is not None:
        write_private(into, new_keys.text())
        print(f"{into}: the keys of {', '.join(new_keys.hosts)}")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m realhf.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    keys = commands.add_parser("keys", help="create the keys of a cluster")
    keys.add_argument(
        "file", type=Path, help="the launcher's own file, mode 600; created if it does not exist"
    )
    keys.add_argument(
        "--host", nargs="+", default=[], metavar="NAME", help="generate new keys for these hosts"
    )
    keys.add_argument(
        "--into",
        type=Path,
        help="write them into this one file; default: one file per host next to FILE",
    )
    for name, about in (
        ("status", "print hosts and workers"),
        ("add", "start more workers on a host"),
        ("remove", "remove a host: stop its workers and revoke its key"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument(
            "--join",
            required=True,
            metavar="tcp://HOST:PORT",
            help="the launcher's control endpoint",
        )
        command.add_argument(
            "--key-file", type=Path, required=True, help="the launcher's own file of keys"
        )
        if name != "status":
            command.add_argument("--host", required=True, help="name of the host")
        if name == "add":
            command.add_argument("--kind", required=True, choices=ELASTIC)
            command.add_argument("--count", type=int, default=1)
        if name == "remove":
            command.add_argument(
                "--new-keys",
                action="store_true",
                help="restart the run from its last checkpoint with new keys, so that those known "
                "to the host are invalid",
            )
    return parser


if __name__ == "__main__":
    sys.exit(main())
