"""Reinforcement learning for tool-using agents: a dataflow of model calls, environments and a
trajectory server."""

import sys

__version__ = "0.1.0"
"""The one place that says the version: packaging and every ``--version`` read it here."""

if sys.argv[:1] == [
    "-m"
]:  # by ``python -m realhf.launch``: a program that imports the package keeps its own hook
    from realhf.base.installation import explain_missing_packages

    explain_missing_packages()
