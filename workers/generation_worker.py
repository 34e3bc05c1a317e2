"""Generation worker: samples tokens with the newest weights for all rollout workers.

python -m workers.generation_worker --run-dir DIR --run-id ID --master tcp://... --index 0
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from realhf.api.calls import (
    FREE,
    GENERATE,
    GROUP_PLACE,
    PIN_WEIGHTS,
    PROBE_WEIGHTS,
    STATUS,
    UNPIN_WEIGHTS,
    UPDATE_WEIGHTS,
    GroupPlaceAnswer,
    Nothing,
    PinAnswer,
    StatusAnswer,
    UpdateWeightsAnswer,
    UpdateWeightsRequest,
)
from realhf.api.chat_template import TemplateChat
from realhf.api.config import CONSTRAIN, GenConfig
from realhf.api.experiment import RolloutSpec, RunPlan
from realhf.api.generation import Done, GroupMember, StreamingGenerator
from realhf.api.model import GenOutput, GenRequest
from realhf.api.trace import WEIGHTS
from realhf.backends.streaming_engines import longest_sequence, make_streaming_generator
from realhf.backends.training.tokenizer_loading import load_tokenizer
from realhf.base.loopback import LOOPBACK_INTERFACE
from realhf.base.process import collect_garbage_normally
from realhf.dataflow.weight_proof import EngineWeightDigests, WeightProbe, probe_ids
from realhf.monitor.trace import open_trace
from realhf.rollout.generation_client import build_answer, build_request
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.roster import WorkerInfo
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.service import ServiceRequest, ServiceServer
from realhf.transport.sockets import raise_descriptor_limit
from realhf.transport.weights import receive
from workers.worker_main import run_planned, worker_network

if TYPE_CHECKING:
    from torch import Tensor

LEAVE_WITHIN_S = 15.0
"""Seconds within which a dismissed worker must exit, even if it hangs in a weight update, because
its successor needs the memory."""


class SlotTable:
    """Mapping from the cache slots of all clients to the engine's slots. Each client numbers its
    own slots from 0.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[str, int], int] = {}
        self._next = 0
        self._lock = threading.Lock()

    def assign(self, client: str, slot: int) -> int:
        """Return the engine's slot for a client's slot, after assigning an unused one if
        necessary."""
        with self._lock:
            key = (client, slot)
            if key not in self._slots:
                self._slots[key] = self._next
                self._next += 1
            return self._slots[key]

    def release(self, client: str, slots: list[int]) -> list[int]:
        """Remove slots of a client, and return the engine's slots that were assigned to them."""
        with self._lock:
            return [
                self._slots.pop((client, slot)) for slot in slots if (client, slot) in self._slots
            ]

    def release_all_but(self, clients: set[str]) -> list[int]:
        """Remove the slots of all clients except ``clients``, and return the engine's slots that
        were assigned to them."""
        with self._lock:
            departed = [key for key in self._slots if key[0] not in clients]
            return [self._slots.pop(key) for key in departed]


class VersionGate:
    """Queue of requests that need newer weights than the engine has. ``version()`` returns the
    policy version of the engine's weights.

    Thread-safe. Each request waits until the engine has version ``at_least``. After an update,
    ``open`` calls ``go`` of the requests that need not wait any longer; ``drop`` calls ``give_up``.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._waiting: dict[int, tuple[int, Callable[[], None], Callable[[], None]]] = {}
        """(minimum version, ``go``, ``give_up``) of each waiting request, by slot."""
        self._lock = threading.Lock()

    def submit(
        self, slot: int, at_least: int, go: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        """Call ``go`` once the engine has version ``at_least``, possibly immediately. If the slot
        is dropped first, call ``give_up`` instead."""
        with self._lock:
            if self._version() < at_least:
                self._waiting[slot] = (at_least, go, give_up)
                return
        go()

    def open(self) -> None:
        """Start the waiting requests whose weight version the engine has reached, by calling their
        ``go``.

        Must be called after each weight update.
        """
        with self._lock:
            version = self._version()
            ready = [
                slot for slot, (at_least, _, _) in self._waiting.items() if at_least <= version
            ]
            callbacks = [self._waiting.pop(slot)[1] for slot in ready]
        for go in callbacks:
            go()

    def drop(self, slots: Sequence[int]) -> None:
        """Remove the waiting requests in these slots and call their ``give_up``."""
        with self._lock:
            callbacks = [self._waiting.pop(slot)[2] for slot in slots if slot in self._waiting]
        for give_up in callbacks:
            give_up()


class PinnedWeights:
    """Policy version that is kept for an evaluation, in a replica of ``engine``, while the engine
    loads newer weights. If the engine cannot make a replica, the version is available only until
    the engine loads another one."""

    def __init__(self, engine: StreamingGenerator) -> None:
        self._engine = engine
        self._replica: StreamingGenerator | None = None
        self._lock = threading.Lock()

    def pin(self, request: Nothing) -> PinAnswer:
        """Pin the current weights, and release those that were pinned before."""
        self.unpin(request)
        replica = self._engine.replica()
        with self._lock:
            self._replica = replica
        return PinAnswer(self._engine.version, replica is not None)

    def unpin(self, request: Nothing) -> Nothing:
        """Release the pinned weights. Requests that still run on them fail."""
        with self._lock:
            replica = self._replica
            self._replica = None
        if replica is not None:
            replica.close()
        return request

    def submit(
        self, request: GenRequest, gen: GenConfig, stop_ids: Sequence[int], done: Done
    ) -> None:
        """Submit a request to the engine that has the weights of ``request.pinned_version``. Raises
        ValueError if that version is not pinned."""
        with self._lock:
            engine = self._replica or self._engine
            if engine.version != request.pinned_version:
                raise ValueError(f"weights of version {request.pinned_version} are not kept here")
            engine.submit(
                request, replace(gen, temperature=0.0) if request.greedy else gen, stop_ids, done
            )

    def free(self, slots: Sequence[int]) -> None:
        """Abort requests in these slots of the replica, and free the slots' cache."""
        with self._lock:
            if self._replica is not None:
                self._replica.abort(slots)
                self._replica.free(slots)


class GenerationWorker:
    """Process that serves ``generate`` and ``free`` to rollout workers, and weight updates and
    ``status`` to the master."""

    def __init__(
        self,
        plan: RunPlan,
        spec: RolloutSpec,
        index: int,
        run_id: str,
        master: str,
        network: Network = LOOPBACK,
        shares_gpu: bool | None = None,
    ) -> None:
        self._plan = plan
        self._stack = ExitStack()
        self._network = network
        self._slots = SlotTable()
        self._death_reason = ""
        """Why the engine's server process ended; "" while it runs."""
        name = f"generation/{index}"
        self._tracer = self._stack.enter_context(open_trace(plan.spec.run_dir, name))
        model = plan.spec.models[spec.role]
        self._gen = spec.episodes.gen
        tokenizer = load_tokenizer(model.path, spec.role)
        chat = TemplateChat(
            tokenizer, template_kwargs=model.chat_template_kwargs, stop_ids=self._gen.stop_ids
        )
        self._stop_ids = chat.stop_ids
        self._engine: StreamingGenerator = self._stack.enter_context(
            make_streaming_generator(
                model,
                spec.options,
                log=plan.spec.run_dir / "logs" / f"vllm-{index}.log",
                timeout_s=plan.rpc.connect_timeout_s,
                tracer=self._tracer,
                on_death=self._on_engine_death,
                shared=_shares_gpu(plan, name) if shares_gpu is None else shares_gpu,
                masked_tokenizer=tokenizer if spec.episodes.agent_structured == CONSTRAIN else None,
                stop_ids=chat.stop_ids,
                # Otherwise only the server's own workers meet over NCCL.
                interface=network.interface
                if spec.options.weights == "nccl"
                else LOOPBACK_INTERFACE,
            )
        )
        self._gate = VersionGate(lambda: self._engine.version)
        self._held_weights = EngineWeightDigests(self._engine)
        policy = spec.options.kv_policy
        prefix = probe_ids(tokenizer, model.engine.name, policy, longest_sequence(model))
        self._probe = WeightProbe(self._engine, prefix, policy)
        self._pinned = PinnedWeights(self._engine)
        self._stack.callback(self._pinned.unpin, Nothing())
        self._service = ServiceServer(name, run_id, self._on_request, network=network)
        self._stack.callback(self._service.close)
        self._rpc = RpcWorker(
            name,
            "generation",
            index,
            run_id,
            master,
            ordered=dict(
                [
                    UPDATE_WEIGHTS.with_handler(self._update_weights),
                    GROUP_PLACE.with_handler(self._report_place),
                    PROBE_WEIGHTS.with_handler(self._probe.sample),
                    PIN_WEIGHTS.with_handler(self._pinned.pin),
                    UNPIN_WEIGHTS.with_handler(self._pinned.unpin),
                ]
            ),
            immediate=dict([STATUS.with_handler(self._status)]),
            endpoints={"generation": self._service.endpoint},
            network=network,
            connect_timeout_s=plan.rpc.connect_timeout_s,
            on_roster=self._on_roster,
            leave_within_s=LEAVE_WITHIN_S,
        )

    def run(self) -> None:
        """Serve until the master says goodbye. Raises MasterLost, or RuntimeError if the engine's
        server process has ended."""
        with self._stack:
            self._rpc.run()
        if self._death_reason:
            raise RuntimeError(self._death_reason)

    def _on_engine_death(self, reason: str) -> None:
        self._death_reason = reason
        self._rpc.stop()

    def _on_request(self, request: ServiceRequest) -> None:
        if request.method == GENERATE.name:
            message = GENERATE.unpack(request.payload)
            slot = self._slots.assign(request.client, message.slot)

            def done(output: GenOutput | Exception) -> None:
                if isinstance(output, Exception):
                    request.fail(output)
                else:
                    request.reply(GENERATE.pack_answer(build_answer(output)))

            gen_request = build_request(message, slot)
            if gen_request.pinned_version >= 0:
                self._pinned.submit(gen_request, self._gen, self._stop_ids, done)
                return
            self._gate.submit(
                slot,
                gen_request.min_version,
                lambda: self._engine.submit(gen_request, self._gen, self._stop_ids, done),
                lambda: done(GenOutput([], [], [], "aborted")),
            )
        elif request.method == FREE.name:
            self._free(self._slots.release(request.client, FREE.unpack(request.payload).slots))
            request.reply(FREE.pack_answer(Nothing()))
        else:
            raise ValueError(f"there is no request {request.method!r}")

    def _update_weights(self, request: UpdateWeightsRequest) -> UpdateWeightsAnswer:
        """Transfer a version of the weights while generation continues, load it between two tokens,
        and return digests of the tensors."""
        manifest = request.manifest
        started_at = time.perf_counter()
        tensors: Mapping[str, Tensor] = {}
        if request.seat is None:
            with self._tracer.span(f"{WEIGHTS}/stage", version=manifest.version):
                tensors = receive(manifest, self._plan.rpc.control_timeout_s, network=self._network)
        staged_at = time.perf_counter()
        changed = [] if manifest.trial else self._held_weights.find_changed()
        checked_at = time.perf_counter()
        with self._tracer.span(f"{WEIGHTS}/load", version=manifest.version):
            again = manifest.trial > 0
            if request.seat is None:
                self._engine.load_weights(manifest.version, tensors, again=again)
            else:
                assert isinstance(self._engine, GroupMember)
                with self._held_weights.broadcast():
                    self._engine.take_broadcast(
                        manifest.version, manifest.slots, request.seat, again=again
                    )
        self._gate.open()
        loaded_at = time.perf_counter()
        with self._tracer.span(f"{WEIGHTS}/digest", version=manifest.version):
            digests = self._held_weights.digest_after_load(manifest, tensors)
        digest_s = checked_at - staged_at + time.perf_counter() - loaded_at
        stage_ms = 1000 * (staged_at - started_at)
        pause_ms = 1000 * (loaded_at - checked_at)
        return UpdateWeightsAnswer(stage_ms, pause_ms, 1000 * digest_s, digests, changed)

    def _report_place(self, request: Nothing) -> GroupPlaceAnswer:
        del request
        if not isinstance(self._engine, GroupMember):
            return GroupPlaceAnswer(0, "computes in the generation worker itself")
        return GroupPlaceAnswer(*self._engine.count_ranks())

    def _status(self, request: Nothing) -> StatusAnswer:
        del request
        stats = self._engine.stats()
        names = ("busy_s", "generated_tokens", "running", "waiting")
        return StatusAnswer(time.monotonic(), *(stats[name] for name in names))

    def _on_roster(self, roster: Mapping[str, WorkerInfo]) -> None:
        """Free the slots of rollout workers that have left the roster."""
        clients = {f"{name}:{info.pid}" for name, info in roster.items()}
        slots = self._slots.release_all_but(clients)
        if slots:
            self._free(slots)

    def _free(self, slots: list[int]) -> None:
        self._gate.drop(slots)
        self._engine.abort(slots)  # an abandoned episode may still have a running request
        self._engine.free(slots)
        self._pinned.free(slots)


def _shares_gpu(plan: RunPlan, name: str) -> bool:
    """Return whether a model worker computes on the same GPU as this worker, according to the plan.

    If neither was assigned a GPU, the result is True, because both then use the first one.
    """
    trainers = [f"model_worker/{index}" for index in range(plan.spec.n_model_workers)]
    own = {*plan.gpus.get(name, ())}
    return any(
        bool(own & {*plan.gpus.get(trainer, ())}) or not (own or trainer in plan.gpus)
        for trainer in trainers
    )


def main() -> int:
    """Run this worker of a plan until the master ends it. Returns the exit code."""

    def work(plan: RunPlan, args: argparse.Namespace) -> None:
        if plan.spec.rollout is None:
            raise ValueError(f"experiment {plan.spec.name} has no generation workers")
        raise_descriptor_limit()
        network = worker_network(plan, args)
        shares_gpu = {"yes": True, "no": False}.get(args.beside_trainer)
        worker = GenerationWorker(
            plan, plan.spec.rollout, args.index, args.run_id, args.master, network, shares_gpu
        )
        collect_garbage_normally()
        worker.run()

    return run_planned(str(__doc__), work, _add_flags)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    description = (
        "whether a model worker computes on the same GPU, given by the scheduler (default: "
        "according to the plan)"
    )
    parser.add_argument("--beside-trainer", choices=("yes", "no"), help=description)


if __name__ == "__main__":
    sys.exit(main())
