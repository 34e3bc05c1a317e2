"""Request handlers of a model worker: model function calls, data, checkpoints and exports.

The host fetches the inputs of a call from the store or from other workers, runs the interface and
puts its outputs into the store. It knows models and interfaces only by their contracts and contains
no algorithm. Every call seeds the random states of Python, NumPy and torch with the seed in its
request. So a result depends on the call and not on earlier ones, and recovery has no random state
to restore.
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
from realhf.api.parallel import Group, WeightsNotGathered
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.api.sample_check import check_standard_keys
from realhf.api.trace import GENERATE, NO_RECORDER, REF, TRAIN, RolloutRecorder, Tracer
from realhf.base.files import atomic_folder, convert_disk_errors, write_atomic
from realhf.base.tensor_digest import SCHEME, digest_tensors, joint_digest
from realhf.dataflow.best_policy import HELD_OUT_FILE
from realhf.dataflow.checkpoint import sync_and_hash
from realhf.dataflow.model_function_call import WrongReply, check_keys
from realhf.registry import interfaces as interface_registry
from realhf.transport.codec import encode_sample
from realhf.transport.errors import CallCancelled
from realhf.transport.tensor_store import TensorStore

if TYPE_CHECKING:
    from torch import Tensor

DIGESTS_FILE = "weight_digests.json"
"""File, within a checkpoint or export, with the digests of its weights."""
_log = logging.getLogger(__name__)


def write_digests(
    folder: Path, engine: Engine, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the digests of ``weights`` (default: the engine's) to ``weight_digests.json``.

    The file has the digest scheme, the policy version, the joint digest that is also in the run's
    ``weights.jsonl``, and the digest of each tensor by name.
    """
    tensors = digest_tensors(engine.weights() if weights is None else weights)
    content = {
        "scheme": SCHEME,
        "version": engine.version,
        "digest": joint_digest(tensors),
        "tensors": tensors,
    }
    write_atomic(folder / DIGESTS_FILE, json.dumps(content, indent=1))


def stored_weights(engine: Engine) -> dict[str, Tensor]:
    """Return the tensors that an engine's checkpoint restores bit by bit.

    These are its weights, unless the weights are computed from other tensors (merged adapters).
    Raises WeightsNotGathered as ``weights`` does.
    """
    return getattr(engine, "stored_weights", engine.weights)()


def check_digests(folder: Path, engine: Engine) -> None:
    """Raise ValueError, naming the tensor, unless an engine's weights equal those of the checkpoint
    that it has loaded.

    Nothing is compared if the folder has no digests, if the engine holds only a part of the weights
    or, with a warning, if another version of the package used another digest scheme. (The files of
    a checkpoint also have checksums.)
    """
    path = folder / DIGESTS_FILE
    if not path.exists():
        return
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("scheme") != SCHEME:
        _log.warning("%s was computed otherwise than by %r and is not compared", path, SCHEME)
        return
    expected: dict[str, str] = stored["tensors"]
    try:
        restored = digest_tensors(stored_weights(engine))
    except WeightsNotGathered:
        return
    for name in sorted(expected.keys() | restored.keys()):
        if expected.get(name) != restored.get(name):
            raise ValueError(
                f"checkpoint {folder}: {name} was saved with digest {expected.get(name, 'none')} "
                f"and is restored with "
                f"{restored.get(name, 'none')}"
            )


Fetcher = Callable[[str, Sequence[str], Sequence[str], float], SequenceSample]
"""Function (endpoint, ids, keys, timeout in seconds) -> values, such as ``DataPlane.fetch``."""
Handler = Callable[[Any], Any]
"""Function from the payload of a request to the payload of its answer."""
INTERFACE_STATE = "interfaces.json"
"""File, within a worker's part of a checkpoint, with the states of its interfaces."""


class Dataset(Protocol):
    """Dataset whose rows are stored on a worker. The source on the master chooses rows by the
    metadata field ``row``."""

    def load(self, ids: Sequence[str], rows: Sequence[int]) -> SequenceSample:
        """Return one sample for each id, from the dataset row at the same position of ``rows``."""
        ...


class ModelHost:
    """Models of one worker by role, and the interfaces of the model function calls that it may
    receive.

    The host controls the policy version: only it sets ``Engine.version``, to the step's number
    before every call and to the next number after a train call.

    ``given_up()`` returns whether the master has cancelled the running call
    (``RpcWorker.is_running_call_cancelled``). ``addressed(url)`` adds the run's token to the URL of
    one of its HTTP servers. ``recorder`` records rollouts.
    """

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
        self._store = store
        self._fetch = fetch
        self._run_dir = run_dir
        self._fetch_timeout_s = fetch_timeout_s
        self._dataset = dataset
        self._tracer = tracer or Tracer()
        self._is_cancelled = given_up
        self._addressed = addressed
        self._recorder = recorder
        self._lock = threading.Lock()
        """Guards the next two fields, which ``clear`` accesses from another thread."""
        self._ids_of_call: frozenset[str] = frozenset()
        """Ids of the running call's samples."""
        self._cleared_during_call: set[str] = set()
        """Those of the running call's samples that have been cleared since it began."""
        self._progress = EpisodeCount()
        # An evaluation with the arguments of a call shares its interface, including connections
        # that it keeps open.
        self._evaluators: dict[str, Any] = {
            interface_key(mfc.interface, mfc.interface_args): interface
            for mfc, interface in interfaces.values()
        }

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of the ordered lane, by name."""
        return dict(
            [
                CALL.with_handler(self.call),
                LOAD.with_handler(self.load),
                EVALUATE.with_handler(self.evaluate),
                SAVE.with_handler(self.save),
                RESTORE.with_handler(self.restore),
                COMMITTED.with_handler(self.committed),
                EXPORT.with_handler(self.export),
                KEEP_EXPORT.with_handler(self.keep_export),
                GATHER.with_handler(self.gather),
                HELD.with_handler(self.describe_store),
            ]
        )

    def immediate_handlers(self) -> dict[str, Handler]:
        """Return the handlers of the immediate lane, by name. They do not wait for a running
        call."""
        return dict(
            [
                CLEAR.with_handler(self.clear),
                ABORT.with_handler(self.abort),
                PROGRESS.with_handler(self.progress),
            ]
        )

    def close(self) -> None:
        """Close the interfaces that have a ``close`` method."""
        all_interfaces = [
            *(interface for _, interface in self._interfaces.values()),
            *self._evaluators.values(),
        ]
        for interface in {id(interface): interface for interface in all_interfaces}.values():
            close = getattr(interface, "close", None)
            if close is not None:
                close()

    # ---- calls

    def call(self, request: CallRequest) -> CallAnswer:
        """Run one model function call."""
        with self._track_samples(request.ids):
            mfc, interface = self._interfaces[request.mfc]
            model = self._get_model(request.role)
            started_at = time.perf_counter()
            sample = self._load_inputs(mfc, request)
            fetched_at = time.perf_counter()
            context = self._build_context(request, mfc.mb_spec)
            if mfc.interface_type in (InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP):
                self._release_generation()
            trains = mfc.interface_type is InterfaceType.TRAIN_STEP
            use = getattr(model.engine, "device_use", None) if trains else None
            if use is not None:
                use.begin()
            span = self._tracer.span(_span_name(mfc), step=context.step)
            with self._join_group(request.role, request.group), span:
                # Step k starts with weights of version k and produces version k + 1.
                model.engine.version = context.step
                result = getattr(interface, mfc.interface_type.value)(model, sample, context)
            if trains:
                model.engine.version = context.step + 1
            outputs, stats = _split_result(mfc, result)
            if use is not None:
                stats = {**stats, **use.stats(time.perf_counter() - fetched_at)}
            take_update_s = getattr(model.engine, "take_weight_update_s", None)
            if mfc.interface_type is InterfaceType.GENERATE and take_update_s is not None:
                stats = {**stats, "weights_seconds": take_update_s()}
            meta = None
            if outputs is not None and (request.group is None or request.group.rank == 0):
                meta = self._store_outputs(mfc, outputs, sample.ids, context.step)
            return CallAnswer(
                meta, _plain_stats(stats), time.perf_counter() - fetched_at, fetched_at - started_at
            )

    def _release_generation(self) -> None:
        """Have the engines of all roles on this worker release their generation memory, which the
        call may need."""
        for model in self._models.values():
            release = getattr(model.engine, "release_generation", None)
            if release is not None:
                release()

    def _join_group(
        self, role: str, group: GroupPart | None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context manager for a group call with the other ranks of the role; one that
        does nothing if this is not a group call.

        Raises RuntimeError if the engine cannot compute on several workers.
        """
        if group is None:
            return contextlib.nullcontext()
        return self._get_group(role).together(f"{role}, group call {group.no}")

    def _get_group(self, role: str) -> Group:
        ranks = getattr(self._get_model(role).engine, "ranks", None)
        if ranks is None:
            raise RuntimeError(f"{role}: its backend computes on one worker only")
        return ranks

    def gather(self, request: GatherRequest) -> Nothing:
        """Gather the full weights of a sharded role, together with the other ranks. They are kept
        until they have been used and another call computes, or the role trains."""
        with self._join_group(request.role, request.group):
            here = request.everywhere or request.group.rank == 0
            self._get_model(request.role).engine.gather(here=here)  # pyright: ignore[reportAttributeAccessIssue]
        return Nothing()

    def abort(self, request: AbortRequest) -> Nothing:
        """Abort this worker's computations with other ranks. Thread-safe."""
        for role in self._models:
            if getattr(self._models[role].engine, "ranks", None) is not None:
                self._get_group(role).abort(request.reason)
        return Nothing()

    def _store_outputs(
        self, mfc: MFCDef, outputs: SequenceSample, ids: Sequence[str], step: int
    ) -> list[bytes]:
        """Check the outputs of a call, put them into the store and return their encoded metadata.

        Raises WrongReply if they have unexpected samples or keys.
        """
        if mfc.output_key_remap:
            present = {old: new for old, new in mfc.output_key_remap.items() if old in outputs.keys}
            outputs = outputs.remap_keys(present)
        if outputs.ids != tuple(ids):
            raise WrongReply(
                f"{mfc.name}: outputs are about other samples than the inputs, or in another order"
            )
        try:
            check_keys(outputs.keys, mfc.output_keys)
        except WrongReply as error:
            raise WrongReply(f"{mfc.name}: {error}") from None
        self._store.put(outputs, producer=f"{mfc.name}@{step}")
        return [bytes(frame) for frame in encode_sample(outputs.meta())]

    def _load_inputs(self, mfc: MFCDef, request: CallRequest) -> SequenceSample:
        """Return the call's inputs in the order of its ids, with the key names that the interface
        uses.

        Raises ValueError if a standard key has another dtype or shape than registered, which would
        silently give wrong results.
        """
        sample = _remap_inputs(mfc, self._collect(request))
        check_standard_keys(sample)
        return sample

    def _collect(self, request: CallRequest) -> SequenceSample:
        """Return the inputs from the store and, if ``request.fetches`` has any, from other
        workers."""
        ids = request.ids
        keys = request.keys
        if keys and not request.fetches:
            return self._store.get(ids, keys).annotated(request.metadata, keep=False)
        parts = [
            self._fetch(part.endpoint, part.ids, part.keys, self._fetch_timeout_s)
            for part in request.fetches
        ]
        columns = [self._collect_column(key, ids, parts) for key in keys]
        tensors = {key: column[key] for key, column in zip(keys, columns, strict=True)}
        seqlens = {key: column.seqlens[key] for key, column in zip(keys, columns, strict=True)}
        return SequenceSample.from_tensors(ids, tensors, seqlens, request.metadata)

    def _collect_column(
        self, key: str, ids: Sequence[str], fetched: Sequence[SequenceSample]
    ) -> SequenceSample:
        """Return the values of one key for all samples, in the order of ``ids``, from the fetched
        parts and the store."""
        parts = [part.select([key]) for part in fetched if key in part.keys]
        fetched_ids = {sample_id for part in parts for sample_id in part.ids}
        local_ids = [sample_id for sample_id in ids if sample_id not in fetched_ids]
        if local_ids:
            parts.append(self._store.get(local_ids, [key]))
        joined = (
            parts[0] if len(parts) == 1 else SequenceSample.gather(parts, allow_metadata_loss=True)
        )
        if joined.ids == tuple(ids):
            return joined
        position = {sample_id: i for i, sample_id in enumerate(joined.ids)}
        return joined.select_ids([position[sample_id] for sample_id in ids])

    def _build_context(
        self, request: CallRequest | EvaluateRequest, mb_spec: MicroBatchSpec
    ) -> CallContext:
        """Seed the random states and return the context of a call."""
        _seed_everything(request.seed)
        endpoints = {
            kind: [self._addressed(url) for url in urls] for kind, urls in request.endpoints.items()
        }
        self._progress = EpisodeCount()
        recorder = self._choose_recorder(request)
        return CallContext(
            request.step, request.seed, mb_spec, self._run_dir, endpoints, recorder, self._progress
        )

    def _choose_recorder(self, request: CallRequest | EvaluateRequest) -> RolloutRecorder:
        """Return the recorder for rank 0; for other ranks, return one that does the same
        computations but writes nothing."""
        group = request.group if isinstance(request, CallRequest) else None
        return (
            self._recorder
            if group is None or group.rank == 0
            else RolloutRecorder(self._recorder.keeps)
        )

    def _get_model(self, role: str) -> Model:
        if role not in self._models:
            raise KeyError(
                f"this worker has no model role {role!r} (it has {', '.join(sorted(self._models))})"
            )
        return self._models[role]

    def engine(self, role: str, version: int) -> Engine:
        """Return the engine of a role. Raises RuntimeError unless its weights have policy version
        ``version``."""
        engine = self._get_model(role).engine
        if engine.version != version:
            raise RuntimeError(
                f"{role} has weights of version {engine.version}, not of version {version}"
            )
        return engine

    # ---- data

    def load(self, request: LoadRequest) -> LoadAnswer:
        """Store the integers that the source has drawn, as i64, and the dataset's values for the
        rows named in the metadata."""
        import torch

        with self._track_samples(request.ids):
            ids = request.ids
            values = request.values
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
        """Free the tensors of samples. Those that the running call will store are freed at its end.
        Thread-safe."""
        with self._lock:
            self._cleared_during_call |= self._ids_of_call.intersection(request.ids)
        self._store.clear(request.ids)
        return Nothing()

    @contextlib.contextmanager
    def _track_samples(self, ids: Sequence[str]) -> Iterator[None]:
        """Context manager around a call on these samples. At its end it frees the samples that were
        cleared during the call.

        A cancelled call therefore leaves no tensors behind. Raises CallCancelled if the call was
        cancelled before it began.
        """
        with self._lock:
            self._ids_of_call = frozenset(ids)
            self._cleared_during_call = set()
        try:
            # A clear before this point did not know the samples of this call, but the cancellation
            # came before it.
            if self._is_cancelled():
                raise CallCancelled("cancelled as it began")
            yield
        finally:
            with self._lock:
                cleared = self._cleared_during_call
                self._ids_of_call = frozenset()
            if cleared:
                self._store.clear(cleared)

    def progress(self, request: Nothing) -> ProgressAnswer:
        """Return the number of finished episodes and of all episodes of the running call."""
        del request
        return ProgressAnswer(self._progress.finished, self._progress.total)

    def describe_store(self, request: Nothing) -> HeldAnswer:
        """Return the number of bytes and samples in the store, and the roles of this worker."""
        del request
        return HeldAnswer(self._store.nbytes, len(self._store), sorted(self._models))

    # ---- outside the graph

    def evaluate(self, request: EvaluateRequest) -> EvaluateAnswer:
        """Run an interface's ``evaluate``. The interface is built once for each combination of name
        and arguments."""
        key = interface_key(request.interface, request.interface_args)
        if key not in self._evaluators:
            build = interface_registry.get(request.interface)
            self._evaluators[key] = build(**request.interface_args)
        context = self._build_context(request, MicroBatchSpec())
        model = self._get_model(request.role)
        evaluator = self._evaluators[key]
        return EvaluateAnswer(evaluator.evaluate(model, request.args, context))

    def save(self, request: CheckpointRequest) -> SaveAnswer:
        """Write the recovery state of the roles and of all interfaces; return the written files."""
        files: list[Path] = []
        for role, folder in ((role, Path(text)) for role, text in request.roles.items()):
            folder.mkdir(parents=True, exist_ok=True)
            engine = self._get_model(role).engine
            with convert_disk_errors(folder):
                written = engine.save_checkpoint(folder)
                if written is None:  # the engine trains alone, so the folder is all its own
                    write_digests(folder, engine, stored_weights(engine))
                    written = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                elif self._get_group(role).number == 0:
                    written = [*written, *_write_group_digests(folder, engine)]
            files += written
        states = {
            name: interface.state_dict() if hasattr(interface, "state_dict") else {}
            for name, (_, interface) in sorted(self._interfaces.items())
        }
        folder = Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INTERFACE_STATE).write_text(json.dumps(states))
        return SaveAnswer([sync_and_hash(path) for path in [*files, folder / INTERFACE_STATE]])

    def restore(self, request: CheckpointRequest) -> Nothing:
        """Read what ``save`` wrote on this or another worker: calls may have moved between workers
        since.

        Raises ValueError if the restored weights differ from the saved ones.
        """
        for role, folder in request.roles.items():
            engine = self._get_model(role).engine
            engine.load_checkpoint(Path(folder))
            check_digests(Path(folder), engine)
        own = Path(request.folder)
        states: dict[str, Any] = {}
        # The states of all workers; this worker's own is read last and wins.
        for path in [
            *sorted(own.parent.glob(f"*/{INTERFACE_STATE}"), reverse=True),
            own / INTERFACE_STATE,
        ]:
            states |= json.loads(path.read_text()) if path.is_file() else {}
        for name, (_, interface) in self._interfaces.items():
            state = states.get(name, {})
            if hasattr(interface, "load_state_dict"):
                interface.load_state_dict(state)
            elif state:
                raise ValueError(
                    f"{name}: {type(interface).__name__} has a state in the checkpoint, but no "
                    f"load_state_dict"
                )
        return Nothing()

    def committed(self, request: Nothing) -> Nothing:
        """Call ``committed`` of the interfaces that have it, because the checkpoint of the last
        ``save`` is complete."""
        del request
        for _, interface in self._interfaces.values():
            on_committed = getattr(interface, "committed", None)
            if on_committed is not None:
                on_committed()
        return Nothing()

    def export(self, request: ExportRequest) -> Nothing:
        """Write a role in Hugging Face format into ``request.folder``, with the digests of its
        weights.

        The folder is created or replaced atomically, so an existing folder is complete.
        """
        engine = self._get_model(request.role).engine
        with atomic_folder(Path(request.folder)) as folder:
            engine.export_hf(folder)
            write_digests(folder, engine)
        return Nothing()

    def keep_export(self, request: KeepExportRequest) -> Nothing:
        """Move an exported policy to its final folder and add the metrics of its evaluation.

        The previous policy remains in the folder until the new one is complete. Raises OSError.
        """
        exported = Path(request.folder)
        with atomic_folder(Path(request.target)) as folder:
            for path in exported.iterdir():
                os.replace(path, folder / path.name)
            write_atomic(folder / HELD_OUT_FILE, request.held_out)
        exported.rmdir()
        return Nothing()


def _write_group_digests(folder: Path, engine: Engine) -> list[Path]:
    """Write the digests of an engine that trains together with other workers. Returns the written
    file as a list; [] if the engine holds only a part of the weights."""
    try:
        write_digests(folder, engine, stored_weights(engine))
    except WeightsNotGathered:
        return []
    return [folder / DIGESTS_FILE]


def _span_name(mfc: MFCDef) -> str:
    """Return the name of the trace span of a call."""
    kinds = {InterfaceType.TRAIN_STEP: TRAIN, InterfaceType.GENERATE: GENERATE}
    return f"{kinds.get(mfc.interface_type, REF)}/{mfc.name}"


def _remap_inputs(mfc: MFCDef, sample: SequenceSample) -> SequenceSample:
    """Return the sample with its keys renamed to those that the interface uses."""
    return sample.remap_keys(
        {old: new for old, new in mfc.input_key_remap.items() if old in sample.keys}
    )


def interface_key(name: str, args: Mapping[str, Any]) -> str:
    """Return a string that identifies an interface name together with its arguments."""
    return json.dumps([name, dict(args)], sort_keys=True)


def _seed_everything(seed: int) -> None:
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Without an initialised GPU, torch.manual_seed queues a call with a formatted stack each time:
    # a memory leak.
    seeds = torch if torch.cuda.is_available() else torch.default_generator
    seeds.manual_seed(seed)


def _split_result(mfc: MFCDef, result: Any) -> tuple[SequenceSample | None, Mapping[str, Any]]:
    """Return an interface's result as (outputs, statistics). Raises WrongReply if it has another
    type."""
    if isinstance(result, TrainResult):
        return None, {
            **result.stats,
            "grad_norm": result.grad_norm,
            "skipped": float(result.skipped),
        }
    if isinstance(result, SequenceSample):
        return result, {}
    if mfc.interface_type.produces_keys:
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], SequenceSample):
            return result
        raise WrongReply(
            f"{mfc.name}: {mfc.interface_type.value} returned a {type(result).__name__}"
        )
    if not isinstance(result, Mapping):
        raise WrongReply(
            f"{mfc.name}: {mfc.interface_type.value} returned a {type(result).__name__}"
        )
    return None, result


def _plain_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics with booleans, numbers and NumPy scalars converted to floats. Other
    values are left to the encoder, which may refuse them."""
    return {
        name: float(value) if isinstance(value, (bool, int, float, np.generic)) else value
        for name, value in stats.items()
    }


def call_interfaces(mfcs: Iterable[MFCDef]) -> dict[str, tuple[MFCDef, Any]]:
    """Return a map from the name of each call to (call, interface).

    Calls of one role with the same interface and arguments share one object and its state. A
    critic's inference, for example, denormalises values with the statistics of its training.
    """
    shared: dict[str, Any] = {}
    by_name = {}
    for mfc in mfcs:
        key = json.dumps([mfc.model_role, interface_key(mfc.interface, mfc.interface_args)])
        if key not in shared:
            shared[key] = interface_registry.get(mfc.interface)(**mfc.interface_args)
        by_name[mfc.name] = (mfc, shared[key])
    return by_name
