"""AdamW with fp32 master weights, a learning rate schedule and optional offloading of the moments
to the host."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realhf.api.config import LRSchedule, OptimizerConfig

PIECE_BYTES = 1 << 28
"""Maximum size in bytes of the pieces in which moments are copied; a larger parameter is a piece by
itself. Two pieces are on the device at a time."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in the state of torch.optim.AdamW."""
_ALIGNED = 256
"""Alignment in bytes of each moment in the slab."""
_PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for all CUDA contexts."""
_N_BUFFERS = 2
"""Number of buffers on the device (double buffering)."""


class HostMemory:
    """Pinned host memory for the moments of a CUDA device, with asynchronous copies of its pieces.

    Ordinary memory is pinned in place, because an allocator of pinned memory would round the size
    up to a power of two. Pieces are copied to the device on one stream and back on another, so that
    both directions of the bus are used in parallel with the arithmetic.

    Between steps the moments are in host memory. In a step, piece ``number`` (0, 1, ...) is copied
    to buffer ``number % 2`` on the device and back. The methods only enqueue their operation;
    operations run in the order that their names imply. Raises ValueError for a device that is not a
    CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"optimizer.offload=true: has no effect on the device {device}, whose memory is "
                f"that of the host"
            )
        self._device = device
        self._streams: _CopyStreams | None = None

    def allocate(self, nbytes: int) -> Tensor:
        """Return pinned memory, u8 (nbytes,), zeros. Raises RuntimeError if the host cannot pin
        that much."""
        slab = torch.zeros(nbytes, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            code = int(runtime.cudaHostRegister(slab.data_ptr(), nbytes, _PORTABLE))
        if code:
            raise RuntimeError(
                f"optimizer.offload=true: the host cannot pin {nbytes / 2**30:.3g} GiB for the "
                f"moments (CUDA error "
                f"{code}); raise the limit of locked memory (ulimit -l), or set false"
            )
        # The finaliser references the slab, so it is unpinned before it is freed. At process exit
        # it stays pinned.
        weakref.finalize(self, _unpin, slab).atexit = False
        return slab

    def fetch(self, number: int, host: Tensor, buffer: Tensor) -> None:
        """Copy a piece from host memory (``host``) to its buffer, once the previous piece in the
        buffer has been stored."""
        streams = self._streams = self._streams or _CopyStreams.create(self._device)
        stored = streams.stored[number % _N_BUFFERS]
        if number < _N_BUFFERS:  # The buffer was allocated, or last used, on the compute stream.
            streams.inward.wait_stream(torch.cuda.current_stream(self._device))
        else:
            streams.inward.wait_event(stored)
        with torch.cuda.stream(streams.inward):
            buffer.copy_(host, non_blocking=True)
            streams.fetched[number % _N_BUFFERS].record()

    def wait_for_piece(self, number: int) -> None:
        """Make later operations on the compute stream wait until the piece is in its buffer."""
        assert self._streams is not None, "a piece is fetched before it is awaited"
        torch.cuda.current_stream(self._device).wait_event(
            self._streams.fetched[number % _N_BUFFERS]
        )

    def store(self, number: int, host: Tensor, buffer: Tensor) -> None:
        """Copy the piece back to host memory, once the operations on it are complete."""
        assert self._streams is not None, "a piece is fetched before it is stored"
        self._streams.outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._streams.outward):
            host.copy_(buffer, non_blocking=True)
            self._streams.stored[number % _N_BUFFERS].record()

    def finish(self) -> None:
        """Block until all pieces are stored. Afterwards the buffers may be freed."""
        if self._streams is not None:
            self._streams.inward.synchronize()
            self._streams.outward.synchronize()


class _CopyStreams(NamedTuple):
    """CUDA streams and events for the copies."""

    inward: Any
    """Stream of the copies to the device."""
    outward: Any
    """Stream of the copies to the host."""
    fetched: Sequence[Any]
    """For each buffer, the event of its last copy to the device."""
    stored: Sequence[Any]
    """For each buffer, the event of its last copy to the host."""

    @staticmethod
    def create(device: torch.device) -> _CopyStreams:
        with torch.cuda.device(device):
            fetched, stored = ([torch.cuda.Event() for _ in range(_N_BUFFERS)] for _ in "io")
            return _CopyStreams(torch.cuda.Stream(), torch.cuda.Stream(), fetched, stored)


def _unpin(slab: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(slab.data_ptr())


@dataclass(frozen=True)
class _Piece:
    """Parameters whose moments are copied together."""

    parameters: Sequence[Tensor]
    """The parameters."""
    start: int
    """Offset of their moments in the slab, in bytes."""
    stop: int
    """Offset of the end of their moments, in bytes."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class OffloadedMoments:
    """Optimizer step of torch.optim.AdamW with moments that are offloaded to the host between
    steps.

    The moments are in one slab of ``memory``, in the order of the parameters, with the two moments
    of a parameter next to each other, so that a piece needs one copy. The device computes the
    update, so the results are bit-identical to those without offloading.
    """

    def __init__(
        self, adamw: torch.optim.AdamW, memory: HostMemory, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._adamw = adamw
        self._memory = memory
        own = [parameter for group in adamw.param_groups for parameter in group["params"]]
        self._offsets, self._pieces = _plan_slab(own, piece_bytes)
        self._slab = memory.allocate(self._pieces[-1].stop)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have gradients, and clear the gradients."""
        gradients = {
            p: p.grad
            for group in self._adamw.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        for parameter in gradients:
            parameter.grad = None
            if not self._adamw.state.get(parameter):
                self.init_moments(parameter)
        pieces = [piece for piece in self._pieces if any(p in gradients for p in piece.parameters)]
        buffers = self._allocate_buffers(pieces)
        try:
            for number, piece in enumerate(pieces):
                for next_number in (0, 1) if number == 0 else (number + 1,):
                    if next_number < len(pieces):
                        self._memory.fetch(
                            next_number,
                            self._slice_slab(pieces[next_number]),
                            buffers[next_number % _N_BUFFERS],
                        )
                self._memory.wait_for_piece(number)
                self._update(piece, buffers[number % _N_BUFFERS], gradients)
                self._memory.store(number, self._slice_slab(piece), buffers[number % _N_BUFFERS])
        finally:
            self._memory.finish()

    def _update(self, piece: _Piece, buffer: Tensor, gradients: dict[Tensor, Tensor]) -> None:
        parameters = [parameter for parameter in piece.parameters if parameter in gradients]
        for parameter in parameters:
            parameter.grad = gradients.pop(parameter)
            self._adamw.state[parameter].update(self._view_moments(parameter, buffer, piece.start))
        try:
            self._adamw.step()
        finally:
            for parameter in parameters:
                parameter.grad = None
                self._adamw.state[parameter].update(self._view_moments(parameter, self._slab))

    def _allocate_buffers(self, pieces: Sequence[_Piece]) -> list[Tensor]:
        """Return the two buffers on the device; the second one is empty if there is only one
        piece."""
        sizes = [
            max((piece.nbytes for piece in pieces[number::_N_BUFFERS]), default=0)
            for number in range(_N_BUFFERS)
        ]
        device = pieces[0].parameters[0].device if pieces else None
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    @torch.no_grad()
    def init_moments(self, parameter: Tensor) -> None:
        """Initialise the moments of a parameter to 0, as the optimizer does in its first step."""
        moments = self._view_moments(parameter, self._slab)
        for moment in moments.values():
            moment.zero_()
        self._adamw.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}

    def _slice_slab(self, piece: _Piece) -> Tensor:
        return self._slab[piece.start : piece.stop]

    def _view_moments(self, parameter: Tensor, memory: Tensor, start: int = 0) -> dict[str, Tensor]:
        """Return views of a parameter's moments in ``memory``, which starts at byte ``start`` of
        the slab."""
        nbytes = parameter.numel() * parameter.element_size()
        moments = {}
        for name, place in zip(_MOMENTS, self._offsets[parameter], strict=True):
            moments[name] = (
                memory[place - start : place - start + nbytes]
                .view(parameter.dtype)
                .view(parameter.shape)
            )
        return moments


def _plan_slab(
    parameters: Iterable[Tensor], piece_bytes: int
) -> tuple[dict[Tensor, tuple[int, int]], list[_Piece]]:
    """Return the offsets in bytes of each parameter's two moments in the slab, and the pieces of
    the slab.

    Raises ValueError if there are no parameters.
    """
    offsets: dict[Tensor, tuple[int, int]] = {}
    pieces: list[_Piece] = []
    piece: list[Tensor] = []
    start = end = 0
    for parameter in parameters:
        nbytes = -(-parameter.numel() * parameter.element_size() // _ALIGNED) * _ALIGNED
        if piece and end + 2 * nbytes - start > piece_bytes:
            pieces.append(_Piece(piece, start, end))
            piece = []
            start = end
        piece.append(parameter)
        offsets[parameter] = end, end + nbytes
        end += 2 * nbytes
    if not piece:
        raise ValueError("optimizer.offload=true: nothing trains, so there are no moments")
    return offsets, [*pieces, _Piece(piece, start, end)]


def compute_learning_rate(config: OptimizerConfig, version: int, total_steps: int) -> float:
    """Return the learning rate of the train step that turns ``version`` into ``version + 1``.

    It warms up linearly over ``warmup_steps_proportion`` of ``total_steps``, with a nonzero rate in
    the first step. Then it is constant, or decays linearly or as a cosine from the peak to 0 at
    ``total_steps``.
    """
    warmup = math.ceil(config.warmup_steps_proportion * total_steps)
    if version < warmup:
        return config.lr * (version + 1) / warmup
    progress = min(1.0, (version - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type is LRSchedule.linear:
        return config.lr * (1 - progress)
    if config.lr_scheduler_type is LRSchedule.cosine:
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr


@torch.no_grad()
def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    """Add the gradient of a parameter to that of its master weight, and clear it."""
    gradient = parameter.grad
    if gradient is None:
        return
    parameter.grad = None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)


class PolicyOptimizer:
    """AdamW optimizer of a module's trainable parameters.

    Parameters in a narrower dtype than fp32 get fp32 master weights, because bf16 would round small
    updates away. A backward pass adds their gradients to those of the master weights, in fp32, as
    soon as each is complete (with sharded weights, once it is summed over the ranks), so that the
    gradients of the whole model are in memory once. Biases and norms (one dimension) have no weight
    decay. With ``config.offload`` the moments are in ``memory`` (None: pinned host memory); raises
    ValueError if the device is not a CUDA device.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        *,
        memory: HostMemory | None = None,
    ) -> None:
        if config.lr < 0 or total_steps < 1:
            raise ValueError(
                f"optimizer: lr {config.lr} must be >= 0 and total steps {total_steps} >= 1"
            )
        self._config = config
        self._total_steps = total_steps
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float().clone())
            for p in self._parameters
        ]
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [p for p in self._masters if p.ndim > 1],
                    "weight_decay": config.weight_decay,
                },
                {"params": [p for p in self._masters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._offloaded: OffloadedMoments | None = None
        if config.offload and self._masters:
            self._offloaded = OffloadedMoments(
                self._adamw, memory or HostMemory(self._masters[0].device)
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the module."""
        return self._parameters

    @property
    def masters(self) -> list[nn.Parameter]:
        """Master weights, fp32, whose gradients are accumulated. A parameter that is fp32 is its
        own master weight."""
        return self._masters

    @property
    def offloads(self) -> bool:
        """Whether the moments are offloaded between steps."""
        return self._offloaded is not None

    def use(self, config: OptimizerConfig) -> None:
        """Use these options from now on and keep the moments. Raises ValueError if ``offload``
        changes."""
        if config.offload != self._config.offload:
            raise ValueError(
                "optimizer.offload: an optimizer that has begun keeps its moments where they are"
            )
        self._config = config
        for group in self._adamw.param_groups:
            group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps
            group["weight_decay"] = (
                config.weight_decay if any(p.ndim > 1 for p in group["params"]) else 0.0
            )

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for p in (*self._parameters, *self._masters):
            p.grad = None

    def copy_gradients(self) -> list[Tensor | None]:
        """Return a copy of each master weight's accumulated gradient, None where there is none."""
        return [None if p.grad is None else p.grad.clone() for p in self._masters]

    def restore_gradients(self, copied: Sequence[Tensor | None]) -> None:
        """Replace all gradients with those that ``copy_gradients`` returned."""
        self.zero_grad()
        for master, gradient in zip(self._masters, copied, strict=True):
            master.grad = gradient

    def gradient_norm(self) -> float:
        """Return the global L2 norm of the gradients before clipping, computed in fp32; 0 without a
        gradient."""
        grads = [p.grad for p in self._masters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def step(self, version: int, norm: float) -> float:
        """Clip the gradients, whose global norm is ``norm`` (finite), and update the parameters;
        return the learning rate."""
        rate = compute_learning_rate(self._config, version, self._total_steps)
        limit = self._config.gradient_clipping
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        for master in self._masters:
            if master.grad is not None and scale < 1.0:
                master.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        (self._offloaded or self._adamw).step()
        self.publish()
        return rate

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights to the parameters of the model."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None

    def moments(self) -> list[Tensor]:
        """Return the moments of all weights that have been updated (not copies)."""
        states = self._adamw.state.values()
        return [state[name] for state in states for name in _MOMENTS if name in state]

    def tensors(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """Return the optimizer's tensors (not copies) by name.

        These are AdamW's state, such as ``exp_avg/NAME``, and ``master/NAME`` for separate master
        weights. ``names`` are the names of the parameters.
        """
        named: dict[str, Tensor] = {}
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                named[f"master/{names[parameter]}"] = master.detach()
            for kind, value in self._adamw.state.get(master, {}).items():
                named[f"{kind}/{names[parameter]}"] = value
        return named

    def reset_moments(self, parameters_: Collection[nn.Parameter]) -> None:
        """Set the moments of these parameters to 0 and remove those of all others. ``tensors`` then
        includes exactly these moments, so that a checkpoint can be loaded into them."""
        self._adamw.state.clear()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter in parameters_ and self._offloaded is not None:
                self._offloaded.init_moments(master)
            elif parameter in parameters_:
                self._adamw.state[master] = {
                    "step": torch.zeros((), device=master.device),
                    "exp_avg": torch.zeros_like(master, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
                }
