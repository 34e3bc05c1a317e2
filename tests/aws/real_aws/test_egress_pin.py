"""The child that needs the network reaches the endpoints it was told of, and nothing else on either
layer."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys

import pytest

from realhf.aws.cli.policy import RefusedRequest
from realhf.aws.real_aws.cli import EgressPin

_CHILD = r"""
import json, socket, sys, urllib.request
from realhf.env.containment import sandbox
from realhf.aws.real_aws.cli import EgressPin
good, bad = int(sys.argv[1]), int(sys.argv[2])
pin = EgressPin()
pin.allow(f"http://localhost:{good}")
pin.watch()
sandbox.AuditGuard(sandbox.package_roots(), egress=pin.allows_event).install()
def attempt(action):
    try:
        action()
    except sandbox.Denied:
        return "denied"
    except OSError as error:
        return type(error).__name__
    return "done"
def send_to(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        channel.sendto(b"x", ("127.0.0.1", port))
print(json.dumps([
    attempt(lambda: socket.create_connection(("localhost", good), 5).close()),
    attempt(lambda: socket.create_connection(("localhost", bad), 5)),
    attempt(lambda: socket.socket().connect(("127.0.0.1", bad))),
    attempt(lambda: urllib.request.urlopen(f"http://127.0.0.1:{bad}/", timeout=300)),
    attempt(lambda: socket.getaddrinfo("example.com", 443)),
    attempt(lambda: socket.gethostbyname("example.com")),
    attempt(lambda: send_to(bad)),
    attempt(lambda: socket.socket().bind(("127.0.0.1", 0))),
]))
"""


@pytest.mark.slow
def test_only_the_named_endpoint_is_reached() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as good,
        socket.create_server(("127.0.0.1", 0)) as bad,
    ):
        ports = [str(listener.getsockname()[1]) for listener in (good, bad)]
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, *ports],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == ["done"] + ["denied"] * 7
        assert not select.select([bad], [], [], 0)[0]


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://s3.amazonaws.com/x", True),
        ("https://bucket.s3.amazonaws.com/k", True),
        ("https://S3.AMAZONAWS.COM:443/", True),
        ("http://s3.amazonaws.com/", False),
        ("https://s3.amazonaws.com:444/", False),
        ("https://evils3.amazonaws.com/", False),
        ("https://s3.amazonaws.com.evil.example/", False),
        ("https://s3.amazonaws.com@evil.example/", False),
        ("https://bucket.s3-accesspoint.us-east-1.amazonaws.com/", False),
        ("https://169.254.169.254/", False),
        ("https:///", False),
    ],
)
def test_urls_are_compared_by_host_and_port(url: str, allowed: bool) -> None:
    pin = EgressPin()
    pin.allow("https://s3.amazonaws.com", with_subdomains=True)
    if allowed:
        pin.check_url(url)
        return
    with pytest.raises(RefusedRequest, match="endpoints of AWS"):
        pin.check_url(url)
