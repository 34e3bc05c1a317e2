"""Model worker: holds models and tensors, and runs the calls that the master sends.

python -m workers.model_worker --run-dir DIR --run-id ID --master tcp://... --index 0
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from realhf.api.calls import (
    ABORT,
    CALL,
    CLEAR,
    COMMITTED,
    EVALUATE,
    EXPORT,
    GATHER,
    HELD,
    INITIALIZE,
    KEEP_EXPORT,
    LOAD,
    OPEN_WORLD,
    PROGRESS,
    PUBLISH_WEIGHTS,
    RESTORE,
    SAVE,
    START_BROADCAST,
    STOP_BROADCAST,
    InitializeRequest,
    Nothing,
    OpenWorldAnswer,
    OpenWorldRequest,
    PublishWeightsAnswer,
    PublishWeightsRequest,
    StartBroadcastAnswer,
    StartBroadcastRequest,
    StopBroadcastAnswer,
)
from realhf.api.config import AsyncConfig
from realhf.api.experiment import ExperimentSpec, InterfaceType, ModelSpec, RunPlan
from realhf.api.model import Model
from realhf.api.parallel import SHARDED
from realhf.api.trace import WEIGHTS
from realhf.backends.training.tokenizer_loading import check_same_tokens
from realhf.base.host_resources import usable_cores
from realhf.base.loopback import is_loopback_host
from realhf.base.process import block_exit_in_threads, collect_garbage_normally
from realhf.data.stream_dataset import StreamHost
from realhf.dataflow.model_host import Handler, ModelHost, call_interfaces
from realhf.dataflow.served_generation import ServedEngine, ServedGeneration
from realhf.dataflow.weight_proof import WeightTrial, probe_ids
from realhf.monitor.rollouts.writer import open_rollouts
from realhf.monitor.trace import open_trace
from realhf.registry import backends, datasets
from realhf.transport.data_plane import DataPlane
from realhf.transport.errors import NetworkError
from realhf.transport.network import LOOPBACK, LOOPBACK_ADDRESS, Network, find_interface
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.sockets import raise_descriptor_limit
from realhf.transport.tensor_store import TensorStore
from realhf.transport.weights import Medium, WeightPublisher
from workers.worker_main import run_planned, worker_network

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.backends.embedded.compute_threads import ComputeThreads
    from realhf.backends.parallel.process_groups import RendezvousStore, TorchWorld
    from realhf.backends.vllm.broadcast.sender import WeightSender

_log = logging.getLogger(__name__)
HOST_CALLS = (CALL, LOAD, EVALUATE, SAVE, RESTORE, COMMITTED, EXPORT, KEEP_EXPORT, GATHER, HELD)
"""Calls that ``ModelHost`` serves in the order of their arrival."""
_CHANGING = frozenset(call.name for call in (CALL, LOAD, RESTORE, GATHER))
"""Calls after which a worker's tensors may be others."""


class ModelWorker:
    """Process that holds models. It registers with the master when it starts, and loads its models
    when it receives the call ``initialize``."""

    def __init__(
        self, plan: RunPlan, index: int, run_id: str, master: str, network: Network = LOOPBACK
    ) -> None:
        self._plan = plan
        self._index = index
        self._network = network
        name = f"model_worker/{index}"
        self._store = TensorStore(name)
        self._plane = DataPlane(name, run_id, self._store, shm=plan.rpc.shm, network=network)
        self._plane.start()
        self._host: ModelHost | None = None
        self._meeting: RendezvousStore | None = None
        self._world: TorchWorld | None = None
        run_dir = plan.spec.run_dir
        rollout = plan.spec.rollout
        self._tracer = open_trace(run_dir, name)
        self._recorder = open_rollouts(plan, name)
        self._stream = StreamHost(run_id, name, run_dir / "stream", self._store, network)
        medium = rollout.options.weights if rollout else "shm"
        if medium == "nccl":  # what replaces it if a group cannot be formed
            medium = "shm" if is_loopback_host(network.advertised) else "fetch"
        self._trial = WeightTrial()
        self._stack = ExitStack()
        """Exit stack that closes the separate generation engines."""
        self._publisher = WeightPublisher(
            run_id, name, run_dir / "weights", cast(Medium, medium), network=network
        )
        self._sender: WeightSender | None = None
        """Sender of weights from this worker's GPU, made for the first version that is offered."""
        self._rpc = RpcWorker(
            name,
            "model_worker",
            index,
            run_id,
            master,
            ordered=dict(
                [
                    OPEN_WORLD.with_handler(self._open_world),
                    INITIALIZE.with_handler(self.initialize),
                    PUBLISH_WEIGHTS.with_handler(self._publish_weights),
                    *((call.name, self._host_handler(call.name)) for call in HOST_CALLS),
                ]
            ),
            immediate={
                CLEAR.name: self._host_handler(CLEAR.name),
                ABORT.name: self._host_handler(ABORT.name),
                PROGRESS.name: self._host_handler(PROGRESS.name),
                **dict(
                    [
                        START_BROADCAST.with_handler(self._start_broadcast),
                        STOP_BROADCAST.with_handler(self._stop_broadcast),
                    ]
                ),
                **self._stream.handlers(),
            },
            data_endpoint=self._plane.endpoint,
            network=network,
            connect_timeout_s=plan.rpc.connect_timeout_s,
        )

    def run(self) -> None:
        """Serve until the master says goodbye. Raises MasterLost, RpcTimeout or ProtocolError."""
        try:
            self._rpc.run()
        finally:
            self._stack.close()
            self._stream.close()
            if self._sender is not None:
                self._sender.close()
            self._publisher.close()
            if self._host is not None:
                self._host.close()
            if self._world is not None:
                self._world.close()
            self._meeting = None
            self._plane.close()
            self._recorder.close()
            self._tracer.close()

    def _open_world(self, request: OpenWorldRequest) -> OpenWorldAnswer:
        """Start the rendezvous server for the workers that compute together, and return its
        address.

        It listens on the loopback interface or, for workers on several hosts, on the network.
        Raises NetworkError if it would have to listen on a network that is not trusted.
        """
        from realhf.backends.parallel.process_groups import RendezvousStore

        if request.several_hosts and not self._network.trusted:
            raise NetworkError(
                "workers that train together are on several hosts, and network.trusted is not set"
            )
        host = self._network.advertised if request.several_hosts else LOOPBACK_ADDRESS
        self._meeting = RendezvousStore(
            len(self._plan.spec.world), self._plan.rpc.connect_timeout_s, host
        )
        return OpenWorldAnswer(self._meeting.address)

    def _join_world(self, address: str, token: str) -> None:
        """Join the other workers at the rendezvous, and create the process groups of all roles.

        As torch requires, every worker creates every group, including the groups of roles that it
        does not train.
        """
        from realhf.backends.parallel.process_groups import TorchWorld, list_groups

        rpc = self._plan.rpc
        spec = self._plan.spec
        own_address: dict[str, str] = {}
        if not is_loopback_host(address.rpartition(":")[0]):
            host = self._network.advertised
            own_address = {"own": host, "interface": find_interface(host)}
        self._world = TorchWorld(
            address,
            self._index,
            spec.world,
            join_s=rpc.connect_timeout_s,
            timeout_s=rpc.call_timeout_s,
            token=token,
            **own_address,
        )
        for model in spec.models.values():
            if model.parallel.size > 1:
                self._world.create_groups(
                    list_groups(model.workers, model.parallel, cut=model.backend == SHARDED)
                )

    def initialize(self, request: InitializeRequest) -> Nothing:
        """Load this worker's models and build the interfaces of its calls."""
        spec = self._plan.spec
        threads = set_compute_threads(
            self._plan.torch_threads, spec.n_model_workers, reserved=_count_generation_threads(spec)
        )
        if self._index in spec.world:
            self._join_world(request.world, request.token)
        own_specs = {
            role: model for role, model in spec.models.items() if self._index in model.workers
        }
        models: dict[str, Model] = {}
        # A role that is the frozen base of another role (``base_of``) shares that role's weights,
        # so it is loaded later.
        for role, model in sorted(own_specs.items(), key=lambda item: bool(item[1].base_of)):
            shared = models.get(model.base_of)
            models[role] = (
                self._load(model, threads) if shared is None else _build_base_role(model, shared)
            )
        calls = call_interfaces(mfc for mfc in spec.mfcs if mfc.model_role in own_specs)
        dataset = None
        if spec.source.worker == self._index and spec.source.dataset_args is not None:
            tokenizer = next(iter(models.values())).tokenizer
            dataset = datasets.get(spec.source.name)(
                tokenizer=tokenizer, **spec.source.dataset_args
            )
        self._host = ModelHost(
            models,
            calls,
            self._store,
            self._plane.fetch,
            run_dir=spec.run_dir,
            dataset=dataset,
            tracer=self._tracer,
            given_up=self._rpc.is_running_call_cancelled,
            addressed=self._network.add_token,
            recorder=self._recorder,
        )
        collect_garbage_normally()
        return Nothing()

    def _publish_weights(self, request: PublishWeightsRequest) -> PublishWeightsAnswer:
        """Publish the weights of a role to the generation workers. In a self-test, change or
        restore them first."""
        if self._host is None:
            raise RuntimeError("publish_weights before initialize")
        if self._sender is not None:
            self._sender.withdraw()
        with self._tracer.span(f"{WEIGHTS}/publish", version=request.version):
            engine = self._host.engine(request.role, request.version)
            tensors = engine.weights()
            is_sharded = self._plan.spec.models[request.role].parallel.fsdp > 1
            # A forward pass of a sharded model needs all of its workers, so this worker cannot
            # score probes alone.
            probes = [] if is_sharded else request.probes
            changed, restored = self._trial.step(request.trial, engine, tensors, probes)
            publish = self._publisher.announce if request.broadcast else self._publisher.publish
            manifest = publish(
                request.version,
                tensors,
                trial=request.trial,
                changed=self._trial.names,
            )
            if request.broadcast:
                self._offer(request, tensors)
        return PublishWeightsAnswer(manifest, changed, restored)

    def _offer(self, request: PublishWeightsRequest, tensors: Mapping[str, Tensor]) -> None:
        """Let generation workers take these tensors from this worker's GPU until the next call of
        the model, which may change them."""
        import torch

        from realhf.backends.vllm.broadcast.sender import WeightSender, make_nccl_group

        if self._sender is None:
            cuda = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device() if cuda else 0)
            self._sender = WeightSender(
                device if cuda else torch.device("cpu"),
                make_group=functools.partial(make_nccl_group, interface=self._network.interface),
            )
        self._sender.offer(request.version, request.trial, tensors)

    def _start_broadcast(self, request: StartBroadcastRequest) -> StartBroadcastAnswer:
        """Begin to send the offered version to a group of generation workers."""
        if self._sender is None:
            return StartBroadcastAnswer(False)
        unique_id = self._sender.start(
            request.version, request.trial, request.members, request.world_size, request.timeout_s
        )
        return StartBroadcastAnswer(
            unique_id is not None, unique_id or b"", self._sender.pack_bytes
        )

    def _stop_broadcast(self, request: Nothing) -> StopBroadcastAnswer:
        del request
        return StopBroadcastAnswer(self._sender.stop() if self._sender is not None else "")

    def _load(self, model: ModelSpec, threads: ComputeThreads) -> Model:
        spec = self._plan.spec
        together = {"world": self._world} if model.parallel.size > 1 else {}
        backend = backends.get(model.backend)(**model.backend_args, **together)
        engine = backend.build(model, seed=spec.seed, total_train_steps=spec.total_train_steps)
        if model.lora is not None and getattr(engine, "adapters", None) is None:
            raise ValueError(
                f"{model.role}.lora.rank={model.lora.rank}: the backend {model.backend} has no "
                f"adapters"
            )
        if model.tokens_of:
            check_same_tokens(engine.tokenizer, model.role, model.path, model.tokens_of)
        use_threads = getattr(engine, "use_threads", None)
        if use_threads is not None:
            use_threads(threads)
        if model.engine.name != "embedded" and self._samples_tokens_of(model.role):
            engine = self._add_generation_engine(model, engine)
        return Model(
            model.role, engine, engine.tokenizer, model.chat_template_kwargs, model.tool_parser
        )

    def _samples_tokens_of(self, role: str) -> bool:
        """Return whether this worker samples tokens with a role, for training or evaluation. In
        asynchronous runs generation workers do that instead."""
        spec = self._plan.spec
        has_generate_call = any(
            m.model_role == role and m.interface_type is InterfaceType.GENERATE for m in spec.mfcs
        )
        evaluation = spec.evaluation
        plays = evaluation is not None and evaluation.generates and evaluation.role == role
        return spec.rollout is None and (has_generate_call or plays)

    def _add_generation_engine(self, model: ModelSpec, engine: Any) -> Any:
        """Start a separate generation engine for a trainer's engine, and return a single engine
        that combines both.

        The generation engine ends with this worker. Raises ValueError for a role on several
        workers.
        """
        from realhf.backends.streaming_engines import longest_sequence, make_streaming_generator

        if len(model.workers) > 1:
            raise ValueError(
                f"engine.name={model.engine.name}: a synchronous run serves {model.role} on one "
                f"worker, "
                f"{model.role}.workers has {len(model.workers)}"
            )
        config = self._plan.rpc
        threads = max(1, self._plan.torch_threads)
        generator = self._stack.enter_context(
            make_streaming_generator(
                model,
                AsyncConfig(generation_threads=threads),
                log=self._plan.spec.run_dir / "logs" / f"vllm-{model.role}.log",
                timeout_s=config.connect_timeout_s,
                tracer=self._tracer,
                on_death=_log.error,
                shared=True,
            )
        )
        limit = min(engine.generator().context_limit, longest_sequence(model) or sys.maxsize)
        served = ServedGeneration(
            engine,
            generator,
            name=f"the {model.engine.name} server of {model.role}",
            context_limit=limit,
            probe=probe_ids(engine.tokenizer, model.engine.name, "recompute", limit),
            timeout_s=config.call_timeout_s,
        )
        return ServedEngine(engine, served)

    def _host_handler(self, handler: str) -> Handler:
        """Return a handler that calls the handler ``handler`` of the ``ModelHost``, which exists
        only after ``initialize``."""

        def run(payload: Any) -> Any:
            if self._host is None:
                raise RuntimeError(f"{handler} before initialize")
            if self._sender is not None and handler in _CHANGING:
                self._sender.withdraw()
            return {**self._host.handlers(), **self._host.immediate_handlers()}[handler](payload)

        return run


def _build_base_role(model: ModelSpec, trained: Model) -> Model:
    """Return the model of a frozen role that consists of the trained role with its adapters
    disabled."""
    engine = trained.engine.base()  # type: ignore[attr-defined]
    return Model(
        model.role, engine, trained.tokenizer, model.chat_template_kwargs, model.tool_parser
    )


def set_compute_threads(configured: int, n_model_workers: int, reserved: int = 0) -> ComputeThreads:
    """Set the number of torch's compute threads and return it. It is ``configured`` or, if that is
    0, this worker's share of the usable cores.

    ``reserved`` cores are left to generation workers that compute at the same time. Sharing a core
    would cost more than it gains, because compute threads wait for each other.
    """
    import torch

    from realhf.backends.embedded.compute_threads import threads

    cores = usable_cores() - reserved
    count = configured or max(1, cores // n_model_workers)
    torch.set_num_threads(count)
    return threads(count)


def _count_generation_threads(spec: ExperimentSpec) -> int:
    """Return the total number of compute threads of all generation workers, which compute at the
    same time as this worker."""
    options = spec.rollout.options if spec.rollout else None
    return options.n_generation_workers * options.generation_threads if options else 0


def main() -> int:
    """Run the worker of a plan until the master ends it. Returns the exit code."""

    def work(plan: RunPlan, args: argparse.Namespace) -> None:
        raise_descriptor_limit()
        # A sys.exit in an episode's thread must be an error, not the end of the process.
        block_exit_in_threads()
        ModelWorker(plan, args.index, args.run_id, args.master, worker_network(plan, args)).run()

    return run_planned(str(__doc__), work)


if __name__ == "__main__":
    sys.exit(main())
