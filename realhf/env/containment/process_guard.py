"""Applies the layers that every kind of contained process takes on right after its fork."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from realhf.env.containment import sandbox, seccomp

HOOKS, FILTER, LIMITS, NETWORK, BUBBLEWRAP = LAYERS = ("hooks", "filter", "limits", "network", "bubblewrap")
"""The layers: audit hooks of the interpreter, system call filter, resource limits, an empty network, a file system of
its own."""
_SET_ASIDE_BYTES = 3 << 29


@dataclass(frozen=True)
class ProcessGuard:
    """Holds the resource limits of one kind of process: bytes of a file that it writes, descriptors, bytes of private
    memory, seconds of CPU. ``may_lack``: layers without which it may run."""

    file_bytes: int
    open_files: int
    memory_bytes: int
    cpu_s: int
    may_lack: frozenset[str] = frozenset()
    read_roots: tuple[str, ...] = field(default_factory=sandbox.package_roots)

    @property
    def address_bytes(self) -> int:
        """Most bytes of addresses: with what is shared, and what allocators set aside for threads and never touch."""
        return self.memory_bytes + _SET_ASIDE_BYTES

    def apply(
        self,
        folder: str,
        on_denied: Callable[[str, str], None] | None = None,
        writes: sandbox.WriteBudget | None = None,
    ) -> None:
        """Contain this process for good; of the host's files only those in ``folder`` can be written. Needs a single
        thread. Raises RuntimeError naming a layer that does not hold and may not be missing."""
        sandbox.forbid_new_privileges()
        if not seccomp.install() and FILTER not in self.may_lack:
            raise RuntimeError("the system call filter could not be installed")
        sandbox.limit_resources(
            file_bytes=self.file_bytes,
            open_files=self.open_files,
            memory_bytes=self.memory_bytes,
            address_bytes=self.address_bytes,
            cpu_s=self.cpu_s,
        )
        sandbox.AuditGuard(self.read_roots, (folder,), on_denied, writes).install()
        if HOOKS not in self.may_lack:
            sandbox.prove_containment()
