"""Checks that engines hold, and compute with, the weights that were sent to them: digests, probes
and trial changes."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from realhf.api.calls import (
    TRIAL_CHANGE,
    TRIAL_RESTORE,
    ChangedTensor,
    Probe,
    ProbeRequest,
    UpdateWeightsAnswer,
)
from realhf.api.config import GenConfig
from realhf.api.generation import HeldTensor, StreamingGenerator, WeightsManifest
from realhf.api.keys import TORCH_NAMES
from realhf.api.model import Engine, GenOutput, GenRequest
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.base import process_clock
from realhf.base.tensor_digest import TensorDigester, joint_digest

if TYPE_CHECKING:
    from torch import Tensor


class EngineWeightDigests:
    """Digests of one engine's weights across updates. Not thread-safe: use it in the thread that
    loads weights."""

    def __init__(self, engine: StreamingGenerator) -> None:
        self._engine = engine
        self._held: dict[str, HeldTensor] = {}
        """Digests of the tensors that the engine held after the last update, by name."""
        self._sent: dict[str, str] = {}
        """Digests of the tensors of the last update, by name."""

    def find_changed(self) -> list[ChangedTensor]:
        """Return the tensors that have changed since the last update."""
        proven = {name: tensor for name, tensor in self._held.items() if tensor.proven}
        if not proven:
            return []
        now = self._engine.weight_digests(list(proven))
        return [
            ChangedTensor(name, before.digest, now[name].digest if name in now else "nothing")
            for name, before in proven.items()
            if name not in now or now[name].digest != before.digest
        ]

    @contextlib.contextmanager
    def broadcast(self) -> Iterator[None]:
        """Context manager for the load of a broadcast. If it fails, the engine may hold anything,
        so that nothing is compared with what it held before."""
        try:
            yield
        except BaseException:
            self._held = {}
            self._sent = {}
            raise

    def digest_after_load(
        self, manifest: WeightsManifest, tensors: Mapping[str, Tensor]
    ) -> dict[str, HeldTensor] | None:
        """Return digests of the tensors that the engine holds after it has loaded ``tensors``; None
        if it cannot report them. ``tensors`` is empty after a broadcast, which this process does
        not see; a tensor that the engine converts is then not proven.

        A self-test changes only a few tensors. The digests of the others are reused here, and
        ``find_changed`` computes them before the next update.
        """
        import torch

        known = self._held if manifest.trial else {}
        unchanged = {
            s.name for s in manifest.slots if s.name in known and self._sent.get(s.name) == s.digest
        }
        engine_tensors = self._engine.weight_digests(
            [slot.name for slot in manifest.slots if slot.name not in unchanged]
        )
        engine_tensors |= {name: known[name] for name in unchanged}
        self._held = engine_tensors
        self._sent = {slot.name: slot.digest for slot in manifest.slots}
        if not engine_tensors and manifest.slots:
            return None
        digester = TensorDigester()
        answer = dict(engine_tensors)
        for slot in manifest.slots:
            tensor = engine_tensors.get(slot.name)
            if tensor is not None and tensor.proven and tensor.dtype != slot.dtype:
                # The engine keeps another dtype: add the digest that the sent tensor has after this
                # conversion.
                if slot.name not in tensors:
                    answer[slot.name] = HeldTensor("", "")
                    continue
                converted = tensors[slot.name].to(getattr(torch, TORCH_NAMES[tensor.dtype]))
                answer[slot.name] = HeldTensor(
                    tensor.dtype, tensor.digest, digester.digest(converted)
                )
        return answer


MAX_DISTANCE_TO_TRAINER = 0.2
"""Maximum mean difference between the engine's and the trainer's log-probabilities under the
changed weights, as a fraction of the mean difference that the change makes for the trainer. bf16
rounding gives a few hundredths; an engine that computes with a wrong matrix gives about 1."""
MAX_DISTANCE_AFTER_RESTORE = 0.01
"""Maximum mean difference between the engine's log-probabilities before the change and after the
restoration, as a fraction of the mean difference that the change makes for the trainer. It is not 0
because some engines are not deterministic."""


class WrongWeights(RuntimeError):
    """Error: an engine holds, or computes with, other weights than those sent to it, so its samples
    are not from the policy."""


def check_engine_weights(
    worker: str, manifest: WeightsManifest, answer: UpdateWeightsAnswer, before: int
) -> None:
    """Raise WrongWeights if an engine does not hold the tensors of the manifest, or if its previous
    weights (version ``before``) changed while in use. The error names the tensor, the expected
    digest and the actual one."""
    if answer.changed:
        first = answer.changed[0]
        raise WrongWeights(
            f"{worker}: {first.name} changed while version {before} was in use: its digest was "
            f"{first.before} and is "
            f"{first.now} ({_share(len(answer.changed), manifest)}); what it sampled since is not "
            f"of these weights"
        )
    if answer.held is None:
        return
    wrong: list[str] = []
    for slot in manifest.slots:
        reported = answer.held.get(slot.name)
        if reported is not None and not reported.proven:
            continue  # cannot be checked; ``WeightRecord.record_loaded`` counts it and warns
        expected = (
            slot.digest if reported is None or reported.dtype == slot.dtype else reported.expected
        )
        if reported is None or reported.digest != expected:
            actual = (
                "nothing of that name"
                if reported is None
                else f"{reported.digest} ({reported.dtype})"
            )
            wrong.append(f"{slot.name} should have digest {expected}, found {actual}")
    if wrong:
        share = _share(len(wrong), manifest)
        raise WrongWeights(
            f"{worker} does not hold the weights of version {manifest.version}: {wrong[0]} "
            f"({share})"
        )


def _share(count: int, manifest: WeightsManifest) -> str:
    return f"{count} of {len(manifest.slots)} tensors"


def find_probe_error(
    before: Probe,
    changed: Probe,
    restored: Probe,
    scores: tuple[Sequence[float], Sequence[float]] | None,
) -> str:
    """Return an error text if the probes of a self-test show that an engine uses wrong weights; ""
    otherwise.

    Args:
        before, changed, restored: The engine's samples under the original weights, the changed ones
            and the original ones again.
        scores: The trainer's log-probabilities of the tokens of ``changed`` under the changed and
            the original weights; None if it cannot compute them.
    """
    if not all(
        math.isfinite(value) for probe in (before, changed, restored) for value in probe.logprobs
    ):
        return (
            f"log-probabilities are not finite: {before.logprobs}, {changed.logprobs}, "
            f"{restored.logprobs}"
        )
    if not before.logprobs or not changed.logprobs:
        return "it sampled nothing"
    if changed == before:
        return (
            "it ignores updates, or answers from a cache: changed weights left the "
            "log-probabilities of the probe as "
            f"they were, {before.logprobs}"
        )
    effect = _mean_distance(before, changed)
    if scores is not None:
        trainer_changed, trainer_original = scores
        effect = fmean(abs(a - b) for a, b in zip(trainer_changed, trainer_original, strict=True))
        error = fmean(abs(a - b) for a, b in zip(changed.logprobs, trainer_changed, strict=True))
        if error > MAX_DISTANCE_TO_TRAINER * effect:
            return (
                f"under the changed weights it computes {changed.logprobs}, the trainer "
                f"{list(trainer_changed)} for "
                "the same tokens: a part of its weights, or of its cache, is not of this version"
            )
    if restored != before and (
        restored.token_ids != before.token_ids
        or _mean_distance(before, restored) > MAX_DISTANCE_AFTER_RESTORE * effect
    ):
        return (
            f"with the first weights again it computes {restored.logprobs}, before "
            f"{before.logprobs}: it did not take "
            "all of the update, or answers from a cache"
        )
    return ""


def _mean_distance(first: Probe, second: Probe) -> float:
    """Return the mean absolute difference between the log-probabilities of two probes; infinity if
    their tokens differ."""
    if first.token_ids != second.token_ids:
        return math.inf
    return fmean(abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True))


WEIGHTS_FILE = "weights.jsonl"


class WeightRecord:
    """Writer of the run's ``weights.jsonl``, which records the digests of all weight versions and
    the engines that held them.

    A resumed run compares its versions with those published before. ``warn(text)`` is called about
    a difference, and about engines that cannot report their weights.
    """

    def __init__(
        self, folder: Path, warn: Callable[[str], None], *, completed_steps: int = 0
    ) -> None:
        """Read the versions that the run, which resumes after ``completed_steps``, published
        earlier. Raises OSError."""
        self._path = folder / WEIGHTS_FILE
        self._warn = warn
        self._warned: set[str] = set()
        """Engines about which a warning was given."""
        self._last = (-1, "")
        """Version and digest of the last publication."""
        self._earlier, unpublished = _read_published(self._path)
        if completed_steps and completed_steps not in {*self._earlier, *unpublished}:
            warn(
                f"{self._path} does not say which weights version {completed_steps} had, so "
                "it is not checked whether the run resumes with the same ones"
            )
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            self._path.open("a").write("\n")  # the process was killed while it wrote the last line

    def record_published(self, manifest: WeightsManifest) -> None:
        """Record the publication of a version. A repetition of the last version, as in the
        self-test, is not recorded."""
        if (manifest.version, manifest.digest) == self._last:
            return
        self._last = (manifest.version, manifest.digest)
        digest = manifest.digest
        earlier = self._earlier.pop(manifest.version, None)
        if earlier is not None and earlier != digest:
            self._warn(
                f"the weights of version {manifest.version} are not those that this run published "
                f"before it was "
                f"interrupted: digest {digest}, then {earlier}"
            )
        self._earlier.clear()  # later versions of an earlier process belong to another history
        self._write(
            event="published",
            version=manifest.version,
            digest=digest,
            tensors=len(manifest.slots),
            nbytes=manifest.nbytes,
        )

    def record_unpublished(self, version: int) -> None:
        """Record a version that is in a checkpoint but was not published, because the run stops."""
        self._write(event="unpublished", version=version)

    def record_loaded(
        self, worker: str, manifest: WeightsManifest, answer: UpdateWeightsAnswer
    ) -> None:
        """Record that an engine has loaded a version, with the digest of those tensors that it can
        report."""
        if answer.held is not None:
            digest = joint_digest(
                {name: tensor.digest for name, tensor in answer.held.items() if tensor.proven}
            )
            unproven = sorted(name for name, tensor in answer.held.items() if not tensor.proven)
            row = {"version": manifest.version, "digest": digest, "engine": worker}
            self._write(event="held", **row, **({"unproven": len(unproven)} if unproven else {}))
            if unproven:
                count = f"{len(unproven)} of {len(manifest.slots)} tensors, e.g. {unproven[0]}"
                self._warn_once(worker, f"the engine of {worker} cannot report digests of {count}")
            return
        self._warn_once(worker, f"the engine of {worker} cannot report which weights it has")

    def _warn_once(self, worker: str, text: str) -> None:
        if worker not in self._warned:
            self._warned.add(worker)
            self._warn(f"{text}; only the self-test checks them")

    def record_self_test(self, version: int, workers: list[str]) -> None:
        """Record that workers have passed the self-test."""
        self._write(event="self-test", version=version, engines=workers)

    def _write(self, **row: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **row}) + "\n")


def _read_published(path: Path) -> tuple[dict[int, str], set[int]]:
    """Return the digest last published for each version, and the versions recorded as unpublished.

    Lines that cannot be parsed, such as an incomplete last line, are ignored.
    """
    digests: dict[int, str] = {}
    unpublished: set[int] = set()
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                if row["event"] == "published":
                    digests[int(row["version"])] = str(row["digest"])
                elif row["event"] == "unpublished":
                    unpublished.add(int(row["version"]))
            except (ValueError, KeyError, TypeError):
                continue
    return digests, unpublished


TEXT = (
    "The quick brown fox jumps over the lazy dog, and 0123456789 are the digits; list every "
    "bucket, then stop. "
)
"""Text of the probe's prefix, repeated as often as needed."""
NEW_TOKENS = 4
"""Number of tokens that an engine samples for a probe."""
# Tokens of the prefix. vLLM caches blocks of 128 tokens on the CPU and of 16 elsewhere. The long
# prefix fills a block, so a cache that outlives an update is detected. The short one fills none,
# for engines that are to keep their cache.
SHORT_PREFIX = 12
LONG_PREFIX = 144
SLOT = -1
"""Slot of the probe; the slots of clients start at 0."""
WAIT_S = 300.0
"""Timeout of one probe in seconds; a server may compile at its first request."""


def probe_ids(tokenizer: Any, engine: str, kv_policy: str, limit: int | None) -> list[int]:
    """Return the token prefix of the probe for the engine called ``engine``. ``limit`` is its
    maximum sequence length in tokens."""
    ids = [int(token) for token in tokenizer.encode(TEXT, add_special_tokens=False)] or [0]
    length = LONG_PREFIX if engine == "vllm" and kv_policy == "recompute" else SHORT_PREFIX
    if limit is not None:
        length = max(1, min(length, limit - NEW_TOKENS))
    return (ids * (length // len(ids) + 1))[:length]


class WeightProbe:
    """Sampler of probes from one engine.

    With ``kv_policy="recompute"`` the prefix deliberately stays cached between two probes: an
    engine that must recompute under new weights must not use the cache of the old ones.
    """

    def __init__(self, engine: StreamingGenerator, token_ids: list[int], kv_policy: str) -> None:
        self._engine = engine
        self._token_ids = token_ids
        self._frees_cache = kv_policy != "recompute"

    def sample(self, request: ProbeRequest) -> Probe:
        """Return the prefix and the engine's continuation, with log-probabilities. Raises the
        engine's error or TimeoutError."""
        finished = threading.Event()
        outcomes: list[GenOutput | Exception] = []

        def done(outcome: GenOutput | Exception) -> None:
            outcomes.append(outcome)
            finished.set()

        config = GenConfig(max_new_tokens=NEW_TOKENS, temperature=1.0)
        self._engine.submit(GenRequest(SLOT, self._token_ids, seed=1), config, (), done)
        if not process_clock.wait(finished.wait, WAIT_S):
            self._engine.abort([SLOT])
            raise TimeoutError(
                f"the engine did not answer the probe of its weights within {WAIT_S:g} s"
            )
        if request.last or self._frees_cache:
            self._engine.free([SLOT])
        outcome = outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return Probe([*self._token_ids, *outcome.token_ids], list(outcome.logprobs))


class WeightTrial:
    """Temporary change of an engine's weights in a self-test.

    Of the tensors of each shape, the last one is rolled by one along its first dimension: the
    embedding, one matrix of each kind, norms. This changes the log-probabilities of any model whose
    token embeddings differ, and can be undone without a copy. A weight with a merged adapter is
    changed through the adapter, as in training: ``engine.adapters`` has ``names``, ``disturb`` and
    ``restore``.
    """

    def __init__(self) -> None:
        self._changed: list[str] = []
        self._in_place = True
        """Whether the changed tensors are the engine's own tensors, not copies."""
        self.names: list[str] = []
        """Names of the tensors in the last change or restoration."""

    def step(
        self, trial: int, engine: Engine, tensors: Mapping[str, Tensor], probes: Sequence[Probe]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Perform one step of the self-test on ``tensors``, the engine's weights: change them
        (``TRIAL_CHANGE``), restore them (``TRIAL_RESTORE``), or neither.

        A restoration returns the engine's own log-probabilities of the sampled tokens of each
        probe, before and after it. They are empty if ``tensors`` are copies, so that the engine
        itself was not changed. Raises RuntimeError on a step out of order.
        """
        if trial == 0 and not self._changed:
            return [], []
        if trial == TRIAL_CHANGE and not self._changed:
            self._changed = _choose_one_per_shape(tensors)
            self.names = self._changed
            self._roll(engine, tensors, 1)
            own = engine.weights()
            self._in_place = all(
                own[name].data_ptr() == tensors[name].data_ptr() for name in self._changed
            )
            return [], []
        if trial != TRIAL_RESTORE or not self._changed:
            raise RuntimeError(f"step {trial} of a self-test of weight updates, out of turn")
        in_place = self._in_place
        before = [_compute_logprobs(engine, probe) for probe in probes] if in_place else []
        if in_place:
            self._roll(engine, tensors, -1)
        self._changed = []
        return before, [_compute_logprobs(engine, probe) for probe in probes] if in_place else []

    def _roll(self, engine: Engine, tensors: Mapping[str, Tensor], by: int) -> None:
        """Change the selected weights (``by`` 1) or restore them (``by`` -1)."""
        adapters = getattr(engine, "adapters", None)
        adapted = (
            adapters.names.intersection(self._changed) if adapters is not None else frozenset()
        )
        _roll_tensors(tensors, [name for name in self._changed if name not in adapted], by)
        if adapters is not None and by > 0:
            adapters.disturb(adapted)
        elif adapters is not None:
            adapters.restore()


def _choose_one_per_shape(tensors: Mapping[str, Tensor]) -> list[str]:
    last = {
        tuple(t.shape): name
        for name, t in tensors.items()
        if t.is_floating_point() and t.ndim and len(t) > 1
    }
    return list(last.values())


def _roll_tensors(tensors: Mapping[str, Tensor], names: Sequence[str], by: int) -> None:
    import torch

    with torch.no_grad():
        for name in names:
            tensors[name].copy_(tensors[name].roll(by, 0))


def _compute_logprobs(engine: Engine, probe: Probe) -> list[float]:
    """Return the log-probabilities of a probe's sampled tokens by the engine's own forward pass."""
    import torch

    ids = torch.tensor(probe.token_ids, dtype=torch.int64)
    sample = SequenceSample.from_tensors(
        ["probe"], {"packed_input_ids": ids}, {"packed_input_ids": [[len(ids)]]}
    )
    logprobs = engine.logprobs(sample, temperature=1.0, mb_spec=MicroBatchSpec())
    return logprobs[len(ids) - 1 - len(probe.logprobs) :].tolist()
