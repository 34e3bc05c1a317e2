"""Drives a state without HTTP: groups of a given size, registrations, pulls."""

from __future__ import annotations

from typing import Any

from realhf.trajectory.records import Encoding, Incoming, StateOptions
from realhf.trajectory.state import delivery, push, registry
from realhf.trajectory.state.server_state import TrajectoryState

TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 10,
    "starting_step": 0,
    "num_steps": 100,
}


class Driver:
    """A state with a clock that the test moves. ``now`` in seconds."""

    def __init__(self, **options: Any) -> None:
        self.state = TrajectoryState(StateOptions(**options))
        self.now = 1000.0

    def register(self, join: bool = False, **changed: Any) -> dict[str, Any]:
        return registry.register(self.state, self.now, TRAINER | changed, join)[0]

    def start(self, **changed: Any) -> None:
        """A registered trainer that has asked for a batch once."""
        self.register(**changed)
        assert isinstance(self.pull(), delivery.NoBatch)

    def at_version(self, version: int) -> None:
        registry.set_policy_version(self.state, self.now, version)

    def env(self, group_size: int = 4, **changed: Any) -> int:
        request = {"max_token_length": 64, "desired_name": "env", "weight": 1.0, "group_size": group_size} | changed
        body, _ = registry.register_env(self.state, self.now, request)
        assert body["status"] == "success"
        return body["env_id"]

    def push(
        self,
        *sizes: int,
        env: int | None = None,
        version: int | None = None,
        key: str | None = None,
        fingerprint: str = "f",
        listed: bool | None = None,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        groups = [Incoming(b"x" * 10, Encoding.JSON, 7, 0, size, env, version) for size in sizes]
        listed = len(sizes) != 1 if listed is None else listed
        refs = [group.data for group in groups]
        return push.push(self.state, self.now, groups, refs, listed, key, fingerprint)

    def pull(self, who: str = "t", **request: Any) -> delivery.Batch | delivery.NoBatch:
        anonymous = request.pop("anonymous", False)
        return delivery.pull(self.state, self.now, delivery.PullRequest(who, anonymous, **request))

    def batch(self, who: str = "t", sent: bool = True, **request: Any) -> delivery.Batch:
        """A batch that must be there."""
        batch = self.pull(who, **request)
        assert isinstance(batch, delivery.Batch), batch
        if sent:
            delivery.mark_sent(self.state, self.now, batch)
        return batch


def sizes(batch: delivery.Batch) -> list[int]:
    return [group.size for group in batch.groups]


def ids(batch: delivery.Batch) -> list[int]:
    return [group.id for group in batch.groups]
