"""Rules for which requests a server serves: by the host that they name, the page that caused them,
and their token.

A browser sends what any web page requests to any address that the machine can reach, whether or not
the page may see the answer. Two headers that pages cannot set identify such requests: ``Origin``
and ``Sec-Fetch-Site`` say which page caused them. A page can also make a host name of its own
resolve to this machine (DNS rebinding). Its requests then count as same-origin, but ``Host`` still
contains that name. Programs that are not browsers send neither ``Origin`` nor ``Sec-Fetch-Site``
and are not affected by these rules.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realhf.base.loopback import is_loopback_host, parse_host
from realhf.web.refusal import Refusal

READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing, unless a server defines otherwise for a path."""
OWN_SITES = frozenset({"same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` for requests from a page of this server, and for an address that a
person typed or bookmarked."""
FOREIGN_ORIGIN = "FOREIGN_ORIGIN"
"""Error code of a refusal because of a request's host, page or connection."""
FOREIGN_PAGE = (
    "only pages of this server may call it, not those of another site; programs send no Origin"
)
_TRY_AGAIN_LATER = 1013
_POLICY_VIOLATION = 1008
"""Close codes of WebSockets (RFC 6455, section 7.4.1, and its registry)."""
PAGE_HEADERS: Mapping[str, str] = MappingProxyType({
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
})  # fmt: skip
"""Response headers of every page. With them a browser does not guess the types of files, does not
pass on the page's address, and lets no other site embed or script the page."""
_LOCKED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STRICT_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    f"{_LOCKED}"
)
"""Content-Security-Policy of a page that loads only scripts, styles, images and data, and only from
its own server."""
SAME_ORIGIN_POLICY = f"default-src 'self'; {_LOCKED}; object-src 'none'"
"""Content-Security-Policy of a page that loads anything except plugins, but only from its own
server."""


@dataclass(frozen=True)
class ServedHosts:
    """Hosts that a request may name in its ``Host`` header. The loopback is always included.

    Only names that a stranger could register are dangerous (DNS rebinding). An IP address cannot be
    made to resolve elsewhere, and a name without a dot cannot be registered.
    """

    remedy: str
    """Reason given to refused clients, including the option that would allow their host; ``{host}``
    is replaced by the host that they named."""
    names: frozenset[str] = frozenset()
    """Further names and addresses, in lower case."""
    addresses: bool = False
    """Whether every IP address is served."""
    local_names: bool = False
    """Whether names without a dot, or below ``.localhost``, are served."""
    any_host: bool = False
    """Whether every host is served."""
    absent: bool = False
    """Whether a request without ``Host`` is served; programs may send one over HTTP/1.0."""

    def serves(self, authorities: list[str]) -> bool:
        """Return whether a request with these values of ``Host`` is served. More than one value is
        ambiguous and is refused."""
        if len(authorities) != 1:
            return self.absent and not authorities
        authority = authorities[0]
        if self.any_host:
            return True
        if not authority:
            return self.absent
        host = parse_host(authority)
        if not host:
            return False
        if is_loopback_host(host) or host in self.names:
            return True
        if self.addresses and _is_address(host):
            return True
        return (
            self.local_names
            and ("." not in host or host.endswith(".localhost"))
            and ":" not in host
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_write(scope: Scope) -> bool:
    """Return whether a request may change something, judging by its method. A WebSocket handshake
    always may."""
    return scope.get("method") not in READ_METHODS


@dataclass(frozen=True)
class PageRules:
    """Rules for which pages may cause a request.

    A request that changes something, or whose answer is private, must come from a page of this
    server or not from a browser. Other requests may also come from a link on another site that a
    person followed, because the page with the link does not see the answer.
    """

    hosts: ServedHosts
    """Hosts that requests may name."""
    is_protected: Callable[[Scope], bool] = is_write
    """Whether a request changes something, or its answer is private."""
    open_reads: bool = False
    """Whether any page may cause requests that are not protected."""
    schemes: frozenset[str] = frozenset({"http", "https"})
    """Schemes of the server's own pages."""

    def problem(self, scope: Scope) -> str:
        """Return why the request with this ASGI scope is refused; "" if it is not."""
        headers = _Headers(scope)
        hosts = headers.all(b"host")
        if not self.hosts.serves(hosts):
            host_text = ", ".join(hosts)[:80]
            return self.hosts.remedy.replace("{host}", repr(host_text))
        protected = self.is_protected(scope)
        if self.open_reads and not protected:
            return ""
        host = hosts[0] if hosts else ""
        origins = headers.all(b"origin")
        sites = headers.all(b"sec-fetch-site")
        if origins and (len(origins) > 1 or not is_same_origin(origins[0], host, self.schemes)):
            return FOREIGN_PAGE
        if not OWN_SITES.issuperset(sites):
            return "" if not protected and headers.is_followed_link(scope) else FOREIGN_PAGE
        if protected and not origins and not sites and headers.is_browser():
            # Old browsers send no Sec-Fetch-Site, nor do current ones that reach a plain http
            # address other than the loopback; for an image or a link they send no Origin either.
            # Then the address of the page decides.
            referers = headers.all(b"referer")
            if len(referers) != 1 or not is_same_origin(referers[0], host, self.schemes):
                return FOREIGN_PAGE
        return ""


def is_same_origin(
    address: str, host: str, schemes: frozenset[str] = frozenset({"http", "https"})
) -> bool:
    """Return whether an ``Origin`` or ``Referer`` belongs to the server that is addressed as
    ``host`` (``name[:port]``)."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    return parts.scheme in schemes and parts.netloc.lower() == host.lower()


class _Headers:
    """Headers of an ASGI scope that say which page caused a request."""

    def __init__(self, scope: Scope) -> None:
        self._headers = scope["headers"]

    def all(self, name: bytes) -> list[str]:
        """Return all values of a header; ``name`` must be in lower case."""
        return [value.decode("latin-1") for key, value in self._headers if key.lower() == name]

    def is_browser(self) -> bool:
        """Return whether the client identifies itself as a browser."""
        return any("Mozilla/" in agent for agent in self.all(b"user-agent"))

    def is_followed_link(self, scope: Scope) -> bool:
        """Return whether a person followed a link, so that the answer replaces the page with the
        link."""
        modes = self.all(b"sec-fetch-mode")
        targets = self.all(b"sec-fetch-dest")
        return scope.get("method") == "GET" and modes == ["navigate"] and targets == ["document"]


def is_local_server(scope: Scope) -> bool:
    """Return whether a request's connection was made to the loopback; true if the ASGI server does
    not say."""
    server = scope.get("server")
    return not server or server[1] is None or is_loopback_host(server[0])


Authorize = Callable[[Scope], Refusal | None]
"""Function that returns None if a request's token suffices, else the refusal. It may store the
client's identity in the scope."""


@dataclass(frozen=True)
class GuardRules:
    """Rules of one server for requests."""

    pages: PageRules | None
    """Rules for hosts and pages; None if tokens alone decide, because pages of other sites do not
    know them."""
    error_body: Callable[[Refusal], Mapping[str, Any]]
    """Returns the JSON body for a refusal, in the error format of the server's API."""
    authorize: Authorize | None = None
    """Check of the token; None if no token is needed."""
    local_only_reason: str = ""
    """If not "", only connections to the loopback are served, and other clients get this reason."""
    websockets: bool = False
    """Whether the server has WebSocket endpoints, which check tokens themselves."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every response, including refusals."""


class RequestGuard:
    """ASGI middleware that serves requests according to ``GuardRules`` and refuses all others: with
    403 for a foreign host, page or connection, and with the refusal that ``authorize`` returns for
    the token."""

    def __init__(self, app: ASGIApp, rules: GuardRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or refuse it."""
        if scope["type"] == "http":
            await self._serve_http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._rules.headers)
            await send(message)

        refusal = self._find_refusal(scope) or (
            self._rules.authorize and self._rules.authorize(scope)
        )
        app = self._app if refusal is None else refusal_response(refusal, self._rules.error_body)
        await app(scope, receive, send_with_headers if self._rules.headers else send)

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._rules.websockets:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        elif refusal := self._find_refusal(scope):
            await receive()
            body = {"code": refusal.code, "message": refusal.detail}
            await refuse_handshake(scope, send, refusal.status, body)
        else:
            await self._app(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> Refusal | None:
        rules = self._rules
        problem = rules.local_only_reason if not is_local_server(scope) else ""
        if not problem and rules.pages is not None:
            problem = rules.pages.problem(scope)
        return Refusal(403, problem, code=FOREIGN_ORIGIN) if problem else None


def refusal_response(
    refusal: Refusal, error_body: Callable[[Refusal], Mapping[str, Any]]
) -> Response:
    """Return the response to a refused request."""
    return JSONResponse(error_body(refusal), refusal.status, refusal.headers)


async def refuse_handshake(
    scope: Mapping[str, Any],
    send: Any,
    status: int,
    body: Mapping[str, Any],
    *headers: tuple[bytes, bytes],
) -> None:
    """Answer a WebSocket handshake with an HTTP error. If the ASGI server lacks the extension for
    that, close the WebSocket with the body's ``message`` as the reason."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send(
            {
                "type": "websocket.close",
                "code": _TRY_AGAIN_LATER,
                "reason": str(body["message"])[:100],
            }
        )
        return
    all_headers = [(b"content-type", b"application/json"), *headers]
    await send({"type": "websocket.http.response.start", "status": status, "headers": all_headers})
    await send({"type": "websocket.http.response.body", "body": json.dumps(body).encode()})
