"""Runs code as on a machine with a GPU, on a CPU: ``pretend_gpu``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # which compares its own functions with those of torch that are replaced here
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.backends.embedded import attention, forward_pass
from realhf.backends.pretended.device import PretendedDevice, is_composite
from realhf.backends.pretended.tensor import PretendedTensor, has_pretended
from realhf.backends.training.selected_logprobs import supports_bf16_products


class _Interception(TorchDispatchMode):
    """Mode of one thread in which ``device`` runs what concerns it."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if DTensor in types:  # whose local tensors run their operations by themselves
            return func(*args, **options)
        device = options.get("device")
        on_device = device is not None and torch.device(device).type == "cuda"
        if not on_device and not has_pretended(args) and not has_pretended(options.values()):
            return func(*args, **options)
        if not is_composite(func):
            return self._device.run(func, args, options)
        with self:  # which sees the operations that it is made of
            return self._device.run(func, args, options)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the memory-efficient kernel, which CUDA takes for fp32 and for masks."""
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(times, 1)
        value = value.repeat_interleave(times, 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


@contextlib.contextmanager
def pretend_gpu(device: PretendedDevice | None = None) -> Iterator[PretendedDevice]:
    """Context manager in which ``cuda:0`` is a pretended device, in this thread and in those that
    start inside.

    Pretended tensors must not be used after it. Torch's own functions that ask CUDA are replaced
    while it lasts, so other threads must not use a real GPU meanwhile.
    """
    device = PretendedDevice() if device is None else device
    if torch.cuda.is_available():
        # Torch remembers that the replaced function was called, and never asks again.
        torch.cuda.init()
    lifts = torch._C._only_lift_cpu_tensors()
    with contextlib.ExitStack() as stack:
        # What these find out about this device is not true of a real one of the same name.
        for trial in (supports_bf16_products, attention._multiplies_bf16_wide):
            trial.cache_clear()
            stack.callback(trial.cache_clear)
        for owner, name, replacement in _list_replacements(device):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        torch._C._set_only_lift_cpu_tensors(True)  # of this thread
        with _Interception(device):
            yield device


def _list_replacements(device: PretendedDevice) -> list[tuple[Any, str, Any]]:
    """Return what is replaced while a device is pretended: (owner, name, replacement)."""
    attend = functional.scaled_dot_product_attention
    run_thread = threading.Thread.run
    as_tensor = torch.as_tensor
    fits = torch._has_compatible_shallow_copy_type  # pyright: ignore[reportPrivateImportUsage]
    total = device.properties.total_memory
    nothing = lambda *_: None

    def attend_anywhere(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        chosen = _attend if isinstance(query, PretendedTensor) else attend
        return chosen(query, *args, **kwargs)

    def convert(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        on_device = device is not None and torch.device(device).type == "cuda"
        if not on_device:
            return as_tensor(data, *args, device=device, **kwargs)
        return as_tensor(data, *args, **kwargs).to(device)

    def run_in_mode(thread: threading.Thread) -> None:
        torch._C._set_only_lift_cpu_tensors(True)
        with _Interception(device):
            run_thread(thread)

    def fits_anywhere(one: Tensor, other: Tensor) -> bool:
        same = isinstance(one, PretendedTensor) == isinstance(other, PretendedTensor)
        return same and fits(one, other)

    return [
        (torch.cuda, "_lazy_init", nothing),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "empty_cache", nothing),
        (torch.cuda, "get_device_properties", lambda *_: device.properties),
        (
            torch.cuda,
            "get_device_capability",
            lambda *_: (device.properties.major, device.properties.minor),
        ),
        (torch.cuda, "mem_get_info", lambda *_: (total - device.live_bytes, total)),
        (torch.cuda, "memory_reserved", lambda *_: device.live_bytes),
        (torch.cuda, "memory_allocated", lambda *_: device.live_bytes),
        (torch, "_has_compatible_shallow_copy_type", fits_anywhere),
        (torch, "as_tensor", convert),
        (functional, "scaled_dot_product_attention", attend_anywhere),
        (threading.Thread, "run", run_in_mode),
        (forward_pass, "PLAIN_TENSORS", (*forward_pass.PLAIN_TENSORS, PretendedTensor)),
    ]
