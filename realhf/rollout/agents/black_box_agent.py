"""Plays episodes of agents that only know a base URL: ordinary programs that talk to an OpenAI-compatible model.

The program is an async function ``agent(task_text, base_url, run_command) -> reward``. It may use any client, keep any
conversations and call ``await run_command("aws ...")`` when it likes. The reward is what it returns or reports, else
what the environment gave: a number for all its conversations, or one for each, in a map from the id of a completion
(``reply.id``) of the conversation. It runs on the rollout worker's event loop and must not block it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from realhf.api.aws_models import AwsStepResult
from realhf.api.chat import TemplateChat
from realhf.api.env import RolloutOutcome
from realhf.api.generation import TokenSource
from realhf.api.observation_text import observation_text, shorten
from realhf.rollout.agents.episode_agent import EpisodeEnv
from realhf.rollout.client.env_client import EnvError
from realhf.rollout.client.failures import FAILURES, failure_status
from realhf.rollout.episode.group_result import episode_return
from realhf.rollout.episode.rollout_state import Limits, RolloutRequest
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
    """What a command printed, as a policy reads it. ``done``: the environment takes no further command."""

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

    async def play(self, env: EpisodeEnv, wanted: RolloutRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """Play an episode as ``play_all`` does, and return its main trajectory alone."""
        return (await self.play_all(env, wanted, llm, slot))[0]

    async def play_all(
        self, env: EpisodeEnv, wanted: RolloutRequest, llm: TokenSource, slot: int
    ) -> list[RolloutOutcome]:
        """Play one episode and return its trajectories (``Session.outcomes``), of which every sampled token is in one.

        An exception of the agent makes the episode a ``policy_error``, unless it is the agent's way to report that a
        limit was reached. Raises RuntimeError when the endpoint cannot be served.
        """
        began = time.perf_counter()
        async with self._starting:
            await self._server.start()
        world = _World(env, self._limits)
        session = self._server.sessions.open(llm, slot=slot, seed=wanted.sampling_seed)
        try:
            ending = await self._ending(world, session)
        finally:
            self._server.sessions.close(session)
        outcomes = session.outcomes(replace(ending, seed=wanted.seed, task=world.task))
        wall_s = time.perf_counter() - began
        return [replace(outcome, timings=outcome.timings | {"wall_s": wall_s}) for outcome in outcomes]

    async def _ending(self, world: _World, session: Session) -> Ending:
        reward, problem = None, ""
        try:
            text = await world.reset()
        except FAILURES as error:
            return Ending(failure_status(error), message=str(error))
        try:
            async with asyncio.timeout(self._timeout_s):
                reward = await self._agent(text, self._server.base_url(session), world.run)
        except TimeoutError as error:
            problem = str(error) or f"the agent was not done after {self._timeout_s:g} s"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:500]
        if world.failure is not None:
            return Ending(failure_status(world.failure), message=str(world.failure))
        limit = session.ledger.limit_hit
        if problem and not limit:
            return Ending("policy_error", message=str(session.engine_error or problem))
        if reward is not None and (problem := reward_problem(reward)):
            return Ending("policy_error", message=f"the agent returned {problem}")
        reward = world.reward() if reward is None and session.reward is None else reward
        status = "achieved" if world.achieved else limit or "finished"
        return Ending(status, reward, world.achieved, world.progress)


class _World:
    """Shows the environment of one episode to the agent's ``run_command``, and remembers what became of it."""

    def __init__(self, env: EpisodeEnv, limits: Limits) -> None:
        self.task: dict[str, Any] = {}
        self.achieved = False
        self.progress = 0.0
        self.failure: Exception | None = None
        self._env, self._limits = env, limits
        self._rewards: list[float] = []
        self._done = False
        self._turn = asyncio.Lock()

    async def reset(self) -> str:
        """Start the episode and return the text of its task. Raises FAILURES."""
        first = await self._env.reset()
        self.task = first.observation.task.model_dump() if first.observation.task else {}
        return str(self.task.get("description", ""))

    async def run(self, command: str) -> CommandOutput:
        """Run a command; this is the agent's ``run_command``. Raises what the environment raises, and again on every
        later call."""
        async with self._turn:
            if self.failure is not None:
                raise self.failure
            if self._done:
                return CommandOutput(_OVER, True)
            try:
                return self._taken(await self._env.step(command))
            except EnvError as error:
                if error.code == "VALIDATION_ERROR":
                    return CommandOutput(f"error: {shorten(str(error), self._limits.observation_chars)}", False)
                self.failure = error
                raise
            except FAILURES as error:
                self.failure = error
                raise

    def reward(self) -> float:
        """Return the environment's reward of the episode."""
        return episode_return(self._rewards, self._limits.reward_mode)

    def _taken(self, result: AwsStepResult) -> CommandOutput:
        if result.reward is None or not math.isfinite(result.reward):
            raise EnvError("EXECUTION_ERROR", "the environment answered a step without a finite reward")
        seen = result.observation
        self._rewards.append(result.reward)
        self.achieved, self.progress, self._done = seen.task_achieved, seen.partial_progress, result.done
        return CommandOutput(observation_text(seen.model_dump(), max_chars=self._limits.observation_chars), result.done)
