"""What a launcher of tests has: its file of keys with a key for each host that is asked for, and a
run folder."""

from __future__ import annotations

import json
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
        return self.keys_of(name).key_of(name)

    def file_of(self, name: str) -> Path:
        """A file with the key of a host."""
        path = self.file.with_name(f"{self.file.name}-{name}")
        if not path.exists():
            write_private(path, self.keys_of(name).text())
        return path


ASYNCHRONOUS = {"options": {"weights": "fetch"}}


def run_folder(folder: Path, rollout: object = ASYNCHRONOUS) -> Path:
    """Make a run folder whose plan needs nothing; ``rollout`` is None of a synchronous run."""
    run = folder / "exp" / "run"
    (run / "logs").mkdir(parents=True)
    plan = {"spec": {"models": {}, "source": {}, "rollout": rollout}, "plugins": []}
    (run / "plan.json").write_text(json.dumps(plan))
    return run


def log_of(run: Path, worker: str) -> Path:
    """Where a worker of a run writes its log."""
    return run / "logs" / f"{worker.replace('/', '-')}.log"
