"""Makes the engine of a generation worker, by its name in ``async_rl.engine``."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from realhf.api.config import AsyncConfig
from realhf.api.experiment import ModelSpec
from realhf.api.generation import StreamingGenerator
from realhf.api.trace import Tracer


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
        if options.engine == "embedded":
            engine = stack.enter_context(_embedded(model, options, tracer))
        else:
            url = options.vllm_url or stack.enter_context(_vllm_server(model, options, log, timeout_s, on_death))
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

    found = shutil.which(options.vllm_executable) or options.vllm_executable
    server = VllmServer(
        model.path,
        executable=Path(found).expanduser(),
        log=log,
        options=VllmOptions(dtype=model.dtype, threads=options.generation_threads),
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
