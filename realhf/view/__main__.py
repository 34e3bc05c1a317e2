"""Shows runs on a local page: python -m realhf.view RUN_OR_FOLDER [...] [--follow] [--port 8765]

python -m realhf.view export RUN --to jsonl|parquet|inspect OUT writes a run's rollouts for other programs.

A run that goes on is followed with --follow; one that ended or was killed is read as it is. Several runs, or a folder
of runs, are compared. Nothing is written, and the page is served to this machine only.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from realhf.monitor.rollouts.export.command import export_command
from realhf.view.run_list import RunList
from realhf.view.server import create_app

PORT = 8765
EXPORT = "export"
"""The first word of another command: a run of this name is given as ./export."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until interrupted, or do what ``export`` says; return the exit code."""
    given_words = sys.argv[1:] if arguments is None else list(arguments)
    if given_words[:1] == [EXPORT]:
        return export_command(given_words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m realhf.view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_OR_FOLDER")
    parser.add_argument("--follow", action="store_true", help="show new steps and rollouts as they are written")
    parser.add_argument("--port", type=int, default=PORT, help=f"port on 127.0.0.1; 0: a free one (default {PORT})")
    given = parser.parse_args(given_words)
    absent = [str(path) for path in given.runs if not path.exists()]
    if absent:
        print(f"error: there is no {', no '.join(absent)}", file=sys.stderr)
        return 2
    runs = RunList(given.runs)
    found = runs.refresh()
    try:
        listener = socket.create_server(("127.0.0.1", given.port))
    except (OSError, OverflowError) as error:
        print(f"error: --port {given.port}: {error}; name another port, or 0 for a free one", file=sys.stderr)
        return 2
    with listener:
        left_off = len(runs.left_off())
        of = f" of {len(found) + left_off}" if left_off else ""
        word = "run" if len(found) + left_off == 1 else "runs"
        said = f"{len(found)}{of} {word} on http://127.0.0.1:{listener.getsockname()[1]}/"
        print(f"{said} (Ctrl-C ends)", flush=True)
        _serve(runs, given.follow, listener)
    return 0


def _serve(runs: RunList, follow: bool, listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        create_app(runs, follow=follow), log_level="warning", ws="none", timeout_graceful_shutdown=1, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
