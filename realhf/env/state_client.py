"""The environment's own view of a simulator: warm botocore clients for set-up, grading and inventory."""

from __future__ import annotations

import threading
from typing import Any

import botocore.session
from botocore.client import BaseClient, Config
from botocore.exceptions import BotoCoreError, ClientError

_REGION = "us-east-1"


class StateCallError(Exception):
    """A call was answered with an error. ``code`` is AWS's error code (``NoSuchBucket``)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class ClientFactory:
    """Loads each service model once per process; thread-safe."""

    def __init__(self) -> None:
        self._session = botocore.session.Session()
        self._lock = threading.Lock()

    def create(self, service: str, endpoint: str, account: str) -> BaseClient:
        config = Config(
            connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
        )
        with self._lock:
            return self._session.create_client(
                service,
                region_name=_REGION,
                endpoint_url=endpoint,
                aws_access_key_id=account,
                aws_secret_access_key="none",
                config=config,
            )


class StateClient:
    """Calls of one slot's simulator. Thread-safe."""

    def __init__(self, endpoint: str, account: str, factory: ClientFactory | None = None) -> None:
        self._endpoint = endpoint
        self._account = account
        self._factory = factory or ClientFactory()
        self._clients: dict[str, BaseClient] = {}

    def call(self, service: str, operation: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Answer of ``operation`` (``ListBuckets``) of ``service`` (botocore's name) without its metadata.

        Raises StateCallError for an error answer, an unknown operation or bad parameters (code
        ``ParamValidation``), ConnectionError when the simulator does not answer."""
        client = self._clients.get(service)
        if client is None:
            client = self._clients[service] = self._factory.create(service, self._endpoint, self._account)
        try:
            answer = client._make_api_call(operation, params or {})  # type: ignore[attr-defined]
        except ClientError as error:
            details = error.response.get("Error", {})
            raise StateCallError(str(details.get("Code", "")), str(details.get("Message", ""))) from None
        except BotoCoreError as error:
            name = type(error).__name__
            if name.endswith(("ConnectionError", "TimeoutError", "ConnectionClosedError")):
                raise ConnectionError(f"simulator at {self._endpoint}: {error}") from error
            raise StateCallError("ParamValidation", str(error)) from None
        answer.pop("ResponseMetadata", None)
        return answer
