"""Wire format of the client ``tinker``: parses request bodies and serializes responses.

``forward_backward`` requests are the client's protobuf message (with the field numbers and types of
its package), all other requests are JSON of its request types. Responses of ``forward_backward``
and ``sample`` are protobuf as well.
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

from realhf.base.installation import require_modules

require_modules("tinker", "tinker")
types: Any = import_module("tinker.types")
pb: Any = import_module("tinker.proto.tinker_public_pb2")

PROTOBUF = "application/x-protobuf"
"""Content type of protobuf bodies."""
JSON = "application/json"
"""Content type of JSON bodies."""
TARGETS = "target_tokens"
"""Name of the tensor of target tokens among the loss inputs of a datum."""
_DTYPES = {pb.DTYPE_FLOAT32: np.dtype(np.float32), pb.DTYPE_INT64: np.dtype(np.int64)}
"""NumPy type for each element type of the client's tensors."""
_MAX_TENSORS = 16
"""Maximum number of loss input tensors per datum."""
_MAX_TARGETS = 1024
"""Maximum number of targets per position."""
_MAX_TARGET_CELLS = 1 << 24
"""Maximum number of targets in a request after padding, which pads all data to the widest one."""


class BadRequest(ValueError):
    """Error: a request is invalid. The message is for the author of the request."""


@dataclass(frozen=True)
class Datum:
    """One training sequence."""

    tokens: np.ndarray
    """Input tokens, i64 (n,)."""
    targets: np.ndarray
    """Target tokens of each position, i64 (n,), or (n, K) for K targets per position."""
    inputs: Mapping[str, np.ndarray]
    """Loss inputs by name, f32, with the shape of ``targets``."""


@dataclass(frozen=True)
class Pass:
    """A ``forward_backward`` request."""

    model: str
    """Id of the model."""
    seq: int
    """Sequence number of the request among the model's requests."""
    forward_only: bool
    """Whether the backward pass is skipped."""
    loss: str
    """Name of the loss, see ``realhf.tinker.losses.LOSSES``."""
    config: Mapping[str, float | str] = field(default_factory=dict)
    """Settings of the loss."""
    data: Sequence[Datum] = ()
    """The sequences; empty if only the head of the request was parsed."""


def read_head(body: bytes) -> Pass:
    """Parse a ``forward_backward`` body, leaving out its data. Raises BadRequest."""
    descriptor = pb.ForwardBackwardRequest.DESCRIPTOR
    data_field = descriptor.fields_by_name["data"].number
    fields = _FieldScanner(body).fields(0, len(body))
    return _parse_head(
        _parse_message(b"".join(body[a:b] for number, a, _, b in fields if number != data_field))
    )


def read_seq(prefix: bytes) -> tuple[str, int]:
    """Return the model id and sequence number of a ``forward_backward`` body of which only a prefix
    was read. Only the fields before the data are parsed; a missing field has protobuf's default
    value. Raises BadRequest."""
    data_field = pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number
    end = 0
    with suppress(BadRequest):  # the prefix may end within a field
        for number, _, _, field_end in _FieldScanner(prefix).fields(0, len(prefix)):
            if number == data_field:
                break
            end = field_end
    head = _parse_message(prefix[:end])
    return head.model_id, head.seq_id


_ID_FIELD = re.compile(rb'"(model_id|seq_id)"\s*:\s*(?:"([^"\\]{1,200})"|(\d{1,10})(?=[\s,}]))')
_OVERLAP = 512
"""Number of bytes at the end of a chunk that are scanned again with the next chunk. No field that
the scanner looks for is longer."""
_MAX_MODELS = 8
"""Maximum number of model ids that the scanner returns, because each of them costs a look-up in the
store."""


class SeqScanner:
    """Scanner that searches a JSON body, chunk by chunk, for the model id and sequence number of
    its request. It also works on bodies that are not valid JSON, or too large to keep. Quotes
    within JSON strings are escaped, so only real keys match."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self.seq: int | None = None
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Scan the next chunk of the body."""
        text = self._tail + chunk
        for match in _ID_FIELD.finditer(text):
            name, model, number = match.groups()
            if name == b"model_id" and model is not None:
                model_id = model.decode(errors="replace")
                if model_id not in self.models and len(self.models) < _MAX_MODELS:
                    self.models.append(model_id)
            elif name == b"seq_id" and number is not None and self.seq is None:
                self.seq = int(number)
        self._tail = text[-_OVERLAP:]

    @property
    def complete(self) -> bool:
        """Whether both a model id and a sequence number were found."""
        return bool(self.models) and self.seq is not None


def read_json_seq(body: bytes) -> tuple[list[str], int | None]:
    """Return the possible model ids of a JSON body and its sequence number (None if it has none).
    If the body can be parsed (also with NaN and Infinity, which are not valid JSON), its top-level
    keys are used, otherwise those that ``SeqScanner`` finds."""
    with suppress(ValueError, RecursionError):
        parsed = json.loads(body)
        if isinstance(parsed, dict):
            seq = parsed.get("seq_id")
            return [str(parsed.get("model_id"))], seq if type(seq) is int else None
    scanner = SeqScanner()
    scanner.feed(body)
    return scanner.models, scanner.seq


def read_pass(body: bytes, *, vocabulary: int, longest: int) -> Pass:
    """Parse and validate a whole ``forward_backward`` body.

    ``vocabulary`` is the number of tokens that the model knows, ``longest`` its maximum sequence
    length. Raises BadRequest, naming the datum, for tokens outside the vocabulary, sequences longer
    than ``longest``, tensors whose shape differs from that of the targets, and non-finite numbers.
    """
    _FieldScanner(body).check(pb.ForwardBackwardRequest.DESCRIPTOR)
    message = _parse_message(body)
    head = _parse_head(message)
    data = []
    positions = 0
    width = 1
    for number, datum in enumerate(message.data):
        try:
            data.append(_parse_datum(datum, vocabulary, longest))
        except BadRequest as error:
            raise BadRequest(f"datum {number}: {error}") from None
        positions += len(data[-1].tokens)
        width = max(width, data[-1].targets[0].size)
        if positions * width > _MAX_TARGET_CELLS:
            raise BadRequest(
                f"data: {positions} positions with up to {width} targets each are too many at once"
            )
    if not data:
        raise BadRequest("data: there is no datum")
    return Pass(head.model, head.seq, head.forward_only, head.loss, head.config, data)


_MAX_FIELDS = 1 << 18
"""Maximum number of fields in a message, at all depths together. An empty submessage takes two
bytes of the body but about a hundred bytes of memory once it is parsed, so limiting the size of the
body is not enough."""
_MAX_PACKED_BYTES = 256
"""Maximum length in bytes of a packed numeric field. Large arrays are sent as ``bytes`` fields."""


class _FieldScanner:
    """Scanner that walks through the fields of a serialized protobuf message without parsing it,
    and limits their number."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._fields_left = _MAX_FIELDS

    def check(self, descriptor: Any) -> None:
        """Raise BadRequest if the body, a message of type ``descriptor``, has too many fields or is
        malformed."""
        pending = [(descriptor, 0, len(self._body))]
        while pending:
            descriptor, begin, end = pending.pop()
            for number, _, content_begin, content_end in self.fields(begin, end):
                field = descriptor.fields_by_number.get(number)
                if field is None:
                    continue
                size = content_end - content_begin
                if field.message_type is not None:
                    pending.append((field.message_type, content_begin, content_end))
                elif (
                    field.type not in (field.TYPE_BYTES, field.TYPE_STRING)
                    and size > _MAX_PACKED_BYTES
                ):
                    raise BadRequest(f"the body's {field.name} has {size} bytes")

    def fields(self, offset: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield, for each field in ``[offset, end)``, its number, the offset of its tag, and the
        offsets of the start and the end of its content. Raises BadRequest."""
        while offset < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise BadRequest(f"the body has more than {_MAX_FIELDS} parts")
            begin = offset
            tag, offset = self._read_varint(offset, end)
            wire_type = tag & 7
            if wire_type == 2:  # length-delimited
                size, offset = self._read_varint(offset, end)
            elif wire_type == 0:  # varint
                size = self._read_varint(offset, end)[1] - offset
            elif wire_type in (1, 5):  # fixed 64 or 32 bits
                size = 8 if wire_type == 1 else 4
            else:
                raise BadRequest(
                    "the body is no ForwardBackwardRequest: it has a field of no known form"
                )
            if offset + size > end:
                raise BadRequest("the body is no ForwardBackwardRequest: it ends within a field")
            yield tag >> 3, begin, offset, offset + size
            offset += size

    def _read_varint(self, offset: int, end: int) -> tuple[int, int]:
        """Return the varint at ``offset`` and the offset after it."""
        value = 0
        for i in range(offset, min(offset + 10, end)):
            value |= (self._body[i] & 127) << 7 * (i - offset)
            if self._body[i] < 128:
                return value, i + 1
        raise BadRequest("the body is no ForwardBackwardRequest: it ends within a number")


def _parse_message(body: bytes) -> Any:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError has no public import path in every version
        raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from None
    return message


def _parse_head(message: Any) -> Pass:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Pass(message.model_id, message.seq_id, message.forward_only, message.loss_fn, config)


def _parse_datum(message: Any, vocabulary: int, longest: int) -> Datum:
    parts = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise BadRequest(
                f"model_input has a chunk of the kind {kind}; this server takes tokens only"
            )
        parts.append(_parse_array(chunk.encoded_text.tokens, np.dtype(np.int32), "model_input"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
    check_tokens(tokens, vocabulary, longest)
    if len(message.loss_fn_inputs) > _MAX_TENSORS:
        raise BadRequest(f"loss_fn_inputs has {len(message.loss_fn_inputs)} tensors")
    inputs = {
        name: _parse_tensor(tensor, name, len(tokens))
        for name, tensor in message.loss_fn_inputs.items()
    }
    targets = inputs.pop(TARGETS, None)
    if targets is None:
        raise BadRequest(f"{TARGETS} are missing")
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise BadRequest(
            f"{TARGETS} have the shape {targets.shape}, for {len(tokens)} tokens of model_input"
        )
    targets = targets.astype(np.int64)
    if targets.min() < 0 or targets.max() >= vocabulary:
        raise BadRequest(
            f"{TARGETS} must be from 0 to {vocabulary - 1}, got {targets.min()} to {targets.max()}"
        )
    for name, values in inputs.items():
        if values.shape != targets.shape:
            raise BadRequest(f"{name} has the shape {values.shape}, {TARGETS} {targets.shape}")
        if not np.isfinite(values).all():
            raise BadRequest(f"{name} has numbers that are not finite")
    return Datum(
        tokens, targets, {name: values.astype(np.float32) for name, values in inputs.items()}
    )


def check_tokens(tokens: np.ndarray, vocabulary: int, longest: int) -> None:
    """Raise BadRequest if ``tokens`` is empty, has more than ``longest`` tokens, or has a token
    outside the vocabulary."""
    if not len(tokens):
        raise BadRequest("there are no tokens")
    if len(tokens) > longest:
        raise BadRequest(f"{len(tokens)} tokens; the longest sequence here has {longest}")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise BadRequest(
            f"tokens must be from 0 to {vocabulary - 1}, got {tokens.min()} to {tokens.max()}"
        )


def _parse_array(raw: bytes, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise BadRequest(
            f"{name} has {len(raw)} bytes, which is not a multiple of the size of {dtype.name}"
        )
    return np.frombuffer(raw, dtype=dtype)


def _parse_tensor(message: Any, name: str, rows: int) -> np.ndarray:
    """Return the tensor ``name`` of a datum of ``rows`` tokens, in the shape declared in the
    message."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BadRequest(f"{name} has no element type that is carried: float32 and int64 are")
    shape = tuple(message.shape)
    if len(shape) == 2 and (shape[0] != rows or not 0 <= shape[1] <= _MAX_TARGETS):
        raise BadRequest(
            f"{name} has the shape {shape}, for {rows} tokens and at most {_MAX_TARGETS} each"
        )
    if message.HasField("sparse_csr"):
        return _parse_sparse(message.sparse_csr, dtype, shape, name)
    values = _parse_array(message.dense, dtype, name)
    if not shape:
        return values
    if any(size < 0 for size in shape) or int(np.prod(shape, dtype=object)) != values.size:
        raise BadRequest(f"{name} has {values.size} numbers, but the shape {shape}")
    return values.reshape(shape)


def _parse_sparse(csr: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> np.ndarray:
    """Convert a tensor in compressed sparse row (CSR) format, in which zeros are left out, to a
    dense one."""
    values = _parse_array(csr.values, dtype, name)
    rows = _parse_array(csr.crow_indices, np.dtype(np.int64), name)
    columns = _parse_array(csr.col_indices, np.dtype(np.int64), name)
    if len(shape) != 2 or len(rows) != shape[0] + 1:
        raise BadRequest(
            f"{name}: a sparse tensor of the shape {shape} does not fit its {len(rows)} row "
            f"pointers"
        )
    counts = np.diff(rows)
    if rows[0] != 0 or rows[-1] != len(values) or len(columns) != len(values) or (counts < 0).any():
        raise BadRequest(
            f"{name}: the row pointers of the sparse tensor do not cover its {len(values)} numbers"
        )
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise BadRequest(f"{name}: a column of the sparse tensor is outside of its shape {shape}")
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


# ---- responses


def serialize_pass_result(
    outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]
) -> bytes:
    """Serialize a ``ForwardBackwardOutput``. ``outputs`` has one mapping per datum, from the name
    of an output to its values for each target, f32 (n,) or (n, K)."""
    response = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    # All data of a record have the same trailing shape, and the order of the data is kept: each run
    # of equally wide data becomes a record.
    records: list[tuple[tuple[int, ...], list[Mapping[str, np.ndarray]]]] = []
    for output in outputs:
        trailing_shape = next(iter(output.values())).shape[1:]
        if not records or records[-1][0] != trailing_shape:
            records.append((trailing_shape, []))
        records[-1][1].append(output)
    for trailing_shape, members in records:
        record = response.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(members))
        for name in members[0]:
            raw = [
                np.ascontiguousarray(output[name], dtype=np.float32).tobytes() for output in members
            ]
            batched = record.fields[name]
            batched.data = b"".join(raw)
            batched.dtype = pb.DTYPE_FLOAT32
            batched.offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64).tobytes()
            batched.trailing_shape.extend(trailing_shape)
    return response.SerializeToString()


@dataclass(frozen=True)
class TopK:
    """The k most likely tokens at each of n positions. Positions that were not scored have the
    client's fill values: token 0 and log-probability -99999."""

    tokens: np.ndarray
    """Token ids, i32 (n, k)."""
    logprobs: np.ndarray
    """Log-probabilities of these tokens, f32 (n, k)."""


@dataclass(frozen=True)
class SampledSequence:
    """One sampled sequence."""

    tokens: Sequence[int]
    """The sampled tokens."""
    logprobs: Sequence[float]
    """Log-probabilities of the sampled tokens."""
    reason: str
    """Finish reason, ``stop`` or ``length``."""
    top: TopK | None = None
    """The most likely tokens at each position, if requested."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt of n tokens; None for each part that was not requested."""

    logprobs: np.ndarray | None = None
    """Log-probabilities of the prompt's tokens, f32 (n,); NaN at positions that were not
    requested."""
    top: TopK | None = None
    """The most likely tokens at each position."""
    targets: np.ndarray | None = None
    """Log-probabilities of tokens that the client chose, f32 (n - 1, K)."""


def serialize_samples(sequences: Sequence[SampledSequence], prompt: PromptScores) -> bytes:
    """Serialize a ``SampleResponse``."""
    response = pb.SampleResponse()
    for sampled in sequences:
        reason = pb.STOP_REASON_STOP if sampled.reason == "stop" else pb.STOP_REASON_LENGTH
        sequence = response.sequences.add(
            stop_reason=reason,
            tokens=np.asarray(sampled.tokens, dtype=np.int32).tobytes(),
            logprobs=np.asarray(sampled.logprobs, dtype=np.float32).tobytes(),
        )
        if sampled.top is not None:
            _fill_top_k(sequence.topk_sampled_logprobs, sampled.top)
    if prompt.logprobs is not None:
        response.prompt_logprobs = prompt.logprobs.astype(np.float32).tobytes()
    if prompt.top is not None:
        _fill_top_k(response.topk_prompt_logprobs, prompt.top)
    if prompt.targets is not None:
        tensor = response.target_prompt_logprobs
        tensor.dense = prompt.targets.astype(np.float32).tobytes()
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(prompt.targets.shape)
    return response.SerializeToString()


def _fill_top_k(message: Any, top: TopK) -> None:
    message.token_ids = top.tokens.astype(np.int32).tobytes()
    message.logprobs = top.logprobs.astype(np.float32).tobytes()
    message.length, message.k = top.tokens.shape


_MAX_VALUES = 1 << 20
"""Maximum number of values in a JSON body, because pydantic builds an error of hundreds of bytes
for each invalid value."""
_MAX_ERRORS = 100
"""Number of validation errors above which the error message does not name a field."""


def read_json(kind: Any, body: bytes) -> Any:
    """Parse a JSON body as ``kind``, one of the client's request types. Raises BadRequest naming
    the first invalid field, or stating that the body has too many values."""
    if body.count(b",") > _MAX_VALUES:
        raise BadRequest(f"the body has more than {_MAX_VALUES} values")
    try:
        return kind.model_validate_json(body)
    except ValueError as error:
        if getattr(error, "error_count", int)() > _MAX_ERRORS:
            raise BadRequest(f"most of the body is no {kind.__name__}") from None
        errors = getattr(error, "errors", None)
        first = errors()[0] if callable(errors) else {"loc": (), "msg": str(error)}  # pyright: ignore[reportIndexIssue]
        location = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{location + ': ' if location else ''}{first['msg']}"[:500]) from None


def prompt_tokens(prompt: Any) -> np.ndarray:
    """Return the tokens of a ``ModelInput``, i64 (n,). Raises BadRequest for chunks that do not
    contain tokens."""
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in prompt.chunks):
        raise BadRequest("the prompt has a chunk that is not text; this server takes tokens only")
    return np.fromiter((token for chunk in prompt.chunks for token in chunk.tokens), dtype=np.int64)
