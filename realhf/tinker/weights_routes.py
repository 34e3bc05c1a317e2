"""HTTP handlers about weights: save, load, list, delete and download checkpoints."""

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
from realhf.tinker.checkpoints import KINDS
from realhf.tinker.request_handler import RequestHandler, check_number, json_response
from realhf.tinker.store import CheckpointRow, ModelRow
from realhf.tinker.wire import types
from realhf.web.refusal import Refusal

_URL_TTL_S = 3600
"""Seconds that a download URL is valid."""
_EPHEMERAL = "ephemeral-"
"""Name prefix of checkpoints that the client saved without a name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Pattern of valid checkpoint names."""


class WeightsRoutes:
    """HTTP handlers of one service for requests about weights."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    async def save_weights(self, request: Request) -> Response:
        """Save the weights and the optimizer state of a model."""
        parsed = await self._handler.parse(request, types.SaveWeightsRequest)
        name = parsed.path or f"seq-{parsed.seq_id}"
        return self._save(
            request, parsed, "save_weights", "training", name, overwrite=parsed.overwrite
        )

    async def save_for_sampler(self, request: Request) -> Response:
        """Save weights for sampling, either under a name or as an ephemeral checkpoint for one new
        sampler."""
        parsed = await self._handler.parse(request, types.SaveWeightsForSamplerRequest)
        if parsed.path is not None:
            return self._save(request, parsed, "save_weights_for_sampler", "sampler", parsed.path)
        if parsed.sampling_session_seq_id is None:
            raise Refusal(400, "a name (path), or sampling_session_seq_id, is needed")
        session = self._handler.model(request, parsed.model_id).session
        sampler = f"{session}:sample:{check_number(parsed.sampling_session_seq_id)}"
        sampler_fields: Any = {"sampler": sampler, "session": session}
        name = f"{_EPHEMERAL}{parsed.seq_id}"
        kind = "save_weights_for_sampler"
        return self._save(request, parsed, kind, "sampler", name, ephemeral=True, **sampler_fields)

    async def save_external(self, request: Request) -> Response:
        """Save a whole model with merged weights for download."""
        parsed = await self._handler.parse(request, types.SaveWeightsExternalRequest)
        if parsed.age_encryption_recipients:
            raise Refusal(400, "age_encryption_recipients is not supported by this server")
        return self._save(request, parsed, "save_weights_external", "external", parsed.path)

    def _save(
        self,
        request: Request,
        parsed: Any,
        kind: str,
        weights: str,
        name: str,
        *,
        overwrite: bool = False,
        ephemeral: bool = False,
        **more: str,
    ) -> Response:
        if not _NAME.fullmatch(name) or (name.startswith(_EPHEMERAL) and not ephemeral):
            rule = (
                f"at most 200 letters, digits, '.', '_' and '-', and does not begin with "
                f"{_EPHEMERAL}"
            )
            raise Refusal(400, f"path {name!r:.200}: a name has {rule}")
        ttl = parsed.ttl_seconds
        _check_ttl(ttl)
        row = self._handler.model(request, parsed.model_id)
        seq = check_number(parsed.seq_id)
        self._handler.service.check_saving(row.owner, weights)
        lora = {
            name: row.options[name] for name in ("base", "rank", "mlp", "attention", "unembedding")
        }
        body = {
            "path": f"tinker://{row.id}/{KINDS[weights]}/{name}",
            "kind": weights,
            "name": name,
            "folder": str(self._handler.service.checkpoints.new_folder(row.id, weights, name, seq)),
            "expires": None if ttl is None else time.time() + ttl,
            "overwrite": overwrite,
            "info": {
                "metadata": getattr(parsed, "user_metadata", None),
                "ephemeral": ephemeral,
                "lora": lora,
            },
            **more,
        }
        return self._handler.submit(request, kind, row.id, seq, json.dumps(body).encode())

    async def load_weights(self, request: Request) -> Response:
        """Load a checkpoint into a model, or create a new model from it."""
        parsed = await self._handler.parse(request, types.LoadWeightsRequest)
        if parsed.weights_access_token:
            raise Refusal(400, "weights_access_token is not carried by this server")
        self._handler.check_optimizer(parsed.optimizer_config)
        if parsed.base_model is not None:
            self._handler.check_base(parsed.base_model)
        source = self._handler.service.checkpoints.find(request.scope[OWNER], parsed.path)
        if parsed.optimizer and source.kind != "training":
            raise Refusal(400, f"{source.path} has no state of the optimizer: load it without")
        body = json.dumps({"path": source.path, "optimizer": parsed.optimizer}).encode()
        if parsed.session_id is None:
            if parsed.model_id is None:
                raise Refusal(400, "model_id, or session_id and model_seq_id, are needed")
            return self._handler.submit(
                request, "load_weights", parsed.model_id, parsed.seq_id, body
            )
        if parsed.model_seq_id is None:
            raise Refusal(400, "model_seq_id is missing")
        options = {**source.info["lora"], "seed": 0, "metadata": parsed.user_metadata}
        return self._handler.new_model(
            request, parsed.session_id, parsed.model_seq_id, "load_weights", options, body
        )

    async def weights_info(self, request: Request) -> Response:
        """Return the base model and LoRA options of a checkpoint."""
        try:
            path = json.loads(await self._handler.body(request))["tinker_path"]
        except (ValueError, KeyError, TypeError):
            raise Refusal(400, "tinker_path is missing") from None
        lora = self._handler.service.checkpoints.find(request.scope[OWNER], str(path)).info["lora"]
        return json_response(
            types.WeightsInfoResponse(
                base_model=self._handler.options.public_name,
                **lora_fields(lora),
                train_unembed=lora["unembedding"],
                train_mlp=lora["mlp"],
                train_attn=lora["attention"],
            )
        )

    async def runs(self, request: Request) -> Response:
        """List the client's models, which its API calls training runs."""
        rows = self._handler.store.models(request.scope[OWNER])
        offset, limit = _parse_page(request)
        cursor = types.Cursor(offset=offset, limit=limit, total_count=len(rows))
        runs = [self._build_run(row) for row in rows[offset : offset + limit]]
        return json_response(types.TrainingRunsResponse(training_runs=runs, cursor=cursor))

    async def run(self, request: Request) -> Response:
        """Return one model."""
        return json_response(
            self._build_run(self._handler.model(request, request.path_params["model"]))
        )

    def _build_run(self, row: ModelRow) -> Any:
        checkpoints = self._handler.store.checkpoints(model=row.id)
        last = {
            kind: next((each for each in checkpoints if each.kind == kind), None) for kind in KINDS
        }
        metadata = {key: str(value) for key, value in (row.options.get("metadata") or {}).items()}
        return types.TrainingRun(
            training_run_id=row.id,
            base_model=self._handler.options.public_name,
            model_owner=row.owner,
            **lora_fields(row.options),
            last_request_time=datetime.fromtimestamp(row.used, UTC),
            last_checkpoint=last["training"] and _build_checkpoint(last["training"]),
            last_sampler_checkpoint=last["sampler"] and _build_checkpoint(last["sampler"]),
            user_metadata=metadata,
        )

    async def checkpoints(self, request: Request) -> Response:
        """List a model's checkpoints."""
        row = self._handler.model(request, request.path_params["model"])
        checkpoints = [
            _build_checkpoint(each)
            for each in self._handler.store.checkpoints(model=row.id)
            if not each.info.get("ephemeral")
        ]
        return json_response(types.CheckpointsListResponse(checkpoints=checkpoints))

    async def all_checkpoints(self, request: Request) -> Response:
        """List all checkpoints of the client."""
        rows = [
            each
            for each in self._handler.store.checkpoints(owner=request.scope[OWNER])
            if not each.info.get("ephemeral")
        ]
        offset, limit = _parse_page(request)
        cursor = types.Cursor(offset=offset, limit=limit, total_count=len(rows))
        checkpoints = [_build_checkpoint(each) for each in rows[offset : offset + limit]]
        return json_response(types.CheckpointsListResponse(checkpoints=checkpoints, cursor=cursor))

    def _find_checkpoint(self, request: Request) -> CheckpointRow:
        """Return the checkpoint named in the URL. Raises Refusal (404)."""
        params = request.path_params
        path = f"tinker://{params['model']}/{params['kind']}/{params['name']}"
        return self._handler.service.checkpoints.find(request.scope[OWNER], path)

    async def delete_checkpoint(self, request: Request) -> Response:
        """Delete a checkpoint."""
        self._handler.service.checkpoints.delete(self._find_checkpoint(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        """Set the time to live of a checkpoint."""
        row = self._find_checkpoint(request)
        try:
            ttl = json.loads(await self._handler.body(request))["ttl_seconds"]
        except (ValueError, KeyError, TypeError):
            raise Refusal(400, "ttl_seconds is missing") from None
        _check_ttl(ttl)
        self._handler.service.checkpoints.set_expiry(row, ttl)
        return Response(status_code=204)

    async def urls(self, request: Request) -> Response:
        """Return a signed URL for each file of an external checkpoint, valid for an hour."""
        row = self._find_checkpoint(request)
        checkpoints = self._handler.service.checkpoints
        expires = int(time.time()) + _URL_TTL_S
        urls = {}
        for file in checkpoints.files(row):
            url = f"{request.base_url}api/v1/download/{quote(row.model)}/{row.name}/{quote(file)}"
            urls[file] = (
                f"{url}?expires={expires}&signature={checkpoints.signature(row.path, file, expires)}"
            )
        expiry = datetime.fromtimestamp(expires, UTC)
        return json_response(types.ExternalWeightsUrlsResponse(urls=urls, expires=expiry))

    async def download(self, request: Request) -> Response:
        """Send the file that a signed URL refers to."""
        params = request.path_params
        query = request.query_params
        expires = query.get("expires", "")
        path = f"tinker://{params['model']}/{KINDS['external']}/{params['name']}"
        expiry = (
            int(expires) if expires.isascii() and expires.isdigit() and len(expires) < 12 else 0
        )
        signature = query.get("signature", "")
        file = self._handler.service.checkpoints.resolve_signed_file(
            path, params["file"], expiry, signature
        )
        return FileResponse(file)


def lora_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response fields that describe the adapters of a model or checkpoint with these
    options."""
    return {"is_lora": bool(options["rank"]), "lora_rank": options["rank"] or None}


def _check_ttl(ttl: Any) -> None:
    if ttl is not None and not (isinstance(ttl, int) and 3600 <= ttl <= 10 * 366 * 86400):
        raise Refusal(400, f"ttl_seconds {ttl!r:.50} must be from 3600 to ten years")


def _parse_page(request: Request) -> tuple[int, int]:
    """Return the offset and limit of a list request."""
    try:
        offset = int(request.query_params.get("offset", 0))
        limit = int(request.query_params.get("limit", 100))
    except ValueError:
        raise Refusal(400, "offset and limit are whole numbers") from None
    return max(0, offset), min(max(1, limit), 1000)


def _build_checkpoint(row: CheckpointRow) -> Any:
    return types.Checkpoint(
        checkpoint_id="/".join(row.path.split("/")[-2:]),
        checkpoint_type=row.kind,
        time=datetime.fromtimestamp(row.created, UTC),
        tinker_path=row.path,
        size_bytes=int(row.info["size_bytes"]),
        user_metadata=row.info.get("metadata"),
        expires_at=None if row.expires is None else datetime.fromtimestamp(row.expires, UTC),
    )
