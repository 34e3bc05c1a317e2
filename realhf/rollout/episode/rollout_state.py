"""Keeps one episode in progress: its tokens, turns and reward, and how it ends. It does no I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realhf.api.env import VALID_STATUSES, ChatFormat, RolloutOutcome, StepResult, Turn
from realhf.api.model import GenOutput, GenRequest
from realhf.api.observation_text import NO_COMMAND, observation_text, shorten
from realhf.rollout.episode.extraction import extract_command
from realhf.rollout.episode.token_buffer import TokenBuffer

_SHRINK_ATTEMPTS = 6


@dataclass(frozen=True)
class Limits:
    """Bounds an episode. ``turn_tokens``: room a policy turn must have (the engine's max_new_tokens);
    ``observation_chars``: cap of the text of one observation; ``reward_mode``: ``potential`` (rewards are summed) or
    ``level`` (the last one counts)."""

    max_turns: int
    max_total_tokens: int
    turn_tokens: int
    observation_chars: int
    reward_mode: str = "potential"


@dataclass(frozen=True)
class RolloutRequest:
    """Asks for one rollout. ``reset`` are the keyword arguments of the environment's reset; ``sampling_seed`` starts
    the stream of random numbers of its tokens (None: the engine's call decides, see ``GenRequest.seed``)."""

    index: int
    reset: Mapping[str, Any]
    seed: int
    attempt: int = 0
    sampling_seed: int | None = None


@dataclass
class RolloutState:
    """Holds an episode between its reset and its outcome. ``status`` is empty while it goes on."""

    wanted: RolloutRequest
    chat: ChatFormat
    limits: Limits
    status: str = ""
    message: str = ""
    task: dict[str, Any] = field(default_factory=dict)
    tokens: TokenBuffer | None = None
    turns: list[Turn] = field(default_factory=list)
    command: str | None = None
    reward: float = 0.0
    achieved: bool = False
    progress: float = 0.0
    _text: str = ""
    _ended: bool = True
    _turn_ids: list[int] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    def start(self, result: StepResult) -> None:
        """Take the reset reply, which holds the first prompt. Raises ValueError when it exceeds the token budget."""
        self.task = result.observation.get("task") or {}
        self.tokens = TokenBuffer(self.chat.first(self.task.get("description", "")), self.limits.max_total_tokens)
        if self.tokens.room < self.limits.turn_tokens:
            raise ValueError(
                f"the first prompt of {len(self.tokens.prompt_ids)} tokens and a turn of {self.limits.turn_tokens} "
                f"do not fit into max_total_tokens={self.limits.max_total_tokens}"
            )

    def request(self, slot: int) -> GenRequest:
        """Return what the engine continues in this round: a new turn, or one that was interrupted."""
        assert self.tokens is not None
        return GenRequest(slot, self.tokens.prefix(), len(self._turn_ids), self.wanted.sampling_seed)

    def take_turn(self, output: GenOutput) -> None:
        """Take a sampled turn, or a part of one. ``command`` is set when the environment has to run one; otherwise the
        turn goes on (interrupted) or is complete, and the episode goes on or has ended."""
        assert self.tokens is not None
        if not output.token_ids and not (output.finish_reason == "length" and self._turn_ids):
            self._no_turn(output.finish_reason)
            return
        self.tokens.append_policy(output, continues=bool(self._turn_ids))
        self._turn_ids += output.token_ids
        if output.finish_reason == "interrupted":
            return
        self._ended = output.finish_reason == "stop"
        self._text = self.chat.decode(self._turn_ids)
        self._turn_ids = []
        self.command = extract_command(self._text)
        if self.command is None:
            self._finish_turn(NO_COMMAND, None, done=False)

    def _no_turn(self, reason: str) -> None:
        """Handle an engine that sampled nothing. When its context is full, the episode is over as if its budget were
        spent."""
        assert self.tokens is not None
        if reason != "length":
            self.fail("policy_error", "the engine returned no tokens")
        elif not self.turns:
            self.fail(
                "policy_error",
                f"the first prompt of {len(self.tokens.prompt_ids)} tokens fills the engine's "
                "context: it is shorter than rollout.max_total_tokens",
            )
        else:
            self.tokens.drop_environment()
            self.status = "token_budget"

    def take_reply(self, result: StepResult) -> None:
        """Take the environment's answer to ``command``."""
        if result.reward is None or not math.isfinite(result.reward):
            self.fail("env_error", "the environment answered a step without a finite reward")
            return
        observation = result.observation
        self.achieved = bool(observation["task_achieved"])
        self.progress = float(observation["partial_progress"])
        text = observation_text(observation, max_chars=self.limits.observation_chars)
        self._finish_turn(text, result.reward, done=result.done)

    def take_rejection(self, message: str) -> None:
        """Take the wire's refusal of ``command`` itself (too long, not text): a failed turn, not a failed
        environment."""
        self._finish_turn(f"error: {shorten(message, self.limits.observation_chars)}", None, done=False)

    def fail(self, status: str, message: str) -> None:
        """End the episode as a failure, which has no reward."""
        self.status, self.message = status, message

    def _finish_turn(self, text: str, reward: float | None, *, done: bool) -> None:
        """Record the turn. ``reward`` None: the environment took no step."""
        self.turns.append(Turn(self._text, self.command, text, reward or 0.0))
        if reward is not None:
            self.reward = reward if self.limits.reward_mode == "level" else self.reward + reward
        self.command = None
        if self.achieved:
            self.status = "achieved"
        elif done:
            self.status = "finished"
        elif len(self.turns) >= self.limits.max_turns:
            self.status = "max_turns"
        elif not self._append_observation(text):
            self.status = "token_budget"

    def _append_observation(self, text: str) -> bool:
        """Add the observation, cut until a policy turn fits after it; returns False when not even an empty one fits."""
        assert self.tokens is not None
        room = self.tokens.room - self.limits.turn_tokens
        for _ in range(_SHRINK_ATTEMPTS):
            ids = self.chat.following(text, ended=self._ended)
            if len(ids) <= room:
                self.tokens.append_environment(ids)
                return True
            if room <= 0 or not text:
                return False
            text = shorten(text, min(len(text) // 2, len(text) * room // len(ids)))
        return False

    def outcome(self) -> RolloutOutcome:
        """Return the finished episode, after checking the token invariants. A failure keeps no reward."""
        valid = self.status in VALID_STATUSES
        tokens = self.tokens
        if tokens is not None and valid:
            tokens.check()
        return RolloutOutcome(
            status=self.status,
            prompt_ids=tokens.prompt_ids if tokens else [],
            completion_ids=tokens.completion_ids if tokens else [],
            logprobs=tokens.logprobs if tokens else [],
            versions=tokens.versions if tokens else [],
            loss_mask=tokens.loss_mask if tokens else [],
            reward=self.reward if valid else None,
            achieved=self.achieved and valid,
            progress=self.progress,
            turns=tuple(self.turns),
            task_id=int(self.task.get("task_id", -1)),
            tier=str(self.task.get("difficulty", "")),
            seed=self.wanted.seed,
            task_text=str(self.task.get("description", "")),
            message=self.message,
            timings={"wall_s": time.perf_counter() - self._began},
            last_turn_cut=bool(self.turns) and not self._ended,
        )
