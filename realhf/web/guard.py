"""Decides which requests a server serves: by the host they name, the page that caused them, and
their token.

A browser sends what any web page asks of it to any address that the machine can reach, with or
without showing the answer to the page. Two headers that pages cannot set tell such requests apart:
``Origin`` and ``Sec-Fetch-Site`` say which page asked. A page can also give a name of its own the
address of this machine (DNS rebinding); its requests then count as same-origin, but ``Host`` still
has that name. Programs that are not browsers send neither ``Origin`` nor ``Sec-Fetch-Site`` and
notice nothing of these rules.
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
"""Methods that change nothing, unless a server says otherwise of a path."""
OWN_SITES = frozenset({"same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` for a page of this server, and for an address that a person typed or
bookmarked."""
FOREIGN_ORIGIN = "FOREIGN_ORIGIN"
"""Code of a refusal for the host, the page or the connection of a request."""
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
"""Response headers of every page: a browser takes its files for what they are, keeps their
addresses to itself, and lets no other site embed or script them."""
_LOCKED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STRICT_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    f"{_LOCKED}"
)
"""Content-Security-Policy of a page that loads scripts, styles, images and data of its own server
only."""
OWN_FILES_POLICY = f"default-src 'self'; {_LOCKED}; object-src 'none'"
"""Content-Security-Policy of a page that loads anything but plugins, of its own server only."""


@dataclass(frozen=True)
class ServedHosts:
    """The hosts that a request may name in its ``Host`` header. The loopback is always among them.

    Only names that a stranger could register are a danger (DNS rebinding). Nobody can make an
    address resolve elsewhere, and nobody can register a name without a dot.
    """

    remedy: str
    """The reason given to all others, with the option that would let them in; ``{host}`` stands for
    the host that was named."""
    names: frozenset[str] = frozenset()
    """Further names and addresses, in lower case."""
    addresses: bool = False
    """Whether every IP address is served."""
    local_names: bool = False
    """Whether names without a dot, or below ``.localhost``, are served."""
    any_host: bool = False
    """Whether every host is served."""
    absent: bool = False
    """Whether a request without ``Host`` is served, as programs send it over HTTP/1.0."""

    def serves(self, authorities: list[str]) -> bool:
        """Return whether a request with these values of ``Host`` is served. More than one value is
        ambiguous."""
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
    """Return whether a request may change something, by its method; the handshake of a WebSocket
    always may."""
    return scope.get("method") not in READ_METHODS


@dataclass(frozen=True)
class PageRules:
    """Which pages may cause a request.

    A request that changes something, or whose answer is private, comes from a page of this server
    or from no browser at all. Other requests may also come from a link of another site that a
    person followed, since the page with the link does not see the answer.
    """

    hosts: ServedHosts
    """The hosts that requests may name."""
    is_protected: Callable[[Scope], bool] = is_write
    """Whether a request changes something, or its answer is private."""
    open_reads: bool = False
    """Whether any page may cause the requests that are not protected."""
    schemes: frozenset[str] = frozenset({"http", "https"})
    """Schemes of the server's own pages."""

    def problem(self, scope: Scope) -> str:
        """Return why the request of an ASGI scope is not served; "" for one that is."""
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
            # Old browsers, and current ones that reach a plain http address other than the
            # loopback, send no Sec-Fetch-Site, and no Origin with an image or a link. Then the
            # address of the page decides.
            referers = headers.all(b"referer")
            if len(referers) != 1 or not is_same_origin(referers[0], host, self.schemes):
                return FOREIGN_PAGE
        return ""


def is_same_origin(
    address: str, host: str, schemes: frozenset[str] = frozenset({"http", "https"})
) -> bool:
    """Return whether an ``Origin`` or ``Referer`` is of the server that is addressed as ``host``
    (``name[:port]``)."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    return parts.scheme in schemes and parts.netloc.lower() == host.lower()


class _Headers:
    """The headers of an ASGI scope that say which page caused a request."""

    def __init__(self, scope: Scope) -> None:
        self._headers = scope["headers"]

    def all(self, name: bytes) -> list[str]:
        """Return all values of a header, whose name is in lower case."""
        return [value.decode("latin-1") for key, value in self._headers if key.lower() == name]

    def is_browser(self) -> bool:
        """Return whether the client calls itself a browser."""
        return any("Mozilla/" in agent for agent in self.all(b"user-agent"))

    def is_followed_link(self, scope: Scope) -> bool:
        """Return whether a person followed a link: the answer replaces the page that had it."""
        modes = self.all(b"sec-fetch-mode")
        targets = self.all(b"sec-fetch-dest")
        return scope.get("method") == "GET" and modes == ["navigate"] and targets == ["document"]


def is_local_server(scope: Scope) -> bool:
    """Return whether the connection of a request was made to the loopback; true where the ASGI
    server does not say."""
    server = scope.get("server")
    return not server or server[1] is None or is_loopback_host(server[0])


Authorize = Callable[[Scope], Refusal | None]
"""Returns why the token of a request does not suffice, or None; may leave in the scope who the
client is."""


@dataclass(frozen=True)
class GuardRules:
    """The rules of one server."""

    pages: PageRules | None
    """Rules for hosts and pages; None: tokens alone decide, which pages of other sites do not
    know."""
    form: Callable[[Refusal], Mapping[str, Any]]
    """Returns the JSON body of a refusal, as the API of the server writes errors."""
    authorize: Authorize | None = None
    """The check of the token; None: none is needed."""
    local_remedy: str = ""
    """If not "": only connections to the loopback are served, and others get this reason."""
    websockets: bool = False
    """Whether the server has WebSocket endpoints, which check tokens themselves."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every response, refusals included."""


class RequestGuard:
    """An ASGI middleware that serves requests by ``GuardRules`` and refuses the others: 403 for a
    foreign host, page or connection, and what ``authorize`` returns for the token."""

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
        app = self._app if refusal is None else refusal_response(refusal, self._rules.form)
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
        problem = rules.local_remedy if not is_local_server(scope) else ""
        if not problem and rules.pages is not None:
            problem = rules.pages.problem(scope)
        return Refusal(403, problem, code=FOREIGN_ORIGIN) if problem else None


def refusal_response(refusal: Refusal, form: Callable[[Refusal], Mapping[str, Any]]) -> Response:
    """Return the response to a request that is refused."""
    return JSONResponse(form(refusal), refusal.status, refusal.headers)


async def refuse_handshake(
    scope: Mapping[str, Any],
    send: Any,
    status: int,
    body: Mapping[str, Any],
    *headers: tuple[bytes, bytes],
) -> None:
    """Answer the handshake of a WebSocket with an HTTP error. Where the ASGI server lacks the
    extension for that, close the WebSocket with the text ``message`` of the body."""
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
