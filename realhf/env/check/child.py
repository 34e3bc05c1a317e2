"""Is the process that an environment is checked in: ``python -m realhf.env.check.child DESCRIPTOR FOLDER``.

It may hang, exit or crash at any point, because the environment's code runs in it; ``supervisor`` watches it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realhf.env.check.checker import Checker
from realhf.env.check.report import ABOUT, DUMP, ENDED, EXIT, ORDER, Finding, Order, Reporter, quoted
from realhf.env.containment.sandbox import die_with_parent


def main(argv: Sequence[str]) -> int:
    """Check what the order says and report. Returns the exit status."""
    die_with_parent()
    descriptor, folder = int(argv[0]), Path(argv[1])
    order = Order(**json.loads((folder / ORDER).read_text(encoding="utf-8")))
    os.set_inheritable(descriptor, False)
    reporter = Reporter(descriptor)
    # The file stays open as long as the process lives: a crash writes to it.
    file = open(folder / DUMP, "w")  # noqa: SIM115
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    checker = Checker(order, reporter.tell)
    leave = os._exit

    def exits(status: int) -> Any:
        """Say which line called it, and exit."""
        reporter.tell(ABOUT, {EXIT: [status, checker.code.of_frame(sys._getframe(1))]})
        leave(status)

    os._exit = exits
    try:
        checker.run()
    except BaseException as error:
        what = f"the check itself failed: {quoted(traceback.format_exception_only(error)[-1])}"
        checker.add(Finding("check", what, "Report this, with the environment"))
    reporter.tell(ABOUT, {ENDED: True})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
