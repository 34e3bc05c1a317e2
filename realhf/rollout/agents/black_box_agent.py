"""Plays episodes of agents that only know a base URL: ordinary programs that talk to an OpenAI-compatible model.

The program is an async function ``agent(task_text, base_url, run_command) -> reward``. It may use any client, keep any
conversations and send messages to the environment with ``await run_command(text)`` when it likes. The reward is what it
returns or reports, else what the environment gave: a number for all its conversations, or one for each, in a map from
the id of a completion (``reply.id``) of the conversation. It runs on the rollout worker's event loop and must not block
it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from realhf.api.chat import TemplateChat
from realhf.api.env import POLICY_FAILED, RolloutOutcome
from realhf.api.environment import AssistantMessage, Environment, EnvironmentFailure
from realhf.api.generation import TokenSource
from realhf.rollout.episode.played_episode import Progress
from realhf.rollout.episode.request import EpisodeRequest, Limits
from realhf.rollout.openai_endpoint.server import OpenAiServer
from realhf.rollout.openai_endpoint.sessions import (
    Ending,
    Reward,
    Session,
    SessionLimits,
    Sessions,
    reward_problem,
)

_OVER = "error: the episode is over"


@dataclass(frozen=True)
class CommandOutput:
    """What the environment answered, as a policy reads it. ``done``: it takes no further message."""

    output: str
    done: bool


RunCommand = Callable[[str], Awaitable[CommandOutput]]
AgentFunction = Callable[[str, str, RunCommand], Awaitable[Reward | None]]


def load_agent(name: str, options: Mapping[str, Any] | None = None) -> AgentFunction:
    """Import the function that ``module:function`` names; it is called with ``options`` as keyword arguments. Raises
    ValueError."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no agent (module:function): {error}") from error
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"{name!r} is not an async function")
    if not options:
        return found
    try:
        inspect.signature(found).bind("task", "url", None, **options)
    except TypeError as error:
        raise ValueError(f"{name!r} cannot be called with the options {', '.join(options)}: {error}") from error
    return partial(found, **options)


class BlackBoxAgent:
    """``EpisodeAgent`` around a black-box agent. The endpoint is served from the first episode on, until ``close``.

    Args:
        chat, limits: as for any agent; max_turns and the token limits are enforced by the endpoint.
        timeout_s: what an episode of the agent may take.

    An agent may hold several conversations, and each is a trajectory; the one with the most sampled tokens is the main
    one, and ``timings["branches"]`` says how many there were.
    """

    def __init__(self, agent: AgentFunction, chat: TemplateChat, limits: Limits, *, timeout_s: float = 600.0) -> None:
        self._agent, self._limits, self._timeout_s = agent, limits, timeout_s
        session_limits = SessionLimits(limits.max_total_tokens, limits.turn_tokens, limits.max_turns)
        self._starting = asyncio.Lock()
        self._server = OpenAiServer(Sessions(chat, session_limits))

    async def close(self) -> None:
        """Stop serving the endpoint."""
        await self._server.stop()

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``. The main trajectory is the outcome, the others are its ``branches``
        (``Session.outcomes``): every sampled token is in one of them. An exception of the agent makes the episode a
        failure of the policy, unless it is the agent's way to report that a limit was reached. Raises RuntimeError
        when the endpoint cannot be served."""
        began = time.perf_counter()
        async with self._starting:
            await self._server.start()
        world = _World(env, wanted)
        session = self._server.sessions.open(llm, slot=slot, seed=wanted.sampling_seed)
        try:
            ending = await self._ending(world, session)
        finally:
            self._server.sessions.close(session)
        outcomes = session.outcomes(replace(ending, task=wanted.task, task_text=world.progress.task_text))
        return replace(
            outcomes[0],
            branches=tuple(outcomes[1:]),
            timings=outcomes[0].timings | {"wall_s": time.perf_counter() - began},
            rewards=world.progress.rewards,
            metrics=world.progress.metrics,
        )

    async def _ending(self, world: _World, session: Session) -> Ending:
        reward, problem = None, ""
        try:
            text = await world.reset()
        except EnvironmentFailure as error:
            return Ending(error.kind, message=str(error))
        try:
            async with asyncio.timeout(self._timeout_s):
                reward = await self._agent(text, self._server.base_url(session), world.run)
        except TimeoutError as error:
            problem = str(error) or f"the agent was not done after {self._timeout_s:g} s"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:500]
        if world.failure is not None:
            return Ending(world.failure.kind, message=str(world.failure))
        limit, progress = session.ledger.limit_hit, world.progress
        if problem and not limit:
            return Ending(POLICY_FAILED, message=str(session.engine_error or problem))
        if reward is not None and (problem := reward_problem(reward)):
            return Ending(POLICY_FAILED, message=f"the agent returned {problem}")
        reward = progress.reward if reward is None and session.reward is None else reward
        status = "achieved" if progress.achieved else limit or "finished"
        return Ending(status, reward, progress.achieved, progress.share)


class _World:
    """Shows the environment of one episode to the agent's ``run_command``, and remembers what became of it."""

    def __init__(self, env: Environment, wanted: EpisodeRequest) -> None:
        self.progress = Progress(wanted)
        self.failure: EnvironmentFailure | None = None
        self._env = env
        self._turn = asyncio.Lock()

    async def reset(self) -> str:
        """Start the episode and return the text of its task. Raises EnvironmentFailure."""
        task = self.progress.wanted.task
        return self.progress.begin(await self._env.reset(task.payload, seed=task.seed))

    async def run(self, command: str) -> CommandOutput:
        """Send a message to the environment; this is the agent's ``run_command``. Raises EnvironmentFailure, and again
        on every later call."""
        async with self._turn:
            if self.failure is not None:
                raise self.failure
            if self.progress.status:
                return CommandOutput(_OVER, True)
            said = AssistantMessage(str(command), text=str(command))
            try:
                return CommandOutput(self.progress.take(said, await self._env.step(said)), bool(self.progress.status))
            except EnvironmentFailure as error:
                self.failure = error
                raise
