"""Plays N environment sessions for a blocking trainer: a sync facade with its own thread and event loop.

Generation runs in the caller's thread, environment steps on the pool's loop, which answers pings while the caller
generates or trains. Source: docs/reference/environment.md 1 and 9.

AWS_RL_ENV_URL and AWS_RL_ENV_TOKEN say where the server is; NUM_GENERATIONS (8), MAX_TURNS (6) and MAX_TOTAL_TOKENS
(4096) are rollouts of a group, policy turns and tokens of an episode.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from realhf.api.environment import ChatFormat, EnvironmentSpec, RolloutOutcome, StepResult, Task
from realhf.api.model import GenOutput, GenRequest
from realhf.aws.client.session_group import (
    DEFAULT_URL,
    GroupError,
    GroupSummary,
    PoolClosed,
    ResultSink,
    RolloutFailure,
    SessionGroup,
    failed_ones,
    reset_arguments,
)
from realhf.aws.environment import SYSTEM_PROMPT, AwsEnvironment, AwsOptions, AwsTaskSet
from realhf.aws.messages import OBSERVATION_CHARS, extract_command
from realhf.base.loop_thread import LoopThread, shut_down
from realhf.env.openenv_client import OpenEnvClient
from realhf.rollout.blocking_player import BatchEngine, BlockingPlayer
from realhf.rollout.episode import EpisodeRequest, Limits
from realhf.rollout.player import Player, TurnAgent

_FINALIZE_S = 2.0
_STOP_S = 10.0
MODES = ("lockstep", "independent")


class Policy(BatchEngine, Protocol):
    """Gives a pool the tokens it asks for."""

    @property
    def chat(self) -> ChatFormat:
        """How conversations become token ids."""
        ...


class MultiTurnEnvPool:
    """Plays groups of episodes over ``size`` sessions.

    Args:
        base_url, size, curriculum, session: see ``SessionGroup``; by default ``on_failure`` is ``retry`` (an episode
            whose environment failed is played once more, on a new connection; ``drop`` returns it as a failed outcome,
            ``raise`` raises GroupError once all episodes have ended) and ``connect_timeout_s`` 20.
        max_turns: policy turns of an episode. max_total_tokens: prompt and completion of an episode.
        turn_tokens: the engine's ``max_new_tokens``; an episode without room for a turn ends (token_budget).
        observation_chars: cap of the text of one observation.

    ``timings`` sums ``env_s`` (of it ``reset_s``: the first resets of a run), ``generation_s``, ``rounds``,
    ``env_steps`` and ``episodes`` of all runs.
    """

    def __init__(
        self,
        base_url: str,
        size: int = 8,
        curriculum: ResultSink | None = None,
        *,
        max_turns: int = 6,
        max_total_tokens: int = 4096,
        turn_tokens: int = 64,
        observation_chars: int = OBSERVATION_CHARS,
        **session: Any,
    ) -> None:
        self.size = size
        names = ("env_s", "reset_s", "generation_s", "rounds", "env_steps", "episodes")
        self.timings = dict.fromkeys(names, 0.0)
        self._limits = Limits(max_turns, max_total_tokens, turn_tokens)
        self._observation_chars = observation_chars
        session = {"connect_timeout_s": 20.0, "on_failure": "retry", **session}
        self._group = SessionGroup(base_url, size, curriculum, **session)
        self._thread: LoopThread | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._playing = threading.Lock()

    @property
    def turn_tokens(self) -> int:
        """Tokens that a policy turn may have."""
        return self._limits.turn_tokens

    @property
    def reward_mode(self) -> str:
        """How the server's rewards are read: ``potential`` or ``level``."""
        return self._group.reward_mode

    def connect(self) -> None:
        """See ``SessionGroup.connect``."""
        if self._group.closed:
            raise PoolClosed("the pool is closed")
        if self._thread is not None:
            self._thread.check_caller()
            return
        thread = LoopThread("env-pool", instead="GrpoPool")
        try:
            thread.check_caller()
            thread.call(self._group.connect())
        except BaseException:
            thread.stop(1.0)
            raise
        self._thread = thread
        self._finalizer = weakref.finalize(self, shut_down, thread, self._group, _FINALIZE_S)

    def run_group(
        self,
        task: Any,
        policy: Policy,
        *,
        group_size: int | None = None,
        seed: int | None = None,
        mode: str = "lockstep",
        chaos: bool = False,
    ) -> list[RolloutOutcome]:
        """Play ``group_size`` (default: ``size``) episodes of one task instance: a ``Task`` or reset arguments.
        ``seed`` None: the task's own (0 for reset arguments). See ``run_groups``."""
        arguments = reset_arguments(task, seed, chaos)
        wanted = int(arguments.pop("seed", 0))
        return self.run_groups([arguments], policy, group_size=group_size or self.size, seeds=[wanted], mode=mode)[0]

    def run_groups(
        self,
        tasks: Sequence[Mapping[str, Any]],
        policy: Policy,
        *,
        group_size: int,
        seeds: Sequence[int],
        mode: str = "lockstep",
    ) -> list[list[RolloutOutcome]]:
        """Play ``group_size`` episodes of every task and return them per task, in order.

        ``tasks[i]`` are reset arguments (``{"task": {...}}`` or ``{"task_id": ...}``), ``seeds[i]`` their seed.
        A failed environment is an outcome without reward; an error of the policy is raised. In ``lockstep`` the same
        policy outputs give the same sequence of batches; ``independent`` lets no episode wait for another."""
        if len(tasks) != len(seeds):
            raise ValueError(f"{len(tasks)} tasks, but {len(seeds)} seeds")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
        thread = self._ready()
        wanted = [
            EpisodeRequest(number * group_size + member, _task(arguments, seed))
            for number, (arguments, seed) in enumerate(zip(tasks, seeds, strict=True))
            for member in range(group_size)
        ]
        with self._alone():
            thread.call(self._group.reopen_lost())
            outcomes = self._played(thread, wanted, policy, lockstep=mode == "lockstep")
        if self._group.on_failure == "raise" and any(not outcome.valid for outcome in outcomes):
            raise GroupError(f"rollouts failed: {failed_ones(outcomes)}", outcomes)
        return [outcomes[start : start + group_size] for start in range(0, len(wanted), group_size)]

    def reset_group(self, task: Any, seed: int | None = None, *, chaos: bool = False) -> list[StepResult]:
        """Reset all sessions onto one task instance. Raises GroupResetError when one of them fails."""
        thread = self._ready()
        with self._alone():
            return thread.call(self._group.reset(reset_arguments(task, seed, chaos)))

    def run_group_step(self, actions: Sequence[str | None]) -> list[StepResult | RolloutFailure | None]:
        """Run one command per session, all at once. None skips a session; a failed one answers RolloutFailure."""
        thread = self._ready()
        with self._alone():
            return thread.call(self._group.step(actions))

    def record_group_result(self, task: Any, outcomes: Sequence[Any], success_threshold: float = 0.99) -> GroupSummary:
        """Report a group to the curriculum, once; this is the pool's only write to it. See ``record_group``."""
        return self._group.record_group_result(task, outcomes, success_threshold)

    def close(self, timeout_s: float = _STOP_S) -> None:
        """Close all sessions and stop the thread; harmless when repeated or when the server is gone."""
        self._group.closed = True
        thread, self._thread = self._thread, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if thread is not None:
            shut_down(thread, self._group, timeout_s)

    def __enter__(self) -> MultiTurnEnvPool:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> LoopThread:
        if self._thread is None:
            self._group.check_connected()
            raise PoolClosed("the pool is not connected; call connect() first")
        self._thread.check_caller()
        return self._thread

    def _played(
        self, thread: LoopThread, wanted: Sequence[EpisodeRequest], policy: Policy, *, lockstep: bool
    ) -> list[RolloutOutcome]:
        free = [*self._group.clients]
        level, chars = self.reward_mode == "level", self._observation_chars

        def make(address: str) -> _PooledEnvironment:
            del address
            return _PooledEnvironment(self._group, free, level=level, observation_chars=chars)

        spec = EnvironmentSpec("aws", make, tasks=lambda split: AwsTaskSet(AwsOptions(), split))
        agent = TurnAgent(policy.chat, self._limits, SYSTEM_PROMPT)
        retries = 1 if self._group.on_failure == "retry" else 0
        timeout_s = 2 * self._group.message_timeout_s  # each session has the deadline itself
        player = Player(spec, "", agent, self.size, retries=retries, message_timeout_s=timeout_s, patience_s=0.0)
        clock = _TimedPolicy(policy)
        began = time.perf_counter()
        outcomes = BlockingPlayer(player, thread).play(wanted, clock, lockstep=lockstep).outcomes
        total = time.perf_counter() - began
        self.timings["generation_s"] += clock.seconds
        self.timings["env_s"] += total - clock.seconds
        self.timings["reset_s"] += (clock.first or began + total) - began
        self.timings["rounds"] += clock.rounds
        said = [turn.text for outcome in outcomes for turn in outcome.turns]
        self.timings["env_steps"] += sum(extract_command(text) is not None for text in said)
        self.timings["episodes"] += len(outcomes)
        return outcomes

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._playing.acquire(blocking=False):
            raise RuntimeError("this pool is playing already; one run at a time")
        try:
            yield
        finally:
            self._playing.release()


class _PooledEnvironment(AwsEnvironment):
    """Plays on a session of the pool, which it takes when it is made and leaves open for the next run."""

    def __init__(self, group: SessionGroup, free: list[OpenEnvClient], *, level: bool, observation_chars: int) -> None:
        client = free.pop(0)
        super().__init__("", client=client, reopen=group.reopen, level=level, observation_chars=observation_chars)
        self._free, self._taken = free, client

    async def close(self) -> None:
        """Give the session back, closed: what became of its last episode is not known."""
        await super().close()
        self._free.append(self._taken)


class _TimedPolicy:
    """Counts and times the batches of a policy. ``first``: when the first began."""

    def __init__(self, policy: Policy) -> None:
        self.seconds, self.rounds = 0.0, 0
        self.first: float | None = None
        self._policy = policy

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """See ``BatchEngine``."""
        began = time.perf_counter()
        self.first = self.first or began
        outputs = self._policy.generate(requests, round_index)
        self.seconds += time.perf_counter() - began
        self.rounds += 1
        return outputs

    def free(self, slots: Sequence[int]) -> None:
        """See ``BatchEngine``."""
        self._policy.free(slots)


def _task(arguments: Mapping[str, Any], seed: int) -> Task:
    """Return what the player is asked for: reset arguments, named after the task that they hold."""
    task = arguments.get("task") or {}
    name, group = str(task.get("task_id", arguments.get("task_id", ""))), str(task.get("difficulty", ""))
    return Task(name, group, arguments, seed=seed)


_NUMBERS = {
    "NUM_GENERATIONS": ("size", 8),
    "MAX_TURNS": ("max_turns", 6),
    "MAX_TOTAL_TOKENS": ("max_total_tokens", 4096),
}


def pool_arguments(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read arguments of ``MultiTurnEnvPool`` from variables. Raises ValueError naming a variable that is not a positive
    number."""
    found: dict[str, Any] = {
        "base_url": environ.get("AWS_RL_ENV_URL") or DEFAULT_URL,
        "token": environ.get("AWS_RL_ENV_TOKEN") or None,
    }
    for variable, (argument, default) in _NUMBERS.items():
        text = environ.get(variable) or str(default)
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{variable} is {text!r}; it must be a positive whole number")
        found[argument] = int(text)
    return found


def pool_from_environment(**arguments: Any) -> MultiTurnEnvPool:
    """Return an unconnected pool; ``arguments`` win over variables. Raises ValueError."""
    return MultiTurnEnvPool(**{**pool_arguments(os.environ), **arguments})
