"""Proves that engines hold the weights they were given: what an engine says of its own, the judgement of it, and the
record of both.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from realhf.api.calls import ChangedTensor, Probe, UpdateWeightsAnswer
from realhf.api.generation import HeldTensor, StreamingGenerator, WeightsManifest
from realhf.api.keys import TORCH_NAMES
from realhf.base.tensor_digest import TensorDigester, joint_digest

if TYPE_CHECKING:
    from torch import Tensor


class HeldWeights:
    """Follows the weights of one engine. Not thread-safe: call it where weights are loaded."""

    def __init__(self, engine: StreamingGenerator) -> None:
        self._engine = engine
        self._held: dict[str, HeldTensor] = {}
        self._given: dict[str, str] = {}

    def changed(self) -> list[ChangedTensor]:
        """Return the tensors that are not what they were after the last update."""
        proven = {name: tensor for name, tensor in self._held.items() if tensor.proven}
        if not proven:
            return []
        now = self._engine.weight_digests(list(proven))
        return [
            ChangedTensor(name, before.digest, now[name].digest if name in now else "nothing")
            for name, before in proven.items()
            if name not in now or now[name].digest != before.digest
        ]

    def after(self, manifest: WeightsManifest, tensors: Mapping[str, Tensor]) -> dict[str, HeldTensor] | None:
        """Return what the engine holds after it has loaded ``tensors``; None where it cannot tell. In a self-test,
        which changes a few tensors, the others are not computed anew: ``changed`` does that before the next update."""
        import torch

        known = self._held if manifest.trial else {}
        same = {s.name for s in manifest.slots if s.name in known and self._given.get(s.name) == s.digest}
        held = self._engine.weight_digests([slot.name for slot in manifest.slots if slot.name not in same])
        held |= {name: known[name] for name in same}
        self._held, self._given = held, {slot.name: slot.digest for slot in manifest.slots}
        if not held and manifest.slots:
            return None
        digester, told = TensorDigester(), dict(held)
        for slot in manifest.slots:
            found = held.get(slot.name)
            if found is not None and found.proven and found.dtype != slot.dtype:
                converted = tensors[slot.name].to(getattr(torch, TORCH_NAMES[found.dtype]))
                told[slot.name] = HeldTensor(found.dtype, found.digest, digester.digest(converted))
        return told


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


WEIGHTS_FILE = "weights.jsonl"


class WeightRecord:
    """Appends to ``weights.jsonl`` of a run: the digest of every version that was published, and that every engine
    held it. Versions of a run that goes on are compared with what was published before; ``warn`` is told of a
    difference, and of engines that cannot tell what they hold."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = folder / WEIGHTS_FILE, warn
        self._untold: set[str] = set()
        self._last = (-1, "")
        self._earlier = _published(self._path)
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            self._path.open("a").write("\n")  # who wrote the last line was killed meanwhile

    def published(self, manifest: WeightsManifest) -> None:
        """The trainer has published a version. The second time in a row, as by the self-test, is not written down."""
        if (manifest.version, manifest.digest) == self._last:
            return
        self._last = manifest.version, manifest.digest
        digest, earlier = manifest.digest, self._earlier.pop(manifest.version, None)
        if earlier is not None and earlier != digest:
            self._warn(
                f"the weights of version {manifest.version} are not those that this run published before it was "
                f"interrupted: digest {digest}, then {earlier}"
            )
        self._earlier.clear()  # later versions of an earlier process are another history
        self._write(
            event="published",
            version=manifest.version,
            digest=digest,
            tensors=len(manifest.slots),
            nbytes=manifest.nbytes,
        )

    def held(self, worker: str, manifest: WeightsManifest, answer: UpdateWeightsAnswer) -> None:
        """An engine has loaded a version, and holds it as far as it can tell."""
        if answer.held is not None:
            digest = joint_digest({name: tensor.digest for name, tensor in answer.held.items() if tensor.proven})
            unproven = sorted(name for name, tensor in answer.held.items() if not tensor.proven)
            row = {"version": manifest.version, "digest": digest, "engine": worker}
            self._write(event="held", **row, **({"unproven": len(unproven)} if unproven else {}))
            if unproven:
                count = f"{len(unproven)} of {len(manifest.slots)} tensors, e.g. {unproven[0]}"
                self._warn_once(worker, f"the engine of {worker} cannot tell what it holds of {count}")
            return
        self._warn_once(worker, f"the engine of {worker} cannot tell which weights it holds")

    def _warn_once(self, worker: str, text: str) -> None:
        if worker not in self._untold:
            self._untold.add(worker)
            self._warn(f"{text}; the self-test alone speaks for it")

    def proven(self, version: int, workers: list[str]) -> None:
        """The self-test has passed."""
        self._write(event="self-test", version=version, engines=workers)

    def _write(self, **row: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **row}) + "\n")


def _published(path: Path) -> dict[int, str]:
    """Return the digest of the last weights that were published under each version; a torn last line is left out."""
    found: dict[int, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                if row["event"] == "published":
                    found[int(row["version"])] = str(row["digest"])
            except (ValueError, KeyError, TypeError):
                continue
    return found
