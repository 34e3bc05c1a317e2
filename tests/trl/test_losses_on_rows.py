"""The losses of three steps on the rows of a file are those of TRL's trainers on the same rows."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realhf.algorithms.inference import LogprobInterface
from realhf.algorithms.preference import DPOInterface
from realhf.algorithms.sft import SFTInterface
from realhf.api.config import OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec
from realhf.backends.training.torch_backend import TorchBackend
from realhf.data.row_formats import PREFERENCE, SUPERVISED, read_examples
from realhf.data.tokenized_rows import ExchangeTokenizer, PackedRow, TokenizedRows, pack_rows
from tests.api.chat.templates import tokenizer
from tests.data.test_tokenized_rows import MARKED

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SMOLLM2 = ROOT / "models" / "smollm2_135m"
STEPS = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="no TRL here; `make test-trl` makes .venv-trl and runs this",
    ),
]


def talk(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


TALKS = [
    {"messages": talk("What is 2+2?", "4.", "And 3+3?", "It is 6, I believe.")},
    {"messages": talk("Name a colour.", "Blue, or perhaps green.")},
    {"messages": talk("Count.", "1 2 3 4 5 6 7 8 9", "Go on.", "10", "Stop.", "As you like.")},
]
COMPLETIONS = [
    {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in TALKS
]
TEXTS = [
    {"prompt": "2+2=", "completion": " 4"},
    {"prompt": "The sky is", "completion": " blue, most of the time."},
]
PAIRS = [
    {**row, "chosen": row["completion"], "rejected": talk("", answer)[1:]}
    for row, answer in zip(COMPLETIONS, ("No idea.", "Grey", "I will go on, and on."), strict=True)
]
for pair in PAIRS:
    del pair["completion"]
IMPLICIT = [
    {"chosen": pair["prompt"] + pair["chosen"], "rejected": pair["prompt"] + pair["rejected"]}
    for pair in PAIRS
]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    made: Any = tokenizer(MARKED, "<|im_end|>")
    made.pad_token = "</s>"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def losses_of_trl(
    mode: str, model: Path, rows: list[Any], lr: float, folder: Path, **options: Any
) -> list[float]:
    given = folder / "given.json"
    found = folder / "found.json"
    given.write_text(json.dumps({"model": str(model), "rows": rows, "lr": lr, "options": options}))
    program = Path(__file__).with_name("train_on_rows.py")
    done = subprocess.run(
        [str(PYTHON), str(program), mode, str(given), str(found)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(found.read_text())["losses"]


def our_losses(
    kind: str, path: Path, rows: list[Any], lr: float, folder: Path, train_on: str, **loss: float
) -> list[float]:
    """Losses of the parts that a run consists of, on all rows in every step."""
    torch.set_num_threads(1)
    optimizer = OptimizerConfig(lr=lr, weight_decay=0.0, warmup_steps_proportion=0.0)
    specs = {
        "actor": ModelSpec("actor", str(path), trainable=True, optimizer=optimizer),
        "ref": ModelSpec("ref", str(path)),
    }
    models: dict[str, Model] = {}
    for role in ("actor", "ref") if kind == PREFERENCE else ("actor",):
        engine: Any = TorchBackend("cpu").build(specs[role], seed=1, total_train_steps=STEPS)
        models[role] = Model(role, engine, engine.tokenizer)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = ExchangeTokenizer(models["actor"].tokenizer, train_on=train_on)
    tokens = [
        [PackedRow.of(encoder.encode(each)) for each in row.exchanges]
        for row in read_examples(file, kind)
    ]
    np.savez(folder / "train.npz", **pack_rows(tokens))  # type: ignore[arg-type]
    sample = TokenizedRows(str(folder)).load([str(n) for n in range(len(rows))], range(len(rows)))
    train = DPOInterface(**loss) if kind == PREFERENCE else SFTInterface()
    losses = []
    for step in range(STEPS):
        context = CallContext(step, 1, MicroBatchSpec(), folder)
        batch = sample
        if kind == PREFERENCE:
            inputs = sample.select({"packed_input_ids", "loss_mask"})
            batch = sample.update(LogprobInterface().inference(models["ref"], inputs, context)[0])
        models["actor"].engine.version = step
        stats = train.train_step(models["actor"], batch, context)
        losses.append(stats["loss" if kind == PREFERENCE else "nll"])
    return losses


@pytest.mark.parametrize(
    ("rows", "train_on", "options"),
    [
        (TALKS, "assistant", {"assistant_only_loss": True}),
        (COMPLETIONS, "assistant", {"assistant_only_loss": True}),
        (COMPLETIONS, "completion", {"completion_only_loss": True}),
        (TEXTS, "assistant", {}),
    ],
    ids=["assistant", "both", "completion", "text"],
)
def test_supervised_losses(tiny_llama: Path, tmp_path: Path, rows, train_on: str, options):
    expected = losses_of_trl("sft", tiny_llama, rows, 1e-3, tmp_path, **options)
    found = our_losses(SUPERVISED, tiny_llama, rows, 1e-3, tmp_path, train_on)
    assert len({*expected}) == STEPS
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("rows", [PAIRS, IMPLICIT], ids=["prompt", "implicit"])
def test_losses_of_preferences(tiny_llama: Path, tmp_path: Path, rows: list[Any]):
    """Without label smoothing, which TRL's sigmoid loss does not read."""
    expected = losses_of_trl("dpo", tiny_llama, rows, 1e-3, tmp_path, beta=0.3)
    found = our_losses(PREFERENCE, tiny_llama, rows, 1e-3, tmp_path, "completion", beta=0.3)
    assert len({*expected}) == STEPS
    assert found == pytest.approx(expected, abs=1e-5)


def test_rows_of_parquet_are_tokenised(tiny_llama: Path, tmp_path: Path):
    """Structures of Arrow have the same keys in every row; those that a row lacks are null. TRL
    brings pyarrow."""
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    rows = [
        {"messages": TALKS[0]["messages"], "tools": None},
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "a box"},
                {"role": "assistant", "content": "A box."},
            ],
            "tools": json.dumps([{"type": "function", "function": {"name": "look"}}]),
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (
        "import sys, json, pyarrow, pyarrow.parquet as parquet; "
        "rows = [json.loads(line) for line in open(sys.argv[1])]; "
        "parquet.write_table(pyarrow.Table.from_pylist(rows), sys.argv[2]); "
        "bad = pyarrow.Table.from_pylist([rows[0], {'messages': rows[0]['messages'][:1]}]); "
        "parquet.write_table(bad, sys.argv[3])"
    )
    files = [tmp_path / name for name in ("rows.jsonl", "rows.parquet", "bad.parquet")]
    subprocess.run([str(PYTHON), "-c", code, *map(str, files)], check=True, timeout=100)
    tokenised = []
    for file in files:
        out = tmp_path / f"out-{file.suffix}"
        done = subprocess.run(
            [
                *(str(PYTHON), "-m", "realhf.data.tokenize_rows", str(file)),
                *("--model", str(tiny_llama), "--out", str(out)),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        tokenised.append((done.returncode, done.stdout.replace(file.name, "")))
    assert tokenised[0][0] == 0, done.stderr
    assert tokenised[1] == (
        0,
        tokenised[0][1].replace("line 1", "row 1").replace("line 2", "row 2"),
    )
    assert tokenised[2][0] == 1
    assert "bad.parquet, row 2: messages: has no assistant message to train on" in done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no models/smollm2_135m; `make model` makes it")
def test_losses_of_a_real_model(tmp_path: Path):
    expected = losses_of_trl("sft", SMOLLM2, COMPLETIONS, 1e-5, tmp_path)
    found = our_losses(SUPERVISED, SMOLLM2, COMPLETIONS, 1e-5, tmp_path, "completion")
    assert found == pytest.approx(expected, abs=1e-5)
    expected = losses_of_trl("dpo", SMOLLM2, PAIRS, 1e-6, tmp_path, beta=0.1)
    found = our_losses(PREFERENCE, SMOLLM2, PAIRS, 1e-6, tmp_path, "completion", beta=0.1)
    assert found == pytest.approx(expected, abs=1e-5)
