"""Lets a process that needs the network reach the endpoints that were allowed, and nothing else.

It is for the child that runs the AWS CLI on a real account. There are two layers: botocore asks before it sends, and an
audit hook sees every name that is resolved and every address that is connected to.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from realhf.aws.cli.refusal import refuse

_PORTS = {"http": 80, "https": 443}


class EgressPin:
    """Knows the endpoints that may be reached. ``allow`` names them; with ``with_subdomains`` also the names below them
    (``bucket.s3.amazonaws.com``)."""

    def __init__(self) -> None:
        self._endpoints: set[tuple[str, int]] = set()
        self._domains: set[tuple[str, int]] = set()
        self._addresses: set[tuple[str, int]] = set()

    def allow(self, url: str, *, with_subdomains: bool = False) -> None:
        """Allow the host and port of ``url``, an endpoint that botocore resolved or the operator configured."""
        host, port = _place(url)
        self._endpoints.add((host, port))
        if with_subdomains:
            self._domains.add((f".{host}", port))

    def allows(self, host: object, port: object) -> bool:
        """Return whether a request may go there."""
        name = (host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)).lower()
        known = any(name.endswith(domain) and port == its_port for domain, its_port in self._domains)
        return known or (name, port) in self._endpoints

    def check_url(self, url: str) -> None:
        """Raise RefusedRequest for a URL that leads elsewhere."""
        if not self.allows(*_place(url)):
            refuse("egress", "requests leave only for the endpoints of AWS")

    def watch(self) -> None:
        """Remember the addresses that allowed names resolve to. Call it before the audit hook is installed."""
        resolve: Callable[..., Any] = socket.getaddrinfo

        def resolved(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
            found = resolve(host, port, *arguments, **options)
            if self.allows(host, port):
                self._addresses.update((str(entry[4][0]), entry[4][1]) for entry in found)
            return found

        socket.getaddrinfo = resolved

    def allows_event(self, event: str, args: tuple[object, ...]) -> bool:
        """Return whether a network event is allowed, for ``AuditGuard.egress``: names are looked up and addresses
        connected to for allowed endpoints alone."""
        if event == "socket.getaddrinfo":
            return self.allows(args[0], args[1])
        if event == "socket.connect":
            address = args[1]
            return isinstance(address, tuple) and address[:2] in self._addresses
        return event == "http.client.connect" and self.allows(args[1], args[2])


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
