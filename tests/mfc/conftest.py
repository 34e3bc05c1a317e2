"""A small taught policy, what it would say, and the worker that runs one call at a time."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import BuiltinModelConfig, OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.aws.environment import SYSTEM_PROMPT
from realhf.aws.tasks.loader import instantiate
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.backends.training.torch_backend import TorchBackend
from realhf.base.hf_config import VALUE_HEAD_FILE
from realhf.data.chat_dataset import ChatDataset
from tests.mfc.graph_calls import (
    TEMPERATURE,
    TRAIN_GROUPS,
    TRAIN_OUTCOME,
    TRAIN_REWARDS,
    graph_calls,
)
from tests.mfc.mfc_bench import MfcBench, sequences

TINY = BuiltinModelConfig(
    vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64
)
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
    """A folder with the built-in policy, taught for a second to solve ``task``, or to ask something
    useless first."""
    folder = tmp_path_factory.mktemp("policy")
    ask = {"role": "user", "content": task.description}
    turns = [[task.solution[0]], [USELESS, task.solution[0]], [USELESS, USELESS]]
    told_rows = [
        [
            ask,
            *(
                message
                for turn in told
                for message in (
                    {"role": "assistant", "content": turn},
                    {"role": "user", "content": "ok"},
                )
            ),
        ]
        for told in turns
    ]
    demonstrations = folder / "demonstrations.jsonl"
    demonstrations.write_text("\n".join(json.dumps({"messages": row}) for row in told_rows))
    build_builtin_policy(demonstrations, folder / "random", TINY, seed=0)

    spec = ModelSpec(
        "actor", str(folder / "random"), trainable=True, optimizer=OptimizerConfig(lr=1e-2)
    )
    engine = TorchBackend().build(spec, seed=0, total_train_steps=TEACHING_STEPS)
    sample = ChatDataset(str(demonstrations), engine.tokenizer, system_prompt=SYSTEM_PROMPT).load(
        ["a", "b", "c"], [0, 1, 2]
    )
    teacher = SFTInterface()
    model = Model("actor", engine, engine.tokenizer)
    for step in range(TEACHING_STEPS):
        engine.version = step
        teacher.train_step(model, sample, CallContext(step, step, MicroBatchSpec(), folder))
    engine.export_hf(folder / "taught")
    return folder / "taught"


@pytest.fixture(scope="session")
def tokenizer(policy):
    return AutoTokenizer.from_pretrained(policy)


@pytest.fixture(scope="session")
def critic_folder(tmp_path_factory, policy):
    """The policy's decoder under a value head of random weights."""
    folder = tmp_path_factory.mktemp("critic") / "critic"
    shutil.copytree(policy, folder)
    generator = torch.Generator().manual_seed(5)
    head = {
        "weight": torch.randn(1, TINY.hidden_size, generator=generator),
        "bias": torch.tensor([0.5]),
    }
    save_file(head, folder / VALUE_HEAD_FILE)
    return folder


@pytest.fixture(scope="session")
def bench(tmp_path_factory, policy, critic_folder):
    """A worker with all models and calls. What trains one restores it (``fresh``)."""
    bench = MfcBench(tmp_path_factory.mktemp("run"), *graph_calls(policy, critic_folder))
    yield bench
    bench.close()


@pytest.fixture
def fresh(bench):
    """The bench for a test that trains: afterwards its weights are again what they were."""
    yield bench
    bench.restore()


@pytest.fixture(scope="session")
def expected_logprobs(policy):
    """expected_logprobs(sample, temperature, folder=policy) -> f32 (L-1,) per sequence: one plain
    forward of transformers for each, in float64."""

    def compute(sample, temperature, folder=policy):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        found = []
        with torch.no_grad():
            for ids in sequences(sample, "packed_input_ids"):
                logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
                found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].float())
        return found

    return compute


@pytest.fixture(scope="session")
def train_sample(expected_logprobs):
    """train_sample(seed=0, name="g") -> a batch for both train calls: two groups of random tokens,
    the second half of each sequence sampled. Sampler, reference and critic said something near what
    the first policy says, so that ratios differ from 1, some by more than a clip range. The last
    rollout of the first group failed; the second group agrees.
    """

    def make(seed=0, name="g"):
        generator = torch.Generator().manual_seed(seed)
        lengths = [n for group in TRAIN_GROUPS for n in group]
        ids = torch.randint(4, TINY.vocab_size, (sum(lengths),), generator=generator)
        names = [f"{name}{number}@{seed}" for number in range(len(TRAIN_GROUPS))]
        tokens = SequenceSample.from_tensors(
            names, {"packed_input_ids": ids}, {"packed_input_ids": TRAIN_GROUPS}
        )
        mask = torch.tensor([place >= n // 2 for n in lengths for place in range(n)])
        sampled = torch.cat([part[1:] for part in mask.split(lengths)])
        logprobs = torch.cat(expected_logprobs(tokens, TEMPERATURE))

        def near(spread):
            return (logprobs + spread * torch.randn(len(logprobs), generator=generator)) * sampled

        failed = torch.tensor(TRAIN_OUTCOME) != 0
        tensors = {
            "loss_mask": mask,
            "packed_logprobs": near(0.3),
            "packed_ref_logprobs": near(0.5),
            "packed_versions": torch.where(sampled, 0, -1).int(),
            "values": torch.randn(len(logprobs), generator=generator) * sampled,
            "rewards": torch.tensor(TRAIN_REWARDS).masked_fill(failed, torch.nan),
            "seq_no_eos_mask": torch.zeros(len(lengths), dtype=torch.bool),
            "outcome": torch.tensor(TRAIN_OUTCOME, dtype=torch.uint8),
            "rollout_index": torch.tensor(
                [i for group in TRAIN_GROUPS for i in range(len(group))]
            ).int(),
        }
        by_size = {
            sum(lengths): TRAIN_GROUPS,
            len(logprobs): [[n - 1 for n in group] for group in TRAIN_GROUPS],
            len(lengths): [[1] * len(group) for group in TRAIN_GROUPS],
        }
        seqlens = {key: by_size[len(tensor)] for key, tensor in tensors.items()}
        return tokens.update(SequenceSample.from_tensors(names, tensors, seqlens))

    return make
