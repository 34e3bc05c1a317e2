"""Plays an agent on tasks, many episodes at once, and sums up what it can do, by tier, with 95 % intervals.

Episodes run in this process on a ``MiniStackPool``; grading is the environment's own. They are played in lockstep: in
every round the agent answers all living conversations, then all commands run concurrently. The metrics are success,
reward, steps to solve, hints, drift repair, and recovery after a failed command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from realhf.api.env import FAILURE_STATUSES, RolloutOutcome
from realhf.api.environment import Environment, Turn
from realhf.api.generation import TokenSource
from realhf.aws.episode.pooled_environment import MESSAGE_TIMEOUT_S, pooled_environment
from realhf.aws.evaluation.agent import Agent
from realhf.aws.messages import episode_task
from realhf.aws.observation_text import OBSERVATION_CHARS
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.task import Task
from realhf.base.intervals import mean_interval, wilson_interval
from realhf.rollout.blocking_player import BlockingPlayer
from realhf.rollout.episode import EpisodeRequest, Witness
from realhf.rollout.player import EpisodeAgent, Player

DRIFT = "drift"
OVERALL = "overall"
_WORDS = MappingProxyType({"max_turns": "finished", "token_budget": "gave_up"})


@dataclass(frozen=True)
class EpisodeRecord:
    """Records one played episode. ``status``: achieved, finished (out of steps or turns), gave_up (also: out of
    tokens), or how the environment failed, see ``FAILURE_STATUSES``. ``steps`` counts turns, including those without a
    command and the one that gives up; ``failed_commands`` those that did not succeed."""

    task_id: int
    template: str
    tier: str
    drift: bool
    seed: int
    status: str
    achieved: bool = False
    reward: float = 0.0
    progress: float = 0.0
    steps: int = 0
    hints: int = 0
    failed_commands: int = 0

    @property
    def valid(self) -> bool:
        """Whether the episode counts: its environment did not fail."""
        return self.status not in FAILURE_STATUSES


class EvaluationRun:
    """Plays one agent on a list of tasks. ``on_episode`` is called after each episode; ``observation_chars`` is what
    the agent reads of an answer."""

    def __init__(
        self,
        agent: Agent,
        pool: MiniStackPool,
        *,
        max_turns: int,
        observation_chars: int = OBSERVATION_CHARS,
        on_episode: Callable[[EpisodeRecord], None] = lambda record: None,
    ) -> None:
        self._agent, self._pool, self._max_turns = agent, pool, max_turns
        self._observation_chars, self._on_episode = observation_chars, on_episode

    def play(self, tasks: Sequence[Task]) -> list[EpisodeRecord]:
        """Return the records in the order of the tasks. Raises AgentError when the agent fails."""
        judge = _Judge(self._agent.speaker(self._max_turns), tasks, self._on_episode)
        size = min(self._pool.free_count, max(1, len(tasks)))
        with pooled_environment(
            self._pool, max_steps=self._max_turns, observation_chars=self._observation_chars, desired_state=True
        ) as spec:
            player = BlockingPlayer(Player(spec, "", judge, size, message_timeout_s=MESSAGE_TIMEOUT_S))
            try:
                player.play([EpisodeRequest(n, episode_task(task)) for n, task in enumerate(tasks)], self._agent)
            finally:
                player.close()
        return [judge.records[place] for place in range(len(tasks))]


class _Judge:
    """Plays as ``agent`` does and records what came of each episode; see ``EpisodeAgent``."""

    def __init__(self, agent: EpisodeAgent, tasks: Sequence[Task], on_episode: Callable[[EpisodeRecord], None]) -> None:
        self.records: dict[int, EpisodeRecord] = {}
        self._agent, self._tasks, self._on_episode = agent, tasks, on_episode

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``."""
        seen = Witness(env)
        outcome = await self._agent.play(seen, wanted, llm, slot)
        record = self.records[wanted.index] = _record(self._tasks[wanted.index], outcome, seen.turns)
        self._on_episode(record)
        return outcome


def _record(task: Task, outcome: RolloutOutcome, turns: Sequence[Turn]) -> EpisodeRecord:
    seen: list[Mapping[str, Any]] = [turn.info["observation"] for turn in turns if "observation" in turn.info]
    status = "achieved" if outcome.achieved else _WORDS.get(outcome.status, outcome.status)
    return EpisodeRecord(
        task.task_id,
        task.template,
        task.tier,
        is_drift(task),
        task.seed,
        status,
        achieved=outcome.achieved,
        reward=outcome.reward or 0.0,
        progress=outcome.progress,
        steps=len(outcome.turns) + (status == "gave_up"),
        hints=int(seen[-1]["hints_used"]) if seen else 0,
        failed_commands=sum(not each["command_success"] for each in seen),
    )


def is_drift(task: Task) -> bool:
    """Return whether a task undoes part of its own set-up and wants it repaired."""
    return bool(task.possible_drifts)


def report(records: Sequence[EpisodeRecord]) -> dict[str, dict[str, Any]]:
    """Return {"overall", each tier, "drift": metrics}.

    Rates are {value, low, high, n}; means too; None where nothing was observed. ``recovery`` is success among episodes
    with a failed command, ``steps_to_solve`` among solved ones. Episodes whose environment failed are counted in
    ``env_errors`` alone.
    """
    groups = {OVERALL: list(records)}
    for tier in dict.fromkeys(record.tier for record in records):
        groups[tier] = [record for record in records if record.tier == tier and not record.drift]
    groups[DRIFT] = [record for record in records if record.drift]
    return {name: _figures(members) for name, members in groups.items() if members}


def _figures(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    valid = [record for record in records if record.valid]
    stumbled = [record for record in valid if record.failed_commands]
    return {
        "episodes": len(valid),
        "env_errors": len(records) - len(valid),
        "success": _rate([record.achieved for record in valid]),
        "reward": _mean([record.reward for record in valid]),
        "progress": _mean([record.progress for record in valid]),
        "steps_to_solve": _mean([float(record.steps) for record in valid if record.achieved]),
        "hints": _mean([float(record.hints) for record in valid]),
        "recovery": _rate([record.achieved for record in stumbled]),
    }


def _rate(outcomes: Sequence[bool]) -> dict[str, float] | None:
    if not outcomes:
        return None
    low, high = wilson_interval(sum(outcomes), len(outcomes))
    return {"value": sum(outcomes) / len(outcomes), "low": low, "high": high, "n": len(outcomes)}


def _mean(values: Sequence[float]) -> dict[str, float] | None:
    interval = mean_interval(values)
    return None if interval is None else dict(zip(("value", "low", "high"), interval, strict=True), n=len(values))


def rows(records: Sequence[EpisodeRecord]) -> list[dict[str, Any]]:
    """Return the records as JSON-able maps."""
    return [asdict(record) for record in records]
