"""Makes the engine of a generation worker, by its name in ``engine.name``, and of a model worker
whose generation engine is not its own module."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from realhf.api.config import AsyncConfig
from realhf.api.experiment import ModelSpec
from realhf.api.generation import StreamingGenerator
from realhf.api.trace import Tracer
from realhf.base.context_limit import context_limit


@contextlib.contextmanager
def make_streaming_generator(
    model: ModelSpec,
    options: AsyncConfig,
    *,
    log: Path,
    timeout_s: float,
    tracer: Tracer,
    on_death: Callable[[str], None],
) -> Iterator[StreamingGenerator]:
    """Make an engine that has no weights until the first ``load_weights``; a server that it needs is started, and ended
    with it.

    ``log`` is the file of such a server, ``timeout_s`` bounds its start, and ``on_death`` is called on another thread
    when it ends by itself. Raises ModelLoadError, FileNotFoundError or TimeoutError.
    """
    with contextlib.ExitStack() as stack:
        if model.engine.name == "embedded":
            engine = stack.enter_context(_embedded(model, options, tracer))
        else:
            url = model.engine.vllm_url or stack.enter_context(_vllm_server(model, options, log, timeout_s, on_death))
            engine = stack.enter_context(_vllm(url, options, tracer))
        try:
            yield engine
        finally:
            engine.close()


@contextlib.contextmanager
def _embedded(model: ModelSpec, options: AsyncConfig, tracer: Tracer) -> Iterator[StreamingGenerator]:
    from realhf.backends.embedded.continuous_batching import ContinuousGenerator
    from realhf.backends.training.torch_backend import load_causal_lm

    torch.set_num_threads(options.generation_threads)
    weights = load_causal_lm(model.path, model.role, getattr(torch, model.dtype))
    if torch.cuda.is_available():
        weights = weights.to("cuda")
    yield ContinuousGenerator(
        weights,
        kv_policy=options.kv_policy,
        threads=options.generation_threads,
        version=-1,
        pause_timeout_s=options.pause_timeout_s,
        tracer=tracer,
    )


@contextlib.contextmanager
def _vllm(url: str, options: AsyncConfig, tracer: Tracer) -> Iterator[StreamingGenerator]:
    from realhf.backends.vllm.generation import VllmGenerator

    yield VllmGenerator(
        url, version=-1, kv_policy=options.kv_policy, pause_timeout_s=options.pause_timeout_s, tracer=tracer
    )


@contextlib.contextmanager
def _vllm_server(
    model: ModelSpec, options: AsyncConfig, log: Path, timeout_s: float, on_death: Callable[[str], None]
) -> Iterator[str]:
    """Run a server inside the block and yield its address."""
    from realhf.backends.vllm.server import VllmOptions, VllmServer

    wanted = model.engine
    found = shutil.which(wanted.vllm_executable) or wanted.vllm_executable
    server = VllmServer(
        model.path,
        executable=Path(found).expanduser(),
        log=log,
        options=VllmOptions(
            dtype=model.dtype,
            threads=options.generation_threads,
            max_model_len=longest_sequence(model),
            gpu_memory_utilization=wanted.gpu_memory_utilization,
            tensor_parallel_size=wanted.tensor_parallel_size,
        ),
    )
    stopping = threading.Event()

    def watch() -> None:
        server.process.wait()
        if not stopping.is_set():
            on_death(server.failure() or "the vLLM server ended")

    try:
        server.wait_until_up(timeout_s)
        threading.Thread(target=watch, name="watch-vllm", daemon=True).start()
        yield server.url
    finally:
        stopping.set()
        server.stop()


def longest_sequence(model: ModelSpec) -> int | None:
    """Return the configured length of sequences, within the model's context: vLLM refuses a longer one."""
    config = Path(model.path) / "config.json"
    if model.engine.max_model_len is None or not config.is_file():
        return model.engine.max_model_len
    return min(model.engine.max_model_len, context_limit(json.loads(config.read_text(encoding="utf-8"))))
