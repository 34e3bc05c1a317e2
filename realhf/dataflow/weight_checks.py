"""Judges what an engine says of its weights: that it holds those it was given, and computes with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from realhf.api.calls import Probe, UpdateWeightsAnswer
from realhf.api.generation import WeightsManifest

NEAR = 0.2
"""Mean distance of an engine's log-probabilities under the changed weights from the trainer's, as a share of how far
the change moved the trainer's. Rounding in bf16 is a few hundredths; an engine that computes with another matrix is
near 1."""
STIR = 0.01
"""Share of the same within which an engine that is not exact in itself may miss what it said before the change."""


class WrongWeights(RuntimeError):
    """An engine holds, or computes with, other weights than those that it was given: what it samples proves nothing."""


def check_held(worker: str, manifest: WeightsManifest, answer: UpdateWeightsAnswer, before: int) -> None:
    """Raise WrongWeights where an engine does not hold the tensors of the manifest, or did not hold those of version
    ``before`` until now. The error names the tensor, what was expected and what was found."""
    if answer.changed:
        first = answer.changed[0]
        raise WrongWeights(
            f"{worker}: {first.name} changed while version {before} was in use: its digest was {first.before} and is "
            f"{first.now} ({_share(len(answer.changed), manifest)}); what it sampled since is not of these weights"
        )
    if answer.held is None:
        return
    wrong: list[str] = []
    for slot in manifest.slots:
        held = answer.held.get(slot.name)
        if held is not None and not held.proven:
            continue  # the record counts it, with a warning
        expected = slot.digest if held is None or held.dtype == slot.dtype else held.expected
        if held is None or held.digest != expected:
            found = "nothing of that name" if held is None else f"{held.digest} ({held.dtype})"
            wrong.append(f"{slot.name} should have digest {expected}, found {found}")
    if wrong:
        share = _share(len(wrong), manifest)
        raise WrongWeights(f"{worker} does not hold the weights of version {manifest.version}: {wrong[0]} ({share})")


def _share(count: int, manifest: WeightsManifest) -> str:
    return f"{count} of {len(manifest.slots)} tensors"


def verdict(old: Probe, new: Probe, back: Probe, scores: tuple[Sequence[float], Sequence[float]] | None) -> str:
    """Return what an engine does wrong, or "". ``old``, ``new`` and ``back``: what it sampled under the first weights,
    the changed and the first again; ``scores``: what the trainer says about the tokens of ``new`` under the changed and
    the first weights, None where it cannot."""
    if not all(math.isfinite(value) for probe in (old, new, back) for value in probe.logprobs):
        return f"log-probabilities are not finite: {old.logprobs}, {new.logprobs}, {back.logprobs}"
    if not old.logprobs or not new.logprobs:
        return "it sampled nothing"
    if new == old:
        return (
            "it ignores updates, or answers from a cache: changed weights left the log-probabilities of the probe as "
            f"they were, {old.logprobs}"
        )
    moved = _distance(old, new)
    if scores is not None:
        changed, first = scores
        moved = fmean(abs(a - b) for a, b in zip(changed, first, strict=True))
        missed = fmean(abs(a - b) for a, b in zip(new.logprobs, changed, strict=True))
        if missed > NEAR * moved:
            return (
                f"under the changed weights it computes {new.logprobs}, the trainer {list(changed)} for the same "
                "tokens: a part of its weights, or of its cache, is not of this version"
            )
    if back != old and (back.token_ids != old.token_ids or _distance(old, back) > STIR * moved):
        return (
            f"with the first weights again it computes {back.logprobs}, before {old.logprobs}: it did not take all of "
            "the update, or answers from a cache"
        )
    return ""


def _distance(one: Probe, other: Probe) -> float:
    """Return the mean difference of the log-probabilities of two probes, or infinity where tokens differ."""
    if one.token_ids != other.token_ids:
        return math.inf
    return fmean(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
