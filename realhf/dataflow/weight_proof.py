"""Proves that engines hold, and compute with, the weights they were given: digests, probes, trial changes and the
verdict."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from realhf.api.calls import TRIAL_CHANGE, TRIAL_RESTORE, ChangedTensor, Probe, ProbeRequest, UpdateWeightsAnswer
from realhf.api.config import GenConfig
from realhf.api.generation import HeldTensor, StreamingGenerator, WeightsManifest
from realhf.api.keys import TORCH_NAMES
from realhf.api.model import Engine, GenOutput, GenRequest
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.base import process_clock
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

    def __init__(self, folder: Path, warn: Callable[[str], None], *, completed_steps: int = 0) -> None:
        """Read what a run that goes on after ``completed_steps`` has published. Raises OSError."""
        self._path, self._warn = folder / WEIGHTS_FILE, warn
        self._untold: set[str] = set()
        self._last = (-1, "")
        self._earlier, unpublished = _published(self._path)
        if completed_steps and completed_steps not in {*self._earlier, *unpublished}:
            warn(
                f"{self._path} does not say which weights version {completed_steps} had; whether the run goes on with "
                "the same ones is not compared"
            )
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

    def unpublished(self, version: int) -> None:
        """A checkpoint holds a version that was not published, because the run stops."""
        self._write(event="unpublished", version=version)

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


def _published(path: Path) -> tuple[dict[int, str], set[int]]:
    """Return the digest of the last weights that were published under each version, and the versions that are known not
    to have been; a torn last line is left out."""
    found: dict[int, str] = {}
    unpublished: set[int] = set()
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                if row["event"] == "published":
                    found[int(row["version"])] = str(row["digest"])
                elif row["event"] == "unpublished":
                    unpublished.add(int(row["version"]))
            except (ValueError, KeyError, TypeError):
                continue
    return found, unpublished


TEXT = "The quick brown fox jumps over the lazy dog, and 0123456789 are the digits; list every bucket, then stop. "
NEW_TOKENS = 4
SHORT, LONG = 12, 144
"""Prefix tokens. vLLM caches blocks of 128 tokens on the CPU and of 16 elsewhere: the long prefix holds such a block,
so that keys and values of earlier weights would be found, and the short one none, where keeping them is asked for."""
SLOT = -1
"""The probe's slot; those of clients start at 0."""
WAIT_S = 300.0
"""Longest time for one probe, with which a server may compile."""


def probe_ids(tokenizer: Any, engine: str, kv_policy: str, limit: int | None) -> list[int]:
    """Return the prefix for an engine of this name, which takes sequences of ``limit`` tokens."""
    ids = [int(token) for token in tokenizer.encode(TEXT, add_special_tokens=False)] or [0]
    count = LONG if engine == "vllm" and kv_policy == "recompute" else SHORT
    room = count if limit is None else max(1, min(count, limit - NEW_TOKENS))
    return (ids * (room // len(ids) + 1))[:room]


class WeightProbe:
    """Probes one engine. One that recomputes under new weights (``kv_policy``) may keep the prefix cached between two
    probes, on purpose: it must not use what it computed under other weights."""

    def __init__(self, engine: StreamingGenerator, token_ids: list[int], kv_policy: str) -> None:
        self._engine, self._token_ids = engine, token_ids
        self._forgets = kv_policy != "recompute"

    def sample(self, request: ProbeRequest) -> Probe:
        """Return the prefix with what the engine samples after it. Raises what the engine raises, or TimeoutError."""
        over, outcomes = threading.Event(), list[GenOutput | Exception]()

        def done(outcome: GenOutput | Exception) -> None:
            outcomes.append(outcome)
            over.set()

        config = GenConfig(max_new_tokens=NEW_TOKENS, temperature=1.0)
        self._engine.submit(GenRequest(SLOT, self._token_ids, seed=1), config, (), done)
        if not process_clock.wait(over.wait, WAIT_S):
            self._engine.abort([SLOT])
            raise TimeoutError(f"the engine did not answer the probe of its weights within {WAIT_S:g} s")
        if request.last or self._forgets:
            self._engine.free([SLOT])
        outcome = outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return Probe([*self._token_ids, *outcome.token_ids], list(outcome.logprobs))


class WeightTrial:
    """Holds whether an engine's weights are changed. One tensor of each shape is rolled by one along its first
    dimension, the last one of that shape: the embedding, one matrix of each kind, norms. That moves the
    log-probabilities of any model whose words differ, and can be undone without a copy. A weight that adapters are
    merged in changes by its adapter, as in training: ``engine.adapters`` has ``names``, ``disturb`` and ``restore``."""

    def __init__(self) -> None:
        self._changed: list[str] = []
        self._in_place = True
        self.names: list[str] = []
        """The tensors that the last step changed, there or back."""

    def step(
        self, trial: int, engine: Engine, tensors: Mapping[str, Tensor], probes: Sequence[Probe]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Change ``tensors``, the engine's weights, or change them back; 0 does neither. Returns, for the latter, the
        engine's own log-probabilities of the last tokens of each probe before and after; nothing where ``tensors`` are
        copies, so that the change is not the engine's. Raises RuntimeError on a step out of turn."""
        if trial == 0 and not self._changed:
            return [], []
        if trial == TRIAL_CHANGE and not self._changed:
            self.names = self._changed = _one_of_each_shape(tensors)
            self._turn(engine, tensors, 1)
            own = engine.weights()
            self._in_place = all(own[name].data_ptr() == tensors[name].data_ptr() for name in self._changed)
            return [], []
        if trial != TRIAL_RESTORE or not self._changed:
            raise RuntimeError(f"step {trial} of a self-test of weight updates, out of turn")
        in_place = self._in_place
        before = [_scores(engine, probe) for probe in probes] if in_place else []
        if in_place:
            self._turn(engine, tensors, -1)
        self._changed = []
        return before, [_scores(engine, probe) for probe in probes] if in_place else []

    def _turn(self, engine: Engine, tensors: Mapping[str, Tensor], by: int) -> None:
        """Change the chosen weights, or change them back (``by`` -1)."""
        adapters = getattr(engine, "adapters", None)
        adapted = adapters.names.intersection(self._changed) if adapters is not None else frozenset()
        _roll(tensors, [name for name in self._changed if name not in adapted], by)
        if adapters is not None and by > 0:
            adapters.disturb(adapted)
        elif adapters is not None:
            adapters.restore()


def _one_of_each_shape(tensors: Mapping[str, Tensor]) -> list[str]:
    last = {tuple(t.shape): name for name, t in tensors.items() if t.is_floating_point() and t.ndim and len(t) > 1}
    return list(last.values())


def _roll(tensors: Mapping[str, Tensor], names: Sequence[str], by: int) -> None:
    import torch

    with torch.no_grad():
        for name in names:
            tensors[name].copy_(tensors[name].roll(by, 0))


def _scores(engine: Engine, probe: Probe) -> list[float]:
    """Return the log-probabilities of a probe's sampled tokens by the engine's own forward pass."""
    import torch

    ids = torch.tensor(probe.token_ids, dtype=torch.int64)
    sample = SequenceSample.from_tensors(["probe"], {"packed_input_ids": ids}, {"packed_input_ids": [[len(ids)]]})
    logprobs = engine.logprobs(sample, temperature=1.0, mb_spec=MicroBatchSpec())
    return logprobs[len(ids) - 1 - len(probe.logprobs) :].tolist()
