"""Provides clients of the trajectory server, for producers and trainers, with and without ``async``.

    with TrajectoryClient("http://127.0.0.1:8000") as client:
        client.register_env("my_env", group_size=8, max_token_length=4096)
        client.push({"tokens": ..., "masks": ..., "scores": ...})

What is sent and how answers are read is the same for both (``calls``); they differ in how they wait.
"""

from realhf.trajectory.client.answers import Batch, EnvRegistration, EnvStatus, PushReceipt, TrainerRegistration
from realhf.trajectory.client.asynchronous import AsyncTrajectoryClient
from realhf.trajectory.client.errors import (
    BadAnswer,
    BadGroup,
    Denied,
    LeaseLost,
    NoBatchYet,
    NotRegistered,
    Refused,
    StaleEpoch,
    TrajectoryError,
    Unreachable,
)
from realhf.trajectory.client.pacing import Pace
from realhf.trajectory.client.sync import TrajectoryClient

__all__ = [
    "AsyncTrajectoryClient",
    "BadAnswer",
    "BadGroup",
    "Batch",
    "Denied",
    "EnvRegistration",
    "EnvStatus",
    "LeaseLost",
    "NoBatchYet",
    "NotRegistered",
    "Pace",
    "PushReceipt",
    "Refused",
    "StaleEpoch",
    "TrainerRegistration",
    "TrajectoryClient",
    "TrajectoryError",
    "Unreachable",
]
