"""Defines asynchronous generation: engines that requests join and leave between tokens, and their
weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.base.messages import Message
from realhf.base.tensor_digest import joint_digest

if TYPE_CHECKING:
    from torch import Tensor

Done = Callable[[GenOutput | Exception], None]
"""Is called once per submitted request, on a thread of the engine, with its output or with what
went wrong."""


class StreamingGenerator(Protocol):
    """Samples with continuous batching. All methods may be called from any thread; a request is
    known by its slot.

    A finished output has the reason ``stop``, ``length`` or ``aborted``. New weights interrupt no
    request: it goes on under them, and ``GenOutput.versions`` holds for each token the version that
    sampled it.
    """

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first."""
        ...

    def submit(
        self, request: GenRequest, config: GenConfig, stop_ids: Sequence[int], done: Done
    ) -> None:
        """Queue a request. It waits while the engine is paused or has no weights yet."""
        ...

    def abort(self, slots: Sequence[int]) -> None:
        """End these requests with the tokens they have (reason ``aborted``)."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forget what is cached for these slots: their episodes are over."""
        ...

    def pause(self, timeout_s: float) -> None:
        """Stop sampling and return when no token is being sampled any more; sampling starts again
        at ``resume``. Raises TimeoutError."""
        ...

    def resume(self) -> None:
        """Start sampling again after ``pause``."""
        ...

    def load_weights(
        self, version: int, tensors: Mapping[str, Tensor], *, again: bool = False
    ) -> None:
        """Take new weights between two tokens: all of them or, on an error, none. A version that is
        in use already is left alone, unless it is to be loaded ``again``; a lower one raises
        ValueError, so does a tensor that is missing or of another shape."""
        ...

    def weight_digests(self, names: Sequence[str]) -> dict[str, HeldTensor]:
        """Return digests of what the engine holds under these names at this moment, leaving out
        names that it does not know; nothing at all where it cannot tell. Call it while no weights
        are being loaded."""
        ...

    def replica(self) -> StreamingGenerator | None:
        """Return a second engine with a copy of the weights in use, which nobody updates; None
        where there cannot be a second one. Call it while no weights are being loaded."""
        ...

    def stats(self) -> dict[str, float]:
        """Return counters since the start: ``generated_tokens``, ``prefill_tokens``,
        ``reused_tokens``, ``busy_s`` (seconds in forward passes), and the numbers of now:
        ``running``, ``waiting``."""
        ...

    def close(self) -> None:
        """End the engine's thread; requests that are not finished get an error."""
        ...


class TokenSource(Protocol):
    """Gives an agent the tokens it asks for, on its event loop."""

    async def generate(self, request: GenRequest) -> GenOutput:
        """Return the rest of a turn, or (``interrupted``) a part of it. Raises GenerationFailed."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forget what is cached for these slots: their episodes are over."""
        ...


class GenerationFailed(RuntimeError):
    """No generation worker could serve a request before its deadline."""


class TensorSlot(Message, frozen=True, array_like=True):
    """Says where one tensor lies in a flat buffer of weights. ``dtype`` is a tag of
    ``realhf.api.keys``; ``digest`` was computed on the trainer's own tensor
    (``realhf.base.tensor_digest``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str = ""


class HeldTensor(Message, frozen=True, array_like=True):
    """Says what an engine holds of one tensor: a digest of it in the engine's own element type.
    ``expected`` is the digest of what it received, converted to that type, where the type is not
    that of the manifest; else empty. With an empty ``digest`` the tensor is unproven: the engine
    took it, but does not have it under this name."""

    dtype: str
    digest: str
    expected: str = ""

    @property
    def proven(self) -> bool:
        """Whether the engine can tell what it holds of this tensor."""
        return self.digest != ""


class WeightsManifest(Message, frozen=True):
    """Describes one version of a policy's weights and how to get it. ``medium``: ``shm``
    (``location``: name of a segment), ``disk`` (a safetensors file) or ``fetch`` (address and
    ticket). ``checksum``: hex digest (blake2b, 16 bytes) of the flat buffer, tensors in the order
    of ``slots``, each at its offset; for ``shm``, whose buffer nobody can change, of the tensors'
    digests. ``trial``: weights of a self-test, which an engine loads though it has this version."""

    version: int
    medium: str
    location: str
    nbytes: int
    checksum: str
    slots: tuple[TensorSlot, ...] = ()
    trial: int = 0

    @property
    def digest(self) -> str:
        """One digest of all tensors, by which files and logs name these weights."""
        return joint_digest({slot.name: slot.digest for slot in self.slots})
