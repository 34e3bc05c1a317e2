"""Defines what the environment server needs of an environment that it serves.

The server knows frames, sessions, places and deadlines. What a session has to itself, what a reset and an action may
hold, and what is said about the environment is the business of a ``ServedEnvironment``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel

Reply = tuple[dict[str, Any], float | None, bool]
"""What reset and step return: observation, reward, and whether the episode is over."""


class SlotPool(Protocol):
    """Hands out what a session has to itself, a slot: a simulator, a folder, an instance of an environment."""

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

    def step(self, argument: Any, /) -> Reply:
        """Take a turn of the agent, as ``ServedEnvironment.step_argument`` returns it. Raises WireError."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of the session, as the wire shows it."""
        ...

    def kill(self) -> None:
        """Break off the call in flight; may be called from another thread."""
        ...


class McpDoor(Protocol):
    """Says how an environment looks as a server of the Model Context Protocol."""

    def tools(self, player: Player | None) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools, or None when a player in an episode is needed to know them."""
        ...

    def problem(self, params: Any) -> str:
        """Say what is wrong with the parameters of a tools/call; "" when nothing is."""
        ...

    def action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action that a sound tools/call means."""
        ...

    def said(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return what the tool answered, and whether the call failed."""
        ...


class Page(Protocol):
    """Is something that was added to the application and ends with the server."""

    def close(self) -> None:
        """Release what it holds."""
        ...


class ServedEnvironment(Protocol):
    """Is an environment as the server sees it. ``title`` and ``about`` describe the application; ``pool`` and
    ``slot_label`` (what a metric's map is split by) and ``slots_are`` its slots. ``action_model`` is the body of an
    action in POST /step. ``own_guard`` is the path below which pages check their visitors themselves, "" for none;
    ``home`` is where / leads."""

    title: str
    about: str
    pool: SlotPool
    slots_are: str
    slot_label: str
    action_model: type[BaseModel]
    mcp: McpDoor
    own_guard: str
    home: str

    def make_player(self, slot: Any) -> Player:
        """Return what plays the episodes of a session in its slot."""
        ...

    def check_reset(self, data: Any) -> dict[str, Any]:
        """Check the data of a reset, {} where there is none. Raises WireError."""
        ...

    def check_action(self, data: Any) -> dict[str, Any]:
        """Check the data of a step. Raises WireError."""
        ...

    def step_argument(self, action: dict[str, Any]) -> Any:
        """Return what the player's ``step`` takes of a checked action."""
        ...

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Return the word that an episode with this last observation is counted under."""
        ...

    def template(self, observation: Mapping[str, Any]) -> str:
        """Return what the task of an episode was made of, one of a bounded number of words; "" where that is open."""
        ...

    def schema(self) -> dict[str, Any]:
        """Return the JSON schemas of ``action``, ``observation`` and ``state``."""
        ...

    def metadata(self) -> dict[str, Any]:
        """Return what the server says about itself."""
        ...

    def blank_state(self) -> dict[str, Any]:
        """Return the state before a reset."""
        ...

    def mount(self, app: FastAPI) -> Page | None:
        """Add pages of the environment to the application; None where it has none."""
        ...

    def start(self) -> None:
        """Start what the slots need. Raises RuntimeError when it does not come up."""
        ...

    def stop(self) -> None:
        """End what ``start`` started, and every call that waits; the server has ended before."""
        ...

    def announcement(self) -> list[str]:
        """Return lines for the terminal, once it is started."""
        ...
