"""A process that starts collects rarely, and as usual once it has settled."""

import subprocess
import sys

PROCESS = """
import gc

usual = gc.get_threshold()
from realhf.base.process import collect_rarely, settle

collect_rarely()
assert all(rare > often for rare, often in zip(gc.get_threshold(), usual, strict=True)), gc.get_threshold()
frozen = gc.get_freeze_count()
settle()
assert gc.get_threshold() == usual and gc.get_freeze_count() > frozen + 1000
circle = []
circle.append(circle)
del circle
assert gc.collect() >= 1
print("settled")
"""


def test_what_is_there_when_it_settles_is_left_out_and_what_comes_later_is_collected():
    """In a process of its own: the tests' own process collects rarely all the time."""
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("settled\n", "", 0)
