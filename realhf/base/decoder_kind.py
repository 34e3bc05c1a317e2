"""Says from a model's ``config.json`` why it cannot be trained here, if so. Does not need torch.

What can be trained is a causal decoder whose only state is keys and values for each token: full or sliding-window
attention, grouped or not, with or without a mixture in the feed-forward networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KEPT = frozenset({"full_attention", "sliding_attention", "attention", "sliding"})
_KINDS = ("layer_types", "layers_block_type", "block_types")
_STATE_SPACE = ("mamba", "rwkv", "xlstm", "recurrent_gemma", "zamba", "lfm2")
_STATE_OPTIONS = ("mamba", "ssm_", "state_size", "conv_L_cache", "rwkv", "linear_conv_kernel", "linear_num")
"""Beginnings of options that only models with a running state have; older files say nothing of layer types."""
_OWN_WINDOWS = ("attention_types", "attention_layers", "keep_window_size")
"""Options of models that cut what a token sees down by themselves, by columns, whatever mask they are given."""
_ALIBI = frozenset({"bloom", "mpt"})
_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
"""Ends of the names of classes that may be decoders; a bare ``Model`` is what a critic leaves."""


def decoder_problem(config: Mapping[str, Any]) -> str | None:
    """Return why the model that ``config`` describes cannot be sampled from and trained here, as the end of a sentence
    that begins with its name; None if nothing speaks against it."""
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
    odd = dict.fromkeys(str(layer) for layers in kinds for layer in layers if str(layer) not in _KEPT)
    if odd:
        yield f"it has layers of the type {', '.join(odd)}, whose state is not keys and values for each token"
    elif not kinds or kind.startswith(_STATE_SPACE):
        marks = [option for option in text if option.startswith(_STATE_OPTIONS)]
        if kind.startswith(_STATE_SPACE) or marks:
            told = f"{kind!r} with {marks[0]}" if marks else repr(kind)
            yield f"it has state-space or linear layers ({told}), whose state is not keys and values for each token"
    if windowed := next((name for name in _OWN_WINDOWS if _local(text.get(name))), None):
        yield f"{windowed} gives its layers a window of their own, which generation from cached rows does not have"
    if kind in _ALIBI or text.get("alibi") is True:
        yield f"{kind!r} tells positions by ALiBi, which generation from cached rows does not have"
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        yield f"its weights are quantized ({method or 'by an unknown method'}); save them in float32 or bfloat16 first"
    if (width := _odd_head(text)) is not None:
        yield f"its attention heads are {width} wide, and rotary positions need an even number"


def _local(option: Any) -> bool:
    """Return whether an option is a window, or names a local layer anywhere in its lists."""
    if isinstance(option, list):
        return any(_local(item) for item in option if not isinstance(item, int))
    return option == "local" or (isinstance(option, int) and option > 0)


def _odd_head(text: Mapping[str, Any]) -> int | None:
    width, heads, hidden = text.get("head_dim"), text.get("num_attention_heads"), text.get("hidden_size")
    if not isinstance(width, int) and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        width = hidden // heads
    rotary = text.get("rope_theta") or text.get("rope_parameters")
    return width if isinstance(width, int) and width % 2 and rotary else None
