"""python -m realhf.env check|init|list|play: try an environment, write one, list the registered
ones, play one.

python -m realhf.env list
python -m realhf.env init guess
python -m realhf.env check guess.py:Guess
python -m realhf.env play guess.py:Guess
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

import realhf
from realhf.env import listing
from realhf.env import play as play
from realhf.env import scaffold as init
from realhf.env.check import command as check

COMMANDS = {
    "check": (check, "play an environment and say what is wrong with it"),
    "init": (init, "write a working start for an environment of your own, with a test"),
    "list": (listing, "list the registered environments"),
    "play": (play, "play an environment by hand"),
}
"""Commands by name: (module, description for the help)."""
_FILE_COLUMNS = 160
"""Width of tables, in columns, if the output is not a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return its exit status, 2 for wrong arguments, or 130 after an interrupt."""
    arguments = _parse(_build_parser(), argv)
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
    try:
        return COMMANDS[arguments.command][0].run(arguments, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe; output that Python flushes at exit is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"error: {message} ({self.prog} --help)\n")


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; options of an environment may appear anywhere among the others."""
    arguments, unknown = parser.parse_known_args(argv)
    for text in unknown:
        if text.startswith("-") or not hasattr(arguments, "options"):
            parser.error(f"unrecognized argument {text!r}")
        arguments.options = [*arguments.options, text]
    return arguments


def _build_parser() -> argparse.ArgumentParser:
    text = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="python -m realhf.env", description=__doc__, formatter_class=text)
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, about) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=about, formatter_class=text))
    return parser


if __name__ == "__main__":
    sys.exit(main())
