"""A process that starts collects rarely, and as usual once it has settled."""

import socket
import subprocess
import sys

from realhf.base import loopback as free_ports
from realhf.base.loopback import free_port

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


def test_a_free_port_can_be_listened_at_and_is_not_one_of_those_that_the_kernel_gives_away():
    """Somebody else's connection had it a moment later, and the server did not come up."""
    for _ in range(20):
        port = free_port()
        assert port in free_ports._PORTS
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_is_taken_is_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(free_ports, "_PORTS", [port])
        assert free_port() != port
