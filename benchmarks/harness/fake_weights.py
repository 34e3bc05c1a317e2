"""Fakes of both ends of a weight update, for benchmarks without a model. They answer what the
self-test at the start of a run asks for."""

from __future__ import annotations

from realhf.api.calls import (
    TRIAL_CHANGE,
    TRIAL_RESTORE,
    Probe,
    ProbeRequest,
    PublishWeightsAnswer,
    PublishWeightsRequest,
    UpdateWeightsAnswer,
    UpdateWeightsRequest,
)
from realhf.api.generation import WeightsManifest

FIRST = -1.0
CHANGED = -2.0
"""Log-probability of a probe's single token under the original weights (``FIRST``), and under those
that the self-test changes (``CHANGED``)."""


def fake_publish(request: PublishWeightsRequest) -> PublishWeightsAnswer:
    """Publish weights without any tensors. In the self-test, also score the probes like the fake
    engines, so that both ends agree."""
    manifest = WeightsManifest(request.version, "shm", "nowhere", 0, "", trial=request.trial)
    count = len(request.probes) if request.trial == TRIAL_RESTORE else 0
    return PublishWeightsAnswer(manifest, [[CHANGED]] * count, [[FIRST]] * count)


class FakeImmediateWeights:
    """Weights of a fake generation worker, which accepts every update immediately."""

    def __init__(self) -> None:
        self._changed = False

    def update(self, request: UpdateWeightsRequest) -> UpdateWeightsAnswer:
        """Accept a version immediately."""
        self._changed = request.manifest.trial == TRIAL_CHANGE
        return UpdateWeightsAnswer(0.0, 0.0)

    def probe(self, request: ProbeRequest) -> Probe:
        """Return one sampled token, whose log-probability tells which weights are loaded."""
        del request
        return Probe([1], [CHANGED if self._changed else FIRST])
