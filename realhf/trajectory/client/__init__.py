"""Clients of the trajectory server, for producers and trainers, async and blocking.

    with TrajectoryClient("http://127.0.0.1:8000") as client:
        client.register_env("my_env", group_size=8, max_token_length=4096)
        client.push({"tokens": ..., "masks": ..., "scores": ...})

The blocking client runs the async one on its own thread.
"""

from realhf.trajectory.client.protocol import (
    BadAnswer,
    BadGroup,
    Batch,
    Denied,
    EnvRegistration,
    EnvStatus,
    LeaseLost,
    NoBatchYet,
    NotRegistered,
    Pace,
    PushReceipt,
    Refused,
    StaleEpoch,
    TrainerRegistration,
    TrajectoryError,
    Unreachable,
)
from realhf.trajectory.client.trajectory_client import AsyncTrajectoryClient, TrajectoryClient

__all__ = [
    "AsyncTrajectoryClient", "BadAnswer", "BadGroup", "Batch", "Denied", "EnvRegistration", "EnvStatus", "LeaseLost",
    "NoBatchYet", "NotRegistered", "Pace", "PushReceipt", "Refused", "StaleEpoch", "TrainerRegistration",
    "TrajectoryClient", "TrajectoryError", "Unreachable",
]  # fmt: skip
