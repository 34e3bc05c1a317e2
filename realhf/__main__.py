"""Overview of the commands: python -m realhf [--version]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import realhf
from realhf.base.terminal import guard_output

COMMANDS = {
    "python -m "
    "realhf.launch": "train: experiment=NAME [key=value ...], --help, --options-reference",
    "python -m realhf.view": "show runs on a local page, export their rollouts, write notes",
    "python -m realhf.env": "check, init, list or play an environment",
    "python -m realhf.aws.tasks": "validate the tasks of the AWS environment",
    "python -m realhf.aws.evaluate": "play a model folder on tasks and print its success",
    "python -m realhf.cluster": "keys of hosts; status of a run, hosts added and removed",
    "python -m realhf.worker": "lend this host to a run on several hosts",
    "aws-env": "serve the AWS environment over the OpenEnv wire (also python -m "
    "workers.env_worker)",
    "run-api": "serve the trajectory server (also python -m realhf.trajectory)",
    "train-api": "serve the training API of the client tinker (also python -m realhf.tinker)",
}
"""Commands for users, and their descriptions. Each has ``--help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the commands, or the version. Return the exit code."""
    width = max(map(len, COMMANDS))
    lines = [f"  {command.ljust(width)}  {about}" for command, about in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m realhf",
        description="\n".join(
            ["Nothing runs by this name alone. The commands (each has --help):", *lines]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    with guard_output():  # closing the pipe early is no error
        parser.parse_args(argv)
        print(parser.description)
    return 0


if __name__ == "__main__":
    sys.exit(main())
