"""The export of a policy whose adapters trained is a model that vLLM serves as it is: the adapters
are merged in it."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from realhf.api.config import GenConfig, LoraConfig, OptimizerConfig
from realhf.api.model import ForwardOutputs
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.torch_engine import TorchEngine
from realhf.backends.vllm.generation import VllmGenerator
from tests.vllm.conftest import PROMPT, Asked, logprobs_of, serving

pytest.importorskip("peft", reason="adapters need the extra lora")
pytestmark = pytest.mark.timeout(800)


def nll(outputs: ForwardOutputs, part: SequenceSample) -> tuple[torch.Tensor, dict[str, float]]:
    return -outputs.logprobs()[0].mean(), {}


def test_the_merged_export_of_adapters_samples_as_the_model_with_them(
    models: list, folder: Path, tmp_path: Path
) -> None:
    engine = TorchEngine(
        copy.deepcopy(models[0]),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=2e-2),
        total_train_steps=5,
        lora=LoraConfig(4, 8.0),
    )
    ids = {"packed_input_ids": torch.tensor(PROMPT * 2)}
    sample = SequenceSample.from_tensors(["s"], ids, {"packed_input_ids": [[2 * len(PROMPT)]]})
    for _ in range(5):
        engine.train_batch(sample, nll, mb_spec=MicroBatchSpec())
    engine.export_hf(tmp_path / "policy")
    log = tmp_path / "server.txt"
    with (
        serving(tmp_path / "policy", log) as server,
        closing(VllmGenerator(server.url, version=0)) as generator,
    ):
        ask = Asked(generator)
        ask.submit(1, PROMPT, GenConfig(max_new_tokens=60), seed=4)
        output = ask.output()
    found = torch.tensor(output.logprobs)
    assert (found - logprobs_of(engine.model, PROMPT, output.token_ids, 1.0)).abs().max() < 2e-3
    before = logprobs_of(models[0], PROMPT, output.token_ids, 1.0)
    assert (found - before).abs().max() > 0.1, "the adapters are felt"
