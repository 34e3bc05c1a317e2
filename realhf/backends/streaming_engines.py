"""The engine of a generation worker, by its name in ``async_rl.engine``."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from realhf.api.config import AsyncConfig
from realhf.api.experiment import ModelSpec
from realhf.api.generation import StreamingGenerator
from realhf.api.trace import Tracer

ENGINES = ("embedded", "vllm")


@contextlib.contextmanager
def make_streaming_generator(
    model: ModelSpec, options: AsyncConfig, *, log: Path, tracer: Tracer
) -> Iterator[StreamingGenerator]:
    """An engine without weights, which come with the first ``load_weights``; a server that it needs is started, and
    ended with it. ``log``: where such a server writes. Raises ModelLoadError, FileNotFoundError or TimeoutError."""
    maker = _embedded if options.engine == "embedded" else _vllm
    with maker(model, options, log, tracer) as engine:
        try:
            yield engine
        finally:
            engine.close()


@contextlib.contextmanager
def _embedded(model: ModelSpec, options: AsyncConfig, log: Path, tracer: Tracer) -> Iterator[StreamingGenerator]:
    del log
    from realhf.backends.continuous_batching import ContinuousGenerator
    from realhf.backends.torch_backend import load_causal_lm

    torch.set_num_threads(options.generation_threads)
    weights = load_causal_lm(model.path, model.role, getattr(torch, model.dtype))
    if torch.cuda.is_available():
        weights = weights.to("cuda")
    yield ContinuousGenerator(weights, kv_policy=options.kv_policy, threads=options.generation_threads, version=-1,
                              tracer=tracer)


@contextlib.contextmanager
def _vllm(model: ModelSpec, options: AsyncConfig, log: Path, tracer: Tracer) -> Iterator[StreamingGenerator]:
    from realhf.backends.vllm_generation import VllmGenerator
    from realhf.backends.vllm_server import VllmOptions, VllmServer

    with contextlib.ExitStack() as stack:
        url = options.vllm_url
        if url is None:
            found = shutil.which(options.vllm_executable) or options.vllm_executable
            threads = options.generation_threads
            server = VllmServer(model.path, executable=Path(found).expanduser(), log=log,
                                options=VllmOptions(dtype=model.dtype, threads=threads))
            stack.enter_context(server).wait_until_up()
            url = server.url
        yield VllmGenerator(url, version=-1, kv_policy=options.kv_policy, tracer=tracer)
