"""Runs in an environment with the real ``openenv``: an echo environment behind its stock server.

python echo_server.py PORT
"""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    command: str


class EchoObservation(Observation):
    command_output: str = ""
    command_success: bool = True


class EchoEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs) -> EchoObservation:
        self._state = State(episode_id=episode_id or "echo", step_count=0)
        return EchoObservation(command_output=f"seed {seed}", done=False, reward=0.0)

    def step(self, action: EchoAction, **kwargs) -> EchoObservation:
        self._state.step_count += 1
        return EchoObservation(
            command_output=action.command, done=self._state.step_count >= 2, reward=0.5
        )

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
