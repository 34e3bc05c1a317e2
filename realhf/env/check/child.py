"""Is the process that an environment is checked in: ``python -m realhf.env.check.child DESCRIPTOR FOLDER``.

It may hang, exit or crash at any point, because the environment's code runs in it; ``supervisor`` watches it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realhf.env.check.judge import Judge
from realhf.env.check.report import CRASH, DUMP, END, EXIT, ORDER, Order, Reporter
from realhf.env.containment.sandbox import die_with_parent


def main(argv: Sequence[str]) -> int:
    """Check what the order says and report. Returns the exit status."""
    die_with_parent()
    descriptor, folder = int(argv[0]), Path(argv[1])
    order = Order.from_text((folder / ORDER).read_text(encoding="utf-8"))
    os.set_inheritable(descriptor, False)
    reporter = Reporter(descriptor)
    # The file stays open as long as the process lives: a crash writes to it.
    file = open(folder / DUMP, "w")  # noqa: SIM115
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    judge = Judge(order, reporter)
    _report_exits(judge, reporter)
    try:
        judge.run()
    except BaseException:
        reporter.tell(CRASH, traceback.format_exc())
        return 1
    reporter.tell(END)
    return 0


def _report_exits(judge: Judge, reporter: Reporter) -> None:
    """Have ``os._exit`` say which line called it."""
    leave = os._exit

    def exits(status: int) -> Any:
        reporter.tell(EXIT, status, judge.code.of_frame(sys._getframe(1)))
        leave(status)

    os._exit = exits


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
