"""The environment's own API client for a simulator: long-lived botocore clients for set-up, grading
and inventory.

botocore's document decoders raise RecursionError for deeply nested documents, so they are replaced
here.
"""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import botocore.session
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.handlers import json_decode_policies, json_decode_template_body
from botocore.model import OperationNotFoundError
from botocore.parsers import ResponseParserError

from realhf.aws.cli.pinned_http import ENDPOINT, PinnedConnection, pin_client
from realhf.aws.cli.policy import REGION, RefusedRequest, refuse

_POLICY = "policyDocumentType"
"""Name of the shape for IAM policy documents in botocore's model."""


def guard_decoders(client: Any, service: str) -> None:
    """Replace botocore's document decoders on this client with ones that leave undecodable
    documents as text."""
    if service == "iam":
        client.meta.events.unregister("after-call.iam", json_decode_policies)
        client.meta.events.register("after-call.iam", _decode_policies)
    if service == "cloudformation":
        client.meta.events.unregister(
            "after-call.cloudformation.GetTemplate", json_decode_template_body
        )
        client.meta.events.register("after-call.cloudformation.GetTemplate", _decode_template)


def decode_document(document: Any) -> Any:
    """Return the value of percent-encoded JSON, or the argument itself if it is not JSON or is
    nested too deeply."""
    try:
        return json.loads(unquote(document))
    except (ValueError, TypeError, RecursionError):
        return document


def _decode_policies(parsed: Any, model: Any, **_: Any) -> None:
    if model.output_shape is not None:
        _decode(parsed, model.output_shape)


def _decode(parsed: Any, shape: Any) -> None:
    if shape.type_name == "structure":
        for name, member in shape.members.items():
            if name not in parsed:
                continue
            if member.type_name == "string" and member.name == _POLICY:
                parsed[name] = decode_document(parsed[name])
            else:
                _decode(parsed[name], member)
    elif shape.type_name == "list":
        for item in parsed:
            _decode(item, shape.member)


def _decode_template(parsed: dict[str, Any], **arguments: Any) -> None:
    with contextlib.suppress(RecursionError):  # the template stays text
        json_decode_template_body(parsed, **arguments)


class StateCallError(Exception):
    """The simulator answered a call with an error, or the call was invalid. ``code``: AWS error
    code such as ``NoSuchBucket``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class UnreadableAnswer(StateCallError):
    """An answer cannot be decoded, although the simulator works. An agent may have made the
    simulator's content undecodable on purpose, so a check that meets this error has failed."""

    def __init__(self, message: str) -> None:
        super().__init__("UnreadableAnswer", message)


class ClientFactory:
    """Factory of botocore clients. The client of each service is built once per process, which
    takes 10 to 200 ms, and copied for every slot. Thread-safe."""

    def __init__(self) -> None:
        self._session = botocore.session.Session()
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], Any] = {}

    def create(self, service: str, account: str, connection: PinnedConnection) -> Any:
        """Return a client for ``service`` (botocore's name) that sends over ``connection``."""
        with self._lock:
            original = self._clients.get((service, account))
            if original is None:
                original = self._clients[service, account] = self._build(
                    service, account, connection
                )
        client = object.__new__(type(original))  # copy.copy recurses in its __getattr__
        vars(client).update(vars(original))
        client._endpoint = copy.copy(original._endpoint)
        client._endpoint.http_session = connection
        return client

    def _build(self, service: str, account: str, connection: PinnedConnection) -> Any:
        client = self._session.create_client(
            service,
            region_name=REGION,
            endpoint_url=ENDPOINT,
            aws_access_key_id=account,
            aws_secret_access_key="none",
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )
        guard_decoders(client, service)
        return pin_client(client, account, connection)


class StateClient:
    """API client for one slot's simulator. Thread-safe.

    ``dial`` opens a connection to the simulator; ``endpoint`` is its address for error messages.
    """

    def __init__(
        self, endpoint: str, account: str, dial: Callable[[], socket.socket], factory: ClientFactory
    ) -> None:
        self.endpoint = endpoint
        self._account = account
        self._factory = factory
        self._connection = PinnedConnection(refuse, dial)
        self._clients: dict[str, Any] = {}

    def call(
        self, service: str, operation: str, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call an API operation and return its answer without the response metadata. ``service``:
        botocore's name; ``operation``: for example ``ListBuckets``.

        Raises StateCallError for an error answer, an unknown operation or invalid parameters (the
        latter two with code ``ParamValidation``), UnreadableAnswer for an answer that cannot be
        decoded, and ConnectionError if the simulator does not answer.
        """
        client = self._clients.get(service)
        try:
            if client is None:
                client = self._clients[service] = self._factory.create(
                    service, self._account, self._connection
                )
            answer = client._make_api_call(operation, params or {})
        except ClientError as error:
            details = error.response.get("Error", {})
            raise StateCallError(
                str(details.get("Code", "")), str(details.get("Message", ""))
            ) from None
        except HTTPClientError as error:
            raise ConnectionError(f"simulator at {self.endpoint}: {error}") from error
        except ResponseParserError as error:
            raise UnreadableAnswer(str(error)) from None
        except (BotoCoreError, RefusedRequest, TypeError, AttributeError) as error:
            # TypeError and AttributeError: botocore's event handlers run before its parameter
            # validation.
            raise StateCallError("ParamValidation", str(error)) from None
        except OperationNotFoundError:
            raise StateCallError(
                "ParamValidation", f"{service} has no operation {operation}"
            ) from None
        except (
            RecursionError,
            ValueError,
            LookupError,
            OverflowError,
        ) as error:  # raised by botocore's decoders
            raise UnreadableAnswer(f"{service}:{operation}: {type(error).__name__}") from None
        answer.pop("ResponseMetadata", None)
        return answer

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._connection.disconnect()
