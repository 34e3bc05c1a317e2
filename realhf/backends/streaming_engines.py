"""Factory that creates generation engines from ``engine.name``: for generation workers, and for
model workers that generate with an engine other than the model they train."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from realhf.api.config import AsyncConfig
from realhf.api.experiment import ModelSpec
from realhf.api.generation import StreamingGenerator
from realhf.api.trace import Tracer
from realhf.backends.embedded.memory import cache_bytes
from realhf.backends.training.tokenizer_loading import check_dense
from realhf.base.engine_memory import cache_in, describe_no_room, server_room
from realhf.base.files import write_atomic
from realhf.base.hf_config import (
    TrainerMemory,
    context_limit,
    model_size,
    trainer_memory,
    weight_bytes,
)
from realhf.base.loopback import LOOPBACK_INTERFACE

if TYPE_CHECKING:
    from realhf.backends.vllm.generation import VllmGenerator
    from realhf.backends.vllm.server import VllmOptions


@contextlib.contextmanager
def make_streaming_generator(
    model: ModelSpec,
    options: AsyncConfig,
    *,
    log: Path,
    timeout_s: float,
    tracer: Tracer,
    on_death: Callable[[str], None],
    shared: bool = False,
    masked_tokenizer: Any = None,
    stop_ids: Sequence[int] = (),
    interface: str = LOOPBACK_INTERFACE,
) -> Iterator[StreamingGenerator]:
    """Context manager that yields a generation engine, which has no weights until the first
    ``load_weights``. If the engine needs a server, the server is started and stopped with it. What
    a server says about itself is written next to ``log``, with the suffix .json.

    Args:
        model: Model that the engine runs.
        options: Options of the engine.
        log: Output file of the server.
        timeout_s: Timeout for the server's start, seconds.
        tracer: Receives the engine's spans.
        on_death: Called with a reason, on another thread, if the server ends unexpectedly.
        shared: Whether a trainer computes on the same device. Unless options define its memory, the
            engine then takes at most half of the device's free memory.
        masked_tokenizer: Tokenizer of the model if requests may have grammars, which the embedded
            engine alone can follow; None otherwise.
        stop_ids: Token ids that end a turn, which a grammar may require.
        interface: Network interface at which a started server and the trainer meet over NCCL.

    Raises ModelLoadError, FileNotFoundError or TimeoutError, and ValueError for a tokenizer whose
    tokens cannot be masked.
    """
    with contextlib.ExitStack() as stack:
        if model.engine.name == "vllm":
            check_dense(model.path, model.role)
        server: VllmGenerator | None = None
        if model.engine.name == "embedded":
            engine = _build_embedded_engine(
                model, options, tracer, shared, masked_tokenizer, stop_ids
            )
        else:
            url = model.engine.vllm_url or stack.enter_context(
                _run_vllm_server(model, options, log, timeout_s, on_death, shared, interface)
            )
            from realhf.backends.vllm.generation import VllmGenerator

            policy = options.kv_policy
            pause_s = options.pause_timeout_s
            engine = server = VllmGenerator(
                url, version=-1, kv_policy=policy, pause_timeout_s=pause_s, tracer=tracer
            )
        stack.callback(engine.close)
        if server is not None:
            description = json.dumps(server.describe_server(), indent=1)
            write_atomic(log.with_suffix(".json"), f"{description}\n")
        yield engine


def _build_embedded_engine(
    model: ModelSpec,
    options: AsyncConfig,
    tracer: Tracer,
    shared: bool,
    masked_tokenizer: Any,
    stop_ids: Sequence[int],
) -> StreamingGenerator:
    """Load the model and return an embedded engine."""
    from realhf.backends.embedded.continuous_batching import ContinuousGenerator
    from realhf.backends.training.torch_backend import explain_loading_oom, load_causal_lm

    torch.set_num_threads(options.generation_threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with explain_loading_oom(model, device):
        dtype = getattr(torch, model.dtype)
        weights = load_causal_lm(model.path, model.role, dtype, experts=model.experts).to(device)
    trainer = _estimate_trainer_memory(model) if shared else None
    reserved_bytes = (
        sum(p.nbytes for p in weights.parameters()) + trainer.loaded + trainer.first_update
        if trainer is not None
        else 0
    )
    masks = None
    if masked_tokenizer is not None:
        from realhf.backends.embedded.token_masks import TokenMasks

        masks = TokenMasks(
            masked_tokenizer, stop_ids, weights.get_output_embeddings().weight.shape[0]
        )
    return ContinuousGenerator(
        weights,
        kv_policy=options.kv_policy,
        threads=options.generation_threads,
        version=-1,
        pause_timeout_s=options.pause_timeout_s,
        tracer=tracer,
        max_bytes=lambda: cache_bytes(
            model.engine.kv_cache_gib, weights.device, shared=shared, reserved_bytes=reserved_bytes
        ),
        masks=masks,
    )


@contextlib.contextmanager
def _run_vllm_server(
    model: ModelSpec,
    options: AsyncConfig,
    log: Path,
    timeout_s: float,
    on_death: Callable[[str], None],
    shared: bool,
    interface: str,
) -> Iterator[str]:
    """Context manager that runs a vLLM server and yields its address."""
    from realhf.backends.vllm.server import VllmServer

    engine = model.engine
    executable = shutil.which(engine.vllm_executable) or engine.vllm_executable
    server = VllmServer(
        model.path,
        executable=Path(executable).expanduser(),
        log=log,
        options=replace(server_options(model, options, shared), interface=interface),
    )
    stopping = threading.Event()

    def watch() -> None:
        server.process.wait()
        if not stopping.is_set():
            on_death(server.describe_failure() or "the vLLM server ended")

    try:
        server.wait_until_up(timeout_s)
        threading.Thread(target=watch, name="watch-vllm", daemon=True).start()
        yield server.url
    finally:
        stopping.set()
        server.stop()


def server_options(model: ModelSpec, options: AsyncConfig, shared: bool) -> VllmOptions:
    """Return the vLLM server options for a model.

    On CUDA the server captures CUDA graphs, computes prompts in chunks, caches prefixes, and
    receives weights through its GPUs' memory. With ``shared``, and unless an option defines its
    share, it gets half of the GPU memory that the trainer does not use: its weights, what it
    computes with, and the rest as a KV cache of fixed size. Raises RuntimeError, naming options, if
    the weights do not fit into that.
    """
    from realhf.backends.vllm.server import VllmOptions

    engine = model.engine
    cuda = torch.cuda.is_available()
    kv_cache = None
    if engine.gpu_memory_utilization is None and shared and cuda:
        kv_cache = compute_cache_bytes(model, *torch.cuda.mem_get_info())
    return VllmOptions(
        dtype=model.dtype,
        threads=options.generation_threads,
        max_model_len=longest_sequence(model),
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_bytes=kv_cache,
        runner=engine.vllm_runner,
        tensor_parallel_size=engine.tensor_parallel_size,
        cuda=cuda,
        transfer="nccl" if options.weights == "nccl" and not shared else "ipc",
    )


def compute_cache_bytes(model: ModelSpec, free: int, total: int) -> int:
    """Return the size of the KV cache of a server on a GPU that a trainer uses too, with ``free``
    of ``total`` bytes free when the server is started.

    vLLM's own measurement would count what the trainer allocates meanwhile. Raises RuntimeError if
    the weights do not fit.
    """
    size = model_size(model.path)
    trainer = _estimate_trainer_memory(model)
    parallel_size = model.engine.tensor_parallel_size
    weights = 0 if size is None else weight_bytes(size, model.dtype) // parallel_size
    if trainer is None:
        return cache_in(free // 2 - weights)
    room = server_room(free, total, loaded=trainer.loaded, first_update=trainer.first_update)
    if room <= weights:
        taken = trainer.loaded + trainer.first_update
        raise RuntimeError(
            describe_no_room(
                model.role, total=total, free=free, trainer=taken, room=room, needed=weights
            )
        )
    return cache_in(room - weights)


def _estimate_trainer_memory(model: ModelSpec) -> TrainerMemory | None:
    """Return the memory that a model's trainer uses from its first update on; None if it is unknown
    or the model does not train."""
    size = model_size(model.path)
    if size is None or not model.trainable:
        return None
    offload = model.optimizer is not None and model.optimizer.offload
    rank = model.lora.rank if model.lora is not None else 0
    return trainer_memory(
        size, model.dtype, lora_rank=rank, offload=offload, parts=model.parallel.fsdp
    )


def longest_sequence(model: ModelSpec) -> int | None:
    """Return the configured maximum sequence length, limited to the model's context length because
    vLLM rejects a longer one."""
    config = Path(model.path) / "config.json"
    if model.engine.max_model_len is None or not config.is_file():
        return model.engine.max_model_len
    return min(
        model.engine.max_model_len, context_limit(json.loads(config.read_text(encoding="utf-8")))
    )
