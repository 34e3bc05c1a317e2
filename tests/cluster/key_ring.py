"""Keys of a cluster for tests: the launcher's file, and a key for each host that is asked for."""

from __future__ import annotations

from pathlib import Path

from realhf.cluster.cluster_keys import HostKey, HostKeys, add_hosts, make_keys
from realhf.transport.network import write_private


class KeyRing:
    """Makes the launcher's ``file``, and draws each host's key once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        make_keys(file)
        self._drawn: dict[str, HostKeys] = {}

    def keys_of(self, name: str) -> HostKeys:
        """The keys of a host, as its agent is given them."""
        if name not in self._drawn:
            self._drawn[name] = add_hosts(self.file, [name])
        return self._drawn[name]

    def of(self, name: str) -> HostKey:
        """The key of a host."""
        return self.keys_of(name).of(name)

    def file_of(self, name: str) -> Path:
        """A file with the key of a host."""
        path = self.file.with_name(f"{self.file.name}-{name}")
        if not path.exists():
            write_private(path, self.keys_of(name).text())
        return path
