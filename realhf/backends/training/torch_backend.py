"""Backend that builds a ``TorchEngine`` from a folder or a hub id. Models that cannot be used give
one-line errors.

A critic is the decoder of a causal language model with a head that maps every hidden state to one
number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from realhf.api.experiment import ModelSpec
from realhf.backends.embedded.memory import explain_oom, oom_message
from realhf.backends.training.tokenizer_loading import ModelLoadError, check_folder, load_tokenizer
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.hf_config import VALUE_HEAD_FILE, decoder_problem, expert_problem
from realhf.base.text import first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Data types of weights, by the name in the options."""
_HEADS = ("lm", "value")


class TorchBackend:
    """Builder of engines in a single process. ``device``: ``auto`` (CUDA if available), ``cpu``,
    ``cuda`` or ``cuda:N``."""

    def __init__(self, device: str = "auto") -> None:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._device = torch.device(name)

    def build(self, spec: ModelSpec, *, seed: int, total_train_steps: int) -> TorchEngine:
        """Load weights and tokenizer from ``spec.path``, and return an engine.
        ``total_train_steps`` is the length of the learning-rate schedule.

        Raises ModelLoadError, and ValueError for an unknown dtype or head, or a trainable role
        without an optimizer.
        """
        if spec.dtype not in DTYPES:
            raise ValueError(
                f"{spec.role}.dtype {spec.dtype!r} is not one of {', '.join(sorted(DTYPES))}"
            )
        if spec.trainable and spec.optimizer is None:
            raise ValueError(f"{spec.role} is trainable but has no optimizer")
        if spec.head not in _HEADS:
            raise ValueError(
                f"{spec.role}.head {spec.head!r} is not one that the backend torch builds: "
                f"{', '.join(_HEADS)}"
            )
        torch.manual_seed(seed)
        with explain_loading_oom(spec, self._device):
            return self._build_engine(
                spec,
                self._load_model(spec, DTYPES[spec.dtype]),
                load_tokenizer(spec.path, spec.role),
                **engine_options(spec, total_train_steps),
            )

    def _load_model(self, spec: ModelSpec, dtype: torch.dtype) -> Any:
        """Load the model. Sharding backends override this, so that no process loads all of it."""
        head = spec.head == "lm"
        model = load_causal_lm(
            spec.path, spec.role, dtype, with_head=head, experts=spec.experts
        ).to(self._device)
        return load_value_model(model, spec.path, spec.role) if spec.head == "value" else model

    def _build_engine(
        self, spec: ModelSpec, model: Any, tokenizer: Any, **options: Any
    ) -> TorchEngine:
        """Create an engine for the loaded model. Backends with several workers override this."""
        return TorchEngine(model, tokenizer, role=spec.role, **options)


def engine_options(spec: ModelSpec, total_train_steps: int) -> dict[str, Any]:
    """Return the options of a role as arguments of its engine."""
    return {
        "optimizer": spec.optimizer if spec.trainable else None,
        "total_train_steps": total_train_steps,
        "gradient_checkpointing": spec.gradient_checkpointing,
        "compile": spec.compile,
        "lora": spec.lora if spec.trainable else None,
        "path": spec.path,
        "kv_cache_gib": spec.engine.kv_cache_gib,
    }


def explain_loading_oom(
    spec: ModelSpec, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Context manager that turns an out-of-memory error while a model is loaded into a RuntimeError
    that names the options to change."""
    dtype_advice = (
        f", {spec.role}.dtype=bfloat16 (it is {spec.dtype})" if spec.dtype == "float32" else ""
    )
    sharding_advice = (
        f", or {spec.role}.backend=fsdp2, which cuts it over {spec.role}.workers"
        if spec.trainable
        else ""
    )
    return explain_oom(
        lambda: (
            f"for {spec.role}.path={spec.path} on the device {device}: take a smaller "
            f"model{dtype_advice}{sharding_advice}"
        )
    )


def load_causal_lm(
    path: str, role: str, dtype: torch.dtype, *, with_head: bool = True, experts: bool | None = None
) -> Any:
    """Load the model of a folder or hub id, in evaluation mode.

    Args:
        with_head: Whether the projection to the vocabulary is needed; without it, the checkpoint
            may lack this projection.
        experts: Whether a mixture of experts is accepted; None, for a model that does not train,
            accepts both kinds.

    Raises ModelLoadError if there is no model, or it is incomplete or not a causal decoder.
    """
    check_folder(path, role)
    transformers_logging.disable_progress_bar()
    kernel = choose_attention(path, role, experts)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=kernel,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # ``_find_mismatch`` reports them by name
        )
    except (OSError, ValueError, RuntimeError) as error:
        if oom_message(error) is not None:
            raise
        raise ModelLoadError(
            f"{role}.path={path}: weights do not load ({first_line(error)})"
        ) from None
    model, report = loaded
    if problem := _find_mismatch(model, report, with_head):
        raise ModelLoadError(f"{role}.path={path}: {problem}")
    model.eval()
    if problem := find_logit_problem(model):
        raise ModelLoadError(f"{role}.path={path}: {problem}")
    return model


def choose_attention(path: str, role: str, experts: bool | None = None) -> str:
    """Return the attention implementation for a model. Raises ModelLoadError if it is not a
    decoder, or if it is a mixture of experts and ``experts`` is False."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"{role}.path={path}: no such folder, and no readable model of that name "
            f"({first_line(error)})"
        ) from None
    known = AutoModelForCausalLM._model_mapping  # type: ignore[attr-defined]
    if type(config) not in known:
        raise ModelLoadError(
            f"{role}.path={path}: {config.model_type!r} is not a causal language model"
        )
    values = config.to_dict()
    problem = decoder_problem(values)
    if experts is not None:
        problem = problem or expert_problem(values, role, accepted=experts)
    if problem:
        raise ModelLoadError(f"{role}.path={path}: {problem}")
    # There is no fused kernel for attention with soft caps or sinks, as in Gemma 2 and gpt-oss.
    return "sdpa" if getattr(known[type(config)], "_supports_sdpa", True) else "eager"


def _find_mismatch(model: Any, report: Mapping[str, Any], with_head: bool) -> str | None:
    """Return an error text if a checkpoint does not match the model that its configuration
    describes, otherwise None. transformers would fill missing tensors with random numbers without
    an error."""
    name = type(model).__name__
    head = model.get_output_embeddings()
    optional = (
        ()
        if with_head
        else tuple(f"{at}." for at, module in model.named_modules() if module is head)
    )
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(optional)):
        return f"the checkpoint of a {name} lacks {missing[0]}, and {len(missing) - 1} others"
    if mismatched := sorted(report["mismatched_keys"]):
        tensor, stored_shape, own_shape = mismatched[0]
        return (
            f"{tensor} of the checkpoint has the shape {tuple(stored_shape)}, in {name} "
            f"{tuple(own_shape)}, "
            f"and {len(mismatched) - 1} "
            "others differ"
        )
    return None


@torch.no_grad()
def find_logit_problem(model: Any) -> str | None:
    """Return why a model cannot generate, or None if it can. Its logits may not be finite, or may
    depend on later tokens, as those of an encoder loaded as a causal model do. For a model with a
    value head, the hidden states are tested instead."""
    size = int(model.config.get_text_config().vocab_size)
    texts = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]], device=model.device) % size
    if isinstance(model, ValueModel):
        outputs = model.get_decoder()(input_ids=texts, use_cache=False).last_hidden_state
    else:
        outputs = model(input_ids=texts, use_cache=False).logits
    first, second = outputs[:, :2].float()
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        return "its logits are not finite; the checkpoint is damaged"
    rounding = max(1e-4, 4 * torch.finfo(model.dtype).eps) * float(first.abs().max())
    if torch.allclose(first, second, rtol=0.0, atol=rounding):
        return None
    return f"{type(model).__name__} looks at later tokens, so it cannot generate"


def check_chat_template(tokenizer: Any, path: str, role: str = "actor") -> None:
    """Raise ModelLoadError if the tokenizer cannot render a chat."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelLoadError(
            f"{role}.path={path}: the tokenizer has no chat template; choose an instruction-tuned "
            f"model or add "
            "chat_template.jinja to the folder"
        )


class ValueHead(nn.Linear):
    """Linear projection of hidden states (..., width) to one number each, fp32 (..., 1), computed
    in fp32.

    It starts at 0, so that an untrained critic predicts the mean return and does not distort
    advantage estimates.
    """

    def __init__(self, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(width, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return one number for each hidden state."""
        return functional.linear(input.float(), self.weight.float(), self.bias.float())


class ValueModel(nn.Module):
    """Decoder of ``language_model`` (transformers) with a ``value_head`` in place of the
    language-model head."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.model = language_model.get_decoder()
        self.config = language_model.config
        width = int(self.config.get_text_config().hidden_size)
        # A decoder on the meta device gets its weights later; the head is allocated now.
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        self.value_head = ValueHead(width, device=device, dtype=self.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.model.dtype

    def get_decoder(self) -> Any:
        """Return the decoder, which maps tokens to hidden states."""
        return self.model

    def activation_checkpointing_enable(self) -> None:
        """Enable activation checkpointing: recompute activations in the backward pass."""
        self.model.activation_checkpointing_enable()

    def save_pretrained(self, folder: Path | str) -> None:
        """Write decoder and value head to a folder that ``critic.path`` accepts."""
        self.model.save_pretrained(folder)
        save_file(
            {name: t.detach().contiguous() for name, t in self.value_head.state_dict().items()},
            _head_path(folder),
        )


def load_value_model(language_model: Any, path: str, role: str) -> ValueModel:
    """Return a value model with the decoder of ``language_model``, which was loaded from ``path``.
    Its value head is loaded from a file in the same folder, or starts at 0 if there is none. Raises
    ModelLoadError if the saved head does not fit."""
    model = ValueModel(language_model)
    if _head_path(path).is_file():
        try:
            model.value_head.load_state_dict(load_file(_head_path(path)))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ModelLoadError(
                f"{role}.path={path}: its value head does not load ({first_line(error)})"
            ) from None
    return model.eval()


def _head_path(folder: Path | str) -> Path:
    return Path(folder) / VALUE_HEAD_FILE
