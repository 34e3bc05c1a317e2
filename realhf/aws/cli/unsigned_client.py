"""Makes a botocore client cheap against a simulator that checks no signature and reads no user agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from realhf.aws.cli.pinned_http import PinnedConnection

REGION = "us-east-1"
ENDPOINT = "http://localhost:4566"
"""The endpoint that every simulator believes to have; connections lead to the real one."""


class _Signature:
    """Stands in for SigV4: the simulator reads account, region and service from the header and checks no more.
    Presigned URLs are shown to the agent, so they are signed as always."""

    def __init__(self, account: str, signing_name: str, sign: Callable[..., None]) -> None:
        self._sign = sign
        self._header = (
            f"AWS4-HMAC-SHA256 Credential={account}/20260101/{REGION}/{signing_name}/aws4_request, "
            f"SignedHeaders=host, Signature={'0' * 64}"
        )

    def __call__(self, operation_name: str, request: Any, *args: Any, **kwargs: Any) -> None:
        if "presign-url" in args:
            self._sign(operation_name, request, *args, **kwargs)
        else:
            request.headers["Authorization"] = self._header


def lighten(client: Any, account: str, connection: PinnedConnection) -> Any:
    """Make a client send over ``connection``, with a constant signature and user agent, and return it."""
    service_id = client.meta.service_model.service_id.hyphenize()
    client._endpoint.http_session = connection
    signer = client._request_signer
    signer.sign = _Signature(account, signer.signing_name, signer.sign)
    client.meta.events.unregister(
        f"request-created.{service_id}", client._user_agent_creator.rebuild_and_replace_user_agent_handler
    )
    client._user_agent_creator.to_string = lambda: "aws-cli"
    return client
