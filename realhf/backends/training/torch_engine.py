"""Implements the single-process engine: one transformers model that trains, scores and generates."""

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
from realhf.backends.embedded.compute_threads import ComputeThreads, unmanaged
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.embedded.kernels import use_few_pass_norms, use_onednn
from realhf.backends.embedded.memory import Heap, cache_bytes, named_shortage, named_update_shortage, shortage
from realhf.backends.embedded.weight_copy import named_weights
from realhf.backends.training.checkpoint import is_checkpoint, load_state, save_state
from realhf.backends.training.lora import ADAPTER, BaseEngine, LoraAdapters
from realhf.backends.training.micro_batches import Part, Ranks, StepAccount, parts_of
from realhf.backends.training.optimizer import PolicyOptimizer
from realhf.backends.training.packed_forward import PackedForward
from realhf.base.text import first_line


def blocks_of(model: Any) -> list[Any]:
    """Return the blocks of a model (transformers); none if it does not say which they are."""
    kinds = {*(getattr(model.get_decoder(), "_no_split_modules", None) or ())}
    return [module for module in model.modules() if type(module).__name__ in kinds]


class CompiledBlocks:
    """Holds compiled forms of the blocks of ``model`` (transformers). They are used inside ``on`` only, so that
    generation from cached keys and values, which has other shapes at every token, stays as it is. Shapes are dynamic:
    one form serves micro-batches of every size. Raises ValueError where there are no blocks, or no compiler for the
    device. ``role`` is for errors."""

    def __init__(self, model: Any, role: str) -> None:
        self._option = f"{role}.compile=true"
        self._blocks = blocks_of(model)
        if not self._blocks:
            raise ValueError(f"{self._option}: {type(model).__name__} does not say which of its modules are blocks")
        if problem := _missing_compiler(model.device):
            raise ValueError(f"{self._option}: {problem}; install one, or set false")
        self._compiled: list[Callable[..., Any]] = [
            torch.compile(block._call_impl, dynamic=True) for block in self._blocks
        ]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Run the compiled forms inside; the first pass of a kind compiles. Raises RuntimeError that names the option
        where that fails."""
        for block, compiled in zip(self._blocks, self._compiled, strict=True):
            block._compiled_call_impl = compiled
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise RuntimeError(f"{self._option}: the blocks do not compile ({first_line(error)}); set false") from error
        finally:
            for block in self._blocks:
                block._compiled_call_impl = None


def _missing_compiler(device: torch.device) -> str:
    """Return what torch.compile lacks for this device, or ""."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        if not has_triton():
            return "torch.compile needs triton on a GPU, which is not here"
        return "" if shutil.which("gcc") or shutil.which("clang") else "triton needs a C compiler, which is not here"
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError, RuntimeError) as error:
        return f"torch.compile needs a C++ compiler on the CPU, which is not here ({first_line(error)})"
    return ""


class TorchEngine:
    """Implements ``Engine`` around ``model``: a transformers causal language model, or a decoder with a ``value_head``
    (a linear layer of one output, with ``get_decoder``, ``device`` and ``config`` as transformers has them), which does
    not generate. ``kv_cache_gib`` bounds what generation keeps of keys and values. Without ``optimizer`` the weights
    are frozen. Dropout is switched off, because the policy that is scored must be the one that sampled. ``ranks`` joins
    it with the engines of the role's other workers. With ``lora`` only adapters train (``role`` and ``path`` are for
    their errors and files), on the language-model head, too, if it is a target and with ``adapts_head``; generation,
    publication and export have the model with its adapters merged."""

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
        self._named = role
        _disable_dropout(model)
        model.eval()
        self.adapters: LoraAdapters | None = None
        self._checkpointing, self._compiles = gradient_checkpointing and optimizer is not None, compile
        self._forward = self._tried_out(lora, path, adapts_head)
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
        generating = model if self.adapters is None else self.adapters.skeleton
        self._generator = self._made_generator(generating, ready=self._whole_model) if generates else None
        self._threads = unmanaged()

    @property
    def ranks(self) -> Ranks:
        """The workers that train this model together."""
        return self._ranks

    def base(self) -> BaseEngine:
        """Return an engine of the frozen base, which is this one with its adapters off. Raises RuntimeError without
        adapters."""
        if self.adapters is None:
            raise RuntimeError("this model role has no adapters: all its weights train")
        return BaseEngine(self, self.adapters, self.tokenizer)

    def _tried_out(self, lora: LoraConfig | None, path: str, adapts_head: bool) -> PackedForward:
        """Make the forward pass, which tries the model out, with the weights where they train and with its adapters;
        before there is an optimizer. Raises ValueError where it cannot have adapters."""
        if not self._compiles:  # Inductor asserts that oneDNN's product gets a constant for its weight.
            use_onednn(self.model)
        use_few_pass_norms(self.model)
        if lora is not None:
            if self.model.get_output_embeddings() is None:
                raise ValueError(
                    f"{self._named}.lora.rank={lora.rank}: a model without a language-model head has no adapters"
                )
            self.adapters = LoraAdapters(self.model, lora, role=self._named, path=path, head=adapts_head)
            use_onednn(self.model)
        return PackedForward(self.model, pieces=not self._checkpointing and not self._compiles)

    def use_threads(self, threads: ComputeThreads) -> None:
        """Let ``threads`` compute here from now on. All engines of one thread share them."""
        self._threads = threads
        if self._generator is not None:
            self._generator.threads = threads
        self._forward.pace = threads.pace

    @property
    def version(self) -> int:
        """Number of committed train steps. Setting it frees the generation engine's rows."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self._generator is not None:
            self._generator.free()

    def release_generation(self) -> None:
        """Give the memory of the generation engine's keys and values back, and that of merged weights, until it
        generates again."""
        if self._generator is not None:
            self._generator.release()
        if self.adapters is not None:
            self.adapters.changed()

    def generator(self) -> EmbeddedGenerator:
        """The generation engine over the same model. Raises ValueError on a model with a value head."""
        if self._generator is None:
            raise ValueError("a model with a value head does not generate")
        return self._generator

    def _made_generator(self, model: Any, ready: Callable[[], object] = lambda: None) -> EmbeddedGenerator:
        """Make a generation engine over ``model``, which shares the device with training."""
        most = lambda: cache_bytes(self._kv_cache_gib, model.device, shared=True)
        return EmbeddedGenerator(model, version=lambda: self._version, ready=ready, most_bytes=most)

    def _whole_model(self) -> Any:
        """Return the model as others see it: with merged weights where it has adapters."""
        return self.model if self.adapters is None else self.adapters.merged()

    def train_batch(
        self, sample: SequenceSample, loss_fn: LossFn, *, mb_spec: MicroBatchSpec, normaliser: float = 1.0
    ) -> TrainResult:
        """See ``Engine.train_batch``. Stats: sums of what ``loss_fn`` returned, ``loss``, ``lr`` and ``POSITIONS``. A
        batch without any trainable position changes nothing. Raises RuntimeError on a frozen engine."""
        optimizer = self._own_optimizer("train_batch")
        if not 0 < normaliser < math.inf:
            raise ValueError(f"train_batch: the normaliser must be positive, got {normaliser}")
        optimizer.zero_grad()
        stats, backward, kept = self._accumulated(sample, loss_fn, mb_spec, normaliser, optimizer)
        self._heap.give_back()
        norm = optimizer.gradient_norm() if math.isfinite(stats["loss"]) else math.nan
        self._ranks.settle()  # Sums that were broken off are no reason to step, nor to skip.
        if not math.isfinite(norm):
            optimizer.zero_grad()
            return TrainResult(stats, norm, skipped=True, kept=kept)
        if backward:
            stats["lr"] = self._update(optimizer, norm)
        optimizer.zero_grad()
        return TrainResult(stats, norm, skipped=False, kept=kept)

    def accumulate(self, sample: SequenceSample, loss_fn: LossFn, *, mb_spec: MicroBatchSpec) -> TrainResult:
        """Add the gradient of the sum of losses on ``sample`` to those that wait for ``step``; the norm is that of all
        of them. Where loss or norm are no finite numbers, and where this raises, the gradients stay what they were.
        Stats as of ``train_batch``, without ``lr``. The memory of passes is kept for the next call. Raises RuntimeError
        on a frozen engine, or one of several ranks."""
        optimizer = self._own_optimizer("accumulate")
        if self._ranks.size > 1:
            raise RuntimeError("accumulate: gradients of several ranks are added up once a step, in train_batch")
        before = optimizer.copied_gradients()
        skipped = True
        try:
            stats, _, kept = self._accumulated(sample, loss_fn, mb_spec, 1.0, optimizer)
            norm = optimizer.gradient_norm() if math.isfinite(stats["loss"]) else math.nan
            skipped = not math.isfinite(norm)
        finally:
            if skipped:
                optimizer.restore_gradients(before)
        return TrainResult(stats, norm, skipped=skipped, kept=kept)

    def step(self, options: OptimizerConfig) -> TrainResult:
        """Make one optimizer step by the gradients that were accumulated, with these options in place of earlier ones,
        and drop them; ``version`` is one more then. A norm that is no finite number changes nothing. Weights without a
        gradient stay as they are, as in ``torch.optim.AdamW``."""
        optimizer = self._own_optimizer("step")
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
        """Drop what was accumulated."""
        self._own_optimizer("forget_gradients").zero_grad()

    def forget_moments(self) -> None:
        """Begin anew with the optimizer, as one that has made no step."""
        self._own_optimizer("forget_moments").begin_moments(())

    def _own_optimizer(self, wanted: str) -> PolicyOptimizer:
        if self._optimizer is None:
            raise RuntimeError(f"{wanted}: this model role was built without an optimizer")
        return self._optimizer

    def _accumulated(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        spec: MicroBatchSpec,
        normaliser: float,
        optimizer: PolicyOptimizer,
    ) -> tuple[dict[str, float], bool, dict[str, Tensor]]:
        """Add up gradients, of all ranks; return statistics, whether there was a gradient, and what the loss kept."""
        self.release_generation()  # Its memory is wanted here, and the weights that filled it will change.
        with self._training(), self._threads.computing():
            account = self._passes(sample, loss_fn, spec, normaliser, optimizer.accumulate)
            summed = account.summed(self._ranks)
            self._ranks.sum_gradients(optimizer.masters)
        return summed

    def _update(self, optimizer: PolicyOptimizer, norm: float) -> float:
        """Step by gradients of this norm; return the learning rate."""
        adapters = self.adapters is None and self._forward.heads.value is None
        offload = self.model.device.type == "cuda" and not (optimizer.offloads or self._ranks.in_step)
        with named_update_shortage(optimizer.masters, self._named, adapters=adapters, offload=offload):
            return optimizer.step(self._version, norm)

    def _passes(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        spec: MicroBatchSpec,
        normaliser: float,
        accumulate: Callable[[], None],
    ) -> StepAccount:
        """Go forward and backward through the micro-batches of this rank; ``accumulate`` takes the gradient of each."""
        account = StepAccount(_shifted_size(sample))
        parts = self._parts(sample, spec)
        others = self._passes_of_others(parts)

        def loss_of(part: Part) -> Tensor:
            outputs = self._forward(part.sample, part.rows)
            self._threads.pace()
            loss, stats = loss_fn(outputs, part.sample)
            loss = loss / normaliser if normaliser != 1.0 else loss
            account.add(part, float(loss.detach()), {**stats, POSITIONS: float(part.positions)}, outputs.kept)
            return loss

        for part in parts:
            with named_shortage(part.positions, len(part.rows), spec.max_tokens_per_mb):
                loss = self._within(part.empty, lambda part=part: loss_of(part))
                if loss.requires_grad:
                    loss.backward()
                    accumulate()
                    account.backward = True
            self._heap.passed(part.positions)
        for _ in range(others):
            self._within(False, self._forward.nothing).backward()
            accumulate()
        return account

    def _parts(self, sample: SequenceSample, spec: MicroBatchSpec) -> list[Part]:
        self._check_tokens(sample)
        forward, most = self._forward, self._forward.row_tokens
        return parts_of(sample, spec, self._ranks, share=forward.shares, packed=forward.packs, row_tokens=most)

    def _check_tokens(self, sample: SequenceSample) -> None:
        """Raise ValueError on a token that the model does not have: on a GPU it would take the process with it."""
        size = int(self.model.config.get_text_config().vocab_size)
        ids = sample["packed_input_ids"]
        strange = (ids < 0) | (ids >= size)
        if not bool(strange.any()):
            return
        place = int(strange.nonzero()[0])
        at = int(np.searchsorted(sample.lengths("packed_input_ids").rows(), place, side="right")) - 1
        raise ValueError(
            f"packed_input_ids of sample {sample.ids[at]!r} has the token {int(ids[place])}, and {self._named} has the "
            f"tokens 0 to {size - 1}: it was made with another tokenizer"
        )

    def _within(self, empty: bool, run: Callable[[], Tensor]) -> Tensor:
        """Run a pass where the weights are whole; ``empty`` ones compute nothing with them."""
        del empty
        return run()

    def _passes_of_others(self, parts: list[Part]) -> int:
        """Return in how many passes this rank has to take part after its own. Asked before the first of them: a rank
        that is through would wait for an answer, and the others for its part in theirs."""
        if not self._ranks.in_step:
            return 0
        own = sum(not part.empty for part in parts)
        return max(told["passes"] for told in self._ranks.gather({"passes": own})) - own

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        # Layers recompute activations only in training mode; dropout is off in either.
        self.model.train(self._checkpointing)
        if self.adapters is not None:
            self.adapters.training(True)
        try:
            with _without_dropout(self.model.config), self._compiled():
                yield
        finally:
            self.model.eval()

    def _compiled(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._blocks is None else self._blocks.on()

    def _without_gradient(self) -> contextlib.AbstractContextManager[Any]:
        return torch.inference_mode()

    def forward(self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec) -> Tensor:
        """See ``Engine.forward``."""
        result = torch.zeros(_shifted_size(sample))

        def found_in(part: Part) -> Tensor:
            return post_fn(self._forward(part.sample, part.rows), part.sample)

        with self._without_gradient(), self._compiled(), self._threads.computing():
            parts = self._parts(sample, mb_spec)
            others = self._passes_of_others(parts)
            for part in parts:
                with named_shortage(part.positions, len(part.rows), mb_spec.max_tokens_per_mb):
                    found = self._within(part.empty, lambda part=part: found_in(part))
                self._heap.passed(part.positions)
                if found.shape != part.place.shape:
                    raise ValueError(f"forward: post_fn returned {tuple(found.shape)}, not {tuple(part.place.shape)}")
                result[part.place] = found.float().cpu()
            for _ in range(others):
                self._within(False, self._forward.nothing)
        self._heap.give_back()
        self._ranks.sum_(result)
        return result

    def logprobs(self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec) -> Tensor:
        """See ``Engine.logprobs``. ``mb_spec`` bounds memory; it changes values by rounding at most."""
        return logprobs_by(self, sample, temperature=temperature, mb_spec=mb_spec)

    def weights(self) -> dict[str, Tensor]:
        """See ``Engine.weights``."""
        return named_weights(self._whole_model())

    def stored_weights(self) -> dict[str, Tensor]:
        """Return what ``load_checkpoint`` restores to the bit: the weights, or base weights and adapters."""
        return self.weights() if self.adapters is None else named_weights(self.model)

    @property
    def _keeps_weights(self) -> bool:
        """Whether a checkpoint has the weights of the model: a frozen one, and the base of adapters, is read from
        ``path`` of the role."""
        return self._optimizer is not None and self.adapters is None

    def save_checkpoint(self, folder: Path) -> list[Path] | None:
        """Write what training needs to continue bit-identically into ``folder`` (made if missing)."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapters is not None:
            self.adapters.save(folder / ADAPTER)
        save_state(folder, self.model, self._optimizer, self._version, weights=self._keeps_weights)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what ``save_checkpoint`` wrote, here or on several ranks. Raises FileNotFoundError or ValueError
        naming the folder."""
        self._load(folder)

    def _load(self, folder: Path, group: Any = None) -> None:
        if (folder / "engine.pt").is_file():
            raise ValueError(
                f"checkpoint {folder} was written by an earlier version, in a format that this one does not read: go "
                "on with that version, or begin anew with recover_mode=disabled, or from a policy that it exported "
                "(actor.path, or the path of its role)"
            )
        self._check_adapters(folder)
        if not is_checkpoint(folder):
            raise FileNotFoundError(f"no engine checkpoint in {folder}")
        if self.adapters is not None:
            self.adapters.load(folder / ADAPTER)
        with of_this_model(folder):
            weights = self._keeps_weights
            self.version = load_state(folder, self.model, self._optimizer, weights=weights, group=group)

    def _check_adapters(self, folder: Path) -> None:
        """Raise ValueError where one of model and checkpoint has adapters and the other has not."""
        saved = (folder / ADAPTER).is_dir()
        if folder.is_dir() and saved != (self.adapters is not None):
            was, now = ("adapters", "all weights") if saved else ("all weights", "adapters")
            raise ValueError(
                f"checkpoint {folder}: {was} trained there and {now} train here; continue with the same "
                "actor.lora.rank, or begin anew with recover_mode=disabled"
            )

    def export_hf(self, folder: Path) -> None:
        """Write model, config and tokenizer for ``from_pretrained``. Adapters are merged, and lie beside in ``adapter``
        as peft has them."""
        self._whole_model().save_pretrained(folder)
        if self.adapters is not None:
            self.adapters.save(folder / ADAPTER)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def of_this_model(folder: Path) -> Iterator[None]:
    """Say in one line that a checkpoint does not fit the model. What has other causes, a lost rank or a want of memory,
    stays what it is."""
    try:
        yield
    except (KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, CollectiveBroken) or shortage(error) is not None:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if not line.startswith("Error(s) in loading")), type(error).__name__)
        said = said.removeprefix(f"checkpoint {folder}").removeprefix(" is of another model").lstrip(": ")
        raise ValueError(
            f"checkpoint {folder} is not one of this model ({said[:300]}); continue with the model that it was saved "
            "from (actor.path, or the path of its role), or begin anew with recover_mode=disabled"
        ) from None


def _shifted_size(sample: SequenceSample) -> int:
    """Return the sum of L-1 over the sequences of a batch."""
    lengths = np.asarray(sample.lengths("packed_input_ids").values)
    if (lengths < 1).any():
        raise ValueError("packed_input_ids has an empty sequence")
    return int((lengths - 1).sum())


def _disable_dropout(model: nn.Module) -> None:
    """Make every probability of dropout 0 that a module holds, under whatever name."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)


@contextlib.contextmanager
def _without_dropout(config: Any) -> Iterator[None]:
    """Some models read their probabilities from the configuration at every pass. The exported one must keep them."""
    configs = {id(c): c for c in (config, config.get_text_config())}.values()
    held = [(c, name, value) for c in configs for name, value in vars(c).items() if "drop" in name]
    held = [(c, name, value) for c, name, value in held if isinstance(value, float)]
    try:
        for c, name, _ in held:
            setattr(c, name, 0.0)
        yield
    finally:
        for c, name, value in held:
            setattr(c, name, value)
