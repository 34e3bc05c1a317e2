"""Decides which layers hold the processes of a pool, before it starts, and states each in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from realhf.env.containment import bubblewrap
from realhf.env.containment.process_guard import BUBBLEWRAP, FILTER, HOOKS, LAYERS, LIMITS, NETWORK

SANDBOX_MODES = ("auto", "bwrap", "plain")
LAMBDA_MODES = ("stub", "sandbox")


class NotContained(RuntimeError):
    """Code of an agent could reach the host, so nothing is served."""


@dataclass
class Containment:
    """Says which layers hold. ``program`` is bubblewrap, when simulators and CLI workers live under it; ``broker`` when
    Lambda code does.

    ``no_network`` is what the zygotes reported; ``observed`` is what was tried of each layer, and how it ended.
    """

    sandbox: str
    lambda_mode: str
    program: Path | None = None
    broker: Path | None = None
    no_network: bool = False
    observed: Mapping[str, str] = field(default_factory=dict)
    tested: Sequence[str] = field(default_factory=tuple)

    @classmethod
    def decide(cls, sandbox: str, lambda_mode: str) -> Containment:
        """Choose the layers. Raises RuntimeError when bubblewrap is demanded and does not work here."""
        found = None if sandbox == "plain" and lambda_mode == "stub" else bubblewrap.find()
        if sandbox == "bwrap" and found is None:
            raise RuntimeError(
                "SANDBOX=bwrap, but bubblewrap does not work here: install Debian's package "
                "bubblewrap and allow unprivileged user namespaces, or use SANDBOX=auto"
            )
        if lambda_mode == "sandbox" and found is None:
            raise RuntimeError(
                "LAMBDA=sandbox runs code in bubblewrap, which does not work here: install Debian's "
                "package bubblewrap, or use LAMBDA=stub"
            )
        return cls(
            sandbox, lambda_mode, None if sandbox == "plain" else found, found if lambda_mode == "sandbox" else None
        )

    @property
    def network_mode(self) -> str:
        """The word for the zygotes: ``outer`` (bubblewrap took the network away), ``auto`` (try), ``plain``."""
        return "outer" if self.program else "plain" if self.sandbox == "plain" else "auto"

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are claimed, and therefore tried."""
        optional = {NETWORK: self.no_network, BUBBLEWRAP: self.program is not None}
        return tuple(layer for layer in LAYERS if optional.get(layer, True))

    def statement(self) -> str:
        """Say what is active, as it was observed, and what is not, for the log at start."""
        bubble = "on: read-only system, private /tmp, own pids" if self.program else "off"
        if self.program is None and self.sandbox == "auto":
            bubble += " (not installed or not permitted); so LAMBDA=sandbox and hosts beyond loopback are off"
        code = "runs in bubblewrap: no network, no process, 2 s CPU, 128 MB" if self.broker else "never runs (stub)"
        network = "none" if self.no_network else "the host's, stopped by hooks and filter alone"
        lines = {
            "audit hooks": self._observed(HOOKS),
            "system call filter": self._observed(FILTER),
            "resource limits": self._observed(LIMITS),
            "network": f"{network}; {self._observed(NETWORK)}" if self.no_network else network,
            "bubblewrap": f"{bubble}; {self._observed(BUBBLEWRAP)}" if self.program else bubble,
            "Lambda code": code,
            "self-test": "; ".join(self.tested) or "not run",
        }
        return "containment:" + "".join(f"\n  {name}: {value}" for name, value in lines.items())

    def _observed(self, layer: str) -> str:
        return self.observed.get(layer, "not tried")
