"""A small taught policy, and what it would say."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import BuiltinModelConfig, OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec
from realhf.aws.environment import SYSTEM_PROMPT
from realhf.aws.tasks.loader import instantiate
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.backends.training.torch_backend import TorchBackend
from realhf.data.chat_dataset import ChatDataset
from tests.mfc.mfc_bench import sequences

TINY = BuiltinModelConfig(vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
TEACHING_STEPS = 60
USELESS = "aws s3api list-buckets"
"""A command that the taught policy likes and that solves nothing."""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def task():
    """One listing request solves it; ``USELESS`` does not."""
    return instantiate(1, seed=7)


@pytest.fixture(scope="session")
def policy(tmp_path_factory, task):
    """A folder with the built-in policy, taught for a second to solve ``task``, or to ask something useless first."""
    folder = tmp_path_factory.mktemp("policy")
    ask = {"role": "user", "content": task.description}
    turns = [[task.solution[0]], [USELESS, task.solution[0]], [USELESS, USELESS]]
    told_rows = [
        [
            ask,
            *(
                message
                for turn in told
                for message in ({"role": "assistant", "content": turn}, {"role": "user", "content": "ok"})
            ),
        ]
        for told in turns
    ]
    demonstrations = folder / "demonstrations.jsonl"
    demonstrations.write_text("\n".join(json.dumps({"messages": row}) for row in told_rows))
    build_builtin_policy(demonstrations, folder / "random", TINY, seed=0)

    spec = ModelSpec("actor", str(folder / "random"), trainable=True, optimizer=OptimizerConfig(lr=1e-2))
    engine = TorchBackend().build(spec, seed=0, total_train_steps=TEACHING_STEPS)
    sample = ChatDataset(str(demonstrations), engine.tokenizer, system_prompt=SYSTEM_PROMPT).load(
        ["a", "b", "c"], [0, 1, 2]
    )
    teacher, model = SFTInterface(), Model("actor", engine, engine.tokenizer)
    for step in range(TEACHING_STEPS):
        engine.version = step
        teacher.train_step(model, sample, CallContext(step, step, MicroBatchSpec(), folder))
    engine.export_hf(folder / "taught")
    return folder / "taught"


@pytest.fixture(scope="session")
def tokenizer(policy):
    return AutoTokenizer.from_pretrained(policy)


@pytest.fixture(scope="session")
def expected_logprobs(policy):
    """expected_logprobs(sample, temperature) -> f32 (L-1,) per sequence: one plain forward of transformers for each, in
    float64."""

    def compute(sample, temperature):
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64, attn_implementation="eager")
        found = []
        with torch.no_grad():
            for ids in sequences(sample, "packed_input_ids"):
                logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
                found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].float())
        return found

    return compute
