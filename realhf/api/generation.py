"""Defines asynchronous generation: engines that requests join and leave between tokens, and their weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.base.messages import Message

if TYPE_CHECKING:
    from torch import Tensor

Done = Callable[[GenOutput | Exception], None]
"""Is called once per submitted request, on a thread of the engine, with its output or with what went wrong."""


class StreamingGenerator(Protocol):
    """Samples with continuous batching. All methods may be called from any thread; a request is known by its slot.

    A finished output has the reason ``stop``, ``length`` or ``aborted``. New weights interrupt no request: it goes on
    under them, and ``GenOutput.versions`` holds for each token the version that sampled it.
    """

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first."""
        ...

    def submit(self, request: GenRequest, config: GenConfig, stop_ids: Sequence[int], done: Done) -> None:
        """Queue a request. It waits while the engine is paused or has no weights yet."""
        ...

    def abort(self, slots: Sequence[int]) -> None:
        """End these requests with the tokens they have (reason ``aborted``)."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forget what is cached for these slots: their episodes are over."""
        ...

    def pause(self, timeout_s: float) -> None:
        """Stop sampling and return when no token is being sampled any more; sampling starts again at ``resume``. Raises
        TimeoutError."""
        ...

    def resume(self) -> None:
        """Start sampling again after ``pause``."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Take new weights between two tokens: all of them or, on an error, none. A version that is in use already is
        left alone; a lower one raises ValueError, so does a tensor that is missing or of another shape."""
        ...

    def replica(self) -> StreamingGenerator | None:
        """Return a second engine with a copy of the weights in use, which nobody updates; None where there cannot be a
        second one. Call it while no weights are being loaded."""
        ...

    def stats(self) -> dict[str, float]:
        """Return counters since the start: ``generated_tokens``, ``prefill_tokens``, ``reused_tokens``, ``busy_s``
        (seconds in forward passes), and the numbers of now: ``running``, ``waiting``."""
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
    """Says where one tensor lies in a flat buffer of weights. ``dtype`` is a tag of ``realhf.api.keys``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightsManifest(Message, frozen=True):
    """Describes one version of a policy's weights and how to get it. ``medium``: ``shm`` (``location``: name of a
    segment), ``disk`` (a safetensors file) or ``broadcast`` (address of a rendezvous). ``checksum``: hex digest
    (blake2b, 16 bytes) of the flat buffer, tensors in the order of ``slots``, each at its offset."""

    version: int
    medium: str
    location: str
    nbytes: int
    checksum: str
    slots: tuple[TensorSlot, ...] = ()


Generate = Callable[[GenRequest], Awaitable[GenOutput]]
