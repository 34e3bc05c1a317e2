"""Interfaces of what a model worker runs: engines, algorithms and their call context.

Vocabulary: an *engine* holds the weights of one model role on one worker and can train, score and
generate; an *interface* is the algorithm of one model function call, written against the engine; a
*backend* builds engines. torch is not imported at module level, because the launcher uses these
types too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.api.tool_parser import AUTO
from realhf.api.trace import NO_RECORDER, RolloutRecorder

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.api.config import GenConfig
    from realhf.api.experiment import ModelSpec


@dataclass(frozen=True)
class GenRequest:
    """A request to continue one sequence."""

    slot: int
    """Cache row that may hold the keys and values of a prefix; the engine reuses what matches and
    computes the rest."""
    token_ids: Sequence[int]
    """The whole prefix."""
    sampled: int = 0
    """Number of tokens at the end of the prefix that belong to the same turn, which continues after
    an interruption; they count towards its minimum and maximum length."""
    seed: int | None = None
    """Seed of the sequence's own random stream: its tokens depend on the seed and their positions,
    not on the other sequences of the batch. None: no own stream."""
    min_version: int = -1
    """Minimum policy version of the weights with which a generation worker samples."""
    pinned_version: int = -1
    """Exact policy version to sample with, which the worker keeps for an evaluation; -1: none."""
    greedy: bool = False
    """With a pinned version: sample greedily instead of as in training."""


@dataclass(frozen=True)
class GenOutput:
    """What the engine sampled after the prefix of one request."""

    token_ids: list[int]
    """Sampled tokens, including the stop id that ended them, if any."""
    logprobs: list[float]
    """Log-probability of each token (natural log, fp32) under the temperature-scaled distribution
    that was sampled from."""
    versions: list[int]
    """Policy version that sampled each token."""
    finish_reason: str
    """``stop``, ``length`` or ``interrupted`` (the turn is to be continued)."""


class GenerationEngine(Protocol):
    """A generator of token sequences that keeps KV-cache rows between calls until their slot is
    freed."""

    @property
    def context_limit(self) -> int:
        """Maximum number of tokens of a sequence, prefix included."""
        ...

    def generate(
        self,
        requests: Sequence[GenRequest],
        config: GenConfig,
        *,
        stop_ids: Sequence[int],
        seed: int,
    ) -> list[GenOutput]:
        """Continue all requests as a batch. The same seed, requests and weights give the same
        tokens.

        ``config.temperature == 0`` decodes greedily. Raises ValueError for a request without
        tokens.
        """
        ...

    def free(self, slots: Sequence[int] | None = None) -> None:
        """Free the cache rows of these slots (all if None).

        Called at the end of an episode, and by the training engine after a weight update.
        """
        ...


class ForwardOutputs(Protocol):
    """Results of a forward pass at the m positions of a micro-batch whose predictions are needed.

    These are the positions where ``loss_mask`` includes the predicted token, or all if the sample
    has no mask. Every tensor that a method returns is fp32 and packed, L-1 entries for each
    sequence of the micro-batch, and 0 at other positions.
    """

    def logprobs(
        self, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities of the sample's own tokens (natural log, logits divided by
        ``temperature``), and the entropies of their distributions, or None.

        Raises ValueError for a temperature that is not positive, and for a model without a
        language-model head.
        """
        ...

    def values(self) -> Tensor:
        """Return the value head's estimate for the state from which each token was sampled.

        Raises ValueError for a model without a value head.
        """
        ...

    def logprobs_of(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of other ``tokens``, i64 (n, K), at the positions of the
        sample's own tokens, as fp32 (n, K), packed L-1."""
        ...

    def keep(self, name: str, values: Tensor) -> None:
        """Keep a packed L-1 tensor for ``TrainResult.kept``, which contains it for the whole batch,
        fp32 on the CPU."""
        ...

    @property
    def hidden(self) -> Tensor:
        """The last hidden states, (m, width), in the model's dtype."""
        ...

    @property
    def place(self) -> Tensor:
        """Index of each position in the packed L-1 layout, i64 (m,)."""
        ...

    @property
    def target(self) -> Tensor:
        """The token that follows each position, i64 (m,)."""
        ...

    @property
    def head(self) -> Tensor | None:
        """The weight of the output projection, (vocabulary, width); None if the head is more than a
        matrix product."""
        ...


LossFn = Callable[[ForwardOutputs, SequenceSample], "tuple[Tensor, dict[str, float]]"]
"""(outputs of the forward pass of one micro-batch, the micro-batch) -> (loss, statistics).

A micro-batch contains some sequences of the batch, regardless of groups, so quantities of a group
or of the whole batch must be computed before and passed as keys. Losses and statistics are summed
over micro-batches; a statistic whose name ends in ``_max`` takes the maximum.
"""

PostFn = Callable[[ForwardOutputs, SequenceSample], "Tensor"]
"""(outputs of the forward pass of one micro-batch, the micro-batch) -> fp32, packed L-1 per
sequence."""


POSITIONS = "positions"
"""Statistic of a train step: number of positions that went through the model, padding included,
with each common prefix of a row counted once."""


@dataclass(frozen=True)
class TrainResult:
    """Result of one optimizer step."""

    stats: dict[str, float]
    """Statistics of the loss, and ``POSITIONS`` if the engine counts them."""
    grad_norm: float
    """Norm of the gradient."""
    skipped: bool
    """Whether the update was skipped because loss or gradient was not finite."""
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the loss kept (``ForwardOutputs.keep``), packed L-1 per sequence of the
    batch."""


class Engine(Protocol):
    """The weights of one model role, with training and inference.

    It raises an error for an invalid batch and never silently trains on less.

    A role may have several workers, its ranks. Each of them gets the whole batch and returns the
    whole result, which is the same on all ranks; the engine decides what each rank computes, so
    algorithms do not depend on ranks.

    ``version`` is the policy version: the number of committed train steps, which the learning rate
    follows. Only the model host sets it, before and after the calls of a step. Setting it frees all
    rows of the generation engine.

    Optional methods: ``use_threads(threads: ComputeThreads)`` makes the engine compute with these
    threads (``realhf.backends``); ``release_generation()`` frees the memory of the generation
    engine's rows. The model host calls the latter on every engine of the worker before an inference
    or train call.
    """

    version: int

    def train_batch(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        *,
        mb_spec: MicroBatchSpec,
        normaliser: float = 1.0,
    ) -> TrainResult:
        """Make one optimizer step on ``sample``, with the gradient of the sum of losses divided by
        ``normaliser``.

        Micro-batches are cut by sequence; the backward pass of each one follows its loss
        immediately. Losses are summed over micro-batches, so ``loss_fn`` or ``normaliser`` must
        divide by totals of the whole batch. If the loss or the gradient norm is not finite, weights
        and optimizer state stay unchanged. Frees the memory of the generation engine's rows first.
        Raises ValueError for a normaliser that is not positive.
        """
        ...

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """Return the results of ``post_fn`` for all micro-batches, joined: fp32, packed L-1 for
        each sequence of the sample, without gradient, on the CPU.

        Raises ValueError if ``post_fn`` returns another shape.
        """
        ...

    def logprobs(
        self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """Return the shifted log-probabilities of the sample's own tokens, fp32 (sum of L-1,),
        without gradient.

        They are 0 where ``loss_mask``, if present, excludes the predicted token. ``logprobs_by``
        implements this by ``forward``.
        """
        ...

    def generator(self) -> GenerationEngine:
        """Return the generation engine that shares this engine's weights."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers by name, with tied ones once.

        They are views, which the next train step changes.
        """
        ...

    def save_checkpoint(self, folder: Path) -> list[Path] | None:
        """Write weights, optimizer state and version into ``folder``, so that training can resume
        exactly.

        Returns the files that this worker wrote; None means all files in the folder. Ranks of a
        role share the folder.
        """
        ...

    def load_checkpoint(self, folder: Path) -> None:
        """Restore the state that ``save_checkpoint`` wrote."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Write weights, config and tokenizer in the format of
        ``AutoModelForCausalLM.from_pretrained``."""
        ...


class Forwards(Protocol):
    """The part of an engine that computes without training."""

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.forward``."""
        ...


def logprobs_by(
    engine: Forwards, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
) -> Tensor:
    """Return ``Engine.logprobs``, computed by the engine's ``forward``.

    Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return engine.forward(
        sample, lambda outputs, _: outputs.logprobs(temperature=temperature)[0], mb_spec=mb_spec
    )


class Backend(Protocol):
    """A builder of engines. Constructor arguments come from ``ModelSpec.backend_args``."""

    def build(self, spec: ModelSpec, *, seed: int, total_train_steps: int) -> Engine:
        """Build the engine of one role.

        seed: for random weights and random numbers. total_train_steps: length of the learning-rate
        schedule.
        """
        ...


@dataclass
class Model:
    """One model role as an interface sees it."""

    role: str
    """Name of the role."""
    engine: Engine
    """Engine with the role's weights."""
    tokenizer: Any
    """Hugging Face tokenizer."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for rendering conversations by the chat template."""
    tool_parser: str = AUTO
    """Syntax of tool calls; "auto": that of the chat template."""


@dataclass
class EpisodeCount:
    """Number of episodes of a call that plays. Other threads read it during the call."""

    finished: int = 0
    """Finished episodes."""
    total: int = 0
    """All episodes."""


@dataclass(frozen=True)
class CallContext:
    """Everything about a call that is not in the sample."""

    step: int
    """Train step."""
    seed: int
    """Seed derived from the run's seed, the role and the step."""
    mb_spec: MicroBatchSpec
    """How to cut the sample into micro-batches."""
    run_dir: Path
    """Folder of the run."""
    endpoints: dict[str, list[str]] = field(default_factory=dict)
    """Addresses by kind of worker (``{"env": ["http://127.0.0.1:8100"]}``). A token that a service
    requires precedes the host (``http://:TOKEN@...``)."""
    recorder: RolloutRecorder = NO_RECORDER
    """Recorder of played and trained rollouts."""
    progress: EpisodeCount = field(default_factory=EpisodeCount)
    """Count of episodes that a playing interface updates, for the display of the run."""


MEANS_OVER = "means_over"
"""Key of the statistics that gives the number of values behind a mean, see ``ModelInterface``."""


class ModelInterface(Protocol):
    """The algorithm of a model function call, built with ``MFCDef.interface_args``.

    Any of ``generate``, ``inference``, ``train_step`` and ``evaluate`` may be present.

    ``generate`` and ``inference``: (model, sample, context) -> SequenceSample of new keys with the
    same ids in the same order, or ``(sample, stats)`` with a dict of statistics. ``train_step`` and
    ``evaluate``: (model, sample, context) -> stats. Inputs are never mutated. ``stats[MEANS_OVER]``
    is {name: number of values} of means that are not over the samples of the call.

    Optional methods: ``state_dict()`` returns all state that a resumed run needs, as JSON values,
    for the checkpoint; ``load_state_dict(state)`` restores it; ``committed()`` is called when the
    checkpoint with the last ``state_dict`` is complete; ``close()`` releases resources.
    """
