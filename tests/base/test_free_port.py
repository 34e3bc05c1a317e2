"""A port for a server that starts later."""

import socket

from realhf.base import loopback as free_ports
from realhf.base.loopback import free_port


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
