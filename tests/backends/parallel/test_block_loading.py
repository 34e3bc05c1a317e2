"""A model that is cut over ranks is read block by block, and is then the one that the folder
holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ApertusConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

from realhf.backends.builtin_policy import train_tokenizer
from realhf.backends.parallel.fsdp import build_without_memory
from realhf.backends.training.torch_backend import load_causal_lm
from tests.backends.parallel import loading
from tests.backends.parallel.rank_processes import results, run_ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "tied": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "untied": LlamaConfig(**SHAPE),
    "buffers": ApertusConfig(**SHAPE),
}  # fmt: skip


def saved(folder: Path, name: str, seed: int = 0, **options: Any) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for buffer in (b for n, b in model.named_buffers() if n in model.state_dict()):
            buffer.add_(0.125)  # What is computed at the start is not what the folder holds.
    model.save_pretrained(folder, **options)
    train_tokenizer(["aws s3 ls"], 97, 64).save_pretrained(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.slow
def test_what_ranks_read_part_by_part_is_the_model_of_the_folder(tmp_path: Path) -> None:
    """Digests of all tensors, a train step and the export are those of ranks that load it whole;
    none held it whole."""
    tied = saved(tmp_path / "tied", "tied", max_shard_size="20KB")
    assert (tied / "model.safetensors.index.json").is_file(), "several files"
    folders = [(str(tied), "lm"), (str(saved(tmp_path / "buffers", "buffers")), "lm")]
    folders.append((str(saved(tmp_path / "untied", "untied")), "value"))
    (tmp_path / "out").mkdir()
    outcomes = results(run_ranks(2, loading.load_all, 2, folders, str(tmp_path / "out")))
    for rank, found in enumerate(outcomes):
        for (path, head), told in zip(folders, found, strict=True):
            parts = told["parts"]
            whole = told["whole"]
            for key in ("before", "after", "loss", "tied", "meta", "config", "files"):
                assert parts[key] == whole[key], (rank, path, head, key)
            assert parts["meta"] == [] and parts["said"] == [] and parts["before"] != parts["after"]
            assert parts["tied"] == (head == "lm" and Path(path).name == "tied")
            size = sum(
                tensor.nbytes
                for file in Path(path).glob("*.safetensors")
                for tensor in load_file(file).values()
            )
            assert 0 < parts["most"] < 0.75 * size, "never the whole model at once"
            assert parts["before"] == outcomes[0][found.index(told)]["parts"]["before"]


def without_memory(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return build_without_memory(str(folder), "actor", torch.device("cpu"), dtype, **options)


@pytest.mark.slow
def test_a_folder_that_cannot_be_read_so_is_loaded_whole_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model", "untied")
    tensors = load_file(folder / "model.safetensors")

    def refused(change: dict[str, Any], reason: str) -> None:
        kept = {
            name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None
        }
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        caplog.clear()
        assert without_memory(folder) is None
        assert (
            "actor.path" in caplog.text
            and "is loaded whole on each worker before it is sharded" in caplog.text
        )
        assert reason in caplog.text

    refused(
        {"model.layers.1.mlp.up_proj.weight": None},
        "it has no tensor model.layers.1.mlp.up_proj.weight",
    )
    refused(
        {"model.norm.weight": torch.ones(31)},
        "model.norm.weight has the shape (31,), in the model (32,)",
    )
    refused({"lm_head.weight": None}, "it has no tensor lm_head.weight")
    assert without_memory(folder, with_head=False) is not None, "a value head needs none"
    (folder / "model.safetensors").write_bytes(b"no such file")
    assert without_memory(folder) is None
    (folder / "model.safetensors").unlink()
    assert without_memory(folder) is None and "no safetensors files" in caplog.text


def test_a_decoder_alone_is_found_by_the_names_it_was_saved_with(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "untied")
    whole = load_causal_lm(str(folder), "critic", torch.float32)
    whole.model.save_pretrained(folder)
    model, weights = without_memory(folder, torch.bfloat16, with_head=False)
    assert all(p.is_meta for p in model.parameters()) and not any(
        b.is_meta for b in model.buffers()
    )
    weights.fill(model.model)
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name).bfloat16()), name


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "untied", max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-00001', '"../model-00001'))
    model, weights = without_memory(folder)
    weights.fill(model)
    assert not any(p.is_meta for p in model.parameters()), (
        "files beside the index are read, and no others"
    )
