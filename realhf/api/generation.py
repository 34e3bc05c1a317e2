"""Interfaces for asynchronous generation: engines with continuous batching, and descriptions of the
weights that they load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.base.messages import Message
from realhf.base.tensor_digest import joint_digest

if TYPE_CHECKING:
    from torch import Tensor

Done = Callable[[GenOutput | Exception], None]
"""Callback that an engine thread calls once per submitted request, with the output or an error."""


class StreamingGenerator(Protocol):
    """An engine with continuous batching. All methods are thread-safe; a request is identified by
    its slot.

    The finish reason of an output is ``stop``, ``length`` or ``aborted``. A weight update does not
    interrupt requests: they continue with the new weights, and ``GenOutput.versions`` contains the
    version that sampled each token.
    """

    @property
    def version(self) -> int:
        """Policy version of the current weights; -1 before any were loaded."""
        ...

    def submit(
        self, request: GenRequest, config: GenConfig, stop_ids: Sequence[int], done: Done
    ) -> None:
        """Queue a request, which waits while the engine is paused or has no weights. Only requests
        to the embedded engine have a ``grammar``."""
        ...

    def abort(self, slots: Sequence[int]) -> None:
        """End the requests in these slots with the tokens sampled so far (finish reason
        ``aborted``)."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Free the cache of these slots, whose episodes have ended."""
        ...

    def pause(self, timeout_s: float) -> None:
        """Stop sampling until ``resume``; return once no token is being sampled. Raises
        TimeoutError after ``timeout_s`` seconds."""
        ...

    def resume(self) -> None:
        """Resume sampling after ``pause``."""
        ...

    def load_weights(
        self, version: int, tensors: Mapping[str, Tensor], *, again: bool = False
    ) -> None:
        """Replace the weights between two tokens. On an error, no tensor is changed.

        A version that is already in use is not loaded again unless ``again`` is set. Raises
        ValueError for a lower version, and for a tensor that is missing or has another shape.
        """
        ...

    def weight_digests(self, names: Sequence[str]) -> dict[str, HeldTensor]:
        """Return digests of the engine's tensors with these names; unknown names are omitted.

        Returns {} if the engine cannot report digests. Must not be called while weights are being
        loaded.
        """
        ...

    def replica(self) -> StreamingGenerator | None:
        """Return another engine with a copy of the current weights, which is never updated; None if
        this engine cannot be copied.

        Must not be called while weights are being loaded.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Return metrics: the totals ``generated_tokens``, ``prefill_tokens``, ``reused_tokens``
        and ``busy_s`` (seconds in forward passes), and the current numbers of ``running`` and
        ``waiting`` requests."""
        ...

    def close(self) -> None:
        """Stop the engine's thread; unfinished requests get an error."""
        ...


class GroupSeat(Message, frozen=True):
    """A server's place in a group of GPUs that gets weights by a broadcast."""

    unique_id: bytes
    """Id of the group, with which its members join it; b"" if they have joined it before."""
    rank_offset: int
    """Rank of the server's first worker. Rank 0 is the trainer."""
    world_size: int
    """Number of ranks: the trainer and the workers of all servers."""
    pack_bytes: int
    """Size at which a pack of tensors is full, which both sides must agree on."""
    timeout_s: float
    """Seconds that members have to join, and then to receive the weights."""


@runtime_checkable
class GroupMember(Protocol):
    """What a ``StreamingGenerator`` has if it may get weights by a broadcast."""

    def count_ranks(self) -> tuple[int, str]:
        """Return the number of ranks that the engine needs in a group, and ""; or 0 and why it
        cannot take part, as a clause after the engine's name."""
        ...

    def take_broadcast(
        self, version: int, slots: Sequence[TensorSlot], seat: GroupSeat, *, again: bool = False
    ) -> None:
        """Replace the weights by those that the trainer sends to the group.

        Raises an error if they did not arrive. The engine then samples nothing until it has loaded
        weights again, by whatever medium.
        """
        ...


class TokenSource(Protocol):
    """Interface through which an agent gets sampled tokens, on the agent's event loop."""

    async def generate(self, request: GenRequest) -> GenOutput:
        """Return the rest of a turn, or a part of it with the finish reason ``interrupted``. Raises
        GenerationFailed."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Free the cache of these slots, whose episodes have ended."""
        ...


class GenerationFailed(RuntimeError):
    """Raised if no generation worker could serve a request before its deadline."""


class TensorSlot(Message, frozen=True, array_like=True):
    """Location of a tensor in a flat buffer of weights."""

    name: str
    """Name of the parameter or buffer."""
    dtype: str
    """Dtype tag, see ``realhf.api.keys``."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte in the buffer."""
    nbytes: int
    """Size in bytes."""
    digest: str = ""
    """Digest of the trainer's own tensor (``realhf.base.tensor_digest``)."""


class HeldTensor(Message, frozen=True, array_like=True):
    """An engine's report about one of its tensors."""

    dtype: str
    """Dtype of the tensor in the engine."""
    digest: str
    """Digest of the tensor in the engine's dtype; "" if the engine accepted the tensor but does not
    hold it under this name, so that it cannot be verified."""
    expected: str = ""
    """Digest of the received tensor after conversion to the engine's dtype; "" if no conversion was
    needed."""

    @property
    def proven(self) -> bool:
        """Whether the engine could report a digest of this tensor."""
        return self.digest != ""


class WeightsManifest(Message, frozen=True):
    """Description of one version of a policy's weights and how to get it."""

    version: int
    """Policy version."""
    medium: str
    """``shm``, ``disk``, ``fetch`` or ``nccl``."""
    location: str
    """Name of a shared-memory segment (``shm``), path of a safetensors file (``disk``), address and
    ticket (``fetch``), or "" (``nccl``: the trainer sends its own tensors, see ``GroupSeat``)."""
    nbytes: int
    """Size of the buffer in bytes."""
    checksum: str
    """Hex digest (BLAKE2b, 16 bytes) of the flat buffer, which contains the tensors at their
    offsets in the order of ``slots``. For ``shm``, whose buffer cannot change, it is a digest of
    the tensors' digests."""
    slots: tuple[TensorSlot, ...] = ()
    """Locations of the tensors in the buffer."""
    trial: int = 0
    """Step of a self-test; 0 outside of one. An engine loads the weights of a self-test even if it
    already has this version."""

    @property
    def digest(self) -> str:
        """Joint digest of all tensors, which identifies these weights in files and logs."""
        return joint_digest({slot.name: slot.digest for slot in self.slots})
