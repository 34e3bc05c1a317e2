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
from realhf.api.model import GenRequest
from realhf.aws.environment import SYSTEM_PROMPT
from realhf.aws.evaluation.agent import AgentError, Conversation, Reply
from realhf.aws.extraction import extract_command
from realhf.aws.observation_text import NO_COMMAND, observation_text

_ATTEMPTS = 4
_BACKOFF_S = 0.5
_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})


def observed(reply: Reply, observation: Mapping[str, Any], max_chars: int) -> str:
    """Return what the model reads after a turn of its own."""
    return NO_COMMAND if reply.command is None else observation_text(observation, max_chars=max_chars)


@dataclass
class _Tokens:
    ids: list[int]
    turns: int = 0
    ended: bool = True


@dataclass
class LocalModelAgent:
    """Answers with a causal language model of transformers in this process; ``path`` is a folder or hub id.

    ``gen``: sampling (temperature 0: greedy). ``max_total_tokens`` ends a conversation that grew too long. Raises
    ModelLoadError from ``load``.
    """

    path: str
    gen: GenConfig
    seed: int = 0
    max_total_tokens: int = 4096
    observation_chars: int = 200
    name: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    _tokens: dict[int, _Tokens] = field(default_factory=dict)
    _round: int = 0

    def load(self, threads: int) -> LocalModelAgent:
        """Read weights and tokenizer; torch computes on ``threads`` threads."""
        import torch

        from realhf.backends.embedded.generation import EmbeddedGenerator
        from realhf.backends.threads.compute_threads import threads as compute_threads
        from realhf.backends.training.torch_backend import check_chat_template, load_causal_lm, load_tokenizer

        torch.set_num_threads(threads)
        tokenizer = load_tokenizer(self.path, "model")
        check_chat_template(tokenizer, self.path, "model")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._engine = EmbeddedGenerator(load_causal_lm(self.path, "model", torch.float32).to(device))
        self._engine.threads = compute_threads(threads)
        self._chat = TemplateChat(tokenizer, system_prompt=SYSTEM_PROMPT, template_kwargs=self.chat_template_kwargs)
        return self

    def act(self, conversations: Sequence[Conversation]) -> list[Reply]:
        """Answer all conversations with one batched generation."""
        self._round += 1
        states = [self._grown(conversation) for conversation in conversations]
        fits = [i for i, s in enumerate(states) if len(s.ids) + self.gen.max_new_tokens <= self.max_total_tokens]
        requests = [GenRequest(conversations[i].slot, states[i].ids) for i in fits]
        seed = self.seed * 1_000_003 + self._round
        outputs = self._engine.generate(requests, self.gen, stop_ids=self._chat.stop_ids, seed=seed)
        replies = [Reply("", None)] * len(states)
        for i, output in zip(fits, outputs, strict=True):
            states[i].ids = states[i].ids + output.token_ids
            states[i].ended = output.finish_reason == "stop"
            text = self._chat.decode(output.token_ids)
            replies[i] = Reply(text, extract_command(text))
        return replies

    def finish(self, slots: Sequence[int]) -> None:
        """Free the cached rows and the tokens of these conversations."""
        self._engine.free(slots)
        for slot in slots:
            self._tokens.pop(slot, None)

    def _grown(self, conversation: Conversation) -> _Tokens:
        state = self._tokens.get(conversation.slot)
        if state is None:
            state = self._tokens[conversation.slot] = _Tokens(self._chat.first(conversation.task_text))
        for reply, observation in conversation.turns[state.turns :]:
            text = observed(reply, observation, self.observation_chars)
            state.ids = state.ids + self._chat.following(text, ended=state.ended)
            state.turns += 1
        return state


@dataclass
class ChatApiAgent:
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
    observation_chars: int = 4000
    name: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.name or self.model
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._client = httpx.Client(base_url=self.base_url.rstrip("/"), headers=headers, timeout=self.timeout_s)
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="chat-api")

    def act(self, conversations: Sequence[Conversation]) -> list[Reply]:
        """Ask the endpoint for the next turn of each conversation, concurrently. Raises AgentError."""
        return list(self._threads.map(self._reply, conversations))

    def finish(self, slots: Sequence[int]) -> None:
        """Do nothing: the endpoint keeps no conversation."""
        del slots

    def close(self) -> None:
        """Close the connections and threads."""
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def _reply(self, conversation: Conversation) -> Reply:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": conversation.task_text}]
        for reply, observation in conversation.turns:
            messages.append({"role": "assistant", "content": reply.text})
            messages.append({"role": "user", "content": observed(reply, observation, self.observation_chars)})
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
            raise AgentError(f"{self.base_url}: the answer is not a chat completion: {str(answer)[:200]}") from None
        return Reply(text, extract_command(text))

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
