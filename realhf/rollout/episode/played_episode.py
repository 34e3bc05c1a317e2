"""Plays one episode: a speaker and an environment take turns, and what came of it is an outcome."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from realhf.api.env import POLICY_FAILED, VALID_STATUSES, PlayedTurn, RolloutOutcome
from realhf.api.environment import AssistantMessage, Environment, EnvironmentFailure, Opening, Turn
from realhf.api.generation import GenerationFailed
from realhf.rollout.episode.request import EpisodeRequest
from realhf.rollout.episode.speaker import ContextFull, Speaker

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
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    opening: Opening = field(default_factory=lambda: Opening(()))
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
        return self.task_text

    def fail(self, status: str, message: str) -> None:
        """End the episode as a failure, which has no reward."""
        self.status, self.message = status, message

    def take(self, said: AssistantMessage, turn: Turn, max_turns: int | None = None) -> str:
        """Take a turn of the policy and the environment's answer to it; returns the answer's text. Raises
        EnvironmentFailure for a number that is none."""
        for name, value in (("reward", turn.reward), *turn.rewards.items(), *turn.metrics.items()):
            if value is not None and not math.isfinite(value):
                raise EnvironmentFailure("internal", f"{name} is {value}, not a finite number")
        shown = "\n".join(str(message.get("content") or "") for message in turn.messages)
        self.turns.append(
            PlayedTurn(
                said.text or said.content,
                shown,
                turn.reward or 0.0,
                said,
                turn.messages,
                turn.rewards,
                turn.metrics,
                turn.info,
            )
        )
        before = self.reward
        if turn.reward is not None:
            self.reward = turn.reward if turn.final else self.reward + turn.reward
        # A final reward replaces the sum, so that its turn has changed it by the difference.
        self.turn_rewards.append(self.reward - before if turn.final else turn.reward or 0.0)
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

    def outcome(self, speaker: Speaker) -> RolloutOutcome:
        """Return the finished episode, after checking the token invariants. A failure keeps no reward."""
        valid, tokens, task = self.status in VALID_STATUSES, speaker.tokens, self.wanted.task
        if tokens is not None and valid:
            tokens.check()
        return RolloutOutcome(
            status=self.status,
            prompt_ids=tokens.prompt_ids if tokens else [],
            completion_ids=tokens.completion_ids if tokens else [],
            logprobs=tokens.logprobs if tokens else [],
            versions=tokens.versions if tokens else [],
            loss_mask=tokens.loss_mask if tokens else [],
            reward=self.reward if valid else None,
            achieved=self.achieved and valid,
            progress=self.share,
            turns=tuple(self.turns),
            task_id=task.id,
            group=task.group,
            seed=task.seed,
            template=task.template,
            task_text=self.task_text,
            message=self.message,
            timings={"wall_s": time.perf_counter() - self._began},
            last_turn_cut=speaker.cut,
            rewards=self.rewards,
            metrics=self.metrics,
            turn_starts=tokens.turn_starts if tokens else (),
            turn_rewards=self.turn_rewards,
            opening=self.opening.messages,
            tools=self.opening.tools,
            info=self.opening.info,
        )


async def play_episode(env: Environment, wanted: EpisodeRequest, speaker: Speaker, max_turns: int) -> RolloutOutcome:
    """Play one episode from its reset to its outcome; an environment or an engine that fails is an outcome. Raises
    ValueError when the first prompt leaves no room for a turn."""
    progress = Progress(wanted)
    try:
        opening = await env.reset(wanted.task.payload, seed=wanted.task.seed)
        progress.begin(opening)
        speaker.open(opening)
        while not progress.status:
            said = await speaker.speak()
            turn = await env.step(said)
            progress.take(said, turn, max_turns)
            if not progress.status and not speaker.hear(turn.messages):
                progress.status = "token_budget"
    except ContextFull:
        progress.status = "token_budget"
    except EnvironmentFailure as error:
        progress.fail(error.kind, str(error))
    except GenerationFailed as error:
        progress.fail(POLICY_FAILED, str(error))
    return progress.outcome(speaker)
