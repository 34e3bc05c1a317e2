"""Prints the page of all metrics: ``python -m realhf.monitor.metrics > docs/metrics.md``."""

from __future__ import annotations

import sys

from realhf.monitor.metrics.page import page

if __name__ == "__main__":
    sys.stdout.write(page())
