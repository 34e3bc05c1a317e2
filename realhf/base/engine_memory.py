"""How much of a GPU an engine that samples takes: by the engine itself when it starts, and by the
plan of ``mode=check``."""

from __future__ import annotations

SERVER_BYTES = 3 << 30
"""GPU memory that a vLLM server needs besides weights and KV cache, estimated: CUDA's context,
graphs, activations, and the logits of a full batch."""
SMALLEST_CACHE = 0.25
"""Fraction of a server's memory, without its weights, that its KV cache gets at least."""
SERVER_SHARE = 0.92
"""Fraction of a GPU that vLLM takes by default, of 0.32 and 0.33 (``gpu_memory_utilization``)."""
SHARED_FRACTION = 0.5
"""Fraction of the free memory that the embedded engine's KV cache gets on a GPU that a trainer uses
too."""
DEDICATED_FRACTION = 0.8
"""Fraction of the free memory that it gets on a GPU that no trainer uses."""
_GIB = 1 << 30


def server_room(free: int, total: int, *, loaded: int, first_update: int) -> int:
    """Return the bytes that a server gets beside a trainer, with ``free`` of ``total`` bytes free:
    half of what remains once the trainer has allocated everything. The other half is for the
    trainer's passes.

    Gradients and optimizer moments are allocated in the trainer's ``first_update``, long after the
    server has taken its share, so they are subtracted here. Whether the trainer has already
    ``loaded`` its weights is unknown, so the lower of two bounds is used.
    """
    return min(free - first_update, total - loaded - first_update) // 2


def cache_in(room: int) -> int:
    """Return the size of a server's KV cache if it has ``room`` besides its weights."""
    return max(room - SERVER_BYTES, int(room * SMALLEST_CACHE))


def describe_no_room(
    role: str, *, total: int, free: int, trainer: int, room: int, needed: int
) -> str:
    """Return the error message about a server whose weights do not fit beside a trainer. All are
    bytes of the GPU: ``trainer`` what the trainer of ``role`` takes, ``room`` what that leaves to
    the server, ``needed`` the server's weights."""
    gib = [f"{nbytes / _GIB:.3g}" for nbytes in (total, free, trainer, max(room, 0), needed)]
    return (
        f"vLLM does not fit next to the trainer of {role} on a GPU of {gib[0]} GiB with {gib[1]} "
        f"free: the trainer needs {gib[2]} GiB, which leaves {gib[3]} to vLLM for weights of "
        f"{gib[4]}; give it a GPU of its own (allocation.gpus), train fewer parameters "
        f"({role}.lora.rank), set {role}.optimizer.offload=true, set its share yourself "
        f"(engine.gpu_memory_utilization), or use engine.name=embedded"
    )
