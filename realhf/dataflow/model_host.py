"""The worker's side of a call: inputs from the store or from peers, the interface, outputs into the store.

It knows models and interfaces by their contracts only and contains no algorithm. Every call starts from the
seed in its request, for the random states of python, numpy and torch alike, so that a result depends on the
call and not on what ran before, and recovery has no random state to restore.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from realhf.api.mfc import InterfaceType, MFCDef
from realhf.api.model import CallContext, Model, TrainResult
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.api.trace import GENERATE, REF, TRAIN, NoTrace, Tracer
from realhf.builtins import interfaces as interface_registry
from realhf.dataflow.model_function_call import WrongReply, check_keys
from realhf.transport.codec import encode_sample
from realhf.transport.errors import CallCancelled
from realhf.transport.tensors.store import TensorStore

Fetcher = Callable[[str, Sequence[str], Sequence[str], float], SequenceSample]
"""(endpoint, ids, keys, timeout in seconds) -> the values; ``DataPlane.fetch`` is one."""

Handler = Callable[[dict[str, Any]], dict[str, Any]]

INTERFACE_STATE = "interfaces.json"


class Dataset(Protocol):
    """Rows that live on a worker. The source on the master decides which come next: metadata ``row``."""

    def load(self, ids: Sequence[str], rows: Sequence[int]) -> SequenceSample:
        """One sample per id."""
        ...


class ModelHost:
    """Holds the models of one worker by role, and the interface of every model function call it may get. It owns the
    policy version: it alone sets ``Engine.version``, to the step's number before every call and to the next one after
    a train call. ``given_up`` tells whether the master has cancelled the call that is running;
    ``RpcWorker.given_up`` is one."""

    def __init__(
        self,
        models: Mapping[str, Model],
        interfaces: Mapping[str, tuple[MFCDef, Any]],
        store: TensorStore,
        fetch: Fetcher,
        *,
        run_dir: Path,
        dataset: Dataset | None = None,
        fetch_timeout_s: float = 120.0,
        tracer: Tracer | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._models = dict(models)
        self._interfaces = dict(interfaces)
        self._store, self._fetch = store, fetch
        self._run_dir, self._fetch_timeout_s = run_dir, fetch_timeout_s
        self._dataset = dataset
        self._tracer = tracer or NoTrace()
        self._given_up = given_up
        self._lock = threading.Lock()
        self._in_hand: frozenset[str] = frozenset()
        self._cleared_meanwhile: set[str] = set()
        # An evaluation with the arguments of a call shares its interface, and what that holds open.
        self._evaluators: dict[str, Any] = {
            _interface_key(mfc.interface, mfc.interface_args): interface for mfc, interface in interfaces.values()
        }

    def handlers(self) -> dict[str, Handler]:
        """Handlers for the ordered lane, by name."""
        return {
            "call": self.call,
            "load": self.load,
            "evaluate": self.evaluate,
            "save": self.save,
            "restore": self.restore,
            "committed": self.committed,
            "export": self.export,
            "stats": self.stats,
        }

    def immediate_handlers(self) -> dict[str, Handler]:
        """Handlers for the immediate lane, by name: freeing memory does not wait for a long call."""
        return {"clear": self.clear}

    def close(self) -> None:
        """Close the interfaces that hold something open."""
        held = [*(interface for _, interface in self._interfaces.values()), *self._evaluators.values()]
        for interface in {id(interface): interface for interface in held}.values():
            close = getattr(interface, "close", None)
            if close is not None:
                close()

    # ---- calls

    def call(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Run one call: {mfc, role, ids, keys, metadata, fetches, step, seed, endpoints} ->
        {meta: encoded outputs or None, stats, compute_s, fetch_s}."""
        with self._working_on(payload["ids"]):
            return self._call(payload)

    def _call(self, payload: dict[str, Any]) -> dict[str, Any]:
        mfc, interface = self._interfaces[payload["mfc"]]
        model = self._model(payload["role"])
        began = time.perf_counter()
        sample = self._inputs(mfc, payload)
        fetched = time.perf_counter()
        context = self._context(payload, mfc.mb_spec)
        model.engine.version = context.step  # a step begins with the version of its number and makes the next one
        with self._tracer.span(_traced_as(mfc), step=context.step):
            result = getattr(interface, mfc.interface_type.value)(model, sample, context)
        if mfc.interface_type is InterfaceType.TRAIN_STEP:
            model.engine.version = context.step + 1
        outputs, stats = _parted(mfc, result)
        meta = None if outputs is None else self._stored(mfc, outputs, sample.ids, context.step)
        return {
            "meta": meta,
            "stats": _plain_stats(stats),
            "compute_s": time.perf_counter() - fetched,
            "fetch_s": fetched - began,
        }

    def _stored(self, mfc: MFCDef, outputs: SequenceSample, ids: Sequence[str], step: int) -> list[bytes]:
        if mfc.output_key_remap:
            present = {old: new for old, new in mfc.output_key_remap.items() if old in outputs.keys}
            outputs = outputs.remap_keys(present)
        if outputs.ids != tuple(ids):
            raise WrongReply(f"{mfc.name}: outputs are about other samples than the inputs, or in another order")
        try:
            check_keys(outputs.keys, mfc.output_keys)
        except WrongReply as error:
            raise WrongReply(f"{mfc.name}: {error}") from None
        self._store.put(outputs, producer=f"{mfc.name}@{step}")
        return [bytes(frame) for frame in encode_sample(outputs.meta())]

    def _inputs(self, mfc: MFCDef, payload: Mapping[str, Any]) -> SequenceSample:
        """The call's inputs in the order of its ids, under the names the interface uses."""
        ids, keys = payload["ids"], payload["keys"]
        if keys and not payload["fetches"]:
            return _renamed(mfc, self._store.get(ids, keys).annotated(payload["metadata"], keep=False))
        parts = [self._fetch(f["endpoint"], f["ids"], f["keys"], self._fetch_timeout_s) for f in payload["fetches"]]
        columns = [self._column(key, ids, parts) for key in keys]
        tensors = {key: column[key] for key, column in zip(keys, columns, strict=True)}
        seqlens = {key: column.seqlens[key] for key, column in zip(keys, columns, strict=True)}
        return _renamed(mfc, SequenceSample.from_tensors(ids, tensors, seqlens, payload["metadata"]))

    def _column(self, key: str, ids: Sequence[str], fetched: Sequence[SequenceSample]) -> SequenceSample:
        parts = [part.select([key]) for part in fetched if key in part.keys]
        covered = {sample_id for part in parts for sample_id in part.ids}
        local = [sample_id for sample_id in ids if sample_id not in covered]
        if local:
            parts.append(self._store.get(local, [key]))
        joined = parts[0] if len(parts) == 1 else SequenceSample.gather(parts, allow_metadata_loss=True)
        if joined.ids == tuple(ids):
            return joined
        position = {sample_id: i for i, sample_id in enumerate(joined.ids)}
        return joined.select_ids([position[sample_id] for sample_id in ids])

    def _context(self, payload: Mapping[str, Any], mb_spec: MicroBatchSpec) -> CallContext:
        seed = int(payload["seed"])
        _seed_everything(seed)
        return CallContext(int(payload["step"]), seed, mb_spec, self._run_dir, dict(payload["endpoints"]))

    def _model(self, role: str) -> Model:
        if role not in self._models:
            raise KeyError(f"this worker has no model role {role!r} (it has {', '.join(sorted(self._models))})")
        return self._models[role]

    def weights(self, role: str, version: int) -> Mapping[str, Any]:
        """The parameters of a role by name, as they are: copy what has to stay. Raises RuntimeError where they are of
        another policy version than the caller believes."""
        engine = self._model(role).engine
        if engine.version != version:
            raise RuntimeError(f"{role} has weights of version {engine.version}, not of version {version}")
        return engine.weights()

    # ---- data

    def load(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Store integers drawn by the source as i64, and what the dataset has for their metadata:
        {ids, values: {key: one list per id}, metadata} -> {nbytes, meta: encoded keys of the dataset or None}."""
        with self._working_on(payload["ids"]):
            return self._load(payload)

    def _load(self, payload: dict[str, Any]) -> dict[str, Any]:
        import torch

        ids, values = payload["ids"], payload["values"]
        tensors = {
            key: torch.tensor([item for row in rows for item in row], dtype=torch.int64) for key, rows in values.items()
        }
        lengths = {key: [[len(row)] for row in rows] for key, rows in values.items()}
        if tensors:
            self._store.put(SequenceSample.from_tensors(ids, tensors, lengths), producer="load")
        meta = None
        if self._dataset is not None:
            sample = self._dataset.load(ids, payload["metadata"]["row"])
            self._store.put(sample, producer="load")
            meta = [bytes(frame) for frame in encode_sample(sample.meta())]
        return {"nbytes": self._store.nbytes, "meta": meta}

    def clear(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Free what is held of {ids}, and what a call that is running stores of them; returns the bytes still held.
        From any thread."""
        with self._lock:
            self._cleared_meanwhile |= self._in_hand.intersection(payload["ids"])
        self._store.clear(payload["ids"])
        return {"nbytes": self._store.nbytes}

    @contextlib.contextmanager
    def _working_on(self, ids: Sequence[str]) -> Iterator[None]:
        """A call that nobody waits for any more, because it was cancelled, must leave nothing behind when it ends."""
        with self._lock:
            self._in_hand, self._cleared_meanwhile = frozenset(ids), set()
        try:
            # A clear that came before this point found nothing in hand; the cancellation came before it.
            if self._given_up():
                raise CallCancelled("cancelled as it began")
            yield
        finally:
            with self._lock:
                gone, self._in_hand = self._cleared_meanwhile, frozenset()
            if gone:
                self._store.clear(gone)

    def stats(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Bytes and samples held, and the roles of this worker."""
        del payload
        return {"nbytes": self._store.nbytes, "samples": len(self._store), "roles": sorted(self._models)}

    # ---- outside the graph

    def evaluate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Run an interface's ``evaluate``: {role, interface, interface_args, args, step, seed, endpoints, release}. The
        interface is built once per name and arguments; ``release``: what it holds open is closed afterwards."""
        key = _interface_key(payload["interface"], payload["interface_args"])
        if key not in self._evaluators:
            build = interface_registry.get(payload["interface"])
            self._evaluators[key] = build(**payload["interface_args"])
        began = time.perf_counter()
        context = self._context(payload, MicroBatchSpec())
        model = self._model(payload["role"])
        evaluator = self._evaluators[key]
        try:
            stats = evaluator.evaluate(model, payload.get("args", {}), context)
        finally:
            if payload.get("release") and hasattr(evaluator, "close"):
                evaluator.close()
        return {"stats": stats, "compute_s": time.perf_counter() - began}

    def save(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Write the recovery state of {roles} and of all interfaces below {folder}."""
        folder = Path(payload["folder"])
        for role in payload["roles"]:
            (folder / role).mkdir(parents=True, exist_ok=True)
            self._model(role).engine.save_checkpoint(folder / role)
        states = {name: interface.state_dict() for name, (_, interface) in sorted(self._interfaces.items())}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INTERFACE_STATE).write_text(json.dumps(states))
        return {"roles": list(payload["roles"])}

    def restore(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Read what ``save`` wrote."""
        folder = Path(payload["folder"])
        for role in payload["roles"]:
            self._model(role).engine.load_checkpoint(folder / role)
        states = json.loads((folder / INTERFACE_STATE).read_text())
        for name, (_, interface) in self._interfaces.items():
            interface.load_state_dict(states.get(name, {}))
        return {"roles": list(payload["roles"])}

    def committed(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint that the last ``save`` belongs to is complete; tell the interfaces that want to know."""
        del payload
        for _, interface in self._interfaces.values():
            tell = getattr(interface, "committed", None)
            if tell is not None:
                tell()
        return {}

    def export(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Write {role} in Hugging Face format into {folder}."""
        folder = Path(payload["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        self._model(payload["role"]).engine.export_hf(folder)
        return {"folder": str(folder)}


def _traced_as(mfc: MFCDef) -> str:
    """Name of the span of a call."""
    kinds = {InterfaceType.TRAIN_STEP: TRAIN, InterfaceType.GENERATE: GENERATE}
    return f"{kinds.get(mfc.interface_type, REF)}/{mfc.name}"


def _renamed(mfc: MFCDef, sample: SequenceSample) -> SequenceSample:
    """Under the names that the interface uses."""
    return sample.remap_keys({old: new for old, new in mfc.input_key_remap.items() if old in sample.keys})


def _interface_key(name: str, args: Mapping[str, Any]) -> str:
    return json.dumps([name, dict(args)], sort_keys=True)


def _seed_everything(seed: int) -> None:
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Without a GPU, torch.manual_seed keeps a formatted stack of every call for the day one is initialised.
    seeds = torch if torch.cuda.is_available() else torch.default_generator
    seeds.manual_seed(seed)


def _parted(mfc: MFCDef, result: Any) -> tuple[SequenceSample | None, Mapping[str, Any]]:
    """An interface's answer as (outputs, statistics). ``skipped`` says that a train step changed nothing."""
    if isinstance(result, TrainResult):
        return None, {**result.stats, "grad_norm": result.grad_norm, "skipped": float(result.skipped)}
    if isinstance(result, SequenceSample):
        return result, {}
    if mfc.interface_type.produces_keys:
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], SequenceSample):
            return result
        raise WrongReply(f"{mfc.name}: {mfc.interface_type.value} answered with a {type(result).__name__}")
    if not isinstance(result, Mapping):
        raise WrongReply(f"{mfc.name}: {mfc.interface_type.value} answered with a {type(result).__name__}")
    return None, result


def _plain_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Booleans and numpy scalars become numbers; the rest is left to the wire to accept or refuse."""
    return {
        name: float(value) if isinstance(value, (bool, int, float, np.generic)) else value
        for name, value in stats.items()
    }
