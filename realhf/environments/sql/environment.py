"""Plays one episode: a conversation about a database of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realhf.api.environment import AssistantMessage, EnvironmentFailure, Opening, Turn
from realhf.environments.sql.database import Database, Limits, Result
from realhf.environments.sql.goal import ChangeGoal, QuestionGoal
from realhf.environments.sql.reply import read_answer, read_statement, result_text
from realhf.environments.sql.task_set import draw_instance

NO_STATEMENT = "error: no statement; reply with one SQL statement or a line answer: VALUE"


class SqlEnvironment:
    """Implements ``realhf.api.environment.Environment``. Every statement runs on the event loop, within the processor
    time of ``limits``. ``most_statements``: the episode ends after as many turns; ``observation_chars``: the longest
    answer to one."""

    def __init__(self, limits: Limits, *, most_statements: int, observation_chars: int) -> None:
        self._limits, self._most_statements, self._observation_chars = limits, most_statements, observation_chars
        self._database: Database | None = None
        self._goal: QuestionGoal | ChangeGoal | None = None
        self._turns, self._paid = 0, 0.0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode; the payload decides everything, ``seed`` nothing. Raises EnvironmentFailure (internal) for
        a payload of another environment."""
        await self.close()
        try:
            instance = draw_instance(task)
        except ValueError as error:
            raise EnvironmentFailure("internal", str(error)) from None
        self._goal = QuestionGoal(instance) if instance.answer is not None else ChangeGoal(instance)
        self._database = Database(instance.tables, self._limits, writable=isinstance(self._goal, ChangeGoal))
        self._turns, self._paid = 0, 0.0
        return Opening(
            [{"role": "user", "content": instance.text()}],
            info={"tables": {table.name: [list(row) for row in table.rows] for table in instance.tables}},
        )

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the statement, or take the answer. Raises EnvironmentFailure (internal) when no episode is open."""
        if self._database is None or self._goal is None:
            raise EnvironmentFailure("internal", "no episode is open; call reset first")
        self._turns += 1
        content = message.content or ""
        answer = read_answer(content)
        if answer is not None:
            text, ended = self._goal.take_answer(answer)
        else:
            text, ended = self._run(self._database, self._goal, read_statement(content)), False
        return self._turn(text, ended=ended)

    async def close(self) -> None:
        """Free the database; it may be called at any time."""
        if self._database is not None:
            self._database.close()
        self._database = self._goal = None

    def _run(self, database: Database, goal: QuestionGoal | ChangeGoal, statement: str) -> str:
        if not statement:
            return NO_STATEMENT
        result: Result = database.execute(statement)
        goal.take_result(result, database)
        return result_text(result, self._observation_chars)

    def _turn(self, text: str, *, ended: bool) -> Turn:
        """Pay the difference of the potential, and end the episode if it is solved, answered or too long."""
        assert self._goal is not None
        potential, solved = self._goal.potential, self._goal.solved
        reward, self._paid = potential - self._paid, potential
        done = solved or ended or self._turns >= self._most_statements
        if done and self._database is not None:
            self._database.close()
            self._database = None
        return Turn(
            [{"role": "user", "content": text}],
            done=done,
            reward=reward,
            metrics={"success": float(solved), "progress": max(0.0, potential)},
            info=self._goal.info(),
        )
