"""Status page: its static files, and the endpoint whose data the page requests once a second."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Awaitable, Callable
from functools import lru_cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from realhf.trajectory.http.auth import PAGE_PATH, UI_FILES
from realhf.trajectory.http.service import TrajectoryService, answer
from realhf.trajectory.records import STRICT_ROWS, GroupRecord
from realhf.trajectory.state import views
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.trajectory.wire.encode import encode_group
from realhf.web.guard import PAGE_HEADERS, SAME_ORIGIN_POLICY

_HEADERS = {
    **PAGE_HEADERS,
    "Content-Security-Policy": SAME_ORIGIN_POLICY,
    "Cache-Control": "no-cache",
}
_MAX_SEQUENCES = 4
_MAX_TOKENS = 2000


def router(service: TrajectoryService) -> APIRouter:
    """Return a router that serves ``/ui`` and the data for it."""
    routes = APIRouter(tags=["server"])

    for path, file in UI_FILES.items():
        routes.add_api_route(
            path, _static(file), methods=["GET"], include_in_schema=path == PAGE_PATH
        )

    @routes.get("/ui/data")
    async def data() -> Response:
        """Return the data that the status page shows."""
        engine = service.engine
        body = await engine.read(_summarize_state)
        body["example"] = await _summarize_group(await service.latest(), service.config.tokenizer)
        return answer(
            body | {"store": engine.store.name, "strict": service.config.is_strict(*STRICT_ROWS)}
        )

    return routes


def _static(file: Traversable) -> Callable[[], Awaitable[Response]]:
    content, kind = (
        file.read_bytes(),
        mimetypes.guess_type(file.name)[0] or "application/octet-stream",
    )

    async def page() -> Response:
        """Return the status page, or another file that belongs to it."""
        return Response(content, media_type=kind, headers=_HEADERS)

    return page


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Any:
    """Load a tokenizer on first use. Raises ValueError if it cannot be loaded."""
    from tokenizers import Tokenizer

    folder = Path(name).expanduser()
    try:
        if folder.exists():
            return Tokenizer.from_file(
                str(folder / "tokenizer.json" if folder.is_dir() else folder)
            )
        return Tokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(f"--tokenizer {name}: {error}") from error


def _text(tokenizer: str, tokens: list[int]) -> str | None:
    """Return token ids decoded to text; None if no tokenizer is configured."""
    ids = [token for token in tokens[:_MAX_TOKENS] if token >= 0]
    return _tokenizer(tokenizer).decode(ids, skip_special_tokens=False) if tokenizer else None


def _summarize_state(state: TrajectoryState, now: float) -> dict[str, Any]:
    run = state.run
    counters = state.counters
    return {
        "time": now,
        **views.status(state, now),
        **views.info(state, now),
        **views.envs(state, now),
        **views.leases(state, now),
        **views.buffers(state, now),
        "epoch": run.epoch,
        "registered": run.registered,
        "started": run.started,
        "num_steps": run.num_steps,
        "policy_version": run.current_version,
        "queued_sequences": state.queue.sequences,
        "held_bytes": state.waiting_bytes,
        "quarantine": views.quarantine(state, now, 0, None)["by_reason"],
        "quarantine_dropped": run.quarantine_dropped,
        "counters": dict(counters),
    }


async def _summarize_group(
    latest: tuple[GroupRecord, bytes] | None, tokenizer: str
) -> dict[str, Any] | None:
    """Summarise the latest group: scores, lengths, and texts if a tokenizer is configured."""
    if latest is None:
        return None
    group, data = latest
    whole = msgspec.json.decode(await encode_group(group.payload, data, msgpack=False))
    rows = whole["tokens"][:_MAX_SEQUENCES]
    try:
        texts = [await asyncio.to_thread(_text, tokenizer, row) for row in rows]
    except ValueError as error:
        texts = [str(error)]
    return {
        "env_id": group.env_id,
        "size": group.size,
        "policy_version": group.policy_version,
        "texts": texts,
        "scores": whole["scores"][:64],
        "lengths": [len(row) for row in whole["tokens"][:64]],
    }
