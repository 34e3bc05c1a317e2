"""Generation for a trainer by a separate engine, such as a vLLM server, in synchronous runs and
evaluations.

The engine gets the trainer's weights before the first token of each version is sampled, with the
same digests and the same self-test as in asynchronous runs.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from realhf.api.calls import TRIAL_CHANGE, TRIAL_RESTORE, Probe, ProbeRequest, UpdateWeightsAnswer
from realhf.api.config import GenConfig
from realhf.api.generation import StreamingGenerator, WeightsManifest
from realhf.api.model import Engine, GenOutput, GenRequest
from realhf.base import process_clock
from realhf.dataflow.weight_proof import (
    EngineWeightDigests,
    WeightProbe,
    WeightTrial,
    WrongWeights,
    check_engine_weights,
    find_probe_error,
)
from realhf.transport.weights import compute_layout


class ServedGeneration:
    """``GenerationEngine`` that uses a streaming engine with the weights of ``trainer``.

    ``name`` is the engine's name in error messages, ``probe`` is the token prefix of the self-test,
    ``timeout_s`` limits a batch. The owner of the streaming engine closes it.
    """

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
        self._trainer = trainer
        self._served = served
        self._name = name
        self._timeout_s = timeout_s
        self._context_limit = context_limit
        self._weight_digests = EngineWeightDigests(served)
        self.weight_update_s = 0.0
        """Seconds of the weight updates since ``ServedEngine.take_weight_update_s``."""
        self._probe = WeightProbe(served, list(probe), "recompute")
        self._self_test_passed = False

    @property
    def context_limit(self) -> int:
        """Maximum length of a sequence, in tokens."""
        return self._context_limit

    def generate(
        self,
        requests: Sequence[GenRequest],
        config: GenConfig,
        *,
        stop_ids: Sequence[int],
        seed: int,
    ) -> list[GenOutput]:
        """Sample a turn for every request with the trainer's current weights.

        Raises ValueError for a slot in two requests, the engine's error for a request,
        TimeoutError, and WrongWeights if the engine has other weights than the trainer.
        """
        if len({request.slot for request in requests}) != len(requests):
            raise ValueError("generate: a slot is named by two requests")
        self._update_weights()
        outcomes: dict[int, GenOutput | Exception] = {}
        changed = threading.Condition()

        def submit(request: GenRequest, index: int) -> None:
            def done(outcome: GenOutput | Exception) -> None:
                with changed:
                    outcomes[index] = outcome
                    changed.notify_all()

            request_seed = request.seed if request.seed is not None else _derive_seed(seed, index)
            self._served.submit(_with_seed(request, request_seed), config, stop_ids, done)

        for index, request in enumerate(requests):
            submit(request, index)
        with changed:
            complete = process_clock.wait(
                lambda left_s: changed.wait_for(lambda: len(outcomes) == len(requests), left_s),
                self._timeout_s,
            )
        if not complete:
            self._served.abort([request.slot for request in requests])
            raise TimeoutError(
                f"{self._name} did not sample {len(requests)} turns within {self._timeout_s:g} s"
            )
        in_order = [outcomes[index] for index in range(len(requests))]
        outputs = [outcome for outcome in in_order if isinstance(outcome, GenOutput)]
        for outcome in in_order:
            if isinstance(outcome, Exception):
                raise outcome
        return outputs

    def free(self, slots: Sequence[int] | None = None) -> None:
        """Free the cache entries of these slots, if the engine caches by slot."""
        if slots:
            self._served.free(slots)

    def _update_weights(self) -> None:
        """Load the trainer's weights if their version has changed; run the self-test after the
        first load."""
        version = self._trainer.version
        if self._served.version == version:
            return
        started_at = time.perf_counter()
        digest = self._load(version)
        self.weight_update_s += time.perf_counter() - started_at
        if not self._self_test_passed:
            self._run_self_test(version, digest)
            self._self_test_passed = True

    def _load(self, version: int, trial: int = 0) -> str:
        """Load the trainer's current weights and return their digest. Raises WrongWeights."""
        before = self._served.version
        changed = [] if trial else self._weight_digests.find_changed()
        tensors = self._trainer.weights()
        slots, nbytes = compute_layout(tensors)
        manifest = WeightsManifest(version, "memory", "here", nbytes, "", slots, trial)
        self._served.load_weights(version, tensors, again=trial > 0)
        held = self._weight_digests.digest_after_load(manifest, tensors)
        check_engine_weights(
            self._name, manifest, UpdateWeightsAnswer(0.0, 0.0, 0.0, held, changed), before
        )
        return manifest.digest

    def _run_self_test(self, version: int, digest: str) -> None:
        """Run the self-test of weight updates, as ``SelfTest`` does between processes. Raises
        WrongWeights."""
        trial = WeightTrial()
        before = self._probe.sample(ProbeRequest(False))
        trial.step(TRIAL_CHANGE, self._trainer, self._trainer.weights(), [])
        probes: list[Probe] = []
        try:
            self._load(version, TRIAL_CHANGE)
            probes.append(self._probe.sample(ProbeRequest(False)))
        finally:
            # Restore the trainer's own weights in any case, even if the engine failed.
            changed_scores, restored_scores = trial.step(
                TRIAL_RESTORE, self._trainer, self._trainer.weights(), probes
            )
        if self._load(version, TRIAL_RESTORE) != digest:
            raise WrongWeights(
                "the trainer's weights are not as they were before the self-test of weight updates"
            )
        restored = self._probe.sample(ProbeRequest(True))
        scores = (changed_scores[0], restored_scores[0]) if changed_scores else None
        if error := find_probe_error(before, probes[0], restored, scores):
            raise WrongWeights(f"{self._name} failed the self-test of weight updates: {error}")


class ServedEngine:
    """A trainer's engine that generates with a ``ServedGeneration``; everything else is delegated
    to the original engine."""

    def __init__(self, engine: Engine, generation: ServedGeneration) -> None:
        self._engine = engine
        self._generation = generation

    @property
    def version(self) -> int:
        """Version of the policy weights."""
        return self._engine.version

    @version.setter
    def version(self, value: int) -> None:
        self._engine.version = value

    def generator(self) -> ServedGeneration:
        """Return the engine that generates."""
        return self._generation

    def take_weight_update_s(self) -> float:
        """Return the seconds of the weight updates since the last call, with their digests."""
        seconds = self._generation.weight_update_s
        self._generation.weight_update_s = 0.0
        return seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _derive_seed(seed: int, index: int) -> int:
    """Return the seed for request number ``index`` of a batch whose seed is ``seed``."""
    return (
        int.from_bytes(
            hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "little"
        )
        >> 1
    )


def _with_seed(request: GenRequest, seed: int) -> GenRequest:
    return replace(request, seed=seed)
