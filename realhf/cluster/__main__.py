"""Look at a running job and change its hosts, or make the keys that hosts need.

python -m realhf.cluster keys FILE
python -m realhf.cluster status --join tcp://HOST:PORT --key-file FILE
python -m realhf.cluster add    --join tcp://HOST:PORT --key-file FILE --host NAME --kind rollout_worker --count 2
python -m realhf.cluster remove --join tcp://HOST:PORT --key-file FILE --host NAME
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from realhf.base.text import printable
from realhf.cluster.messages import Order
from realhf.cluster.operator import asked
from realhf.cluster.options import ELASTIC
from realhf.transport.errors import TransportError
from realhf.transport.network.keys import RunKeys


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0; 1 with one line on standard error when the launcher refuses or is not there."""
    given = _command_line().parse_args(argv)
    try:
        if given.command == "keys":
            RunKeys.make().write(given.file)
            print(f"{given.file}: keys of a cluster; copy it to every host, mode 600")
            return 0
        order = None
        if given.command != "status":
            order = Order(given.host, getattr(given, "kind", ""), getattr(given, "count", 0))
        report = asked(given.join, given.key_file, given.command, order)
    except (TransportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(printable("\n".join(report.lines)), file=sys.stderr if report.failed else sys.stdout)
    return int(report.failed)


def _command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m realhf.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    keys = commands.add_parser("keys", help="make the keys of a cluster")
    keys.add_argument("file", type=Path, help="a new file, mode 600")
    for name, about in (
        ("status", "print hosts and workers"),
        ("add", "start more workers on a host"),
        ("remove", "let a host leave: its workers end"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("--join", required=True, metavar="tcp://HOST:PORT", help="the launcher's door")
        command.add_argument("--key-file", type=Path, required=True, help="a copy of the cluster's keys")
        if name != "status":
            command.add_argument("--host", required=True, help="name of the host")
        if name == "add":
            command.add_argument("--kind", required=True, choices=ELASTIC)
            command.add_argument("--count", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
