"""Provides clients of the trajectory server, for producers and trainers, with and without ``async``.

    with TrajectoryClient("http://127.0.0.1:8000") as client:
        client.register_env("my_env", group_size=8, max_token_length=4096)
        client.push({"tokens": ..., "masks": ..., "scores": ...})

The one without runs the other on a thread of its own.
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
