"""Serves model function calls on a worker: inputs from the store or peers, the interface, outputs into the store,
weights into checkpoints.

It knows models and interfaces by their contracts only and contains no algorithm. Every call starts from the
seed in its request, for the random states of python, numpy and torch alike, so that a result depends on the
call and not on what ran before, and recovery has no random state to restore.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from realhf.api.calls import (
    ABORT,
    CALL,
    CLEAR,
    COMMITTED,
    EVALUATE,
    EXPORT,
    GATHER,
    HELD,
    KEEP_EXPORT,
    LOAD,
    PROGRESS,
    RESTORE,
    SAVE,
    AbortRequest,
    CallAnswer,
    CallRequest,
    CheckpointRequest,
    ClearRequest,
    EvaluateAnswer,
    EvaluateRequest,
    ExportRequest,
    GatherRequest,
    GroupPart,
    HeldAnswer,
    KeepExportRequest,
    LoadAnswer,
    LoadRequest,
    Nothing,
    ProgressAnswer,
    SaveAnswer,
)
from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.model import CallContext, Engine, EpisodeCount, Model, TrainResult
from realhf.api.parallel import Group, HeldInParts
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.api.sample_check import check_standard_keys
from realhf.api.trace import GENERATE, NO_RECORDER, REF, TRAIN, RolloutRecorder, Tracer
from realhf.base.files import disk_blamed, whole_folder, write_whole
from realhf.base.tensor_digest import SCHEME, digests, joint_digest
from realhf.dataflow.best_policy import HELD_OUT_FILE
from realhf.dataflow.checkpoint import saved_file
from realhf.dataflow.model_function_call import WrongReply, check_keys
from realhf.registry import interfaces as interface_registry
from realhf.transport.codec import encode_sample
from realhf.transport.errors import CallCancelled
from realhf.transport.tensor_store import TensorStore

if TYPE_CHECKING:
    from torch import Tensor

DIGESTS_FILE = "weight_digests.json"
_log = logging.getLogger(__name__)


def write_digests(folder: Path, engine: Engine, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write ``weight_digests.json`` about ``weights``, by default those of the engine: how digests are computed, the
    policy version, one digest of all tensors as ``weights.jsonl`` of the run has it, and that of each by its name."""
    tensors = digests(engine.weights() if weights is None else weights)
    content = {"scheme": SCHEME, "version": engine.version, "digest": joint_digest(tensors), "tensors": tensors}
    write_whole(folder / DIGESTS_FILE, json.dumps(content, indent=1))


def stored_weights(engine: Engine) -> dict[str, Tensor]:
    """Return what a checkpoint of an engine restores to the bit: its weights, unless it says something else, because
    those are computed from others. Raises HeldInParts as ``weights`` does."""
    return getattr(engine, "stored_weights", engine.weights)()


def check_digests(folder: Path, engine: Engine) -> None:
    """Raise ValueError where an engine that has loaded a checkpoint does not hold the weights it was made of; the error
    names the tensor. A folder without digests passes, an engine that holds a part, and, with a warning, digests that
    another version of the package computed otherwise: the files have checksums."""
    path = folder / DIGESTS_FILE
    if not path.exists():
        return
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("scheme") != SCHEME:
        _log.warning("%s was computed otherwise than by %r and is not compared", path, SCHEME)
        return
    expected: dict[str, str] = stored["tensors"]
    try:
        found = digests(stored_weights(engine))
    except HeldInParts:
        return
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"checkpoint {folder}: {name} was saved with digest {expected.get(name, 'none')} and is restored with "
                f"{found.get(name, 'none')}"
            )


Fetcher = Callable[[str, Sequence[str], Sequence[str], float], SequenceSample]
"""(endpoint, ids, keys, timeout in seconds) -> the values; ``DataPlane.fetch`` is one."""
Handler = Callable[[Any], Any]
"""Payload of a request -> payload of its answer."""
INTERFACE_STATE = "interfaces.json"


class Dataset(Protocol):
    """Rows that live on a worker. The source on the master decides which come next: metadata ``row``."""

    def load(self, ids: Sequence[str], rows: Sequence[int]) -> SequenceSample:
        """One sample per id."""
        ...


class ModelHost:
    """Holds the models of one worker by role, and the interface of every model function call it may get. It owns the
    policy version: it alone sets ``Engine.version``, to the step's number before every call and to the next one after
    a train call. ``given_up`` tells whether the master has cancelled the call that is running, such as
    ``RpcWorker.is_running_call_cancelled``; ``addressed`` turns the address of an HTTP server of the run into the one
    that a client needs, with its token; ``recorder`` keeps rollouts."""

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
        addressed: Callable[[str], str] = str,
        recorder: RolloutRecorder = NO_RECORDER,
    ) -> None:
        self._models = dict(models)
        self._interfaces = dict(interfaces)
        self._store, self._fetch = store, fetch
        self._run_dir, self._fetch_timeout_s = run_dir, fetch_timeout_s
        self._dataset = dataset
        self._tracer = tracer or Tracer()
        self._given_up, self._addressed, self._recorder = given_up, addressed, recorder
        self._lock = threading.Lock()
        self._in_hand: frozenset[str] = frozenset()
        self._progress = EpisodeCount()
        self._cleared_meanwhile: set[str] = set()
        # An evaluation with the arguments of a call shares its interface, and what that holds open.
        self._evaluators: dict[str, Any] = {
            interface_key(mfc.interface, mfc.interface_args): interface for mfc, interface in interfaces.values()
        }

    def handlers(self) -> dict[str, Handler]:
        """Handlers for the ordered lane, by name."""
        return dict(
            [
                CALL.served_by(self.call),
                LOAD.served_by(self.load),
                EVALUATE.served_by(self.evaluate),
                SAVE.served_by(self.save),
                RESTORE.served_by(self.restore),
                COMMITTED.served_by(self.committed),
                EXPORT.served_by(self.export),
                KEEP_EXPORT.served_by(self.keep_export),
                GATHER.served_by(self.gather),
                HELD.served_by(self.held),
            ]
        )

    def immediate_handlers(self) -> dict[str, Handler]:
        """Handlers for the immediate lane, by name: what does not wait for a long call."""
        return dict([CLEAR.served_by(self.clear), ABORT.served_by(self.abort), PROGRESS.served_by(self.progress)])

    def close(self) -> None:
        """Close the interfaces that hold something open."""
        held = [*(interface for _, interface in self._interfaces.values()), *self._evaluators.values()]
        for interface in {id(interface): interface for interface in held}.values():
            close = getattr(interface, "close", None)
            if close is not None:
                close()

    # ---- calls

    def call(self, request: CallRequest) -> CallAnswer:
        """Run one model function call."""
        with self._working_on(request.ids):
            mfc, interface = self._interfaces[request.mfc]
            model = self._model(request.role)
            began = time.perf_counter()
            sample = self._inputs(mfc, request)
            fetched = time.perf_counter()
            context = self._context(request, mfc.mb_spec)
            if mfc.interface_type in (InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP):
                self._release_generation()
            with self._together(request.role, request.group), self._tracer.span(_traced_as(mfc), step=context.step):
                # A step begins with the version of its number and makes the next one.
                model.engine.version = context.step
                result = getattr(interface, mfc.interface_type.value)(model, sample, context)
            if mfc.interface_type is InterfaceType.TRAIN_STEP:
                model.engine.version = context.step + 1
            outputs, stats = _parted(mfc, result)
            keeps = outputs is not None and (request.group is None or request.group.rank == 0)
            meta = self._stored(mfc, outputs, sample.ids, context.step) if keeps and outputs is not None else None
            return CallAnswer(meta, _plain_stats(stats), time.perf_counter() - fetched, fetched - began)

    def _release_generation(self) -> None:
        """Have all roles here give back what they hold for generation: the call, of whatever role, wants the memory."""
        for model in self._models.values():
            release = getattr(model.engine, "release_generation", None)
            if release is not None:
                release()

    def _together(self, role: str, group: GroupPart | None) -> contextlib.AbstractContextManager[None]:
        """Compute with the other ranks of the role, in a group call. Raises RuntimeError where its engine cannot."""
        if group is None:
            return contextlib.nullcontext()
        return self._ranks(role).together(f"{role}, group call {group.no}")

    def _ranks(self, role: str) -> Group:
        ranks = getattr(self._model(role).engine, "ranks", None)
        if ranks is None:
            raise RuntimeError(f"{role}: its backend computes on one worker only")
        return ranks

    def gather(self, request: GatherRequest) -> Nothing:
        """Bring the whole weights of a role together, with the other ranks, until it trains again."""
        with self._together(request.role, request.group):
            here = request.everywhere or request.group.rank == 0
            self._model(request.role).engine.gather(here=here)  # pyright: ignore[reportAttributeAccessIssue]
        return Nothing()

    def abort(self, request: AbortRequest) -> Nothing:
        """Break off what this worker computes together with others. From any thread."""
        for role in self._models:
            if getattr(self._models[role].engine, "ranks", None) is not None:
                self._ranks(role).abort(request.reason)
        return Nothing()

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

    def _inputs(self, mfc: MFCDef, request: CallRequest) -> SequenceSample:
        """The call's inputs in the order of its ids, under the names the interface uses. Raises ValueError where a key
        is not what it is registered as: whoever computed with it would be wrong without a word."""
        sample = _renamed(mfc, self._joined(request))
        check_standard_keys(sample)
        return sample

    def _joined(self, request: CallRequest) -> SequenceSample:
        ids, keys = request.ids, request.keys
        if keys and not request.fetches:
            return self._store.get(ids, keys).annotated(request.metadata, keep=False)
        parts = [self._fetch(part.endpoint, part.ids, part.keys, self._fetch_timeout_s) for part in request.fetches]
        columns = [self._column(key, ids, parts) for key in keys]
        tensors = {key: column[key] for key, column in zip(keys, columns, strict=True)}
        seqlens = {key: column.seqlens[key] for key, column in zip(keys, columns, strict=True)}
        return SequenceSample.from_tensors(ids, tensors, seqlens, request.metadata)

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

    def _context(self, request: CallRequest | EvaluateRequest, mb_spec: MicroBatchSpec) -> CallContext:
        _seed_everything(request.seed)
        endpoints = {kind: [self._addressed(url) for url in urls] for kind, urls in request.endpoints.items()}
        self._progress = EpisodeCount()
        recorder = self._recorder_of(request)
        return CallContext(request.step, request.seed, mb_spec, self._run_dir, endpoints, recorder, self._progress)

    def _recorder_of(self, request: CallRequest | EvaluateRequest) -> RolloutRecorder:
        """The first rank keeps what all of them compute; the others compute it all the same."""
        group = request.group if isinstance(request, CallRequest) else None
        return self._recorder if group is None or group.rank == 0 else RolloutRecorder(self._recorder.keeps)

    def _model(self, role: str) -> Model:
        if role not in self._models:
            raise KeyError(f"this worker has no model role {role!r} (it has {', '.join(sorted(self._models))})")
        return self._models[role]

    def engine(self, role: str, version: int) -> Engine:
        """The engine of a role. Raises RuntimeError where its weights are of another policy version than the caller
        believes."""
        engine = self._model(role).engine
        if engine.version != version:
            raise RuntimeError(f"{role} has weights of version {engine.version}, not of version {version}")
        return engine

    # ---- data

    def load(self, request: LoadRequest) -> LoadAnswer:
        """Store integers drawn by the source as i64, and what the dataset has for their metadata."""
        import torch

        with self._working_on(request.ids):
            ids, values = request.ids, request.values
            tensors = {
                key: torch.tensor([item for row in rows for item in row], dtype=torch.int64)
                for key, rows in values.items()
            }
            lengths = {key: [[len(row)] for row in rows] for key, rows in values.items()}
            if tensors:
                self._store.put(SequenceSample.from_tensors(ids, tensors, lengths), producer="load")
            meta = None
            if self._dataset is not None:
                sample = self._dataset.load(ids, request.metadata["row"])
                self._store.put(sample, producer="load")
                meta = [bytes(frame) for frame in encode_sample(sample.meta())]
            return LoadAnswer(meta)

    def clear(self, request: ClearRequest) -> Nothing:
        """Free what is held of these samples, and what a call that is running stores of them. From any thread."""
        with self._lock:
            self._cleared_meanwhile |= self._in_hand.intersection(request.ids)
        self._store.clear(request.ids)
        return Nothing()

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

    def progress(self, request: Nothing) -> ProgressAnswer:
        """How far a call that plays has come."""
        del request
        return ProgressAnswer(self._progress.over, self._progress.wanted)

    def held(self, request: Nothing) -> HeldAnswer:
        """Bytes and samples held, and the roles of this worker."""
        del request
        return HeldAnswer(self._store.nbytes, len(self._store), sorted(self._models))

    # ---- outside the graph

    def evaluate(self, request: EvaluateRequest) -> EvaluateAnswer:
        """Run an interface's ``evaluate``. The interface is built once per name and arguments."""
        key = interface_key(request.interface, request.interface_args)
        if key not in self._evaluators:
            build = interface_registry.get(request.interface)
            self._evaluators[key] = build(**request.interface_args)
        context = self._context(request, MicroBatchSpec())
        model = self._model(request.role)
        evaluator = self._evaluators[key]
        return EvaluateAnswer(evaluator.evaluate(model, request.args, context))

    def save(self, request: CheckpointRequest) -> SaveAnswer:
        """Write the recovery state of the roles and of all interfaces; answer with what was written."""
        files: list[Path] = []
        for role, folder in ((role, Path(text)) for role, text in request.roles.items()):
            folder.mkdir(parents=True, exist_ok=True)
            engine = self._model(role).engine
            with disk_blamed(folder):
                own = engine.save_checkpoint(folder)
                if own is None:
                    write_digests(folder, engine, stored_weights(engine))
                    own = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                elif self._ranks(role).number == 0:
                    own = [*own, *_whole_digests(folder, engine)]
            files += own
        states = {
            name: interface.state_dict() if hasattr(interface, "state_dict") else {}
            for name, (_, interface) in sorted(self._interfaces.items())
        }
        folder = Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INTERFACE_STATE).write_text(json.dumps(states))
        return SaveAnswer([saved_file(path) for path in [*files, folder / INTERFACE_STATE]])

    def restore(self, request: CheckpointRequest) -> Nothing:
        """Read what ``save`` wrote, here or on another worker: a call may have moved, or come to one more worker.
        Raises ValueError where the weights are not those that were saved."""
        for role, folder in request.roles.items():
            engine = self._model(role).engine
            engine.load_checkpoint(Path(folder))
            check_digests(Path(folder), engine)
        own = Path(request.folder)
        states: dict[str, Any] = {}
        for path in [*sorted(own.parent.glob(f"*/{INTERFACE_STATE}"), reverse=True), own / INTERFACE_STATE]:
            states |= json.loads(path.read_text()) if path.is_file() else {}
        for name, (_, interface) in self._interfaces.items():
            state = states.get(name, {})
            if hasattr(interface, "load_state_dict"):
                interface.load_state_dict(state)
            elif state:
                raise ValueError(
                    f"{name}: {type(interface).__name__} has a state in the checkpoint, but no load_state_dict"
                )
        return Nothing()

    def committed(self, request: Nothing) -> Nothing:
        """The checkpoint that the last ``save`` belongs to is complete; tell the interfaces that want to know."""
        del request
        for _, interface in self._interfaces.values():
            tell = getattr(interface, "committed", None)
            if tell is not None:
                tell()
        return Nothing()

    def export(self, request: ExportRequest) -> Nothing:
        """Write a role in Hugging Face format into ``folder``, with the digests of its weights. The folder appears, or
        is replaced, only when complete: that it is there says that it was made."""
        engine = self._model(request.role).engine
        with whole_folder(Path(request.folder)) as folder:
            engine.export_hf(folder)
            write_digests(folder, engine)
        return Nothing()

    def keep_export(self, request: KeepExportRequest) -> Nothing:
        """Move an exported policy to its place, with the figures of its evaluation. The policy of before stays there
        until the new one is complete. Raises OSError."""
        exported = Path(request.folder)
        with whole_folder(Path(request.target)) as folder:
            for path in exported.iterdir():
                os.replace(path, folder / path.name)
            write_whole(folder / HELD_OUT_FILE, request.held_out)
        exported.rmdir()
        return Nothing()


def _whole_digests(folder: Path, engine: Engine) -> list[Path]:
    """Write the digests of an engine that trains with others, and return their file; none where it holds a part of the
    weights."""
    try:
        write_digests(folder, engine, stored_weights(engine))
    except HeldInParts:
        return []
    return [folder / DIGESTS_FILE]


def _traced_as(mfc: MFCDef) -> str:
    """Name of the span of a call."""
    kinds = {InterfaceType.TRAIN_STEP: TRAIN, InterfaceType.GENERATE: GENERATE}
    return f"{kinds.get(mfc.interface_type, REF)}/{mfc.name}"


def _renamed(mfc: MFCDef, sample: SequenceSample) -> SequenceSample:
    """Under the names that the interface uses."""
    return sample.remap_keys({old: new for old, new in mfc.input_key_remap.items() if old in sample.keys})


def interface_key(name: str, args: Mapping[str, Any]) -> str:
    """Return what an interface with these arguments is known by."""
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


def call_interfaces(mfcs: Iterable[MFCDef]) -> dict[str, tuple[MFCDef, Any]]:
    """Return for the name of each call the call and its interface.

    Calls of one role with the same interface and the same arguments share one object, so what one of them learns the
    others know: a critic's inference predicts in the units that its training measured.
    """
    shared: dict[str, Any] = {}
    found = {}
    for mfc in mfcs:
        key = json.dumps([mfc.model_role, interface_key(mfc.interface, mfc.interface_args)])
        if key not in shared:
            shared[key] = interface_registry.get(mfc.interface)(**mfc.interface_args)
        found[mfc.name] = (mfc, shared[key])
    return found
