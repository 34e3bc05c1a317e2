"""Reads the bodies of the client ``tinker`` and writes the answers that it reads; the forms are the client's own.

``forward_backward`` comes as the client's protobuf message (field numbers and types are those of its package), all else
as JSON of its request types. Answers of ``forward_backward`` and ``sample`` are protobuf, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from realhf.base.installation import needs

needs("tinker", "tinker")
types: Any = import_module("tinker.types")
pb: Any = import_module("tinker.proto.tinker_public_pb2")

PROTOBUF, JSON = "application/x-protobuf", "application/json"
TARGETS = "target_tokens"
_DTYPES = {pb.DTYPE_FLOAT32: np.dtype(np.float32), pb.DTYPE_INT64: np.dtype(np.int64)}


class BadRequest(ValueError):
    """A request that cannot be carried out as it is; its text is for the person who wrote it."""


@dataclass(frozen=True)
class Datum:
    """One sequence to compute: ``tokens`` i64 (n,), ``targets`` i64 (n,) or (n, K), and what the loss gets, f32 of the
    same shape."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Pass:
    """A request to go forward, and backward unless ``forward_only``."""

    model: str
    seq: int
    forward_only: bool
    loss: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    data: Sequence[Datum] = ()


def read_head(body: bytes) -> Pass:
    """Return what the body of ``forward_backward`` says of itself, without its data. Raises BadRequest."""
    return _head(_message(body))


def read_pass(body: bytes, *, vocabulary: int, longest: int) -> Pass:
    """Return the whole request. Raises BadRequest, which names the datum, for tokens outside of the vocabulary, a
    sequence longer than ``longest``, tensors of other shapes than the tokens, and numbers that are not finite."""
    message = _message(body)
    head = _head(message)
    data = []
    for number, datum in enumerate(message.data):
        try:
            data.append(_datum(datum, vocabulary, longest))
        except BadRequest as error:
            raise BadRequest(f"datum {number}: {error}") from None
    if not data:
        raise BadRequest("data: there is no datum")
    return Pass(head.model, head.seq, head.forward_only, head.loss, head.config, data)


def _message(body: bytes) -> Any:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's own error has no public home in every version
        raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from None
    return message


def _head(message: Any) -> Pass:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Pass(message.model_id, message.seq_id, message.forward_only, message.loss_fn, config)


def _datum(message: Any, vocabulary: int, longest: int) -> Datum:
    parts = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise BadRequest(f"model_input has a chunk of the kind {kind}; this server takes tokens only")
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype(np.int32), "model_input"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
    check_tokens(tokens, vocabulary, longest)
    given = {name: _tensor(tensor, name) for name, tensor in message.loss_fn_inputs.items()}
    targets = given.pop(TARGETS, None)
    if targets is None:
        raise BadRequest(f"{TARGETS} are missing")
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise BadRequest(f"{TARGETS} have the shape {targets.shape}, for {len(tokens)} tokens of model_input")
    targets = targets.astype(np.int64)
    if targets.min() < 0 or targets.max() >= vocabulary:
        raise BadRequest(f"{TARGETS} must be from 0 to {vocabulary - 1}, got {targets.min()} to {targets.max()}")
    for name, values in given.items():
        if values.shape != targets.shape:
            raise BadRequest(f"{name} has the shape {values.shape}, {TARGETS} {targets.shape}")
        if not np.isfinite(values).all():
            raise BadRequest(f"{name} has numbers that are not finite")
    return Datum(tokens, targets, {name: values.astype(np.float32) for name, values in given.items()})


def check_tokens(tokens: np.ndarray, vocabulary: int, longest: int) -> None:
    """Raise BadRequest for no tokens, too many of them, or one that the model has not."""
    if not len(tokens):
        raise BadRequest("there are no tokens")
    if len(tokens) > longest:
        raise BadRequest(f"{len(tokens)} tokens; the longest sequence here has {longest}")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise BadRequest(f"tokens must be from 0 to {vocabulary - 1}, got {tokens.min()} to {tokens.max()}")


def _numbers(raw: bytes, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise BadRequest(f"{name} has {len(raw)} bytes, which are no whole {dtype.name}")
    return np.frombuffer(raw, dtype=dtype)


_MOST_CELLS = 1 << 26
"""Cells of a dense tensor that a sparse one may stand for."""


def _tensor(message: Any, name: str) -> np.ndarray:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BadRequest(f"{name} has no element type that is carried: float32 and int64 are")
    shape = tuple(message.shape)
    if message.HasField("sparse_csr"):
        return _dense(message.sparse_csr, dtype, shape, name)
    values = _numbers(message.dense, dtype, name)
    if not shape:
        return values
    if any(size < 0 for size in shape) or int(np.prod(shape, dtype=object)) != values.size:
        raise BadRequest(f"{name} has {values.size} numbers, and says the shape {shape}")
    return values.reshape(shape)


def _dense(csr: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> np.ndarray:
    """Spread a sparse tensor; the client leaves out zeros."""
    values = _numbers(csr.values, dtype, name)
    rows = _numbers(csr.crow_indices, np.dtype(np.int64), name)
    columns = _numbers(csr.col_indices, np.dtype(np.int64), name)
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > _MOST_CELLS or len(rows) != shape[0] + 1:
        raise BadRequest(f"{name}: a sparse tensor of the shape {shape} does not fit its {len(rows)} row pointers")
    counts = np.diff(rows)
    if rows[0] != 0 or rows[-1] != len(values) or len(columns) != len(values) or (counts < 0).any():
        raise BadRequest(f"{name}: the row pointers of the sparse tensor do not cover its {len(values)} numbers")
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise BadRequest(f"{name}: a column of the sparse tensor is outside of its shape {shape}")
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


# ---- answers


def pass_answer(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Write a ``ForwardBackwardOutput``: of each datum the log-probabilities of its targets, f32 (n,) or (n, K)."""
    answer = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    by_width: list[tuple[tuple[int, ...], list[np.ndarray]]] = []
    for values in logprobs:  # A record holds data of one trailing shape, and their order counts.
        if not by_width or by_width[-1][0] != values.shape[1:]:
            by_width.append((values.shape[1:], []))
        by_width[-1][1].append(values)
    for trailing, members in by_width:
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(members))
        raw = [np.ascontiguousarray(values, dtype=np.float32).tobytes() for values in members]
        batched = record.fields["logprobs"]
        batched.data, batched.dtype = b"".join(raw), pb.DTYPE_FLOAT32
        batched.offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64).tobytes()
        batched.trailing_shape.extend(trailing)
    return answer.SerializeToString()


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens of some positions: ``tokens`` i32 and ``logprobs`` f32, (n, k) each. Rows without any have
    the client's marks, token 0 and log-probability -99999."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """One sequence: tokens, log-probabilities, and why it ended (``stop`` or ``length``)."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: str
    top: TopK | None = None


@dataclass(frozen=True)
class Scored:
    """What is known of a prompt: log-probabilities f32 (n,), not a number where they were not asked for; the likeliest
    tokens; log-probabilities of given tokens, f32 (n - 1, K)."""

    logprobs: np.ndarray | None = None
    top: TopK | None = None
    targets: np.ndarray | None = None


def sample_answer(sequences: Sequence[Sampled], prompt: Scored, reused_tokens: int) -> bytes:
    """Write a ``SampleResponse``."""
    answer = pb.SampleResponse(prompt_cache_hit_tokens=reused_tokens)
    for each in sequences:
        reason = pb.STOP_REASON_STOP if each.reason == "stop" else pb.STOP_REASON_LENGTH
        sequence = answer.sequences.add(
            stop_reason=reason,
            tokens=np.asarray(each.tokens, dtype=np.int32).tobytes(),
            logprobs=np.asarray(each.logprobs, dtype=np.float32).tobytes(),
        )
        if each.top is not None:
            _write_top(sequence.topk_sampled_logprobs, each.top)
    if prompt.logprobs is not None:
        answer.prompt_logprobs = prompt.logprobs.astype(np.float32).tobytes()
    if prompt.top is not None:
        _write_top(answer.topk_prompt_logprobs, prompt.top)
    if prompt.targets is not None:
        tensor = answer.target_prompt_logprobs
        tensor.dense, tensor.dtype = prompt.targets.astype(np.float32).tobytes(), pb.DTYPE_FLOAT32
        tensor.shape.extend(prompt.targets.shape)
    return answer.SerializeToString()


def _write_top(message: Any, top: TopK) -> None:
    message.token_ids, message.logprobs = (
        top.tokens.astype(np.int32).tobytes(),
        top.logprobs.astype(np.float32).tobytes(),
    )
    message.length, message.k = top.tokens.shape


def read_json(kind: Any, body: bytes) -> Any:
    """Return a request of one of the client's types. Raises BadRequest that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValueError as error:
        found = getattr(error, "errors", None)
        first = found()[0] if callable(found) else {"loc": (), "msg": str(error)}  # pyright: ignore[reportIndexIssue]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where + ': ' if where else ''}{first['msg']}"[:500]) from None


def prompt_tokens(prompt: Any) -> np.ndarray:
    """Return the tokens of a ``ModelInput``, i64 (n,). Raises BadRequest for anything but tokens."""
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in prompt.chunks):
        raise BadRequest("the prompt has a chunk that is no text; this server takes tokens only")
    return np.fromiter((token for chunk in prompt.chunks for token in chunk.tokens), dtype=np.int64)
