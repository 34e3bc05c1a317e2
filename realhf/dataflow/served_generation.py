"""Generates for a trainer with an engine that is not its own module, such as a vLLM server: in synchronous runs and in
evaluations. Weights reach it before the first token of a version, and are proven as in asynchronous runs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from realhf.api.calls import TRIAL_CHANGE, TRIAL_RESTORE, Probe, ProbeRequest, UpdateWeightsAnswer
from realhf.api.config import GenConfig
from realhf.api.generation import StreamingGenerator, WeightsManifest
from realhf.api.model import Engine, GenOutput, GenRequest
from realhf.base import process_clock
from realhf.dataflow.weight_proof import HeldWeights, WeightProbe, WeightTrial, WrongWeights, check_held, verdict
from realhf.transport.weights import layout


class ServedGeneration:
    """Implements ``GenerationEngine`` on a streaming engine, whose tokens are those of ``trainer``'s weights. ``name``
    is what errors call it; ``timeout_s`` bounds a batch. Closing the streaming engine is its owner's."""

    def __init__(
        self,
        trainer: Engine,
        served: StreamingGenerator,
        *,
        name: str,
        context_limit: int,
        probe: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._trainer, self._served, self._name, self._timeout_s = trainer, served, name, timeout_s
        self._limit = context_limit
        self._held = HeldWeights(served)
        self._probe = WeightProbe(served, list(probe), "recompute")
        self._proven = False

    @property
    def context_limit(self) -> int:
        """See ``GenerationEngine``."""
        return self._limit

    def generate(
        self, requests: Sequence[GenRequest], config: GenConfig, *, stop_ids: Sequence[int], seed: int
    ) -> list[GenOutput]:
        """See ``GenerationEngine``. Raises ValueError for a slot that is named twice, what the engine raises for a
        request, TimeoutError, and WrongWeights where the engine has other weights than the trainer."""
        if len({request.slot for request in requests}) != len(requests):
            raise ValueError("generate: a slot is named by two requests")
        self._bring_up()
        outcomes: dict[int, GenOutput | Exception] = {}
        changed = threading.Condition()

        def submit(request: GenRequest, index: int) -> None:
            def done(outcome: GenOutput | Exception) -> None:
                with changed:
                    outcomes[index] = outcome
                    changed.notify_all()

            own = request.seed if request.seed is not None else _seed(seed, index)
            self._served.submit(_seeded(request, own), config, stop_ids, done)

        for index, request in enumerate(requests):
            submit(request, index)
        with changed:
            complete = process_clock.wait(
                lambda left_s: changed.wait_for(lambda: len(outcomes) == len(requests), left_s), self._timeout_s
            )
        if not complete:
            self._served.abort([request.slot for request in requests])
            raise TimeoutError(f"{self._name} did not sample {len(requests)} turns within {self._timeout_s:g} s")
        found = [outcomes[index] for index in range(len(requests))]
        outputs = [outcome for outcome in found if isinstance(outcome, GenOutput)]
        for outcome in found:
            if isinstance(outcome, Exception):
                raise outcome
        return outputs

    def free(self, slots: Sequence[int] | None = None) -> None:
        """Forget what is cached for these slots, if the engine keeps anything by slot."""
        if slots:
            self._served.free(slots)

    def _bring_up(self) -> None:
        """Load the trainer's weights if they are newer, and prove the first time that they arrive."""
        version = self._trainer.version
        if self._served.version == version:
            return
        digest = self._load(version)
        if not self._proven:
            self._prove(version, digest)
            self._proven = True

    def _load(self, version: int, trial: int = 0) -> str:
        """Load the weights of now and return their digest. Raises WrongWeights."""
        before = self._served.version
        changed = [] if trial else self._held.changed()
        tensors = self._trainer.weights()
        slots, nbytes = layout(tensors)
        manifest = WeightsManifest(version, "memory", "here", nbytes, "", slots, trial)
        self._served.load_weights(version, tensors, again=trial > 0)
        held = self._held.after(manifest, tensors)
        check_held(self._name, manifest, UpdateWeightsAnswer(0.0, 0.0, 0.0, held, changed), before)
        return manifest.digest

    def _prove(self, version: int, digest: str) -> None:
        """Run the self-test of weight updates, as ``SelfTest`` does between processes. Raises WrongWeights."""
        trial = WeightTrial()
        old = self._probe.sample(ProbeRequest(False))
        trial.step(TRIAL_CHANGE, self._trainer, self._trainer.weights(), [])
        probes: list[Probe] = []
        try:
            self._load(version, TRIAL_CHANGE)
            probes.append(self._probe.sample(ProbeRequest(False)))
        finally:
            # The trainer must have its own weights again, whatever the engine did.
            changed, restored = trial.step(TRIAL_RESTORE, self._trainer, self._trainer.weights(), probes)
        if self._load(version, TRIAL_RESTORE) != digest:
            raise WrongWeights("the trainer's weights are not as they were before the self-test of weight updates")
        back = self._probe.sample(ProbeRequest(True))
        if error := verdict(old, probes[0], back, (changed[0], restored[0]) if changed else None):
            raise WrongWeights(f"{self._name} failed the self-test of weight updates: {error}")


class ServedEngine:
    """Is a trainer's engine whose tokens come from elsewhere; everything else is the engine's own."""

    def __init__(self, engine: Engine, generation: ServedGeneration) -> None:
        self._engine, self._generation = engine, generation

    @property
    def version(self) -> int:
        """See ``Engine``."""
        return self._engine.version

    @version.setter
    def version(self, value: int) -> None:
        self._engine.version = value

    def generator(self) -> ServedGeneration:
        """See ``Engine``."""
        return self._generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _seed(seed: int, index: int) -> int:
    """Return the seed of a request of a batch that has none of its own."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "little") >> 1


def _seeded(request: GenRequest, seed: int) -> GenRequest:
    return GenRequest(request.slot, request.token_ids, request.sampled, seed)
