"""Says what an engine holds: after each update, and whether that is still so before the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from realhf.api.calls import ChangedTensor
from realhf.api.generation import HeldTensor, StreamingGenerator, WeightsManifest
from realhf.api.keys import TORCH_NAMES
from realhf.base.tensor_digest import TensorDigester

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
