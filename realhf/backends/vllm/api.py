"""Typed client for the endpoints of a vLLM server (0.32 or later) that a generation worker uses.

Tokens: ``/inference/v1/generate`` (``--enable-scale-out``) accepts and returns token ids, and
reports the version of the weights that sampled each token. Weights: ``/pause``, ``/resume``,
``/collective_rpc`` and ``/update_weight_version``, which exist only in development mode
(``VLLM_SERVER_DEV_MODE=1``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_KEEP_ALIVE_S = 2.0
"""Seconds that an idle connection is kept. This is less than the server's own limit (5 s), so that
no request is sent on a connection that is being closed."""
_NOT_FINITE = -9999.0
"""Value that vLLM reports for a log-probability that is -inf or NaN."""
EXTENSION = "realhf.backends.vllm.extension.WeightExtension"
"""Worker extension class of the servers that this package starts."""
_LOGPROBS_MODE = "processed_logprobs"
"""Required option of the server: log-probabilities are those after temperature scaling, as a
trainer computes them."""
_DEVELOPMENT = ("/pause", "/resume", "/collective_rpc", "/server_info")
"""Endpoints that exist only in development mode."""


class VllmError(RuntimeError):
    """Error: a vLLM server does not respond, rejects a request, or lacks a required feature."""


@dataclass(frozen=True)
class ServedModel:
    """Model and configuration of a server."""

    root: str
    """Folder or hub id that the server was started with."""
    max_tokens: int
    """Maximum length of a sequence, including the prompt."""
    extension: str | None
    """Worker extension class of the server, if any."""
    device: str
    """Device type, such as cpu or cuda."""


@dataclass(frozen=True)
class Completion:
    """Result of one generation request."""

    token_ids: list[int]
    """Sampled tokens."""
    logprobs: list[float]
    """Log-probability of each sampled token."""
    versions: list[str]
    """Version label of the server's weights that sampled each token."""
    finish_reason: str
    """stop, length or abort."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    cached_tokens: int
    """Number of tokens of the prompt that were read from the server's cache."""


class VllmApi:
    """Client of one server, for use on one event loop. Every call raises VllmError or TimeoutError
    naming the server."""

    def __init__(self, url: str, *, connections: int, timeout_s: float) -> None:
        """Create the client. ``connections`` is the maximum number of connections; ``timeout_s``
        applies to every call without an explicit timeout."""
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        limits = httpx.Limits(
            max_connections=connections,
            max_keepalive_connections=connections,
            keepalive_expiry=_KEEP_ALIVE_S,
        )
        self._http = httpx.AsyncClient(base_url=self.url, limits=limits, trust_env=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def model(self) -> ServedModel:
        """Return the model that the server serves. Raises VllmError if the server lacks options
        that training needs."""
        row = (await self._call("GET", "/v1/models"))["data"][0]
        config = (await self._call("GET", "/server_info", params={"config_format": "json"}))[
            "vllm_config"
        ]
        mode = config["model_config"]["logprobs_mode"]
        if mode != _LOGPROBS_MODE:
            raise VllmError(
                f"{self.url} reports {mode}: it must run with --logprobs-mode {_LOGPROBS_MODE}"
            )
        device = config["device_config"]["device"]
        if device == "cpu" and config["scheduler_config"]["enable_chunked_prefill"]:
            # With it, vLLM 0.32 crashes on a request with a seed whose prompt is split.
            raise VllmError(
                f"{self.url} computes on the CPU: it must run with --no-enable-chunked-prefill"
            )
        await self._call("POST", "/inference/v1/abort_requests", json={"request_ids": []})
        extension = config["parallel_config"]["worker_extension_cls"]
        return ServedModel(str(row["root"]), int(row["max_model_len"]), extension, device)

    async def generate(
        self, request_id: str, token_ids: Sequence[int], params: Mapping[str, Any], timeout_s: float
    ) -> Completion:
        """Run one request to its end. Raises FloatingPointError if the model's logits are not
        finite."""
        body = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling_params": {**params, "logprobs": 0, "detokenize": False},
        }
        answer = await self._call("POST", "/inference/v1/generate", json=body, timeout_s=timeout_s)
        choice = answer["choices"][0]
        usage = answer["usage"]
        tokens = choice["token_ids"] or []
        logprobs = [
            float(row["logprob"]) for row in (choice["logprobs"] or {}).get("content") or []
        ]
        if len(logprobs) != len(tokens):
            raise VllmError(
                f"{self.url} returned {len(tokens)} tokens with {len(logprobs)} log-probabilities"
            )
        if any(value <= _NOT_FINITE for value in logprobs):
            raise FloatingPointError(f"{self.url}: the model returned logits that are not finite")
        versions = self._expand_versions(choice.get("weight_versions"), len(tokens))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Completion(
            tokens, logprobs, versions, choice["finish_reason"], usage["prompt_tokens"], cached
        )

    def _expand_versions(self, spans: list[dict[str, Any]] | None, count: int) -> list[str]:
        """Return the label of the weights for each of ``count`` tokens. ``spans`` gives it for runs
        of tokens."""
        versions = [
            span["version"] for span in spans or [] for _ in range(span["start"], span["end"])
        ]
        if len(versions) != count:
            raise VllmError(
                f"{self.url} does not report which weights sampled a token; use vLLM 0.32 or later"
            )
        return versions

    async def abort(self, request_id: str) -> None:
        """End a request, which then returns the tokens sampled so far. Does nothing if the request
        does not exist."""
        names = [f"generate-tokens-{request_id}"]
        await self._call("POST", "/inference/v1/abort_requests", json={"request_ids": names})

    async def pause(self, *, clear_cache: bool, timeout_s: float) -> None:
        """Pause sampling, and wait until it has paused. Running requests stay; ``clear_cache``
        drops their keys and values."""
        query = {"mode": "keep", "clear_cache": str(clear_cache).lower()}
        await self._call("POST", "/pause", params=query, timeout_s=timeout_s)

    async def resume(self) -> None:
        """Resume sampling after ``pause``."""
        await self._call("POST", "/resume")

    async def set_version(self, version: str) -> None:
        """Set the version label of the current weights, which the server reports for tokens sampled
        from now on."""
        await self._call("POST", "/update_weight_version", json={"new_version": version})

    async def on_workers(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> list[Any]:
        """Call a method on every worker of the server; return their results."""
        body = {"method": method, "kwargs": dict(arguments)}
        return (await self._call("POST", "/collective_rpc", json=body, timeout_s=timeout_s)).get(
            "results", []
        )

    async def _call(
        self, verb: str, path: str, *, timeout_s: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Send a request and return the JSON body of the response."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            answer = await self._http.request(verb, path, timeout=limit, **fields)
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{self.url}{path} did not answer within {limit:g} s") from error
        except httpx.HTTPError as error:
            raise VllmError(f"{self.url}{path}: {type(error).__name__} {error}") from error
        if answer.status_code == httpx.codes.NOT_FOUND and path in _DEVELOPMENT:
            raise VllmError(f"{self.url} has no {path}: it must run with VLLM_SERVER_DEV_MODE=1")
        if answer.is_error:
            raise VllmError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json() if answer.content else {}


def position_seed(seed: int, position: int) -> int:
    """Return the seed for a request that continues at ``position`` of a sequence. vLLM restarts its
    random numbers in each request, and a turn must not repeat those of the previous turn."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
