"""Interfaces of the objects that a model worker uses: engines, backends, algorithms, and the
context of their calls.

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
    """Number of the cache row, which may contain keys and values of a part of the prefix. The
    engine reuses the matching part and computes the rest."""
    token_ids: Sequence[int]
    """Token ids of the whole prefix."""
    sampled: int = 0
    """If the request continues an interrupted turn: number of tokens at the end of the prefix that
    belong to that turn. They count towards its minimum and maximum length."""
    seed: int | None = None
    """Seed of the sequence's own random stream, so that its tokens depend only on the seed and
    their positions, not on other sequences of the batch. None if it has no own stream."""
    min_version: int = -1
    """Minimum policy version with which a generation worker may sample."""
    pinned_version: int = -1
    """Exact policy version to sample with, which the worker has pinned for an evaluation; -1 for
    none."""
    greedy: bool = False
    """Whether to decode greedily instead of sampling as in training; only with a pinned version."""
    max_new_tokens: int = 0
    """Maximum number of tokens of the turn, if that is lower than ``gen.max_new_tokens``; 0 for
    no limit of its own."""
    grammar: str = ""
    """Grammar of the turn, in the Lark syntax of llguidance: the engine masks all tokens with which
    the turn would leave it. "" for a turn that is sampled freely."""

    def limit_turn(self, max_new_tokens: int) -> int:
        """Return how many more tokens the turn may have in a run that allows ``max_new_tokens``."""
        return min(max_new_tokens, self.max_new_tokens or max_new_tokens) - self.sampled


@dataclass(frozen=True)
class GenOutput:
    """Tokens that an engine has sampled for one request."""

    token_ids: list[int]
    """Sampled tokens, including the stop id that ended them, if any."""
    logprobs: list[float]
    """Log-probability of each token (natural log, fp32) under the temperature-scaled distribution
    that was sampled from, which is that under the mask of a ``grammar``."""
    versions: list[int]
    """Policy version that sampled each token."""
    finish_reason: str
    """``stop``, ``length`` or ``interrupted`` (the turn must be continued)."""
    unmasked_logprobs: list[float] | None = None
    """For a request with a ``grammar``: log-probability of each token under the model's own
    distribution, without the mask. None otherwise: they equal ``logprobs``."""
    mask_failed: bool = False
    """Whether the turn ended because the mask of its ``grammar`` failed, for example at a limit of
    llguidance."""


class GenerationEngine(Protocol):
    """A generator of token sequences. It keeps KV-cache rows between calls until their slot is
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

        Callers are the player, at the end of an episode, and the training engine, after a weight
        update.
        """
        ...


class ForwardOutputs(Protocol):
    """Results of a forward pass at the m positions of a micro-batch at which predictions are
    needed.

    These are the positions where ``loss_mask`` includes the predicted token, or all positions if
    the sample has no mask. Unless stated otherwise, methods return fp32 tensors packed with L-1
    entries for each sequence of the micro-batch, with 0 at other positions.
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
        """Return the log-probabilities of K alternative tokens at each position. ``tokens`` is i64
        (n, K) and the result fp32 (n, K), both packed L-1."""
        ...

    def most_likely(self) -> Tensor:
        """Return the token with the highest logit at each of the m positions, i64 (m,), without
        gradients. Raises ValueError for a model without a language-model head."""
        ...

    def keep(self, name: str, values: Tensor) -> None:
        """Keep a packed L-1 tensor under ``name``. ``TrainResult.kept`` will contain it for the
        whole batch, as fp32 on the CPU."""
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
        """The weight of the output projection, (vocabulary, width); None if the head computes more
        than a matrix product."""
        ...


LossFn = Callable[[ForwardOutputs, SequenceSample], "tuple[Tensor, dict[str, float]]"]
"""(outputs of the forward pass of one micro-batch, the micro-batch) -> (loss, statistics).

Micro-batches may split groups, so quantities of a group or of the whole batch must be computed
beforehand and passed as keys. Losses and statistics are summed over micro-batches, except for
statistics whose name ends in ``_max``, of which the maximum is taken.
"""

PostFn = Callable[[ForwardOutputs, SequenceSample], "Tensor"]
"""(outputs of the forward pass of one micro-batch, the micro-batch) -> fp32, packed L-1 per
sequence."""


POSITIONS = "positions"
"""Name of a train-step statistic: number of positions computed by the model, including padding. A
prefix that several sequences of a row share counts once."""


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
    """Tensors that the loss has kept (``ForwardOutputs.keep``), packed with L-1 entries per
    sequence of the batch."""


class Engine(Protocol):
    """Interface of an engine, which holds the weights of one model role and does training and
    inference with them.

    It raises an error for an invalid batch and never silently trains on less.

    A role may have several workers, its ranks. Each rank gets the whole batch and returns the same
    whole result. The engine decides what each rank computes, so algorithms do not depend on ranks.

    ``version`` is the policy version, which is the number of committed train steps; the learning
    rate depends on it. Only the model host sets it, before and after the calls of a step. Setting
    it frees all cache rows of the generation engine.

    Optional methods: ``use_threads(threads: ComputeThreads)`` makes the engine compute with these
    threads (``realhf.backends``); ``release_generation()`` frees the memory of the generation
    engine's rows, and weights that were gathered and have been used. The model host calls the
    latter on every engine of the worker before an inference or train call.
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
        """Make one optimizer step on ``sample`` with the gradient of (sum of losses /
        ``normaliser``).

        The batch is split into micro-batches of whole sequences, and each one's backward pass
        directly follows its loss. Losses are summed over micro-batches, so ``loss_fn`` or
        ``normaliser`` must divide by totals of the whole batch. If the loss or the gradient norm is
        not finite, weights and optimizer state stay unchanged. The memory of the generation
        engine's rows is freed first. Raises ValueError for a normaliser that is not positive.
        """
        ...

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """Return the concatenated results of ``post_fn`` for all micro-batches: fp32 on the CPU,
        packed with L-1 entries for each sequence of the sample, without gradients.

        Raises ValueError if ``post_fn`` returns another shape.
        """
        ...

    def logprobs(
        self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """Return the shifted log-probabilities of the sample's own tokens, fp32 (sum of L-1,),
        without gradients.

        They are 0 where ``loss_mask``, if present, excludes the predicted token. ``logprobs_by``
        implements this method with ``forward``.
        """
        ...

    def generator(self) -> GenerationEngine:
        """Return the generation engine that shares this engine's weights."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers by name. Tied ones appear once.

        The tensors are views, which the next train step changes.
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
        """Restore the state that ``save_checkpoint`` has written."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Write weights, config and tokenizer so that ``AutoModelForCausalLM.from_pretrained`` can
        load them."""
        ...


class Forwards(Protocol):
    """The part of an engine's interface that ``logprobs_by`` needs."""

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.forward``."""
        ...


def logprobs_by(
    engine: Forwards, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
) -> Tensor:
    """Return the result of ``Engine.logprobs``, computed with the engine's ``forward``.

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

        seed: seed for random weights and random numbers. total_train_steps: length of the
        learning-rate schedule.
        """
        ...


@dataclass
class Model:
    """A model role, as it is passed to interfaces."""

    role: str
    """Name of the role."""
    engine: Engine
    """Engine with the role's weights."""
    tokenizer: Any
    """Hugging Face tokenizer."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    tool_parser: str = AUTO
    """Syntax of tool calls; "auto" detects it from the chat template."""


@dataclass
class EpisodeCount:
    """Progress of a call that plays episodes. Other threads read it during the call."""

    finished: int = 0
    """Finished episodes."""
    total: int = 0
    """All episodes."""


@dataclass(frozen=True)
class CallContext:
    """Context of a call: everything that is not in the sample."""

    step: int
    """Train step."""
    seed: int
    """Seed derived from the run's seed, the role and the step."""
    mb_spec: MicroBatchSpec
    """How to split the sample into micro-batches."""
    run_dir: Path
    """Folder of the run."""
    endpoints: dict[str, list[str]] = field(default_factory=dict)
    """Addresses by kind of worker (``{"env": ["http://127.0.0.1:8100"]}``). A token that a service
    requires precedes the host (``http://:TOKEN@...``)."""
    recorder: RolloutRecorder = NO_RECORDER
    """Recorder of played and trained rollouts."""
    progress: EpisodeCount = field(default_factory=EpisodeCount)
    """Episode count for the run's display, which an interface updates while it plays."""


MEANS_OVER = "means_over"
"""Key of the statistics under which an interface reports the number of values behind each mean; see
``ModelInterface``."""


class ModelInterface(Protocol):
    """The algorithm of a model function call, built with ``MFCDef.interface_args``.

    It has one or more of the methods ``generate``, ``inference``, ``train_step`` and ``evaluate``.

    ``generate`` and ``inference``: (model, sample, context) -> SequenceSample of new keys with the
    same ids in the same order, or ``(sample, stats)`` with a dict of statistics. ``train_step`` and
    ``evaluate``: (model, sample, context) -> stats. Inputs are never mutated. ``stats[MEANS_OVER]``
    is {name: number of values} for each mean that is not over the samples of the call.

    Optional methods: ``state_dict()`` returns all state that a resumed run needs, as JSON values,
    for the checkpoint; ``load_state_dict(state)`` restores it; ``committed()`` is called when the
    checkpoint with the last ``state_dict`` is complete; ``close()`` releases resources.
    """
