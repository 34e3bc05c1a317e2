"""First code of a local worker: tie its life to the parent's, then become the module it was started for.

    python -m realhf.scheduler.child PARENT_PID MODULE ARGUMENT...
"""

from __future__ import annotations

import runpy
import sys

from realhf.scheduler.process_control import die_with_parent

if __name__ == "__main__":
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent_pid)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
