"""Defines who plays an episode: the protocol of an agent, and the agent that speaks in turns with an environment."""

from __future__ import annotations

from typing import Protocol

from realhf.api.aws_models import AwsStepResult
from realhf.api.env import ChatFormat, RolloutOutcome, StepResult
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.rollout.client.env_client import EnvError
from realhf.rollout.client.failures import FAILURES, failure_status
from realhf.rollout.episode.rollout_state import Limits, RolloutRequest, RolloutState


class EpisodeEnv(Protocol):
    """Shows an agent its environment; ``ResumingEnv`` is one."""

    async def reset(self) -> AwsStepResult:
        """Start the episode and return the reply, which holds the task."""
        ...

    async def step(self, command: str) -> AwsStepResult:
        """Run a command of the agent and return the reply."""
        ...


class EpisodeAgent(Protocol):
    """Plays episodes, many at once on one event loop."""

    async def play(self, env: EpisodeEnv, wanted: RolloutRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """Play one episode from its reset to its outcome; an environment or an engine that fails is an outcome.
        ``slot`` is the cache row that the episode has to itself."""
        ...


class TurnAgent:
    """Plays in turns: the policy writes a turn, its command is run, and it reads the observation next."""

    def __init__(self, chat: ChatFormat, limits: Limits) -> None:
        self._chat, self._limits = chat, limits

    async def play(self, env: EpisodeEnv, wanted: RolloutRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``."""
        state = RolloutState(wanted, self._chat, self._limits)
        try:
            state.start(_plain(await env.reset()))
            while not state.status:
                state.take_turn(await llm.generate(state.request(slot)))
                if state.command is not None:
                    await _run_command(state, env, state.command)
        except FAILURES as error:
            state.fail(failure_status(error), str(error))
        except GenerationFailed as error:
            state.fail("policy_error", str(error))
        finally:
            llm.free([slot])
        return state.outcome()


async def _run_command(state: RolloutState, env: EpisodeEnv, command: str) -> None:
    try:
        state.take_reply(_plain(await env.step(command)))
    except EnvError as error:
        if error.code != "VALIDATION_ERROR":
            raise
        state.take_rejection(str(error))


def _plain(result: AwsStepResult) -> StepResult:
    return StepResult(result.observation.model_dump(), result.reward, result.done)
