"""Says how many parameters a model has and how much memory they take, from its files, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST_HEAD = 100_000_000
"""Largest number of bytes that the format safetensors allows for the head of a file."""
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelSize:
    """``parameters`` in all; ``matrices`` are the shapes of the linear layers in blocks, which adapters stand beside;
    ``layers``, ``hidden``, ``inner`` (width of a feed-forward network) and ``key_values`` (numbers that one token keeps
    in all layers) describe what a token takes."""

    parameters: int
    matrices: tuple[tuple[int, int], ...]
    layers: int
    hidden: int
    inner: int
    key_values: int

    def adapters(self, rank: int) -> int:
        """Number of parameters of adapters of this rank beside all linear layers."""
        return sum(rank * (rows + columns) for rows, columns in self.matrices)


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of what a trainer holds on its device between steps; ``weights`` with the fp32 copies of narrower ones."""

    weights: int
    gradients: int
    moments: int

    @property
    def later(self) -> int:
        """Bytes that are taken only when the first update is made."""
        return self.gradients + self.moments


def trainer_memory(
    size: ModelSize, dtype: str, *, lora_rank: int = 0, offload: bool = False, parts: int = 1
) -> TrainerMemory:
    """Return what a worker holds that trains the model in ``dtype``, cut into ``parts``. Gradients add up in fp32, and
    AdamW has two fp32 moments for each trained parameter, on the device unless ``offload``."""
    trained = size.adapters(lora_rank) if lora_rank else size.parameters
    masters = 4 * trained if dtype != "float32" else 0
    weights = _BYTES[dtype] * (size.parameters + (trained if lora_rank else 0)) + masters
    return TrainerMemory(weights // parts, 4 * trained // parts, 0 if offload else 8 * trained // parts)


def weight_bytes(size: ModelSize, dtype: str) -> int:
    """Return the bytes of the weights alone, as generation and a frozen model hold them."""
    return _BYTES[dtype] * size.parameters


def activation_bytes(size: ModelSize, dtype: str, tokens: int, *, checkpointing: bool) -> int:
    """Estimate what a pass over ``tokens`` tokens keeps for its backward pass. In Llama and Qwen3 a block keeps 10 to
    12 vectors of the hidden width and four of the feed-forward network; 16 leave room for the ones that stay
    fp32. With ``checkpointing`` it is one vector for each block, beside all of a single block. Attention is taken to be
    fused, and logits to be made in chunks, as they are here."""
    block = 16 * size.hidden + 4 * size.inner
    kept = size.layers * size.hidden + block if checkpointing else size.layers * block
    return _BYTES[dtype] * tokens * kept


def model_size(path: str) -> ModelSize | None:
    """Return the size of the model in a folder, or of a hub id that lies in the cache of the hub's client; None where
    that cannot be said."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        with suppress(ImportError, ValueError, OSError):
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(path, "config.json")
            folder = Path(found).parent if isinstance(found, str) else folder
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        described = size_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        shapes = tensor_shapes(folder)
        if not shapes:
            return described
        counted = sum(_product(shape) for shape in shapes.values())
        return ModelSize(
            counted, block_matrices(shapes), described.layers, described.hidden, described.inner, described.key_values
        )
    return None


def size_of(config: Mapping[str, Any]) -> ModelSize:
    """Return the size of a dense decoder or a mixture with gated feed-forward networks, as its ``config.json`` has it:
    right within some percent. Raises KeyError or TypeError for a configuration that says too little."""
    text = config.get("text_config") or config
    hidden, layers = (
        int(text.get("hidden_size") or text["n_embd"]),
        int(text.get("num_hidden_layers") or text["n_layer"]),
    )
    heads = int(text.get("num_attention_heads") or text["n_head"])
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head = int(text.get("head_dim") or hidden // heads)
    experts = int(text.get("num_local_experts") or text.get("num_experts") or 1)
    inner = int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden)
    each = int(text.get("moe_intermediate_size") or inner) if experts > 1 else inner
    up = [(each, hidden)] * (1 if "n_embd" in text else 2) * experts
    block = [(heads * head, hidden), *[(kv_heads * head, hidden)] * 2, (hidden, heads * head), *up]
    block += [(hidden, each)] * experts
    embeddings = int(text["vocab_size"]) * hidden * (1 if text.get("tie_word_embeddings", True) else 2)
    embeddings += int(text.get("n_positions") or 0) * hidden
    parameters = layers * (sum(map(_product, block)) + 2 * hidden) + embeddings + hidden
    return ModelSize(parameters, tuple(block * layers), layers, hidden, inner, 2 * layers * kv_heads * head)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a folder's safetensors files, read from their heads; files that cannot be read
    so are left out."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            with file.open("rb") as content:
                size = int.from_bytes(content.read(8), "little")
                head = json.loads(content.read(size)) if size <= LARGEST_HEAD else {}
            found |= {name: tuple(map(int, about["shape"])) for name, about in head.items() if name != "__metadata__"}
    return found


def block_matrices(shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the linear layers in blocks: a block has a number, which embeddings and the head have
    not."""
    return tuple((shape[0], shape[1]) for name, shape in shapes.items() if is_block_matrix(name, shape))


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer in a block."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and any(part.isdigit() for part in layer.split("."))


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found
