"""The processes of a run. Each is a module that is started by ``python -m``."""

import realhf  # noqa: F401  Its import reports missing packages.
