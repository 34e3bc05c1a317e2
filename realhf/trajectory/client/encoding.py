"""Encoding of groups and decoding of batches, in JSON or MessagePack with tensors, and construction
of groups from episodes.

Rows may be lists or numpy arrays, including a two-dimensional array. Source:
docs/reference/trajectory.md 2.6, 3.11.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import zstandard
from isal import igzip

from realhf.api.rollout import RolloutOutcome
from realhf.base.loopback import is_loopback_host
from realhf.trajectory.client.protocol import BadAnswer, BadGroup
from realhf.trajectory.records import FIELDS, FLOAT_ROWS, INTEGER_ROWS, REQUIRED

MSGPACK = "application/msgpack"
COMPRESSIONS = ("auto", "none", "gzip", "zstd")
COMPRESS_FROM_BYTES = 1024
"""Smallest body that is compressed."""
_FLOATS = {"float16": "f2", "float32": "f4", "float64": "f8"}


def choose_compression(requested: str, url: str, *, binary: bool) -> str:
    """Return the compression to use: ``none``, ``gzip`` or ``zstd``. ``auto`` compresses over a
    network, but not on loopback, where copying is faster than any codec. Raises ValueError for an
    unknown or impossible choice."""
    if requested not in COMPRESSIONS:
        raise ValueError(f"compression is {requested!r}; choose one of {', '.join(COMPRESSIONS)}")
    if requested == "zstd" and not binary:
        raise ValueError("compression zstd needs the binary wire; JSON bodies take gzip")
    if requested != "auto":
        return requested
    if is_loopback_host(urlsplit(url).hostname or ""):
        return "none"
    return "zstd" if binary else "gzip"


def accepted_codings(compression: str) -> str:
    """Return the Accept-Encoding header value for pulls."""
    return {"none": "identity", "gzip": "gzip"}.get(compression, "zstd, gzip")


def encode_groups(
    groups: Sequence[Mapping[str, Any]],
    *,
    listed: bool,
    binary: bool,
    compression: str,
    env_id: int | None = None,
) -> tuple[bytes, dict[str, str]]:
    """Return (body, headers) of a push. ``env_id`` is added to groups without one. Raises
    BadGroup."""
    encode = _encode_binary if binary else _encode_json
    pieces = [encode(_check_group(group, env_id)) for group in groups]
    headers = {"Content-Type": MSGPACK if binary else "application/json"}
    if not listed:
        body = pieces[0]
    elif binary:
        body = msgspec.msgpack.encode([msgspec.Raw(piece) for piece in pieces])
    else:
        body = b"[" + b",".join(pieces) + b"]"
    return _compress(body, headers, compression)


def decode_batch(body: bytes, content_type: str, url: str) -> dict[str, Any]:
    """Return the ``/batch`` answer as a dict; tensors become lists of numpy arrays that share the
    body's memory. Raises BadAnswer."""
    try:
        if not content_type.startswith(MSGPACK):
            return json.loads(body)
        answer = msgspec.msgpack.decode(body)
        groups = answer["batch"]
        return answer | {
            "batch": None if groups is None else [_convert_tensors(group) for group in groups]
        }
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise BadAnswer(
            url, f"a batch that cannot be read: {type(error).__name__}: {error}"
        ) from None


def _compress(
    body: bytes, headers: dict[str, str], compression: str
) -> tuple[bytes, dict[str, str]]:
    if compression == "none" or len(body) < COMPRESS_FROM_BYTES:
        return body, headers
    if compression == "zstd":
        packed = zstandard.ZstdCompressor(level=1).compress(body)
    else:
        packed = igzip.compress(body, compresslevel=1)
    return (
        (packed, headers | {"Content-Encoding": compression})
        if len(packed) < len(body)
        else (body, headers)
    )


def _check_group(group: Mapping[str, Any], env_id: int | None) -> dict[str, Any]:
    unknown = sorted(set(group) - set(FIELDS))
    if unknown:
        raise BadGroup(f"a group has no field {unknown[0]!r}; fields are {', '.join(FIELDS)}")
    missing = [name for name in REQUIRED if group.get(name) is None]
    if missing:
        raise BadGroup(f"a group needs {missing[0]!r}")
    return (
        {"env_id": env_id, **group}
        if env_id is not None and group.get("env_id") is None
        else dict(group)
    )


def _encode_binary(group: dict[str, Any]) -> bytes:
    return _encode_fields(
        group, msgspec.msgpack.encode, _tensor, lambda value: _finite_plain(value)[0]
    )


def _encode_json(group: dict[str, Any]) -> bytes:
    def rows(arrays: list[np.ndarray], name: str) -> list[Any]:
        return [row.tolist() for row in arrays]

    return _encode_fields(
        group, msgspec.json.encode, rows, lambda value: msgspec.Raw(_finite_plain(value)[1])
    )


def _encode_fields(
    group: dict[str, Any],
    encode: Callable[[Any], bytes],
    rows: Callable[[list[np.ndarray], str], Any],
    other: Callable[[Any], Any],
) -> bytes:
    try:
        fields = {}
        for name, value in group.items():
            place = name
            numeric = value is not None and name in (*INTEGER_ROWS, *FLOAT_ROWS)
            fields[name] = rows(_convert_rows(value, name), name) if numeric else other(value)
        return encode(fields)
    except BadGroup:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise BadGroup(f"{place}: {error}") from None


def _convert_rows(value: Any, name: str) -> list[np.ndarray]:
    """Return one array per row, of integers or finite floats."""
    integers = name in INTEGER_ROWS
    rows = [np.asarray(row) for row in value]
    for row in rows:
        if row.ndim != 1:
            raise BadGroup(
                f"{name}: each sequence is one row of numbers, not {row.ndim}-dimensional"
            )
        if row.size and row.dtype.kind not in ("iub" if integers else "iubf"):
            raise BadGroup(
                f"{name}: {'whole' if integers else 'finite'} numbers are due, not {row.dtype}"
            )
        if not integers and not _is_finite_as_sent(row):
            raise BadGroup(f"{name}: numbers must be finite")
        if row.dtype == np.uint64 and row.size and row.max() > np.iinfo(np.int64).max:
            raise BadGroup(f"{name}: numbers must fit 64 bits")
    return [row.astype(np.int64, copy=False) for row in rows] if integers else rows


def _is_finite_as_sent(row: np.ndarray) -> bool:
    """Return whether all numbers are still finite in the type in which they are sent; a type wider
    than float64 may hold larger numbers."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(row.astype(_FLOATS.get(row.dtype.name, "f8"), copy=False)).all())


def _tensor(rows: list[np.ndarray], name: str) -> dict[str, Any]:
    lengths = np.array([len(row) for row in rows], "<u4")
    flat = np.concatenate(rows) if len(rows) else np.zeros(0)
    if name in INTEGER_ROWS:
        small = not flat.size or (flat.min() >= -(2**31) and flat.max() < 2**31)
        dtype = "i4" if small else "i8"
    else:
        dtype = _FLOATS.get(flat.dtype.name, "f8")
    return {
        "__t__": 1,
        "dtype": dtype,
        "lens": lengths.tobytes(),
        "data": flat.astype(f"<{dtype}").tobytes(),
    }


def _finite_plain(value: Any) -> tuple[Any, bytes]:
    """Return (value without numpy types, its JSON). Raises ValueError for NaN and infinity."""
    text = json.dumps(
        value, allow_nan=False, default=_convert_numpy, separators=(",", ":")
    ).encode()
    return (value if isinstance(value, (str, int, float, type(None))) else json.loads(text)), text


def _convert_numpy(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _convert_tensors(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _tensor_rows(value)
        if isinstance(value, dict)
        and value.get("__t__") == 1
        and name in (*INTEGER_ROWS, *FLOAT_ROWS)
        else value
        for name, value in group.items()
    }


def _tensor_rows(tensor: Mapping[str, Any]) -> list[np.ndarray]:
    lengths = np.frombuffer(tensor["lens"], "<u4").astype(np.int64)
    flat = np.frombuffer(tensor["data"], f"<{tensor['dtype']}")
    if lengths.sum() != len(flat):
        raise ValueError(f"a tensor of {len(flat)} numbers for rows of {lengths.sum()}")
    ends = np.cumsum(lengths)
    return [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def group_of(outcomes: Sequence[RolloutOutcome], **about: Any) -> Mapping[str, Any] | None:
    """Return a group of the valid episodes of one task; None if there are none.

    A failed episode has no reward and is left out, so the group may have fewer sequences than
    others. ``about`` is added to ``group_overrides``.
    """
    valid = [outcome for outcome in outcomes if outcome.valid]
    if not valid:
        return None
    versions = [version for outcome in valid for version in outcome.versions if version >= 0]
    rows = [_episode_rows(outcome) for outcome in valid]
    return {
        "tokens": [tokens for tokens, _, _ in rows],
        "masks": [masks for _, masks, _ in rows],
        "inference_logprobs": [logprobs for _, _, logprobs in rows],
        "scores": [float(outcome.reward or 0.0) for outcome in valid],
        "overrides": [
            {"truncated": outcome.truncated, "achieved": outcome.achieved} for outcome in valid
        ],
        "group_overrides": {
            "task_id": valid[0].task_id,
            "group": valid[0].group,
            "seed": valid[0].seed,
            **about,
        },
        **({"policy_version": min(versions)} if versions else {}),
    }


def _episode_rows(outcome: RolloutOutcome) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, masks, log-probabilities) of one episode. Tokens that are not trained have
    mask -100 and log-probability 1.0."""
    tokens = np.array([*outcome.prompt_ids, *outcome.completion_ids], np.int32)
    trained = np.zeros(len(tokens), bool)
    trained[len(outcome.prompt_ids) :] = outcome.loss_mask
    logprobs = np.ones(len(tokens), np.float32)
    logprobs[len(outcome.prompt_ids) :] = outcome.logprobs
    return (
        tokens,
        np.where(trained, tokens, -100).astype(np.int32),
        np.where(trained, logprobs, np.float32(1.0)),
    )
