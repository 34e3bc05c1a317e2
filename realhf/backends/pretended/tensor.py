"""Tensors of a pretended GPU: shapes and dtypes without numbers, which say that they are on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CUDA = torch.device("cuda", 0)
"""Device that pretended tensors say they are on."""


class Runner(Protocol):
    """What computes with pretended tensors."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch with at least one pretended argument or result."""
        ...

    def address(self, tensor: PretendedTensor) -> int:
        """Return the address of a tensor's first element."""
        ...


class PretendedTensor(Tensor):
    """Tensor of a pretended GPU.

    To torch it is a meta tensor, so autograd and the shapes of results are torch's own. Python code
    sees a tensor of ``CUDA``.
    """

    plain: Tensor
    """Meta tensor over the same storage, without this class."""
    known: Tensor | None
    """The numbers, on the host, of few integers whose values are known; views of one tensor share
    them."""
    runner: Runner
    """Device that owns the tensor."""

    @staticmethod
    def __new__(
        cls: type[PretendedTensor], plain: Tensor, runner: Runner, known: Tensor | None = None
    ) -> PretendedTensor:
        """Return a tensor over ``plain`` and its storage."""
        tensor: PretendedTensor = Tensor._make_subclass(cls, plain)  # type: ignore[assignment]
        tensor.plain = plain
        tensor.known = known
        tensor.runner = runner
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        own = args[0] if args else None
        if not isinstance(own, PretendedTensor):
            tensors = find_tensors(args, kwargs or {})
            own = next(tensor for tensor in tensors if isinstance(tensor, PretendedTensor))
        return own.runner.run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretended device."""
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True, as for every tensor of a CUDA device."""
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """False."""
        return False

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False."""
        return False

    def get_device(self) -> int:
        """Return the number of the device."""
        return 0

    def data_ptr(self) -> int:
        """Return the address of the first element, which nothing can read."""
        return self.runner.address(self)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """See ``torch.Tensor.to``. What is there already in this dtype is not copied."""
        if args and isinstance(args[0], Tensor):
            return self.to(args[0].device, args[0].dtype, *args[1:], **kwargs)
        copy = kwargs.pop("copy", False)
        parse: Any = torch._C
        device, dtype, non_blocking, layout = parse._nn._parse_to(*args, **kwargs)
        stays = device is None or device.type == "cuda"
        if stays and not copy and dtype in (None, self.dtype) and layout is None:
            return self
        options: dict[str, Any] = {"dtype": dtype or self.dtype, "copy": copy}
        if layout is not None:
            options["memory_format"] = layout
        if not stays:
            options |= {"device": device, "non_blocking": non_blocking}
        return super().to(**options)

    def cuda(self, *_args: Any, **_kwargs: Any) -> PretendedTensor:
        """Return this tensor, which is there already."""
        return self

    def tolist(self) -> Any:
        """Return the numbers as lists, after a copy to the host."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError, as for every tensor of a CUDA device; with ``force``, copy to the
        host."""
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy: use Tensor.cpu()")
        return self.detach().cpu().numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Tensor = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def __repr__(self, **_kwargs: Any) -> str:
        return f"PretendedTensor({tuple(self.shape)}, {self.dtype})"


def find_tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operation and in the lists among them."""
    found: list[Tensor] = []
    for value in chain(args, kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += find_tensors(value, {})
    return found


def has_pretended(values: Iterable[Any]) -> bool:
    """Return whether there is a pretended tensor among the arguments of an operation, or in the
    lists among them."""
    for value in values:
        if isinstance(value, PretendedTensor):
            return True
        if isinstance(value, (list, tuple)) and has_pretended(value):
            return True
    return False


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments of an operation with ``function`` applied to each, also in lists."""
    if isinstance(value, (list, tuple)):
        return type(value)(map_values(function, each) for each in value)
    if isinstance(value, dict):
        return {name: map_values(function, each) for name, each in value.items()}
    return function(value)
