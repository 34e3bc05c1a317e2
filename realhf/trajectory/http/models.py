"""Defines the bodies of requests, as OpenAPI shows them. Integers are bounded to 64 bits and floats are finite.

Source: docs/reference/trajectory.md 2.3 to 2.6, 3.2, 3.9, 3.10.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text that can be encoded. JSON may contain half of a surrogate pair, which no answer and no store could hold."""


class Registration(BaseModel):
    """Describes a trainer and its run. ``batch_size`` in sequences, lengths in tokens."""

    wandb_group: Text
    wandb_project: Text
    batch_size: Int64
    max_token_len: Int64
    checkpoint_dir: Text
    save_checkpoint_interval: Int64
    starting_step: Int64
    num_steps: Int64
    max_staleness: Int64 | None = Field(None, description="policy versions a group may lie behind (null: no bound)")
    trainer_id: Text | None = Field(None, description="a name of the trainer's own, for logs")


class RegisterEnv(BaseModel):
    """Describes a rollout handler. ``group_size`` in sequences; ``min_batch_allocation``: fraction of every batch."""

    max_token_length: Int64
    desired_name: Text
    weight: FiniteFloat
    group_size: Int64
    min_batch_allocation: FiniteFloat | None = None


class EnvIdentifier(BaseModel):
    """Names a registered environment."""

    env_id: Int64


class PolicyVersion(BaseModel):
    """Gives the version of the weights that rollouts are made with from now on."""

    version: Int64


class Lease(BaseModel):
    """Names a batch by its X-Lease-Id."""

    lease_id: Text


class Requeue(BaseModel):
    """Names groups to move from quarantine to the tail of the queue."""

    ids: list[Int64]
