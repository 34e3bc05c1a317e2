"""Makes several network namespaces that see each other over a bridge, as hosts at one switch; each
can be unplugged."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.network.hosts import Host, NoNamespaces, command_output


@dataclass(frozen=True)
class Lan:
    """The hosts by the names that they were asked for, and the namespace that holds the bridge."""

    hosts: dict[str, Host]
    switch: str

    def unplug(self, name: str) -> None:
        """Let nothing pass between a host and the others, in both directions."""
        command_output("ip", "-n", self.switch, "link", "set", f"to-{name}", "down")

    def plug(self, name: str) -> None:
        """Connect a host again."""
        command_output("ip", "-n", self.switch, "link", "set", f"to-{name}", "up")


@contextlib.contextmanager
def lan(names: Sequence[str]) -> Iterator[Lan]:
    """Make hosts with these names of at most eight characters, and take them away at the end.
    Raises NoNamespaces with the reason."""
    if shutil.which("ip") is None:
        raise NoNamespaces("the command ip is missing (apt-get install iproute2)")
    tag = secrets.token_hex(3)
    net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
    switch = f"realhf-{tag}-switch"
    hosts = {
        name: Host(f"realhf-{tag}-{name}", f"{net}.{number}")
        for number, name in enumerate(names, 1)
    }
    made: list[str] = []
    try:
        try:
            for namespace in (switch, *(host.name for host in hosts.values())):
                command_output("ip", "netns", "add", namespace)
                made.append(namespace)
            command_output("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            command_output("ip", "-n", switch, "link", "set", "bridge", "up")
            for name, host in hosts.items():
                _plug_in(name, host, switch)
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", "") or str(error)
            raise NoNamespaces(f"network namespaces cannot be made: {said.strip()}") from None
        yield Lan(hosts, switch)
    finally:
        for namespace in made:
            with contextlib.suppress(subprocess.SubprocessError):
                command_output("ip", "netns", "del", namespace)


def _plug_in(name: str, host: Host, switch: str) -> None:
    ends = [
        "name",
        "cable",
        "netns",
        host.name,
        "type",
        "veth",
        "peer",
        "name",
        f"to-{name}",
        "netns",
        switch,
    ]
    command_output("ip", "link", "add", *ends)
    command_output("ip", "-n", switch, "link", "set", f"to-{name}", "master", "bridge", "up")
    command_output("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
    for link in ("cable", "lo"):
        command_output("ip", "-n", host.name, "link", "set", link, "up")
