"""Child process that runs one AWS CLI command on a real account and reports the requests that it
sent.

Two layers restrict where requests go: botocore handlers check each request before it is sent, and
an audit hook checks every resolved name and every connected address.

It reads an order from standard input and writes one JSON line with exit_code, stdout, stderr,
requests and truncated. The order is ``{"argv", "service", "operations", "credentials", "endpoints",
"folder", "stdout_cap", "stderr_cap"}``. Only the ``operations`` of botocore's ``service`` are sent,
and only to AWS endpoints. No parameter is loaded from a file or a URL, no program is started, and
no file outside ``folder`` is written.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import awscli  # noqa: F401  (first: it makes the name botocore mean the CLI's own copy)
from awscli import clidriver, paramfile
from botocore import xform_name

from realhf.aws.cli.policy import RefusedRequest, refuse
from realhf.aws.cli.virtual_folder import MAX_FILE_BYTES
from realhf.aws.cli.warm_cli import json_able
from realhf.aws.cli.worker import CappedSink, RunawayOutput, text_stream
from realhf.env.containment import sandbox

_PORTS = {"http": 80, "https": 443}


class EgressPin:
    """Allow list of endpoints to which requests may be sent."""

    def __init__(self) -> None:
        self._endpoints: set[tuple[str, int]] = set()
        self._domains: set[tuple[str, int]] = set()
        self._addresses: set[tuple[str, int]] = set()

    def allow(self, url: str, *, with_subdomains: bool = False) -> None:
        """Allow the host and port of ``url``, which is an endpoint that botocore resolved or the
        operator configured.

        ``with_subdomains``: also allow all names below the host, such as
        ``bucket.s3.amazonaws.com``.
        """
        host, port = _host_and_port(url)
        self._endpoints.add((host, port))
        if with_subdomains:
            self._domains.add((f".{host}", port))

    def allows(self, host: object, port: object) -> bool:
        """Return whether a request to this host and port is allowed."""
        name = (host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)).lower()
        known = any(
            name.endswith(domain) and port == its_port for domain, its_port in self._domains
        )
        return known or (name, port) in self._endpoints

    def check_url(self, url: str) -> None:
        """Raise RefusedRequest if the URL's endpoint is not allowed."""
        if not self.allows(*_host_and_port(url)):
            refuse("egress", "requests leave only for the endpoints of AWS")

    def watch(self) -> None:
        """From now on, record the addresses that allowed names resolve to. Call it before the audit
        hook is installed."""
        resolve: Callable[..., Any] = socket.getaddrinfo

        def recording_getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
            entries = resolve(host, port, *arguments, **options)
            if self.allows(host, port):
                self._addresses.update((str(entry[4][0]), entry[4][1]) for entry in entries)
            return entries

        socket.getaddrinfo = recording_getaddrinfo

    def allows_event(self, event: str, args: tuple[object, ...]) -> bool:
        """Return whether a network audit event is allowed: a lookup of, or a connection to, an
        allowed endpoint. Used as ``AuditGuard.egress``."""
        if event == "socket.getaddrinfo":
            return self.allows(args[0], args[1])
        if event == "socket.connect":
            address = args[1]
            return isinstance(address, tuple) and address[:2] in self._addresses
        return event == "http.client.connect" and self.allows(args[1], args[2])


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)


_PARAMS = "realhf-params"
_OPEN_FILES = 64
_MEMORY_BYTES = 1 << 30
_ADDRESS_BYTES = 4 << 30
_CPU_S = 120


class RealCli:
    """The AWS CLI, set up to run one command on a real account. ``order``: see the module
    docstring."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._requests: list[dict[str, Any]] = []
        self._pin = EgressPin()
        os.environ.update(environment(order))
        paramfile.LOCAL_PREFIX_MAP.clear()
        paramfile.REMOTE_PREFIX_MAP.clear()
        self._driver = clidriver.create_clidriver()
        session = self._driver.session
        self._create_client = session.create_client
        session.create_client = self._pinned_client
        session.register("before-parameter-build", self._check_operation)
        session.register("before-send", self._check_endpoint)
        session.register("after-call", self._on_answer)

    def contain(self) -> None:
        """Irrevocably drop the privileges that the command does not need."""
        sandbox.forbid_new_privileges()
        sandbox.limit_resources(
            file_bytes=MAX_FILE_BYTES,
            open_files=_OPEN_FILES,
            memory_bytes=_MEMORY_BYTES,
            address_bytes=_ADDRESS_BYTES,
            cpu_s=_CPU_S,
        )
        self._pin.watch()
        folder = self._order["folder"]
        sandbox.AuditGuard(
            sandbox.package_roots(), (folder,), egress=self._pin.allows_event
        ).install()

    def run(self) -> dict[str, Any]:
        """Run the command and return its exit code, output and requests."""
        out = CappedSink(self._order["stdout_cap"])
        err = CappedSink(self._order["stderr_cap"])
        saved = sys.stdout, sys.stderr
        sys.stdout = text_stream(out)
        sys.stderr = text_stream(err)
        try:
            code = self._driver.main(list(self._order["argv"]))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except RunawayOutput:
            code = 255
        finally:
            sys.stdout, sys.stderr = saved
        return {
            "exit_code": code or 0,
            "stdout": out.text(),
            "stderr": err.text(),
            "requests": self._requests,
            "truncated": out.cut,
        }

    def _pinned_client(self, service_name: str, *args: Any, **kwargs: Any) -> Any:
        """Create a client with the operator's endpoint or the one that botocore's rules give,
        whatever the command says."""
        kwargs["endpoint_url"] = self._order["endpoints"].get("AWS_ENDPOINT_URL")
        client = self._create_client(service_name, *args, **kwargs)
        self._pin.allow(client.meta.endpoint_url, with_subdomains=service_name == "s3")
        if service_name == "s3" and not self._order["endpoints"]:
            for host in ("s3.amazonaws.com", "s3.us-east-1.amazonaws.com"):
                self._pin.allow(f"https://{host}", with_subdomains=True)
        return client

    def _check_operation(self, params: Any, model: Any, context: dict[str, Any], **_: Any) -> None:
        context[_PARAMS] = dict(params)
        service = model.service_model.service_name
        operation = xform_name(model.name, "-")
        if service != self._order["service"] or operation not in self._order["operations"]:
            refuse("operation", f"{service} {operation} is not what was permitted")

    def _check_endpoint(self, request: Any, **_: Any) -> None:
        self._pin.check_url(request.url)

    def _on_answer(
        self, http_response: Any, parsed: Any, model: Any, context: dict[str, Any], **_: Any
    ) -> None:
        error = parsed.get("Error", {}) if isinstance(parsed, dict) else {}
        self._requests.append(
            {
                "service": model.service_model.service_name,
                "operation": model.name,
                "params": json_able(context.get(_PARAMS, {})),
                "status": http_response.status_code,
                "error_code": str(error.get("Code", "")),
            }
        )


def environment(order: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables for botocore: no profile, no plugin, and no credential
    provider that sends requests."""
    return {
        "AWS_ACCESS_KEY_ID": order["credentials"]["access_key"],
        "AWS_SECRET_ACCESS_KEY": order["credentials"]["secret_key"],
        **(
            {"AWS_SESSION_TOKEN": order["credentials"]["token"]}
            if order["credentials"]["token"]
            else {}
        ),
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCOUNT_ID_ENDPOINT_MODE": "disabled",
        **order["endpoints"],
    }


def main() -> None:
    """Read the order, run the command and print the reply."""
    order = json.load(sys.stdin)
    try:
        cli = RealCli(order)
        cli.contain()
        reply = cli.run()
    except (sandbox.Denied, RefusedRequest) as error:
        reply = {
            "exit_code": 255,
            "stdout": "",
            "stderr": str(error),
            "requests": [],
            "truncated": False,
        }
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
