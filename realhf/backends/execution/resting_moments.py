"""Keeps the moments of an optimizer in the memory of the host between steps, and brings them in piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

PIECE_BYTES = 1 << 28
"""Bytes of moments that are on the device at once; a larger parameter is a piece of its own."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Memory(Protocol):
    """Is where moments lie between steps."""

    def place_for(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this memory with the values of ``tensor``."""
        ...

    def fetched(self, held: Tensor, device: torch.device) -> Tensor:
        """Return a copy on ``device`` of a tensor of this memory."""
        ...

    def store(self, held: Tensor, tensor: Tensor) -> None:
        """Write ``tensor``, which is on a device, into one of this memory."""
        ...


class HostMemory:
    """Is the pinned memory of the host of a CUDA ``device``. Raises ValueError for a device whose memory it is
    itself."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"optimizer.offload=true: has no effect on the device {device}, whose memory is that of the host"
            )

    def place_for(self, tensor: Tensor) -> Tensor:
        """See ``Memory``."""
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return held.copy_(tensor)

    def fetched(self, held: Tensor, device: torch.device) -> Tensor:
        """See ``Memory``."""
        return held.to(device, non_blocking=True)

    def store(self, held: Tensor, tensor: Tensor) -> None:
        """See ``Memory``. It waits for the copy: the device frees the tensor next, and the host may read its own."""
        held.copy_(tensor)


class RestingMoments:
    """Steps ``adamw`` (torch.optim.AdamW) so that its moments are in ``memory`` before and after. The arithmetic is
    that of the device, so results are those without it, to the bit."""

    def __init__(self, adamw: torch.optim.AdamW, memory: Memory, piece_bytes: int = PIECE_BYTES) -> None:
        self._adamw, self._memory, self._piece_bytes = adamw, memory, piece_bytes

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have gradients, and drop these."""
        wanting = [p for group in self._adamw.param_groups for p in group["params"] if p.grad is not None]
        gradients = {parameter: parameter.grad for parameter in wanting}
        for parameter in wanting:
            parameter.grad = None
        for piece in self._pieces(wanting):
            held = {parameter: self._bring_in(parameter) for parameter in piece}
            for parameter in piece:
                parameter.grad = gradients.pop(parameter)
            self._adamw.step()
            for parameter in piece:
                parameter.grad = None
                self._lay_down(parameter, held[parameter])

    @torch.no_grad()
    def rest(self, parameter: Tensor) -> None:
        """Lay down the moments of a parameter, e.g. after they were made."""
        self._lay_down(parameter, {})

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of ``adamw``. Moments go to where they rest one by one: the device, which has no room for
        all of them, never has any. Raises ValueError on other groups of parameters, as ``adamw`` does."""
        others = {n: {k: v for k, v in held.items() if k not in _MOMENTS} for n, held in state["state"].items()}
        self._adamw.load_state_dict({**state, "state": others})
        saved = [number for group in state["param_groups"] for number in group["params"]]
        own = [parameter for group in self._adamw.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            for name in _MOMENTS:
                if name in (held := state["state"].get(number, {})):
                    self._adamw.state[parameter][name] = self._memory.place_for(held[name])

    def _pieces(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        piece: list[Tensor] = []
        held = 0
        for parameter in parameters:
            nbytes = len(_MOMENTS) * parameter.numel() * parameter.element_size()
            if piece and held + nbytes > self._piece_bytes:
                yield piece
                piece, held = [], 0
            piece.append(parameter)
            held += nbytes
        if piece:
            yield piece

    def _bring_in(self, parameter: Tensor) -> dict[str, Tensor]:
        """Copy the moments of a parameter to its device; return those that rest. In the first step there are none."""
        state = self._adamw.state.get(parameter, {})
        held = {name: state[name] for name in _MOMENTS if name in state}
        for name, tensor in held.items():
            state[name] = self._memory.fetched(tensor, parameter.device)
        return held

    def _lay_down(self, parameter: Tensor, held: dict[str, Tensor]) -> None:
        state = self._adamw.state[parameter]
        for name in _MOMENTS:
            if name in held:
                self._memory.store(held[name], state[name])
                state[name] = held[name]
            elif name in state:
                state[name] = self._memory.place_for(state[name])
