"""A generation worker: samples tokens with the newest weights for all rollout workers.

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

from realhf.api.calls import (
    FREE,
    GENERATE,
    PIN_WEIGHTS,
    PROBE_WEIGHTS,
    STATUS,
    UNPIN_WEIGHTS,
    UPDATE_WEIGHTS,
    Nothing,
    PinAnswer,
    StatusAnswer,
    UpdateWeightsAnswer,
    UpdateWeightsRequest,
)
from realhf.api.chat_template import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.experiment import RolloutSpec, RunPlan
from realhf.api.generation import Done, StreamingGenerator
from realhf.api.model import GenOutput, GenRequest
from realhf.api.trace import WEIGHTS
from realhf.backends.streaming_engines import longest_sequence, make_streaming_generator
from realhf.backends.training.tokenizer_loading import load_tokenizer
from realhf.base.process import settle
from realhf.dataflow.weight_proof import HeldWeights, WeightProbe, probe_ids
from realhf.monitor.trace import open_trace
from realhf.rollout.generation_client import answer_of, request_of
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.roster import WorkerInfo
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.service import Request, ServiceServer
from realhf.transport.sockets import allow_many_connections
from realhf.transport.weights import receive
from workers.worker_main import network_of, run_planned

LEAVE_WITHIN_S = 15.0
"""One that is sent away because it hangs in new weights must make room for its successor."""


class SlotTable:
    """Every client numbers its cache rows from 0; the engine knows them by numbers of its own."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, int], int] = {}
        self._next = 0
        self._lock = threading.Lock()

    def of(self, client: str, slot: int) -> int:
        """The engine's number, a new one for a new row."""
        with self._lock:
            key = (client, slot)
            if key not in self._slots:
                self._slots[key] = self._next
                self._next += 1
            return self._slots[key]

    def take(self, client: str, slots: list[int]) -> list[int]:
        """The engine's numbers of these rows, which the client gives up."""
        with self._lock:
            return [self._slots.pop((client, slot)) for slot in slots if (client, slot) in self._slots]

    def take_all_but(self, clients: set[str]) -> list[int]:
        """The engine's numbers of the rows of clients that are gone."""
        with self._lock:
            gone = [key for key in self._slots if key[0] not in clients]
            return [self._slots.pop(key) for key in gone]


class VersionGate:
    """Requests for newer weights than the engine has wait here until it has them. ``version`` is asked for what it
    has."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._held: dict[int, tuple[int, Callable[[], None], Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def submit(self, slot: int, at_least: int, go: Callable[[], None], give_up: Callable[[], None]) -> None:
        """``go`` is called when the engine has this version, at once perhaps, or ``give_up`` when it need not."""
        with self._lock:
            if self._version() < at_least:
                self._held[slot] = at_least, go, give_up
                return
        go()

    def open(self) -> None:
        """The engine has other weights."""
        with self._lock:
            version = self._version()
            ready = [slot for slot, (at_least, _, _) in self._held.items() if at_least <= version]
            gone = [self._held.pop(slot)[1] for slot in ready]
        for go in gone:
            go()

    def drop(self, slots: Sequence[int]) -> None:
        """Nobody waits for these any more."""
        with self._lock:
            dropped = [self._held.pop(slot)[2] for slot in slots if slot in self._held]
        for give_up in dropped:
            give_up()


class KeptWeights:
    """Keeps a version of the weights for an evaluation while ``engine`` takes newer ones: in a replica of the engine.
    Where there cannot be one, the version is there until the engine takes another."""

    def __init__(self, engine: StreamingGenerator) -> None:
        self._engine = engine
        self._replica: StreamingGenerator | None = None
        self._lock = threading.Lock()

    def pin(self, request: Nothing) -> PinAnswer:
        """Keep the weights of now, and no others."""
        self.unpin(request)
        replica = self._engine.replica()
        with self._lock:
            self._replica = replica
        return PinAnswer(self._engine.version, replica is not None)

    def unpin(self, request: Nothing) -> Nothing:
        """Keep nothing; requests in play fail."""
        with self._lock:
            replica, self._replica = self._replica, None
        if replica is not None:
            replica.close()
        return request

    def submit(self, wanted: GenRequest, gen: GenConfig, stop_ids: Sequence[int], done: Done) -> None:
        """Sample with the weights of ``wanted.pinned_version``. Raises ValueError when they are not here."""
        with self._lock:
            engine = self._replica or self._engine
            if engine.version != wanted.pinned_version:
                raise ValueError(f"weights of version {wanted.pinned_version} are not kept here")
            engine.submit(wanted, replace(gen, temperature=0.0) if wanted.greedy else gen, stop_ids, done)

    def forget(self, slots: Sequence[int]) -> None:
        """End the requests of these slots, and forget what is cached for them."""
        with self._lock:
            if self._replica is not None:
                self._replica.abort(slots)
                self._replica.free(slots)


class GenerationWorker:
    """Answers ``generate`` and ``free`` of rollout workers, ``update_weights`` and ``status`` of the master."""

    def __init__(
        self,
        plan: RunPlan,
        spec: RolloutSpec,
        index: int,
        run_id: str,
        master: str,
        network: Network = LOOPBACK,
        beside_trainer: bool | None = None,
    ) -> None:
        self._plan, self._stack, self._network = plan, ExitStack(), network
        self._slots = SlotTable()
        self._died = ""
        name = f"generation/{index}"
        self._tracer = self._stack.enter_context(open_trace(plan.spec.run_dir, name))
        model = plan.spec.models[spec.role]
        self._gen = spec.episodes.gen
        tokenizer = load_tokenizer(model.path, spec.role)
        chat = TemplateChat(tokenizer, template_kwargs=model.chat_template_kwargs, stop_ids=self._gen.stop_ids)
        self._stop_ids = chat.stop_ids
        self._engine: StreamingGenerator = self._stack.enter_context(
            make_streaming_generator(
                model,
                spec.options,
                log=plan.spec.run_dir / "logs" / f"vllm-{index}.log",
                timeout_s=plan.rpc.connect_timeout_s,
                tracer=self._tracer,
                on_death=self._engine_died,
                shared=_beside_a_trainer(plan, name) if beside_trainer is None else beside_trainer,
            )
        )
        self._gate = VersionGate(lambda: self._engine.version)
        self._held = HeldWeights(self._engine)
        policy = spec.options.kv_policy
        prefix = probe_ids(tokenizer, model.engine.name, policy, longest_sequence(model))
        self._probe = WeightProbe(self._engine, prefix, policy)
        self._kept = KeptWeights(self._engine)
        self._stack.callback(self._kept.unpin, Nothing())
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
                    UPDATE_WEIGHTS.served_by(self._update_weights),
                    PROBE_WEIGHTS.served_by(self._probe.sample),
                    PIN_WEIGHTS.served_by(self._kept.pin),
                    UNPIN_WEIGHTS.served_by(self._kept.unpin),
                ]
            ),
            immediate=dict([STATUS.served_by(self._status)]),
            endpoints={"generation": self._service.endpoint},
            network=network,
            connect_timeout_s=plan.rpc.connect_timeout_s,
            on_roster=self._on_roster,
            leave_within_s=LEAVE_WITHIN_S,
        )

    def run(self) -> None:
        """Until the master says bye. Raises MasterLost, or RuntimeError when the engine's server ended."""
        with self._stack:
            self._rpc.run()
        if self._died:
            raise RuntimeError(self._died)

    def _engine_died(self, reason: str) -> None:
        self._died = reason
        self._rpc.stop()

    def _on_request(self, request: Request) -> None:
        if request.method == GENERATE.name:
            asked = GENERATE.unpack(request.payload)
            slot = self._slots.of(request.client, asked.slot)

            def done(output: GenOutput | Exception) -> None:
                if isinstance(output, Exception):
                    request.fail(output)
                else:
                    request.reply(GENERATE.pack_answer(answer_of(output)))

            wanted = request_of(asked, slot)
            if wanted.pinned_version >= 0:
                self._kept.submit(wanted, self._gen, self._stop_ids, done)
                return
            self._gate.submit(
                slot,
                wanted.min_version,
                lambda: self._engine.submit(wanted, self._gen, self._stop_ids, done),
                lambda: done(GenOutput([], [], [], "aborted")),
            )
        elif request.method == FREE.name:
            self._forget(self._slots.take(request.client, FREE.unpack(request.payload).slots))
            request.reply(FREE.pack_answer(Nothing()))
        else:
            raise ValueError(f"there is no request {request.method!r}")

    def _update_weights(self, request: UpdateWeightsRequest) -> UpdateWeightsAnswer:
        """Stage a version while generation goes on, then take it between two tokens, and say what is there now."""
        manifest = request.manifest
        began = time.perf_counter()
        with self._tracer.span(f"{WEIGHTS}/stage", version=manifest.version):
            tensors = receive(manifest, self._plan.rpc.control_timeout_s, network=self._network)
        staged = time.perf_counter()
        changed = [] if manifest.trial else self._held.changed()
        checked = time.perf_counter()
        with self._tracer.span(f"{WEIGHTS}/load", version=manifest.version):
            self._engine.load_weights(manifest.version, tensors, again=manifest.trial > 0)
        self._gate.open()
        loaded = time.perf_counter()
        with self._tracer.span(f"{WEIGHTS}/digest", version=manifest.version):
            held = self._held.after(manifest, tensors)
        digest_s = checked - staged + time.perf_counter() - loaded
        return UpdateWeightsAnswer(1000 * (staged - began), 1000 * (loaded - checked), 1000 * digest_s, held, changed)

    def _status(self, request: Nothing) -> StatusAnswer:
        del request
        stats = self._engine.stats()
        names = ("busy_s", "generated_tokens", "running", "waiting")
        return StatusAnswer(time.monotonic(), *(stats[name] for name in names))

    def _on_roster(self, roster: Mapping[str, WorkerInfo]) -> None:
        """Rollout workers that are gone do not come back for their answers."""
        clients = {f"{name}:{info.pid}" for name, info in roster.items()}
        gone = self._slots.take_all_but(clients)
        if gone:
            self._forget(gone)

    def _forget(self, slots: list[int]) -> None:
        self._gate.drop(slots)
        self._engine.abort(slots)  # an episode that was given up may have a request in play
        self._engine.free(slots)
        self._kept.forget(slots)


def _beside_a_trainer(plan: RunPlan, name: str) -> bool:
    """Return whether by the plan a model worker computes on this worker's GPU: the same one, or whichever is first
    where workers were given none."""
    trainers = [f"model_worker/{index}" for index in range(plan.spec.n_model_workers)]
    return any(plan.gpus.get(trainer) == plan.gpus.get(name) for trainer in trainers)


def main() -> int:
    """Run the worker of a plan until the master ends it. Returns the exit code."""

    def work(plan: RunPlan, args: argparse.Namespace) -> None:
        if plan.spec.rollout is None:
            raise ValueError(f"experiment {plan.spec.name} has no generation workers")
        allow_many_connections()
        network = network_of(plan, args)
        told = {"yes": True, "no": False}.get(args.beside_trainer)
        worker = GenerationWorker(plan, plan.spec.rollout, args.index, args.run_id, args.master, network, told)
        settle()
        worker.run()

    return run_planned(str(__doc__), work, _add_flags)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    about = "whether a model worker computes on the same GPU, said by who dealt it out (else the plan says)"
    parser.add_argument("--beside-trainer", choices=("yes", "no"), help=about)


if __name__ == "__main__":
    sys.exit(main())
