"""Reads from the files of a model, without torch, how long its context is, whether it can be
trained here, and how much memory it takes.

What can be trained is a causal decoder whose only state is keys and values for each token: full or
sliding-window attention, grouped or not, with or without a mixture in the feed-forward networks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST_HEAD = 100_000_000
"""Largest number of bytes that the format safetensors allows for the head of a file."""
HEAD_FILE = "value_head.safetensors"
"""Stands beside the weights of the decoder in a folder that a critic or a reward model was exported
to."""
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelSize:
    """``parameters`` in all; ``matrices`` are the shapes of the linear layers in blocks, which
    adapters stand beside; ``layers``, ``hidden``, ``inner`` (width of a feed-forward network) and
    ``key_values`` (numbers that one token keeps in all layers) describe what a token takes."""

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
    """Bytes of what a trainer holds on its device between steps; ``weights`` with the fp32 copies
    of narrower ones."""

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
    """Return what a worker holds that trains the model in ``dtype``, cut into ``parts``. Gradients
    add up in fp32, and AdamW has two fp32 moments for each trained parameter, on the device unless
    ``offload``."""
    trained = size.adapters(lora_rank) if lora_rank else size.parameters
    masters = 4 * trained if dtype != "float32" else 0
    weights = _BYTES[dtype] * (size.parameters + (trained if lora_rank else 0)) + masters
    return TrainerMemory(
        weights // parts, 4 * trained // parts, 0 if offload else 8 * trained // parts
    )


def weight_bytes(size: ModelSize, dtype: str) -> int:
    """Return the bytes of the weights alone, as generation and a frozen model hold them."""
    return _BYTES[dtype] * size.parameters


def activation_bytes(size: ModelSize, dtype: str, tokens: int, *, checkpointing: bool) -> int:
    """Estimate what a pass over ``tokens`` tokens keeps for its backward pass. In Llama and Qwen3 a
    block keeps 10 to 12 vectors of the hidden width and four of the feed-forward network; 16 leave
    room for the ones that stay fp32. With ``checkpointing`` it is one vector for each block, beside
    all of a single block. Attention is taken to be fused, and logits to be made in chunks, as they
    are here."""
    block = 16 * size.hidden + 4 * size.inner
    kept = size.layers * size.hidden + block if checkpointing else size.layers * block
    return _BYTES[dtype] * tokens * kept


def model_size(path: str) -> ModelSize | None:
    """Return the size of the model in a folder, or of a hub id that lies in the cache of the hub's
    client; None where that cannot be said."""
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
        counted = sum(math.prod(shape) for shape in shapes.values())
        return ModelSize(
            counted,
            block_matrices(shapes),
            described.layers,
            described.hidden,
            described.inner,
            described.key_values,
        )
    return None


def size_of(config: Mapping[str, Any]) -> ModelSize:
    """Return the size of a dense decoder or a mixture with gated feed-forward networks, as its
    ``config.json`` has it: right within some percent. Raises KeyError or TypeError for a
    configuration that says too little."""
    text = config.get("text_config") or config
    hidden = int(text.get("hidden_size") or text["n_embd"])
    layers = layer_options(text)
    blocks = [_block(layer, hidden) for layer in layers]
    matrices = tuple(matrix for block, _, _ in blocks for matrix in block)
    embeddings = (
        int(text["vocab_size"]) * hidden * (1 if text.get("tie_word_embeddings", True) else 2)
    )
    embeddings += int(text.get("n_positions") or 0) * hidden
    parameters = sum(map(math.prod, matrices)) + 2 * hidden * len(layers) + embeddings + hidden
    inner = max(inner for _, inner, _ in blocks)
    key_values = sum(kept for _, _, kept in blocks)
    return ModelSize(parameters, matrices, len(layers), hidden, inner, key_values)


def _block(layer: Mapping[str, Any], hidden: int) -> tuple[list[tuple[int, int]], int, int]:
    """Return the shapes of a layer's matrices, the width of its feed-forward network, and how many
    numbers it keeps for a token."""
    heads = int(layer.get("num_attention_heads") or layer["n_head"])
    kv_heads = int(layer.get("num_key_value_heads") or heads)
    head = int(layer.get("head_dim") or hidden // heads)
    experts = int(layer.get("num_local_experts") or layer.get("num_experts") or 1)
    inner = int(layer.get("intermediate_size") or layer.get("n_inner") or 4 * hidden)
    each = int(layer.get("moe_intermediate_size") or inner) if experts > 1 else inner
    up = [(each, hidden)] * (1 if "n_embd" in layer else 2) * experts
    block = [(heads * head, hidden), *[(kv_heads * head, hidden)] * 2, (hidden, heads * head), *up]
    return [*block, *[(hidden, each)] * experts], inner, 2 * kv_heads * head


_FULL = "full_attention"
_SLIDING = "sliding_attention"
_OF_FULL_LAYERS = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}
"""Options of layers that see all tokens, and the names that they have in the published files of
Gemma 4, where ``attention_k_eq_v`` decides on the second."""


def layer_options(text: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each layer of the decoder that ``text`` describes: in some models
    layers have values of their own, in ``per_layer_config``. Raises KeyError or TypeError where the
    number of layers is not there."""
    number = int(text.get("num_hidden_layers") or text["n_layer"])
    kinds = text.get("layer_types")
    given = text.get("per_layer_config")
    own = (
        {int(index): options for index, options in given.items()}
        if isinstance(given, Mapping)
        else {}
    )
    full = {option: text.get(name) for option, name in _OF_FULL_LAYERS.items() if text.get(name)}
    if text.get("attention_k_eq_v") is False:
        full.pop("num_key_value_heads", None)
    layers = []
    for index in range(number):
        sees_all = isinstance(kinds, list) and index < len(kinds) and kinds[index] == _FULL
        layers.append({**text, **(full if sees_all else {}), **(own.get(index) or {})})
    return layers


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a folder's safetensors files, read from their heads; files
    that cannot be read so are left out."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            with file.open("rb") as content:
                size = int.from_bytes(content.read(8), "little")
                head = json.loads(content.read(size)) if size <= LARGEST_HEAD else {}
            found |= {
                name: tuple(map(int, about["shape"]))
                for name, about in head.items()
                if name != "__metadata__"
            }
    return found


def block_matrices(shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the linear layers in blocks: a block has a number, which embeddings and
    the head have not."""
    return tuple(
        (shape[0], shape[1]) for name, shape in shapes.items() if is_block_matrix(name, shape)
    )


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer in a block."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and any(part.isdigit() for part in layer.split("."))


UNLIMITED = 1 << 30
"""The limit reported for architectures without positions, whose only bound is memory."""
_EXTENDED = frozenset({"linear", "yarn"})
"""Kinds of rotary embedding whose ``factor`` multiplies the length that ``max_position_embeddings``
gives, unless the configuration also gives the length before scaling. llama3 already includes the
extension."""
_BY_LENGTH = frozenset({"dynamic", "longrope", "su"})
"""Kinds of rotary embedding that turn all tokens of a text otherwise once it is longer than before
scaling. The keys that generation has kept are then not those of the trainer, which reads the whole
text at once. So the context ends there."""


def context_limit(config: Mapping[str, Any]) -> int:
    """Return the length of the longest sequence that a model with this ``config.json`` takes. A
    sliding window does not bound it: layers that see only the last tokens still receive what
    earlier layers made of older ones.

    Source of the rules: vLLM, ``_get_and_verify_max_len``.
    """
    text = _text(config)
    positions = (
        text.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len")
    )
    limit = next(
        (int(found) for found in positions if isinstance(found, int | float) and found >= 1),
        UNLIMITED,
    )
    kind, rope = _rope(text)
    before = rope.get("original_max_position_embeddings") or text.get(
        "original_max_position_embeddings"
    )
    before = before if isinstance(before, int | float) else None
    if kind in _BY_LENGTH:
        return min(limit, int(before)) if before else limit
    factor = rope.get("factor")
    if kind not in _EXTENDED or not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * before)) if before else int(factor * limit)


def context_reason(config: Mapping[str, Any]) -> str:
    """Return what ends the context before the length that the model's configuration gives, to be
    put behind the number; empty if nothing does."""
    kind, _ = _rope(_text(config))
    return (
        f" (its rotary embedding, {kind}, changes for longer texts)" if kind in _BY_LENGTH else ""
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _rope(text: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return kind and options of the rotary embedding; where layers differ, of the one that depends
    on the length."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    given = given if isinstance(given, Mapping) else {}
    ropes = [rope for rope in (given, *given.values()) if isinstance(rope, Mapping)]
    found = [(str(rope.get("rope_type") or rope.get("type") or "default"), rope) for rope in ropes]
    return next((rope for rope in found if rope[0] in _BY_LENGTH), found[0])


_KEPT = frozenset({"full_attention", "sliding_attention", "attention", "sliding"})
_KINDS = ("layer_types", "layers_block_type", "block_types")
_STATE_SPACE = ("mamba", "rwkv", "xlstm", "recurrent_gemma", "zamba", "lfm2")
_STATE_OPTIONS = (
    "mamba",
    "ssm_",
    "state_size",
    "conv_L_cache",
    "rwkv",
    "linear_conv_kernel",
    "linear_num",
)
"""Beginnings of options that only models with a running state have; older files say nothing of
layer types."""
_OWN_WINDOWS = ("attention_types", "attention_layers", "keep_window_size")
"""Options of models that cut what a token sees down by themselves, by columns, whatever mask they
are given."""
_ALIBI = frozenset({"bloom", "mpt"})
_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
"""Ends of the names of classes that may be decoders; a bare ``Model`` is what a critic leaves."""


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MIXES = ("is_moe", "enable_moe_block")
"""Options that some models have beside the number of experts; where one is false, there are
none."""


def routed_experts(config: Mapping[str, Any]) -> int:
    """Return how many experts a router of the model that ``config`` describes chooses from; 0 for a
    dense model."""
    text = _text(config)
    inner = text.get("ffn_config")
    if any(text.get(option) is False for option in _MIXES):
        return 0
    places = (text, inner if isinstance(inner, Mapping) else {})
    counts = [place.get(option) for place in places for option in _EXPERTS]
    most = max((max(_whole(count), default=0) for count in counts), default=0)
    return most if most > 1 else 0


def _whole(count: Any) -> list[int]:
    """A number, or one for each layer, as a list without what is no number."""
    return [n for n in (count if isinstance(count, list) else [count]) if isinstance(n, int)]


def expert_problem(config: Mapping[str, Any], role: str, *, accepted: bool) -> str | None:
    """Return why the mixture of experts that ``config`` describes is not trained, unless the role
    ``accepted`` that with its option ``experts``, or why that does nothing; None if nothing speaks
    against it. The answer is the end of a sentence that begins with the model's name."""
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
    """Return why the model that ``config`` describes cannot be sampled from and trained here, as
    the end of a sentence that begins with its name; None if nothing speaks against it."""
    inner = config.get("text_config")
    return next(_problems(config, inner if isinstance(inner, Mapping) else config), None)


def _problems(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    kind = str(text.get("model_type") or config.get("model_type") or "")
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if config.get("is_encoder_decoder"):
        yield f"{kind!r} is an encoder with a decoder; take a causal language model"
    if names and not any(name.endswith(_DECODERS) for name in names):
        yield f"{names[0]} is not a causal language model"
    kinds = [layers for option in _KINDS if isinstance(layers := text.get(option), list)]
    odd = dict.fromkeys(
        str(layer) for layers in kinds for layer in layers if str(layer) not in _KEPT
    )
    if odd:
        yield (
            f"it has layers of the type {', '.join(odd)}, whose state is not keys and values for "
            f"each token"
        )
    elif not kinds or kind.startswith(_STATE_SPACE):
        marks = [option for option in text if option.startswith(_STATE_OPTIONS)]
        if kind.startswith(_STATE_SPACE) or marks:
            told = f"{kind!r} with {marks[0]}" if marks else repr(kind)
            yield (
                f"it has state-space or linear layers ({told}), whose state is not keys and values "
                f"for each token"
            )
    if differing := _differing(text):
        yield differing
    if windowed := next((name for name in _OWN_WINDOWS if _local(text.get(name))), None):
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
    if (width := _odd_head(text)) is not None:
        yield f"its attention heads are {width} wide, and rotary positions need an even number"


_TRIED = "gemma4"
"""Beginning of the ``model_type`` of models whose layers are known to read their own options. In
transformers 5.23 most others raise an error when they are made with such a configuration."""
_SAME_FOR_ALL = ("attention_chunk_size", "skip")
"""Options of ``per_layer_config`` that cut layers down in ways that neither cached rows nor masks
follow."""


def _differing(text: Mapping[str, Any]) -> str:
    """Return what differs between layers that must not, as the end of a sentence, or ""."""
    given = text.get("per_layer_config")
    if not isinstance(given, Mapping) or not given:
        return ""
    if not (kind := str(text.get("model_type") or "")).startswith(_TRIED):
        return (
            f"layers of {kind!r} with options of their own (per_layer_config) were not tried here, "
            f"but for Gemma 4"
        )
    try:
        layers = layer_options(text)
    except (KeyError, TypeError, ValueError, AttributeError):
        return "its per_layer_config does not say for which layers it is"
    kinds = text.get("layer_types")
    slides = [
        not isinstance(kinds, list) or kind == _SLIDING for kind in (kinds or [None] * len(layers))
    ]
    windows = [
        layer.get("sliding_window") for layer, slide in zip(layers, slides, strict=False) if slide
    ]
    if len(sizes := sorted({window for window in windows if isinstance(window, int)})) > 1:
        return f"its layers have sliding windows of different sizes ({', '.join(map(str, sizes))})"
    for option in _SAME_FOR_ALL:
        if len({str(layer.get(option)) for layer in layers}) > 1:
            return f"its layers differ in {option} (per_layer_config), which is not followed here"
    return ""


def _local(option: Any) -> bool:
    """Return whether an option is a window, or names a local layer anywhere in its lists."""
    if isinstance(option, list):
        return any(_local(item) for item in option if not isinstance(item, int))
    return option == "local" or (isinstance(option, int) and option > 0)


def _odd_head(text: Mapping[str, Any]) -> int | None:
    try:
        layers = layer_options(text)
    except (KeyError, TypeError, ValueError, AttributeError):
        layers = [dict(text)]
    widths = [_head_width(layer) for layer in layers]
    rotary = text.get("rope_theta") or text.get("rope_parameters")
    return next((width for width in widths if width is not None and width % 2 and rotary), None)


def _head_width(layer: Mapping[str, Any]) -> int | None:
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
