"""Plays an agent on tasks, many episodes at once, and sums up what it can do, by tier, with 95 % intervals.

Episodes run in this process on a ``MiniStackPool``; grading is the environment's own. In every round the agent answers
all living conversations, then all commands run concurrently. The metrics are success, reward, steps to solve, hints,
drift repair, and recovery after a failed command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.episode.episode import Episode, EpisodeError, StepData
from realhf.aws.evaluation.agent import Agent, Conversation, Reply
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.task import Task, TaskError
from realhf.base.intervals import mean_interval, wilson_interval

DRIFT = "drift"
OVERALL = "overall"


@dataclass(frozen=True)
class EpisodeRecord:
    """Records one played episode. ``status``: achieved, finished (out of steps or turns), gave_up, env_error. ``steps``
    counts turns, including those without a command; ``failed_commands`` those that did not succeed."""

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
        return self.status != "env_error"


@dataclass
class _Seat:
    episode: Episode
    task: Task | None = None
    conversation: Conversation | None = None
    record: EpisodeRecord | None = None


class EvaluationRun:
    """Plays one agent on a list of tasks. ``on_episode`` is called after each episode."""

    def __init__(
        self,
        agent: Agent,
        pool: MiniStackPool,
        *,
        max_turns: int,
        on_episode: Callable[[EpisodeRecord], None] = lambda record: None,
    ) -> None:
        self._agent = agent
        self._pool = pool
        self._max_turns = max_turns
        self._on_episode = on_episode

    def play(self, tasks: Sequence[Task]) -> list[EpisodeRecord]:
        """Return the records in the order of the tasks. Raises AgentError when the agent fails."""
        waiting = list(enumerate(tasks))[::-1]
        slots = [self._pool.acquire() for _ in range(min(self._pool.free_count, max(1, len(tasks))))]
        seats = [_Seat(Episode(slot, self._max_turns)) for slot in slots]
        places: dict[int, int] = {}
        records: dict[int, EpisodeRecord] = {}
        try:
            with ThreadPoolExecutor(len(seats), thread_name_prefix="evaluate") as threads:
                while waiting or places:
                    idle = [number for number in range(len(seats)) if number not in places]
                    starts = [(number, *waiting.pop()) for number in idle[: len(waiting)]]
                    list(threads.map(lambda start: self._start(seats[start[0]], start[0], start[2]), starts))
                    places.update({number: place for number, place, _ in starts})
                    self._round([(number, seats[number]) for number in sorted(places)], threads)
                    over = [number for number in sorted(places) if _ended(seats[number])]
                    for number in over:
                        record = seats[number].record
                        assert record is not None
                        records[places.pop(number)] = record
                        self._on_episode(record)
                    self._agent.finish(over)
        finally:
            for slot in slots:
                self._pool.release(slot)
        return [records[place] for place in range(len(tasks))]

    def _start(self, seat: _Seat, number: int, task: Task) -> None:
        seat.task, seat.conversation = task, None
        seat.record = EpisodeRecord(task.task_id, task.template, task.tier, is_drift(task), task.seed, "playing")
        try:
            step = seat.episode.reset(task)
        except (EpisodeError, SimulatorLost, TaskError):
            seat.record = replace(seat.record, status="env_error")
            return
        seat.conversation = Conversation(number, _task_text(step), seat.episode.fill(task.solution))

    def _round(self, seats: Sequence[tuple[int, _Seat]], threads: ThreadPoolExecutor) -> None:
        asked = [(seat, seat.conversation) for _, seat in seats if seat.conversation and not _ended(seat)]
        if asked:
            replies = self._agent.act([conversation for _, conversation in asked])
            list(threads.map(self._answer, [seat for seat, _ in asked], replies))

    def _answer(self, seat: _Seat, reply: Reply) -> None:
        record, conversation = seat.record, seat.conversation
        assert record is not None and conversation is not None
        record = replace(record, steps=record.steps + 1)
        if reply.command is None:
            conversation.turns.append((reply, {}))
            status = "gave_up" if not reply.text else "finished" if record.steps >= self._max_turns else "playing"
            seat.record = replace(record, status=status)
            return
        try:
            step = seat.episode.step(reply.command)
        except (EpisodeError, SimulatorLost):
            seat.record = replace(record, status="env_error")
            return
        conversation.turns.append((reply, step.observation))
        seat.record = self._graded(record, step)

    def _graded(self, record: EpisodeRecord, step: StepData) -> EpisodeRecord:
        seen = step.observation
        over = step.done or record.steps >= self._max_turns
        return replace(
            record,
            status="achieved" if seen["task_achieved"] else "finished" if over else "playing",
            achieved=bool(seen["task_achieved"]),
            reward=record.reward + step.reward,
            progress=float(seen["partial_progress"]),
            hints=int(seen["hints_used"]),
            failed_commands=record.failed_commands + (not seen["command_success"]),
        )


def _task_text(step: StepData) -> str:
    task = step.observation["task"]
    desired = task.get("desired_state_spec")
    return f"{task['description']}\n\n{desired}" if desired else task["description"]


def is_drift(task: Task) -> bool:
    """Return whether a task undoes part of its own set-up and wants it repaired."""
    return bool(task.possible_drifts)


def _ended(seat: _Seat) -> bool:
    return seat.record is not None and seat.record.status != "playing"


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
