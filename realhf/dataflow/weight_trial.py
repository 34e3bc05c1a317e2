"""Changes some weights of a model for the self-test of weight updates, and changes them back to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from realhf.api.calls import TRIAL_CHANGE, TRIAL_RESTORE, Probe
from realhf.api.model import Engine
from realhf.api.sample import MicroBatchSpec, SequenceSample

if TYPE_CHECKING:
    from torch import Tensor


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
