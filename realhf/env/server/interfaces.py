"""Interface between the environment server and an environment that it serves.

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
"""Result of a reset or step: (observation, reward, whether the episode is over)."""


class SlotPool(Protocol):
    """Pool of slots. A slot is what one session has for itself: a simulator, a folder or an
    environment instance."""

    def start(self) -> None:
        """Start the processes that the slots need. Raises RuntimeError if one does not start."""
        ...

    def stop(self) -> None:
        """Stop these processes, and end every blocked call. Called after the server has ended."""
        ...

    def acquire(self) -> Any:
        """Take a free, healthy slot. Blocks. Raises RuntimeError if there is none."""
        ...

    def release(self, slot: Any) -> None:
        """Clean a slot and make it free again. Blocks."""
        ...

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        ...

    def metrics(self) -> Mapping[str, Any]:
        """Return the pool's metrics by name; a value that is a map has one number per label."""
        ...


class Player(Protocol):
    """Player of one session's episodes. Methods block, and are called one at a time."""

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode with checked reset data. Raises WireError."""
        ...

    def step(self, action: dict[str, Any], /) -> Reply:
        """Play one checked action of the agent. Raises WireError."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of the session in the wire format."""
        ...

    def kill(self) -> None:
        """Abort the running call. May be called from another thread."""
        ...


class Page(Protocol):
    """Web pages that an environment adds to the application."""

    def close(self) -> None:
        """Release resources; called when the server ends."""
        ...


class ServedEnvironment:
    """Base class for an environment as the server uses it. Each session takes one slot of
    ``pool``."""

    title: str
    """Title of the application."""
    about: str
    """Description of the application."""
    slots_are: ClassVar[str]
    """What a slot is, for the help texts of metrics."""
    slot_label: ClassVar[str]
    """Name of the label for pool metrics that have several values."""
    action_model: ClassVar[type[BaseModel]]
    """Model of an action."""
    observation_model: ClassVar[type[BaseModel]]
    """Model of an observation."""
    state_model: ClassVar[type[BaseModel]]
    """Model of a state."""
    own_guard: ClassVar[str] = ""
    """Path below which pages check their visitors themselves; "" if there are none."""
    home: str = "/health"
    """Path to which / redirects."""

    def __init__(
        self, config: ServerConfig, pool: SlotPool, make_player: Callable[[Any], Player]
    ) -> None:
        self._config = config
        self.pool = pool
        self._make_player = make_player

    def make_player(self, slot: Any) -> Player:
        """Return a player for a session that has this slot."""
        return self._make_player(slot)

    def check_reset(self, data: Any) -> dict[str, Any]:
        """Return the checked data of a reset; {} if ``data`` is None. Raises WireError."""
        raise NotImplementedError

    def check_action(self, data: Any) -> dict[str, Any]:
        """Return the checked data of a step. Raises WireError."""
        raise NotImplementedError

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Return the outcome of an episode, given its last observation; used as a label of
        metrics."""
        raise NotImplementedError

    def template(self, observation: Mapping[str, Any]) -> str:
        """Return the template of an episode's task, used as a label of metrics; "" if the number of
        templates is not limited."""
        del observation
        return ""

    def tools(self, player: Any) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools in MCP format; None if ``player`` is None and the tools are known only
        within an episode. Raises WireError."""
        raise NotImplementedError

    def call_problem(self, params: Any) -> str:
        """Return why the parameters of a tools/call are invalid; "" if they are valid."""
        raise NotImplementedError

    def call_action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action of a valid tools/call."""
        raise NotImplementedError

    def call_answer(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return (answer of the tool, whether the call failed)."""
        raise NotImplementedError

    def tool_result(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return (answer of the tool, whether the call failed) for an MCP client, whose model reads
        both."""
        return self.call_answer(observation)

    def instructions(self, observation: Mapping[str, Any]) -> str:
        """Return the task of the episode that a reset has opened with ``observation``, as text for
        the model of an MCP client."""
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
        """Return the state before the first reset."""
        return self.state_model().model_dump()

    def mount(self, app: FastAPI) -> Page | None:
        """Add the environment's pages to the application; return None if it has none."""
        del app

    def announcement(self) -> str:
        """Return a line to print after the pool has started."""
        raise NotImplementedError
