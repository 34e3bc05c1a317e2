"""A helper process whose engine takes long to start: it makes the file that the plan names, waits,
and removes it when it is stopped. ``python -m tests.cluster.engines.slow_engine``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.cluster.engines.engine_process import serve


class SlowEngine:
    def __init__(self) -> None:
        self._made: Path | None = None

    def start(self, plan: Mapping[str, Any]) -> None:
        self._made = Path(plan["file"])
        self._made.touch()
        time.sleep(plan["seconds"])

    def problem(self) -> str:
        return ""

    def stop(self) -> None:
        if self._made is not None:
            self._made.unlink(missing_ok=True)


if __name__ == "__main__":
    serve(SlowEngine())
