"""What the master writes into its journal: one tagged record per event (docs/reference/dataflow.md 9, "Journal").

Steps are numbered from 0; ``Ckpt(s)`` is taken after step s, and a run without a checkpoint resumes from -1.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

DIED = "worker_died"


class Admit(msgspec.Struct, frozen=True, tag="admit", array_like=True):
    """Attempt ``attempt`` at a sample was given to ``worker`` at policy version ``version``. ``order`` counts
    admissions; ``item`` is all that is needed to play it again. Of the attempts before, ``failures`` failed, and in
    ``deaths`` the process died that played them."""

    id: str
    attempt: int
    version: int
    order: int
    worker: str
    item: dict[str, Any]
    failures: int = 0
    deaths: int = 0


class Accept(msgspec.Struct, frozen=True, tag="accept", array_like=True):
    """The sample is finished. ``ref``: where its payload lies, which says as well what rank of the trainer received it
    (``PayloadRef`` in ``realhf.api.streaming``); ``meta``: the frames of its metadata."""

    id: str
    attempt: int
    ref: list[Any]
    meta: list[bytes]


class Reject(msgspec.Struct, frozen=True, tag="reject", array_like=True):
    """An attempt ended without a sample. ``final``: there will be no other attempt. ``outcome`` is ``DIED`` where the
    process died that played it."""

    id: str
    attempt: int
    outcome: str
    message: str
    final: bool


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    """An accepted sample will never be trained."""

    id: str
    reason: str


class Consume(msgspec.Struct, frozen=True, tag="consume", array_like=True):
    """The samples of a step, in the order of its step batch."""

    ids: list[str]
    step: int


class Commit(msgspec.Struct, frozen=True, tag="commit", array_like=True):
    """Step ``step`` was trained; ``version`` is that of the weights it made."""

    step: int
    version: int


class Ckpt(msgspec.Struct, frozen=True, tag="ckpt", array_like=True):
    """A checkpoint after ``step`` is valid; ``ref`` names it."""

    step: int
    ref: str


class Resume(msgspec.Struct, frozen=True, tag="resume", array_like=True):
    """The run goes on from the checkpoint after ``step``: what later steps consumed is accepted again."""

    step: int


class Draw(msgspec.Struct, frozen=True, tag="draw", array_like=True):
    """State of the source of prompts after a draw, JSON-able. In one ``append`` with what was drawn."""

    state: dict[str, Any]


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    """The run came to its end in order."""


class Totals(msgspec.Struct, frozen=True, tag="totals", array_like=True):
    """First record of a snapshot: what happened before it, in numbers. Steps up to ``step`` are final; the records
    of the same ``append`` say what is still open. ``admitted`` counts open samples too, ``consumed`` those of final
    steps alone; ``order`` is the next admission's; ``planned`` are step batches (step, ids) which a resumed run has yet
    to repeat."""

    step: int
    admitted: int
    consumed: int
    rejected: int
    dropped: int
    order: int
    planned: list[tuple[int, list[str]]]


Record: TypeAlias = Admit | Accept | Reject | Drop | Consume | Commit | Ckpt | Resume | Draw | End | Totals
