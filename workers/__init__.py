"""The processes of a run; each is a module that ``python -m`` starts."""

import realhf  # noqa: F401  It names packages that are missing.
