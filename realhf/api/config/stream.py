"""The trajectory server that groups come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from realhf.api.config.option import option

_OURS = "this run starts no trajectory server"


@dataclass
class StreamConfig:
    """The trajectory server that groups come from: one that runs already (``url``), or one that the launcher starts,
    whose queue lies in the run folder."""

    url: str | None = option(
        None, "Groups come from the server at this URL; without one the launcher starts a server.", on_resume="free"
    )
    token_file: str | None = option(None, "This file holds the bearer token of the server.", on_resume="free")
    ca_file: str | None = option(
        None,
        "An https server is checked by the certificates in this file; without it as this machine does.",
        on_resume="free",
    )
    host: str = option("127.0.0.1", "A server of this run listens on this address.", idle=_OURS, on_resume="free")
    port: int = option(
        8000,
        "A server of this run listens on this port; 0 is any free one.",
        at_least=0,
        at_most=65535,
        idle=_OURS,
        on_resume="free",
    )
    max_staleness: int | None = option(
        None,
        "A group lies at most this many policy versions behind; without a number, any.",
        at_least=0,
        on_resume="warns",
    )
    wait_s: float = option(900.0, "A step waits these seconds for its batch.", above=0, on_resume="free")

    def problems(self, name: str) -> Iterator[str]:
        """A URL that is none, and a file that is not there."""
        if self.url is not None and not re.match(r"https?://[^/]", self.url):
            yield f"{name}.url={self.url}: give http://host:port"
        for option_name in ("token_file", "ca_file"):
            file = getattr(self, option_name)
            if file is not None and not Path(file).expanduser().is_file():
                yield f"{name}.{option_name}={file}: no such file"
