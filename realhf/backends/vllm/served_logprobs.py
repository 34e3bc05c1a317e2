"""Log-probabilities of tokens under a model behind an HTTP server, used as a teacher.

Requests are ``/v1/completions`` of the OpenAI API, with the token ids of a whole sequence as the
prompt. The server returns the log-probabilities of the prompt either as vLLM does
(``prompt_logprobs``), or by ``echo`` and ``logprobs``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from realhf.api.model import CallContext, Model
from realhf.api.sample import SequenceSample
from realhf.base import event_loops

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before each retry of a request that failed because of the network, a server error
or overload."""
_BUSY = 429
"""HTTP status of an overloaded server."""
_SPACES = str.maketrans("\u0120\u2581", "  ")
"""Translation table for characters that represent a space in tokens of servers that do not decode
them."""


class ServedLogprobInterface:
    """Interface that computes ``teacher_logprobs`` fp32 (L-1) from ``packed_input_ids`` and
    ``loss_mask``: the log-probability of every trainable token, at temperature 1, under the model
    behind ``url``; 0 elsewhere.

    Only the tokenizer of the interface's model is used. It must be the same as the server's, which
    is checked with the first results.

    Args:
        url: Address of the server, without /v1.
        served_model: Name of the model on the server; "" for the first one that it lists.
        token_file: File with the bearer token, "" for none.
        connections: Maximum number of concurrent requests, of one sequence each.
        timeout_s: Timeout of a whole call, seconds.
    """

    def __init__(
        self,
        url: str,
        served_model: str = "",
        token_file: str = "",
        connections: int = 16,
        timeout_s: float = 600.0,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._name = served_model
        self._token_file = token_file
        self._connections = connections
        self._timeout_s = timeout_s
        self._compared = False

    def inference(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the sample with ``teacher_logprobs``, and the statistic ``n_tokens``, the number
        of tokens sent.

        Raises RuntimeError naming the server if it does not return log-probabilities, TimeoutError,
        and ValueError for a different tokenizer.
        """
        del context
        lengths = np.asarray(sample.lengths("packed_input_ids").values).tolist()
        ids = [part.tolist() for part in sample["packed_input_ids"].cpu().split(lengths)]
        masks = [part[1:].bool() for part in sample["loss_mask"].cpu().split(lengths)]
        requested = [number for number, mask in enumerate(masks) if bool(mask.any())]
        logprobs = event_loops.run(
            self._request_all([ids[number] for number in requested], model.tokenizer)
        )
        out = [torch.zeros(len(mask)) for mask in masks]
        for number, values in zip(requested, logprobs, strict=True):
            out[number] = torch.where(masks[number], torch.tensor(values), 0.0)
        less_one = [
            [length - 1 for length in inner] for inner in sample.seqlens["packed_input_ids"]
        ]
        result = SequenceSample.from_tensors(
            sample.ids,
            {"teacher_logprobs": torch.cat(out) if out else torch.zeros(0)},
            {"teacher_logprobs": less_one},
        )
        return result, {"n_tokens": float(sum(len(ids[number]) for number in requested))}

    async def _request_all(
        self, sequences: Sequence[Sequence[int]], tokenizer: Any
    ) -> list[list[float]]:
        """Return the log-probabilities of all sequences, requested concurrently."""
        token = (
            Path(self._token_file).expanduser().read_text(encoding="utf-8").strip()
            if self._token_file
            else ""
        )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(
            max_connections=self._connections, max_keepalive_connections=self._connections
        )
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncClient(
                    headers=headers, limits=limits, trust_env=False, timeout=None
                ) as http,
                asyncio.TaskGroup() as group,
            ):
                self._name = self._name or await self._fetch_first_model(http)
                tasks = [
                    group.create_task(self._request_one(http, ids, tokenizer)) for ids in sequences
                ]
        except TimeoutError:
            raise TimeoutError(
                f"teacher.url={self._url}: no answer about all {len(sequences)} sequences within "
                f"{self._timeout_s:g} s "
                "(rpc.call_timeout_s)"
            ) from None
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _fetch_first_model(self, http: httpx.AsyncClient) -> str:
        """Return the name of the first model that the server lists."""
        answer = await self._request_json(http, "GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RuntimeError(
                f"teacher.url={self._url}: /v1/models lists no model; set teacher.model"
            ) from None

    async def _request_one(
        self, http: httpx.AsyncClient, ids: Sequence[int], tokenizer: Any
    ) -> list[float]:
        """Return the log-probability of every token of a sequence except the first."""
        body = {"model": self._name, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0}
        body |= {"prompt_logprobs": 0, "echo": True, "logprobs": 1}
        answer = await self._request_json(http, "POST", "/v1/completions", json=body)
        try:
            choice = answer["choices"][0]
            rows = choice.get("prompt_logprobs")
            texts, values = (
                _parse_rows(rows, ids) if rows else _parse_echo(choice["logprobs"], len(ids))
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"teacher.url={self._url}: the answer has no log-probabilities of the {len(ids)} "
                f"tokens that were "
                f"sent ({type(error).__name__}: {error}); the server must support prompt_logprobs, "
                f"or echo and logprobs"
            ) from None
        if not self._compared:
            self._compare_texts(ids[1:], texts, tokenizer)
        return values

    def _compare_texts(
        self, ids: Sequence[int], texts: Sequence[str | None], tokenizer: Any
    ) -> None:
        """Raise ValueError if the server's text of a token differs from that of the actor's
        tokenizer. Only tokens that are words in both texts are compared, because many servers write
        partial characters and special tokens differently."""
        for number, raw_text in zip(ids, texts, strict=True):
            own_text = tokenizer.decode([number], clean_up_tokenization_spaces=False).strip()
            server_text = (raw_text or "").translate(_SPACES).strip()
            if all(word.isascii() and word.isalnum() for word in (own_text, server_text)):
                self._compared = True
                if own_text != server_text:
                    raise ValueError(
                        f"teacher.url={self._url}: the token {number} is {server_text[:40]!r} "
                        "there and "
                        f"{own_text[:40]!r} in the "
                        "actor's tokenizer; the teacher reads the actor's tokens, so it must have "
                        "the same tokenizer"
                    )

    async def _request_json(
        self, http: httpx.AsyncClient, verb: str, path: str, **fields: Any
    ) -> Any:
        """Return the JSON of a response; retry temporary errors."""
        problem = ""
        for pause_s in (*_PAUSES_S, None):
            try:
                answer = await http.request(verb, f"{self._url}{path}", **fields)
                if not answer.is_error:
                    return answer.json()
                problem = f"answered {answer.status_code}: {answer.text[:300]}"
                if not answer.is_server_error and answer.status_code != _BUSY:
                    break
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {error}"
            except ValueError:
                problem = "the answer is not JSON"
                break
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise RuntimeError(f"teacher.url={self._url}{path}: {problem}")


def _parse_rows(rows: Sequence[Any], ids: Sequence[int]) -> tuple[list[str | None], list[float]]:
    """Return the texts and log-probabilities in ``prompt_logprobs``, which has, for each prompt
    token except the first, a dict from token ids to their entries."""
    if len(rows) != len(ids):
        raise ValueError(f"{len(rows)} rows")
    entries = [row[str(number)] for row, number in zip(rows[1:], ids[1:], strict=True)]
    return [entry.get("decoded_token") for entry in entries], [
        float(entry["logprob"]) for entry in entries
    ]


def _parse_echo(logprobs: Any, count: int) -> tuple[list[str | None], list[float]]:
    """Return the texts and log-probabilities of an echoed prompt of ``count`` tokens, which may be
    followed by a sampled token."""
    texts = logprobs["tokens"]
    values = logprobs["token_logprobs"]
    if len(values) < count or len(texts) != len(values):
        raise ValueError(f"{len(values)} log-probabilities")
    return list(texts[1:count]), [float(value) for value in values[1:count]]
