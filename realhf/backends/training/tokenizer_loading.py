"""Loading and checking of tokenizers and model configurations, without loading model code, for
processes that only handle tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.base.hf_config import context_limit, context_reason, routed_experts
from realhf.base.text import first_line


class ModelLoadError(ValueError):
    """Failure to load a model. The message is one line with role, path and cause."""


def load_tokenizer(path: str, role: str) -> Any:
    """Return the tokenizer of a folder or hub id. Raises ModelLoadError."""
    from transformers import AutoTokenizer

    check_folder(path, role)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"{role}.path={path}: no tokenizer there ({first_line(error)})"
        ) from None


def check_same_tokens(tokenizer: Any, role: str, path: str, other_path: str) -> None:
    """Raise ModelLoadError unless every token that a tokenizer shares with the tokenizer in
    ``other_path`` has the same id in both. Tokens that only one of them has are accepted.

    ``role`` is the role that uses ``tokenizer``, ``path`` is the path of its model.
    """
    own_vocab = tokenizer.get_vocab()
    other_vocab = load_tokenizer(other_path, "actor").get_vocab()
    word_of_id = {number: word for word, number in other_vocab.items()}
    for word, number in own_vocab.items():
        if other_vocab.get(word, number) != number or word_of_id.get(number, word) != word:
            raise ModelLoadError(
                f"{role}.path={path}: its tokenizer gives {word[:40]!r} the id {number}, which in "
                f"{other_path} is "
                f"{word_of_id.get(number, '')[:40]!r}; the {role} reads the tokens of that "
                "model, so it "
                f"must have its "
                "tokenizer"
            )


def check_context(path: str, role: str, max_total_tokens: int) -> None:
    """Raise ModelLoadError if the context length of the model in ``path`` is below
    ``max_total_tokens``, the maximum length of an episode."""
    config = _load_config(path, role)
    if max_total_tokens > (limit := context_limit(config)):
        reason = context_reason(config)
        raise ModelLoadError(
            f"rollout.max_total_tokens={max_total_tokens}: the context of {path} holds {limit} "
            f"tokens{reason}"
        )


def check_dense(path: str, role: str) -> None:
    """Raise ModelLoadError for a mixture of experts. A vLLM server cannot take weight updates for
    it, because vLLM stores one tensor per expert and the trainer one tensor for all experts."""
    if experts := routed_experts(_load_config(path, role)):
        raise ModelLoadError(
            f"{role}.path={path}: vLLM cannot be updated with the weights of its {experts} "
            "experts; use "
            f"engine.name=embedded"
        )


def _load_config(path: str, role: str) -> Mapping[str, Any]:
    """Return the configuration of the model in a folder or of a hub id. Raises ModelLoadError."""
    from transformers import AutoConfig

    check_folder(path, role)
    try:
        return AutoConfig.from_pretrained(path).to_dict()
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"{role}.path={path}: no readable model there ({first_line(error)})"
        ) from None


def check_folder(path: str, role: str) -> None:
    """Raise ModelLoadError if ``path`` looks like a folder but does not exist. Otherwise the hub
    client would complain about an invalid repository name."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise ModelLoadError(f"{role}.path={path}: no such folder")
