"""Defines what a model worker runs: engines, interfaces and their call context.

Vocabulary: an *engine* holds the weights of one model role on one worker and knows how to train, score and generate; an
*interface* is the algorithm of one model function call, written against the engine; a *backend* builds engines. No
torch import at module level: the launcher reads these types too.
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
    """Asks for the continuation of one sequence.

    ``token_ids`` is the whole prefix; ``slot`` names the cache row that may hold the keys and
    values of a prefix of it (the engine reuses what matches and computes the rest). ``sampled``
    counts the tokens at the end of the prefix that belong to the turn that goes on after an
    interruption; they count towards its minimum and maximum. ``seed`` starts the sequence's own
    stream of random numbers: its tokens then depend on this number and their positions, and not on
    the company it is sampled in. ``min_version``: a generation worker samples its tokens with
    weights of this policy version or a later one; ``pinned_version``: with weights of this version,
    which it keeps for an evaluation, and ``greedy`` or as training does.
    """

    slot: int
    token_ids: Sequence[int]
    sampled: int = 0
    seed: int | None = None
    min_version: int = -1
    pinned_version: int = -1
    greedy: bool = False


@dataclass(frozen=True)
class GenOutput:
    """Holds what the engine sampled after the prefix of one request.

    ``token_ids`` includes the stop id that ended it, if any. ``logprobs`` (natural log, fp32, of
    the temperature-scaled distribution sampled from) and ``versions`` (policy version per token)
    have the same length. ``finish_reason`` is ``stop``, ``length`` or ``interrupted`` (the turn is
    to be continued).
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


class GenerationEngine(Protocol):
    """Continues token sequences; key-value rows are kept between calls until their slot is
    freed."""

    @property
    def context_limit(self) -> int:
        """The largest number of tokens of a sequence, prefix and sampled ones together."""
        ...

    def generate(
        self,
        requests: Sequence[GenRequest],
        config: GenConfig,
        *,
        stop_ids: Sequence[int],
        seed: int,
    ) -> list[GenOutput]:
        """Continue every request, batched. The same seed, requests and weights give the same
        tokens.

        ``config.temperature == 0`` decodes greedily. Raises ValueError on a request with no tokens.
        """
        ...

    def free(self, slots: Sequence[int] | None = None) -> None:
        """Forget the cached rows of these slots (all when None). Called at the end of an episode
        and by the training engine after a weight update."""
        ...


class ForwardOutputs(Protocol):
    """Holds what a forward pass knows of the positions of a micro-batch whose prediction is asked
    for: those where ``loss_mask`` includes the predicted token, or all if the sample has none.
    There are m of them.

    Every tensor that a method returns is fp32 and packed, L-1 for each sequence of the micro-batch,
    0 elsewhere.
    """

    def logprobs(
        self, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities of the sample's own tokens (natural log, logits divided by
        ``temperature``), and the entropies of the distributions they were drawn from, or None.
        Raises ValueError on a temperature that is not positive, and on a model without a
        language-model head."""
        ...

    def values(self) -> Tensor:
        """Return what the value head says of the state from which each token was sampled. Raises
        ValueError on a model without a value head."""
        ...

    def logprobs_of(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of any ``tokens`` i64 (n, K), packed L-1 as all else is, in
        the place of the sample's own; fp32 (n, K)."""
        ...

    def keep(self, name: str, values: Tensor) -> None:
        """Keep a packed L-1 tensor for ``TrainResult.kept``, which has it for the whole batch, fp32
        on the CPU."""
        ...

    @property
    def hidden(self) -> Tensor:
        """The last hidden states, (m, width), in the model's type."""
        ...

    @property
    def place(self) -> Tensor:
        """Where each of the positions stands in the packed L-1 layout, i64 (m,)."""
        ...

    @property
    def target(self) -> Tensor:
        """The token that follows each of the positions, i64 (m,)."""
        ...

    @property
    def head(self) -> Tensor | None:
        """The weight of the output projection, (vocabulary, width); None if the head is more than a
        product."""
        ...


LossFn = Callable[[ForwardOutputs, SequenceSample], "tuple[Tensor, dict[str, float]]"]
"""Computes (what the forward pass of one micro-batch knows, the micro-batch) -> (loss, statistics).

A micro-batch holds some of the batch's sequences, whatever groups they are in, so what concerns a
group or the whole batch is to be computed before, into keys. Losses and statistics are summed over
micro-batches; a statistic whose name ends in ``_max`` takes the maximum.
"""

PostFn = Callable[[ForwardOutputs, SequenceSample], "Tensor"]
"""Computes (what the forward pass of one micro-batch knows, the micro-batch) -> fp32, packed L-1
per sequence."""


POSITIONS = "positions"
"""Statistic of a train step: how many positions went through the model, padding included, each
common prefix of a row once."""


@dataclass(frozen=True)
class TrainResult:
    """Holds the statistics of one optimizer step, an engine's own ``POSITIONS`` among them if it
    counts them. ``skipped`` is True when loss or gradient was not finite; ``kept`` holds what the
    loss kept (``ForwardOutputs.keep``), packed L-1 per sequence of the batch."""

    stats: dict[str, float]
    grad_norm: float
    skipped: bool
    kept: Mapping[str, Tensor] = field(default_factory=dict)


class Engine(Protocol):
    """Holds the weights of one model role. It raises on a wrong batch and never silently trains on
    less.

    A role may have several workers, its ranks. Each of them gets the whole batch and returns the
    whole result, which is the same on all; what a rank computes of it is the engine's own business,
    so an algorithm knows no ranks.

    ``version`` is the policy version: committed train steps, which the learning rate follows. Only
    the model host sets it, before and after the calls of a step. Setting it frees all rows of the
    generation engine. An engine may also have ``use_threads(threads: ComputeThreads)``: then these
    compute for it (``realhf.backends``); and ``release_generation()``, which gives the memory of
    the generation engine's rows back: the model host calls it on every engine of the worker before
    an inference or train call.
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

        Micro-batches are cut by sequence; the backward pass of each follows its loss at once.
        Losses are summed over micro-batches, so ``loss_fn`` or ``normaliser`` divide by totals of
        the whole batch. A non-finite loss or gradient norm leaves weights and optimizer untouched.
        The memory of the generation engine's rows is given back first. Raises ValueError on a
        normaliser that is not positive.
        """
        ...

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """Return what ``post_fn`` makes of every micro-batch, put together: fp32, packed L-1 for
        each sequence of the sample, without gradient, on the CPU. Raises ValueError when
        ``post_fn`` returns another shape."""
        ...

    def logprobs(
        self, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """Return the shifted log-probabilities of the sample's own tokens, fp32, shape (sum of
        L-1,), no gradient; 0 where ``loss_mask`` excludes the predicted token, if the sample has
        one. ``logprobs_by`` makes it of ``forward``."""
        ...

    def generator(self) -> GenerationEngine:
        """Return the generation engine that shares this engine's weights."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers by name, tied ones once. They are views,
        which the next train step changes."""
        ...

    def save_checkpoint(self, folder: Path) -> list[Path] | None:
        """Write weights, optimizer and version into ``folder``, so that ``load_checkpoint``
        continues exactly there. Return the files that this worker wrote; None: all that are there.
        Ranks of a role share the folder."""
        ...

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what ``save_checkpoint`` wrote."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Write weights, config and tokenizer so that ``AutoModelForCausalLM.from_pretrained``
        loads them."""
        ...


class Forwards(Protocol):
    """Is the part of an engine that computes without training."""

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.forward``."""
        ...


def logprobs_by(
    engine: Forwards, sample: SequenceSample, *, temperature: float, mb_spec: MicroBatchSpec
) -> Tensor:
    """Return ``Engine.logprobs`` of an engine by its ``forward``. Raises ValueError on a
    temperature that is not positive."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return engine.forward(
        sample, lambda outputs, _: outputs.logprobs(temperature=temperature)[0], mb_spec=mb_spec
    )


class Backend(Protocol):
    """Builds engines. Constructor kwargs come from ``ModelSpec.backend_args``."""

    def build(self, spec: ModelSpec, *, seed: int, total_train_steps: int) -> Engine:
        """Build the engine of one role. ``total_train_steps`` ends the learning-rate schedule;
        ``seed`` starts random weights and random numbers."""
        ...


@dataclass
class Model:
    """One model role as an interface sees it. ``chat_template_kwargs`` are the variables its
    conversations are rendered with, ``tool_parser`` the syntax in which its calls of tools are read
    ("auto": its chat template's)."""

    role: str
    engine: Engine
    tokenizer: Any
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = AUTO


@dataclass
class EpisodeCount:
    """Counts the episodes of a call that plays: ``over`` of ``wanted``. Other threads read it
    meanwhile."""

    over: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class CallContext:
    """Holds everything about a call that is not in the sample. ``seed`` is derived from run seed,
    role and step; ``endpoints`` maps a worker kind to its service addresses (``{"env":
    ["http://127.0.0.1:8100"]}``); where a service wants a token, it stands before the host
    (``http://:TOKEN@...``). ``recorder`` keeps what was played and trained. An interface that plays
    counts in ``progress``, which the display of the run shows."""

    step: int
    seed: int
    mb_spec: MicroBatchSpec
    run_dir: Path
    endpoints: dict[str, list[str]] = field(default_factory=dict)
    recorder: RolloutRecorder = NO_RECORDER
    progress: EpisodeCount = field(default_factory=EpisodeCount)


MEANS_OVER = "means_over"


class ModelInterface(Protocol):
    """Is the algorithm of a model function call. It is built from the kwargs of
    ``MFCDef.interface_args``; any of ``generate``, ``inference``, ``train_step`` and ``evaluate``
    may be present.

    ``generate``/``inference``: (model, sample, context) -> SequenceSample of new keys with the same
    ids in the same order, and optionally a statistics dict: returns ``(sample, stats)``.
    ``train_step``/``evaluate``: (model, sample, context) -> stats. Inputs are never mutated.
    ``stats[MEANS_OVER]`` is {name: number of values} of means that are not over the samples of the
    call.

    An interface may also have ``state_dict()``, everything that a resumed run needs of it, as JSON
    can hold it (it is saved with the checkpoint), and ``load_state_dict(state)``, which restores
    it; ``committed()``, called when the checkpoint with its last ``state_dict`` is complete; and
    ``close()``.
    """
