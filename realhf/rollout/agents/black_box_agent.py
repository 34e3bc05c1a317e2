"""Plays episodes of agents that only know a base URL: ordinary programs that talk to an OpenAI-compatible model.

The program is a function in a file of its own: ``async def rollout(task, base_url, session) -> reward``. ``task`` is
what the environment's ``reset`` gets, ``session`` the environment of the episode (``AgentSession``). It may use any
client, keep any conversations, and take steps of the environment when it likes, or none. The reward is what it returns
or reports, else what the environment gave: a number for all its conversations, or one for each, in a map from the id of
a completion (``reply.id``) of the conversation. It runs on the rollout worker's event loop and must not block it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from realhf.api.chat import TemplateChat
from realhf.api.env import AGENT_FAILED, POLICY_FAILED, RolloutOutcome
from realhf.api.environment import Environment, EnvironmentFailure
from realhf.api.generation import TokenSource
from realhf.base.plugin import load_plugin, located
from realhf.rollout.agents.agent_session import AgentSession
from realhf.rollout.episode.played_episode import Progress
from realhf.rollout.episode.request import EpisodeRequest, Limits
from realhf.rollout.openai_endpoint.server import OpenAiServer
from realhf.rollout.openai_endpoint.sessions import (
    Ending,
    Reward,
    Session,
    SessionLimits,
    Sessions,
    read_reward,
)

AgentFunction = Callable[[Mapping[str, Any], str, AgentSession], Awaitable[Reward | None]]


def load_agent(name: str, options: Mapping[str, Any] | None = None) -> AgentFunction:
    """Import the function that ``file.py:function`` or ``module:function`` names; it is called with ``options`` as
    keyword arguments. Raises ValueError."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ValueError(f"{name!r} names no agent: it is file.py:function or module:function")
    file = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{name!r} names no agent: there is no file {file}")
    try:
        found = getattr(load_plugin(file or place), function, None)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name!r} names no agent: {located(error, str(file or ''))}") from error
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"{name!r} is not an async function")
    try:
        inspect.signature(found).bind({}, "url", None, **(options or {}))
    except TypeError as error:
        given = f"(task, base_url, session{''.join(f', {option}=...' for option in options or ())})"
        raise ValueError(f"{name!r} cannot be called with {given}: {error}") from error
    return partial(found, **options) if options else found


class BlackBoxAgent:
    """``EpisodeAgent`` around a black-box agent. The endpoint is served from the first episode on, until ``close``.

    Args:
        chat, limits: as for any agent; max_turns and the token limits are enforced by the endpoint.
        system_prompt: the environment's, which the agent finds before its messages.
        timeout_s: what an episode of the agent may take.

    An agent may hold several conversations, and each is a trajectory; the one with the most sampled tokens is the main
    one, and ``timings["branches"]`` says how many there were.
    """

    def __init__(
        self,
        agent: AgentFunction,
        chat: TemplateChat,
        limits: Limits,
        system_prompt: str = "",
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self._agent, self._limits, self._timeout_s = agent, limits, timeout_s
        self._system_prompt = system_prompt
        session_limits = SessionLimits(limits.max_total_tokens, limits.turn_tokens, limits.max_turns)
        self._starting = asyncio.Lock()
        self._server = OpenAiServer(Sessions(chat, session_limits))

    async def close(self) -> None:
        """Stop serving the endpoint."""
        await self._server.stop()

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``. The main trajectory is the outcome, the others are its ``branches``
        (``Session.outcomes``): every sampled token is in one of them. An exception of the agent makes the episode a
        failure of the agent (of the policy, where its tokens could not be had), unless it is the endpoint's refusal of
        a turn beyond a limit, or was raised from that. Raises RuntimeError when the endpoint cannot be served."""
        began = time.perf_counter()
        async with self._starting:
            await self._server.start()
        session = self._server.sessions.open(llm, slot=slot, seed=wanted.sampling_seed)
        progress = Progress(wanted)
        world = AgentSession(env, progress, session, self._system_prompt)
        try:
            ending = await self._ending(world, progress, session)
        finally:
            world.end()
            self._server.sessions.close(session)
        outcomes = session.outcomes(replace(ending, task=wanted.task, task_text=progress.task_text))
        return replace(
            outcomes[0],
            branches=tuple(outcomes[1:]),
            timings=outcomes[0].timings | {"wall_s": time.perf_counter() - began},
            rewards=progress.rewards,
            metrics=progress.metrics,
            info=progress.opening.info,
            steps=tuple(progress.turns),
        )

    async def _ending(self, world: AgentSession, progress: Progress, session: Session) -> Ending:
        reward, problem, limit = None, "", ""
        try:
            await world.open()
        except EnvironmentFailure as error:
            return Ending(error.kind, message=str(error))
        try:
            async with asyncio.timeout(self._timeout_s):
                task = dict(progress.wanted.task.payload)
                reward = await self._agent(task, self._server.base_url(session), world)
        except TimeoutError as error:
            problem = str(error) or f"the agent was not done after {self._timeout_s:g} s"
        except asyncio.CancelledError:
            if (episode := asyncio.current_task()) is None or episode.cancelling():
                raise
            problem = "the agent cancelled itself"
        except (Exception, SystemExit) as error:
            problem, limit = f"{type(error).__name__}: {error}"[:500], session.limit_told_by(error)
        if world.failure is not None:
            return Ending(world.failure.kind, message=str(world.failure))
        if problem and not limit:
            if session.engine_error is not None:
                return Ending(POLICY_FAILED, message=str(session.engine_error))
            return Ending(AGENT_FAILED, message=problem)
        try:
            reward = None if reward is None else read_reward(reward)
        except ValueError as error:
            return Ending(AGENT_FAILED, message=f"the agent returned {error}")
        limit = limit or session.ledger.limit_hit
        reward = progress.reward if reward is None and session.reward is None else reward
        status = "achieved" if progress.achieved else limit or "finished"
        return Ending(status, reward, progress.achieved, progress.share)
