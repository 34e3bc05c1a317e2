"""Several network namespaces connected by a bridge, like hosts at one switch. Each can be
unplugged."""

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
    """Connected hosts by name. ``switch``: name of the namespace with the bridge."""

    hosts: dict[str, Host]
    switch: str

    def unplug(self, name: str) -> None:
        """Disconnect a host from all others, in both directions."""
        command_output("ip", "-n", self.switch, "link", "set", f"to-{name}", "down")

    def plug(self, name: str) -> None:
        """Connect an unplugged host again."""
        command_output("ip", "-n", self.switch, "link", "set", f"to-{name}", "up")


@contextlib.contextmanager
def lan(names: Sequence[str]) -> Iterator[Lan]:
    """Context manager that creates connected hosts with these names (at most eight characters) and
    removes them at the end. Raises NoNamespaces with the reason."""
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
