"""Interface between an environment and the programs that play it: what the author of an environment
implements, and the types that are passed to it and returned by it.

An environment is a conversation. ``reset`` opens an episode with messages and tools; ``step`` takes
the policy's message and answers with messages, until the episode is done. It does not deal with
tokens, engines or training (see ``realhf.api.rollout``). A ``Task`` selects the episode, and a
``TaskSet`` provides the tasks of training and of held-out evaluation. ``EnvironmentSpec`` describes
the environment to the programs that play it, and ``EnvironmentDefinition`` is what is registered.

An environment in ten lines::

    class Parrot:  # env.path=parrot.py:Parrot
        @staticmethod
        def tasks(split):
            return [{"word": word} for word in (("ara", "kea") if split == "train" else ("lory",
            "macaw"))]

        async def reset(self, task, *, seed):
            self.word = task["word"]
            return Opening([{"role": "user", "content": f"Repeat the word {self.word}."}])

        async def step(self, message):
            solved = message.content.strip() == self.word
            return Turn(done=True, reward=float(solved), metrics={"success": float(solved)})

        async def close(self):
            pass

docs/extend/environment.md describes all ways to bring an environment; ``realhf.env.loader``
converts each of them to this contract. Messages are mappings with ``role`` and ``content``, and
tools are JSON schemas, both in the format of the OpenAI chat API.
"""

from __future__ import annotations

import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

from realhf.api.tool_syntax.calls import ToolCall as ToolCall

ChatMessage = Mapping[str, Any]
"""``{"role": "user" | "assistant" | "system" | "tool", "content": text}``. A ``tool`` message may
have ``name`` and ``tool_call_id``, an assistant message ``tool_calls``."""

FAILURE_KINDS = ("unavailable", "timeout", "lost", "capacity", "internal")
"""Kinds of environment failures. ``unavailable``: a step was not executed and may be sent again;
``timeout``: no answer arrived before the deadline; ``lost``: the session or its server no longer
exists; ``capacity``: no session is free; ``internal``: the environment's code raised an exception
or returned something invalid."""
DEFAULT_FAULT_KINDS = "unavailable=9,disconnect=1"
"""Failures that an environment server injects for tests when no kinds are given, with their
weights."""

TRAIN = "train"
HELD_OUT = "heldout"
SPLITS = (TRAIN, HELD_OUT)
"""Names of the splits that ``EnvironmentSpec.tasks`` takes."""

SOLUTION = "solution"
"""Kind of a demonstration that solves the task without a mistake."""
RECOVERY = "recovery"
"""Kind of a demonstration that makes a mistake, repairs it and solves the task."""
HABIT = "habit"
"""Kind of a demonstration that makes a mistake and does not repair it."""


class EnvironmentFailure(Exception):
    """Raised for a failure of the environment that is not the policy's fault, so that the episode
    has no reward.

    ``kind`` is one of ``FAILURE_KINDS``.
    """

    def __init__(self, kind: str, message: str) -> None:
        if kind not in FAILURE_KINDS:
            raise ValueError(
                f"{kind!r} is not a kind of failure (known: {', '.join(FAILURE_KINDS)})"
            )
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class AssistantMessage:
    """A message of the policy, parsed from the text of one turn."""

    content: str
    """The text without reasoning and tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls in order, including those that could not be parsed."""
    reasoning: str = ""
    """The text of the reasoning block, if any."""
    text: str = ""
    """The complete text of the turn."""
    token_count: int = 0
    """Number of sampled tokens."""


class TableView(TypedDict):
    """A state of the environment as a table for people."""

    title: str
    """Caption of the table."""
    columns: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Sequence[str]]
    """Rows of cell texts, each as long as ``columns``."""
    note: NotRequired[str]
    """Remark below the table."""


class TextView(TypedDict):
    """A state of the environment as text for people."""

    title: str
    """Caption of the text."""
    text: str
    """The text, which may have several lines."""


class Replay(TypedDict):
    """Instructions for replaying an episode by hand on a local web page.

    The viewer links to ``url#play=ORDER``, where ORDER is ``order`` as JSON together with
    ``commands``: the values of ``did`` of all turns."""

    title: NotRequired[str]
    """Name of the page."""
    command: NotRequired[str]
    """Shell command that starts the page on this machine."""
    url: str
    """Address of the page, on this machine."""
    order: NotRequired[Mapping[str, Any]]
    """JSON values that select the episode, such as task and seed."""


class OpeningInfo(TypedDict, total=False):
    """Reserved keys of ``Opening.info``; other keys are allowed."""

    view: TableView | TextView
    """The initial state of the environment."""
    replay: Replay
    """Instructions for replaying the episode."""


class TurnInfo(TypedDict, total=False):
    """Reserved keys of ``Turn.info``; other keys are allowed."""

    view: TableView | TextView
    """The state of the environment after the turn. The last view of an episode is shown with the
    episode, and ``check --mutate`` compares it with the last view of a demonstration."""
    did: Any
    """The action of the turn as a JSON value, in the form that the ``Replay`` page accepts."""


@dataclass(frozen=True)
class Opening:
    """The beginning of an episode, returned by ``Environment.reset``."""

    messages: Sequence[ChatMessage]
    """The messages that the policy reads first."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the policy may call."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for people, never shown to the policy. ``OpeningInfo`` lists the reserved
    keys."""
    state_key: str = ""
    """Identifier of the initial state, see ``Turn.state_key``."""


@dataclass(frozen=True)
class Turn:
    """The environment's answer to a message of the policy, returned by ``Environment.step``.

    Mistakes of the policy are reported in a message whose content begins with ``error:``; a class
    with tools answers ``{'error': ...}``.
    """

    messages: Sequence[ChatMessage] = ()
    """The messages that the policy reads next."""
    done: bool = False
    """Whether the episode has ended."""
    reward: float | None = None
    """Reward of the turn; None for no reward. The rewards of an episode are summed, see
    ``final``."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward, for charts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named numbers. Evaluation and curriculum read ``success`` (1 when the task is solved, which
    also ends the episode) and ``progress`` (0 to 1); others are only charted."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for people, never shown to the policy. ``TurnInfo`` lists the reserved keys."""
    final: bool = False
    """Whether ``reward`` replaces the sum of the episode's rewards instead of being added to it."""
    state_key: str = ""
    """Identifier of the state after the turn, such as a digest, which is the same whenever an
    episode of the same task reaches that state. ``ppo.credit=state`` compares turns that start in
    the same state. If "", the text of the messages identifies the state."""


@runtime_checkable
class Environment(Protocol):
    """An environment instance, which plays one episode at a time.

    Many instances run on one event loop, so no method may block. The same task, seed and messages
    give the same turns, unless the specification has ``deterministic=False``. An invalid message of
    the policy must be answered with a turn. If the environment itself fails, it should raise
    EnvironmentFailure; any other exception counts as a failure of the kind ``internal``.
    """

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode of ``task``, the payload of a ``Task``.

        The instance may have played other episodes, including unfinished ones."""
        ...

    async def step(self, message: AssistantMessage) -> Turn:
        """Process a message of the policy and return the answer."""
        ...

    async def close(self) -> None:
        """Release all resources. It may be called at any time, and the instance is not used
        afterwards."""
        ...


@dataclass(frozen=True)
class TaskLimits:
    """Limits that a run sets for the episodes of one environment of a mixture. A limit of 0 is that
    of the run."""

    max_turns: int = 0
    """Maximum number of turns, instead of ``rollout.max_turns``."""
    max_total_tokens: int = 0
    """Maximum number of tokens of prompt and completion together, instead of
    ``rollout.max_total_tokens``."""
    max_new_tokens: int = 0
    """Maximum number of tokens per turn, instead of ``gen.max_new_tokens``."""


@dataclass(frozen=True)
class Task:
    """A task of an environment, which selects an episode."""

    id: str
    """Identifier, unique within the task set and stable between runs."""
    group: str = ""
    """Group of tasks by which success is reported."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON object that is passed to ``Environment.reset``."""
    tags: tuple[str, ...] = ()
    """Labels by which the environment's options may select tasks."""
    seed: int = 0
    """Seed that is passed to ``Environment.reset``."""
    template: str = ""
    """Display name of the template that the task was instantiated from; "" means the template's
    id."""
    max_turns: int = 0
    """Maximum number of turns of this task, in addition to the limit ``rollout.max_turns``; 0 for
    no limit."""
    environment: str = ""
    """Name of the task's environment in a mixture; "" in a run with one environment."""
    limits: TaskLimits = TaskLimits()
    """Limits that the run sets for the task's environment."""

    def limit_turns(self, run_limit: int) -> int:
        """Return the maximum number of turns of an episode in a run that allows ``run_limit``
        turns."""
        return min(run_limit, self.max_turns or run_limit)

    def allows_more_than(self, turns: int) -> bool:
        """Return whether the task's own limit allows more than ``turns`` turns."""
        return not self.max_turns or self.max_turns > turns


@dataclass(frozen=True)
class TaskRemark:
    """Something that a check should report about a task."""

    text: str
    """Description in one sentence, without the name of the task."""
    is_fault: bool = True
    """True for a fault, False for a note."""


@runtime_checkable
class TaskSet(Protocol):
    """The task templates of a split, from which a curriculum draws tasks.

    A finite data set has one template per row, and ``instantiate`` ignores the seed or uses it for
    details that the row does not specify. An endless set has one template per kind of task, and
    each seed gives another instance.
    """

    @property
    def group_of(self) -> Mapping[str, str]:
        """The group of each template by template id, in a stable order."""
        ...

    @property
    def groups(self) -> Sequence[str]:
        """All groups, the easiest first."""
        ...

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the task that a template gives for ``seed``. Equal arguments give equal tasks."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """A scripted episode: the policy's turns in one episode of ``task``."""

    task: Task
    """The task of the episode."""
    turns: tuple[str, ...]
    """Texts of the turns, with tool calls in the Hermes format (``<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>``). The chat template of the model that is trained on them
    converts the calls to its own syntax."""
    learned: tuple[bool, ...] = ()
    """For each turn, whether the policy should imitate it; () means all of them."""
    kind: str = SOLUTION
    """``SOLUTION``, ``RECOVERY`` or ``HABIT``."""
    succeeds: bool = True
    """Whether the episode must end in success."""


@dataclass(frozen=True)
class DemonstrationRequest:
    """A request for demonstrations of every template of the training split."""

    episodes_per_task: int
    """Number of demonstrations per template."""
    seed: int
    """Seed of all random choices."""
    habit_fraction: float = 0.0
    """Fraction of demonstrations of the kind ``HABIT``, which have ``succeeds=False``."""
    recovery_fraction: float = 0.0
    """Fraction of demonstrations of the kind ``RECOVERY``. The rest are of the kind
    ``SOLUTION``."""

    def kinds(self) -> list[str]:
        """Return the kind of each demonstration of a template: habits and recoveries according to
        their rounded fractions, then solutions."""
        shares = ((HABIT, self.habit_fraction), (RECOVERY, self.recovery_fraction))
        kinds = [
            kind for kind, share in shares for _ in range(round(share * self.episodes_per_task))
        ]
        return (kinds + [SOLUTION] * self.episodes_per_task)[: self.episodes_per_task]


@dataclass(frozen=True)
class DemonstrationProgram:
    """A program that plays demonstrations and writes them to a file.

    It is run as ``python -m MODULE --out FILE *argv(request)`` and writes JSON Lines.
    """

    module: str
    """Module that is run."""
    argv: Callable[[DemonstrationRequest], tuple[str, ...]]
    """Return the command-line arguments for a request."""
    scripts: Callable[[DemonstrationRequest], Iterable[Any]]
    """Return the scripts that would be played, as JSON values."""
    files: tuple[Path, ...] = ()
    """Files that the result depends on, in addition to the modules that ``module`` imports."""
    packages: tuple[str, ...] = ()
    """Installed packages whose versions the result depends on."""


@dataclass(frozen=True)
class EnvironmentService:
    """A server process that the launcher starts and supervises as the worker ``env/0``.

    It is run as ``python -m MODULE --name env/0 --host HOST --port PORT *argv --master ... --run-id
    ...``."""

    module: str
    """Module that is run."""
    argv: tuple[str, ...] = ()
    """Additional command-line arguments."""
    host: str = "127.0.0.1"
    """Address that the server listens on."""
    port: int = 0
    """Port that the server listens on; 0 for any free port."""
    section: str = "env"
    """Section of the configuration with the options that become ``argv``, for messages."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """The description of an environment for the programs that play it."""

    name: str
    """Name of the environment in messages and charts."""
    make: Callable[[str], Environment]
    """Return a new instance, given the URL of the environment's service ("" without one). A service
    with a token has the URL ``http://:TOKEN@HOST:PORT``. It is called on the event loop that plays
    the instance, so it must not block."""
    tasks: Callable[[str], TaskSet]
    """Return the task set of a split, ``train`` or ``heldout``. The two share no instance."""
    system_prompt: str = ""
    """System message that precedes every episode; "" for none."""
    concurrency: int | None = None
    """Maximum number of open instances per process; None for no limit."""
    deterministic: bool = True
    """Whether the same task, seed and messages give the same turns; for a mixture, in all of its
    environments (see ``is_deterministic``)."""
    demonstrate: Callable[[DemonstrationRequest], Iterable[Demonstration]] | None = None
    """Yield scripted episodes for the warm start of a policy. None if there is no scripted solver,
    or if ``demonstrations`` names a program."""
    demonstrations: DemonstrationProgram | None = None
    """Program that plays the demonstrations, in place of ``demonstrate``."""
    shipped_policy: Path | None = None
    """Folder of a warm-started built-in policy that ships with the environment, written by
    ``experiments.shipped_policy``; None if there is none."""
    launch: EnvironmentService | None = None
    """Service on which episodes are played; None for an environment that runs inside the playing
    process."""
    max_turns: int = 0
    """Number of turns after which the environment itself ends and scores an episode, as its option
    ``max_turns`` sets it. Episodes that are cut off earlier have no score. 0 for an environment
    that gives a reward for each turn."""
    longest_call_s: float = 0.0
    """Seconds that a reset or a step may take by the environment's own limits. A run waits as long,
    and one that sets a shorter ``rollout.message_timeout_s`` is refused, because it would lose
    episodes that an agent delays. 0 for an environment without such limits."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that are known in advance to exist in every episode or, for a
    mixture, in every episode of one of its environments."""
    parts: Mapping[str, EnvironmentPart] = field(default_factory=dict)
    """The environments of a mixture, by name; {} for any other environment."""
    examine: Callable[[Task], Awaitable[Sequence[TaskRemark]]] | None = None
    """Play what proves that a task can be solved and pays for nothing else, such as its own
    solution, and return what is wrong. ``check`` calls it for every task. None if there is nothing
    to play beyond the demonstrations."""

    def is_deterministic(self, task: Task) -> bool:
        """Return whether the environment that plays ``task`` gives the same turns for the same
        messages."""
        part = self.parts.get(task.environment)
        return self.deterministic if part is None else part.spec.deterministic


@dataclass(frozen=True)
class EnvironmentPart:
    """An environment of a mixture."""

    spec: EnvironmentSpec
    """The environment."""
    share: float
    """Fraction of the groups of rollouts that play it; the fractions of a mixture add up to 1."""
    limits: TaskLimits = TaskLimits()
    """Limits of its episodes."""


@dataclass(frozen=True)
class EnvironmentDefinition:
    """An entry of the environment registry. Creating the options and building the specification
    must not import torch or start anything."""

    options: type[Any]
    """Dataclass of the environment's options, the section ``env``."""
    build: Callable[[Any], EnvironmentSpec]
    """Return the specification for an instance of ``options``."""


FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""Largest finite fp32 number. Rewards are stored and trained in fp32."""


def is_finite(number: float) -> bool:
    """Return whether a reward or metric is finite in fp32."""
    return abs(number) <= FLOAT32_MAX


def finite_number(value: Any) -> float | None:
    """Convert a value from an environment author's code to a finite float; return None if it is not
    a finite number.

    Accepts Python and numpy numbers, booleans, and arrays or tensors of zero dimensions.
    """
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        value = item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if is_finite(number) else None
