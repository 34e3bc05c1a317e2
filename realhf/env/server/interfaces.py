"""The interface between the environment server and an environment that it serves.

The server handles frames, sessions, slots and deadlines. A ``ServedEnvironment`` defines the slots,
checks the data of resets and actions, and describes the environment.
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
    """A pool of slots. A slot is what one session has to itself: a simulator, a folder, an
    environment instance."""

    def start(self) -> None:
        """Start the processes that the slots need. Raises RuntimeError when one does not come
        up."""
        ...

    def stop(self) -> None:
        """Stop these processes, and end every blocked call. Called after the server has ended."""
        ...

    def acquire(self) -> Any:
        """Take a free, healthy slot; blocks, and raises RuntimeError when there is none."""
        ...

    def release(self, slot: Any) -> None:
        """Clean a slot and make it free again; blocks."""
        ...

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        ...

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the pool by name; a map has one value for each label."""
        ...


class Player(Protocol):
    """Player of the episodes of one session. Calls block and come one at a time."""

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode by checked reset data. Raises WireError."""
        ...

    def step(self, action: dict[str, Any], /) -> Reply:
        """Play one checked action of the agent. Raises WireError."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of the session in the form of the wire."""
        ...

    def kill(self) -> None:
        """Abort the running call; may be called from another thread."""
        ...


class Page(Protocol):
    """Web pages that an environment adds to the application."""

    def close(self) -> None:
        """Release resources; called when the server ends."""
        ...


class ServedEnvironment:
    """Base class of an environment as the server sees it. A session takes a slot of ``pool``."""

    title: str
    """Title of the application."""
    about: str
    """Description of the application."""
    slots_are: ClassVar[str]
    """What a slot is, for the text of metrics."""
    slot_label: ClassVar[str]
    """Label of the pool's metrics that have several values."""
    action_model: ClassVar[type[BaseModel]]
    """Model of an action."""
    observation_model: ClassVar[type[BaseModel]]
    """Model of an observation."""
    state_model: ClassVar[type[BaseModel]]
    """Model of a state."""
    own_guard: ClassVar[str] = ""
    """Path below which pages check their visitors themselves; "": there are none."""
    home: str = "/health"
    """Path that / redirects to."""

    def __init__(
        self, config: ServerConfig, pool: SlotPool, make_player: Callable[[Any], Player]
    ) -> None:
        self._config = config
        self.pool = pool
        self._make_player = make_player

    def make_player(self, slot: Any) -> Player:
        """Return the player of a session's episodes in its slot."""
        return self._make_player(slot)

    def check_reset(self, data: Any) -> dict[str, Any]:
        """Check the data of a reset, {} where there is none. Raises WireError."""
        raise NotImplementedError

    def check_action(self, data: Any) -> dict[str, Any]:
        """Check the data of a step. Raises WireError."""
        raise NotImplementedError

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Return the outcome of an episode by its last observation, a label of the metrics."""
        raise NotImplementedError

    def template(self, observation: Mapping[str, Any]) -> str:
        """Return the template of an episode's task, a label of the metrics; "" where templates are
        not bounded."""
        del observation
        return ""

    def tools(self, player: Any) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools in the form of the Model Context Protocol. None: ``player`` is None, and
        the tools are known in an episode only. Raises WireError."""
        raise NotImplementedError

    def call_problem(self, params: Any) -> str:
        """Return why the parameters of a tools/call are invalid; "" for valid ones."""
        raise NotImplementedError

    def call_action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action of a valid tools/call."""
        raise NotImplementedError

    def call_answer(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the answer of the tool, and whether the call failed."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """Return the JSON schemas of ``action``, ``observation`` and ``state``."""
        models = {
            "action": self.action_model,
            "observation": self.observation_model,
            "state": self.state_model,
        }
        return {name: model.model_json_schema() for name, model in models.items()}

    def metadata(self) -> dict[str, Any]:
        """Return the content of ``/metadata``."""
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
        """Add the pages of the environment to the application; return None where it has none."""
        del app

    def announcement(self) -> str:
        """Return a line for the terminal after the start of the pool."""
        raise NotImplementedError
