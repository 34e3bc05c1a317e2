"""A step of a run's own models and calls on a pretended GPU: peak memory by what holds it, waits
and kernels.

Models have shapes but no weights, so that the step of a model that no machine at hand could hold
takes about a minute. The batch is one of full micro-batches of the longest sequences.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from realhf.api.config import GenConfig
from realhf.api.experiment import InterfaceType, MFCDef, ModelSpec
from realhf.api.keys import ROLLOUT_KEY, TORCH_NAMES, KeySpec, key_spec
from realhf.api.model import CallContext, GenRequest, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.parallel.fsdp import FsdpEngine
from realhf.backends.pretended.device import GPUProperties
from realhf.backends.pretended.memory_ledger import (
    GRADIENTS,
    MASTERS,
    MOMENTS,
    WEIGHTS,
    LedgerDevice,
    count_kernels,
)
from realhf.backends.pretended.pretended_ranks import PretendedRanks, pretend_ranks
from realhf.backends.pretended.pretending import pretend_gpu
from realhf.backends.training.lora import LoraAdapters
from realhf.backends.training.optimizer import HostMemory
from realhf.backends.training.sequence_packing import BATCH_TOKENS
from realhf.backends.training.torch_backend import (
    DTYPES,
    ValueModel,
    choose_attention,
    engine_options,
)
from realhf.backends.training.torch_engine import TorchEngine
from realhf.registry import interfaces
from realhf.transport.weights import compute_layout

N_MICRO_BATCHES = 2
"""Number of full micro-batches of the step that is traced."""
_SCORING = frozenset({"logprob", "critic", "self_teacher"})
"""Interfaces that score on the GPU. The others compute on the host, or ask a server."""


_FULL = 0.98
"""Fraction of its maximum of positions from which a micro-batch counts as full."""
_FIRST_STEP = 1 << 20
"""Number of the first step, in which a critic has been warmed up."""


@dataclass(frozen=True)
class BatchShape:
    """Shape of the rollouts of a step."""

    group_size: int
    """Number of sequences with a common prompt."""
    prompt: int
    """Tokens of a prompt, which do not train."""
    total: int
    """Tokens of a sequence, the longest of the run."""
    sessions: int = 0
    """Number of sequences that the worker samples at a time; 0 if it does not sample."""


@dataclass(frozen=True)
class CallTrace:
    """What one call of a step does on the device."""

    name: str
    """Name of the call."""
    peak_bytes: int
    """Maximum of the memory in use."""
    parts: Mapping[str, int]
    """Bytes at the peak for each of ``MEMORY_PARTS``."""
    work: str = "a micro-batch"
    """What waits and kernels are counted in."""
    syncs: int = 0
    """Maximum number of waits of the host for the device in a micro-batch; without micro-batches,
    in all."""
    kernels: int = 0
    """Number of kernels that a micro-batch launches on average; without micro-batches, in all."""
    fp32_products: int = 0
    """Number of matrix products of fp32 factors."""


@dataclass
class StepTrace:
    """What a steady step of one worker does on its device."""

    calls: list[CallTrace] = field(default_factory=list)
    """The calls, in the order of the step."""
    host_bytes: int = 0
    """Bytes of moments that are kept in host memory."""

    @property
    def peak(self) -> CallTrace:
        """The call with the highest peak."""
        return max(self.calls, key=lambda call: call.peak_bytes)


def trace_step(
    models: Mapping[str, ModelSpec],
    calls: Sequence[MFCDef],
    shape: BatchShape,
    properties: GPUProperties | None = None,
    published: str = "",
) -> StepTrace:
    """Run the calls of one worker twice on a pretended GPU, the second time with optimizer moments
    in place, and return what the second time needed.

    ``models`` are those of the worker, by role; ``published`` is the role whose weights it
    publishes, if there is one, before the calls of the next step. Of a sharded role the worker is
    the first. Raises ModelLoadError for a model that is not here, and ValueError for a call that
    makes no update.
    """
    device = LedgerDevice(properties)
    ranks = max(model.parallel.size for model in models.values())
    sharded = any(model.parallel.fsdp > 1 for model in models.values())
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend_gpu(device))
        if sharded:
            stack.enter_context(pretend_ranks(device, ranks))
        for context in (_pretend_host_memory(), _skip_trial_merge(), _quiet()):
            stack.enter_context(context)
        worker = _Worker(device, models, shape)
        trains = [call for call in calls if call.interface_type is InterfaceType.TRAIN_STEP]
        for call in trains:
            worker.run(call, micro_batches=1)
            worker.relabel_moments(call)
        trace = StepTrace(host_bytes=worker.host_bytes())
        if published in models:
            trace.calls.append(worker.publish(published))
        for call in calls:
            if call.interface_type is InterfaceType.GENERATE and shape.sessions:
                trace.calls.append(worker.sample(call))
            elif call in trains or (
                call.interface_type is InterfaceType.INFERENCE and call.interface in _SCORING
            ):
                trace.calls.append(worker.run(call, N_MICRO_BATCHES))
        return trace


class _Worker:
    """The models of one worker on a pretended device."""

    def __init__(
        self, device: LedgerDevice, specs: Mapping[str, ModelSpec], shape: BatchShape
    ) -> None:
        self._device = device
        self._shape = shape
        self._models: dict[str, Model] = {}
        self._engines: dict[str, TorchEngine] = {}
        self._modules: dict[str, Any] = {}
        for role, spec in sorted(specs.items(), key=lambda item: bool(item[1].base_of)):
            trained = self._models.get(spec.base_of)
            engine: Any = self._build(spec) if trained is None else trained.engine
            self._engines[role] = engine
            engine = engine if trained is None else engine.base()
            self._models[role] = Model(role, engine, None)
            self._modules[role] = self._modules.get(spec.base_of) or engine.model
        self._step = _FIRST_STEP

    def _build(self, spec: ModelSpec) -> TorchEngine:
        """Return the engine of a role, whose model has no weights."""
        device = self._device
        config = AutoConfig.from_pretrained(spec.path)
        config._attn_implementation = choose_attention(spec.path, spec.role, spec.experts)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[spec.dtype]).eval()
        if spec.head == "value":
            model = ValueModel(model).eval()
        device.place(model)
        options: dict[str, Any] = engine_options(spec, total_train_steps=2 * _FIRST_STEP)
        options["compile"] = False  # its kernels are not torch's own
        engine = self._build_engine(spec, model, options)
        device.relabel([*model.parameters(), *model.buffers()], WEIGHTS)
        optimizer = engine.optimizer
        if optimizer is not None:
            pairs = zip(optimizer.parameters, optimizer.masters, strict=True)
            device.relabel((master for one, master in pairs if master is not one), MASTERS)
            for parameter in optimizer.parameters:
                parameter.register_post_accumulate_grad_hook(self._relabel_gradient)
        return engine

    def _build_engine(self, spec: ModelSpec, model: Any, options: dict[str, Any]) -> TorchEngine:
        if spec.parallel.fsdp == 1:
            return TorchEngine(model, None, role=spec.role, **options)
        ranks = PretendedRanks(spec.parallel)
        return FsdpEngine(model, None, ranks=ranks, mesh=ranks.mesh, role=spec.role, **options)

    def _relabel_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._device.relabel([parameter.grad], GRADIENTS)

    def relabel_moments(self, call: MFCDef) -> None:
        """Account for the moments that the first update of a call has allocated. Raises ValueError
        if there was none."""
        moments = self._moments(call.model_role)
        if not moments:
            raise ValueError(f"{call.name} makes no update with a batch of random tokens")
        self._device.relabel(moments, MOMENTS)

    def host_bytes(self) -> int:
        """Return the bytes of moments that are not on the device."""
        moments = [moment for role in self._models for moment in self._moments(role)]
        return sum(moment.nbytes for moment in moments if not moment.is_cuda)

    def _moments(self, role: str) -> list[Tensor]:
        optimizer = getattr(self._models[role].engine, "optimizer", None)
        return [] if optimizer is None else optimizer.moments()

    # ---- calls

    def run(self, call: MFCDef, micro_batches: int) -> CallTrace:
        """Run a call that scores or trains."""
        model = self._models[call.model_role]
        for each in self._models.values():
            getattr(each.engine, "release_generation", lambda: None)()
        spec = MicroBatchSpec(1, call.mb_spec.max_tokens_per_mb)
        sample = self._draw_full(call, micro_batches, spec)
        context = CallContext(self._step, 1, spec, Path())
        interface = interfaces.get(call.interface)(**call.interface_args)
        trains = call.interface_type is InterfaceType.TRAIN_STEP
        if trains:
            self._step += 1
        with self._measure(call.name, self._modules[call.model_role]) as measured:
            getattr(interface, call.interface_type.value)(model, sample, context)
        return measured()

    def sample(self, call: MFCDef) -> CallTrace:
        """Sample a token of each sequence at half of its length, and one at its full length."""
        engine: Any = self._models[call.model_role].engine
        vocabulary = _count_tokens(engine.model)
        shape = self._shape
        g = torch.Generator().manual_seed(1)
        texts = torch.randint(vocabulary, (shape.sessions, shape.total), generator=g).tolist()
        options = GenConfig(max_new_tokens=1)
        with self._measure(call.name, work="two tokens of each sequence") as measured:
            if isinstance(engine, FsdpEngine):
                engine.gather()
            for length in (shape.total // 2, shape.total - 1):
                requests = [GenRequest(i, text[:length], seed=i) for i, text in enumerate(texts)]
                engine.generator().generate(requests, options, stop_ids=(), seed=0)
        return measured()

    def publish(self, role: str) -> CallTrace:
        """Bring the weights of a role together and compute their digests, as it is done to publish
        them. Their copy in host memory is not made."""
        engine: Any = self._models[role].engine
        with self._measure(f"{role}_publish", work="a version") as measured:
            if isinstance(engine, FsdpEngine):
                engine.gather()
            compute_layout(engine.weights())
        return measured()

    @contextlib.contextmanager
    def _measure(
        self, name: str, model: Any = None, work: str = CallTrace.work
    ) -> Iterator[Callable[[], CallTrace]]:
        """Context manager that measures a call; yields a function that returns the result. With a
        model, counts its micro-batches, else takes ``work`` for one."""
        device = self._device
        device.micro_batches = []
        device.operations = Counter()
        device.syncs = Counter()
        device.fp32_products = Counter()
        device.samples = model is None
        handle = None if model is None else device.watch(model)
        device.reset_peak()
        try:
            yield lambda: self._summarise(name, work)
        finally:
            if handle is not None:
                handle.remove()

    def _summarise(self, name: str, work: str) -> CallTrace:
        device = self._device
        passes = device.micro_batches
        syncs = max((each.total() for each in passes), default=device.syncs.total())
        kernels = count_kernels(device.operations) // max(1, len(passes))
        return CallTrace(
            name,
            device.peak_bytes,
            dict(device.peak_parts),
            work,
            syncs,
            kernels,
            device.fp32_products.total(),
        )

    # ---- batches

    def _draw_full(self, call: MFCDef, micro_batches: int, spec: MicroBatchSpec) -> SequenceSample:
        """Return a batch of about ``micro_batches`` micro-batches for each rank, the largest of
        which is as full as can be: groups have as many sequences as fill rows and passes best, up
        to those of the run."""
        shape = self._shape
        engine = self._engines[call.model_role]
        budget = max(spec.max_tokens_per_mb or BATCH_TOKENS, shape.total)
        positions = engine.ranks.size * micro_batches * budget
        tail = shape.total - shape.prompt
        largest = min(shape.group_size, max(2, -(-(positions - shape.prompt) // tail)))
        # A sequence that is alone in its group has no advantage, so it would not train.
        smallest = min(2, largest)
        best: tuple[int, SequenceSample] | None = None
        for size in range(largest, smallest - 1, -1):
            groups = -(-positions // (shape.prompt + size * tail))
            sample = self._draw(call, groups, size)
            passes = engine.split(sample, spec)
            filled = max((part.positions for part in passes), default=0)
            if best is None or filled > best[0]:
                best = (filled, sample)
            if filled >= _FULL * budget:
                break
        assert best is not None
        return best[1]

    def _draw(self, call: MFCDef, groups: int, size: int) -> SequenceSample:
        """Return a batch of the keys that a call reads, of groups of ``size`` sequences."""
        shape = self._shape
        tail = shape.total - shape.prompt
        g = torch.Generator().manual_seed(2)
        vocabulary = _count_tokens(self._modules[call.model_role])
        stems = torch.randint(vocabulary, (groups, 1, shape.prompt), generator=g)
        tails = torch.randint(vocabulary, (groups, size, tail), generator=g)
        tokens = torch.cat([stems.expand(-1, size, -1), tails], 2).flatten()
        tensors: dict[str, Tensor] = {}
        lengths: dict[str, list[list[int]]] = {}
        for key in call.input_keys:
            name = call.input_key_remap.get(key, key)
            spec = key_spec(name)
            length = {"L": shape.total, "L-1": shape.total - 1}.get(spec.rule, 1)
            lengths[name] = [[length] * size] * groups
            tensors[name] = self._fill(spec, (groups, size, length), tokens, g)
        names = [str(number) for number in range(groups)]
        return SequenceSample.from_tensors(names, tensors, lengths)

    def _fill(
        self, spec: KeySpec, size: tuple[int, int, int], tokens: Tensor, g: torch.Generator
    ) -> Tensor:
        """Return the values of a key, for groups, sequences and entries."""
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[spec.dtype])
        if spec.name == "packed_input_ids":
            return tokens
        if spec.name in ("loss_mask", "prompt_mask"):
            trains = torch.arange(size[2]) >= self._shape.prompt
            mask = trains if spec.name == "loss_mask" else ~trains
            return mask.expand(size).flatten()
        if spec.name == ROLLOUT_KEY:
            return torch.arange(size[1], dtype=dtype).repeat(size[0])
        if not dtype.is_floating_point:
            return torch.zeros(size, dtype=dtype).flatten()
        values = torch.rand(size, generator=g).flatten()
        return -values if "logprobs" in spec.name else values


def _count_tokens(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _pretend_host_memory() -> contextlib.AbstractContextManager[None]:
    """Context manager in which moments that are kept in host memory have no memory there: those of
    a large model would not fit into that of this machine."""
    nothing = lambda *_: None
    return _replace_methods(
        HostMemory,
        {
            "allocate": lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8, device="meta"),
            **dict.fromkeys(("fetch", "wait_for_piece", "store", "finish"), nothing),
        },
    )


def _skip_trial_merge() -> contextlib.AbstractContextManager[None]:
    """Context manager in which adapters are not merged on trial when a model is loaded. Without
    numbers that proves nothing, and it leaves nothing in memory, but would be half of a trace."""
    return _replace_methods(LoraAdapters, {"_check_with_random_adapters": lambda _: None})


@contextlib.contextmanager
def _replace_methods(owner: type, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context manager in which a class has other methods."""
    before = {name: getattr(owner, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for name, method in before.items():
            setattr(owner, name, method)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager without warnings about what the pretended device cannot do."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
