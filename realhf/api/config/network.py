"""Where the processes of a run listen, and what they may do without encryption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from realhf.api.config.option import option

WILDCARD = "0.0.0.0"
ADDRESS_WANTED = "give an IPv4 address or a host name, without scheme and port; IPv6 is not supported"


def no_address(text: str) -> bool:
    """Return whether a text, which may be empty, cannot be an IPv4 address or a host name."""
    return bool(text) and (":" in text or "/" in text or text != text.strip())


@dataclass
class NetworkConfig:
    """Where the processes of a run listen. Without ``bind`` nothing listens but on the loopback. With it the launcher
    makes keys for the run: every socket of it is then encrypted and takes nobody without them."""

    bind: str = option(
        "",
        "The master listens on this IPv4 address or name of its host, and every worker on the address from which it "
        "reaches the master; 0.0.0.0: all of them on all addresses; empty: all of them on the loopback.",
    )
    advertise: str = option("", "Workers reach the master at this address or name; empty: at the one it listens on.")
    trusted: bool = option(
        False,
        "Nobody but the run can read or write on its network: large tensors go over it without encryption, and "
        "workers that train one role together may be on several hosts.",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Options that need another one, and addresses that cannot be used."""
        for option_name in ("advertise", "trusted"):
            if getattr(self, option_name) and not self.bind:
                yield f"{name}.{option_name}: has no effect without {name}.bind"
            elif getattr(self, option_name) and (self.bind == "localhost" or self.bind.startswith("127.")):
                yield f"{name}.{option_name}: has no effect while {name}.bind={self.bind} is the loopback"
        if self.bind == WILDCARD and not self.advertise:
            yield f"{name}.bind={WILDCARD}: workers cannot be told to connect there; set {name}.advertise"
        if self.advertise == WILDCARD:
            yield f"{name}.advertise={WILDCARD}: nobody can connect there; give an address of the master's host"
        for option_name, text in (("bind", self.bind), ("advertise", self.advertise)):
            if no_address(text):
                yield f"{name}.{option_name}={text}: {ADDRESS_WANTED}"
