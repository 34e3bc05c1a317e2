"""Properties of a model that are determined from its files without torch: context length, whether
this library can train it, and memory use.

Trainable models are causal decoders whose only state is the keys and values of each token. They may
have full or sliding-window attention, grouped queries, and a mixture of experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""Maximum size in bytes of the header of a safetensors file."""
VALUE_HEAD_FILE = "value_head.safetensors"
"""File next to the decoder's weights in an exported critic or reward model."""
MEMORY_PARTS = (
    "weights",
    "masters",
    "gradients",
    "moments",
    "activations",
    "logits",
    "unsharded",
    "copy",
    "keys, values",
)
"""What the memory of a device holds."""
_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes per element, by dtype."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that determine its memory use."""

    parameters: int
    """Total number of parameters."""
    matrices: tuple[tuple[int, int], ...]
    """Shapes of the linear layers in the blocks, to which LoRA adapters can be added."""
    layers: int
    """Number of blocks."""
    hidden: int
    """Width of the hidden state."""
    inner: int
    """Width of the feed-forward network in a block."""
    key_values: int
    """Number of elements that the KV cache stores for each token, in all layers together."""
    queries: int
    """Width of all queries of a block."""
    keys: int
    """Width of all keys of a block."""
    key_value_heads: int
    """Number of heads of keys and values in the block with the most."""
    norms_queries: bool
    """Whether queries and keys are normalised."""
    vocabulary: int
    """Number of tokens that the head predicts."""
    tied: bool
    """Whether the head's weight is that of the embedding."""

    @property
    def head(self) -> int:
        """Number of parameters of the head."""
        return self.vocabulary * self.hidden

    @property
    def root(self) -> int:
        """Number of parameters outside of the blocks: embedding, head and last norm."""
        return self.head * (1 if self.tied else 2) + self.hidden

    def outside(self, *, predicts_tokens: bool) -> int:
        """Return the number of parameters outside of the blocks of a model that predicts tokens, or
        of one that has a value head in place of that."""
        return self.root if predicts_tokens or self.tied else self.root - self.head

    @property
    def block(self) -> int:
        """Number of parameters of a block."""
        return max(0, self.parameters - self.root) // max(1, self.layers)

    def adapters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters with this rank for all linear layers."""
        return sum(rank * (rows + columns) for rows, columns in self.matrices)


@dataclass(frozen=True)
class TrainerMemory:
    """Memory in bytes that a trainer needs on its device between steps."""

    weights: int
    """Weights, without their fp32 copies."""
    masters: int
    """Copies of the trained weights in fp32, if they have a lower precision."""
    gradients: int
    """Accumulated gradients in fp32."""
    moments: int
    """AdamW moments; 0 if they are offloaded."""

    @property
    def loaded(self) -> int:
        """Bytes that are allocated when the trainer is loaded."""
        return self.weights + self.masters

    @property
    def first_update(self) -> int:
        """Bytes that are first allocated at the first update."""
        return self.gradients + self.moments


def trainer_memory(
    size: ModelSize, dtype: str, *, lora_rank: int = 0, offload: bool = False, parts: int = 1
) -> TrainerMemory:
    """Return the memory of one worker that trains the model in ``dtype``, sharded over ``parts``
    workers.

    Gradients accumulate in fp32. AdamW keeps two fp32 moments per trained parameter, which are on
    the device unless ``offload``. Adapters are fp32.
    """
    trained = size.adapters(lora_rank) if lora_rank else size.parameters
    masters = 4 * trained if dtype != "float32" and not lora_rank else 0
    weights = _BYTES[dtype] * size.parameters + (4 * trained if lora_rank else 0)
    return TrainerMemory(
        weights // parts,
        masters // parts,
        4 * trained // parts,
        0 if offload else 8 * trained // parts,
    )


def weight_bytes(size: ModelSize, dtype: str) -> int:
    """Return the bytes of the weights alone, as needed for generation or a frozen model."""
    return _BYTES[dtype] * size.parameters


def gathered_bytes(size: ModelSize, dtype: str) -> int:
    """Return the bytes of the whole weights of a sharded model, gathered tensor by tensor."""
    return weight_bytes(size, dtype)


CHUNK_BYTES = 3 << 24
"""Maximum bytes of fp32 logits that exist at once: 256 rows for a vocabulary of 49,152 tokens.
Smaller chunks read the head's weight too often."""
GPU_CHUNK_BYTES = 1 << 29
"""The same on a GPU: 883 rows for a vocabulary of 151,936 tokens. The forward pass needs twice as
much, the backward pass of bf16 factors one and a half times, of fp32 factors one chunk and the
head's gradient. With fewer rows, most time is spent reading the head's weight."""
_GPU_PARTS = 64
"""Reciprocal of the maximum fraction of a GPU's memory that a chunk may use."""


def chunk_bytes(gpu_bytes: int = 0) -> int:
    """Return the maximum bytes of fp32 logits that exist at once. ``gpu_bytes`` is the memory of
    the GPU that computes them, 0 on a CPU."""
    return max(CHUNK_BYTES, min(GPU_CHUNK_BYTES, gpu_bytes // _GPU_PARTS))


@dataclass(frozen=True)
class PassMemory:
    """Memory in bytes of a forward and backward pass, when it is highest."""

    activations: int
    """What the backward pass needs, and what it computes with."""
    logits: int
    """Logits, and the gradient of the head that is computed from them."""
    unsharded: int = 0
    """Weights and gradients that a worker has whole, of a model that is sharded over several."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.logits + self.unsharded


def scoring_memory(
    size: ModelSize,
    dtype: str,
    tokens: int,
    gpu_bytes: int = 0,
    parts: int = 1,
    *,
    predicts_tokens: bool = True,
) -> PassMemory:
    """Return the memory of a forward pass without gradients over ``tokens`` tokens, of a model that
    is sharded over ``parts`` workers."""
    chunk = min(chunk_bytes(gpu_bytes), 4 * tokens * size.vocabulary)
    kept = _BYTES[dtype] * tokens * 2 * size.hidden
    logits = 2 * chunk + _wide_head(size, dtype, gpu_bytes) if predicts_tokens else 0
    if parts == 1:
        return PassMemory(kept, logits)
    root = _BYTES[dtype] * size.outside(predicts_tokens=predicts_tokens)
    block = _BYTES[dtype] * size.block
    # At first, what was gathered is there as well until it is copied into the weights.
    phases = [PassMemory(kept, 0, 2 * (root + block)), PassMemory(kept, logits, root + block)]
    return max(phases, key=lambda phase: phase.total)


def _wide_head(size: ModelSize, dtype: str, gpu_bytes: int) -> int:
    """Return the bytes of the head in fp32, with which a CPU computes the logits."""
    return 0 if gpu_bytes or dtype == "float32" else 4 * size.head


def training_memory(
    size: ModelSize,
    dtype: str,
    tokens: int,
    *,
    checkpointing: bool,
    lora_rank: int = 0,
    gpu_bytes: int = 0,
    predicts_tokens: bool = True,
    parts: int = 1,
) -> PassMemory:
    """Return the memory of a forward and backward pass over ``tokens`` tokens, of a model that is
    sharded over ``parts`` workers.

    It is highest while the log-probabilities are computed, or in the backward pass of the last
    block, or, with ``checkpointing``, of any block, or, if the model is sharded, when the gradients
    outside of the blocks are summed. What a block of Qwen3 or Llama keeps was
    counted, in vectors of each width; other decoders are taken to be like them. In bf16, rows are
    packed without padding, and keys and values of prompts that rows share are copied.
    """
    kept, last, block = _count_vectors(size, dtype, lora_rank)
    layers = size.layers * (size.hidden if checkpointing else kept)
    scale = _BYTES[dtype] * tokens
    in_block = scale * (layers + (block if checkpointing else last))
    in_head = scale * (layers + (2 if lora_rank else 3) * size.hidden)
    logits = 0
    waiting = 0
    if predicts_tokens:
        chunk = min(chunk_bytes(gpu_bytes), 4 * tokens * size.vocabulary)
        head = 0 if lora_rank else _BYTES[dtype] * size.head
        backward = chunk + head + (chunk // 2 if dtype != "float32" else 0)
        wide = _wide_head(size, dtype, gpu_bytes)
        if wide and not lora_rank:
            backward += wide  # its gradient, which is rounded at the end
        logits = wide + (backward if lora_rank else max(2 * chunk, backward))
        # Until the gradient of the embedding is there as well, with which it is added or summed.
        waiting = head if size.tied or parts > 1 else 0
    phases = [PassMemory(in_head, logits), PassMemory(in_block, waiting)]
    if parts > 1:
        shards = _shard_phases(size, dtype, parts, predicts_tokens=predicts_tokens)
        phases = [
            replace(phase, unsharded=unsharded)
            for phase, unsharded in zip(
                [*phases, PassMemory(2 * scale * size.hidden, 0)], shards, strict=True
            )
        ]
    return max(phases, key=lambda phase: phase.total)


def _shard_phases(
    size: ModelSize, dtype: str, parts: int, *, predicts_tokens: bool
) -> tuple[int, int, int]:
    """Return the bytes that a worker has whole of a model that is sharded over ``parts`` workers
    (torch's FSDP2): while log-probabilities are computed, in the backward pass of a block, and when
    the gradients outside of the blocks are summed. Those are summed over workers in fp32."""
    each = _BYTES[dtype]
    head = each * size.head
    outside = size.outside(predicts_tokens=predicts_tokens)
    root = each * outside
    block = each * size.block
    summed_block = 4 * size.block
    in_head = root + block
    # The block's weights, those of the next one, which is gathered already, gradients, and both
    # ends of the sum.
    in_block = root + 3 * block + summed_block + summed_block // parts
    summed = 4 * outside + 4 * outside // parts + (head if predicts_tokens else 0)
    # Both gradients of a tied weight and their sum are there at once, and the weight.
    added = root + 3 * head if size.tied and predicts_tokens else 2 * root
    return in_head, in_block, max(summed, added) + summed_block


def _count_vectors(size: ModelSize, dtype: str, lora_rank: int) -> tuple[int, int, int]:
    """Return, in elements for each token: what a block keeps for its backward pass, what the
    backward pass of the last block needs besides what all blocks keep, and what that of a
    recomputed block needs."""
    hidden = size.hidden
    inner = size.inner
    queries = size.queries
    keys = size.keys
    norms = size.norms_queries
    if lora_rank:
        ranks = 2 * lora_rank * len(size.matrices) // max(1, size.layers)
        kept = 14 * hidden + 5 * inner + (6 if norms else 4) * queries + ranks
        kept += (5 if norms else 3) * keys
        return kept, 9 * hidden + inner, 20 * hidden + kept - 14 * hidden + 2 * inner
    if dtype == "float32":
        kept = 6 * hidden + 4 * inner + (6 if norms else 4) * queries + (2 if norms else 0) * keys
        return kept, 2 * hidden + 2 * inner, kept + 2 * hidden + 4 * inner
    kept = 8 * hidden + 4 * inner + (5 if norms else 2) * queries + (6 if norms else 3) * keys
    return kept, 2 * hidden + 4 * inner, kept - hidden + 4 * inner


def find_model_folder(path: str) -> Path | None:
    """Return the folder with the ``config.json`` of a model, given by its folder or by a hub id
    that is in the local hub cache; None if there is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        with suppress(ImportError, ValueError, OSError):
            from huggingface_hub import try_to_load_from_cache

            cached_file = try_to_load_from_cache(path, "config.json")
            folder = Path(cached_file).parent if isinstance(cached_file, str) else folder
    return folder if (folder / "config.json").is_file() else None


def model_size(path: str) -> ModelSize | None:
    """Return the size of a model, given by its folder or by a hub id that is in the local hub
    cache; None if it cannot be determined."""
    folder = find_model_folder(path)
    if folder is None:
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        size = estimate_size(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        shapes = tensor_shapes(folder)
        if not shapes:
            return size
        parameters = sum(math.prod(shape) for shape in shapes.values())
        matrices = block_matrices(shapes)
        norms = any(".q_norm." in name for name in shapes)
        return replace(size, parameters=parameters, matrices=matrices, norms_queries=norms)
    return None


_COUNTED = ("llama", "qwen3")
"""The ``model_type`` of the models whose ``training_memory`` was counted."""


def is_counted(path: str) -> bool:
    """Return whether the memory of a model's passes was counted, rather than taken to be like that
    of another decoder. ``path`` as in ``model_size``."""
    folder = find_model_folder(path)
    if folder is not None:
        with suppress(OSError, ValueError, AttributeError):
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return _text_config(config).get("model_type") in _COUNTED
    return False


def head_size(path: str) -> int | None:
    """Return the size of a model's attention heads, given as in ``model_size``; None if it is not
    known."""
    folder = find_model_folder(path)
    if folder is None:
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _head_width(next(iter(layer_options(config.get("text_config") or config)), {}))
    return None


def estimate_size(config: Mapping[str, Any]) -> ModelSize:
    """Estimate the size of a dense or mixture-of-experts decoder with gated feed-forward networks
    from its ``config.json``, within a few percent.

    Raises KeyError or TypeError for an incomplete configuration.
    """
    text = config.get("text_config") or config
    hidden = int(text.get("hidden_size") or text["n_embd"])
    layers = layer_options(text)
    blocks = [_block_shapes(layer, hidden) for layer in layers]
    matrices = tuple(matrix for block, _, _ in blocks for matrix in block)
    embeddings = (
        int(text["vocab_size"]) * hidden * (1 if text.get("tie_word_embeddings", True) else 2)
    )
    embeddings += int(text.get("n_positions") or 0) * hidden
    parameters = sum(map(math.prod, matrices)) + 2 * hidden * len(layers) + embeddings + hidden
    kind = str(text.get("model_type") or "")
    return ModelSize(
        parameters,
        matrices,
        len(layers),
        hidden,
        inner=max(inner for _, inner, _ in blocks),
        key_values=sum(per_token for _, _, per_token in blocks),
        queries=max(block[0][0] for block, _, _ in blocks),
        keys=max(block[1][0] for block, _, _ in blocks),
        key_value_heads=max(_count_key_value_heads(layer) for layer in layers),
        norms_queries=kind.startswith(_NORM_QUERIES),
        vocabulary=int(text["vocab_size"]),
        tied=bool(text.get("tie_word_embeddings", True)),
    )


_NORM_QUERIES = ("qwen3", "gemma3", "olmo2")
"""Prefixes of the ``model_type`` of models that normalise queries and keys."""


def _count_key_value_heads(layer: Mapping[str, Any]) -> int:
    return int(
        layer.get("num_key_value_heads") or layer.get("num_attention_heads") or layer["n_head"]
    )


def _block_shapes(layer: Mapping[str, Any], hidden: int) -> tuple[list[tuple[int, int]], int, int]:
    """Return (shapes of a layer's matrices, width of its feed-forward network, number of elements
    per token in its KV cache)."""
    heads = int(layer.get("num_attention_heads") or layer["n_head"])
    kv_heads = _count_key_value_heads(layer)
    head = int(layer.get("head_dim") or hidden // heads)
    experts = int(layer.get("num_local_experts") or layer.get("num_experts") or 1)
    inner = int(layer.get("intermediate_size") or layer.get("n_inner") or 4 * hidden)
    each = int(layer.get("moe_intermediate_size") or inner) if experts > 1 else inner
    up = [(each, hidden)] * (1 if "n_embd" in layer else 2) * experts
    block = [(heads * head, hidden), *[(kv_heads * head, hidden)] * 2, (hidden, heads * head), *up]
    return [*block, *[(hidden, each)] * experts], inner, 2 * kv_heads * head


_FULL = "full_attention"
"""Layer type that attends to all tokens."""
_SLIDING = "sliding_attention"
"""Layer type with a sliding window."""
_FULL_LAYER_OPTIONS = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}
"""Options of full-attention layers: {usual name: name in the published files of Gemma 4}.
``num_global_key_value_heads`` applies unless ``attention_k_eq_v`` is false."""


def layer_options(text: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each layer of the decoder whose configuration is ``text``.

    Some models override options of individual layers in ``per_layer_config``. Raises KeyError or
    TypeError if the number of layers is missing.
    """
    number = int(text.get("num_hidden_layers") or text["n_layer"])
    kinds = text.get("layer_types")
    overrides = text.get("per_layer_config")
    by_layer = (
        {int(index): options for index, options in overrides.items()}
        if isinstance(overrides, Mapping)
        else {}
    )
    full = {
        option: text.get(name) for option, name in _FULL_LAYER_OPTIONS.items() if text.get(name)
    }
    if text.get("attention_k_eq_v") is False:
        full.pop("num_key_value_heads", None)
    layers = []
    for index in range(number):
        is_full = isinstance(kinds, list) and index < len(kinds) and kinds[index] == _FULL
        layers.append({**text, **(full if is_full else {}), **(by_layer.get(index) or {})})
    return layers


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a folder's safetensors files, read from the file headers;
    unreadable files are skipped."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            with file.open("rb") as content:
                size = int.from_bytes(content.read(8), "little")
                head = json.loads(content.read(size)) if size <= MAX_HEADER_BYTES else {}
            shapes |= {
                name: tuple(map(int, about["shape"]))
                for name, about in head.items()
                if name != "__metadata__"
            }
    return shapes


def block_matrices(shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Return the shapes of all linear layers in blocks."""
    return tuple(
        (shape[0], shape[1]) for name, shape in shapes.items() if is_block_matrix(name, shape)
    )


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor with this name and shape is the weight of a linear layer in a block.

    Names of blocks contain a number, unlike the names of embeddings and the head.
    """
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and any(part.isdigit() for part in layer.split("."))


UNLIMITED = 1 << 30
"""Context length that is returned for architectures without position embeddings, whose context only
memory limits."""
_EXTENDED = frozenset({"linear", "yarn"})
"""Kinds of rotary embedding whose ``factor`` multiplies ``max_position_embeddings``, unless the
configuration gives the length before scaling. ``llama3`` is not one of them: its length already
includes the extension."""
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope", "su"})
"""Kinds of rotary embedding that rotate all tokens differently once the sequence exceeds the length
before scaling. Beyond that length, keys in the generation cache would differ from those in the
trainer, which processes the whole sequence at once. So the context is limited to that length."""


def context_limit(config: Mapping[str, Any]) -> int:
    """Return the longest sequence that a model with this ``config.json`` accepts, in tokens.

    A sliding window does not limit the context: layers that see only the last tokens receive
    information about older tokens from earlier layers.

    Source of the rules: vLLM, ``_get_and_verify_max_len``.
    """
    text = _text_config(config)
    positions = (
        text.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len")
    )
    limit = next(
        (int(value) for value in positions if isinstance(value, int | float) and value >= 1),
        UNLIMITED,
    )
    kind, rope = _find_rope(text)
    original_limit = rope.get("original_max_position_embeddings") or text.get(
        "original_max_position_embeddings"
    )
    original_limit = original_limit if isinstance(original_limit, int | float) else None
    if kind in _LENGTH_DEPENDENT:
        return min(limit, int(original_limit)) if original_limit else limit
    factor = rope.get("factor")
    if kind not in _EXTENDED or not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * original_limit)) if original_limit else int(factor * limit)


def context_reason(config: Mapping[str, Any]) -> str:
    """Return why the context is shorter than the model's configuration says, as a suffix for the
    number in a message; "" if it is not shorter."""
    kind, _ = _find_rope(_text_config(config))
    return (
        f" (its rotary embedding, {kind}, changes for longer texts)"
        if kind in _LENGTH_DEPENDENT
        else ""
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a model's text decoder. The model may have other parts, such as a
    vision encoder."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _find_rope(text: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return (kind, options) of the rotary embedding. If layers have different ones, prefer one
    that depends on the length."""
    options = text.get("rope_parameters") or text.get("rope_scaling") or {}
    options = options if isinstance(options, Mapping) else {}
    ropes = [rope for rope in (options, *options.values()) if isinstance(rope, Mapping)]
    kinds = [(str(rope.get("rope_type") or rope.get("type") or "default"), rope) for rope in ropes]
    return next((rope for rope in kinds if rope[0] in _LENGTH_DEPENDENT), kinds[0])


_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "sliding"})
"""Layer types whose only state is the keys and values of each token."""
_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Options that list the types of the layers."""
_STATE_SPACE = ("mamba", "rwkv", "xlstm", "recurrent_gemma", "zamba", "lfm2")
"""Prefixes of the ``model_type`` of models with a recurrent state."""
_STATE_OPTIONS = (
    "mamba",
    "ssm_",
    "state_size",
    "conv_L_cache",
    "rwkv",
    "linear_conv_kernel",
    "linear_num",
)
"""Prefixes of options that only models with a recurrent state have. They are needed because older
files do not list layer types."""
_WINDOW_OPTIONS = ("attention_types", "attention_layers", "keep_window_size")
"""Options of models that limit which tokens are visible by their column in the cache, regardless of
the given mask."""
_ALIBI = frozenset({"bloom", "mpt"})
"""Values of ``model_type`` of models with ALiBi position encoding."""
_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
"""Class name suffixes of architectures that may be decoders. Critics are saved as a bare
``Model``."""


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Options that give the number of experts."""
_MIXTURE_SWITCHES = ("is_moe", "enable_moe_block")
"""Options that some models have in addition to the number of experts. If one is false, the model
has no experts."""


def routed_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts from which the model's router chooses; 0 for a dense model."""
    text = _text_config(config)
    ffn_config = text.get("ffn_config")
    if any(text.get(option) is False for option in _MIXTURE_SWITCHES):
        return 0
    sections = (text, ffn_config if isinstance(ffn_config, Mapping) else {})
    counts = [section.get(option) for section in sections for option in _EXPERTS]
    n_experts = max((max(_list_integers(count), default=0) for count in counts), default=0)
    return n_experts if n_experts > 1 else 0


def _list_integers(count: Any) -> list[int]:
    """Return the integers in an option that is a number or a list with one number per layer."""
    return [n for n in (count if isinstance(count, list) else [count]) if isinstance(n, int)]


def expert_problem(config: Mapping[str, Any], role: str, *, accepted: bool) -> str | None:
    """Return why the model's mixture of experts would not be trained, or why the option ``experts``
    has no effect; None if there is no problem.

    role: name of the model's section in the options. accepted: whether its option ``experts`` is
    set. The result is the end of a sentence that begins with the model's name.
    """
    experts = routed_experts(config)
    if accepted and not experts:
        return f"it has no experts, so {role}.experts=true does nothing; remove it"
    if experts and not accepted:
        return (
            f"its tokens are routed to {experts} experts, and neither is the auxiliary loss of the "
            f"router computed "
            "here nor the routing of the generator replayed in training; take a dense model, or "
            "set "
            f"{role}.experts=true to train it without them"
        )
    return None


def decoder_problem(config: Mapping[str, Any]) -> str | None:
    """Return why this library cannot sample from and train the model; None if it can.

    The result is the end of a sentence that begins with the model's name.
    """
    inner = config.get("text_config")
    return next(_problems(config, inner if isinstance(inner, Mapping) else config), None)


def _problems(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield all reasons for ``decoder_problem``. ``text`` is the decoder's part of ``config``."""
    kind = str(text.get("model_type") or config.get("model_type") or "")
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if config.get("is_encoder_decoder"):
        yield f"{kind!r} is an encoder with a decoder; take a causal language model"
    if names and not any(name.endswith(_DECODERS) for name in names):
        yield f"{names[0]} is not a causal language model"
    kinds = [layers for option in _KINDS if isinstance(layers := text.get(option), list)]
    odd = dict.fromkeys(
        str(layer) for layers in kinds for layer in layers if str(layer) not in _SUPPORTED_LAYERS
    )
    if odd:
        yield (
            f"it has layers of the type {', '.join(odd)}, whose state is not keys and values for "
            f"each token"
        )
    elif not kinds or kind.startswith(_STATE_SPACE):
        marks = [option for option in text if option.startswith(_STATE_OPTIONS)]
        if kind.startswith(_STATE_SPACE) or marks:
            description = f"{kind!r} with {marks[0]}" if marks else repr(kind)
            yield (
                f"it has state-space or linear layers ({description}), whose state is not keys and "
                f"values for each token"
            )
    if differing := _find_layer_difference(text):
        yield differing
    if windowed := next((name for name in _WINDOW_OPTIONS if _has_window(text.get(name))), None):
        yield (
            f"{windowed} gives its layers a window of their own, which generation from cached rows "
            f"does not have"
        )
    if kind in _ALIBI or text.get("alibi") is True:
        yield f"{kind!r} tells positions by ALiBi, which generation from cached rows does not have"
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        yield (
            f"its weights are quantized ({method or 'by an unknown method'}); save them in float32 "
            f"or bfloat16 first"
        )
    if (width := _find_odd_head_width(text)) is not None:
        yield f"its attention heads are {width} wide, and rotary positions need an even number"


_TESTED = "gemma4"
"""Prefix of the ``model_type`` of models that are known to apply options of individual layers. In
transformers 5.23 most other models raise an error for such a configuration."""
_SAME_FOR_ALL = ("attention_chunk_size", "skip")
"""Options in ``per_layer_config`` that must be the same in all layers, because this library's KV
cache and masks do not support different values."""


def _find_layer_difference(text: Mapping[str, Any]) -> str:
    """Describe an unsupported difference between layers, as the end of a sentence; "" if there is
    none."""
    overrides = text.get("per_layer_config")
    if not isinstance(overrides, Mapping) or not overrides:
        return ""
    if not (kind := str(text.get("model_type") or "")).startswith(_TESTED):
        return (
            f"layers of {kind!r} with options of their own (per_layer_config) were not tried here, "
            f"but for Gemma 4"
        )
    try:
        layers = layer_options(text)
    except (KeyError, TypeError, ValueError, AttributeError):
        return "its per_layer_config does not say for which layers it is"
    kinds = text.get("layer_types")
    is_sliding = [
        not isinstance(kinds, list) or kind == _SLIDING for kind in (kinds or [None] * len(layers))
    ]
    windows = [
        layer.get("sliding_window")
        for layer, slide in zip(layers, is_sliding, strict=False)
        if slide
    ]
    if len(sizes := sorted({window for window in windows if isinstance(window, int)})) > 1:
        return f"its layers have sliding windows of different sizes ({', '.join(map(str, sizes))})"
    for option in _SAME_FOR_ALL:
        if len({str(layer.get(option)) for layer in layers}) > 1:
            return f"its layers differ in {option} (per_layer_config), which is not followed here"
    return ""


def _has_window(option: Any) -> bool:
    """Return whether an option's value is a window size, or contains ``local`` at any depth of its
    lists."""
    if isinstance(option, list):
        return any(_has_window(item) for item in option if not isinstance(item, int))
    return option == "local" or (isinstance(option, int) and option > 0)


def _find_odd_head_width(text: Mapping[str, Any]) -> int | None:
    """Return the odd width of an attention head that uses rotary positions; None if no such width
    is odd."""
    try:
        layers = layer_options(text)
    except (KeyError, TypeError, ValueError, AttributeError):
        layers = [dict(text)]
    widths = [_head_width(layer) for layer in layers]
    rotary = text.get("rope_theta") or text.get("rope_parameters")
    return next((width for width in widths if width is not None and width % 2 and rotary), None)


def _head_width(layer: Mapping[str, Any]) -> int | None:
    """Return the width of a layer's attention heads; None if it is not given."""
    width = layer.get("head_dim")
    heads = layer.get("num_attention_heads")
    hidden = layer.get("hidden_size")
    if (
        not isinstance(width, int)
        and isinstance(heads, int)
        and isinstance(hidden, int)
        and heads > 0
    ):
        width = hidden // heads
    return width if isinstance(width, int) else None
