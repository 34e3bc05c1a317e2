"""Plays N environment sessions for a blocking trainer: a sync facade with its own thread and event loop.

Generation runs in the caller's thread, environment steps on the pool's loop, which answers pings while the caller
generates or trains. Source: docs/reference/environment.md 9.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from realhf.api.env import ChatFormat, RolloutOutcome, StepResult
from realhf.api.model import GenOutput, GenRequest
from realhf.api.observation_text import OBSERVATION_CHARS
from realhf.rollout.client.failures import GroupError, PoolClosed, RolloutFailure, check_on_failure, failed_ones
from realhf.rollout.client.loop_thread import LoopThread
from realhf.rollout.client.session_group import SessionGroup, reset_arguments
from realhf.rollout.episode.group_result import GroupSummary, ResultSink, record_group
from realhf.rollout.episode.rollout_state import Limits, RolloutRequest
from realhf.rollout.players.independent import IndependentPlay, next_batch
from realhf.rollout.players.lockstep import LockstepPlay, SessionState

_FINALIZE_S = 2.0
_STOP_S = 10.0
MODES = ("lockstep", "independent")


class Policy(Protocol):
    """Gives a pool the tokens it asks for."""

    @property
    def chat(self) -> ChatFormat:
        """How conversations become token ids."""
        ...

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Continue every request, batched, in order; ``round_index`` counts the batches of a run."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forget what is cached for these slots: their episodes are over."""
        ...


class MultiTurnEnvPool:
    """Plays groups of episodes over ``size`` sessions.

    Args:
        base_url, token: of the environment server.
        curriculum: gets the result of a group from ``record_group_result``, and by nothing else.
        max_turns: policy turns of an episode. max_total_tokens: prompt and completion of an episode.
        turn_tokens: the engine's ``max_new_tokens``; an episode without room for a turn ends (token_budget).
        observation_chars: cap of the text of one observation.
        message_timeout_s: reset or step, each. connect_timeout_s: opening all sessions.
        retry_capacity_s: keep trying to connect that long while the server is full.
        on_failure: ``retry`` plays an episode whose environment failed once more, on a new connection;
            ``drop`` returns it as a failed outcome; ``raise`` raises GroupError once all episodes have ended.

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
        message_timeout_s: float = 60.0,
        connect_timeout_s: float = 20.0,
        retry_capacity_s: float = 0.0,
        on_failure: str = "retry",
        token: str | None = None,
    ) -> None:
        check_on_failure(on_failure)
        self.size = size
        self.timings: dict[str, float] = {
            "env_s": 0.0,
            "reset_s": 0.0,
            "generation_s": 0.0,
            "rounds": 0.0,
            "env_steps": 0.0,
            "episodes": 0.0,
        }
        self._curriculum = curriculum
        self._limits = Limits(max_turns, max_total_tokens, turn_tokens, observation_chars)
        self._group = SessionGroup(
            base_url,
            size,
            connect_timeout_s=connect_timeout_s,
            message_timeout_s=message_timeout_s,
            retry_capacity_s=retry_capacity_s,
            token=token,
        )
        self._on_failure = on_failure
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
        """Open all sessions or none. A second call does nothing; after a failure a retry is possible.

        Raises CapacityError or ConnectError: the first error, after every opened session is closed again."""
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
        self._finalizer = weakref.finalize(self, _shut_down, thread, self._group, _FINALIZE_S)

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
        sampling_seeds: Sequence[Sequence[int]] | None = None,
    ) -> list[list[RolloutOutcome]]:
        """Play ``group_size`` episodes of every task and return them per task, in order.

        ``tasks[i]`` are reset arguments (``{"task": {...}}`` or ``{"task_id": ...}``), ``seeds[i]`` their seed,
        ``sampling_seeds[i][k]`` the random numbers of the k-th episode's tokens (see ``GenRequest.seed``). A failed
        environment is an outcome without reward; an error of the policy is raised. In ``lockstep`` the same policy
        outputs give the same sequence of batches; ``independent`` lets no episode wait for another."""
        if len(tasks) != len(seeds):
            raise ValueError(f"{len(tasks)} tasks, but {len(seeds)} seeds")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
        thread = self._ready()
        wanted = [
            RolloutRequest(
                number * group_size + member,
                task,
                seed,
                sampling_seed=sampling_seeds[number][member] if sampling_seeds else None,
            )
            for number, (task, seed) in enumerate(zip(tasks, seeds, strict=True))
            for member in range(group_size)
        ]
        with self._alone():
            thread.call(self._group.reopen_lost())
            play = self._lockstep if mode == "lockstep" else self._independent
            outcomes = [outcome for outcome in play(thread, wanted, policy) if outcome is not None]
        if len(outcomes) != len(wanted):
            raise AssertionError(f"{len(wanted)} episodes, but {len(outcomes)} outcomes")
        self.timings["episodes"] += len(wanted)
        if self._on_failure == "raise" and any(not outcome.valid for outcome in outcomes):
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
        return record_group(self._curriculum, task, outcomes, success_threshold)

    def close(self, timeout_s: float = _STOP_S) -> None:
        """Close all sessions and stop the thread; harmless when repeated or when the server is gone."""
        self._group.closed = True
        thread, self._thread = self._thread, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if thread is not None:
            _shut_down(thread, self._group, timeout_s)

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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._playing.acquire(blocking=False):
            raise RuntimeError("this pool is playing already; one run at a time")
        try:
            yield
        finally:
            self._playing.release()

    def _lockstep(
        self, thread: LoopThread, wanted: Sequence[RolloutRequest], policy: Policy
    ) -> list[RolloutOutcome | None]:
        sessions = [
            SessionState(index, client if client.usable else None) for index, client in enumerate(self._group.clients)
        ]
        retry = self._on_failure == "retry"
        limits = replace(self._limits, reward_mode=self.reward_mode)
        play = LockstepPlay(sessions, wanted, policy.chat, limits, retry=retry, reopen=self._group.reopen)
        try:
            with self._clock("env_s"), self._clock("reset_s"):
                thread.call(play.fill())
            round_index = 0
            while requests := play.requests():
                with self._clock("generation_s"):
                    outputs = policy.generate(requests, round_index)
                with self._clock("env_s"):
                    play.take_outputs(outputs)
                    thread.call(play.advance())
                if freed := play.take_freed():
                    policy.free(freed)
                round_index += 1
                self.timings["rounds"] += 1
        finally:
            policy.free(range(self.size))
            self.timings["env_steps"] += play.env_steps
        return play.outcomes

    def _independent(
        self, thread: LoopThread, wanted: Sequence[RolloutRequest], policy: Policy
    ) -> list[RolloutOutcome | None]:
        retry = self._on_failure == "retry"
        limits = replace(self._limits, reward_mode=self.reward_mode)
        play = IndependentPlay(self._group.clients, wanted, policy.chat, limits, retry=retry, reopen=self._group.reopen)
        running = asyncio.run_coroutine_threadsafe(play.run(), thread.loop)
        over, round_index = False, 0
        try:
            while not over:
                with self._clock("env_s"):
                    waiting, freed, over = next_batch(play.inbox)
                if freed:
                    policy.free(freed)
                if waiting and not over:
                    with self._clock("generation_s"):
                        outputs = policy.generate([entry.request for entry in waiting], round_index)
                    for entry, output in zip(waiting, outputs, strict=True):
                        thread.loop.call_soon_threadsafe(entry.answer, output)
                    round_index += 1
                    self.timings["rounds"] += 1
            running.result(_STOP_S)
        except BaseException:
            running.cancel()
            if not over:
                play.wait_until_over(_STOP_S)
            raise
        finally:
            policy.free(range(self.size))
            self.timings["env_steps"] += play.env_steps
        return play.outcomes

    @contextmanager
    def _clock(self, key: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timings[key] += time.perf_counter() - began


def _shut_down(thread: LoopThread, group: SessionGroup, timeout_s: float) -> None:
    """Close sessions and thread within the time; does nothing in a forked child. The caller may be close(), the garbage
    collector or the interpreter's end."""
    if thread.alive and not thread.is_current():
        with suppress(TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(group.close(), thread.loop).result(timeout_s)
    thread.stop(timeout_s)
