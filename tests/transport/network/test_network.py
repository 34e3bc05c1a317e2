"""Where sockets listen: on the loopback without keys, on the address that was chosen with them, and
what is said when that is not possible."""

from __future__ import annotations

import socket

import pytest
import zmq

from realhf.api.config import NetworkConfig
from realhf.transport.errors import AddressTaken, NetworkError
from realhf.transport.network import (
    LOOPBACK,
    Network,
    RunKeys,
    find_route_address,
    is_loopback_endpoint,
    list_own_addresses,
    parse_host,
)
from realhf.transport.rpc_master import RpcMaster

KEYS = RunKeys.make()
ELSEWHERE = "192.0.2.7"
"""An address for examples, which no host has."""


@pytest.fixture
def router():
    context = zmq.Context(io_threads=1)
    made = context.socket(zmq.ROUTER)
    yield made
    context.destroy(0)


def test_without_bind_everything_is_on_the_loopback_and_plain(router):
    for network in (
        Network.for_master(NetworkConfig(), None),
        Network.for_worker(NetworkConfig(), None, "tcp://127.0.0.1:1"),
    ):
        assert network == LOOPBACK
    assert LOOPBACK.listen(router).startswith("tcp://127.0.0.1:")
    assert router.getsockopt(zmq.MECHANISM) == zmq.NULL


@pytest.mark.parametrize(
    "bind", [f"tcp://{ELSEWHERE}:0", "tcp://0.0.0.0:0", "tcp://*:0", "ipc:///tmp/socket", "tcp://"]
)
def test_without_keys_nothing_listens_beyond_the_loopback(router, bind):
    with pytest.raises(
        NetworkError, match=r"refusing to listen .* loopback .*network\.bind.*--key-file"
    ):
        LOOPBACK.listen(router, bind)


@pytest.mark.parametrize("host", [ELSEWHERE, "0.0.0.0", "host.example"])
def test_without_keys_no_process_gets_another_address(host):
    with pytest.raises(NetworkError, match="loopback"):
        Network(host, host)


@pytest.mark.parametrize(
    "endpoint", [f"tcp://{ELSEWHERE}:1", "tcp://127.0.0.1;10.0.0.1:1", "ipc:///tmp/socket"]
)
def test_without_keys_nothing_connects_beyond_the_loopback(router, endpoint):
    with pytest.raises(NetworkError, match=r"not on the loopback, .* no keys"):
        LOOPBACK.connect(router, endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1;10.0.0.1:1", "ipc:///tmp/socket", "inproc://x", ""]
)
def test_with_keys_an_endpoint_is_a_host_and_a_port(router, endpoint):
    with pytest.raises(NetworkError, match="tcp://HOST:PORT"):
        Network(keys=KEYS).connect(router, endpoint)


def test_the_master_is_known_by_what_is_advertised(router):
    network = Network.for_master(NetworkConfig("0.0.0.0", "host.example"), KEYS)
    assert network.host != "127.0.0.1"
    assert network.listen(router).startswith("tcp://host.example:")
    assert router.getsockopt_string(zmq.LAST_ENDPOINT).startswith("tcp://0.0.0.0:")
    assert network.public_url("http://0.0.0.0:80") == "http://host.example:80"
    assert network.public_url("http://10.0.0.1:80") == "http://10.0.0.1:80"


def test_a_worker_listens_where_it_reaches_the_master():
    assert (
        Network.for_worker(NetworkConfig("10.0.0.1"), KEYS, "tcp://127.0.0.1:1").host == "127.0.0.1"
    )
    for own in list_own_addresses():
        there = Network.for_worker(NetworkConfig(own), KEYS, f"tcp://{own}:1")
        assert (there.host, there.advertised) == (own, own) == (find_route_address(own), own)
        everywhere = Network.for_worker(NetworkConfig("0.0.0.0", own), KEYS, f"tcp://{own}:1")
        assert (everywhere.host, everywhere.advertised) == ("0.0.0.0", own)


def test_host_names_are_resolved_and_unknown_ones_are_named():
    assert Network.for_master(NetworkConfig("localhost"), KEYS).host == "127.0.0.1"
    with pytest.raises(NetworkError, match=r"network\.bind=a\.invalid: no IPv4 address"):
        Network.for_master(NetworkConfig("a.invalid"), KEYS)
    with pytest.raises(NetworkError, match="no IPv4 address"):
        Network.for_master(NetworkConfig("a" * 70), KEYS)


def test_a_name_that_means_the_loopback_here_is_named(monkeypatch):
    """Systems list the name of the machine itself at 127.0.1.1: listening there, no other host
    would reach it."""
    monkeypatch.setattr("realhf.transport.network.resolve_host", lambda name, option: "127.0.1.1")
    with pytest.raises(NetworkError, match=r"network\.bind=myhost: .* loopback \(127\.0\.1\.1\)"):
        Network.for_master(NetworkConfig("myhost"), KEYS)


def test_an_address_that_is_not_of_this_host_is_named(router):
    with pytest.raises(
        NetworkError,
        match=rf"{ELSEWHERE}:0: no address of this host, which has .* \(network\.bind\)",
    ):
        Network(ELSEWHERE, ELSEWHERE, KEYS).listen(router)


def test_a_port_that_is_taken_is_named(router):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            AddressTaken, match=f"cannot listen on {address}: Address already in use"
        ):
            LOOPBACK.listen(router, address)


@pytest.mark.slow
def test_a_socket_without_a_doorkeeper_takes_nobody(router):
    """What listens in a context that nobody watches over must not take everybody who knows the
    public key."""
    network = Network(keys=KEYS)
    endpoint = network.listen(router)
    context = zmq.Context(io_threads=1)
    try:
        client = context.socket(zmq.DEALER)
        network.connect(client, endpoint)
        client.send(b"hello")
        assert not router.poll(1000)
    finally:
        context.destroy(0)


def test_only_what_is_loopback_by_itself_counts():
    assert all(
        map(is_loopback_endpoint, ("tcp://127.0.0.1:1", "tcp://127.3.2.1:1", "tcp://localhost:1"))
    )
    assert not any(
        map(
            is_loopback_endpoint,
            ("tcp://10.0.0.1:1", "tcp://loopback.example:1", "tcp://*:1", "udp://127.0.0.1:1"),
        )
    )


@pytest.mark.parametrize("endpoint", ["tcp://[::1]:0", "tcp://::1:7788", "tcp://[fe80::1%eth0]:1"])
def test_ipv6_is_refused_by_name(endpoint):
    with pytest.raises(
        NetworkError, match=r"not an address of the form tcp://HOST:PORT; IPv6 is not supported"
    ):
        parse_host(endpoint)
    assert not is_loopback_endpoint(endpoint)


def test_a_token_stands_before_the_host_where_there_are_keys():
    assert LOOPBACK.add_token("http://127.0.0.1:1") == "http://127.0.0.1:1"
    assert Network(keys=KEYS).add_token("http://127.0.0.1:1") == f"http://:{KEYS.token}@127.0.0.1:1"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (NetworkConfig(advertise="a"), ["network.advertise: has no effect without network.bind"]),
        (NetworkConfig(trusted=True), ["network.trusted: has no effect without network.bind"]),
        (
            NetworkConfig("localhost", "a"),
            ["network.advertise: has no effect while network.bind=localhost is the"],
        ),
        (
            NetworkConfig("127.0.0.1", "", True),
            ["network.trusted: has no effect while network.bind=127.0.0.1 is"],
        ),
        (
            NetworkConfig("0.0.0.0"),
            ["network.bind=0.0.0.0: workers cannot connect to this address; set"],
        ),
        (
            NetworkConfig("a", "0.0.0.0"),
            ["network.advertise=0.0.0.0: no process can connect there"],
        ),
        (NetworkConfig("tcp://a"), ["network.bind=tcp://a: give an IPv4 address or a host name"]),
        (NetworkConfig("fe80::1"), ["network.bind=fe80::1: give an IPv4 address or a host name"]),
        (NetworkConfig("a", "b:1"), ["network.advertise=b:1: give an IPv4 address or a host name"]),
        (NetworkConfig("10.0.0.1", "host", True), []),
        (NetworkConfig(), []),
    ],
)
def test_options_that_make_no_sense_together_are_refused(config, said):
    found = list(config.problems("network"))
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


@pytest.mark.parametrize("where", ["that of its heartbeats", "its address"])
async def test_a_master_that_cannot_listen_leaves_no_context_open(monkeypatch, where):
    """Its context, with the thread that looks at keys, stayed for as long as the process."""
    made = []
    listened = []
    context = Network.context
    listen = Network.listen

    def failing(self, socket, bind=""):
        listened.append(bind)
        if where == "its address" and len(listened) == 1:
            return listen(self, socket)
        return listen(self, socket, f"tcp://{ELSEWHERE}:7")

    monkeypatch.setattr(Network, "context", lambda self: made.append(context(self)) or made[-1])
    monkeypatch.setattr(Network, "listen", failing)
    for network in (LOOPBACK, Network(keys=KEYS)):
        listened.clear()
        master = RpcMaster("run", network=network)
        with pytest.raises(NetworkError, match=ELSEWHERE):
            await master.start()
        assert made[-1].closed
        await master.close()
    assert all(each.closed for each in made) and len(made) >= 2
