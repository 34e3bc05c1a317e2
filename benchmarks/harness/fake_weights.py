"""Both ends of weight updates for benchmarks without a model: what the self-test at the start of a
run asks for."""

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
"""Log-probability of the one token of a probe under the first weights, and under those that the
self-test changes."""


def fake_publish(request: PublishWeightsRequest) -> PublishWeightsAnswer:
    """Publish weights without a tensor, and score the probes of a self-test as the fake engines
    sample them."""
    manifest = WeightsManifest(request.version, "shm", "nowhere", 0, "", trial=request.trial)
    count = len(request.probes) if request.trial == TRIAL_RESTORE else 0
    return PublishWeightsAnswer(manifest, [[CHANGED]] * count, [[FIRST]] * count)


class FakeImmediateWeights:
    """The end of a generation worker: takes whatever is published."""

    def __init__(self) -> None:
        self._changed = False

    def update(self, request: UpdateWeightsRequest) -> UpdateWeightsAnswer:
        """Load a version at once."""
        self._changed = request.manifest.trial == TRIAL_CHANGE
        return UpdateWeightsAnswer(0.0, 0.0)

    def probe(self, request: ProbeRequest) -> Probe:
        """Sample one token, whose probability says which weights there are."""
        del request
        return Probe([1], [CHANGED if self._changed else FIRST])
