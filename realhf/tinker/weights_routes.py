"""Answers the requests about weights: saved, loaded, listed and deleted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from realhf.tinker.access import OWNER
from realhf.tinker.desk import Desk, counted, json_answer
from realhf.tinker.shelf import KINDS
from realhf.tinker.store import CheckpointRow, ModelRow
from realhf.tinker.wire import types
from realhf.web.refusal import Refusal

_URLS_S = 3600
_EPHEMERAL = "ephemeral-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class WeightsRoutes:
    """Holds the handlers of one desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def save_weights(self, request: Request) -> Response:
        """Promise to save weights and the optimizer's state under a name."""
        asked = await self._desk.asked(request, types.SaveWeightsRequest)
        name = asked.path or f"seq-{asked.seq_id}"
        return self._save(request, asked, "save_weights", "training", name, overwrite=asked.overwrite)

    async def save_for_sampler(self, request: Request) -> Response:
        """Promise to save weights to sample with: under a name, or for one new sampler."""
        asked = await self._desk.asked(request, types.SaveWeightsForSamplerRequest)
        if asked.path is not None:
            return self._save(request, asked, "save_weights_for_sampler", "sampler", asked.path)
        if asked.sampling_session_seq_id is None:
            raise Refusal(400, "a name (path), or sampling_session_seq_id, is needed")
        session = self._desk.model(request, asked.model_id).session
        sampler = f"{session}:sample:{counted(asked.sampling_session_seq_id)}"
        more: Any = {"sampler": sampler, "session": session}
        name = f"{_EPHEMERAL}{asked.seq_id}"
        return self._save(request, asked, "save_weights_for_sampler", "sampler", name, ephemeral=True, **more)

    async def save_external(self, request: Request) -> Response:
        """Promise to save a whole model, with merged weights, for others to load."""
        asked = await self._desk.asked(request, types.SaveWeightsExternalRequest)
        if asked.age_encryption_recipients:
            raise Refusal(400, "age_encryption_recipients are not carried by this server")
        return self._save(request, asked, "save_weights_external", "external", asked.path)

    def _save(
        self,
        request: Request,
        asked: Any,
        kind: str,
        weights: str,
        name: str,
        *,
        overwrite: bool = False,
        ephemeral: bool = False,
        **more: str,
    ) -> Response:
        if not _NAME.fullmatch(name) or (name.startswith(_EPHEMERAL) and not ephemeral):
            rule = f"at most 200 letters, digits, '.', '_' and '-', and does not begin with {_EPHEMERAL}"
            raise Refusal(400, f"path {name!r:.200}: a name has {rule}")
        ttl = asked.ttl_seconds
        _check_ttl(ttl)
        row, seq = self._desk.model(request, asked.model_id), counted(asked.seq_id)
        self._desk.service.check_saving(row.owner, weights)
        lora = {name: row.options[name] for name in ("base", "rank", "mlp", "attention", "unembedding")}
        said = {
            "path": f"tinker://{row.id}/{KINDS[weights]}/{name}",
            "kind": weights,
            "name": name,
            "folder": str(self._desk.service.shelf.folder(row.id, weights, name, seq)),
            "expires": None if ttl is None else time.time() + ttl,
            "overwrite": overwrite,
            "info": {"metadata": getattr(asked, "user_metadata", None), "ephemeral": ephemeral, "lora": lora},
            **more,
        }
        return self._desk.promise(request, kind, row.id, seq, json.dumps(said).encode())

    async def load_weights(self, request: Request) -> Response:
        """Promise to load saved weights into a model, or to make a model of them."""
        asked = await self._desk.asked(request, types.LoadWeightsRequest)
        if asked.weights_access_token:
            raise Refusal(400, "weights_access_token is not carried by this server")
        self._desk.check_optimizer(asked.optimizer_config)
        if asked.base_model is not None:
            self._desk.check_base(asked.base_model)
        source = self._desk.service.shelf.find(request.scope[OWNER], asked.path)
        if asked.optimizer and source.kind != "training":
            raise Refusal(400, f"{source.path} has no state of the optimizer: load it without")
        body = json.dumps({"path": source.path, "optimizer": asked.optimizer}).encode()
        if asked.session_id is None:
            if asked.model_id is None:
                raise Refusal(400, "model_id, or session_id and model_seq_id, are needed")
            return self._desk.promise(request, "load_weights", asked.model_id, asked.seq_id, body)
        if asked.model_seq_id is None:
            raise Refusal(400, "model_seq_id is missing")
        options = {**source.info["lora"], "seed": 0, "metadata": asked.user_metadata}
        return self._desk.new_model(request, asked.session_id, asked.model_seq_id, "load_weights", options, body)

    async def weights_info(self, request: Request) -> Response:
        """Say what saved weights are."""
        try:
            path = json.loads(await self._desk.body(request))["tinker_path"]
        except (ValueError, KeyError, TypeError):
            raise Refusal(400, "tinker_path is missing") from None
        lora = self._desk.service.shelf.find(request.scope[OWNER], str(path)).info["lora"]
        return json_answer(
            types.WeightsInfoResponse(
                base_model=self._desk.options.public_name,
                **rank_of(lora),
                train_unembed=lora["unembedding"],
                train_mlp=lora["mlp"],
                train_attn=lora["attention"],
            )
        )

    async def runs(self, request: Request) -> Response:
        """List models."""
        rows = self._desk.store.models(request.scope[OWNER])
        offset, limit = _page(request)
        cursor = types.Cursor(offset=offset, limit=limit, total_count=len(rows))
        runs = [self._run(row) for row in rows[offset : offset + limit]]
        return json_answer(types.TrainingRunsResponse(training_runs=runs, cursor=cursor))

    async def run(self, request: Request) -> Response:
        """Describe a model."""
        return json_answer(self._run(self._desk.model(request, request.path_params["model"])))

    def _run(self, row: ModelRow) -> Any:
        saved = self._desk.store.checkpoints(model=row.id)
        last = {kind: next((each for each in saved if each.kind == kind), None) for kind in KINDS}
        metadata = {key: str(value) for key, value in (row.options.get("metadata") or {}).items()}
        return types.TrainingRun(
            training_run_id=row.id,
            base_model=self._desk.options.public_name,
            model_owner=row.owner,
            **rank_of(row.options),
            last_request_time=datetime.fromtimestamp(row.used, UTC),
            last_checkpoint=last["training"] and _checkpoint(last["training"]),
            last_sampler_checkpoint=last["sampler"] and _checkpoint(last["sampler"]),
            user_metadata=metadata,
        )

    async def checkpoints(self, request: Request) -> Response:
        """List the checkpoints of a model."""
        row = self._desk.model(request, request.path_params["model"])
        saved = [
            _checkpoint(each) for each in self._desk.store.checkpoints(model=row.id) if not each.info.get("ephemeral")
        ]
        return json_answer(types.CheckpointsListResponse(checkpoints=saved))

    async def all_checkpoints(self, request: Request) -> Response:
        """List all checkpoints of an owner."""
        rows = [
            each for each in self._desk.store.checkpoints(owner=request.scope[OWNER]) if not each.info.get("ephemeral")
        ]
        offset, limit = _page(request)
        cursor = types.Cursor(offset=offset, limit=limit, total_count=len(rows))
        saved = [_checkpoint(each) for each in rows[offset : offset + limit]]
        return json_answer(types.CheckpointsListResponse(checkpoints=saved, cursor=cursor))

    def _named(self, request: Request) -> CheckpointRow:
        at = request.path_params
        return self._desk.service.shelf.find(request.scope[OWNER], f"tinker://{at['model']}/{at['kind']}/{at['name']}")

    async def delete_checkpoint(self, request: Request) -> Response:
        """Delete saved weights."""
        self._desk.service.shelf.drop(self._named(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        """Change until when saved weights are kept."""
        row = self._named(request)
        try:
            ttl = json.loads(await self._desk.body(request))["ttl_seconds"]
        except (ValueError, KeyError, TypeError):
            raise Refusal(400, "ttl_seconds is missing") from None
        _check_ttl(ttl)
        self._desk.service.shelf.set_expiry(row, ttl)
        return Response(status_code=204)

    async def urls(self, request: Request) -> Response:
        """Give an address for every file of a whole model, good for an hour."""
        row, shelf, expires = self._named(request), self._desk.service.shelf, int(time.time()) + _URLS_S
        urls = {}
        for file in shelf.files(row):
            at = f"{request.base_url}api/v1/download/{quote(row.model)}/{row.name}/{quote(file)}"
            urls[file] = f"{at}?expires={expires}&signature={shelf.signature(row.path, file, expires)}"
        until = datetime.fromtimestamp(expires, UTC)
        return json_answer(types.ExternalWeightsUrlsResponse(urls=urls, expires=until))

    async def download(self, request: Request) -> Response:
        """Send a file to whoever has its address."""
        at, query = request.path_params, request.query_params
        expires = query.get("expires", "")
        path = f"tinker://{at['model']}/{KINDS['external']}/{at['name']}"
        until = int(expires) if expires.isascii() and expires.isdigit() and len(expires) < 12 else 0
        return FileResponse(self._desk.service.shelf.signed_file(path, at["file"], until, query.get("signature", "")))


def rank_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the client is told of a model's adapters: their rank, if it has any."""
    return {"is_lora": bool(options["rank"]), "lora_rank": options["rank"] or None}


def _check_ttl(ttl: Any) -> None:
    if ttl is not None and not (isinstance(ttl, int) and 3600 <= ttl <= 10 * 366 * 86400):
        raise Refusal(400, f"ttl_seconds {ttl!r:.50} must be from 3600 to ten years")


def _page(request: Request) -> tuple[int, int]:
    try:
        offset, limit = (
            int(request.query_params.get(name, default)) for name, default in (("offset", 0), ("limit", 100))
        )
    except ValueError:
        raise Refusal(400, "offset and limit are whole numbers") from None
    return max(0, offset), min(max(1, limit), 1000)


def _checkpoint(row: CheckpointRow) -> Any:
    return types.Checkpoint(
        checkpoint_id="/".join(row.path.split("/")[-2:]),
        checkpoint_type=row.kind,
        time=datetime.fromtimestamp(row.created, UTC),
        tinker_path=row.path,
        size_bytes=int(row.info["size_bytes"]),
        user_metadata=row.info.get("metadata"),
        expires_at=None if row.expires is None else datetime.fromtimestamp(row.expires, UTC),
    )
