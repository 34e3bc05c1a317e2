"""Builds a ``TorchEngine`` from a folder or a hub id, with one-line errors for what is not there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from realhf.api.experiment import ModelSpec
from realhf.backends.training.tokenizer_loading import ModelLoadError, check_folder, first_line, load_tokenizer
from realhf.backends.training.torch_engine import TorchEngine
from realhf.backends.training.value_head import load_value_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HEADS = ("lm", "value")


class TorchBackend:
    """Builds engines of a single process. ``device``: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or
    ``cuda:N``."""

    def __init__(self, device: str = "auto") -> None:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._device = torch.device(name)

    def build(self, spec: ModelSpec, *, seed: int, total_train_steps: int) -> TorchEngine:
        """Load weights and tokenizer of ``spec.path``. ``total_train_steps`` bounds the learning-rate schedule. Raises
        ModelLoadError, or ValueError on an unknown dtype or head, or a trainable role without optimizer."""
        if spec.dtype not in _DTYPES:
            raise ValueError(f"{spec.role}.dtype {spec.dtype!r} is not one of {', '.join(sorted(_DTYPES))}")
        if spec.trainable and spec.optimizer is None:
            raise ValueError(f"{spec.role} is trainable but has no optimizer")
        if spec.head not in _HEADS:
            raise ValueError(
                f"{spec.role}.head {spec.head!r} is not one that the backend torch builds: {', '.join(_HEADS)}"
            )
        torch.manual_seed(seed)
        model = load_causal_lm(spec.path, spec.role, _DTYPES[spec.dtype]).to(self._device)
        if spec.head == "value":
            model = load_value_model(model, spec.path, spec.role)
        return self._engine(
            spec,
            model,
            load_tokenizer(spec.path, spec.role),
            optimizer=spec.optimizer if spec.trainable else None,
            total_train_steps=total_train_steps,
            gradient_checkpointing=spec.gradient_checkpointing,
        )

    def _engine(self, spec: ModelSpec, model: Any, tokenizer: Any, **options: Any) -> TorchEngine:
        """Make the engine around the loaded model; a backend for several workers makes another."""
        del spec
        return TorchEngine(model, tokenizer, **options)


def load_causal_lm(path: str, role: str, dtype: torch.dtype) -> Any:
    """Load the model of a folder or hub id, in evaluation mode. Raises ModelLoadError."""
    check_folder(path, role)
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"{role}.path={path}: no such folder, and no readable model of that name ({first_line(error)})"
        ) from None
    known = AutoModelForCausalLM._model_mapping  # type: ignore[attr-defined]
    if type(config) not in known:
        raise ModelLoadError(f"{role}.path={path}: {config.model_type!r} is not a causal language model")
    # Attention with soft caps or sinks, as in Gemma 2 and gpt-oss, has no fused kernel here.
    kernel = "sdpa" if getattr(known[type(config)], "_supports_sdpa", True) else "eager"
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=kernel).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{role}.path={path}: weights do not load ({first_line(error)})") from None


def check_chat_template(tokenizer: Any, path: str, role: str = "actor") -> None:
    """Raise ModelLoadError if the tokenizer cannot render a chat."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelLoadError(
            f"{role}.path={path}: the tokenizer has no chat template; choose an instruction-tuned model or add "
            "chat_template.jinja to the folder"
        )
