"""Reinforcement learning for tool-using agents: a dataflow of model calls, environments and a
trajectory server."""

import sys

__version__ = "0.1.0"
"""The only definition of the version; packaging and every ``--version`` read it."""

# run as ``python -m realhf...``; programs that import the package keep their own hook
if sys.argv[:1] == ["-m"]:
    from realhf.base.installation import explain_missing_packages

    explain_missing_packages()
