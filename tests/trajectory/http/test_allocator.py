"""Freed buffers stay with the process, up to a bound."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import platform, resource, sys
from realhf.trajectory.http.server import keep_buffers

if sys.argv[1] == "kept" and not keep_buffers():
    sys.exit(77)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

buffer = b"x" * (2 << 20)
before = faults()
for _ in range(50):
    parts = [bytearray(buffer) for _ in range(4)]
    del parts
print(faults() - before)
"""


def page_faults(way: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, way], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 77:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_kept_buffers_cost_no_new_pages():
    assert page_faults("kept") * 3 < page_faults("as it was")
