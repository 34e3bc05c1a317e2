"""Is the command ``python -m realhf.env play``."""

from __future__ import annotations

import argparse
import random
import sys

from rich.console import Console

from realhf.api.environment import SPLITS, TRAIN
from realhf.env.check.calls import CallFailed
from realhf.env.check.command import seconds
from realhf.env.check.user_code import UserCode, folders_of
from realhf.env.doors.load import build_environment
from realhf.env.doors.options import parse_options
from realhf.env.play.board import Board
from realhf.env.play.commands import HELP_TEXT
from realhf.env.play.game import Game
from realhf.env.play.lines import PipedLines, TerminalLines

ABOUT = f"""\
Play an environment by hand: you are the policy. Without a terminal, lines are read from standard input.

{HELP_TEXT}"""
"""Shown by ``--help``."""
_LARGEST_SEED = 1 << 31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = ABOUT
    parser.add_argument("reference", metavar="ENVIRONMENT", help="a registered name, file.py:Name or module:Name")
    parser.add_argument("options", nargs="*", default=[], metavar="option=value", help="options of the environment")
    parser.add_argument("--task", default="", metavar="ID", help="template of the task (drawn)")
    parser.add_argument("--seed", type=int, help="instance of the task (drawn)")
    parser.add_argument("--split", choices=SPLITS, default=TRAIN, help="tasks of training, or those held out")
    parser.add_argument("--timeout", type=seconds, default=60.0, metavar="S", help="seconds one call may take (60)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Play until the person has had enough. Returns the exit status; raises ValueError for wrong arguments."""
    spec = build_environment(arguments.reference, parse_options(arguments.options))
    if spec.launch is not None:
        raise ValueError(
            f"{spec.name} is played on a service ({spec.launch.module}), which `play` does not start; a service may "
            "have a page of its own for that"
        )
    seed = random.randrange(_LARGEST_SEED) if arguments.seed is None else arguments.seed
    lines = TerminalLines() if sys.stdin.isatty() and sys.stdout.isatty() else PipedLines(console)
    board = Board(console)
    game = Game(spec, board, UserCode(folders_of(arguments.reference)), arguments.timeout)
    try:
        if sys.stdin.isatty():
            board.line("/help shows the commands, /quit ends", "dim")
        return game.play(lines, arguments.split, arguments.task, seed)
    except KeyboardInterrupt:
        board.line("\ninterrupted", "dim")
        return 130
    finally:
        try:
            game.close()
        except CallFailed as error:
            board.line(f"the environment failed: {error.what}", "red")
