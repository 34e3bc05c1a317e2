"""Defines agents behind a model: a folder of weights on this machine, or an OpenAI-compatible endpoint.

Source of the turn format: docs/reference/environment.md 9; the conversation is the one that training uses.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from realhf.api.chat import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.aws.environment import SYSTEM_PROMPT
from realhf.aws.evaluation.agent import AgentError, Conversation, TextAgent
from realhf.rollout.episode import Limits
from realhf.rollout.player import EpisodeAgent, TurnAgent

_ATTEMPTS = 4
_BACKOFF_S = 0.5
_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})


@dataclass
class LocalModelAgent:
    """Plays with a causal language model of transformers in this process, as training does; ``path`` is a folder or hub
    id.

    ``gen``: sampling (temperature 0: greedy). ``max_total_tokens`` ends a conversation that grew too long. Raises
    ModelLoadError from ``load``.
    """

    path: str
    gen: GenConfig
    seed: int = 0
    max_total_tokens: int = 4096
    name: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def load(self, threads: int) -> LocalModelAgent:
        """Read weights and tokenizer; torch computes on ``threads`` threads."""
        import torch

        from realhf.backends.embedded.compute_threads import threads as compute_threads
        from realhf.backends.embedded.generation import EmbeddedGenerator
        from realhf.backends.training.torch_backend import check_chat_template, load_causal_lm, load_tokenizer

        torch.set_num_threads(threads)
        tokenizer = load_tokenizer(self.path, "model")
        check_chat_template(tokenizer, self.path, "model")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._engine = EmbeddedGenerator(load_causal_lm(self.path, "model", torch.float32).to(device))
        self._engine.threads = compute_threads(threads)
        self._chat = TemplateChat(tokenizer, template_kwargs=self.chat_template_kwargs, stop_ids=self.gen.stop_ids)
        return self

    def speaker(self, max_turns: int) -> EpisodeAgent:
        """See ``Agent``."""
        return TurnAgent(
            self._chat, Limits(max_turns, self.max_total_tokens, self.gen.max_new_tokens), system_prompt=SYSTEM_PROMPT
        )

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """See ``Agent``: all turns of a round are sampled as one batch."""
        seed = self.seed * 1_000_003 + round_index + 1
        return self._engine.generate(requests, self.gen, stop_ids=self._chat.stop_ids, seed=seed)

    def free(self, slots: Sequence[int]) -> None:
        """See ``Agent``: free the cached rows."""
        self._engine.free(slots)


@dataclass
class ChatApiAgent(TextAgent):
    """Answers with an OpenAI-compatible ``/chat/completions`` endpoint, asked with ``concurrency`` requests at once.

    ``base_url`` ends before ``/chat/completions`` (usually in ``/v1``). A request that fails for a moment is sent
    again, with pauses; one that keeps failing raises AgentError.
    """

    base_url: str
    model: str
    api_key: str = ""
    temperature: float = 0.7
    max_new_tokens: int = 256
    timeout_s: float = 120.0
    concurrency: int = 8
    name: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.name or self.model
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._client = httpx.Client(base_url=self.base_url.rstrip("/"), headers=headers, timeout=self.timeout_s)
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="chat-api")

    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        """Ask the endpoint for the next turn of each conversation, concurrently. Raises AgentError."""
        return list(self._threads.map(self._reply, conversations))

    def close(self) -> None:
        """Close the connections and threads."""
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def _reply(self, conversation: Conversation) -> str:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *conversation.messages]
        request = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_new_tokens,
        }
        if self.chat_template_kwargs:
            request["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        answer = self._post(request)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise AgentError(f"{self.base_url}: the answer is not a chat completion: {str(answer)[:200]}")
        return text

    def _post(self, request: dict[str, Any]) -> Any:
        problem = ""
        for attempt in range(_ATTEMPTS):
            time.sleep(_BACKOFF_S * (2**attempt - 1))
            try:
                response = self._client.post("/chat/completions", json=request)
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
                continue
            if response.is_success:
                return response.json()
            problem = f"HTTP {response.status_code} {response.text[:200]}"
            if response.status_code not in _RETRIED:
                break
        raise AgentError(f"{self.base_url}/chat/completions does not answer: {problem}")


def served_model(base_url: str, api_key: str = "", timeout_s: float = 10.0) -> str:
    """Return the first model that the endpoint lists. Raises AgentError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        listing = httpx.get(f"{base_url.rstrip('/')}/models", headers=headers, timeout=timeout_s).raise_for_status()
        return listing.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise AgentError(f"{base_url}/models lists no model ({error}); name it with --model-name") from None
