"""Shows runs on a local page: python -m realhf.view RUN_OR_FOLDER [...] [--follow] [--port 8765]

python -m realhf.view export RUN --to jsonl|parquet|inspect OUT writes a run's rollouts for other
programs. python -m realhf.view note RUN ["text"] [--tag TAG] writes down what you have to say about
a run, or prints it. python -m realhf.view report RUN [--no-rollouts] writes the page as one file,
report.html, into the run's folder.

A run in progress is followed with --follow; one that ended or was killed is read as it is. Several
runs, or a folder of runs, are compared. Nothing is written, and the page is served to this machine
only.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import realhf
from realhf.monitor.rollouts.export import export_command
from realhf.view.report import report_command
from realhf.view.run import Run, RunList
from realhf.view.run_folder import MARKS, is_run, note_command
from realhf.view.server import create_app
from realhf.web.connections import guarded_http

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

PORT = 8765
"""Default port of the page."""
COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "export": export_command,
    "note": note_command,
    "report": report_command,
}
"""Other commands, by their first word. A run with such a name is given as ./note."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until interrupted, or run another command; return the exit code."""
    given_words = sys.argv[1:] if arguments is None else list(arguments)
    if given_words and (command := COMMANDS.get(given_words[0])):
        return command(given_words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m realhf.view",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_OR_FOLDER")
    parser.add_argument(
        "--follow", action="store_true", help="show new steps and rollouts as they are written"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"port on 127.0.0.1; 0: a free one (default {PORT})"
    )
    options = parser.parse_args(given_words)
    runs = RunList(options.runs)
    runs_found = [run for run in runs.refresh() if is_run(run.folder)]
    if problem := _find_problem(options.runs, runs_found, options.follow):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except (OSError, OverflowError) as error:
        print(
            f"error: --port {options.port}: {error}; name another port, or 0 for a free one",
            file=sys.stderr,
        )
        return 2
    with listener:
        left_off = len(runs.left_off())
        of = f" of {len(runs_found) + left_off}" if left_off else ""
        word = "run" if len(runs_found) + left_off == 1 else "runs"
        status = (
            f"{len(runs_found) or 'no'}{of} {word}{'' if runs_found else ' yet'} on "
            f"http://127.0.0.1:{listener.getsockname()[1]}/"
        )
        print(f"{status} (Ctrl-C ends)", flush=True)
        _serve(runs, options.follow, listener)
    return 0


def _find_problem(folders: Sequence[Path], runs_found: Sequence[Run], follow: bool) -> str:
    """Return why the folders cannot be shown, or ""."""
    for folder in folders:
        if not folder.exists():
            return f"there is no {folder}"
        if not folder.is_dir():
            return f"{folder} is a file; name the folder of a run, or a folder of runs"
    if runs_found or follow:
        return ""
    return (
        f"no run in {', '.join(map(str, folders))} (a run has {' or '.join(MARKS)}); --follow "
        f"waits for one"
    )


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """Return the uvicorn settings of the page."""
    import uvicorn

    return uvicorn.Config(
        app,
        http=guarded_http(),
        log_level="warning",
        ws="none",
        timeout_graceful_shutdown=1,
        lifespan="off",
    )


def _serve(runs: RunList, follow: bool, listener: socket.socket) -> None:
    import uvicorn

    uvicorn.Server(uvicorn_config(create_app(runs, follow=follow))).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
