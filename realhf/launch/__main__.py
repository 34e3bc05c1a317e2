"""The launcher's command line.

python -m realhf.launch experiment=NAME [key=value ...]
python -m realhf.launch [experiment=NAME] --help
python -m realhf.launch --options-reference
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import realhf
from realhf.api.config import ConfigError, Mode
from realhf.base.terminal import Terminal, guard_output
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config

HELP = frozenset({"-h", "--help"})
ABOUT = HELP | {"--version", "--options-reference"}
"""Arguments that print information instead of starting a run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a launch and return its exit code.

    0: success; 1: a process failed; 2: the configuration is invalid; 130 or 143: stopped by SIGINT
    or SIGTERM. The loss of the terminal (as with ``| head``) affects neither the run nor the exit
    code.
    """
    started_at = time.time()
    with guard_output() as terminal:
        return _main(sys.argv[1:] if arguments is None else list(arguments), started_at, terminal)


def _main(arguments: Sequence[str], started_at: float, terminal: Terminal) -> int:
    try:
        if not arguments or ABOUT & set(arguments):
            print(_about(arguments))
            return 0

        from realhf.launch.build import build_experiment, find_warnings, print_check, print_graph

        composed = compose_config(arguments)
        check_config(composed.config, composed.machine)
        built = build_experiment(composed)
        for line in (*composed.warnings, *find_warnings(built)):
            if line:
                print(f"warning: {line}", file=sys.stderr)
        for line in composed.notes:
            print(f"note: {line}", file=sys.stderr)
        if composed.config.mode is Mode.graph:
            return print_graph(built)

        from realhf.launch.resume import check_resume
        from realhf.launch.tool_calls import check_tool_calls

        if composed.config.mode is Mode.show:
            from realhf.launch.run import show_rows

            return show_rows(built)
        check_tool_calls(built)
        resumption = check_resume(built.config, built.effective)
        if composed.config.mode is Mode.check:
            return print_check(built, arguments)

        from realhf.launch.run import run_to_the_end

        return run_to_the_end(built, arguments, started_at, resumption, terminal)
    except ConfigError as error:
        print(
            "\n".join(f"config error: {line}" for line in str(error).splitlines()), file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("error: stopped by SIGINT", file=sys.stderr)
        return 130


def _about(arguments: Sequence[str]) -> str:
    """Return the information that the arguments request: the version, the reference page, or the
    help for one experiment or all."""
    if "--version" in arguments:
        return f"realhf {realhf.__version__}"

    from realhf.launch.help import experiment_help, help_text, options_reference

    if "--options-reference" in arguments:
        return options_reference().rstrip()
    rest = [text for text in arguments if text not in HELP]
    return experiment_help(rest) if rest else help_text()


if __name__ == "__main__":
    sys.exit(main())
