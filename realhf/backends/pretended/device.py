"""A GPU that computes nothing, and refuses what a GPU refuses or does slowly.

Results have shapes and dtypes but no numbers, except few integers and masks, whose numbers are
computed on the host, so that results whose shape depends on them have the right one. An unknown
number reads as ``UNKNOWN`` (float), 0 or True on the host, which the product's comparisons of a
kernel or a layout with its reference pass.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from realhf.backends.pretended.source_lines import calling_line
from realhf.backends.pretended.tensor import CUDA, PretendedTensor, find_tensors, map_values

aten = torch.ops.aten
UNKNOWN = 1e-6
"""What a floating-point number of the device reads as on the host."""
_MAX_KNOWN = 1 << 16
"""Maximum number of elements of a tensor whose numbers are computed."""
_BLOCK_BYTES = 512
"""Size to which torch's allocator rounds."""
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")
"""Names of matrix products, whose last two tensors are the factors."""
_ATTENTION = "_scaled_dot_product_efficient_attention"
"""How the name of attention begins, whose first two tensors are factors of a product."""


class DevicesMixed(RuntimeError):
    """Error: an operation got tensors of the device and of the host."""


class DtypesMixed(RuntimeError):
    """Error: a matrix product got factors of two dtypes."""


class WideProduct(RuntimeError):
    """Error: a matrix product of fp32 factors where only narrower ones are expected."""


class MemoryKept(RuntimeError):
    """Error: what a step allocated is still in use after it."""


class TooManySyncs(RuntimeError):
    """Error: a micro-batch waits for the device more often than was written down."""


@dataclass(frozen=True)
class StepLimits:
    """What a pretended device refuses besides what no device can do."""

    fp32_products: bool = True
    """Whether matrix products of fp32 factors are allowed."""
    syncs: int | None = None
    """Maximum number of times that the host waits for the device in one micro-batch; None for no
    limit. Those after the last micro-batch of a step count as its own."""
    kept_bytes: int | None = None
    """Maximum of the memory, in bytes, that is allocated under these limits and still in use after
    them; None for no limit."""


@dataclass(frozen=True)
class GPUProperties:
    """Properties of a GPU, as ``torch.cuda.get_device_properties`` returns them."""

    name: str = "NVIDIA H100 80GB HBM3"
    """Name of the product."""
    total_memory: int = 80 << 30
    """Memory in bytes."""
    major: int = 9
    """Compute capability, before the dot."""
    minor: int = 0
    """Compute capability, after the dot."""
    multi_processor_count: int = 132
    """Number of multiprocessors."""


class PretendedDevice:
    """A pretended GPU. Use it inside ``pretend_gpu``.

    ``operations`` counts operations by name, ``syncs`` the waits for the device by what waited and
    line, ``uploads`` the copies from the host by line, and ``fp32_products`` the matrix products of
    fp32 factors by line. ``live_bytes`` is the memory in use, ``peak_bytes`` its maximum.
    ``micro_batches`` has the waits of each micro-batch, ``left`` the bytes by line that each of
    them but the last had allocated and still held when the next one began. ``refused`` has the
    texts of all DevicesMixed, DtypesMixed and RuntimeErrors of kernels whose results are remembered,
    also of those that the product took for a model that it cannot run.
    """

    def __init__(self, properties: GPUProperties | None = None) -> None:
        self.properties = properties or GPUProperties()
        self.operations: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.fp32_products: Counter[str] = Counter()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.micro_batches: list[Counter[str]] = []
        self.left: list[Counter[str]] = []
        self.refused: list[str] = []
        self._limits = StepLimits()
        self._sizes: dict[int, int] = {}
        self._addresses: dict[int, int] = {}
        self._origins: dict[int, _Origin] = {}
        self._n_allocations = 0
        self._live_by_line: Counter[str] = Counter()
        self._peak_by_line: Counter[str] = Counter()
        self._rises = True
        self._last_mark = 0
        self._next_address = _BLOCK_BYTES
        self._unknown: set[int] = set()
        self._lock = threading.RLock()
        self._handlers: dict[int, Callable[..., Any]] = {
            id(aten._local_scalar_dense.default): self._read_number,
            id(aten.equal.default): self._compare,
            id(aten._to_copy.default): self._convert,
            id(aten.copy_.default): self._copy,
            id(aten.nonzero.default): self._find_nonzero,
            id(aten.index.Tensor): self._index,
            id(aten.index_put_.default): self._index_put,
            id(aten.index_put.default): self._index_put,
            id(aten.masked_select.default): lambda func, tensor, mask: self._index(
                aten.index.Tensor, tensor, [mask]
            ),
        }

    def pass_through(self, operation: Any) -> None:
        """Have an operation return its argument, where torch's meta kernel would copy it."""
        self._handlers[id(operation)] = lambda _, tensor: tensor

    # ---- limits

    @contextlib.contextmanager
    def limit(self, limits: StepLimits) -> Iterator[None]:
        """Context manager in which the device refuses what ``limits`` say. Micro-batches are
        counted from its start.

        Raises MemoryKept at its end naming the lines that allocated what is kept.
        """
        before = self._limits
        mark = self.mark()
        self._limits = limits
        self.micro_batches = []
        self.left = []
        try:
            yield
        finally:
            self._limits = before
        kept = self.allocated_since(mark)
        if limits.kept_bytes is not None and kept.total() > limits.kept_bytes:
            lines = ", ".join(f"{size} at {line}" for line, size in kept.most_common())
            raise MemoryKept(
                f"more than {limits.kept_bytes} bytes of a step are in use after it: {lines}"
            )

    def watch(self, model: Any) -> RemovableHandle:
        """Count a micro-batch at each forward pass of the model's decoder, until the result is
        removed."""
        return model.get_decoder().register_forward_pre_hook(lambda *_: self._begin_micro_batch())

    def _begin_micro_batch(self) -> None:
        if self.micro_batches:
            self.left.append(self.allocated_since(self._last_mark))
        self._last_mark = self.mark()
        self.micro_batches.append(Counter())

    # ---- memory

    def place(self, model: nn.Module) -> None:
        """Move a module's parameters and buffers, of the host or of torch's meta device, to this
        device. Tied ones stay one tensor."""
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            tables: list[Any] = [module._parameters, module._buffers]
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in moved:
                        here = self.allocate(tensor.detach().to("meta"))
                        if isinstance(tensor, nn.Parameter):
                            here = nn.Parameter(here, tensor.requires_grad)
                        moved[id(tensor)] = (tensor, here)
                    table[name] = moved[id(tensor)][1]

    def allocate(self, plain: Tensor, known: Tensor | None = None) -> PretendedTensor:
        """Return a tensor of this device over a meta tensor, and count its storage if it is new."""
        if known is not None and not _can_be_known(known):
            known = None
        storage = plain.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key not in self._sizes:
                size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
                line = calling_line()
                self._n_allocations += 1
                self._sizes[key] = size
                self._origins[key] = _Origin(self._n_allocations, line)
                self._addresses[key] = self._next_address
                self._next_address += max(size, _BLOCK_BYTES)
                self._add(key, size)
                weakref.finalize(storage, self._free, key)
        return PretendedTensor(plain, self, known)

    def address(self, tensor: PretendedTensor) -> int:
        """Return a number for the beginning of a tensor, as ``Tensor.data_ptr`` does: tensors
        overlap only if they share a storage."""
        start = self._addresses[tensor.untyped_storage()._cdata]
        return start + int(tensor.storage_offset()) * tensor.element_size()

    def _free(self, key: int) -> None:
        with self._lock:
            if self._rises:
                self._note_peak()
            size = self._sizes.pop(key)
            self._addresses.pop(key)
            self._live_by_line[self._origins.pop(key).line] -= size
            self.live_bytes -= size
            self._unknown.discard(key)

    def count_resized(self, storage: torch.UntypedStorage) -> None:
        """Count the memory of a storage anew, whose size has changed; one of another device does
        not count."""
        key = storage._cdata
        with self._lock:
            if key not in self._sizes:
                return
            size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
            added = size - self._sizes[key]
            if added < 0 and self._rises:
                self._note_peak()
            self._sizes[key] = size
            self._add(key, added)

    def _add(self, key: int, nbytes: int) -> None:
        """Count memory of a storage that is in use from now on, or not any more if ``nbytes`` is
        negative."""
        self._live_by_line[self._origins[key].line] += nbytes
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self._rises = True

    def mark(self) -> int:
        """Return a number for the present moment, for ``allocated_since``."""
        return self._n_allocations

    def allocated_since(self, mark: int, besides: Iterable[Tensor] = ()) -> Counter[str]:
        """Return the bytes by line that were allocated after the moment of ``mark`` and are still
        in use, without those of the tensors ``besides``."""
        found: Counter[str] = Counter()
        known = {tensor.untyped_storage()._cdata for tensor in besides}
        with self._lock:
            for key, origin in reversed(self._origins.items()):
                if origin.number <= mark:
                    break
                if key not in known:
                    found[origin.line] += self._sizes[key]
        return found

    def reset_peak(self) -> None:
        """Measure the peak from the memory in use now."""
        with self._lock:
            self.peak_bytes = self.live_bytes
            self._rises = True

    @property
    def peak_by_line(self) -> Counter[str]:
        """Bytes in use at the peak, by the line that allocated them."""
        with self._lock:
            if self._rises:
                self._note_peak()
            return +self._peak_by_line

    def _note_peak(self) -> None:
        """Note what is in use, which is the most so far: something is about to be freed."""
        self._rises = False
        self._peak_by_line = self._live_by_line.copy()

    # ---- operations

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with tensors of this device, or which creates one.

        Raises DevicesMixed, DtypesMixed, WideProduct or TooManySyncs naming the line of the
        product.
        """
        schema = _schema_of(func)
        if schema.is_composite:
            # In inference mode torch does not take these operations apart by itself.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.operations[schema.name] += 1
        handler = self._handlers.get(id(func))
        if handler is not None:
            return handler(func, *args, **kwargs)
        tensors = find_tensors(args, kwargs)
        # The kernel of a fused optimizer reads the numbers of steps, which are scalars, in place.
        self._refuse_mixed(func, tensors, scalars=schema.is_fused_optimizer)
        self._refuse_wide(func, args)
        return self._compute(func, args, kwargs, tensors)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Any = None) -> Any:
        """Return the result of an operation by its meta kernel, with known numbers if all of its
        inputs have them. ``tensors`` are those of the arguments; None to look for them."""
        if _schema_of(func).is_fused_optimizer:
            return None  # in place, and without a meta kernel
        if tensors is None:
            tensors = find_tensors(args, kwargs)
        inputs = [t for t in tensors if isinstance(t, PretendedTensor)]
        result = self._run_meta(func, args, kwargs, tensors)
        known = self._compute_known(func, args, kwargs, inputs)
        if known is None:
            self._forget_numbers(func, args, kwargs)
        by_plain = {id(tensor.plain): tensor for tensor in inputs}
        if isinstance(result, (tuple, list)):
            numbers = [None] * len(result) if known is None else known
            pairs = zip(result, numbers, strict=True)
            return type(result)(self._wrap(value, number, by_plain) for value, number in pairs)
        return self._wrap(result, known, by_plain)

    def _run_meta(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the result of an operation's meta kernel, which is remembered: many kernels are
        in Python and slow."""
        if not _schema_of(func).is_repeatable:
            return func(*map_values(_to_plain, args), **map_values(_to_plain, kwargs))
        key = (id(func), _describe(args), _describe(tuple(kwargs.items())))
        remembered = _meta_results.get(key)
        if remembered is not None:
            return remembered.repeat(tensors)
        try:
            result = func(*map_values(_to_plain, args), **map_values(_to_plain, kwargs))
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise self._refuse(RuntimeError, str(error)) from None
        if key not in _meta_results:
            if len(_meta_results) >= _MAX_META_RESULTS:
                _meta_results.clear()
            _meta_results[key] = _MetaResult.of(result, tensors)
        return result

    def _wrap(self, value: Any, known: Any, by_plain: Mapping[int, PretendedTensor]) -> Any:
        """Return a result of a meta kernel as a tensor of this device: an input that was written in
        place, or a new one."""
        if not isinstance(value, Tensor):
            return value
        return by_plain[id(value)] if id(value) in by_plain else self.allocate(value, known)

    def _compute_known(
        self, func: Any, args: Any, kwargs: Any, inputs: Sequence[PretendedTensor]
    ) -> Any:
        """Return the result computed on the host, or None if not all numbers are known."""
        if any(self._numbers(tensor) is None for tensor in inputs):
            return None
        if not inputs and not _creates_few_integers(func, args, kwargs):
            return None
        to_host = lambda value: (
            value.known
            if isinstance(value, PretendedTensor)
            else torch.device("cpu")
            if isinstance(value, torch.device)
            else value
        )
        return func(*map_values(to_host, args), **map_values(to_host, kwargs))

    def _numbers(self, tensor: Any) -> Tensor | None:
        """Return the known numbers of a tensor of either device, None if they are unknown."""
        if not isinstance(tensor, PretendedTensor):
            return tensor
        unknown = tensor.untyped_storage()._cdata in self._unknown
        return None if unknown else tensor.known

    def _forget_numbers(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note that what the operation writes in place has no known numbers any more."""
        for position, name in _schema_of(func).written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in find_tensors([value], {}):
                self._forget(tensor)

    def _forget(self, tensor: Any) -> None:
        if isinstance(tensor, PretendedTensor) and tensor.known is not None:
            self._unknown.add(tensor.untyped_storage()._cdata)

    # ---- what a device refuses

    def _refuse_mixed(self, func: Any, tensors: Sequence[Tensor], scalars: bool = False) -> None:
        """Raise DevicesMixed for tensors of both devices. Without ``scalars``, a single number of
        the host is allowed, as in torch."""
        host = [each for each in tensors if _is_of_host(each) and (scalars or each.ndim > 0)]
        if not host:
            return
        if here := [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]:
            raise self._refuse(
                DevicesMixed,
                f"{func} got tensors of cuda:0 {[tuple(t.shape) for t in here]} and of the CPU "
                f"{[tuple(t.shape) for t in host]}",
            )

    def _refuse(self, kind: type[RuntimeError], text: str) -> RuntimeError:
        """Note that an operation is refused, and return the error, which names the line."""
        self.refused.append(f"{text}, at {calling_line()}")
        return kind(self.refused[-1])

    def _refuse_wide(self, func: Any, args: Sequence[Any]) -> None:
        """Count matrix products of fp32 factors, and raise WideProduct if they are not allowed."""
        schema = _schema_of(func)
        if not schema.is_product:
            return
        tensors = [value for value in args if isinstance(value, Tensor)]
        factors = tensors[:2] if schema.is_attention else tensors[-2:]
        if factors[0].dtype != factors[1].dtype:
            dtypes = " and ".join(str(factor.dtype) for factor in factors)
            raise self._refuse(DtypesMixed, f"a matrix product of {dtypes} factors")
        if factors[0].dtype != torch.float32:
            return
        if not schema.is_attention and 1 in (*factors[0].shape[-2:], *factors[1].shape[-2:]):
            return  # an outer product or a product with a vector: as many reads as operations
        line = calling_line()
        self.fp32_products[line] += 1
        if not self._limits.fp32_products:
            shapes = " x ".join(str(tuple(factor.shape)) for factor in factors)
            raise WideProduct(f"a matrix product of fp32 factors, {shapes}, at {line}")

    def _sync(self, kind: str) -> None:
        """Count that the host waits for the device; raise TooManySyncs beyond the limit."""
        line = f"{kind} at {calling_line()}"
        self.syncs[line] += 1
        if not self.micro_batches:
            return
        current = self.micro_batches[-1]
        current[line] += 1
        limit = self._limits.syncs
        if limit is not None and current.total() > limit:
            others = ", ".join(f"{n} x {place}" for place, n in current.items())
            raise TooManySyncs(f"more than {limit} waits for the GPU in a micro-batch: {others}")

    # ---- operations between host and device

    def _read_number(self, func: Any, tensor: Tensor) -> Any:
        self._sync("item")
        known = self._numbers(tensor)
        if known is not None:
            return func(known)
        if tensor.dtype == torch.bool:
            return True
        return UNKNOWN if tensor.dtype.is_floating_point else 0

    def _compare(self, func: Any, tensor: Tensor, other: Tensor) -> bool:
        self._refuse_mixed(func, (tensor, other))
        self._sync("equal")
        return tensor.shape == other.shape

    def _convert(self, func: Any, tensor: Tensor, **kwargs: Any) -> Tensor:
        """Copy a tensor to another device or dtype."""
        to_device = torch.device(kwargs.get("device") or tensor.device)
        dtype = kwargs.get("dtype") or tensor.dtype
        if to_device.type == "cpu" and isinstance(tensor, PretendedTensor):
            self._sync("copy to the host")
            known = self._numbers(tensor)
            return (
                torch.zeros(tensor.shape, dtype=dtype)
                if known is None
                else known.to(dtype, copy=True)
            )
        if _is_of_host(tensor):
            self.uploads[calling_line()] += 1
            known = tensor.to(dtype, copy=True) if tensor.numel() <= _MAX_KNOWN else None
            return self.allocate(torch.empty_like(tensor, dtype=dtype, device="meta"), known)
        return self._compute(func, (tensor,), kwargs)

    def _copy(
        self, func: Any, target: Tensor, source: Tensor, non_blocking: bool = False
    ) -> Tensor:
        """Copy a tensor into another one, of any device."""
        known = self._numbers(source)
        if not isinstance(target, PretendedTensor):
            self._sync("copy to the host")
            return target.zero_() if known is None else target.copy_(known)
        if target.shape != torch.broadcast_shapes(target.shape, source.shape):
            raise RuntimeError(
                f"copy_ of {tuple(source.shape)} into {tuple(target.shape)}, at {calling_line()}"
            )
        if _is_of_host(source):
            self.uploads[calling_line()] += 1
        if known is not None and self._numbers(target) is not None:
            func(target.known, known)
        else:
            self._forget(target)
        return target

    # ---- operations whose results have a shape that depends on numbers

    def _find_nonzero(self, func: Any, tensor: Tensor) -> Tensor:
        self._sync("nonzero")
        known = self._numbers(tensor)
        if known is not None:
            found = func(known)
            return self.allocate(found.to("meta"), found)
        shape = (tensor.numel(), tensor.ndim)
        return self.allocate(torch.empty(shape, dtype=torch.int64, device="meta"))

    def _index(self, func: Any, tensor: Tensor, indices: Sequence[Any]) -> Any:
        where = self._list_indices(func, tensor, indices)
        return self._compute(func, (tensor, where), {})

    def _index_put(
        self, func: Any, tensor: Tensor, indices: Sequence[Any], values: Tensor, *args: Any
    ) -> Any:
        where = self._list_indices(func, tensor, indices)
        self._refuse_mixed(func, (tensor, values))
        if values.numel() != 1 and any(_is_mask(index) for index in indices):
            # the meta kernel cannot know how many values fit an unknown mask
            self._forget(tensor)
            return tensor
        return self._compute(func, (tensor, where, values, *args), {})

    def _list_indices(self, func: Any, tensor: Tensor, indices: Sequence[Any]) -> list[Any]:
        """Return indices as a meta kernel takes them: masks become lists of positions, and indices
        of the host are copied, which CUDA allows."""
        found: list[Any] = []
        for index in indices:
            if index is None:
                found.append(None)
                continue
            if isinstance(index, PretendedTensor) and not isinstance(tensor, PretendedTensor):
                self._refuse_mixed(func, (tensor, index))
            if isinstance(index, PretendedTensor) and _is_mask(index):
                found += self._find_nonzero(aten.nonzero.default, index).unbind(1)
                continue
            positions = index.nonzero().unbind(1) if _is_mask(index) else [index]
            for each in positions:
                here = isinstance(each, PretendedTensor)
                found.append(each if here else self._convert(None, each, device=CUDA))
        return found


class _Origin(NamedTuple):
    """Where a storage of the device comes from."""

    number: int
    """How many storages there had been, this one included."""
    line: str
    """Line that allocated it."""


@dataclass(frozen=True)
class _MetaResult:
    """What a meta kernel returns for arguments of certain shapes and dtypes."""

    values: tuple[tuple[Any, Any, torch.dtype] | int | None, ...]
    """Shape, strides and dtype of each new tensor; the index of a tensor among the inputs; None
    for a value that is not there."""
    kind: type | None
    """List or tuple of the values; None for a single one."""

    @staticmethod
    def of(result: Any, tensors: Sequence[Tensor]) -> _MetaResult | None:
        """Return a description of ``result``; None if it cannot be built from one."""
        several = isinstance(result, (list, tuple))
        plain = [
            tensor.plain if isinstance(tensor, PretendedTensor) else None for tensor in tensors
        ]
        storages = {each.untyped_storage()._cdata for each in plain if each is not None}
        values: list[Any] = []
        for value in result if several else [result]:
            if value is None:
                values.append(None)
                continue
            if not isinstance(value, Tensor):
                return None
            index = next((i for i, each in enumerate(plain) if each is value), None)
            if index is not None:
                values.append(index)
                continue
            dense = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            storage = value.untyped_storage()
            shares = storage._cdata in storages or value.storage_offset()
            if shares or storage.nbytes() != dense.untyped_storage().nbytes():
                return None
            values.append((value.shape, value.stride(), value.dtype))
        return _MetaResult(tuple(values), type(result) if several else None)

    def repeat(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result for other arguments of the same shapes and dtypes."""
        made: list[Any] = []
        for value in self.values:
            if isinstance(value, tuple):
                shape, stride, dtype = value
                made.append(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
            else:
                made.append(None if value is None else _to_plain(tensors[value]))
        return made[0] if self.kind is None else self.kind(made)


_meta_results: dict[Any, _MetaResult | None] = {}
"""Results of meta kernels, which are the same for every device, by what they depend on; None for
those that cannot be built from a description."""
_MAX_META_RESULTS = 1 << 16
"""Maximum number of them."""


def _describe(value: Any) -> Any:
    """Return what the result of a meta kernel depends on, hashable."""
    if isinstance(value, Tensor):
        return (type(value), value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    return (type(value), value)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_of_host(tensor: Tensor) -> bool:
    return not isinstance(tensor, PretendedTensor) and not tensor.is_meta


@dataclass(frozen=True)
class _Schema:
    """What is asked about an operation whenever it runs."""

    name: str
    """Its name."""
    is_composite: bool
    """Whether it is made of other operations."""
    is_fused_optimizer: bool
    """Whether it is a step of an optimizer in one kernel."""
    is_product: bool
    """Whether it multiplies matrices."""
    is_attention: bool
    """Whether it is attention."""
    is_repeatable: bool
    """Whether its results are new tensors, or inputs written in place, and no views."""
    written: tuple[tuple[int, str], ...]
    """Position and name of each argument that is written in place."""


_schemas: dict[int, _Schema] = {}
"""By identity of the operation: torch computes their hashes in Python."""


def is_composite(func: Any) -> bool:
    """Return whether an operation is made of other operations."""
    return _schema_of(func).is_composite


def _schema_of(func: Any) -> _Schema:
    schema = _schemas.get(id(func))
    if schema is None:
        schema = _schemas[id(func)] = _read_schema(func)
    return schema


def _read_schema(func: Any) -> _Schema:
    name = func._schema.name.removeprefix("aten::")
    written = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    attention = name.startswith(_ATTENTION)
    return _Schema(
        str(func),
        composite,
        name.startswith("_fused_adam"),
        attention or name in _PRODUCTS,
        attention,
        all(
            result.alias_info is None or result.alias_info.is_write
            for result in func._schema.returns
        ),
        tuple(written),
    )


def _can_be_known(known: Tensor) -> bool:
    return not known.dtype.is_floating_point and known.numel() <= _MAX_KNOWN


def _creates_few_integers(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation without tensor inputs creates integers or a mask."""
    made = func(*map_values(_to_plain, args), **map_values(_to_plain, kwargs))
    return isinstance(made, Tensor) and _can_be_known(made)


def _to_plain(value: Any) -> Any:
    """Return an argument as torch's meta kernels take it."""
    if isinstance(value, PretendedTensor):
        return value.plain
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    return value
