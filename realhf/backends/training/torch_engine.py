"""Implements the single-process engine: one transformers model that trains, scores and generates."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from realhf.api.config import OptimizerConfig
from realhf.api.model import LossFn, TrainResult
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.embedded.onednn_linear import use_onednn
from realhf.backends.embedded.weight_copy import named_weights
from realhf.backends.threads.compute_threads import ComputeThreads, unmanaged
from realhf.backends.training.micro_batches import micro_batches
from realhf.backends.training.optimizer import PolicyOptimizer
from realhf.backends.training.packed_forward import PackedForward

_WEIGHTS, _STATE = "model.safetensors", "engine.pt"


class TorchEngine:
    """Implements ``Engine`` around ``model`` (a transformers causal language model). Without ``optimizer`` the weights
    are frozen. Dropout is switched off, because the policy that is scored must be the one that sampled."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        optimizer: OptimizerConfig | None = None,
        total_train_steps: int = 1,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        _disable_dropout(model)
        model.eval()
        use_onednn(model)
        self._forward = PackedForward(model)
        self._checkpointing = gradient_checkpointing and optimizer is not None
        if self._checkpointing:
            model.activation_checkpointing_enable()
        self._optimizer: PolicyOptimizer | None = None
        if optimizer is not None:
            self._optimizer = PolicyOptimizer(model, optimizer, total_train_steps)
        else:
            model.requires_grad_(False)
        self._version = 0
        self._generator = EmbeddedGenerator(model, version=lambda: self._version)
        self._threads = unmanaged()

    def use_threads(self, threads: ComputeThreads) -> None:
        """Let ``threads`` compute here from now on. All engines of one thread share them."""
        self._threads = self._generator.threads = threads
        self._forward.pace = threads.pace

    @property
    def version(self) -> int:
        """Number of committed train steps. Setting it frees the generation engine's rows."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        self._generator.free()

    def generator(self) -> EmbeddedGenerator:
        """The generation engine over the same model."""
        return self._generator

    def train_batch(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        *,
        temperature: float,
        mb_spec: MicroBatchSpec,
        with_entropy: bool = False,
    ) -> TrainResult:
        """See ``Engine.train_batch``. Stats: sums of what ``loss_fn`` returned, ``loss`` and ``lr``. A batch
        without any trainable position changes nothing. Raises RuntimeError on a frozen engine."""
        optimizer = self._optimizer
        if optimizer is None:
            raise RuntimeError("train_batch: this model role was built without an optimizer")
        stats: dict[str, float] = {}
        total, has_gradient = 0.0, False
        self._generator.release()  # Its memory is wanted here, and the weights that filled it are about to change.
        optimizer.zero_grad()
        with self._training(), self._threads.computing():
            for part in micro_batches(sample, mb_spec):
                logprobs, entropy = self._forward(
                    part, temperature=temperature, with_entropy=with_entropy, max_tokens=mb_spec.max_tokens_per_mb
                )
                self._threads.pace()
                loss, part_stats = loss_fn(logprobs, part, entropy)
                _accumulate(stats, part_stats)
                total += float(loss.detach())
                if not math.isfinite(total):
                    break
                if loss.requires_grad:
                    loss.backward()
                    has_gradient = True
        norm = optimizer.gradient_norm() if math.isfinite(total) else math.nan
        stats["loss"] = total
        if not math.isfinite(norm):
            optimizer.zero_grad()
            return TrainResult(stats, norm, skipped=True)
        if has_gradient:
            stats["lr"] = optimizer.step(self._version, norm)
        optimizer.zero_grad()
        return TrainResult(stats, norm, skipped=False)

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        # Layers recompute activations only in training mode; dropout is off in either.
        self.model.train(self._checkpointing)
        try:
            yield
        finally:
            self.model.eval()

    def logprobs(self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec) -> Tensor:
        """See ``Engine.logprobs``. The result is on the CPU. ``mb_spec`` bounds a padded batch, one of which exists at
        once; it changes values by rounding at most."""
        with torch.inference_mode(), self._threads.computing():
            logprobs, _ = self._forward(sample, temperature=temperature, max_tokens=mb_spec.max_tokens_per_mb)
        # A copy made outside inference mode is an ordinary tensor, which a loss may use later.
        return logprobs.cpu().clone()

    def weights(self) -> dict[str, Tensor]:
        """See ``Engine.weights``."""
        return named_weights(self.model)

    def save_checkpoint(self, folder: Path) -> None:
        """Write what training needs to continue bit-identically into ``folder`` (made if missing). A frozen engine
        writes its version only, because its weights are those it was built from."""
        folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {"version": self._version, "torch_rng": torch.get_rng_state()}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer.state_dict()
            save_model(self.model, str(folder / _WEIGHTS))
        torch.save(state, folder / _STATE)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what ``save_checkpoint`` wrote. Raises FileNotFoundError or ValueError naming the folder."""
        if not (folder / _STATE).is_file():
            raise FileNotFoundError(f"no engine checkpoint in {folder}")
        state = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
        if (self._optimizer is None) != ("optimizer" not in state):
            raise ValueError(f"checkpoint {folder}: trainable and frozen model roles do not match")
        if self._optimizer is not None:
            load_model(self.model, str(folder / _WEIGHTS))
            self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        self.version = int(state["version"])

    def export_hf(self, folder: Path) -> None:
        """Write model, config and tokenizer for ``from_pretrained``; ``folder`` appears, or is replaced, only when
        complete."""
        folder = Path(folder)
        fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            self.model.save_pretrained(fresh)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(fresh)
            if folder.exists():
                old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
                os.replace(folder, old)
                os.replace(fresh, folder)
                shutil.rmtree(old)
            else:
                os.replace(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _accumulate(total: dict[str, float], part: dict[str, float]) -> None:
    for name, value in part.items():
        if name.endswith("_max"):
            total[name] = max(total.get(name, value), value)
        else:
            total[name] = total.get(name, 0.0) + value


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
