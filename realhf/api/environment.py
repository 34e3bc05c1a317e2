"""Defines the contract between an environment and everything that plays it, and what an episode leaves behind.

An environment is a conversation: it opens an episode with messages and tools, takes what the policy says, and answers
with messages, until it is done. Tokens, engines and training are not its concern. A task says which episode is played;
a ``TaskSet`` draws tasks for training and lists held-out ones. ``EnvironmentSpec`` is what is registered.

docs/extend/environment.md shows the ways to bring an environment; ``realhf.env.loader`` turns each of them into this.
Messages are maps with ``role`` and ``content``, tools are JSON schemas, both in the form of the OpenAI chat API.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

ChatMessage = Mapping[str, Any]
"""``{"role": "user" | "assistant" | "system" | "tool", "content": text}``; a ``tool`` message may carry ``name`` and
``tool_call_id``, an assistant's ``tool_calls``."""
SOLUTION, RECOVERY, HABIT = "solution", "recovery", "habit"
"""Kinds of demonstrations, see ``DemonstrationRequest``."""
FAILURE_KINDS = ("unavailable", "timeout", "lost", "capacity", "internal")
"""How an environment fails: a step was not executed and may be sent again; no answer within the deadline; the session
or its server is gone; there is no free session; the environment's own code raised or broke the contract."""
DEFAULT_FAULT_KINDS = "unavailable=9,disconnect=1"
"""The faults, with their weights, that an environment server injects where only their rate is given."""
TRAIN, HELD_OUT = "train", "heldout"
SPLITS = (TRAIN, HELD_OUT)


class EnvironmentFailure(Exception):
    """The environment failed; the policy is not to blame, so there is no reward. ``kind`` is one of FAILURE_KINDS."""

    def __init__(self, kind: str, message: str) -> None:
        if kind not in FAILURE_KINDS:
            raise ValueError(f"{kind!r} is no kind of failure (known: {', '.join(FAILURE_KINDS)})")
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as the policy wrote it. ``problem`` says why it could not be parsed, "" if it could; then
    ``arguments`` are empty and ``name`` may be. ``text`` is what the policy wrote."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    text: str = ""
    problem: str = ""


@dataclass(frozen=True)
class AssistantMessage:
    """What the policy said in a turn: ``content`` without reasoning and tool calls, ``text`` all of it.
    ``token_count`` counts the sampled tokens."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    text: str = ""
    token_count: int = 0


@dataclass(frozen=True)
class Opening:
    """How an episode begins: the messages that the policy reads first, and JSON schemas of its tools. ``info`` is for
    people: anything JSON. Under ``replay`` it may say how a person plays the same episode: ``title``, the ``command``
    that starts a page on this machine, its ``url`` and an ``order``, which the page gets behind ``#play=`` as JSON,
    together with the ``commands`` of the episode (``did`` of the turns). ``state_key``: see ``Turn``."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    state_key: str = ""


@dataclass(frozen=True)
class Turn:
    """What the environment answers.

    ``reward`` is that of the turn; the rewards of an episode are summed, but one that is ``final`` replaces the sum.
    None is no reward in this turn. ``rewards`` are named components, for charts. ``metrics`` are numbers: ``success``
    (1 when the task is solved, which also ends the episode) and ``progress`` (0 to 1) are read by evaluation and
    curriculum, others are charted. ``info`` is for people: anything JSON. Under ``view`` it may describe the state of
    the environment as it is now: ``{title, columns, rows, note}``, a table of texts, or ``{title, text}``; the last one
    of an episode is shown with it, and ``check --mutate`` compares it with a demonstration's. Under ``did`` it may
    say what was done in this turn, as ``replay`` takes it. What the policy did wrong is told in a message that begins
    with ``error:``; a class with tools answers ``{'error': ...}``. ``state_key`` is a text, such as a digest, that is
    the same wherever episodes of one task are in the same state: ``ppo.credit=state`` compares the turns that follow.
    "" leaves it to the text of the messages.
    """

    messages: Sequence[ChatMessage] = ()
    done: bool = False
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    final: bool = False
    state_key: str = ""


@runtime_checkable
class Environment(Protocol):
    """Plays one episode at a time; many instances live at once, on one event loop, which no method may block.

    The same task, seed and messages give the same turns, unless the specification says ``deterministic=False``. A
    message that is merely wrong is answered by a turn; a failure of the environment raises EnvironmentFailure. Any
    other exception counts as a failure of the kind ``internal``.
    """

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode of ``task``, the payload of a ``Task``. The instance may have played others before, also
        ones that did not end."""
        ...

    async def step(self, message: AssistantMessage) -> Turn:
        """Take a turn of the policy and answer it."""
        ...

    async def close(self) -> None:
        """Release what the instance holds; it is not used again. It may be called at any time after its making."""
        ...


@dataclass(frozen=True)
class Task:
    """Says which episode is played. ``id`` is unique within its set and stable between runs; success is reported by
    ``group``. ``payload`` is JSON and reaches ``Environment.reset``; ``seed`` too. ``template`` names the template that
    the task is an instance of, as people read it; where a set leaves it out, it is the template's id. An episode ends
    after ``max_turns`` turns of the policy, or after those of ``rollout.max_turns`` where they are fewer; 0: after
    those."""

    id: str
    group: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    seed: int = 0
    template: str = ""
    max_turns: int = 0

    def turns_within(self, most: int) -> int:
        """Return how many turns an episode has at most where a run allows ``most``."""
        return min(most, self.max_turns or most)

    def allows_more_than(self, turns: int) -> bool:
        """Return whether the task itself would let the policy take more than so many turns."""
        return not self.max_turns or self.max_turns > turns


@runtime_checkable
class TaskSet(Protocol):
    """Holds the templates of tasks, which a curriculum chooses from, and makes instances of them.

    A finite data set has one template per row, and ``instantiate`` ignores the seed or draws from it what its rows
    leave open. An endless one has a template for each kind of task, and every seed gives another instance.
    """

    @property
    def group_of(self) -> Mapping[str, str]:
        """Template id to its group, in a stable order."""
        ...

    @property
    def groups(self) -> Sequence[str]:
        """All groups, the easiest first."""
        ...

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the instance of a template that ``seed`` draws; the same for the same arguments."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """What a scripted solver says in one episode of ``task``: its turns, as text, with calls of tools as Hermes writes
    them (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``); the chat template of the model that learns from
    them writes them in its own syntax. ``learned`` says of each turn whether a policy should imitate it; () is all of
    them. ``kind`` names the sort of script; ``succeeds`` says whether the episode must end in success."""

    task: Task
    turns: tuple[str, ...]
    learned: tuple[bool, ...] = ()
    kind: str = SOLUTION
    succeeds: bool = True


@dataclass(frozen=True)
class DemonstrationRequest:
    """Asks for demonstrations: ``episodes_per_task`` of every template of the training split, decided by ``seed``. A
    share of ``habit_fraction`` makes a mistake and leaves it at that (``succeeds=False``), one of
    ``recovery_fraction`` makes a mistake and then solves the task; the rest are solutions."""

    episodes_per_task: int
    seed: int
    habit_fraction: float = 0.0
    recovery_fraction: float = 0.0

    def kinds(self) -> list[str]:
        """Return the kind of every demonstration of one template: the rounded shares of habits and of recoveries, then
        solutions."""
        shares = ((HABIT, self.habit_fraction), (RECOVERY, self.recovery_fraction))
        kinds = [kind for kind, share in shares for _ in range(round(share * self.episodes_per_task))]
        return (kinds + [SOLUTION] * self.episodes_per_task)[: self.episodes_per_task]


@dataclass(frozen=True)
class DemonstrationProgram:
    """A program that plays demonstrations itself: ``python -m module --out FILE *argv(request)`` writes them as JSONL.
    ``scripts`` returns what it would play, as values that can be written as JSON. ``files`` and ``packages`` are what
    its result depends on, beside the modules that it imports."""

    module: str
    argv: Callable[[DemonstrationRequest], tuple[str, ...]]
    scripts: Callable[[DemonstrationRequest], Iterable[Any]]
    files: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvironmentService:
    """A service that the launcher starts and watches, the worker ``env/0``: ``python -m module --name env/0 --host host
    --port port *argv --master ... --run-id ...``. Port 0 is any free one."""

    module: str
    argv: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class EnvironmentSpec:
    """Describes an environment to those who play it.

    ``make`` returns a new instance, given the address of the environment's service ("" where there is none; with its
    token, where it wants one, as ``http://:TOKEN@HOST:PORT``); it is
    called on the event loop that plays it, so it must not block. ``tasks`` returns the task set of a split (``train``
    or ``heldout``); the two share no instance. ``system_prompt`` precedes every episode ("" for none).
    ``concurrency``: at most this many instances of one process live at once, None for any number.
    ``deterministic``: the same task, seed and messages give the same turns. ``demonstrate`` yields scripts for the
    warm start of the built-in policy; None when there is no scripted solver, or when ``demonstrations`` names a program
    of its own. ``shipped_policy`` is the folder of a warm-started built-in policy that comes with the environment
    (``experiments.shipped_policy`` writes it), None where none does. ``launch`` is the service that episodes are played
    on, None for an environment that lives in the process that plays it. ``max_turns``, by its option of that name: it
    ends an episode itself after so many turns, and scores none that it has not ended; 0 where turns have their rewards
    when they are taken. ``tools`` are the schemas of the tools that every episode has, as far as they are known before
    one begins.
    """

    name: str
    make: Callable[[str], Environment]
    tasks: Callable[[str], TaskSet]
    system_prompt: str = ""
    concurrency: int | None = None
    deterministic: bool = True
    demonstrate: Callable[[DemonstrationRequest], Iterable[Demonstration]] | None = None
    demonstrations: DemonstrationProgram | None = None
    shipped_policy: Path | None = None
    launch: EnvironmentService | None = None
    max_turns: int = 0
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class EnvironmentDefinition:
    """Is what the registry of environments holds: ``options`` is the dataclass of the environment's own options, which
    stand under ``env:``, and ``build`` makes the specification from an instance of it. Both may be called anywhere:
    they import no torch and start nothing."""

    options: type[Any]
    build: Callable[[Any], EnvironmentSpec]


FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""Rewards are stored and trained as fp32; a larger number would be infinite there."""


def is_finite(number: float) -> bool:
    """Return whether a reward or metric is finite in the type in which it is stored."""
    return abs(number) <= FLOAT32_MAX


def finite_number(found: Any) -> float | None:
    """Return the number that an author's code gave, None for what is none or not finite: a Python or numpy number, true
    or false, an array or tensor without dimensions."""
    if getattr(found, "shape", None) == () and callable(item := getattr(found, "item", None)):
        found = item()
    if not isinstance(found, numbers.Real):
        return None
    try:
        number = float(found)
    except OverflowError:
        return None
    return number if is_finite(number) else None


def task_of(metadata: Mapping[str, Any]) -> Task:
    """Return the task that the metadata of a sample describe: ``task`` (its payload as JSON text), ``task_id``,
    ``task_seed``, ``group``, ``template_name`` and ``max_turns``. Raises ValueError for other metadata, with the name
    of what is missing or cannot be read."""
    if missing := [name for name in ("task_id", "task", "task_seed") if metadata.get(name) is None]:
        raise ValueError(f"a sample without the metadata {', '.join(missing)} says nothing about its task")
    try:
        payload = json.loads(metadata["task"])
    except (TypeError, ValueError):
        payload = None
    if not isinstance(payload, dict):
        raise ValueError(f"task of {metadata['task_id']} is no JSON object, but {metadata['task']!r:.100}")
    return Task(
        str(metadata["task_id"]),
        str(metadata.get("group", "")),
        payload,
        seed=int(metadata["task_seed"]),
        template=str(metadata.get("template_name", "")),
        max_turns=int(metadata.get("max_turns", 0)),
    )


VALID_STATUSES = frozenset({"achieved", "finished", "max_turns", "token_budget"})
POLICY_FAILED = "policy"
"""The status of an episode whose tokens could not be had."""
MAX_BRANCHES = 64
"""Conversations that an agent may hold in one episode, each a row that trains."""
AGENT_FAILED = "agent"
"""The status of an episode whose agent, a program of the user's, raised, took too long or gave no reward."""
FAILURE_STATUSES = frozenset({*FAILURE_KINDS, POLICY_FAILED, AGENT_FAILED})


@dataclass(frozen=True)
class StepResult:
    """An environment's reply to reset or step. ``observation`` is the map of the OpenEnv wire."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class ChatFormat(Protocol):
    """Turns text into the exact ids of a conversation; never re-tokenises what was sampled."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end a policy turn."""
        ...

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of the conversation, tools included, up to the point where the policy speaks."""
        ...

    def following_messages(
        self,
        messages: Sequence[ChatMessage],
        *,
        ended: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        end: int | None = None,
    ) -> list[int]:
        """Return the ids that follow a policy turn: its end (unless ``ended`` by a sampled stop id, which is ``end``
        where that is known), the messages and the cue for the next policy turn."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> AssistantMessage:
        """Return what the policy said in a turn; ``tools`` are those of the opening."""
        ...

    def forgotten(self, shape: Sequence[Sequence[str]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[bool, ...]:
        """Return, for each turn of the policy, whether the chat leaves its reasoning out of the next prompt. ``shape``
        are the roles of the messages of the opening and of the answer to each turn."""
        ...

    def without_reasoning(self, token_ids: Sequence[int]) -> list[int] | None:
        """Return the ids of a turn without its leading reasoning; None where it has none that is closed."""
        ...

    def without_open_reasoning(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids before a turn, without a tag at their end that opens its reasoning."""
        ...


@dataclass(frozen=True)
class PlayedTurn:
    """One turn as a person reads it: what the policy said, what the environment answered, the reward of the turn.

    ``said`` is the policy's turn as it was parsed, ``messages`` are those that followed it; ``rewards``, ``metrics``
    and ``info`` are the environment's (see ``Turn``)."""

    text: str
    output: str
    reward: float
    said: AssistantMessage | None = field(default=None, compare=False)
    messages: Sequence[ChatMessage] = field(default=(), compare=False)
    rewards: Mapping[str, float] = field(default_factory=dict, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RolloutOutcome:
    """One finished episode.

    Ids, logprobs, versions and loss_mask cover the completion only and have equal lengths; logprobs are 0.0 and
    versions -1 where loss_mask is False (environment or template tokens). A failed episode has ``valid == False`` and
    ``reward is None``: a failure is never a reward of 0. ``last_turn_cut``: a limit of tokens ended the last policy
    turn. ``out_of_turns``: ``rollout.max_turns`` ended it, where its task would have allowed another turn.
    ``rewards`` are the named components of the reward, ``metrics`` the environment's numbers. ``branches`` are
    further trajectories of the episode, where an agent held several conversations; each trains as a row of its own.
    ``turn_starts`` are the places of the completion where policy turns begin, the first of them the turn number
    ``first_turn`` of ``turn_rewards``, which sum to ``reward``; ``turn_states`` number the states that the turns of
    ``turn_rewards`` began in, see ``state_number``. ``opening`` are the messages before the first turn, ``tools`` the
    schemas that came with them, ``told_prompt`` the ids of the prompt with feedback on the episode in it, if there is
    any, ``info`` what the environment said for people at its reset. ``steps`` is what an agent did in the environment,
    where its turns are conversations of its own.
    """

    status: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    loss_mask: list[bool]
    reward: float | None
    achieved: bool
    progress: float
    turns: tuple[PlayedTurn, ...]
    task_id: str
    group: str
    seed: int
    template: str = ""
    task_text: str = ""
    message: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    last_turn_cut: bool = False
    out_of_turns: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    branches: tuple[RolloutOutcome, ...] = ()
    turn_starts: Sequence[int] = ()
    turn_rewards: Sequence[float] = ()
    turn_states: Sequence[int] = ()
    first_turn: int = 0
    opening: Sequence[ChatMessage] = field(default=(), compare=False)
    tools: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    told_prompt: Sequence[int] = field(default=(), compare=False)
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    steps: tuple[PlayedTurn, ...] = field(default=(), compare=False)

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended the episode. The limit of turns does not count: an agent that used its turns
        without success has failed, and learns from it."""
        return self.status == "token_budget" or (self.status == "max_turns" and self.last_turn_cut)

    @property
    def valid(self) -> bool:
        """Whether the episode counts: its ``status`` is one of ``VALID_STATUSES``."""
        return self.status in VALID_STATUSES
