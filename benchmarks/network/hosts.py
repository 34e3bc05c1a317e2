"""Two network namespaces on this machine, connected like two hosts by a virtual Ethernet cable."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
NAMES = Path("/run/netns")
_COMMAND_S = 30.0


class NoNamespaces(RuntimeError):
    """This machine or user cannot create network namespaces."""


@dataclass(frozen=True)
class Host:
    """A network namespace, with the interface ``cable`` at ``address``."""

    name: str
    address: str

    @property
    def enter(self) -> list[str]:
        """Words to put before a command so that it runs in this namespace."""
        return ["ip", "netns", "exec", self.name]

    def run(self, *command: str) -> str:
        """Run a command in this namespace and return its output. Raises CalledProcessError."""
        return command_output(*self.enter, *command)

    @contextlib.contextmanager
    def cut_off_from(self, other: Host) -> Iterator[None]:
        """Context manager that drops what this host sends to the other one. The other direction
        still works."""
        command_output("ip", "-n", self.name, "route", "add", "blackhole", f"{other.address}/32")
        try:
            yield
        finally:
            command_output(
                "ip", "-n", self.name, "route", "del", "blackhole", f"{other.address}/32"
            )

    def slow_down(self, mbit_s: float) -> None:
        """Limit this host's sending rate from now on."""
        shape = ["root", "tbf", "rate", f"{mbit_s:g}mbit", "burst", "32kbit", "latency", "400ms"]
        command_output("tc", "-n", self.name, "qdisc", "add", "dev", "cable", *shape)

    def received_bytes(self) -> int:
        """Return the number of bytes received on the interface ``cable``."""
        (link,) = json.loads(
            command_output("ip", "-n", self.name, "-s", "-j", "link", "show", "cable")
        )
        return int(link["stats64"]["rx"]["bytes"])

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager that moves the calling thread into this namespace, with the sockets,
        processes and threads that it creates."""
        libc = ctypes.CDLL(None, use_errno=True)
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(NAMES / self.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(there, CLONE_NEWNET) != 0:
                raise NoNamespaces(f"setns: {os.strerror(ctypes.get_errno())}")
            try:
                yield
            finally:
                if libc.setns(own, CLONE_NEWNET) != 0:
                    raise NoNamespaces(f"setns back: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(own)
            os.close(there)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Context manager that creates two connected hosts and removes them at the end. Raises
    NoNamespaces with the reason."""
    if shutil.which("ip") is None:
        raise NoNamespaces("the command ip is missing (apt-get install iproute2)")
    tag = secrets.token_hex(3)
    net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
    hosts = [Host(f"realhf-{tag}-{number}", f"{net}.{number}") for number in (1, 2)]
    made: list[Host] = []
    try:
        try:
            for host in hosts:
                command_output("ip", "netns", "add", host.name)
                made.append(host)
            first, second = hosts
            ends = [
                "name",
                "cable",
                "netns",
                first.name,
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                second.name,
            ]
            command_output("ip", "link", "add", *ends)
            for host in hosts:
                command_output(
                    "ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable"
                )
                for link in ("cable", "lo"):
                    command_output("ip", "-n", host.name, "link", "set", link, "up")
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", "") or str(error)
            raise NoNamespaces(f"network namespaces cannot be made: {said.strip()}") from None
        yield first, second
    finally:
        for host in made:
            with contextlib.suppress(subprocess.SubprocessError):
                command_output("ip", "netns", "del", host.name)


def command_output(*command: str) -> str:
    """Run a command and return its output. Raises CalledProcessError or TimeoutExpired."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_COMMAND_S
    ).stdout
