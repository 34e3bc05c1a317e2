"""Training of several models over one base model. Each model is a separate engine that shares the
base model's tensors.

A model with adapters copies the modules of the base model but not its tensors, so it costs the
memory of the adapters, their gradients and their optimizer moments. If all weights train, the
tensors are copied too. Passes and steps use the same engine as a training run and compute the same
values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.config import LoraConfig, OptimizerConfig
from realhf.api.model import ForwardOutputs
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.compute_threads import ComputeThreads
from realhf.backends.training.checkpoint import (
    is_checkpoint,
    load_shards,
    persistent_buffers,
    save_shards,
)
from realhf.backends.training.lora import ADAPTER, head_name, linear_layers
from realhf.backends.training.torch_engine import TorchEngine, explain_load_errors
from realhf.base.tensor_digest import TensorDigester, joint_digest
from realhf.tinker.channel import ComputeOptions
from realhf.tinker.losses import ClientLoss, find_loss
from realhf.tinker.wire import BadRequest, Datum, Pass, serialize_pass_result

ALPHA = 32.0
"""LoRA alpha: the output of an adapter is scaled by alpha / rank. This is the value that the hosted
service documents."""
TRAINING_COPIES = 5
"""Memory needed for training, in copies of the trained weights: weights, two optimizer moments,
gradients, and a backup of the gradients that is restored if a further pass fails."""
LEAST_EPS = 1e-16
"""Minimum epsilon of AdamW, see ``_parse_adam_params``."""
MAX_RATE = 1e3
"""Maximum learning rate, see ``_parse_adam_params``."""
OUTPUTS = ("logprobs", "elementwise_loss")
"""Outputs of a pass per target, by their names in the client's documentation."""


def copy_sharing_tensors(model: Any) -> Any:
    """Return a copy of the modules of ``model`` that uses the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def save_all_weights(model: Any, folder: Path) -> None:
    """Save all weights of a model under the names that an engine checkpoint uses."""
    save_shards(folder, _all_weights(model))


def load_all_weights(model: Any, folder: Path) -> None:
    """Load all weights of a model from the output of ``save_all_weights`` or from an engine
    checkpoint. Raises FileNotFoundError if the folder is gone, BadRequest if the weights were
    exported for download, ValueError if they belong to another model."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the weights of {folder.name} are no longer kept here")
    if not is_checkpoint(folder):
        raise BadRequest(
            f"{folder.name} was saved to be downloaded: save_state and save_weights_for_sampler "
            f"are for here"
        )
    with explain_load_errors(folder):
        load_shards(folder, _all_weights(model))


def _all_weights(model: Any) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {f"weights/{name}": tensor.detach() for name, tensor in named.items()}


def find_adapter_targets(model: Any, *, mlp: bool, attention: bool, unembedding: bool) -> list[str]:
    """Return the names of the linear layers that get adapters. Raises BadRequest if no layer
    does."""
    attention_layers = {
        name for name in linear_layers(model) if "attn" in name or "attention" in name
    }
    names = [
        name for name in linear_layers(model) if (attention if name in attention_layers else mlp)
    ]
    names += [head_name(model)] if unembedding else []
    if not names:
        raise BadRequest("lora_config: this model has no such layers, so there is nothing to train")
    return names


@dataclass(frozen=True)
class AdapterSpec:
    """Description of the adapters that a client requested."""

    rank: int
    """Rank of the adapters."""
    seed: int
    """Seed of the adapters' initial weights."""
    mlp: bool = True
    """Whether MLP layers get adapters."""
    attention: bool = True
    """Whether attention layers get adapters."""
    unembedding: bool = True
    """Whether the unembedding layer gets an adapter."""

    def options(self, model: Any) -> LoraConfig:
        """Return the LoRA options for ``model``."""
        targets = find_adapter_targets(
            model, mlp=self.mlp, attention=self.attention, unembedding=self.unembedding
        )
        return LoraConfig(self.rank, ALPHA, targets, 0.0)


@dataclass(frozen=True)
class WeightsId:
    """Identity of the weights that computed a response."""

    version: int
    """Number of optimizer steps that led to the weights; -1 if unknown."""
    digest: str
    """Digest of the trained tensors."""


class TrainedModel:
    """Model of one training client: adapters on ``base`` (a frozen transformers model) or, with
    ``options.full_weights``, a trainable copy of ``base``. ``threads`` are the compute threads."""

    def __init__(
        self,
        base: Any,
        tokenizer: Any,
        spec: AdapterSpec,
        options: ComputeOptions,
        threads: ComputeThreads,
    ) -> None:
        full = options.full_weights
        model = copy.deepcopy(base).requires_grad_(True) if full else copy_sharing_tensors(base)
        torch.manual_seed(spec.seed)
        self._engine = TorchEngine(
            model,
            tokenizer,
            optimizer=_parse_adam_params({}),
            lora=None if full else spec.options(base),
            role="tinker",
            path=options.path,
            adapts_head=spec.unembedding,
        )
        self._engine.use_threads(threads)
        self._spec = MicroBatchSpec(max_tokens_per_mb=options.max_tokens_per_mb)
        self._digester = TensorDigester()
        self._weights_id: WeightsId | None = None  # cached until the weights change
        self.missing = ""
        """Reason why a gradient that belongs in the next step is missing; "" if none is."""

    @property
    def weights_id(self) -> WeightsId:
        """Version and digest of the current trained weights."""
        if self._weights_id is None:
            tensors = {
                name: self._digester.digest(tensor)
                for name, tensor in self._trained_tensors().items()
            }
            self._weights_id = WeightsId(self._engine.version, joint_digest(tensors))
        return self._weights_id

    def _trained_tensors(self) -> Mapping[str, Tensor]:
        adapters = self._engine.adapters
        return self._engine.weights() if adapters is None else adapters.tensors()

    def run(self, request: Pass) -> bytes:
        """Run the forward pass of a request and, unless it is ``forward_only``, the backward pass,
        which adds to the accumulated gradients. Return the body of the response.

        Raises BadRequest if the loss is unknown or does not fit the data, FloatingPointError if the
        loss or its gradient is not finite; the accumulated gradients are then unchanged.
        """
        try:
            loss, settings = find_loss(request.loss, request.config)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        batch = PackedBatch(request.data, loss, settings)
        if request.forward_only:
            total, outputs = batch.forward(self._engine, self._spec)
        else:
            result = self._engine.accumulate(batch.sample, batch.loss, mb_spec=self._spec)
            total = math.nan if result.skipped else result.stats["loss"]
            outputs = {name: result.kept[name] for name in batch.columns}
        if not math.isfinite(total):
            raise FloatingPointError(
                "the loss or its gradient is not a finite number: nothing of this was added"
            )
        tokens = sum(len(datum.tokens) for datum in request.data)
        version = float(self.weights_id.version)
        metrics = {"loss:sum": total, "tokens:sum": float(tokens), "weights_version:max": version}
        return serialize_pass_result(batch.split(outputs), metrics)

    def update(self, params: Mapping[str, float]) -> dict[str, float]:
        """Run an AdamW step with the accumulated gradients; return its metrics.

        Raises BadRequest if a parameter is out of range or a backward pass since the last step
        failed, and FloatingPointError if the gradient is not finite (the weights are then
        unchanged) or the step made weights non-finite. The accumulated gradients are dropped in any
        case.
        """
        try:
            if self.missing:
                raise BadRequest(
                    "no step was made and the gradients are dropped, send the whole batch again: a "
                    "forward_backward "
                    f"since the last step failed ({self.missing:.80})"
                )
            options = _parse_adam_params(params)
            result = self._engine.step(options)
        except Exception:
            self.drop()
            raise
        if result.skipped:
            raise FloatingPointError(
                "the gradient is not finite: the weights stay as they were, and it is dropped"
            )
        self._weights_id = None
        if not all(bool(tensor.isfinite().all()) for tensor in self._trained_tensors().values()):
            raise FloatingPointError(
                "the step produced weights that are not finite: load a saved state (load_state)"
            )
        return {
            "grad_norm": result.grad_norm,
            "learning_rate": result.stats["lr"],
            "weights_version": float(self._engine.version),
        }

    def drop(self) -> None:
        """Drop the accumulated gradients, and forget that a gradient is missing."""
        self.missing = ""
        self._engine.forget_gradients()

    def save(self, folder: Path, *, moments: bool) -> None:
        """Save the adapters in peft's format, or all weights. With ``moments``, save an engine
        checkpoint instead, which also has the optimizer state."""
        if moments:
            self._engine.save_checkpoint(folder)
        elif self._engine.adapters is not None:
            self._engine.adapters.save(folder / ADAPTER)
        else:
            save_all_weights(self._engine.model, folder)

    def export(self, folder: Path) -> None:
        """Save a whole model with merged weights, config and tokenizer, which ``from_pretrained``
        can load."""
        self._engine.export_hf(folder)
        self._engine.release_generation()  # it holds a copy of the merged weights

    def load(self, folder: Path, *, moments: bool) -> None:
        """Load the output of ``save``. Without ``moments`` the optimizer state is reset.
        Accumulated gradients are dropped. Raises FileNotFoundError, or ValueError naming the
        difference if the weights do not fit."""
        self._weights_id = None
        if moments:
            self._engine.load_checkpoint(folder)
        else:
            if self._engine.adapters is not None:
                self._engine.adapters.load(folder / ADAPTER)
            else:
                load_all_weights(self._engine.model, folder)
            self._engine.forget_moments()
        self.drop()

    def nbytes(self) -> int:
        """Return the memory in bytes that training this model takes in addition to the base
        model."""
        return TRAINING_COPIES * sum(tensor.nbytes for tensor in self._trained_tensors().values())


def _parse_adam_params(params: Mapping[str, float]) -> OptimizerConfig:
    """Return the optimizer options of a step: the defaults, overridden by ``params``. Raises
    BadRequest naming the parameter that is out of range."""
    values = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    values |= params
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0) or (name in ("beta1", "beta2") and value >= 1):
            raise BadRequest(f"optim_params.{name}={value} is out of range")
    # Within these bounds a step leaves all weights within the range of float32, whatever the
    # gradients are. Where the second moment vanishes the denominator is eps alone, and a decay of
    # more than the whole weight diverges.
    if values["eps"] < LEAST_EPS:
        raise BadRequest(f"optim_params.eps={values['eps']} must be {LEAST_EPS:g} or more")
    if values["learning_rate"] > MAX_RATE:
        raise BadRequest(
            f"optim_params.learning_rate={values['learning_rate']} must be {MAX_RATE:g} or less"
        )
    if values["learning_rate"] * values["weight_decay"] > 1:
        raise BadRequest(
            f"optim_params.weight_decay={values['weight_decay']} times the learning_rate is more "
            f"than 1"
        )
    return OptimizerConfig(
        lr=values["learning_rate"],
        weight_decay=values["weight_decay"],
        beta1=values["beta1"],
        beta2=values["beta2"],
        eps=values["eps"],
        warmup_steps_proportion=0.0,
        gradient_clipping=values["grad_clip_norm"],
    )


_TARGETS = "targets"
"""Sample key: target tokens, i64 (positions, width)."""
_SEQUENCE = "sequence"
"""Sample key: index of the datum of each position, i64 (positions,)."""
_POSITION = "position"
"""Sample key: index of each position in the batch, i64 (positions,)."""
_INPUT = "input/"
"""Prefix of the sample keys of the loss inputs, f32 (positions, width) each."""


class PackedBatch:
    """The data of a request as a ``SequenceSample``: one packed sequence per datum, with targets
    and loss inputs as keys. Raises BadRequest if a datum lacks an input of the loss, or has an
    unknown one."""

    sample: SequenceSample
    """The packed data."""
    width: int
    """Maximum number of targets per position."""
    columns: list[str]
    """Names of the output columns: each of ``OUTPUTS`` for each of the ``width`` targets."""

    def __init__(
        self, data: Sequence[Datum], loss: ClientLoss, settings: Mapping[str, float]
    ) -> None:
        self._loss = loss
        self._settings = settings
        self._is_flat = [datum.targets.ndim == 1 for datum in data]
        self._widths = [
            1 if flat else datum.targets.shape[1]
            for flat, datum in zip(self._is_flat, data, strict=True)
        ]
        self.width = max(self._widths)
        self.columns = [f"{name}/{k}" for name in OUTPUTS for k in range(self.width)]
        self._input_names = _find_input_names(data, loss)
        if self.width > 1 and loss.needs != ("weights",):
            raise BadRequest("several targets for a position: only cross_entropy takes them")
        self._lengths = [len(datum.tokens) for datum in data]
        self.sample = self._pack(data)

    def _pack(self, data: Sequence[Datum]) -> SequenceSample:
        # The engine predicts each token from those before it. The last target of a datum is
        # appended to its tokens, so that every target has a prediction.
        last = [datum.targets.reshape(len(datum.tokens), -1)[-1:, 0] for datum in data]
        tokens = [
            np.concatenate([datum.tokens, end]) for datum, end in zip(data, last, strict=True)
        ]
        tensors = {"packed_input_ids": torch.from_numpy(np.concatenate(tokens))}
        lengths = {"packed_input_ids": [[n + 1] for n in self._lengths]}
        sequence = np.repeat(np.arange(len(data)), self._lengths)
        columns: dict[str, np.ndarray] = {
            _TARGETS: np.concatenate([self._pad_targets(datum.targets) for datum in data]),
            _SEQUENCE: sequence,
            _POSITION: np.arange(len(sequence)),
        }
        for name in self._input_names:
            columns[_INPUT + name] = np.concatenate(
                [self._pad_targets(datum.inputs[name]) for datum in data]
            )
        for key, values in columns.items():
            tensors[key] = torch.from_numpy(np.ascontiguousarray(values))
            lengths[key] = [[n] for n in self._lengths]
        return SequenceSample.from_tensors([str(i) for i in range(len(data))], tensors, lengths)

    def _pad_targets(self, values: np.ndarray) -> np.ndarray:
        """Pad (n,) or (n, K) with zeros to (n, width). Padded targets have weight 0."""
        values = values.reshape(len(values), -1)
        return np.pad(values, ((0, 0), (0, self.width - values.shape[1])))

    def loss(
        self, outputs: ForwardOutputs, sample: SequenceSample
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the summed loss of a micro-batch, and keep the output ``columns`` (a
        ``LossFn``)."""
        logprobs, losses = self._compute(outputs, sample)
        for name, values in zip(
            self.columns, (*logprobs.unbind(1), *losses.unbind(1)), strict=True
        ):
            outputs.keep(name, values)
        return losses.sum(), {}

    def forward(self, engine: TorchEngine, spec: MicroBatchSpec) -> tuple[float, dict[str, Tensor]]:
        """Run only the forward pass. Return the summed loss, and the output ``columns``, f32
        (positions,) each."""
        total = 0.0
        values = torch.zeros(sum(self._lengths), len(self.columns))

        def post(outputs: ForwardOutputs, sample: SequenceSample) -> Tensor:
            nonlocal total
            logprobs, losses = self._compute(outputs, sample)
            total += float(losses.sum())
            # Micro-batches may come in another order than the data.
            values[sample[_POSITION]] = torch.cat([logprobs, losses], 1).float().cpu()
            return logprobs[:, 0]

        engine.forward(self.sample, post, mb_spec=spec)
        return total, dict(zip(self.columns, values.unbind(1), strict=True))

    def _compute(self, outputs: ForwardOutputs, sample: SequenceSample) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and losses of the targets of a micro-batch, f32 (n, width)
        each."""
        logprobs = outputs.logprobs_of(sample[_TARGETS])
        device = logprobs.device
        inputs = {name: sample[_INPUT + name].to(device) for name in self._input_names}
        _, sequence = sample[_SEQUENCE].to(device).unique_consecutive(return_inverse=True)
        if self.width > 1:
            return logprobs, self._loss.compute(logprobs, inputs, sequence, self._settings)
        flat = {name: values[:, 0] for name, values in inputs.items()}
        return logprobs, self._loss.compute(logprobs[:, 0], flat, sequence, self._settings)[:, None]

    def split(self, columns: Mapping[str, Tensor]) -> list[dict[str, np.ndarray]]:
        """Split the output columns by datum. The result has, for each datum, its outputs by their
        names in ``OUTPUTS``, in the shape of the datum's targets."""
        ends = np.cumsum(self._lengths)[:-1]
        outputs: list[dict[str, np.ndarray]] = [{} for _ in self._lengths]
        for name in OUTPUTS:
            whole = torch.stack([columns[f"{name}/{k}"] for k in range(self.width)], -1).numpy()
            for i, part in enumerate(np.split(whole, ends)):
                outputs[i][name] = part[:, 0] if self._is_flat[i] else part[:, : self._widths[i]]
        return outputs


def _find_input_names(data: Sequence[Datum], loss: ClientLoss) -> list[str]:
    """Return the sorted names of the loss inputs, which must be the same for all data. Raises
    BadRequest."""
    names = set(data[0].inputs)
    for number, datum in enumerate(data):
        missing = [name for name in loss.needs if name not in datum.inputs]
        unknown = sorted(set(datum.inputs) - {*loss.needs, *loss.takes})
        if missing or unknown:
            what = (
                f"{missing[0]} is missing"
                if missing
                else f"{unknown[0]} is not an input of the loss"
            )
            raise BadRequest(f"datum {number}: {what} (it needs {', '.join(loss.needs)})")
        if set(datum.inputs) != names:
            raise BadRequest(f"datum {number} has other tensors than datum 0")
    return sorted(names)
