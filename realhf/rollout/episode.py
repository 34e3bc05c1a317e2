"""One episode in tokens: a policy and an environment take turns, and the result is a
``RolloutOutcome``.

A ``TurnSource`` gets the environment's opening messages, returns a turn, gets the environment's
answer, and so on. Tokens are never decoded and encoded again: the prefix given to the engine at
turn t is the list that is stored, and the trainer gets the same list (docs/reference/environment.md
9).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from realhf.api.environment import (
    AssistantMessage,
    ChatMessage,
    Environment,
    EnvironmentFailure,
    Opening,
    Task,
    TaskLimits,
    Turn,
    is_finite,
)
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import POLICY_FAILED, VALID_STATUSES, ChatFormat, PlayedTurn, RolloutOutcome
from realhf.base.text import shorten


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode."""

    max_turns: int
    """Maximum number of policy turns."""
    max_total_tokens: int
    """Maximum number of tokens of prompt and completion together."""
    turn_tokens: int
    """Number of free tokens required before a policy turn (the engine's max_new_tokens)."""
    max_new_tokens: int = 0
    """Maximum number of tokens per turn, if that is lower than the engine's; 0 for no limit of the
    episode's own."""

    def narrow(self, limits: TaskLimits) -> EpisodeLimits:
        """Return the limits with those that the run sets for the task's environment, unless they
        are higher."""
        return replace(
            self,
            max_turns=min(self.max_turns, limits.max_turns or self.max_turns),
            max_total_tokens=min(
                self.max_total_tokens, limits.max_total_tokens or self.max_total_tokens
            ),
            turn_tokens=min(self.turn_tokens, limits.max_new_tokens or self.turn_tokens),
            max_new_tokens=min(self.turn_tokens, limits.max_new_tokens),
        )


@dataclass(frozen=True)
class EpisodeRequest:
    """Request for one episode."""

    index: int
    """Index among the requests that are played together."""
    task: Task
    """The task."""
    sampling_seed: int | None = None
    """Seed of the random numbers for the episode's tokens; None: the engine's call decides
    (``GenRequest.seed``)."""


class TokenBuffer:
    """Tokens of an episode: prompt ids, completion ids, and for each completion id its
    log-probability, that without its token mask, version and loss mask. ``turn_starts`` are the
    indices in the completion at which policy turns begin."""

    def __init__(self, prompt_ids: Sequence[int], max_total_tokens: int) -> None:
        if not prompt_ids:
            raise ValueError("the first prompt has no tokens")
        self.prompt_ids = list(prompt_ids)
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self.unmasked_logprobs: list[float] = []
        self.versions: list[int] = []
        self.loss_mask: list[bool] = []
        self.turn_starts: list[int] = []
        self._max_total = max_total_tokens
        self._generated = 0
        self._has_masks = False
        self._policy_spoke_last = False

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the budget."""
        return self._max_total - len(self.prompt_ids) - len(self.completion_ids)

    def prefix(self) -> list[int]:
        """Return prompt and completion so far, which the engine continues."""
        return self.prompt_ids + self.completion_ids

    def append_policy(self, output: GenOutput, *, continues: bool = False) -> None:
        """Add a sampled turn or, with ``continues``, the next part of an interrupted one.

        Raises ValueError if its ids, logprobs and versions differ in length, or if it exceeds the
        budget.
        """
        count = len(output.token_ids)
        has_masks = output.unmasked_logprobs is not None
        unmasked = output.logprobs if output.unmasked_logprobs is None else output.unmasked_logprobs
        if not count == len(output.logprobs) == len(unmasked) == len(output.versions):
            raise ValueError(
                f"engine returned {count} tokens, {len(output.logprobs)} logprobs, "
                f"{len(output.versions)} versions"
            )
        if self._policy_spoke_last is not continues:
            raise ValueError(
                "a policy turn must follow the prompt or an observation, and its continuation must "
                "follow it directly"
            )
        if count > self.room:
            raise ValueError(
                f"policy turn of {count} tokens where max_total_tokens={self._max_total} leaves "
                f"{self.room}; "
                "the pool's turn_tokens must be at least the engine's max_new_tokens"
            )
        if not continues:
            self.turn_starts.append(len(self.completion_ids))
        self.completion_ids += output.token_ids
        self.logprobs += output.logprobs
        self.unmasked_logprobs += unmasked
        self._has_masks |= has_masks
        self.versions += output.versions
        self.loss_mask += [True] * count
        self._generated += count
        self._policy_spoke_last = True

    def append_environment(self, ids: Sequence[int]) -> None:
        """Add template and observation tokens, which are excluded from the loss. Raises ValueError
        if there is no policy turn before them."""
        if not self._policy_spoke_last:
            raise ValueError("environment tokens must follow a policy turn")
        self.completion_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.unmasked_logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.loss_mask += [False] * len(ids)
        self._policy_spoke_last = False

    def drop_environment(self) -> None:
        """Remove the environment's tokens after the last policy turn, because no further turn
        follows."""
        while self.completion_ids and not self.loss_mask[-1]:
            for column in self._by_token():
                column.pop()
        self._policy_spoke_last = bool(self.completion_ids)

    def check(self) -> None:
        """Raise AssertionError unless the invariants of a finished episode hold."""
        sizes = {len(column) for column in self._by_token()}
        assert len(sizes) == 1, f"completion parts differ in length: {sizes}"
        assert sum(self.loss_mask) == self._generated, (
            "the mask does not cover exactly the generated tokens"
        )
        assert not self.completion_ids or self.loss_mask[-1], (
            "environment tokens after the last policy turn"
        )
        assert self.room >= 0, "token budget exceeded"

    def columns(self) -> dict[str, Sequence[Any]]:
        """Return the tokens as the fields of a ``RolloutOutcome``, after checking them."""
        self.check()
        columns: dict[str, Sequence[Any]] = {name: getattr(self, name) for name in _COLUMNS}
        return columns | ({"unmasked_logprobs": self.unmasked_logprobs} if self._has_masks else {})

    def _by_token(self) -> tuple[list[Any], ...]:
        """Return the columns with one entry for each token of the completion."""
        return (
            self.completion_ids,
            self.logprobs,
            self.unmasked_logprobs,
            self.versions,
            self.loss_mask,
        )


_COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "versions", "loss_mask", "turn_starts")


def make_outcome(
    task: Task,
    tokens: TokenBuffer | None,
    status: str,
    reward: float | None = None,
    *,
    achieved: bool = False,
    progress: float = 0.0,
    turns: Sequence[PlayedTurn] = (),
    **more: Any,
) -> RolloutOutcome:
    """Return the outcome of an episode of ``task``. ``more`` are further fields of the outcome. A
    failed episode keeps its tokens, but has no reward."""
    valid = status in VALID_STATUSES
    columns = (
        tokens.columns()
        if tokens is not None and valid
        else {n: getattr(tokens, n, []) for n in _COLUMNS}
    )
    return RolloutOutcome(
        status=status,
        reward=reward if valid else None,
        achieved=achieved and valid,
        progress=progress,
        turns=tuple(turns),
        task_id=task.id,
        group=task.group,
        seed=task.seed,
        template=task.template,
        environment=task.environment,
        **columns,
        **more,
    )


_SHRINK_ATTEMPTS = 6
"""Maximum number of attempts to shorten an observation before the episode ends for lack of
tokens."""
_MAX_CHARS_PER_TOKEN = 32
"""Assumed maximum number of characters in a token. Longer tokens are runs of one character, which
may be shortened."""


class ContextFull(Exception):
    """Error: the engine's context has no room for another turn, although the token budget has."""


class TurnSource(Protocol):
    """The policy's side of one episode."""

    @property
    def tokens(self) -> TokenBuffer | None:
        """Tokens of the episode; None before its opening, and always for a source without
        tokens."""
        ...

    @property
    def last_turn_cut(self) -> bool:
        """Whether the last turn was cut off by a token limit."""
        ...

    def open(self, opening: Opening) -> None:
        """Start with the environment's opening. Raises ValueError if it leaves no room for a
        turn."""
        ...

    async def next_turn(self) -> AssistantMessage:
        """Return the next turn. Raises GenerationFailed, or ContextFull after the first turn."""
        ...

    def observe(self, messages: Sequence[ChatMessage]) -> bool:
        """Add the environment's answer to the last turn; return whether there is room for another
        turn."""
        ...


@dataclass(eq=False)
class Conversation:
    """``TurnSource`` whose turns a policy samples, as one growing sequence of tokens."""

    chat: ChatFormat
    """Chat template and parser of the policy."""
    limits: EpisodeLimits
    """Limits of the episode."""
    source: TokenSource
    """Source that samples the tokens."""
    slot: int
    """Slot of the engine's cache, reserved for this episode."""
    seed: int | None
    """Seed of the random numbers of its tokens."""
    system: Sequence[ChatMessage] = ()
    """System messages, which precede those of the environment."""
    tokens: TokenBuffer | None = None
    """Tokens of the episode; None before its opening."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the opening."""
    _ended: bool = True
    """Whether a stop token ended the last turn."""
    _end: int | None = None
    """The last token of the last turn."""
    _has_turn: bool = False
    """Whether a turn was sampled."""

    @property
    def last_turn_cut(self) -> bool:
        """Whether the last turn was cut off by a token limit."""
        return self._has_turn and not self._ended

    def open(self, opening: Opening) -> None:
        """Encode the opening as the prompt. Raises ValueError if it leaves no room for a turn."""
        self.tools = opening.tools
        prompt = self.chat.opening([*self.system, *opening.messages], opening.tools)
        self.tokens = TokenBuffer(prompt, self.limits.max_total_tokens)
        if self.tokens.room < self.limits.turn_tokens:
            raise ValueError(
                f"the first prompt of {len(prompt)} tokens and a turn of {self.limits.turn_tokens} "
                f"do not fit into "
                f"max_total_tokens={self.limits.max_total_tokens}"
            )

    async def next_turn(self) -> AssistantMessage:
        """Sample a turn; a turn that a weight update interrupts is continued with the new weights.

        Raises GenerationFailed, or ContextFull after the first turn.
        """
        assert self.tokens is not None
        sampled: list[int] = []
        while True:
            request = GenRequest(
                self.slot,
                self.tokens.prefix(),
                len(sampled),
                self.seed,
                max_new_tokens=self.limits.max_new_tokens,
            )
            output = await self.source.generate(request)
            if not output.token_ids and not (output.finish_reason == "length" and sampled):
                self._raise_empty(output)
            self.tokens.append_policy(output, continues=bool(sampled))
            sampled += output.token_ids
            if output.finish_reason != "interrupted":
                break
        self._has_turn = True
        self._ended = output.finish_reason == "stop"
        self._end = sampled[-1]
        return self.chat.parse(sampled, self.tools)

    def _raise_empty(self, output: GenOutput) -> None:
        """Raise the error for an output without tokens: ContextFull or GenerationFailed."""
        assert self.tokens is not None
        if output.finish_reason != "length":
            raise GenerationFailed("the engine returned no tokens")
        if not self._has_turn:
            raise GenerationFailed(
                f"the first prompt of {len(self.tokens.prompt_ids)} tokens fills the engine's "
                f"context: it is shorter "
                "than rollout.max_total_tokens"
            )
        self.tokens.drop_environment()
        raise ContextFull

    def observe(self, messages: Sequence[ChatMessage]) -> bool:
        """Add the messages, shortening long ones until a policy turn fits after them; return
        whether that succeeded."""
        assert self.tokens is not None
        ids = self._encode_within(messages, self.tokens.room - self.limits.turn_tokens)
        if ids is not None:
            self.tokens.append_environment(ids)
        return ids is not None

    def _encode_within(self, messages: Sequence[ChatMessage], room: int) -> list[int] | None:
        """Return the token ids of the messages, shortening long ones until there are at most
        ``room`` ids; None if that is impossible."""
        # Texts that cannot fit are shortened before the first encoding, which would block the event
        # loop for long.
        shown = _shorten_messages(messages, room * _MAX_CHARS_PER_TOKEN)
        for _ in range(_SHRINK_ATTEMPTS):
            ids = self.chat.following_messages(
                shown, ended=self._ended, end=self._end, tools=self.tools
            )
            if len(ids) <= room:
                return ids
            size = sum(len(message.get("content") or "") for message in shown)
            if room <= 0 or not size:
                return None
            shown = _shorten_messages(shown, min(size // 2, size * room // len(ids)))
        return None


def _shorten_messages(messages: Sequence[ChatMessage], max_chars: int) -> list[ChatMessage]:
    """Return the messages, with the longest ones cut to a common length so that all of them
    together have at most ``max_chars`` characters."""
    sizes = sorted(len(message.get("content") or "") for message in messages)
    remaining = max(max_chars, 0)
    # From the shortest on: each message that fits into its equal share leaves the rest to the
    # longer ones.
    for number, size in enumerate(sizes):
        share = remaining // (len(sizes) - number)
        if size > share:
            texts = [message.get("content") or "" for message in messages]
            return [
                {**message, "content": shorten(text, share)} if len(text) > share else message
                for message, text in zip(messages, texts, strict=True)
            ]
        remaining -= size
    return [*messages]


_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference between the seeds of consecutive rows: 2**64 divided by the golden ratio, so that the
seeds are far apart."""
_SEEDS = 1 << 63
"""Upper bound (exclusive) of seeds."""


@dataclass(frozen=True)
class _SampledTurn:
    """Token ids of a policy turn."""

    before: list[int]
    """Ids between the previous turn and this one."""
    ids: list[int]
    """The sampled ids."""
    without_reasoning: list[int] | None
    """The part of ``ids`` after the reasoning; None if there is no reasoning."""


@dataclass(eq=False)
class TruncatingConversation(Conversation):
    """``Conversation`` for chat templates that drop old reasoning.

    It starts a new *row* (a training sequence) whenever the template leaves out reasoning that the
    current row contains, because the policy's next prompt then does not extend its previous tokens.
    Each row has its own seed, and ``max_total_tokens`` applies to each row.

    Consecutive rows share exact prefixes. A new row begins with the ids of the previous row up to
    the first turn whose reasoning is dropped. From there on, turns keep the ids that were sampled
    for their text, unless one token holds both reasoning and text.
    """

    _rows: list[tuple[TokenBuffer, int]] = field(default_factory=list)
    """Finished rows, each with the number of the first turn in it."""
    _first_turn: int = 0
    """Number of the first turn of the current row."""
    _turns: list[_SampledTurn] = field(default_factory=list)
    """All turns of the episode."""
    _before: list[int] = field(default_factory=list)
    """Ids that follow the last turn and precede the next one."""
    _shape: list[tuple[str, ...]] = field(default_factory=list)
    """Roles of the messages before each turn."""
    _dropped: set[int] = field(default_factory=set)
    """Numbers of the turns whose reasoning is dropped."""

    def open(self, opening: Opening) -> None:
        """Encode the opening as the prompt. Raises ValueError if it leaves no room for a turn."""
        super().open(opening)
        assert self.tokens is not None
        self._before = list(self.tokens.prompt_ids)
        self._shape = [_roles([*self.system, *opening.messages])]

    async def next_turn(self) -> AssistantMessage:
        """Sample a turn. Raises GenerationFailed, or ContextFull after the first turn."""
        assert self.tokens is not None
        start = len(self.tokens.completion_ids)
        turn = await super().next_turn()
        ids = self.tokens.completion_ids[start:]
        self._turns.append(_SampledTurn(self._before, ids, self.chat.without_reasoning(ids)))
        return turn

    def observe(self, messages: Sequence[ChatMessage]) -> bool:
        """Add the messages, in a new row if the template now drops reasoning; return whether
        another turn fits after them."""
        assert self.tokens is not None
        shape = [*self._shape, _roles(messages)]
        forgotten = self.chat.find_forgotten_turns(shape, self.tools)
        dropped = self._dropped | {
            n
            for n, turn in enumerate(self._turns)
            if turn.without_reasoning is not None and forgotten[n]
        }
        starts_row = dropped > self._dropped
        head = self._encode_without_reasoning(dropped) if starts_row else self.tokens.prefix()
        ids = self._encode_within(
            messages, self.limits.max_total_tokens - len(head) - self.limits.turn_tokens
        )
        if ids is None:
            return False
        if starts_row:
            self._rows.append((self.tokens, self._first_turn))
            self.tokens = TokenBuffer(head + ids, self.limits.max_total_tokens)
            self._first_turn = len(self._turns)
            self.seed = None if self.seed is None else (self.seed + _SEED_STRIDE) % _SEEDS
        else:
            self.tokens.append_environment(ids)
        self._before = ids
        self._shape = shape
        self._dropped = dropped
        return True

    def split_rows(self, outcome: RolloutOutcome) -> RolloutOutcome:
        """Return the outcome with one trajectory for each row: the last row is the main one, the
        earlier rows are its branches. A failed episode keeps only one row, because it is not
        trained on."""
        rows = [*self._rows, (self.tokens, self._first_turn)]
        rows_with_turns = [
            (tokens, first)
            for tokens, first in rows
            if tokens is not None and tokens.completion_ids
        ]
        if not outcome.valid or not rows_with_turns:
            return outcome
        *branches, last = [
            replace(outcome, **tokens.columns(), first_turn=first)
            for tokens, first in rows_with_turns
        ]
        return replace(last, branches=tuple(branches))

    def _encode_without_reasoning(self, dropped: set[int]) -> list[int]:
        """Return the token ids of the conversation so far, leaving out the reasoning of the turns
        ``dropped``."""
        ids: list[int] = []
        for number, turn in enumerate(self._turns):
            text_ids = turn.without_reasoning if number in dropped else None
            # A generation prompt that opens the reasoning is dropped with it.
            ids += (
                turn.before if text_ids is None else self.chat.without_open_reasoning(turn.before)
            )
            ids += turn.ids if text_ids is None else text_ids
        return ids


def _roles(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    return tuple(str(message.get("role")) for message in messages)


class RecordingEnvironment:
    """Wrapper of an episode's environment ``env`` that records its answers in ``opening`` and
    ``turns``."""

    def __init__(self, env: Environment) -> None:
        self.opening = Opening(())
        self.turns: list[Turn] = []
        self._env = env

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start the episode and record the opening."""
        self.opening = await self._env.reset(task, seed=seed)
        self.turns = []
        return self.opening

    async def step(self, message: AssistantMessage) -> Turn:
        """Run a turn and record it."""
        turn = await self._env.step(message)
        self.turns.append(turn)
        return turn

    async def close(self) -> None:
        """Close the environment."""
        await self._env.close()


def state_number(messages: Sequence[ChatMessage], key: str = "") -> int:
    """Return a signed 64-bit hash of the state in which a turn begins; it is the same in every
    process.

    The state is the environment's ``state_key`` or, if it has none, the text of the messages that
    the turn answers.
    """
    parts = [f"{each.get('role')}\0{each.get('content') or ''}" for each in messages]
    text = f"key\0{key}" if key else "\0".join(("messages", *parts))
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


_SOLVED = 1.0 - 1e-9
"""Minimum value of the metric ``success`` for a solved task: 1 with tolerance for rounding."""


@dataclass
class EpisodeProgress:
    """State of a running episode, except for its tokens."""

    request: EpisodeRequest
    """The request that the episode is played for."""
    status: str = ""
    """Status of the finished episode; "" while it is running."""
    message: str = ""
    """Error message of a failed episode."""
    task_text: str = ""
    """Text of the task: the user messages of the opening."""
    turns: list[PlayedTurn] = field(default_factory=list)
    """Turns played so far."""
    reward: float = 0.0
    """Sum of the rewards so far."""
    turn_rewards: list[float] = field(default_factory=list)
    """Contribution of each turn to the reward."""
    turn_states: list[int] = field(default_factory=list)
    """``state_number`` of the state in which each turn began."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named rewards so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Latest value of each metric."""
    opening: Opening = field(default_factory=lambda: Opening(()))
    """The environment's opening."""
    _state: int = 0
    """``state_number`` of the current state."""
    _started_at: float = field(default_factory=time.perf_counter)
    """Start time of the episode on ``time.perf_counter``."""

    @property
    def achieved(self) -> bool:
        """Whether the task is solved according to the environment's metric ``success``."""
        return self.metrics.get("success", 0.0) >= _SOLVED

    @property
    def fraction_done(self) -> float:
        """Solved fraction of the task from 0 to 1, which is the metric ``progress`` or, without
        that, 1 if the task is solved and 0 if not."""
        return self.metrics.get("progress", float(self.achieved))

    def start(self, opening: Opening) -> str:
        """Record the opening and return the text of the task."""
        self.opening = opening
        user_texts = [
            str(each.get("content") or "")
            for each in opening.messages
            if each.get("role") == "user"
        ]
        self.task_text = "\n".join(user_texts)
        self._state = state_number(opening.messages, opening.state_key)
        return self.task_text

    def add_turn(
        self, policy_turn: AssistantMessage, turn: Turn, max_turns: int | None = None
    ) -> str:
        """Record a turn of the policy and the environment's answer; return the text of the answer.

        Sets ``status`` if this turn ends the episode. Raises EnvironmentFailure for a reward or
        metric that is not finite.
        """
        for name, value in (("reward", turn.reward), *turn.rewards.items(), *turn.metrics.items()):
            if value is not None and not is_finite(value):
                raise EnvironmentFailure("internal", f"{name} is {value}, not a finite number")
        shown = "\n".join(str(message.get("content") or "") for message in turn.messages)
        text = policy_turn.text or policy_turn.content
        reward = turn.reward or 0.0
        self.turns.append(
            PlayedTurn(
                text,
                shown,
                reward,
                policy_turn,
                turn.messages,
                turn.rewards,
                turn.metrics,
                turn.info,
            )
        )
        before = self.reward
        if turn.reward is not None:
            self.reward = turn.reward if turn.final else self.reward + turn.reward
            if not is_finite(self.reward):
                raise EnvironmentFailure(
                    "internal", f"the sum of rewards is {self.reward}, not a finite number"
                )
        # A final reward replaces the sum, so the contribution of its turn is the difference.
        self.turn_rewards.append(self.reward - before if turn.final else turn.reward or 0.0)
        self.turn_states.append(self._state)
        self._state = state_number(turn.messages, turn.state_key)
        for name, value in turn.rewards.items():
            self.rewards[name] = value if turn.final else self.rewards.get(name, 0.0) + value
        self.metrics.update(turn.metrics)
        if self.achieved:
            self.status = "achieved"
        elif turn.done:
            self.status = "finished"
        elif max_turns is not None and len(self.turns) >= max_turns:
            self.status = "max_turns"
        return shown

    def build_outcome(self, source: TurnSource, *, out_of_turns: bool = False) -> RolloutOutcome:
        """Return the outcome of the finished episode. For ``out_of_turns`` see
        ``RolloutOutcome.out_of_turns``."""
        return make_outcome(
            self.request.task,
            source.tokens,
            self.status,
            self.reward,
            achieved=self.achieved,
            progress=self.fraction_done,
            turns=self.turns,
            task_text=self.task_text,
            message=self.message,
            timings={"wall_s": time.perf_counter() - self._started_at},
            last_turn_cut=source.last_turn_cut,
            out_of_turns=out_of_turns,
            rewards=self.rewards,
            metrics=self.metrics,
            turn_rewards=self.turn_rewards,
            turn_states=self.turn_states,
            opening=self.opening.messages,
            tools=self.opening.tools,
            info=self.opening.info,
        )


async def play_episode(
    env: Environment, request: EpisodeRequest, source: TurnSource, max_turns: int
) -> RolloutOutcome:
    """Play one episode from its reset to its outcome.

    It has at most ``max_turns`` turns, or fewer if the task sets a lower limit. A failure of the
    environment or the engine is returned as an outcome. Raises ValueError if the first prompt
    leaves no room for a turn.
    """
    progress = EpisodeProgress(request)
    turn_limit = request.task.limit_turns(max_turns)
    try:
        opening = await env.reset(request.task.payload, seed=request.task.seed)
        progress.start(opening)
        source.open(opening)
        while not progress.status:
            policy_turn = await source.next_turn()
            turn = await env.step(policy_turn)
            progress.add_turn(policy_turn, turn, turn_limit)
            if not progress.status and not source.observe(turn.messages):
                progress.status = "token_budget"
    except ContextFull:
        progress.status = "token_budget"
    except EnvironmentFailure as error:
        progress.status = error.kind
        progress.message = str(error)
    except GenerationFailed as error:
        progress.status = POLICY_FAILED
        progress.message = str(error)
    out_of_turns = progress.status == "max_turns" and request.task.allows_more_than(max_turns)
    return progress.build_outcome(source, out_of_turns=out_of_turns)
