"""Forward passes of Llama and Qwen, and sampling, in float32 on a CPU, by one call of a library that
the machine's compiler builds at first use (``compiled_decode.c``).

In a model of a million parameters, a step of decoding is some hundred small operations, each of
which costs more than its arithmetic. The library computes all of them in one call, with the
parameters where they are, so that weights that are copied into the model, or replaced, take effect.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.backends.embedded.compute_threads import find_libgomp
from realhf.backends.embedded.forward_pass import (
    Decoding,
    FastDecoder,
    PrefillPiece,
    find_deviation,
)
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.embedded.native_build import NativeBuildError, load_library

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("compiled_decode.c")
_CACHED_BYTES = 16 << 20
"""Maximum size of the parameters for which every thread computes some rows alone and reads all
parameters, which then stay in the cache. With larger ones, the threads share the columns of every
product, and wait for each other five times in a layer."""
_LONG_PIECE = 256
"""Tokens of a piece above which torch's products of large matrices are faster, with parameters above
``_CACHED_BYTES``. Measured with 135 million and 600 million parameters: at 2048 tokens, 0.7 and 0.5
times the time."""

_RUN = 64
"""Numbers of a sum in ``sample_rows`` (``RUN`` in the C source)."""


def _fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Return fields of a structure, all of the same type."""
    return [(name, kind) for name in names.split()]


# The structures of the same names in the C source, which describes them.
class _Layer(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "attention_norm mlp_norm query_norm key_norm"),
        *_fields(c_void_p, "query key value out gate up down"),
        *_fields(c_void_p, "query_bias key_bias value_bias out_bias gate_bias up_bias down_bias"),
        *_fields(c_void_p, "keys values"),
        *_fields(c_float, "attention_eps mlp_eps query_eps key_eps scale unused"),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "layers hidden intermediate heads kv_heads dim vocabulary"),
        *_fields(c_int64, "embeddings rows columns"),
        *_fields(c_void_p, "embedding norm head head_bias cosine sine layer"),
        *_fields(c_float, "norm_eps unused"),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "tokens decoding outputs"),
        *_fields(c_void_p, "token row column start output cached"),
        *_fields(c_int64, "cached_rows cached_columns width"),
        *_fields(c_void_p, "blocks logits workspace"),
        *_fields(c_int64, "by_rows threads"),
        *_fields(c_void_p, "parallel thread_number thread_count barrier"),
    )


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    try:
        library = load_library(_SOURCE)
    except NativeBuildError as error:
        return str(error)
    library.run_pass.argtypes = (c_void_p, c_void_p)
    library.run_pass.restype = c_int64
    library.workspace_floats.argtypes = (c_void_p, c_void_p)
    library.workspace_floats.restype = c_int64
    library.sample_rows.argtypes = (
        c_void_p, c_int64, c_int64, c_float, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p
    )  # fmt: skip
    library.sample_rows.restype = None
    return library


@dataclass(frozen=True)
class _Team:
    """Functions of the OpenMP library whose threads torch computes with."""

    parallel: int
    """Address of the function that starts a team."""
    thread_number: int
    """Address of the function that returns a thread's number in the team."""
    thread_count: int
    """Address of the function that returns the number of threads of the team."""
    barrier: int
    """Address of the function that waits for all threads of the team."""


def _torch_library() -> ctypes.CDLL | None:
    """Return torch's library, where names are looked up in the OpenMP library that it is linked to,
    even if the process has loaded another one; None if it is elsewhere."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return None


@functools.cache
def _find_team() -> _Team | None:
    """Return the functions of torch's OpenMP library, None if it has none of libgomp's names."""
    library = _torch_library() or find_libgomp()
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
    if library is None or not all(hasattr(library, name) for name in names):
        return None
    return _Team(*(ctypes.cast(getattr(library, name), c_void_p).value or 0 for name in names))


class CompiledDecoder:
    """Equivalent of ``FastDecoder`` in one call per pass.

    Every number is computed by the same operations whatever the other rows are, so logits do not
    depend, bit for bit, on which rows are decoded together, on the number of threads, nor on the
    pieces in which a row is prefilled. Of models whose parameters exceed ``_CACHED_BYTES``,
    ``FastDecoder`` computes each piece of more than ``_LONG_PIECE`` tokens, by itself: it depends on
    its length and on the number of threads, up to rounding, but not on the other rows.
    """

    def __init__(self, model: Any, cache: RowCache, library: ctypes.CDLL) -> None:
        self._fast = FastDecoder(model, cache)
        self._cache = cache
        self._library = library
        self._team = _find_team()
        config = model.config
        layers = model.model.layers[: config.num_hidden_layers]
        self._embedding = model.model.embed_tokens._parameters
        self._head = model.lm_head._parameters
        self._gate = layers[0].mlp.gate_proj._parameters
        self._layers = (_Layer * len(layers))()
        self._model = _Model(layers=len(layers), layer=ctypes.addressof(self._layers))
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._dim: int = layers[0].self_attn.head_dim
        self._model.heads = self._heads
        self._model.kv_heads = self._kv_heads
        self._model.dim = self._dim
        # Structure, field, and the dictionary and name of the parameter whose address it holds.
        self._slots: list[tuple[Any, str, dict[str, Any], str]] = []
        # The library reads parameters of these shapes.
        self._shapes: list[torch.Size] = []
        for layer, target in zip(layers, self._layers, strict=True):
            self._add_layer(layer, target)
        self._add_norm(model.model.norm, self._model, "norm", "norm_eps")
        self._add(model.model.embed_tokens, self._model, "embedding")
        self._add(model.lm_head, self._model, "head")
        self._add(model.lm_head, self._model, "head_bias", "bias")
        self._addresses: list[int] = []
        self._is_supported = False
        self._is_small = False
        self._workspace = _empty(0)

    def _add_layer(self, layer: Any, target: Any) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        target.scale = attention.scaling
        self._add_norm(layer.input_layernorm, target, "attention_norm", "attention_eps")
        self._add_norm(layer.post_attention_layernorm, target, "mlp_norm", "mlp_eps")
        if hasattr(attention, "q_norm") and hasattr(attention, "k_norm"):
            self._add_norm(attention.q_norm, target, "query_norm", "query_eps")
            self._add_norm(attention.k_norm, target, "key_norm", "key_eps")
        projections = {
            "query": attention.q_proj,
            "key": attention.k_proj,
            "value": attention.v_proj,
            "out": attention.o_proj,
            "gate": mlp.gate_proj,
            "up": mlp.up_proj,
            "down": mlp.down_proj,
        }
        for name, module in projections.items():
            self._add(module, target, name)
            self._add(module, target, f"{name}_bias", "bias")

    def _add_norm(self, module: Any, target: Any, name: str, eps: str) -> None:
        setattr(target, eps, module.variance_epsilon)
        self._add(module, target, name)

    def _add(self, module: Any, target: Any, field: str, name: str = "weight") -> None:
        if module._parameters.get(name) is not None:
            self._slots.append((target, field, module._parameters, name))
            self._shapes.append(module._parameters[name].shape)

    def run(self, decoding: Decoding | None, pieces: Sequence[PrefillPiece]) -> Tensor:
        """See ``ModulePass.run``."""
        if not self._read_parameters() or not self._can_share():
            return self._fast.run(decoding, pieces)
        is_long = [not self._is_small and len(piece.tokens) > _LONG_PIECE for piece in pieces]
        if not any(is_long):
            return self._run(decoding, pieces)
        others = [piece for piece, long in zip(pieces, is_long, strict=True) if not long]
        n_decoding = 0 if decoding is None else len(decoding.rows)
        logits = _empty(n_decoding + len(pieces), self._model.vocabulary)
        if decoding is not None or others:
            places = [n_decoding + index for index, long in enumerate(is_long) if not long]
            logits[[*range(n_decoding), *places]] = self._run(decoding, others)
        for index, piece in enumerate(pieces):
            if is_long[index]:
                logits[n_decoding + index] = self._fast.run(None, [piece])[0]
        return logits

    def release(self) -> None:
        """Free the workspace, which has the size of the largest pass until then."""
        self._workspace = _empty(0)

    def _can_share(self) -> bool:
        """Return whether the library can use as many threads as torch. A small model needs one."""
        if self._team is not None or self._is_small or torch.get_num_threads() == 1:
            return True
        _warn_once(
            "generation on the CPU is about half as fast as compiled: torch's OpenMP library has no "
            "GOMP_parallel, so compiled code would use one thread"
        )
        return False

    def _run(self, decoding: Decoding | None, pieces: Sequence[PrefillPiece]) -> Tensor:
        rows = []
        columns = []
        tokens = []
        starts = []
        n_decoding = 0
        if decoding is not None:
            n_decoding = len(decoding.rows)
            rows.append(decoding.rows)
            columns.append(decoding.positions)
            tokens.append(decoding.tokens)
            starts.append(np.arange(n_decoding))
        at = n_decoding
        ends = [*range(n_decoding)]
        for piece in pieces:
            size = len(piece.tokens)
            rows.append(np.full(size, piece.row))
            columns.append(np.arange(piece.start, piece.end))
            tokens.append(piece.tokens)
            starts.append(np.full(size, at))
            at += size
            ends.append(at - 1)
        token, row, column, start = (_join(part) for part in (tokens, rows, columns, starts))
        output = np.array(ends)
        logits = _empty(len(ends), self._model.vocabulary)
        threads = torch.get_num_threads() if self._team is not None else 1
        by_rows = self._is_small and not pieces
        if by_rows:
            threads = max(1, min(threads, n_decoding // 2))
        cached = token if decoding is None else np.ascontiguousarray(decoding.cached, np.int64)
        blocks = np.empty((2, at), dtype=np.int64)
        call = _Pass(
            tokens=at,
            decoding=n_decoding,
            outputs=len(ends),
            token=token.ctypes.data,
            row=row.ctypes.data,
            column=column.ctypes.data,
            start=start.ctypes.data,
            output=output.ctypes.data,
            cached=cached.ctypes.data,
            cached_rows=len(cached),
            cached_columns=cached.shape[-1],
            width=min(int(column.max()) + 1, self._cache.columns),
            blocks=blocks.ctypes.data,
            logits=logits.data_ptr(),
            by_rows=by_rows,
            threads=threads,
        )
        if self._team is not None:
            call.parallel = self._team.parallel
            call.thread_number = self._team.thread_number
            call.thread_count = self._team.thread_count
            call.barrier = self._team.barrier
        self._point_to_cache()
        needed = self._library.workspace_floats(
            ctypes.addressof(self._model), ctypes.addressof(call)
        )
        if needed > len(self._workspace):
            self._workspace = _empty(needed)
        call.workspace = self._workspace.data_ptr()
        outside = self._library.run_pass(ctypes.addressof(self._model), ctypes.addressof(call))
        if outside >= 0:
            raise IndexError(
                f"token {token[outside]} at row {row[outside]}, column {column[outside]} is outside "
                f"the vocabulary of {self._model.embeddings} tokens or the cache of "
                f"{self._cache.rows} rows and {self._cache.columns} columns"
            )
        return logits

    def _point_to_cache(self) -> None:
        """Set the addresses of the cache and of the rotary tables, which move when it grows."""
        embedding = self._embedding["weight"]
        self._model.rows = self._cache.rows
        self._model.columns = self._cache.columns
        # The decoder keeps the tables, so their addresses stay valid.
        cosine, sine = self._fast.rotary_tables(embedding)
        self._model.cosine = cosine.data_ptr()
        self._model.sine = sine.data_ptr()
        for index, layer in enumerate(self._layers):
            keys, values = self._cache.storage(index, self._kv_heads, self._dim, embedding)
            layer.keys = keys.data_ptr()
            layer.values = values.data_ptr()

    def _read_parameters(self) -> bool:
        """Set the addresses of the parameters; return whether the library can read them."""
        addresses = [holder[name].data_ptr() for _, _, holder, name in self._slots]
        if addresses != self._addresses:
            self._addresses = addresses
            self._is_supported = self._set_parameters()
        return self._is_supported

    def _set_parameters(self) -> bool:
        parameters = [holder[name] for _, _, holder, name in self._slots]
        if not all(
            _is_readable(parameter) and parameter.shape == shape
            for parameter, shape in zip(parameters, self._shapes, strict=True)
        ):
            return False
        for (target, field, _, _), address in zip(self._slots, self._addresses, strict=True):
            setattr(target, field, address)
        size = sum({p.data_ptr(): p.nbytes for p in parameters}.values())
        self._is_small = size <= _CACHED_BYTES
        self._model.vocabulary, self._model.hidden = self._head["weight"].shape
        self._model.embeddings = len(self._embedding["weight"])
        self._model.intermediate = len(self._gate["weight"])
        return True


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts), np.int64)


def _empty(*shape: int) -> Tensor:
    """Return a tensor that the library writes to, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _is_readable(parameter: Tensor) -> bool:
    """Return whether the library can read a parameter where it is."""
    return (
        parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
    )


def build_compiled_decoder(model: Any, cache: RowCache) -> CompiledDecoder | None:
    """Return a compiled decoder for a model that ``FastDecoder`` supports, if its logits on a short
    test sequence equal the model's. Otherwise log the reason, once per process, and return None."""
    if not all(_is_readable(parameter) for parameter in model.parameters()):
        return None
    library = _load()
    reason = library if isinstance(library, str) else None
    if not isinstance(library, str):
        build = lambda cache: CompiledDecoder(model, cache, library)
        reason = find_deviation(model, build)
        if reason is None:
            return build(cache)
    _warn_once(f"generation on the CPU is about half as fast as compiled: {reason}")
    return None


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def sample_rows(
    logits: Tensor, uniform: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return sampled tokens, int64 (n,), and their log-probabilities, fp32 (n,), as
    ``sampling.sample_tokens`` does without truncation; None if the library cannot.

    Args:
        logits: (n, vocabulary).
        uniform: Random numbers in [0, 1), fp64 (n,).
        temperature: Sampling temperature, above 0.
    """
    if not _is_readable(logits):
        return None
    library = _load()
    if isinstance(library, str):
        return None
    n = len(logits)
    tokens = np.empty(n, dtype=np.int64)
    logprobs = np.empty(n, dtype=np.float32)
    uniform = np.ascontiguousarray(uniform, dtype=np.float64)
    numbers = np.empty(logits.shape[1], dtype=np.float32)
    sums = np.empty(logits.shape[1] // _RUN + 1, dtype=np.float64)
    library.sample_rows(
        logits.data_ptr(),
        n,
        logits.shape[1],
        temperature,
        uniform.ctypes.data,
        numbers.ctypes.data,
        sums.ctypes.data,
        tokens.ctypes.data,
        logprobs.ctypes.data,
    )
    return tokens, logprobs
