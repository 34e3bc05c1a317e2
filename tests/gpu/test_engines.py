"""Each engine on a GPU computes what it computes on the CPU, and what one samples the other scores
alike."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.api.sample import SequenceSample
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.tensor_digest import digest_tensors
from tests.gpu.conftest import SPEC, engine_of, train

CPU = torch.device("cpu")
GEN = GenConfig(max_new_tokens=24)
PROMPTS = [[5, 6, 7] * 20, [8, 9, 8], [9, 10, 11, 12] * 5]
MISMATCH = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.02, 0.3)}
"""Mean and largest difference of log-probabilities that is put down to rounding. TF32 is off by
default."""
DEADLINE_S = 120.0
Build = Callable[..., Any]


def requests() -> list[GenRequest]:
    return [GenRequest(slot, prompt, seed=slot) for slot, prompt in enumerate(PROMPTS)]


def streamed(engine: ContinuousGenerator) -> list[GenOutput]:
    over: queue.Queue[tuple[int, Any]] = queue.Queue()
    for request in requests():
        engine.submit(request, GEN, (), lambda result, slot=request.slot: over.put((slot, result)))
    told = dict(over.get(timeout=DEADLINE_S) for _ in PROMPTS)
    outputs = [told[slot] for slot in range(len(PROMPTS))]
    assert all(isinstance(output, GenOutput) for output in outputs), outputs
    return outputs


def mismatch(engine: TorchEngine, outputs: Sequence[GenOutput]) -> torch.Tensor:
    """Differences between the log-probabilities of sampled tokens and those that the trainer
    computes."""
    rows = [prompt + output.token_ids for prompt, output in zip(PROMPTS, outputs, strict=True)]
    ids = torch.tensor([token for row in rows for token in row])
    sample = SequenceSample.from_tensors(
        [str(n) for n in range(len(rows))],
        {"packed_input_ids": ids},
        {"packed_input_ids": [[len(row)] for row in rows]},
    )
    scored = engine.logprobs(sample, temperature=1.0, mb_spec=SPEC).split(
        [len(row) - 1 for row in rows]
    )
    found = [part[len(prompt) - 1 :] for prompt, part in zip(PROMPTS, scored, strict=True)]
    return (
        torch.cat(found) - torch.tensor([p for output in outputs for p in output.logprobs])
    ).abs()


def within(off: torch.Tensor, dtype: torch.dtype) -> None:
    mean, most = MISMATCH[dtype]
    assert float(off.mean()) < mean and float(off.max()) < most, (
        f"mean {off.mean():.1e}, largest {off.max():.1e}"
    )


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_scores_and_five_train_steps_are_those_of_the_cpu(
    device: torch.device, model_on: Build, batch: SequenceSample, architecture: str
) -> None:
    here = engine_of(model_on(CPU, architecture))
    there = engine_of(model_on(device, architecture))
    scores = [engine.logprobs(batch, temperature=0.8, mb_spec=SPEC) for engine in (here, there)]
    assert scores[1].device.type == "cpu" and float((scores[0] - scores[1]).abs().max()) < 1e-3
    assert train(there, batch, 5) == pytest.approx(train(here, batch, 5), rel=1e-3)
    for name, tensor in here.weights().items():
        torch.testing.assert_close(there.weights()[name].cpu(), tensor, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_what_an_engine_samples_the_trainer_scores_alike(
    device: torch.device,
    model_on: Build,
    batch: SequenceSample,
    architecture: str,
    dtype: torch.dtype,
) -> None:
    engine = engine_of(model_on(device, architecture, dtype))
    within(
        mismatch(engine, engine.generator().generate(requests(), GEN, stop_ids=(), seed=0)), dtype
    )
    with closing(ContinuousGenerator(model_on(device, architecture, dtype))) as stream:
        within(mismatch(engine, streamed(stream)), dtype)
        train(engine, batch)
        assert float(mismatch(engine, streamed(stream)).mean()) > 0, (
            "the engine has the weights of before"
        )
        stream.load_weights(engine.version, engine.weights())
        after = streamed(stream)
        held = stream.weight_digests([*engine.weights()])
    assert {version for output in after for version in output.versions} == {1}
    within(mismatch(engine, after), dtype)
    expected = digest_tensors({name: tensor.cpu() for name, tensor in engine.weights().items()})
    assert {name: tensor.digest for name, tensor in held.items()} == expected, (
        "digests do not depend on the device"
    )


def test_a_checkpoint_of_a_gpu_goes_on_elsewhere(
    device: torch.device, model_on: Build, batch: SequenceSample, tmp_path: Path
) -> None:
    there = engine_of(model_on(device), gradient_checkpointing=True)
    train(there, batch, 2)
    there.save_checkpoint(tmp_path / "state")
    here = engine_of(model_on(CPU))
    again = engine_of(model_on(device))
    for engine in (here, again):
        engine.load_checkpoint(tmp_path / "state")
        assert engine.version == 2
    assert (
        digest_tensors(again.weights())
        == digest_tensors(there.weights())
        == digest_tensors(here.weights())
    )
    expected = train(there, batch)
    assert train(again, batch) == pytest.approx(expected, rel=1e-3)
    assert train(here, batch) == pytest.approx(expected, rel=1e-3)
    there.export_hf(tmp_path / "policy")
    assert (tmp_path / "policy" / "model.safetensors").is_file()
