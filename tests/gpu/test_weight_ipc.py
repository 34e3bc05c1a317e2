"""Weights go to another process through memory of the GPU, by handles that travel as JSON."""

from __future__ import annotations

import json
import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.backends.vllm.device_transfer import ServerGpu, from_json, transfer_calls
from realhf.base.tensor_digest import digest_tensors

pytestmark = pytest.mark.cuda_only
DEADLINE_S = 120.0


def receive(pipe: Connection) -> None:
    """Take chunks as vLLM's workers do: open the buffer once, and copy what lies in it now."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    try:
        held: dict[str, torch.Tensor] = {}
        buffer: torch.Tensor | None = None
        pipe.send("ready")
        while (text := pipe.recv()) is not None:
            chunk: dict[str, Any] = json.loads(text)
            if buffer is None:
                (parts,) = chunk["handles"].values()
                buffer = rebuild_cuda_tensor(*from_json(parts))
            pieces = buffer[: sum(chunk["tensor_sizes"])].split(chunk["tensor_sizes"])
            for name, piece, dtype, shape in zip(
                chunk["names"], pieces, chunk["dtype_names"], chunk["shapes"], strict=True
            ):
                held[name] = piece.view(getattr(torch, dtype)).view(shape).clone()
            torch.cuda.synchronize()
            pipe.send("taken")
        pipe.send(digest_tensors(held))
    except BaseException:
        pipe.send(traceback.format_exc())


@pytest.mark.parametrize("origin", ["cuda:0", "cpu"])
def test_another_process_reads_what_this_one_holds(device: torch.device, origin: str) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "a": ((300, 70), torch.bfloat16),
        "b": ((11,), torch.float32),
        "c": ((5, 9, 2), torch.bfloat16),
    }
    tensors = {
        name: torch.randn(*shape, generator=draw).to(origin, dtype)
        for name, (shape, dtype) in shapes.items()
    }
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there,), daemon=True)
    process.start()
    try:

        def answer() -> Any:
            assert here.poll(DEADLINE_S), (
                f"the other process did not answer within {DEADLINE_S:g} s"
            )
            return here.recv()

        assert answer() == "ready"
        with transfer_calls(1, tensors, [ServerGpu(device, uuid)], max_bytes=20_000) as made:
            calls = list[str]()
            for method, arguments in made:
                calls.append(method)
                if method == "take_chunk":
                    here.send(json.dumps(arguments))
                    assert answer() == "taken"
            here.send(None)
            assert answer() == digest_tensors(tensors)
        assert calls == ["begin_transfer", *["take_chunk"] * 2, "end_transfer"]
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()


def test_a_vllm_of_this_machine_takes_weights_so(device: torch.device, tmp_path: Path) -> None:
    """Needs a vLLM for CUDA, as the command ``vllm``; without one the transfer is proven up to the
    handle only."""
    import shutil

    from realhf.api.config import BuiltinModelConfig
    from realhf.backends.builtin_policy import build_model, train_tokenizer
    from realhf.backends.vllm.generation import VllmGenerator
    from realhf.backends.vllm.server import VllmOptions, VllmServer

    if (found := shutil.which("vllm")) is None:
        pytest.skip("no command vllm here: install vLLM 0.32 or later for CUDA to run this")
    sizes = BuiltinModelConfig(
        vocab_size=512,
        hidden_size=256,
        num_layers=2,
        num_heads=4,
        intermediate_size=256,
        max_positions=1024,
    )
    models = [build_model(sizes, 512, 3, 0, seed).to(device, torch.bfloat16) for seed in range(2)]
    models[0].save_pretrained(tmp_path / "model")
    words = [f"aws s3api create-bucket --bucket fox-{n}" for n in range(50)]
    train_tokenizer(words, 512, 1024).save_pretrained(tmp_path / "model")
    options = VllmOptions(
        dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.3, cuda=True
    )
    with VllmServer(
        tmp_path / "model", executable=Path(found), log=tmp_path / "log.txt", options=options
    ) as server:
        engine = VllmGenerator(server.url)
        try:
            assert engine._common_gpus, (
                "the server is on this GPU and was started with the transfer"
            )
            for version, model in enumerate(models):
                weights = {name: p.detach() for name, p in model.named_parameters()}
                engine.load_weights(version, weights)
                held = engine.weight_digests([*weights])
                expected = digest_tensors(weights)
                proven = {name: tensor.digest for name, tensor in held.items() if tensor.proven}
                assert len(proven) > len(weights) // 2 and all(
                    expected[name] == proven[name] for name in proven
                )
        finally:
            engine.close()
