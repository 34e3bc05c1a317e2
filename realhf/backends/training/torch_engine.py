"""Single-process engine: a transformers model that trains, computes log-probabilities and
generates."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from realhf.api.config import LoraConfig, OptimizerConfig
from realhf.api.model import POSITIONS, LossFn, PostFn, TrainResult, logprobs_by
from realhf.api.parallel import CollectiveBroken
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.compute_threads import ComputeThreads, unmanaged_threads
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.embedded.kernels import use_few_pass_norms, use_onednn
from realhf.backends.embedded.memory import (
    Heap,
    cache_bytes,
    explain_pass_oom,
    explain_update_oom,
    oom_message,
)
from realhf.backends.embedded.weight_copy import collect_weights
from realhf.backends.training.checkpoint import is_checkpoint, load_state, save_state
from realhf.backends.training.device_use import DeviceUse
from realhf.backends.training.lora import ADAPTER, BaseEngine, LoraAdapters
from realhf.backends.training.micro_batches import (
    MicroBatch,
    Ranks,
    StepAccount,
    split_micro_batches,
)
from realhf.backends.training.optimizer import PolicyOptimizer
from realhf.backends.training.packed_forward import PackedForward
from realhf.base.text import first_line


def find_blocks(model: Any) -> list[Any]:
    """Return the blocks (layers) of a transformers model; empty if the model does not declare
    them."""
    kinds = {*(getattr(model.get_decoder(), "_no_split_modules", None) or ())}
    return [module for module in model.modules() if type(module).__name__ in kinds]


class CompiledBlocks:
    """Blocks of a transformers model compiled with torch.compile.

    The compiled blocks are active only inside ``use``. Generation from cached keys and values,
    whose shapes change with every token, uses the original blocks. Shapes are dynamic:
    micro-batches of every size use the same compiled code. Raises ValueError if the model declares
    no blocks, or if there is no compiler for the device. ``role`` is for error messages.
    """

    def __init__(self, model: Any, role: str) -> None:
        self._option = f"{role}.compile=true"
        self._blocks = find_blocks(model)
        if not self._blocks:
            raise ValueError(
                f"{self._option}: {type(model).__name__} does not declare which of its modules are "
                f"blocks"
            )
        if problem := _missing_compiler(model.device):
            raise ValueError(f"{self._option}: {problem}; install one, or set false")
        self._compiled: list[Callable[..., Any]] = [
            torch.compile(block._call_impl, dynamic=True) for block in self._blocks
        ]

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Context manager that activates the compiled blocks. The first pass with each kind of
        input compiles them.

        Raises RuntimeError naming the option if compilation fails.
        """
        for block, compiled in zip(self._blocks, self._compiled, strict=True):
            block._compiled_call_impl = compiled
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise RuntimeError(
                f"{self._option}: the blocks do not compile ({first_line(error)}); set false"
            ) from error
        finally:
            for block in self._blocks:
                block._compiled_call_impl = None


def _missing_compiler(device: torch.device) -> str:
    """Return a sentence about the compiler that torch.compile needs for this device but cannot
    find; "" if nothing is missing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        if not has_triton():
            return "torch.compile needs triton on a GPU, which was not found"
        return (
            ""
            if shutil.which("gcc") or shutil.which("clang")
            else "triton needs a C compiler, which was not found"
        )
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError, RuntimeError) as error:
        return (
            f"torch.compile needs a C++ compiler on the CPU, which was not found "
            f"({first_line(error)})"
        )
    return ""


class TorchEngine:
    """``Engine`` of a model that fits on one device.

    Dropout is disabled, because log-probabilities must be those of the policy that sampled.

    Args:
        model: A transformers causal language model, or a decoder with a ``value_head`` (a linear
            layer with one output, and ``get_decoder``, ``device`` and ``config`` as in
            transformers), which does not generate.
        tokenizer: Its tokenizer, for export.
        optimizer: AdamW options; None for frozen weights.
        total_train_steps: Length of the learning rate schedule, train steps.
        gradient_checkpointing: Whether to recompute activations in the backward pass.
        compile: Whether to compile the blocks of the model.
        ranks: Group of the engines of the role's workers; None for a single worker.
        lora: Options of LoRA adapters, which then train instead of the weights. Generation, weight
            updates and export use the model with merged adapters.
        role: Name of the model role, for error messages.
        path: Path of the base model, for the files of adapters.
        kv_cache_gib: Maximum size of keys and values in generation, GiB; None for a fraction of
            free memory.
        adapts_head: Whether the language-model head may have an adapter if it is a target.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        optimizer: OptimizerConfig | None = None,
        total_train_steps: int = 1,
        gradient_checkpointing: bool = False,
        compile: bool = False,
        ranks: Ranks | None = None,
        lora: LoraConfig | None = None,
        role: str = "actor",
        path: str = "",
        kv_cache_gib: float | None = None,
        adapts_head: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._role = role
        _disable_dropout(model)
        model.eval()
        self.adapters: LoraAdapters | None = None
        self._checkpointing = gradient_checkpointing and optimizer is not None
        self._compiles = compile
        self._forward = self._build_forward(lora, path, adapts_head)
        self._ranks = Ranks() if ranks is None else ranks
        self._heap = Heap()
        if self._checkpointing:
            model.activation_checkpointing_enable()
        self._optimizer: PolicyOptimizer | None = None
        if optimizer is not None:
            self._optimizer = PolicyOptimizer(model, optimizer, total_train_steps)
        else:
            model.requires_grad_(False)
        self._blocks = CompiledBlocks(model, role) if compile else None
        self._version = 0
        generates = self._forward.heads.value is None
        self._kv_cache_gib = kv_cache_gib
        generating_model = model if self.adapters is None else self.adapters.skeleton
        self._generator = (
            self._build_generator(generating_model, ready=self._merged_model) if generates else None
        )
        self._threads = unmanaged_threads()
        self.device_use = DeviceUse(model) if optimizer is not None else None
        """What the train calls use of this worker's device; None for a frozen model."""

    @property
    def ranks(self) -> Ranks:
        """Communication with the engines of the other workers that train this model."""
        return self._ranks

    @property
    def optimizer(self) -> PolicyOptimizer | None:
        """Optimizer of the weights that train; None for a frozen model."""
        return self._optimizer

    def base(self) -> BaseEngine:
        """Return an engine of the frozen base model: this model without its adapters.

        Raises RuntimeError if the model has no adapters.
        """
        if self.adapters is None:
            raise RuntimeError("this model role has no adapters: all its weights train")
        return BaseEngine(self, self.adapters, self.tokenizer)

    def _build_forward(
        self, lora: LoraConfig | None, path: str, adapts_head: bool
    ) -> PackedForward:
        """Add adapters to the model and return its forward pass, which tests what the model
        supports.

        Must be called before the optimizer is created. Raises ValueError for a model that cannot
        have adapters.
        """
        if not self._compiles:  # Inductor requires the weight of a oneDNN product to be a constant.
            use_onednn(self.model)
        use_few_pass_norms(self.model)
        if lora is not None:
            if self.model.get_output_embeddings() is None:
                raise ValueError(
                    f"{self._role}.lora.rank={lora.rank}: a model without a language-model head "
                    f"has no adapters"
                )
            self.adapters = LoraAdapters(
                self.model, lora, role=self._role, path=path, head=adapts_head
            )
            use_onednn(self.model)
        return PackedForward(self.model, pieces=not self._checkpointing and not self._compiles)

    def use_threads(self, threads: ComputeThreads) -> None:
        """Compute with ``threads`` from now on. Torch's number of threads is a setting of the
        calling thread, so all engines that compute in one thread share it."""
        self._threads = threads
        if self._generator is not None:
            self._generator.threads = threads
        self._forward.pace = threads.measure_if_due

    @property
    def version(self) -> int:
        """Number of completed train steps. Setting it invalidates the generation engine's cache."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self._generator is not None:
            self._generator.free()

    def release_generation(self) -> None:
        """Free the generation engine's keys and values and the merged weights. They are allocated
        again when it next generates."""
        if self._generator is not None:
            self._generator.release()
        if self.adapters is not None:
            self.adapters.drop_merged()

    def generator(self) -> EmbeddedGenerator:
        """Return the generation engine of this model. Raises ValueError for a model with a value
        head."""
        if self._generator is None:
            raise ValueError("a model with a value head does not generate")
        return self._generator

    def _build_generator(
        self, model: Any, ready: Callable[[], object] = lambda: None
    ) -> EmbeddedGenerator:
        """Return a generation engine for ``model`` on the device that is also used for training."""
        max_bytes = lambda: cache_bytes(self._kv_cache_gib, model.device, shared=True)
        return EmbeddedGenerator(
            model, version=lambda: self._version, ready=ready, max_bytes=max_bytes
        )

    def _merged_model(self) -> Any:
        """Return the model with its adapters merged, or the model itself if it has no adapters."""
        return self.model if self.adapters is None else self.adapters.merged_model()

    def train_batch(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        *,
        mb_spec: MicroBatchSpec,
        normaliser: float = 1.0,
    ) -> TrainResult:
        """See ``Engine.train_batch``. Raises RuntimeError for a frozen model.

        The statistics are the sums of the statistics that ``loss_fn`` returned, and ``loss``,
        ``lr`` and ``POSITIONS``. A batch without a trainable position makes no update.
        """
        optimizer = self._require_optimizer("train_batch")
        if not 0 < normaliser < math.inf:
            raise ValueError(f"train_batch: the normaliser must be positive, got {normaliser}")
        optimizer.zero_grad()
        if self.device_use is not None:
            self.device_use.count(sample.lengths("packed_input_ids").values.tolist())
        stats, backward, kept = self._compute_gradients(
            sample, loss_fn, mb_spec, normaliser, optimizer
        )
        self._heap.trim()
        norm = optimizer.gradient_norm() if math.isfinite(stats["loss"]) else math.nan
        # Raises if the sums were aborted: they must decide neither about a step nor a skip.
        self._ranks.settle()
        if not math.isfinite(norm):
            optimizer.zero_grad()
            return TrainResult(stats, norm, skipped=True, kept=kept)
        if backward:
            stats["lr"] = self._update(optimizer, norm)
        optimizer.zero_grad()
        return TrainResult(stats, norm, skipped=False, kept=kept)

    def accumulate(
        self, sample: SequenceSample, loss_fn: LossFn, *, mb_spec: MicroBatchSpec
    ) -> TrainResult:
        """Add the gradient of the summed losses on ``sample`` to the accumulated gradient.

        The norm in the result is that of the accumulated gradient; the statistics are those of
        ``train_batch`` without ``lr``. If the loss or the norm is not finite, or an exception is
        raised, the accumulated gradient does not change. The memory of the passes is kept for the
        next call. Raises RuntimeError for a frozen model, or one with several ranks.
        """
        optimizer = self._require_optimizer("accumulate")
        if self._ranks.size > 1:
            raise RuntimeError(
                "accumulate: gradients of several ranks are added up once a step, in train_batch"
            )
        before = optimizer.copy_gradients()
        skipped = True
        try:
            stats, _, kept = self._compute_gradients(sample, loss_fn, mb_spec, 1.0, optimizer)
            norm = optimizer.gradient_norm() if math.isfinite(stats["loss"]) else math.nan
            skipped = not math.isfinite(norm)
        finally:
            if skipped:
                optimizer.restore_gradients(before)
        return TrainResult(stats, norm, skipped=skipped, kept=kept)

    def step(self, options: OptimizerConfig) -> TrainResult:
        """Make one optimizer step with the accumulated gradient, clear it, and increment
        ``version``.

        ``options`` replace earlier ones. If the norm is not finite, no step is made. Weights
        without a gradient do not change, as in ``torch.optim.AdamW``.
        """
        optimizer = self._require_optimizer("step")
        optimizer.use(options)
        norm = optimizer.gradient_norm()
        if skipped := not math.isfinite(norm):
            optimizer.zero_grad()
            return TrainResult({}, norm, skipped)
        rate = self._update(optimizer, norm)
        optimizer.zero_grad()
        self.version += 1
        return TrainResult({"lr": rate}, norm, skipped)

    def forget_gradients(self) -> None:
        """Clear the accumulated gradient."""
        self._require_optimizer("forget_gradients").zero_grad()

    def forget_moments(self) -> None:
        """Reset the optimizer to its initial state."""
        self._require_optimizer("forget_moments").reset_moments(())

    def _require_optimizer(self, method: str) -> PolicyOptimizer:
        """Return the optimizer. Raises RuntimeError naming ``method`` if the model is frozen."""
        if self._optimizer is None:
            raise RuntimeError(f"{method}: this model role was built without an optimizer")
        return self._optimizer

    def _compute_gradients(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        spec: MicroBatchSpec,
        normaliser: float,
        optimizer: PolicyOptimizer,
    ) -> tuple[dict[str, float], bool, dict[str, Tensor]]:
        """Add the gradient of a batch, summed over all ranks, to the accumulated gradient.

        Returns the statistics, whether there was a gradient, and the tensors that the loss kept.
        """
        # Training needs the memory, and the weights of the cache are about to change.
        self.release_generation()
        with self._use_training_mode(), self._threads.computing():
            account = self._run_passes(sample, loss_fn, spec, normaliser)
            results = account.sum_over(self._ranks)
            self._ranks.sum_gradients(optimizer.masters)
        return results

    def _update(self, optimizer: PolicyOptimizer, norm: float) -> float:
        """Make an optimizer step with gradients of this norm; return the learning rate."""
        adapters = self.adapters is None and self._forward.heads.value is None
        offload = self.model.device.type == "cuda" and not (
            optimizer.offloads or self._ranks.passes_are_collective
        )
        with explain_update_oom(optimizer.masters, self._role, adapters=adapters, offload=offload):
            return optimizer.step(self._version, norm)

    def _run_passes(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        spec: MicroBatchSpec,
        normaliser: float,
    ) -> StepAccount:
        """Run the forward and backward passes of this rank."""
        account = StepAccount(_count_predictions(sample))
        parts = self.split(sample, spec)
        n_extra = self._count_extra_passes(parts)

        def compute_loss(part: MicroBatch) -> Tensor:
            outputs = self._forward(part.sample, part.rows)
            self._threads.measure_if_due()
            loss, stats = loss_fn(outputs, part.sample)
            loss = loss / normaliser if normaliser != 1.0 else loss
            account.add(
                part,
                float(loss.detach()),
                {**stats, POSITIONS: float(part.positions)},
                outputs.kept,
            )
            return loss

        for part in parts:
            with explain_pass_oom(part.positions, len(part.rows), spec.max_tokens_per_mb):
                loss = self._run_pass(part.is_empty, lambda part=part: compute_loss(part))
                if loss.requires_grad:
                    loss.backward()
                    account.backward = True
            self._heap.trim_after_pass(part.positions)
        for _ in range(n_extra):
            self._run_pass(False, self._forward.run_zero_pass).backward()
        return account

    def split(self, sample: SequenceSample, spec: MicroBatchSpec) -> list[MicroBatch]:
        """Return the micro-batches of this rank. Raises ValueError for an unknown token."""
        self._check_tokens(sample)
        forward = self._forward
        return split_micro_batches(
            sample,
            spec,
            self._ranks,
            share=forward.shares,
            packed=forward.packs,
            row_tokens=forward.row_tokens,
        )

    def _check_tokens(self, sample: SequenceSample) -> None:
        """Raise ValueError for a token outside the vocabulary, which would end the process on a
        GPU."""
        size = int(self.model.config.get_text_config().vocab_size)
        ids = sample["packed_input_ids"]
        unknown = (ids < 0) | (ids >= size)
        if not bool(unknown.any()):
            return
        position = int(unknown.nonzero()[0])
        offsets = sample.lengths("packed_input_ids").sample_row_offsets()
        index = int(np.searchsorted(offsets, position, side="right")) - 1
        raise ValueError(
            f"packed_input_ids of sample {sample.ids[index]!r} has the token {int(ids[position])}, "
            f"and {self._role} "
            f"has the tokens 0 to {size - 1}: it was encoded with another tokenizer"
        )

    def _run_pass(self, empty: bool, run: Callable[[], Tensor]) -> Tensor:
        """Run a pass while all weights are available. Subclasses gather sharded weights for it,
        unless the pass is ``empty``."""
        del empty
        return run()

    def _count_extra_passes(self, parts: list[MicroBatch]) -> int:
        """Return the number of additional passes in which this rank has to take part after its own,
        because other ranks have more.

        The numbers are exchanged before the first pass. An exchange after the passes would
        deadlock: a rank that has finished would wait in it, while the others wait for that rank in
        their passes.
        """
        if not self._ranks.passes_are_collective:
            return 0
        own = sum(not part.is_empty for part in parts)
        return max(other["passes"] for other in self._ranks.gather({"passes": own})) - own

    @contextlib.contextmanager
    def _use_training_mode(self) -> Iterator[None]:
        """Context manager that sets the model up for training."""
        # Layers recompute activations only in training mode. Dropout is disabled in both modes.
        self.model.train(self._checkpointing)
        if self.adapters is not None:
            self.adapters.set_training(True)
        try:
            with _disable_config_dropout(self.model.config), self._use_compiled_blocks():
                yield
        finally:
            self.model.eval()

    def _use_compiled_blocks(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._blocks is None else self._blocks.use()

    def _no_gradient_mode(self) -> contextlib.AbstractContextManager[Any]:
        return torch.inference_mode()

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.forward``."""
        result = torch.zeros(_count_predictions(sample))

        def compute(part: MicroBatch) -> Tensor:
            return post_fn(self._forward(part.sample, part.rows), part.sample)

        with self._no_gradient_mode(), self._use_compiled_blocks(), self._threads.computing():
            parts = self.split(sample, mb_spec)
            n_extra = self._count_extra_passes(parts)
            for part in parts:
                with explain_pass_oom(part.positions, len(part.rows), mb_spec.max_tokens_per_mb):
                    values = self._run_pass(part.is_empty, lambda part=part: compute(part))
                self._heap.trim_after_pass(part.positions)
                if values.shape != part.place.shape:
                    raise ValueError(
                        f"forward: post_fn returned {tuple(values.shape)}, not "
                        f"{tuple(part.place.shape)}"
                    )
                result[part.place] = values.float().cpu()
            for _ in range(n_extra):
                self._run_pass(False, self._forward.run_zero_pass)
        self._heap.trim()
        self._ranks.sum_(result)
        return result

    def logprobs(
        self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.logprobs``. ``mb_spec`` limits memory and changes results only by
        rounding."""
        return logprobs_by(self, sample, temperature=temperature, mb_spec=mb_spec)

    def weights(self) -> dict[str, Tensor]:
        """See ``Engine.weights``."""
        return collect_weights(self._merged_model())

    def stored_weights(self) -> dict[str, Tensor]:
        """Return the weights that ``load_checkpoint`` restores bit by bit: all weights or, for a
        model with adapters, its base weights and adapters."""
        return self.weights() if self.adapters is None else collect_weights(self.model)

    @property
    def _saves_weights(self) -> bool:
        """Whether a checkpoint contains the weights of the model.

        Frozen models, and the base models of adapters, are loaded from the ``path`` of the role
        instead.
        """
        return self._optimizer is not None and self.adapters is None

    def save_checkpoint(self, folder: Path) -> list[Path] | None:
        """Write the state that training needs to continue bit-identically into ``folder``, created
        if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapters is not None:
            self.adapters.save(folder / ADAPTER)
        save_state(folder, self.model, self._optimizer, self._version, weights=self._saves_weights)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore a state that ``save_checkpoint`` wrote, with any number of ranks.

        Raises FileNotFoundError or ValueError naming the folder.
        """
        self._load(folder)

    def _load(self, folder: Path, group: Any = None) -> None:
        """Restore a checkpoint together with the other ranks of ``group`` (None: alone)."""
        if (folder / "engine.pt").is_file():
            raise ValueError(
                f"checkpoint {folder} was written by an earlier version, in a format that this one "
                f"does not read: go "
                "on with that version, or start over with recover_mode=disabled, or from a policy "
                "that it exported "
                "(actor.path, or the path of its role)"
            )
        self._check_adapters(folder)
        if not is_checkpoint(folder):
            raise FileNotFoundError(f"no engine checkpoint in {folder}")
        if self.adapters is not None:
            self.adapters.load(folder / ADAPTER)
        with explain_load_errors(folder):
            weights = self._saves_weights
            self.version = load_state(
                folder, self.model, self._optimizer, weights=weights, group=group
            )

    def _check_adapters(self, folder: Path) -> None:
        """Raise ValueError if the model has adapters and the checkpoint does not, or the
        reverse."""
        saved = (folder / ADAPTER).is_dir()
        if folder.is_dir() and saved != (self.adapters is not None):
            was, now = ("adapters", "all weights") if saved else ("all weights", "adapters")
            raise ValueError(
                f"checkpoint {folder}: {was} trained there and {now} train here; continue with the "
                f"same "
                "actor.lora.rank, or start over with recover_mode=disabled"
            )

    def export_hf(self, folder: Path) -> None:
        """Write model, config and tokenizer for ``from_pretrained``.

        Adapters are merged, and also written to the subfolder ``adapter`` in the format of peft.
        """
        self._merged_model().save_pretrained(folder)
        if self.adapters is not None:
            self.adapters.save(folder / ADAPTER)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def explain_load_errors(folder: Path) -> Iterator[None]:
    """Context manager that raises a one-line ValueError for a checkpoint that does not fit the
    model.

    Errors with other causes, such as a lost rank or lack of memory, are raised unchanged.
    """
    try:
        yield
    except (KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, CollectiveBroken) or oom_message(error) is not None:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = next(
            (line for line in lines if not line.startswith("Error(s) in loading")),
            type(error).__name__,
        )
        cause = (
            cause.removeprefix(f"checkpoint {folder}")
            .removeprefix(" is of another model")
            .lstrip(": ")
        )
        raise ValueError(
            f"checkpoint {folder} is not one of this model ({cause[:300]}); continue with the "
            f"model that it was saved "
            "from (actor.path, or the path of its role), or start over with recover_mode=disabled"
        ) from None


def _count_predictions(sample: SequenceSample) -> int:
    """Return the sum of L-1 over the sequences of a batch. Raises ValueError for an empty
    sequence."""
    lengths = np.asarray(sample.lengths("packed_input_ids").values)
    if (lengths < 1).any():
        raise ValueError("packed_input_ids has an empty sequence")
    return int((lengths - 1).sum())


def _disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability in a model's modules to 0, under whatever attribute name."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in [
            name
            for name, value in vars(module).items()
            if "drop" in name and isinstance(value, float)
        ]:
            setattr(module, name, 0.0)


@contextlib.contextmanager
def _disable_config_dropout(config: Any) -> Iterator[None]:
    """Context manager that sets the dropout probabilities in the configuration to 0.

    Some models read them in every pass. They are restored afterwards, because the exported
    configuration must have them.
    """
    configs = {id(c): c for c in (config, config.get_text_config())}.values()
    probabilities = [
        (c, name, value) for c in configs for name, value in vars(c).items() if "drop" in name
    ]
    probabilities = [
        (c, name, value) for c, name, value in probabilities if isinstance(value, float)
    ]
    try:
        for c, name, _ in probabilities:
            setattr(c, name, 0.0)
        yield
    finally:
        for c, name, value in probabilities:
            setattr(c, name, value)
