"""Trains several adapters of one base model: each is an engine of its own over the same tensors of the base.

The modules of a model are copied for an adapter, its tensors are not: an adapter costs its own weights, gradients and
moments. Where all weights train, the tensors are copied, too. A pass computes what the engine computes in a run, so
that a step here is a step there.
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
from realhf.backends.training.checkpoint import is_checkpoint, load_shards, persistent_buffers, save_shards
from realhf.backends.training.lora import ADAPTER, head_name, linear_layers
from realhf.backends.training.torch_engine import TorchEngine, of_this_model
from realhf.base.tensor_digest import TensorDigester, joint_digest
from realhf.tinker.channel import ComputeOptions
from realhf.tinker.losses import TokenLoss, loss_named
from realhf.tinker.wire import BadRequest, Datum, Pass, pass_answer

ALPHA = 32.0
"""The product of an adapter counts this many times, divided by its rank: what the hosted service documents."""
TRAINING_COPIES = 5
"""What trains takes so many times its bytes: weights, both moments, gradients, and the copy of these that a further
pass goes back to where it fails."""


LEAST_EPS, LARGEST_RATE = 1e-16, 1e3


def sharing_copy(model: Any) -> Any:
    """Return the same modules over the same tensors."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def save_whole(model: Any, folder: Path) -> None:
    """Write all weights of a model, as a checkpoint of its engine names them."""
    save_shards(folder, _all_weights(model))


def load_whole(model: Any, folder: Path) -> None:
    """Read all weights into a model, out of what ``save_whole`` wrote, or a checkpoint. Raises FileNotFoundError where
    they are gone, BadRequest for those that were written for others, ValueError where they are of another model."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the weights of {folder.name} are no longer kept here")
    if not is_checkpoint(folder):
        raise BadRequest(
            f"{folder.name} was saved to be downloaded: save_state and save_weights_for_sampler are for here"
        )
    with of_this_model(folder):
        load_shards(folder, _all_weights(model))


def _all_weights(model: Any) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {f"weights/{name}": tensor.detach() for name, tensor in named.items()}


def chosen_targets(model: Any, *, mlp: bool, attention: bool, unembedding: bool) -> list[str]:
    """Return the names of the linear layers that adapters stand beside. Raises BadRequest where that is none."""
    of_attention = {name for name in linear_layers(model) if "attn" in name or "attention" in name}
    names = [name for name in linear_layers(model) if (attention if name in of_attention else mlp)]
    names += [head_name(model)] if unembedding else []
    if not names:
        raise BadRequest("lora_config: this model has no such layers, so there is nothing to train")
    return names


@dataclass(frozen=True)
class AdapterSpec:
    """What a client asked for: rank, seed of the first values, and beside which layers."""

    rank: int
    seed: int
    mlp: bool = True
    attention: bool = True
    unembedding: bool = True

    def options(self, model: Any) -> LoraConfig:
        """Return the options of the adapters on ``model``."""
        chosen = chosen_targets(model, mlp=self.mlp, attention=self.attention, unembedding=self.unembedding)
        return LoraConfig(self.rank, ALPHA, chosen, 0.0)


@dataclass(frozen=True)
class Held:
    """Names the weights that an answer was computed with."""

    version: int
    digest: str


class TrainedModel:
    """One training client's model: adapters on ``base`` (transformers, frozen), or with ``full_weights`` a copy of it
    that trains whole; ``threads`` compute."""

    def __init__(
        self, base: Any, tokenizer: Any, spec: AdapterSpec, options: ComputeOptions, threads: ComputeThreads
    ) -> None:
        full = options.full_weights
        model = copy.deepcopy(base).requires_grad_(True) if full else sharing_copy(base)
        torch.manual_seed(spec.seed)
        self._engine = TorchEngine(
            model,
            tokenizer,
            optimizer=_adam({}),
            lora=None if full else spec.options(base),
            role="tinker",
            path=options.path,
            adapts_head=spec.unembedding,
        )
        self._engine.use_threads(threads)
        self._spec = MicroBatchSpec(max_tokens_per_mb=options.max_tokens_per_mb)
        self._digester = TensorDigester()
        self._held: Held | None = None
        self.missing = ""
        """Why a gradient that belongs to the next step is missing; "" where none is."""

    @property
    def held(self) -> Held:
        """The version and digest of the weights that train, as they are now."""
        if self._held is None:
            tensors = {name: self._digester.digest(tensor) for name, tensor in self._trained().items()}
            self._held = Held(self._engine.version, joint_digest(tensors))
        return self._held

    def _trained(self) -> Mapping[str, Tensor]:
        adapters = self._engine.adapters
        return self._engine.weights() if adapters is None else adapters.tensors()

    def run(self, request: Pass) -> bytes:
        """Go forward, and backward, over the data; return the answer. Raises BadRequest for a loss or data that do not
        fit each other, FloatingPointError where the loss or its gradient is no finite number. The gradients are what
        they were then."""
        try:
            loss, settings = loss_named(request.loss, request.config)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        batch = Batch(request.data, loss, settings)
        if request.forward_only:
            total, found = batch.forward(self._engine, self._spec)
        else:
            result = self._engine.accumulate(batch.sample, batch.loss, mb_spec=self._spec)
            total = math.nan if result.skipped else result.stats["loss"]
            found = {name: result.kept[name] for name in batch.columns}
        if not math.isfinite(total):
            raise FloatingPointError("the loss or its gradient is not a finite number: nothing of this was added")
        tokens = sum(len(datum.tokens) for datum in request.data)
        metrics = {"loss:sum": total, "tokens:sum": float(tokens), "weights_version:max": float(self.held.version)}
        return pass_answer(batch.split(found), metrics)

    def update(self, params: Mapping[str, float]) -> dict[str, float]:
        """Make a step of Adam by what was accumulated; return its statistics. Raises BadRequest for parameters out of
        range, or where a pass since the last step has failed, FloatingPointError where the gradient is not finite: no
        weight has changed then. Whatever it raises, the gradient is dropped."""
        try:
            if self.missing:
                raise BadRequest(
                    "no step was made and the gradients are dropped, send the whole batch again: a forward_backward "
                    f"since the last step failed ({self.missing:.80})"
                )
            options = _adam(params)
            result = self._engine.step(options)
        except Exception:
            self.drop()
            raise
        if result.skipped:
            raise FloatingPointError("the gradient is not finite: the weights stay as they were, and it is dropped")
        self._held = None
        if not all(bool(tensor.isfinite().all()) for tensor in self._trained().values()):
            raise FloatingPointError("the step made weights that are not finite: load a saved state (load_state)")
        return {
            "grad_norm": result.grad_norm,
            "learning_rate": result.stats["lr"],
            "weights_version": float(self._engine.version),
        }

    def drop(self) -> None:
        """Drop what was accumulated; the next step begins with nothing."""
        self.missing = ""
        self._engine.forget_gradients()

    def save(self, folder: Path, *, moments: bool) -> None:
        """Write the adapters into a folder as peft has them, or all weights; with the optimizer's state if
        ``moments``."""
        if moments:
            self._engine.save_checkpoint(folder)
        elif self._engine.adapters is not None:
            self._engine.adapters.save(folder / ADAPTER)
        else:
            save_whole(self._engine.model, folder)

    def export(self, folder: Path) -> None:
        """Write a whole model with merged weights, config and tokenizer, which ``from_pretrained`` loads."""
        self._engine.export_hf(folder)
        self._engine.release_generation()  # It holds the merged weights.

    def load(self, folder: Path, *, moments: bool) -> None:
        """Take what ``save`` wrote; without ``moments`` the optimizer begins anew. Gradients are dropped. Raises
        FileNotFoundError or ValueError that says how they differ."""
        self._held = None
        if moments:
            self._engine.load_checkpoint(folder)
        else:
            if self._engine.adapters is not None:
                self._engine.adapters.load(folder / ADAPTER)
            else:
                load_whole(self._engine.model, folder)
            self._engine.forget_moments()
        self.drop()

    def nbytes(self) -> int:
        """Return the bytes that this model takes beside the base."""
        return TRAINING_COPIES * sum(tensor.nbytes for tensor in self._trained().values())


def _adam(params: Mapping[str, float]) -> OptimizerConfig:
    """Return the options of a step. Raises BadRequest that names what is out of range."""
    given = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    given |= params
    for name, value in given.items():
        if not (math.isfinite(value) and value >= 0) or (name in ("beta1", "beta2") and value >= 1):
            raise BadRequest(f"optim_params.{name}={value} is out of range")
    # Within these bounds a step changes no weight beyond what float32 holds, whatever the gradients were: where they
    # vanish the denominator is eps alone, and decay that is more than the whole weight grows with every step.
    if given["eps"] < LEAST_EPS:
        raise BadRequest(f"optim_params.eps={given['eps']} must be {LEAST_EPS:g} or more")
    if given["learning_rate"] > LARGEST_RATE:
        raise BadRequest(f"optim_params.learning_rate={given['learning_rate']} must be {LARGEST_RATE:g} or less")
    if given["learning_rate"] * given["weight_decay"] > 1:
        raise BadRequest(f"optim_params.weight_decay={given['weight_decay']} times the learning_rate is more than 1")
    return OptimizerConfig(
        lr=given["learning_rate"],
        weight_decay=given["weight_decay"],
        beta1=given["beta1"],
        beta2=given["beta2"],
        eps=given["eps"],
        warmup_steps_proportion=0.0,
        gradient_clipping=given["grad_clip_norm"],
    )


OUTPUTS = ("logprobs", "elementwise_loss")
"""What an answer has of every target, as the client's documentation names it."""
_TARGETS, _SEQUENCE, _PLACE, _INPUT = "targets", "sequence", "place", "input/"


class Batch:
    """Holds the data of a request as a sample: packed, one sequence for each datum, with what the loss needs as keys of
    a position. ``width`` is the most targets that a position has, ``columns`` names what comes of each of them. Raises
    BadRequest for tensors that the loss misses, or does not know."""

    def __init__(self, data: Sequence[Datum], loss: TokenLoss, settings: Mapping[str, float]) -> None:
        self._loss, self._settings = loss, settings
        self._flat = [datum.targets.ndim == 1 for datum in data]
        self._widths = [1 if flat else datum.targets.shape[1] for flat, datum in zip(self._flat, data, strict=True)]
        self.width = max(self._widths)
        self.columns = [f"{name}/{k}" for name in OUTPUTS for k in range(self.width)]
        self._names = _common_inputs(data, loss)
        if self.width > 1 and loss.needs != ("weights",):
            raise BadRequest("several targets for a position: only cross_entropy takes them")
        self._lengths = [len(datum.tokens) for datum in data]
        self.sample = self._packed(data)

    def _packed(self, data: Sequence[Datum]) -> SequenceSample:
        """The last target of a datum stands behind its tokens, so that the prediction of every target has a place."""
        last = [datum.targets.reshape(len(datum.tokens), -1)[-1:, 0] for datum in data]
        tokens = [np.concatenate([datum.tokens, end]) for datum, end in zip(data, last, strict=True)]
        tensors = {"packed_input_ids": torch.from_numpy(np.concatenate(tokens))}
        lengths = {"packed_input_ids": [[n + 1] for n in self._lengths]}
        numbers = np.repeat(np.arange(len(data)), self._lengths)
        columns: dict[str, np.ndarray] = {
            _TARGETS: np.concatenate([self._wide(datum.targets) for datum in data]),
            _SEQUENCE: numbers,
            _PLACE: np.arange(len(numbers)),
        }
        for name in self._names:
            columns[_INPUT + name] = np.concatenate([self._wide(datum.inputs[name]) for datum in data])
        for key, values in columns.items():
            tensors[key] = torch.from_numpy(np.ascontiguousarray(values))
            lengths[key] = [[n] for n in self._lengths]
        return SequenceSample.from_tensors([str(i) for i in range(len(data))], tensors, lengths)

    def _wide(self, values: np.ndarray) -> np.ndarray:
        """Give every position as many columns as the widest has; those that it has not are 0, as are their weights."""
        values = values.reshape(len(values), -1)
        return np.pad(values, ((0, 0), (0, self.width - values.shape[1])))

    def loss(self, outputs: ForwardOutputs, sample: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        """Is a ``LossFn``; it keeps what ``columns`` names."""
        logprobs, losses = self._scored(outputs, sample)
        for name, values in zip(self.columns, (*logprobs.unbind(1), *losses.unbind(1)), strict=True):
            outputs.keep(name, values)
        return losses.sum(), {}

    def forward(self, engine: TorchEngine, spec: MicroBatchSpec) -> tuple[float, dict[str, Tensor]]:
        """Return the sum of losses, and what ``columns`` names, f32 (positions,) each."""
        total, found = 0.0, torch.zeros(sum(self._lengths), len(self.columns))

        def post(outputs: ForwardOutputs, sample: SequenceSample) -> Tensor:
            nonlocal total
            logprobs, losses = self._scored(outputs, sample)
            total += float(losses.sum())
            found[sample[_PLACE]] = torch.cat([logprobs, losses], 1).float().cpu()
            return logprobs[:, 0]

        engine.forward(self.sample, post, mb_spec=spec)
        return total, dict(zip(self.columns, found.unbind(1), strict=True))

    def _scored(self, outputs: ForwardOutputs, sample: SequenceSample) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and losses of a micro-batch, f32 (n, width) each."""
        logprobs = outputs.logprobs_of(sample[_TARGETS])
        device = logprobs.device
        inputs = {name: sample[_INPUT + name].to(device) for name in self._names}
        _, sequence = sample[_SEQUENCE].to(device).unique_consecutive(return_inverse=True)
        if self.width > 1:
            return logprobs, self._loss.compute(logprobs, inputs, sequence, self._settings)
        flat = {name: values[:, 0] for name, values in inputs.items()}
        return logprobs, self._loss.compute(logprobs[:, 0], flat, sequence, self._settings)[:, None]

    def split(self, found: Mapping[str, Tensor]) -> list[dict[str, np.ndarray]]:
        """Return what is known of each datum, in the shape of its targets, by ``OUTPUTS``."""
        ends = np.cumsum(self._lengths)[:-1]
        split: list[dict[str, np.ndarray]] = [{} for _ in self._lengths]
        for name in OUTPUTS:
            whole = torch.stack([found[f"{name}/{k}"] for k in range(self.width)], -1).numpy()
            for i, part in enumerate(np.split(whole, ends)):
                split[i][name] = part[:, 0] if self._flat[i] else part[:, : self._widths[i]]
        return split


def _common_inputs(data: Sequence[Datum], loss: TokenLoss) -> list[str]:
    given = set(data[0].inputs)
    for number, datum in enumerate(data):
        missing = [name for name in loss.needs if name not in datum.inputs]
        unknown = sorted(set(datum.inputs) - {*loss.needs, *loss.takes})
        if missing or unknown:
            what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is nothing that the loss knows"
            raise BadRequest(f"datum {number}: {what} (it needs {', '.join(loss.needs)})")
        if set(datum.inputs) != given:
            raise BadRequest(f"datum {number} has other tensors than datum 0")
    return sorted(given)
