"""A pretended GPU that accounts for its memory by what holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from realhf.backends.pretended.device import GPUProperties, PretendedDevice
from realhf.backends.pretended.source_lines import SHARDING
from realhf.backends.pretended.tensor import PretendedTensor
from realhf.base.hf_config import MEMORY_PARTS

(
    WEIGHTS,
    MASTERS,
    GRADIENTS,
    MOMENTS,
    ACTIVATIONS,
    LOGITS,
    UNSHARDED,
    COPY,
    KEY_VALUES,
) = MEMORY_PARTS
MERGING_FILE = "realhf/backends/training/lora.py"
"""File of the product that merges adapters."""
_PART_OF_FILE = {
    "realhf/backends/training/optimizer.py": GRADIENTS,
    "realhf/backends/training/selected_logprobs.py": LOGITS,
    "realhf/backends/embedded/kv_cache.py": KEY_VALUES,
    "realhf/backends/parallel/fsdp.py": COPY,
}
"""Part of the memory that the product's files allocate. ``MERGING_FILE`` allocates merged weights
while the device ``samples``, and torch's FSDP unsharded ones. All others allocate activations,
until ``relabel`` says otherwise."""


class LedgerDevice(PretendedDevice):
    """A pretended GPU that knows what its memory holds. ``parts`` has the bytes in use for each of
    ``MEMORY_PARTS``. Set ``samples`` during a call that samples."""

    def __init__(self, properties: GPUProperties | None = None) -> None:
        super().__init__(properties)
        self.samples = False
        self.parts: Counter[str] = Counter()
        self._peak_parts: Counter[str] = Counter()
        self._part_of: dict[int, str] = {}

    def allocate(self, plain: Tensor, known: Tensor | None = None) -> PretendedTensor:
        """See ``PretendedDevice.allocate``."""
        with self._lock:
            before = self.live_bytes
            tensor = super().allocate(plain, known)
            if self.live_bytes != before:
                key = plain.untyped_storage()._cdata
                line = self._origins[key].line
                file = line.partition(":")[0]
                part = UNSHARDED if SHARDING in line else _PART_OF_FILE.get(file, ACTIVATIONS)
                if self.samples and file == MERGING_FILE:
                    part = COPY
                self._part_of[key] = part
                self.parts[part] += self.live_bytes - before
            return tensor

    def _free(self, key: int) -> None:
        with self._lock:
            before = self.live_bytes
            super()._free(key)
            self.parts[self._part_of.pop(key, ACTIVATIONS)] -= before - self.live_bytes

    def count_resized(self, storage: torch.UntypedStorage) -> None:
        """See ``PretendedDevice.count_resized``."""
        with self._lock:
            before = self.live_bytes
            super().count_resized(storage)
            if self.live_bytes != before:
                self.parts[self._part_of[storage._cdata]] += self.live_bytes - before

    def _note_peak(self) -> None:
        super()._note_peak()
        self._peak_parts = self.parts.copy()

    @property
    def peak_parts(self) -> Counter[str]:
        """Bytes in use at the peak, for each of ``MEMORY_PARTS``."""
        with self._lock:
            if self._rises:
                self._note_peak()
            return +self._peak_parts

    def relabel(self, tensors: Iterable[Tensor], part: str) -> None:
        """Account for the memory of tensors as another part from now on; tensors of other devices
        do not count."""
        with self._lock:
            for each in tensors:
                tensor = each._local_tensor if isinstance(each, DTensor) else each
                if not isinstance(tensor, PretendedTensor):
                    continue
                key = tensor.untyped_storage()._cdata
                size = self._sizes[key]
                self.parts[self._part_of[key]] -= size
                self.parts[part] += size
                self._part_of[key] = part


def count_kernels(operations: Counter[str]) -> int:
    """Return how many of the operations, counted by name, launch a kernel: all but views."""
    return sum(n for name, n in operations.items() if not _is_view(name))


def _is_view(name: str) -> bool:
    """Return whether the result of an operation shares the memory of an argument, unwritten."""
    space, operation, overload = name.split(".")
    function = getattr(getattr(getattr(torch.ops, space), operation), overload)
    aliases = [result.alias_info for result in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
