"""Compiles the blocks of a trainer's model with torch.compile."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class CompiledBlocks:
    """Holds compiled forms of the blocks of ``model`` (transformers). They are used inside ``on`` only, so that
    generation from cached keys and values, which has other shapes at every token, stays as it is. Shapes are dynamic:
    one form serves micro-batches of every size. Raises ValueError where there are no blocks, or no compiler for the
    device. ``role`` is for errors."""

    def __init__(self, model: Any, role: str) -> None:
        self._option = f"{role}.compile=true"
        kinds = {*(getattr(model.get_decoder(), "_no_split_modules", None) or ())}
        self._blocks = [module for module in model.modules() if type(module).__name__ in kinds]
        if not self._blocks:
            raise ValueError(f"{self._option}: {type(model).__name__} does not say which of its modules are blocks")
        self._check_compiler(model.device)
        self._compiled: list[Callable[..., Any]] = [_compiled(block) for block in self._blocks]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Run the compiled forms inside; the first pass of a kind compiles. Raises RuntimeError that names the option
        where that fails."""
        for block, compiled in zip(self._blocks, self._compiled, strict=True):
            block._compiled_call_impl = compiled
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise RuntimeError(
                f"{self._option}: the blocks do not compile ({_first_line(error)}); set false"
            ) from error
        finally:
            for block in self._blocks:
                block._compiled_call_impl = None

    def _check_compiler(self, device: torch.device) -> None:
        if problem := _missing_compiler(device):
            raise ValueError(f"{self._option}: {problem}; install one, or set false")


def _compiled(block: nn.Module) -> Callable[..., Any]:
    return torch.compile(block._call_impl, dynamic=True)


def _missing_compiler(device: torch.device) -> str:
    """Return what torch.compile lacks for this device, or ""."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        if not has_triton():
            return "torch.compile needs triton on a GPU, which is not here"
        return "" if shutil.which("gcc") or shutil.which("clang") else "triton needs a C compiler, which is not here"
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError, RuntimeError) as error:
        return f"torch.compile needs a C++ compiler on the CPU, which is not here ({_first_line(error)})"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
