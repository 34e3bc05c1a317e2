"""Parse, build, run.

python -m realhf.launch experiment=NAME [key=value ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import realhf
from realhf.api.config import ConfigError, Mode
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config, help_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: a process failed; 2: a mistake in the configuration; 130, 143: stopped."""
    started_at = time.time()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    if "--version" in arguments:
        print(f"realhf {realhf.__version__}")
        return 0
    try:
        composed = compose_config(arguments)

        from realhf.launch.build import build_experiment, experiment_module, print_check, print_graph

        experiment_module(composed.config)  # options may name what it registers
        check_config(composed.config)
        built = build_experiment(composed)
        if composed.config.mode is Mode.graph:
            return print_graph(built)
        if composed.config.mode is Mode.check:
            return print_check(built)

        from realhf.launch.run import run_to_the_end

        return run_to_the_end(built, arguments, started_at)
    except ConfigError as error:
        print("\n".join(f"config error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: stopped by SIGINT", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
