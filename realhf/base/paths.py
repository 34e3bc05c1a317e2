"""Says where the package, the folder it is imported from and the configurations lie.

No other module derives a folder from the place of its own file, so files may move between rooms.
"""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(os.path.abspath(__file__)).parent.parent
"""The folder ``realhf`` itself, in a checkout or among the installed packages."""
IMPORT_ROOT = PACKAGE.parent
"""What stands on the import path, so that ``realhf``, ``workers``, ``experiments`` and ``configs`` are found."""
CONFIGS = IMPORT_ROOT / "configs"
"""The YAML files that a run is composed of."""
