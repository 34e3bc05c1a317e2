"""Processes of a run. Each module is a process that is started with ``python -m``."""

import realhf  # noqa: F401  Its import reports missing packages.
