"""The AWS environment as the tool class for TRL's ``GRPOTrainer(environment_factory=AwsToolEnv)``.

TRL creates one instance per rollout of a generation batch, calls ``reset`` with the columns of the
dataset row, offers every public method as a tool, and calls ``get_reward`` once at the end. Source:
docs/reference/environment.md 10.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from realhf.aws.client.aws_env import AwsEnv, SyncAwsEnv
from realhf.aws.client.session_group import DEFAULT_URL, FAILURES, episode_return
from realhf.aws.messages import observation_text
from realhf.aws.models import AwsStepResult
from realhf.env.openenv_client import EnvError

_OUTPUT_CHARS = 2000
"""Maximum length of a command's output, in characters."""
_ROW_KEYS = ("task", "task_id", "seed", "chaos")
"""Dataset columns that are passed to the reset."""


class AwsToolEnv:
    """One session of the environment server, reused for many episodes.

    The environment variables AWS_RL_ENV_URL and AWS_RL_ENV_TOKEN set the server's address and
    token. The connection stays open while the trainer optimises. A lost session is reopened by the
    next ``reset``, never within an episode.
    """

    def __init__(self) -> None:
        url = os.environ.get("AWS_RL_ENV_URL") or DEFAULT_URL
        self._env: SyncAwsEnv = AwsEnv(url, os.environ.get("AWS_RL_ENV_TOKEN") or None).sync()
        self._rewards: list[float] = []
        self._playing = False
        self._finished = False

    def reset(self, **row: Any) -> str:
        """Start an episode and return the text of its task.

        Args:
            row: Columns of the dataset. ``task_id``, ``seed``, ``task`` (an object or its JSON text) and ``chaos``
                choose the episode, None and other columns are ignored.
        """
        arguments = {key: row[key] for key in _ROW_KEYS if row.get(key) is not None}
        if isinstance(arguments.get("task"), str):
            arguments["task"] = json.loads(arguments["task"])
        self._playing = self._finished = False
        self._rewards = []
        result = self._start(arguments)
        self._playing = True
        self._finished = result.done
        task = result.observation.task
        if task is None:
            return ""
        return (
            f"{task.description}\n{task.desired_state_spec}"
            if task.desired_state_spec
            else task.description
        )

    def aws(self, command: str) -> str:
        """Run one AWS CLI command and return its output.

        Args:
            command: The command line, starting with 'aws ', for example 'aws s3api list-buckets'.

        Returns:
            The output of the command, or a line that starts with 'error:'.
        """
        if self._finished or not self._playing:
            raise ValueError("Episode finished")
        try:
            result = self._env.step(str(command))
        except EnvError as error:
            if error.code == "VALIDATION_ERROR":
                return f"error: {error}"[:_OUTPUT_CHARS]
            self._playing = False
            raise
        except FAILURES:
            self._playing = False
            raise
        if result.reward is not None:
            self._rewards.append(result.reward)
        self._finished = result.done
        return observation_text(result.observation.model_dump(), max_chars=_OUTPUT_CHARS)

    def get_reward(self) -> float | None:
        """Return the score of the episode so far; None if the environment failed, because a failure
        must not count as a score."""
        if not self._playing:
            return None
        return episode_return(
            self._rewards, str(self._env.metadata.get("reward_mode", "potential"))
        )

    def _start(self, arguments: Mapping[str, Any]) -> AwsStepResult:
        if not self._env.usable:
            self._env.connect()
        try:
            return self._env.reset(**arguments)
        except FAILURES as error:
            if isinstance(error, EnvError) and error.code == "VALIDATION_ERROR":
                raise
            self._env.close()
            self._env.connect()
            return self._env.reset(**arguments)
