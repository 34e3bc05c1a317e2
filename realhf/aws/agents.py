"""Agents for the evaluation: scripted and random ones, a local model, and a model behind an
OpenAI-compatible endpoint.

A *conversation* is one episode as its agent sees it. A ``TextAgent`` maps conversations to turns of
text. It gets all conversations of a round at once, so that an endpoint can be asked concurrently; a
local model samples the turns of a round as one batch of tokens.

Source of the turn format: docs/reference/environment.md 9; training uses the same conversations.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from realhf.api.chat_template import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.environment import AssistantMessage, ChatMessage, Environment, Opening
from realhf.api.generation import TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import RolloutOutcome
from realhf.aws.environment import SYSTEM_PROMPT
from realhf.aws.tasks.captures import fill_setup, resolve
from realhf.aws.tasks.loader import instantiate, is_name, load_templates
from realhf.rollout.episode import (
    ContextFull,
    EpisodeLimits,
    EpisodeRequest,
    RecordingEnvironment,
    play_episode,
)
from realhf.rollout.player import EpisodeAgent, TurnAgent


@dataclass
class Conversation:
    """One episode as the agent sees it."""

    messages: list[dict[str, Any]]
    """Messages in the chat API's format; the first one is the task."""
    reference: Sequence[str] = ()
    """Commands of the reference solution; only the scripted expert uses them."""
    outputs: list[str] = field(default_factory=list)
    """Outputs of the commands so far, which fill the captures in the reference solution."""


class AgentError(RuntimeError):
    """The agent cannot produce turns at all (the endpoint is gone, the model does not load). This
    ends the evaluation."""


class Agent(Protocol):
    """A policy under evaluation: provides the ``EpisodeAgent`` that plays episodes, and is the
    engine (``BatchEngine``) that generates their turns."""

    name: str
    """Name in tables and plots."""

    def episode_agent(self, max_turns: int) -> EpisodeAgent:
        """Return an ``EpisodeAgent`` that plays episodes of at most ``max_turns`` turns."""
        ...

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Return the next turn of each requested episode, in the order of ``requests``. Raises
        AgentError."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Drop the state kept for the finished episodes in these slots."""
        ...


class TextAgent(ABC):
    """An ``Agent`` that works on text instead of tokens."""

    name: str

    @abstractmethod
    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return the next turn of each conversation, in order; "" means that the agent gives up.
        Raises AgentError."""

    def episode_agent(self, max_turns: int) -> EpisodeAgent:
        """See ``Agent.episode_agent``."""
        return _TextEpisodeAgent(max_turns)

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """See ``Agent.generate``."""
        del round_index
        texts = self.act(
            [request.conversation for request in requests if isinstance(request, _TextRequest)]
        )
        return [_TextOutput([], [], [], "stop", text=text) for text in texts]

    def free(self, slots: Sequence[int]) -> None:
        """Do nothing: a text agent keeps no state between rounds."""
        del slots


@dataclass(frozen=True, kw_only=True)
class _TextRequest(GenRequest):
    conversation: Conversation


@dataclass(frozen=True, kw_only=True)
class _TextOutput(GenOutput):
    text: str


@dataclass(frozen=True)
class _TextEpisodeAgent:
    """An ``EpisodeAgent`` whose turns are text without tokens."""

    max_turns: int

    async def play(
        self, env: Environment, request: EpisodeRequest, llm: TokenSource, slot: int
    ) -> RolloutOutcome:
        """See ``EpisodeAgent.play``."""
        recorder = RecordingEnvironment(env)
        text_turns = _TextTurns(recorder, request.task.payload["task"]["solution"], llm, slot)
        return await play_episode(recorder, request, text_turns, self.max_turns)


class _TextTurns:
    """A ``TurnSource`` for text without tokens. If the agent gives up, the episode ends as if the
    context were full."""

    tokens = None
    last_turn_cut = False

    def __init__(
        self, recorder: RecordingEnvironment, solution: Sequence[str], llm: TokenSource, slot: int
    ) -> None:
        self._recorder = recorder
        self._solution = solution
        self._llm = llm
        self._slot = slot
        self._conversation = Conversation([])

    def open(self, opening: Opening) -> None:
        """See ``TurnSource.open``."""
        reference = fill_setup(list(self._solution), opening.info["setup_answers"])
        self._conversation = Conversation(
            [dict(message) for message in opening.messages], reference
        )

    async def next_turn(self) -> AssistantMessage:
        """See ``TurnSource.next_turn``."""
        output = await self._llm.generate(
            _TextRequest(self._slot, (), conversation=self._conversation)
        )
        if not isinstance(output, _TextOutput):
            raise TypeError("a text agent was played with an engine that generates tokens")
        if not output.text:
            raise ContextFull
        self._conversation.messages.append({"role": "assistant", "content": output.text})
        return AssistantMessage(output.text, text=output.text)

    def observe(self, messages: Sequence[ChatMessage]) -> bool:
        """See ``TurnSource.observe``."""
        observation: Mapping[str, Any] = self._recorder.turns[-1].info.get("observation", {})
        self._conversation.outputs.append(observation.get("command_output", ""))
        self._conversation.messages += [dict(message) for message in messages]
        return True


_SEED_BITS = 31


class ScriptedExpert(TextAgent):
    """Agent that plays the reference solution, command by command."""

    name = "scripted expert"

    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return the next reference command of each conversation."""
        remaining = [(one.reference[len(one.outputs) :], one.outputs) for one in conversations]
        return [
            resolve(commands[0], outputs) if commands else "" for commands, outputs in remaining
        ]


class RandomAgent(TextAgent):
    """Agent that plays random commands from the solutions of other tasks, with names taken from the
    text of the current task. It sets the baseline: a policy that knows the CLI but ignores the
    task."""

    name = "random agent"

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(f"random agent:{seed}")
        self._templates = [template.task_id for template in load_templates(split="train")]

    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return a random command for each conversation."""
        return [
            self._random_command(str(conversation.messages[0]["content"]))
            for conversation in conversations
        ]

    def _random_command(self, task_text: str) -> str:
        task = instantiate(self._rng.choice(self._templates), self._rng.getrandbits(_SEED_BITS))
        command = self._rng.choice(task.solution)
        names = [
            word for word in task_text.replace(",", " ").replace(".", " ").split() if is_name(word)
        ]
        if names:
            for value in task.params.values():
                if is_name(value):
                    command = command.replace(value, self._rng.choice(names))
        return command


_ATTEMPTS = 4
"""Maximum number of attempts per request; then AgentError is raised."""
_BACKOFF_S = 0.5
"""First back-off between attempts, in seconds; it doubles with each attempt."""
_TRANSIENT_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504})
"""HTTP statuses of transient failures, which are retried."""


@dataclass
class LocalModelAgent:
    """Agent that plays with a causal language model from transformers. The model runs in this
    process and is sampled as in training. ``load`` raises ModelLoadError."""

    path: str
    """Folder or hub id of the model."""
    gen: GenConfig
    """Sampling settings; temperature 0 is greedy."""
    seed: int = 0
    """Seed of the sampler."""
    max_total_tokens: int = 4096
    """Maximum number of tokens in a conversation; without room for another turn the episode
    ends."""
    name: str = ""
    """Name in tables and plots."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""

    def load(self, threads: int) -> LocalModelAgent:
        """Load weights and tokenizer, and return self. ``threads``: number of compute threads for
        torch."""
        import torch

        from realhf.backends.embedded.compute_threads import threads as compute_threads
        from realhf.backends.embedded.generation import EmbeddedGenerator
        from realhf.backends.training.torch_backend import (
            check_chat_template,
            load_causal_lm,
            load_tokenizer,
        )

        torch.set_num_threads(threads)
        tokenizer = load_tokenizer(self.path, "model")
        check_chat_template(tokenizer, self.path, "model")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._engine = EmbeddedGenerator(
            load_causal_lm(self.path, "model", torch.float32).to(device)
        )
        self._engine.threads = compute_threads(threads)
        self._chat = TemplateChat(
            tokenizer, template_kwargs=self.chat_template_kwargs, stop_ids=self.gen.stop_ids
        )
        return self

    def episode_agent(self, max_turns: int) -> EpisodeAgent:
        """See ``Agent.episode_agent``."""
        return TurnAgent(
            self._chat,
            EpisodeLimits(max_turns, self.max_total_tokens, self.gen.max_new_tokens),
            system_prompt=SYSTEM_PROMPT,
        )

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Sample the turns of all requests as one batch; see ``Agent.generate``."""
        seed = self.seed * 1_000_003 + round_index + 1
        return self._engine.generate(requests, self.gen, stop_ids=self._chat.stop_ids, seed=seed)

    def free(self, slots: Sequence[int]) -> None:
        """Free the key-value cache of these slots."""
        self._engine.free(slots)


@dataclass
class ChatApiAgent(TextAgent):
    """Agent that gets its turns from an OpenAI-compatible ``/chat/completions`` endpoint. Transient
    failures are retried with back-off; a request that keeps failing raises AgentError."""

    base_url: str
    """Base URL of the endpoint, without ``/chat/completions``; it usually ends in ``/v1``."""
    model: str
    """Name of the model at the endpoint."""
    api_key: str = ""
    """Bearer token; "" sends none."""
    temperature: float = 0.7
    """Sampling temperature."""
    max_new_tokens: int = 256
    """Maximum number of tokens in a turn."""
    timeout_s: float = 120.0
    """Deadline of one request, in seconds."""
    concurrency: int = 8
    """Maximum number of concurrent requests."""
    name: str = ""
    """Name in tables and plots; default: ``model``."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template; sent only if not empty."""

    def __post_init__(self) -> None:
        self.name = self.name or self.model
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._client = httpx.Client(
            base_url=self.base_url.rstrip("/"), headers=headers, timeout=self.timeout_s
        )
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="chat-api")

    def act(self, conversations: Sequence[Conversation]) -> list[str]:
        """Request the next turn of each conversation from the endpoint, concurrently. Raises
        AgentError."""
        return list(self._threads.map(self._reply, conversations))

    def close(self) -> None:
        """Close the connections and stop the threads."""
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
            # An empty turn (only reasoning, or cut off) still counts as a turn, as in training.
            text = answer["choices"][0]["message"]["content"] or " "
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise AgentError(
                f"{self.base_url}: the answer is not a chat completion: {str(answer)[:200]}"
            )
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
            if response.status_code not in _TRANSIENT_STATUSES:
                break
        raise AgentError(f"{self.base_url}/chat/completions does not answer: {problem}")


def served_model(base_url: str, api_key: str = "", timeout_s: float = 10.0) -> str:
    """Return the name of the first model that the endpoint lists. Raises AgentError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        listing = httpx.get(
            f"{base_url.rstrip('/')}/models", headers=headers, timeout=timeout_s
        ).raise_for_status()
        return listing.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise AgentError(
            f"{base_url}/models lists no model ({error}); name it with --model-name"
        ) from None
