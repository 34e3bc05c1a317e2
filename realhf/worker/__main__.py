"""Join this host to the run of a launcher: register with it, and start workers on its request.

    python -m realhf.worker --join tcp://HOST:PORT --key-file FILE --host-agent
    python -m realhf.worker --join tcp://HOST:PORT --key-file FILE --kind rollout_worker --count 4

It may be started before the launcher, and exits with its run.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import realhf
from realhf.cluster.agent import HostAgent, create_temporary_folder
from realhf.cluster.cluster_keys import HostKey, HostKeys
from realhf.cluster.options import ELASTIC, HOST_NAME
from realhf.cluster.own_host import host_name
from realhf.scheduler.process import adopt_orphans, run_guarded
from realhf.transport.errors import NetworkError
from realhf.transport.network import parse_host


def main(argv: Sequence[str] | None = None) -> int:
    """Run the host agent until the launcher's run has ended. Return the exit code: 0, 1 after an
    error, or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument(
        "--join", required=True, metavar="tcp://HOST:PORT", help="the launcher's control endpoint"
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        required=True,
        help="the key of this host (mode 600); -: standard input",
    )
    parser.add_argument(
        "--name",
        help=f"name of this host in the run (that of its key; {host_name()} where the file has "
        f"several)",
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--host-agent", action="store_true", help="the launcher decides what runs here"
    )
    kind.add_argument("--kind", choices=ELASTIC, help="this host gets more workers of this kind")
    parser.add_argument("--count", type=int, default=1, help="with --kind: how many (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="folder for what a run brings (~/.realhf/hosts/NAME)"
    )
    parser.add_argument(
        "--temporary", action="store_true", help="what a run brings is removed when the agent ends"
    )
    parser.add_argument(
        "--patience-s",
        type=float,
        default=600.0,
        help="wait for the launcher so long (%(default)s)",
    )
    parser.add_argument(
        "--linger-s", type=float, default=30.0, help="wait for another run so long (%(default)s)"
    )
    parser.add_argument(
        "--no-prepare",
        action="store_true",
        help="workers import what they need themselves: they begin later, and no memory is held "
        "between runs",
    )
    args = parser.parse_args(argv)
    if args.name is not None and not HOST_NAME.fullmatch(args.name):
        parser.error(f"--name {args.name!r}: use letters, digits, '_', '-' and '.'; at most 63")
    if not 1 <= args.count <= 4096:
        parser.error(f"--count {args.count}: must be between 1 and 4096")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        parse_host(args.join)
        name, key = _read_key(args)
    except (NetworkError, ValueError) as error:
        print(f"error: {error} (--join, --key-file, --name)", file=sys.stderr)
        return 1
    try:
        return run_guarded(lambda: _serve(name, key, args))
    except KeyboardInterrupt:  # the agent has already ended its workers
        return 128 + signal.SIGINT


def _read_key(args: argparse.Namespace) -> tuple[str, HostKey]:
    """Return the name and key of this host. Raises NetworkError, or ValueError if the key file is
    not text."""
    keys = HostKeys.read(args.key_file.expanduser())
    name = args.name or (next(iter(keys.hosts)) if len(keys.hosts) == 1 else host_name())
    return name, keys.key_of(name)


def _serve(name: str, key: HostKey, args: argparse.Namespace) -> None:
    default_folder = args.folder or Path("~/.realhf/hosts").expanduser() / name
    with (
        create_temporary_folder()
        if args.temporary
        else contextlib.nullcontext(default_folder.absolute()) as folder
    ):
        _run_agent(folder, name, key, args)


def _run_agent(folder: Path, name: str, key: HostKey, args: argparse.Namespace) -> None:
    agent = HostAgent(
        args.join,
        key,
        name,
        folder,
        wants={args.kind: args.count} if args.kind else {},
        patience_s=args.patience_s,
        linger_s=args.linger_s,
        prepare=not args.no_prepare,
    )
    with adopt_orphans():
        agent.run()


if __name__ == "__main__":
    sys.exit(main())
