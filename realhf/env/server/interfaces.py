"""Defines what the environment server needs of an environment that it serves.

The server knows frames, sessions, slots and deadlines. What a session has to itself, what a reset and an action may
hold, and what is said about the environment is the business of a ``ServedEnvironment``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from fastapi import FastAPI
from pydantic import BaseModel

from realhf.env.server.config import ServerConfig

Reply = tuple[dict[str, Any], float | None, bool]
"""What reset and step return: observation, reward, and whether the episode is over."""


class SlotPool(Protocol):
    """Hands out what a session has to itself, a slot: a simulator, a folder, an instance of an environment."""

    def start(self) -> None:
        """Start what the slots need. Raises RuntimeError when it does not come up."""
        ...

    def stop(self) -> None:
        """End what ``start`` started, and every call that waits; the server has ended before."""
        ...

    def acquire(self) -> Any:
        """Take a free, healthy slot; blocks, and raises RuntimeError when there is none."""
        ...

    def release(self, slot: Any) -> None:
        """Clean a slot and make it free again; blocks."""
        ...

    @property
    def free_count(self) -> int:
        """How many slots are free."""
        ...

    def metrics(self) -> Mapping[str, Any]:
        """Return the pool's metrics by name; a map holds one number for each label."""
        ...


class Player(Protocol):
    """Plays a session's episodes, by blocking calls, one at a time."""

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode as checked reset data say. Raises WireError."""
        ...

    def step(self, action: dict[str, Any], /) -> Reply:
        """Take a turn of the agent, a checked action. Raises WireError."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of the session, as the wire shows it."""
        ...

    def kill(self) -> None:
        """Break off the call in flight; may be called from another thread."""
        ...


class Page(Protocol):
    """Is something that was added to the application and ends with the server."""

    def close(self) -> None:
        """Release what it holds."""
        ...


class ServedEnvironment:
    """Is an environment as the server sees it: subclasses say what it has of its own. A session takes a slot of
    ``pool``; ``make_player`` returns what plays its episodes there.

    ``title`` and ``about`` describe the application; ``slots_are`` says what the pool holds, ``slot_label`` what a
    metric's map is split by. The models are those of an action, an observation and a state. ``own_guard`` is the path
    below which pages check their visitors themselves, "" for none; ``home`` is where / leads.
    """

    title: str
    about: str
    slots_are: ClassVar[str]
    slot_label: ClassVar[str]
    action_model: ClassVar[type[BaseModel]]
    observation_model: ClassVar[type[BaseModel]]
    state_model: ClassVar[type[BaseModel]]
    own_guard: ClassVar[str] = ""
    home: str = "/health"

    def __init__(self, config: ServerConfig, pool: SlotPool, make_player: Callable[[Any], Player]) -> None:
        self._config = config
        self.pool = pool
        self._make_player = make_player

    def make_player(self, slot: Any) -> Player:
        """Return what plays the episodes of a session in its slot."""
        return self._make_player(slot)

    def check_reset(self, data: Any) -> dict[str, Any]:
        """Check the data of a reset, {} where there is none. Raises WireError."""
        raise NotImplementedError

    def check_action(self, data: Any) -> dict[str, Any]:
        """Check the data of a step. Raises WireError."""
        raise NotImplementedError

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Return the word that an episode with this last observation is counted under."""
        raise NotImplementedError

    def template(self, observation: Mapping[str, Any]) -> str:
        """Return what the task of an episode was made of, one of a bounded number of words; "" where that is open."""
        del observation
        return ""

    def tools(self, player: Any) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools as a server of the Model Context Protocol lists them; None when ``player`` is None and one
        in an episode is needed to know them. Raises WireError."""
        raise NotImplementedError

    def call_problem(self, params: Any) -> str:
        """Say what is wrong with the parameters of a tools/call; "" when nothing is."""
        raise NotImplementedError

    def call_action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action that a sound tools/call means."""
        raise NotImplementedError

    def call_answer(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return what the tool answered, and whether the call failed."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """Return the JSON schemas of ``action``, ``observation`` and ``state``."""
        models = {"action": self.action_model, "observation": self.observation_model, "state": self.state_model}
        return {name: model.model_json_schema() for name, model in models.items()}

    def metadata(self) -> dict[str, Any]:
        """Return what the server says about itself."""
        return {
            "description": self.about,
            "max_concurrent_envs": self._config.pool_size,
            "correlation": True,
            "simulated": self._config.injected.describe(),
        }

    def blank_state(self) -> dict[str, Any]:
        """Return the state before a reset."""
        return self.state_model().model_dump()

    def mount(self, app: FastAPI) -> Page | None:
        """Add pages of the environment to the application; None where it has none."""
        del app

    def announcement(self) -> str:
        """Return a line for the terminal, once the pool is started."""
        raise NotImplementedError
