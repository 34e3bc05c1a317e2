"""Plays one episode in tokens: a policy and an environment take turns, and what came of it is an outcome.

A speaker opens with the environment's messages, is asked for a turn, and hears what the environment answered. Nothing
is ever decoded and encoded again: the prefix given to the engine at turn t is the list that is stored, and the trainer
gets the same list (docs/reference/environment.md 9).
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
    Turn,
    is_finite,
)
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import POLICY_FAILED, VALID_STATUSES, ChatFormat, PlayedTurn, RolloutOutcome
from realhf.base.text import shorten


@dataclass(frozen=True)
class Limits:
    """Bounds an episode: policy turns, tokens of prompt and completion together, and ``turn_tokens``, the room that a
    policy turn must have (the engine's max_new_tokens)."""

    max_turns: int
    max_total_tokens: int
    turn_tokens: int


@dataclass(frozen=True)
class EpisodeRequest:
    """Asks for one episode of ``task``. ``index`` is its place among those that are asked for together.
    ``sampling_seed`` starts the stream of random numbers of its tokens (None: the engine's call decides, see
    ``GenRequest.seed``)."""

    index: int
    task: Task
    sampling_seed: int | None = None


class TokenBuffer:
    """Holds the prompt ids and, of the completion, ids, logprobs, versions and mask of equal lengths. ``turn_starts``
    are the places in the completion where policy turns begin."""

    def __init__(self, prompt_ids: Sequence[int], max_total_tokens: int) -> None:
        if not prompt_ids:
            raise ValueError("the first prompt has no tokens")
        self.prompt_ids = list(prompt_ids)
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.loss_mask: list[bool] = []
        self.turn_starts: list[int] = []
        self._max_total = max_total_tokens
        self._generated = 0
        self._policy_spoke_last = False

    @property
    def room(self) -> int:
        """Return how many tokens still fit into the budget."""
        return self._max_total - len(self.prompt_ids) - len(self.completion_ids)

    def prefix(self) -> list[int]:
        """Return what the engine continues: prompt and completion so far."""
        return self.prompt_ids + self.completion_ids

    def append_policy(self, output: GenOutput, *, continues: bool = False) -> None:
        """Add a sampled turn, or (``continues``) the next part of an interrupted one. Raises ValueError when its
        ids, logprobs and versions differ in length or it exceeds the budget."""
        count = len(output.token_ids)
        if not count == len(output.logprobs) == len(output.versions):
            raise ValueError(
                f"engine returned {count} tokens, {len(output.logprobs)} logprobs, {len(output.versions)} versions"
            )
        if self._policy_spoke_last is not continues:
            raise ValueError("a policy turn follows the prompt or an observation, and its rest follows it at once")
        if count > self.room:
            raise ValueError(
                f"policy turn of {count} tokens where max_total_tokens={self._max_total} leaves {self.room}; "
                "the pool's turn_tokens must be at least the engine's max_new_tokens"
            )
        if not continues:
            self.turn_starts.append(len(self.completion_ids))
        self.completion_ids += output.token_ids
        self.logprobs += output.logprobs
        self.versions += output.versions
        self.loss_mask += [True] * count
        self._generated += count
        self._policy_spoke_last = True

    def append_environment(self, ids: Sequence[int]) -> None:
        """Add template and observation tokens, which carry no loss."""
        if not self._policy_spoke_last:
            raise ValueError("environment tokens follow a policy turn only")
        self.completion_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.loss_mask += [False] * len(ids)
        self._policy_spoke_last = False

    def drop_environment(self) -> None:
        """Remove what was added after the last policy turn: nobody will answer it."""
        while self.completion_ids and not self.loss_mask[-1]:
            for column in (self.completion_ids, self.logprobs, self.versions, self.loss_mask):
                column.pop()
        self._policy_spoke_last = bool(self.completion_ids)

    def check(self) -> None:
        """Raise AssertionError unless the invariants of a finished episode hold."""
        sizes = {len(self.completion_ids), len(self.logprobs), len(self.versions), len(self.loss_mask)}
        assert len(sizes) == 1, f"completion parts differ in length: {sizes}"
        assert sum(self.loss_mask) == self._generated, "the mask does not cover exactly the generated tokens"
        assert not self.completion_ids or self.loss_mask[-1], "environment tokens after the last policy turn"
        assert self.room >= 0, "token budget exceeded"

    def columns(self) -> dict[str, list[Any]]:
        """Return the tokens as the fields of a ``RolloutOutcome``, after checking them."""
        self.check()
        return {name: getattr(self, name) for name in _COLUMNS}


_COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "versions", "loss_mask", "turn_starts")


def outcome_of(
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
    """Return the outcome of an episode of ``task``, ``more`` of its fields by name. A failure keeps its tokens, and no
    reward."""
    valid = status in VALID_STATUSES
    columns = tokens.columns() if tokens is not None and valid else {n: getattr(tokens, n, []) for n in _COLUMNS}
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
        **columns,
        **more,
    )


_SHRINK_ATTEMPTS = 6
_MOST_CHARS_OF_A_TOKEN = 32
"""Longer tokens are runs of one character, of which some may be missing."""


class ContextFull(Exception):
    """The engine's context has no room for another turn, although the budget of tokens has."""


class Speaker(Protocol):
    """Says the policy's part of one episode."""

    @property
    def tokens(self) -> TokenBuffer | None:
        """The tokens of the episode; None before its opening, and for a speaker without any."""
        ...

    @property
    def cut(self) -> bool:
        """Whether a limit of tokens ended the last turn."""
        ...

    def open(self, opening: Opening) -> None:
        """Take the opening of the episode. Raises ValueError when it leaves no room for a turn."""
        ...

    async def speak(self) -> AssistantMessage:
        """Return the next turn. Raises GenerationFailed, or ContextFull after the first turn."""
        ...

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """Take the environment's answer to the last turn; returns whether there is room for another turn."""
        ...


@dataclass(eq=False)
class PolicySpeaker:
    """Speaks with tokens of a policy, which ``source`` samples. ``slot`` is the cache row that the episode has to
    itself, ``seed`` starts the random numbers of its tokens, ``system`` are messages before the environment's."""

    chat: ChatFormat
    limits: Limits
    source: TokenSource
    slot: int
    seed: int | None
    system: Sequence[ChatMessage] = ()
    tokens: TokenBuffer | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    _ended: bool = True
    _end: int | None = None
    _spoke: bool = False

    @property
    def cut(self) -> bool:
        """See ``Speaker``."""
        return self._spoke and not self._ended

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""
        self.tools = opening.tools
        prompt = self.chat.opening([*self.system, *opening.messages], opening.tools)
        self.tokens = TokenBuffer(prompt, self.limits.max_total_tokens)
        if self.tokens.room < self.limits.turn_tokens:
            raise ValueError(
                f"the first prompt of {len(prompt)} tokens and a turn of {self.limits.turn_tokens} do not fit into "
                f"max_total_tokens={self.limits.max_total_tokens}"
            )

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``."""
        assert self.tokens is not None
        sampled: list[int] = []
        while True:
            request = GenRequest(self.slot, self.tokens.prefix(), len(sampled), self.seed)
            output = await self.source.generate(request)
            if not output.token_ids and not (output.finish_reason == "length" and sampled):
                self._no_turn(output)
            self.tokens.append_policy(output, continues=bool(sampled))
            sampled += output.token_ids
            if output.finish_reason != "interrupted":
                break
        self._spoke = True
        self._ended = output.finish_reason == "stop"
        self._end = sampled[-1]
        return self.chat.parse(sampled, self.tools)

    def _no_turn(self, output: GenOutput) -> None:
        """Raise what it means that the engine sampled nothing."""
        assert self.tokens is not None
        if output.finish_reason != "length":
            raise GenerationFailed("the engine returned no tokens")
        if not self._spoke:
            raise GenerationFailed(
                f"the first prompt of {len(self.tokens.prompt_ids)} tokens fills the engine's context: it is shorter "
                "than rollout.max_total_tokens"
            )
        self.tokens.drop_environment()
        raise ContextFull

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """Add the messages, the long ones cut until a policy turn fits after them."""
        assert self.tokens is not None
        ids = self._fitting(messages, self.tokens.room - self.limits.turn_tokens)
        if ids is not None:
            self.tokens.append_environment(ids)
        return ids is not None

    def _fitting(self, messages: Sequence[ChatMessage], room: int) -> list[int] | None:
        """Return the ids of the messages, the long ones cut until they are at most ``room``; None where nothing is left
        to cut."""
        # What cannot fit is not tokenised first: that takes long, and the event loop has other episodes.
        shown = _shortened(messages, room * _MOST_CHARS_OF_A_TOKEN)
        for _ in range(_SHRINK_ATTEMPTS):
            ids = self.chat.following_messages(shown, ended=self._ended, end=self._end, tools=self.tools)
            if len(ids) <= room:
                return ids
            size = sum(len(message.get("content") or "") for message in shown)
            if room <= 0 or not size:
                return None
            shown = _shortened(shown, min(size // 2, size * room // len(ids)))
        return None


def _shortened(messages: Sequence[ChatMessage], most: int) -> list[ChatMessage]:
    """Return the messages with the longest of them cut to one length, so that all hold at most ``most`` characters."""
    sizes, left = sorted(len(message.get("content") or "") for message in messages), max(most, 0)
    for number, size in enumerate(sizes):
        share = left // (len(sizes) - number)
        if size > share:
            texts = [message.get("content") or "" for message in messages]
            return [
                {**message, "content": shorten(text, share)} if len(text) > share else message
                for message, text in zip(messages, texts, strict=True)
            ]
        left -= size
    return [*messages]


_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEEDS = 1 << 63


@dataclass(frozen=True)
class _Turn:
    """``before`` are the ids between the turn before and this one, ``ids`` what was sampled, ``words`` the part of it
    after the reasoning (None: there is no reasoning)."""

    before: list[int]
    ids: list[int]
    words: list[int] | None


@dataclass(eq=False)
class ForgetfulSpeaker(PolicySpeaker):
    """``PolicySpeaker`` that begins a new *row* whenever the template leaves out reasoning that the row holds: what the
    policy reads is then no extension of what it read and said before. Each row has a stream of random numbers of its
    own. ``max_total_tokens`` bounds each row.

    Prompts of rows share exact prefixes: a new row begins with the ids of the row before it up to the first turn whose
    reasoning went, and the words of that turn are the ids that were sampled for them, unless one token holds both.
    """

    _rows: list[tuple[TokenBuffer, int]] = field(default_factory=list)
    _first_turn: int = 0
    _turns: list[_Turn] = field(default_factory=list)
    _before: list[int] = field(default_factory=list)
    _shape: list[tuple[str, ...]] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""
        super().open(opening)
        assert self.tokens is not None
        self._before = list(self.tokens.prompt_ids)
        self._shape = [_roles([*self.system, *opening.messages])]

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``."""
        assert self.tokens is not None
        start = len(self.tokens.completion_ids)
        said = await super().speak()
        ids = self.tokens.completion_ids[start:]
        self._turns.append(_Turn(self._before, ids, self.chat.without_reasoning(ids)))
        return said

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """See ``Speaker``; where reasoning goes, a new row begins, if its first prompt leaves room for a turn."""
        assert self.tokens is not None
        shape = [*self._shape, _roles(messages)]
        forgotten = self.chat.forgotten(shape, self.tools)
        gone = self._gone | {n for n, turn in enumerate(self._turns) if turn.words is not None and forgotten[n]}
        head = self._without(gone) if gone > self._gone else self.tokens.prefix()
        ids = self._fitting(messages, self.limits.max_total_tokens - len(head) - self.limits.turn_tokens)
        if ids is None:
            return False
        if gone > self._gone:
            self._rows.append((self.tokens, self._first_turn))
            self.tokens = TokenBuffer(head + ids, self.limits.max_total_tokens)
            self._first_turn = len(self._turns)
            self.seed = None if self.seed is None else (self.seed + _SEED_STRIDE) % _SEEDS
        else:
            self.tokens.append_environment(ids)
        self._before, self._shape, self._gone = ids, shape, gone
        return True

    def in_rows(self, outcome: RolloutOutcome) -> RolloutOutcome:
        """Return the outcome with a row for each part of the conversation: the last is the main one, the earlier ones
        are its branches. A failed episode stays one row, which trains nothing."""
        rows = [*self._rows, (self.tokens, self._first_turn)]
        spoken = [(tokens, first) for tokens, first in rows if tokens is not None and tokens.completion_ids]
        if not outcome.valid or not spoken:
            return outcome
        *branches, last = [replace(outcome, **tokens.columns(), first_turn=first) for tokens, first in spoken]
        return replace(last, branches=tuple(branches))

    def _without(self, gone: set[int]) -> list[int]:
        """The conversation so far, without the reasoning of the turns ``gone``."""
        ids: list[int] = []
        for number, turn in enumerate(self._turns):
            words = turn.words if number in gone else None
            # A cue that opened the reasoning goes with it.
            ids += turn.before if words is None else self.chat.without_open_reasoning(turn.before)
            ids += turn.ids if words is None else words
        return ids


def _roles(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    return tuple(str(message.get("role")) for message in messages)


class Witness:
    """Is the environment ``env`` for one episode. ``opening`` and ``turns`` are what it has answered so far."""

    def __init__(self, env: Environment) -> None:
        self.opening = Opening(())
        self.turns: list[Turn] = []
        self._env = env

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """See ``Environment``."""
        self.opening, self.turns = await self._env.reset(task, seed=seed), []
        return self.opening

    async def step(self, message: AssistantMessage) -> Turn:
        """See ``Environment``."""
        turn = await self._env.step(message)
        self.turns.append(turn)
        return turn

    async def close(self) -> None:
        """See ``Environment``."""
        await self._env.close()


def state_number(messages: Sequence[ChatMessage], key: str = "") -> int:
    """Return the number, of 64 bits and signed, of the state in which a turn begins: of its ``state_key`` or, where the
    environment gives none, of the text of the messages that the turn answers. It is the same in every process."""
    told = [f"{each.get('role')}\0{each.get('content') or ''}" for each in messages]
    text = f"key\0{key}" if key else "\0".join(("messages", *told))
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


_SOLVED = 1.0 - 1e-9


@dataclass
class Progress:
    """Holds what is known of an episode beside its tokens. ``status`` is empty while it goes on."""

    wanted: EpisodeRequest
    status: str = ""
    message: str = ""
    task_text: str = ""
    turns: list[PlayedTurn] = field(default_factory=list)
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    turn_states: list[int] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    opening: Opening = field(default_factory=lambda: Opening(()))
    _state: int = 0
    _began: float = field(default_factory=time.perf_counter)

    @property
    def achieved(self) -> bool:
        """Whether the environment says that the task is solved."""
        return self.metrics.get("success", 0.0) >= _SOLVED

    @property
    def share(self) -> float:
        """How much of the task is done, from 0 to 1, as far as the environment says."""
        return self.metrics.get("progress", float(self.achieved))

    def begin(self, opening: Opening) -> str:
        """Take the opening; returns the text of the task: what it says as a user."""
        self.opening = opening
        said = [str(each.get("content") or "") for each in opening.messages if each.get("role") == "user"]
        self.task_text = "\n".join(said)
        self._state = state_number(opening.messages, opening.state_key)
        return self.task_text

    def take(self, said: AssistantMessage, turn: Turn, max_turns: int | None = None) -> str:
        """Take a turn of the policy and the environment's answer to it; returns the answer's text. Raises
        EnvironmentFailure for a number that is none."""
        for name, value in (("reward", turn.reward), *turn.rewards.items(), *turn.metrics.items()):
            if value is not None and not is_finite(value):
                raise EnvironmentFailure("internal", f"{name} is {value}, not a finite number")
        shown = "\n".join(str(message.get("content") or "") for message in turn.messages)
        text, reward = said.text or said.content, turn.reward or 0.0
        self.turns.append(PlayedTurn(text, shown, reward, said, turn.messages, turn.rewards, turn.metrics, turn.info))
        before = self.reward
        if turn.reward is not None:
            self.reward = turn.reward if turn.final else self.reward + turn.reward
            if not is_finite(self.reward):
                raise EnvironmentFailure("internal", f"the sum of rewards is {self.reward}, not a finite number")
        # A final reward replaces the sum, so that its turn has changed it by the difference.
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

    def outcome(self, speaker: Speaker, *, out_of_turns: bool = False) -> RolloutOutcome:
        """Return the finished episode; see ``RolloutOutcome.out_of_turns``."""
        return outcome_of(
            self.wanted.task,
            speaker.tokens,
            self.status,
            self.reward,
            achieved=self.achieved,
            progress=self.share,
            turns=self.turns,
            task_text=self.task_text,
            message=self.message,
            timings={"wall_s": time.perf_counter() - self._began},
            last_turn_cut=speaker.cut,
            out_of_turns=out_of_turns,
            rewards=self.rewards,
            metrics=self.metrics,
            turn_rewards=self.turn_rewards,
            turn_states=self.turn_states,
            opening=self.opening.messages,
            tools=self.opening.tools,
            info=self.opening.info,
        )


async def play_episode(env: Environment, wanted: EpisodeRequest, speaker: Speaker, max_turns: int) -> RolloutOutcome:
    """Play one episode from its reset to its outcome, of at most ``max_turns`` turns, or fewer where the task says so;
    an environment or an engine that fails is an outcome. Raises ValueError when the first prompt leaves no room for a
    turn."""
    progress = Progress(wanted)
    most = wanted.task.limit_turns(max_turns)
    try:
        opening = await env.reset(wanted.task.payload, seed=wanted.task.seed)
        progress.begin(opening)
        speaker.open(opening)
        while not progress.status:
            said = await speaker.speak()
            turn = await env.step(said)
            progress.take(said, turn, most)
            if not progress.status and not speaker.hear(turn.messages):
                progress.status = "token_budget"
    except ContextFull:
        progress.status = "token_budget"
    except EnvironmentFailure as error:
        progress.status, progress.message = error.kind, str(error)
    except GenerationFailed as error:
        progress.status, progress.message = POLICY_FAILED, str(error)
    cut = progress.status == "max_turns" and wanted.task.allows_more_than(max_turns)
    return progress.outcome(speaker, out_of_turns=cut)
