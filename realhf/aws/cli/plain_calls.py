"""Calls of API operations past botocore's general machinery: the same request, the same answer,
about half of the CPU time.

A call goes through a dozen events, most of which have only handlers that do nothing for the
operation, and builds its request from parts that are the same each time. For each operation of a
client, a ``CallPlan`` keeps these parts and the handlers that are left. What it does not know for
sure (streams, compressed bodies, unknown handlers of a request, unusual headers) goes through
botocore's own methods. ``botocore`` means the CLI's own copy.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import awscli  # noqa: F401  (must be first: makes the name botocore refer to the CLI's own copy)
from botocore import handlers, retryhandler
from botocore.awsrequest import AWSResponse, _urljoin
from botocore.client import BaseClient
from botocore.compat import urlencode
from botocore.endpoint import convert_to_response_dict
from botocore.httpchecksum import (
    apply_request_checksum,
    handle_checksum_body,
    resolve_checksum_context,
)
from botocore.signers import RequestSigner
from botocore.utils import percent_encode_sequence

from realhf.aws.cli.handler_lists import KnownEvent
from realhf.aws.cli.pinned_http import SIGNED_FOR_S3, PinnedConnection, Signature

_OWN_HEADERS = frozenset({"authorization", "amz-sdk-invocation-id", "amz-sdk-request"})
"""Headers that are added to every request."""
_CRC32_HEADER = "x-amz-crc32"
"""Header of an answer with the checksum of its body, which a retry handler compares."""
_RETRIES = "retries"
_SIGNATURE = "signature"
_ADDITIONS = [_RETRIES, _SIGNATURE]
"""What botocore's handlers add to the header of every request, in alphabetical order."""
_RETRY_KEYS = ("ttl", "attempt", "max")
"""What a request tells about its retries, in this order."""


def install() -> None:
    """Make all clients call their operations by plans."""
    call_generally = BaseClient._make_api_call

    def make_api_call(client: Any, operation_name: str, api_params: dict[str, Any]) -> Any:
        plan = find_plan(client, operation_name)
        if plan.is_plain:
            return plan.call(client, api_params)
        return call_generally(client, operation_name, api_params)

    BaseClient._make_api_call = make_api_call  # type: ignore[method-assign]


def find_plan(client: Any, operation_name: str) -> CallPlan:
    """Return a client's plan for an operation."""
    plans = client.__dict__.setdefault("_plans", {})
    plan = plans.get(operation_name)
    if plan is None:
        plan = plans[operation_name] = CallPlan(client, operation_name)
    return plan


class CallPlan:
    """What a call of one operation of a client goes through."""

    def __init__(self, client: Any, operation_name: str) -> None:
        model = client._service_model.operation_model(operation_name)
        service = model.service_model
        endpoint = client._endpoint
        self._model = model
        self._name = operation_name
        self.is_plain = (
            type(endpoint.http_session) is PinnedConnection
            and type(client._request_signer.sign) is Signature
            and not model.has_streaming_input
            and not model.has_streaming_output
            and not model.has_event_stream_input
            and not model.has_event_stream_output
            and model.request_compression is None
            and not (model.auth and client.meta.config.auth_scheme_preference)
        )
        """Whether calls can be made by this plan."""
        if not self.is_plain:
            return
        self._context = {
            "client_region": client.meta.region_name,
            "client_config": client.meta.config,
            "has_streaming_input": False,
            "auth_type": model.resolved_auth_type,
            "unsigned_payload": model.unsigned_payload,
            "auth_options": service.metadata.get("auth"),
        }
        self._parser = endpoint._response_parser_factory.create_parser(service.resolved_protocol)
        self._signer = client._request_signer
        self._signature = self._signer.sign.header
        self._is_for_s3 = SIGNED_FOR_S3 in self._signature
        self._has_checksums = bool(model.http_checksum or model.http_checksum_required)
        # (URL, header, URL of the root), if these are always the same
        self._endpoint: tuple[str, Mapping[str, str], str] | None = None
        # (handlers, what each adds), one object because other threads may be calling as well
        self._additions: tuple[Any, list[str]] = (None, [])

        def event(kind: str) -> KnownEvent:
            name = f"{kind}.{service.service_id.hyphenize()}.{operation_name}"
            return KnownEvent(client.meta.events, name, self._is_idle)

        self._provide = event("provide-client-params")
        self._before_build = event("before-parameter-build")
        self._before_call = event("before-call")
        self._created = event("request-created")
        self._before_send = event("before-send")
        self._before_parse = event("before-parse")
        self._received = event("response-received")
        self._needs_retry = event("needs-retry")
        self._is_success_final: tuple[Any, bool] = ((), True)
        self._after = event("after-call")
        self._after_error = event("after-call-error")
        resolution = f"before-endpoint-resolution.{service.service_id.hyphenize()}"
        self._resolves_once = (
            not model.context_parameters
            and not model.operation_context_parameters
            and not KnownEvent(client.meta.events, resolution, lambda handler: False).handlers
        )

    def _is_idle(self, handler: Any) -> bool:
        """Return whether a handler does nothing for this operation, or only what this class does
        as well."""
        model = self._model
        if handler is handlers.generate_idempotent_uuid:
            return not model.idempotent_members
        if handler is handlers._handle_request_validation_mode_member:
            return not model.http_checksum.get("requestValidationModeMember")
        if handler is handlers.inject_api_version_header_if_needed:
            return not model.is_endpoint_discovery_operation
        return False

    def call(self, client: Any, params: dict[str, Any]) -> Any:
        """Do what ``_make_api_call`` does."""
        model = self._model
        context = dict(self._context)
        provided = self._provide.emit(params=params, model=model, context=context)
        params = params if provided is None else provided
        self._before_build.emit(params=params, model=model, context=context)
        request = self._build_request(client, params, context)
        if self._has_checksums:
            resolve_checksum_context(request, model, params)
        answered = self._before_call.emit_until_answer(
            model=model, params=request, request_signer=client._request_signer, context=context
        )
        if answered is not None:
            http, parsed = answered
        else:
            if self._has_checksums:
                apply_request_checksum(request)
            try:
                http, parsed = self._exchange(client._endpoint, request, context)
            except Exception as error:
                self._after_error.emit(exception=error, context=context)
                raise
        self._after.emit(http_response=http, parsed=parsed, model=model, context=context)
        if http.status_code >= 300:
            code = context.get("error_code_override") or parsed.get("Error", {}).get("Code")
            raise client.exceptions.from_code(code)(parsed, self._name)
        return parsed

    def _build_request(
        self, client: Any, params: dict[str, Any], context: dict[str, Any]
    ) -> dict[str, Any]:
        """Return botocore's dict of the request, with its URL."""
        endpoint = self._endpoint
        if endpoint is None:
            url, headers, properties = client._resolve_endpoint_ruleset(
                self._model, params, context
            )
            if properties:
                context["endpoint_properties"] = properties
            endpoint = (url, headers, _urljoin(url, "/", None))
            if self._resolves_once and not properties:
                self._endpoint = endpoint
        request = client._serializer.serialize_to_request(params, self._model)
        prefix = request.get("host_prefix")
        if not client._client_config.inject_host_prefix:
            request.pop("host_prefix", None)
            prefix = None
        request["headers"].update(endpoint[1])
        request["headers"]["User-Agent"] = client._user_agent_creator.to_string()
        if request["url_path"] == "/" and prefix is None:
            url = endpoint[2]
        else:
            url = _urljoin(endpoint[0], request["url_path"], prefix)
        if request["query_string"]:
            joint = "&" if "?" in url else "?"
            url += f"{joint}{percent_encode_sequence(request['query_string'])}"
        request["url"] = url
        request["context"] = context
        return request

    def _exchange(
        self, endpoint: Any, request: dict[str, Any], context: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Send a request, again if need be, and return (answer, its content)."""
        context["retries"] = {"attempt": 1, "invocation-id": str(uuid.uuid4())}
        attempts = 1
        while True:
            result, error = self._send_and_parse(endpoint, request, context)
            if (received := self._received).handlers:
                parsed = None if result is None else result[1]
                told = None if result is None else convert_to_response_dict(result[0], self._model)
                received.emit(
                    response_dict=told, parsed_response=parsed, context=context, exception=error
                )
            if (result is not None and self._is_final(result[0])) or not endpoint._needs_retry(
                attempts, self._model, request, result, error
            ):
                break
            attempts += 1
            endpoint._update_retries_context(context, attempts, result)
        if result is None:
            assert error is not None
            raise error
        if "ResponseMetadata" in result[1]:
            result[1]["ResponseMetadata"]["RetryAttempts"] = attempts - 1
        return result

    def _is_final(self, http: Any) -> bool:
        """Return whether it is known that nothing asks for a retry after this answer."""
        handlers_now = self._needs_retry.handlers
        known, is_final = self._is_success_final
        if handlers_now is not known:
            is_final = all(map(_accepts_success, handlers_now))
            self._is_success_final = (handlers_now, is_final)
        return 200 <= http.status_code < 300 and is_final and _CRC32_HEADER not in http.headers

    def _send_and_parse(
        self, endpoint: Any, request: dict[str, Any], context: dict[str, Any]
    ) -> tuple[tuple[Any, Any] | None, Exception | None]:
        """Send a request once and return ((answer, its content), None), or (None, error) if no
        answer came."""
        model = self._model
        session = endpoint.http_session
        method = request["method"]
        url = request["url"]
        fields = self._header_fields(request["headers"], context)
        body = None if fields is None else _plain_body(request["body"])
        prepared = None if body is not None else endpoint.create_request(request, model)
        try:
            if fields is not None and body is not None:
                data = session.encode(method, url, fields, body, is_for_s3=self._is_for_s3)
                status, headers, content = session.exchange(data, method, url)
                http: Any = AWSResponse(url, status, headers, None)
                http._content = content
            else:
                http = self._before_send.emit(request=prepared)
                http = endpoint._send(prepared) if http is None else http
        except Exception as error:
            return None, error
        answer = {
            "headers": http.headers,
            "status_code": http.status_code,
            "context": {"operation_name": self._name},
            "body": http.content,
        }
        if self._has_checksums:
            handle_checksum_body(http, answer, context, model)
        custom: dict[str, Any] = {}
        self._before_parse.emit(
            operation_model=model, response_dict=answer, customized_response_dict=custom
        )
        parsed = self._parser.parse(answer, model.output_shape)
        parsed.update(custom)
        if http.status_code >= 300:
            endpoint._add_modeled_error_fields(answer, parsed, model, self._parser)
        return (http, parsed), None

    def _header_fields(
        self, headers: Mapping[str, Any], context: dict[str, Any]
    ) -> list[tuple[str, str]] | None:
        """Return the header of a request with what botocore's handlers add to it, or None if there
        are other handlers or unusual fields."""
        created = self._created.handlers
        known, additions = self._additions
        if created is not known:
            additions = [*map(self._addition_of, created)]
            self._additions = (created, additions)
        if sorted(additions) != _ADDITIONS or self._before_send.handlers:
            return None
        fields = [*headers.items()]
        names = {name.lower() for name, value in fields if _is_plain_field(name, value)}
        if len(names) < len(fields) or not names.isdisjoint(_OWN_HEADERS):
            return None
        for addition in additions:
            if addition == _SIGNATURE:
                fields.append(("Authorization", self._signature))
            else:
                retries = context["retries"]
                told = "; ".join(f"{key}={retries[key]}" for key in _RETRY_KEYS if key in retries)
                fields.append(("amz-sdk-invocation-id", retries["invocation-id"]))
                fields.append(("amz-sdk-request", told))
        return fields

    def _addition_of(self, handler: Any) -> str:
        """Return what a handler of a new request adds to its header."""
        if handler is handlers.add_retry_headers:
            return _RETRIES
        is_signer = getattr(handler, "__func__", None) is RequestSigner.handler
        return _SIGNATURE if is_signer and handler.__self__ is self._signer else ""


def _is_plain_field(name: Any, value: Any) -> bool:
    """Return whether a header field is written as it is."""
    return type(name) is str and type(value) is str and name.isascii() and value.isascii()


def _plain_body(body: Any) -> bytes | None:
    """Return a body as it is sent, or None if it may be a stream."""
    if type(body) is bytes:
        return body
    if body is None:
        return b""
    if type(body) is dict:
        pairs = [(_encode_text(name), _encode_text(value)) for name, value in body.items()]
        body = urlencode(pairs, doseq=True)
    return body.encode("utf-8") if type(body) is str else None


def _encode_text(value: Any) -> Any:
    return value.encode("utf-8") if isinstance(value, str) else value


def _accepts_success(handler: Any) -> bool:
    """Return whether a handler asks for no retry after an answer of success without a checksum."""
    return type(handler) is retryhandler.RetryHandler and _is_content(handler._checker)


def _is_content(checker: Any) -> bool:
    """Return whether a part of a retry handler is about failures or a checksum only."""
    kind = type(checker)
    if kind is retryhandler.MaxAttemptsDecorator:
        return _is_content(checker._checker)
    if kind is retryhandler.MultiChecker:
        return all(map(_is_content, checker._checkers))
    if kind in (retryhandler.HTTPStatusCodeChecker, retryhandler.ServiceErrorCodeChecker):
        return checker._status_code >= 300
    if kind is retryhandler.CRC32Checker:
        return checker._header_name == _CRC32_HEADER
    return kind is retryhandler.ExceptionRaiser
