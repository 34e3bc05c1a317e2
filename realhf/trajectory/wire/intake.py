"""Conversion of request bodies to validated groups, in a separate process where parsing would block
the event loop.

Source: docs/reference/trajectory.md 2.1, 2.6, 3.8.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeAlias, TypeVar

import msgspec

from realhf.trajectory.records import Incoming, invalid
from realhf.trajectory.wire import json_groups, lax_groups, msgpack_groups
from realhf.web.refusal import Refusal

YIELD_BYTES = 128 << 10
"""Bytes of a body after which parsing pauses, between two groups, to let the event loop run."""
INLINE_BYTES = 4 << 20
"""Size from which bodies are validated in another process."""
INLINE_BINARY_LIST_BYTES = 16 << 20
"""Like ``INLINE_BYTES``, for MessagePack lists; larger, because their tensors are cheap to
validate."""
INLINE_LAX_BYTES = 32 << 10
"""Size of a group for the lax path from which the body goes to another process, because that path
is twenty times slower."""
INLINE_NESTS = 50_000
"""Number of objects and arrays in the free fields from which the body goes to another process."""
LocatedGroup: TypeAlias = tuple[Incoming, tuple[int, int] | None]
"""A group and the span of its bytes in the body; None if the group contains its bytes itself."""
MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


def is_msgpack(content_type: str | None) -> bool:
    """Return whether this content type is MessagePack."""
    return (
        content_type is not None and content_type.partition(";")[0].strip().lower() in MSGPACK_TYPES
    )


async def parse_groups(
    body: bytes, content_type: str | None, *, listed: bool, int64: bool, offload: Offload
) -> list[Incoming]:
    """Return the groups in the body of a push. ``listed``: the body is an array of groups.
    ``int64``: tokens must fit 64 bits. Raises Refusal 422 that locates the error in the body."""
    msgpack = is_msgpack(content_type)
    if not msgpack:
        check_json_type(content_type)
    if len(body) <= (INLINE_BINARY_LIST_BYTES if msgpack and listed else INLINE_BYTES):
        async with offload.turn:
            groups = await _parse_here(body, msgpack, listed, int64)
        if groups is not None:
            return groups
    return await _parse_elsewhere(body, msgpack, listed, int64, offload)


async def _parse_here(
    body: bytes, msgpack: bool, listed: bool, int64: bool
) -> list[Incoming] | None:
    """Parse on the event loop; return None if that would take too long."""
    loc: list[str | int] = ["body"]
    items = _split(body, loc, msgpack) if listed else [body]
    if items is None:
        return (
            lax_groups.read_lax_list(body, loc, int64=int64)
            if len(body) <= INLINE_LAX_BYTES
            else None
        )
    groups = []
    since = 0
    if max(map(len, items), default=0) > INLINE_BYTES:
        return None
    for index, item in enumerate(items):
        group = _read_fast(item, [*loc, index] if listed else loc, msgpack, INLINE_NESTS)
        if group is None and len(item) > INLINE_LAX_BYTES:
            return None
        groups.append(
            group or lax_groups.read_lax(item, [*loc, index] if listed else loc, int64=int64)
        )
        since += len(item)
        if since > YIELD_BYTES:
            since = 0
            await asyncio.sleep(0)
    return groups


async def _parse_elsewhere(
    body: bytes, msgpack: bool, listed: bool, int64: bool, offload: Offload
) -> list[Incoming]:
    """Parse in another process. The body is passed through a file, and the groups come back as
    spans of the body, because pickling the bytes would block the event loop too."""
    try:
        file = await asyncio.to_thread(_spill, body)
    except OSError as error:
        raise Refusal(
            503, f"no room for a large body: {error.strerror}", {"Retry-After": "1"}
        ) from error
    with file:
        located = await offload.run(parse_file, file.name, msgpack, listed, int64)
    groups = []
    for incoming, span in located:
        groups.append(
            incoming
            if span is None
            else msgspec.structs.replace(incoming, data=body[span[0] : span[1]])
        )
        await asyncio.sleep(0)
    return groups


def _spill(body: bytes) -> IO[bytes]:
    file = NamedTemporaryFile(prefix="trajectory-body-")  # noqa: SIM115 - the caller closes it
    try:
        file.write(body)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def parse_file(path: str, msgpack: bool, listed: bool, int64: bool) -> list[LocatedGroup]:
    """Parse the body in a file without pausing; called in another process. Raises Refusal."""
    loc: list[str | int] = ["body"]
    body = Path(path).read_bytes()
    items = _split(body, loc, msgpack) if listed else [body]
    if items is None:
        return [(group, None) for group in lax_groups.read_lax_list(body, loc, int64=int64)]
    placed = []
    position = 0
    for index, item in enumerate(items):
        place = [*loc, index] if listed else loc
        group = _read_fast(item, place, msgpack) or lax_groups.read_lax(item, place, int64=int64)
        start = body.index(item, position)
        position = start + len(item)
        at = body.find(group.data, start, position)
        if at < 0:
            placed.append((group, None))
        else:
            placed.append((msgspec.structs.replace(group, data=b""), (at, at + len(group.data))))
    return placed


def check_json_type(content_type: str | None) -> None:
    """Raise Refusal 422 for a content type other than JSON; a body without a type is taken as
    JSON."""
    if not content_type:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise invalid(
            ["body"],
            f"Content-Type is {kind[:80]!r}; send application/json",
            "model_attributes_type",
        )


def _read_fast(
    data: bytes, loc: list[str | int], msgpack: bool, max_nests: int = sys.maxsize
) -> Incoming | None:
    if msgpack:
        return msgpack_groups.read_group(data, loc)
    return json_groups.read_group(data, max_nests) or json_groups.read_known(data, max_nests)


def _split(body: bytes, loc: list[str | int], msgpack: bool) -> list[bytes] | None:
    return msgpack_groups.split_list(body, loc) if msgpack else json_groups.split_list(body)


T = TypeVar("T")
DEADLINE_S = 120.0
"""Seconds that the child process may take for one body."""
CLOSE_S = 5.0
"""Seconds that ``close`` waits for a busy child process."""


class Offload:
    """Runs picklable functions in one child process, which is started on first use.

    ``turn`` serialises the parsing of bodies on the event loop, so that other requests are served
    between two groups.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(1)
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of ``function(*args)``. If the child is dead, a new one is started
        once, because the old one may have died earlier. Raises Refusal 503 if the new one dies too,
        or takes too long."""
        try:
            return await self._attempt(function, *args)
        except TimeoutError as error:
            raise _parser_failure("it took too long") from error
        except (BrokenProcessPool, OSError):
            pass
        try:
            return await self._attempt(function, *args)
        except (BrokenProcessPool, TimeoutError) as error:
            raise _parser_failure("it died") from error
        except OSError as error:  # no descriptor or memory is available now
            raise _parser_failure(str(error)) from error

    async def close(self) -> None:
        """Stop the child. A child that is still busy after a few seconds is left to end by
        itself."""
        pool = self._pool
        self._pool = None
        if pool is not None:
            end = asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end, CLOSE_S)

    async def _attempt(self, function: Callable[..., T], *args: Any) -> T:
        pool = self._get_pool()
        try:
            work = asyncio.get_running_loop().run_in_executor(pool, function, *args)
            return await asyncio.wait_for(work, DEADLINE_S)
        except (BrokenProcessPool, OSError):  # TimeoutError is one, too
            self._abandon(pool)
            raise

    def _get_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_follow_server)
        return self._pool

    def _abandon(self, pool: ProcessPoolExecutor) -> None:
        """Stop using the child. Requests that already wait for it may still get their result; the
        next body uses a new child."""
        if self._pool is pool:
            self._pool = None
        pool.shutdown(wait=False)


def _parser_failure(how: str) -> Refusal:
    return Refusal(503, f"the parser process failed on this body: {how}", {"Retry-After": "1"})


def _follow_server() -> None:
    """Ignore Ctrl-C, which is for the server, and exit when the server dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_server, daemon=True).start()


def _exit_with_server() -> None:
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
        os._exit(0)
