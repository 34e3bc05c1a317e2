"""Reads the bodies of the client ``tinker`` and writes the answers that it reads; the forms are the client's own.

``forward_backward`` comes as the client's protobuf message (field numbers and types are those of its package), all else
as JSON of its request types. Answers of ``forward_backward`` and ``sample`` are protobuf, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
    """Return what the body of ``forward_backward`` says of itself; its data are not looked at. Raises BadRequest."""
    kind = pb.ForwardBackwardRequest.DESCRIPTOR
    data, parts = kind.fields_by_name["data"].number, _Parts(body)
    return _head(_message(b"".join(body[a:b] for number, a, _, b in parts.fields(0, len(body)) if number != data)))


def read_number(beginning: bytes) -> tuple[str, int]:
    """Return model and number of ``forward_backward`` as far as they stand in the beginning of its body, before the
    data. Raises BadRequest."""
    data, end = pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number, 0
    with suppress(BadRequest):  # it ends within a field
        for number, _, _, after in _Parts(beginning).fields(0, len(beginning)):
            if number == data:
                break
            end = after
    head = _message(beginning[:end])
    return head.model_id, head.seq_id


_NUMBERED = re.compile(rb'"(model_id|seq_id)"\s*:\s*(?:"([^"\\]{1,200})"|(\d{1,10})(?=[\s,}]))')
_OVERLAP = 512
"""Bytes of one part of a body that are looked at again with the next: no field that is looked for is longer."""
_MOST_MODELS = 8
"""Largest number of models that a body may name: each is looked up."""


class NumberScan:
    """Finds the model and the number of a request in a JSON body, also in one that is unreadable, or too large to be
    kept. A quote within a JSON string is escaped, so that only a key looks like one."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self.seq: int | None = None
        self._rest = b""

    def feed(self, part: bytes) -> None:
        """Look at the next part of the body."""
        text = self._rest + part
        for found in _NUMBERED.finditer(text):
            name, model, number = found.groups()
            if name == b"model_id" and model is not None:
                named = model.decode(errors="replace")
                if named not in self.models and len(self.models) < _MOST_MODELS:
                    self.models.append(named)
            elif name == b"seq_id" and number is not None and self.seq is None:
                self.seq = int(number)
        self._rest = text[-_OVERLAP:]

    @property
    def complete(self) -> bool:
        """Whether both were found."""
        return bool(self.models) and self.seq is not None


def json_number(body: bytes) -> tuple[list[str], int | None]:
    """Return the models that a JSON body may be for, and its number; None for none. The top level counts where the
    body can be read; NaN and Infinity, which are no JSON, are read, too."""
    with suppress(ValueError, RecursionError):
        said = json.loads(body)
        if isinstance(said, dict):
            seq = said.get("seq_id")
            return [str(said.get("model_id"))], seq if type(seq) is int else None
    scan = NumberScan()
    scan.feed(body)
    return scan.models, scan.seq


def read_pass(body: bytes, *, vocabulary: int, longest: int) -> Pass:
    """Return the whole request. Raises BadRequest, which names the datum, for tokens outside of the vocabulary, a
    sequence longer than ``longest``, tensors of other shapes than the tokens, and numbers that are not finite."""
    _Parts(body).check(pb.ForwardBackwardRequest.DESCRIPTOR)
    message = _message(body)
    head = _head(message)
    data, positions, width = [], 0, 1
    for number, datum in enumerate(message.data):
        try:
            data.append(_datum(datum, vocabulary, longest))
        except BadRequest as error:
            raise BadRequest(f"datum {number}: {error}") from None
        positions, width = positions + len(data[-1].tokens), max(width, data[-1].targets[0].size)
        if positions * width > _MOST_CELLS:
            raise BadRequest(f"data: {positions} positions with up to {width} targets each are too many at once")
    if not data:
        raise BadRequest("data: there is no datum")
    return Pass(head.model, head.seq, head.forward_only, head.loss, head.config, data)


_MOST_PARTS = 1 << 18
_MOST_PACKED = 256


class _Parts:
    """Walks through the fields of a message before it is parsed, and ends with BadRequest after so many: an empty part
    takes two bytes of a body, and a hundred of memory once it is parsed."""

    def __init__(self, body: bytes) -> None:
        self._body, self._left = body, _MOST_PARTS

    def check(self, kind: Any) -> None:
        """Raise BadRequest for a message of too many parts, at any depth, or one that does not hold together."""
        within = [(kind, 0, len(self._body))]
        while within:
            kind, begin, end = within.pop()
            for number, _, at, after in self.fields(begin, end):
                field = kind.fields_by_number.get(number)
                if field is None:
                    continue
                if field.message_type is not None:
                    within.append((field.message_type, at, after))
                elif field.type not in (field.TYPE_BYTES, field.TYPE_STRING) and after - at > _MOST_PACKED:
                    raise BadRequest(f"the body's {field.name} has {after - at} bytes")

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the number of every field between two places, where it begins, and where its content begins and
        ends."""
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise BadRequest(f"the body has more than {_MOST_PARTS} parts")
            begin = at
            tag, at = self._varint(at, end)
            if tag & 7 == 2:
                size, at = self._varint(at, end)
            elif tag & 7 == 0:
                size = self._varint(at, end)[1] - at
            elif tag & 7 in (1, 5):
                size = 8 if tag & 7 == 1 else 4
            else:
                raise BadRequest("the body is no ForwardBackwardRequest: it has a field of no known form")
            if at + size > end:
                raise BadRequest("the body is no ForwardBackwardRequest: it ends within a field")
            yield tag >> 3, begin, at, at + size
            at += size

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for place in range(at, min(at + 10, end)):
            value |= (self._body[place] & 127) << 7 * (place - at)
            if self._body[place] < 128:
                return value, place + 1
        raise BadRequest("the body is no ForwardBackwardRequest: it ends within a number")


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
    if len(message.loss_fn_inputs) > _MOST_TENSORS:
        raise BadRequest(f"loss_fn_inputs has {len(message.loss_fn_inputs)} tensors")
    given = {name: _tensor(tensor, name, len(tokens)) for name, tensor in message.loss_fn_inputs.items()}
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


_MOST_TENSORS, _MOST_TARGETS, _MOST_CELLS = 16, 1024, 1 << 24
"""Tensors of a datum, targets of a position, and targets of a request: those that a narrower datum has not are
padded."""


def _tensor(message: Any, name: str, rows: int) -> np.ndarray:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BadRequest(f"{name} has no element type that is carried: float32 and int64 are")
    shape = tuple(message.shape)
    if len(shape) == 2 and (shape[0] != rows or not 0 <= shape[1] <= _MOST_TARGETS):
        raise BadRequest(f"{name} has the shape {shape}, for {rows} tokens and at most {_MOST_TARGETS} each")
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
    if len(shape) != 2 or len(rows) != shape[0] + 1:
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


def pass_answer(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """Write a ``ForwardBackwardOutput``: of each datum what is known of its targets, by name, f32 (n,) or (n, K)."""
    answer = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    by_width: list[tuple[tuple[int, ...], list[Mapping[str, np.ndarray]]]] = []
    for each in outputs:  # A record holds data of one trailing shape, and their order counts.
        trailing = next(iter(each.values())).shape[1:]
        if not by_width or by_width[-1][0] != trailing:
            by_width.append((trailing, []))
        by_width[-1][1].append(each)
    for trailing, members in by_width:
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(members))
        for name in members[0]:
            raw = [np.ascontiguousarray(each[name], dtype=np.float32).tobytes() for each in members]
            batched = record.fields[name]
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


def sample_answer(sequences: Sequence[Sampled], prompt: Scored) -> bytes:
    """Write a ``SampleResponse``."""
    answer = pb.SampleResponse()
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


_MOST_VALUES, _MOST_ERRORS = 1 << 20, 100


def read_json(kind: Any, body: bytes) -> Any:
    """Return a request of one of the client's types. Raises BadRequest that names the field, or says that it has too
    many values: each that does not fit costs hundreds of bytes."""
    if body.count(b",") > _MOST_VALUES:
        raise BadRequest(f"the body has more than {_MOST_VALUES} values")
    try:
        return kind.model_validate_json(body)
    except ValueError as error:
        if getattr(error, "error_count", int)() > _MOST_ERRORS:
            raise BadRequest(f"most of the body is no {kind.__name__}") from None
        found = getattr(error, "errors", None)
        first = found()[0] if callable(found) else {"loc": (), "msg": str(error)}  # pyright: ignore[reportIndexIssue]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where + ': ' if where else ''}{first['msg']}"[:500]) from None


def prompt_tokens(prompt: Any) -> np.ndarray:
    """Return the tokens of a ``ModelInput``, i64 (n,). Raises BadRequest for anything but tokens."""
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in prompt.chunks):
        raise BadRequest("the prompt has a chunk that is no text; this server takes tokens only")
    return np.fromiter((token for chunk in prompt.chunks for token in chunk.tokens), dtype=np.int64)
