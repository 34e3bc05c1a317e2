"""N environment sessions for a blocking trainer: a synchronous interface to sessions that run on an
event loop in a thread of their own.

Generation runs in the caller's thread. Environment steps run on the pool's event loop, which also
answers the server's pings while the caller generates or trains. Source:
docs/reference/environment.md 1 and 9.

Environment variables: AWS_RL_ENV_URL and AWS_RL_ENV_TOKEN locate the server. NUM_GENERATIONS
(default 8) sets the rollouts per group, MAX_TURNS (6) and MAX_TOTAL_TOKENS (4096) limit the policy
turns and the tokens of an episode.
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

from realhf.api.environment import EnvironmentSpec, Task
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import ChatFormat, RolloutOutcome
from realhf.aws.client.session_group import (
    DEFAULT_URL,
    GroupError,
    GroupSummary,
    PoolClosed,
    ResultSink,
    RolloutFailure,
    SessionGroup,
    describe_failures,
    reset_arguments,
)
from realhf.aws.environment import SYSTEM_PROMPT, AwsEnvironment, AwsOptions, AwsTaskSet
from realhf.aws.messages import OBSERVATION_CHARS, extract_command
from realhf.base.loop_thread import LoopThread, shut_down
from realhf.env.openenv_client import OpenEnvClient, StepResult
from realhf.rollout.blocking_player import BatchEngine, BlockingPlayer
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.player import EpisodePlayer, TurnAgent

_FINALIZE_S = 2.0
"""Seconds for closing the sessions of a pool that is garbage collected."""
_STOP_S = 10.0
"""Seconds for closing the sessions in ``close``."""
MODES = ("lockstep", "independent")
"""Schedules of turns. ``lockstep``: all episodes advance together; ``independent``: each advances
on its own."""


class Policy(BatchEngine, Protocol):
    """Engine that generates the turns of a pool's episodes, with its chat format."""

    @property
    def chat(self) -> ChatFormat:
        """Chat format that converts conversations to token ids."""
        ...


class MultiTurnEnvPool:
    """N sessions on which groups of episodes are played.

    Args:
        base_url: address of the server, see ``SessionGroup``.
        size: number of sessions.
        curriculum: receiver of group results, see ``SessionGroup``.
        max_turns: maximum number of policy turns in an episode.
        max_total_tokens: maximum number of prompt and completion tokens in an episode.
        turn_tokens: the engine's ``max_new_tokens``; an episode without room for another turn ends
            with status ``token_budget``.
        observation_chars: maximum length of an observation, in characters.
        session: further arguments of ``SessionGroup``. Two of them have other defaults here:
            ``connect_timeout_s`` is 20, and ``on_failure`` is ``retry`` (an episode whose
            environment failed is played once more, on a new connection). With ``drop`` such an
            episode becomes a failed outcome; with ``raise`` GroupError is raised after all episodes
            have ended.

    ``timings`` holds totals over all runs: ``generation_s`` and ``env_s`` (seconds of generation,
    and of everything else), ``reset_s`` (the part of ``env_s`` before the first generation of a
    run), and the numbers of ``rounds``, ``env_steps`` and ``episodes``.
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
        self._limits = EpisodeLimits(max_turns, max_total_tokens, turn_tokens)
        self._observation_chars = observation_chars
        session = {"connect_timeout_s": 20.0, "on_failure": "retry", **session}
        self._group = SessionGroup(base_url, size, curriculum, **session)
        self._thread: LoopThread | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._playing = threading.Lock()

    @property
    def turn_tokens(self) -> int:
        """Maximum number of tokens in a policy turn."""
        return self._limits.turn_tokens

    @property
    def reward_mode(self) -> str:
        """How the server computes rewards: ``potential`` or ``level``, see
        ``SessionGroup.reward_mode``."""
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
        """Play ``group_size`` (default: ``size``) episodes of one task instance and return their
        outcomes.

        ``task``: a ``Task`` or reset arguments. ``seed`` None: the seed of the task, or of the
        reset arguments (0 if they have none). Other arguments: see ``run_groups``.
        """
        arguments = reset_arguments(task, seed, chaos)
        wanted = int(arguments.pop("seed", 0))
        return self.run_groups(
            [arguments], policy, group_size=group_size or self.size, seeds=[wanted], mode=mode
        )[0]

    def run_groups(
        self,
        tasks: Sequence[Mapping[str, Any]],
        policy: Policy,
        *,
        group_size: int,
        seeds: Sequence[int],
        mode: str = "lockstep",
    ) -> list[list[RolloutOutcome]]:
        """Play ``group_size`` episodes of every task; return one list of outcomes per task, in
        order.

        ``tasks[i]`` are reset arguments (``{"task": {...}}`` or ``{"task_id": ...}``) and
        ``seeds[i]`` the seed for them. An episode whose environment failed has an outcome without
        reward; an error of the policy is raised. In ``lockstep`` mode the same policy outputs
        always lead to the same sequence of batches. In ``independent`` mode no episode waits for
        another.
        """
        if len(tasks) != len(seeds):
            raise ValueError(f"{len(tasks)} tasks, but {len(seeds)} seeds")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
        thread = self._connected_thread()
        wanted = [
            EpisodeRequest(number * group_size + member, _build_task(arguments, seed))
            for number, (arguments, seed) in enumerate(zip(tasks, seeds, strict=True))
            for member in range(group_size)
        ]
        with self._exclusive():
            thread.call(self._group.reopen_lost())
            outcomes = self._play(thread, wanted, policy, lockstep=mode == "lockstep")
        if self._group.on_failure == "raise" and any(not outcome.valid for outcome in outcomes):
            raise GroupError(f"rollouts failed: {describe_failures(outcomes)}", outcomes)
        return [outcomes[start : start + group_size] for start in range(0, len(wanted), group_size)]

    def reset_group(
        self, task: Any, seed: int | None = None, *, chaos: bool = False
    ) -> list[StepResult]:
        """Reset all sessions to the same task instance and return the results. Raises
        GroupResetError if one of them fails."""
        thread = self._connected_thread()
        with self._exclusive():
            return thread.call(self._group.reset(reset_arguments(task, seed, chaos)))

    def run_group_step(
        self, actions: Sequence[str | None]
    ) -> list[StepResult | RolloutFailure | None]:
        """Run one command per session, concurrently, and return the results in order. None instead
        of a command skips the session. If the environment fails, the result is a RolloutFailure."""
        thread = self._connected_thread()
        with self._exclusive():
            return thread.call(self._group.step(actions))

    def record_group_result(
        self, task: Any, outcomes: Sequence[Any], success_threshold: float = 0.99
    ) -> GroupSummary:
        """Report a group's results to the curriculum and return their statistics, see
        ``record_group``. Nothing else in the pool reports to the curriculum."""
        return self._group.record_group_result(task, outcomes, success_threshold)

    def close(self, timeout_s: float = _STOP_S) -> None:
        """Close all sessions and stop the thread. Idempotent, and harmless if the server is
        gone."""
        self._group.closed = True
        thread = self._thread
        self._thread = None
        if self._finalizer is not None:
            self._finalizer.detach()
        if thread is not None:
            shut_down(thread, self._group, timeout_s)

    def __enter__(self) -> MultiTurnEnvPool:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connected_thread(self) -> LoopThread:
        if self._thread is None:
            self._group.check_connected()
            raise PoolClosed("the pool is not connected; call connect() first")
        self._thread.check_caller()
        return self._thread

    def _play(
        self,
        thread: LoopThread,
        wanted: Sequence[EpisodeRequest],
        policy: Policy,
        *,
        lockstep: bool,
    ) -> list[RolloutOutcome]:
        free = [*self._group.clients]
        level = self.reward_mode == "level"
        chars = self._observation_chars

        def make(address: str) -> _SharedSessionEnvironment:
            del address
            return _SharedSessionEnvironment(
                self._group, free, level=level, observation_chars=chars
            )

        spec = EnvironmentSpec("aws", make, tasks=lambda split: AwsTaskSet(AwsOptions(), split))
        agent = TurnAgent(policy.chat, self._limits, SYSTEM_PROMPT)
        retries = 1 if self._group.on_failure == "retry" else 0
        # the sessions enforce the deadline; this is a backstop
        timeout_s = 2 * self._group.message_timeout_s
        player = EpisodePlayer(
            spec, "", agent, self.size, retries=retries, message_timeout_s=timeout_s, patience_s=0.0
        )
        timed_policy = _TimedPolicy(policy)
        began = time.perf_counter()
        outcomes = (
            BlockingPlayer(player, thread).play(wanted, timed_policy, lockstep=lockstep).outcomes
        )
        total = time.perf_counter() - began
        self.timings["generation_s"] += timed_policy.seconds
        self.timings["env_s"] += total - timed_policy.seconds
        self.timings["reset_s"] += (timed_policy.first or began + total) - began
        self.timings["rounds"] += timed_policy.rounds
        texts = [turn.text for outcome in outcomes for turn in outcome.turns]
        self.timings["env_steps"] += sum(extract_command(text) is not None for text in texts)
        self.timings["episodes"] += len(outcomes)
        return outcomes

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._playing.acquire(blocking=False):
            raise RuntimeError("this pool is playing already; one run at a time")
        try:
            yield
        finally:
            self._playing.release()


class _SharedSessionEnvironment(AwsEnvironment):
    """``AwsEnvironment`` on one of the pool's sessions. It takes a free session when it is created
    and gives it back when it is closed."""

    def __init__(
        self, group: SessionGroup, free: list[OpenEnvClient], *, level: bool, observation_chars: int
    ) -> None:
        client = free.pop(0)
        super().__init__(
            "", client=client, reopen=group.reopen, level=level, observation_chars=observation_chars
        )
        self._free = free
        self._leased_client = client

    async def close(self) -> None:
        """Close the session, because its state is unknown, and give it back to the pool, which
        reopens it."""
        await super().close()
        self._free.append(self._leased_client)


class _TimedPolicy:
    """Policy that counts and times the batches of the wrapped policy. ``first``: start time of the
    first batch."""

    def __init__(self, policy: Policy) -> None:
        self.seconds = 0.0
        self.rounds = 0
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


def _build_task(arguments: Mapping[str, Any], seed: int) -> Task:
    """Return a Task whose payload is the arguments of ``reset``.

    Its name is the task's number in the arguments, and its group the task's difficulty.
    """
    task = arguments.get("task") or {}
    name = str(task.get("task_id", arguments.get("task_id", "")))
    group = str(task.get("difficulty", ""))
    return Task(name, group, arguments, seed=seed)


_INTEGER_VARIABLES = {
    "NUM_GENERATIONS": ("size", 8),
    "MAX_TURNS": ("max_turns", 6),
    "MAX_TOTAL_TOKENS": ("max_total_tokens", 4096),
}


def pool_arguments(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of ``MultiTurnEnvPool`` that are read from environment variables. Raises
    ValueError, which names the variable, for a value that is not a positive integer."""
    arguments: dict[str, Any] = {
        "base_url": environ.get("AWS_RL_ENV_URL") or DEFAULT_URL,
        "token": environ.get("AWS_RL_ENV_TOKEN") or None,
    }
    for variable, (argument, default) in _INTEGER_VARIABLES.items():
        text = environ.get(variable) or str(default)
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{variable} is {text!r}; it must be a positive whole number")
        arguments[argument] = int(text)
    return arguments


def pool_from_environment(**arguments: Any) -> MultiTurnEnvPool:
    """Return a pool, not connected yet, with arguments from environment variables; ``arguments``
    override them. Raises ValueError."""
    return MultiTurnEnvPool(**{**pool_arguments(os.environ), **arguments})
