"""A network whose listeners are at one endpoint, as where one comes back."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.transport.network import Network


@dataclass(frozen=True)
class At(Network):
    endpoint: str = ""

    def listen(self, socket, bind=""):
        return super().listen(socket, bind or self.endpoint)
