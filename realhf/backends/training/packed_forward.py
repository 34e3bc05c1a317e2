"""Hidden states, log-probabilities and values of packed sequences, for any decoder.

If a test at construction shows that the model supports it, all rows of a pass are concatenated
without padding or masks. Attention is then computed by a variable-length kernel on a GPU, and over
pieces of the rows on a CPU. Otherwise rows of similar length run as one right-padded batch. A row
of a single sequence needs no attention mask: under causal attention no real token sees the padding
after it, and the kernels without masks are the fast ones. Rows of sequences that share prefixes
have a mask and explicit positions, if the test shows that the model respects them. Hidden states
are kept only at positions whose prediction is scored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from realhf.api.sample import SequenceSample
from realhf.backends.embedded.attention import count_sliding_layers, sliding_window, use_attention
from realhf.backends.embedded.memory import head_sizes
from realhf.backends.training.lora import compute_adapter_factors
from realhf.backends.training.selected_logprobs import (
    most_likely_ids,
    scale_and_cap,
    selected_logprobs,
)
from realhf.backends.training.sequence_packing import (
    BATCH_TOKENS,
    ROW_TOKENS,
    PackedRow,
    RowPass,
    SequenceInputs,
    build_masks,
    build_packed_pass,
    build_padded_pass,
    build_single_rows,
    pack_shared_rows,
)
from realhf.backends.training.tree_attention import ROW_TREE
from realhf.backends.training.varlen_attention import (
    LAYOUT,
    PACKED_ROWS,
    Kernel,
    can_pack,
    find_kernel,
    record_windows,
    use_packed_attention,
)


@dataclass(frozen=True)
class ScoredRows:
    """Hidden states of the m scored positions of one forward pass."""

    hidden: Tensor
    """(m, width)."""
    target: Tensor
    """Token that follows each position, int64 (m,)."""
    place: Tensor
    """Index of each position in the packed L-1 layout, int64 (m,)."""
    logits: Tensor | None = None
    """(m, vocabulary); present only if the structure of the model's head is unknown."""


@dataclass(frozen=True)
class Heads:
    """Head of a model: ``language``, ``value``, or neither if its structure is unknown."""

    language: Callable[[], Tensor] | None = None
    """Function that returns the weight (vocabulary, width) of a language-model head that is a
    linear projection."""
    adapter: Callable[[Tensor], tuple[Tensor, Tensor] | None] | None = None
    """Function that returns the factors of the product that the head's adapter adds for given
    hidden states; it returns None while adapters are disabled (see
    ``lora.compute_adapter_factors``). None without an adapter."""
    bias: Callable[[], Tensor] | None = None
    """Function that returns the bias (vocabulary,) of the language-model head. None without a
    bias."""
    factor: float = 1.0
    """Number by which the logits are multiplied."""
    cap: float | None = None
    """Soft cap: after multiplication by the factor, logits are bounded to +-cap by tanh. None
    without one."""
    value: nn.Module | None = None
    """Value head, any module that maps a hidden state to one number; it replaces the language-model
    head."""


class PackedOutputs:
    """``ForwardOutputs`` of one micro-batch.

    Args:
        rows: Scored positions; None if there are none.
        size: Sum of L-1 over the sequences of the micro-batch.
    """

    def __init__(
        self, rows: ScoredRows | None, size: int, heads: Heads, device: torch.device
    ) -> None:
        self._rows = rows
        self._size = size
        self._heads = heads
        self._device = device
        self.kept: dict[str, Tensor] = {}

    def logprobs(
        self, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See ``ForwardOutputs``."""
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self._check_language_head()
        rows = self._rows
        scores = (
            (None, None)
            if rows is None
            else self._score(rows, rows.target[:, None], temperature, with_entropy)
        )
        logprobs = self._spread(None if scores[0] is None else scores[0][:, 0])
        return logprobs, self._spread(scores[1]) if with_entropy else None

    def logprobs_of(self, tokens: Tensor) -> Tensor:
        """See ``ForwardOutputs``."""
        tokens = tokens.to(self._device)
        blank = torch.zeros(tokens.shape, device=self._device)
        if self._rows is None:
            return blank
        return blank.index_copy(
            0, self.place, self._score(self._rows, tokens[self.place], 1.0, False)[0]
        )

    def most_likely(self) -> Tensor:
        """See ``ForwardOutputs``."""
        self._check_language_head()
        rows = self._rows
        if rows is None:
            return self._no_positions()
        if rows.logits is not None:
            return rows.logits.argmax(-1)
        assert self._heads.language is not None, "an unknown head gives its logits"
        return most_likely_ids(rows.hidden, self._heads.language(), **self._head_shape(rows.hidden))

    def _check_language_head(self) -> None:
        """Raise ValueError for a model with a value head."""
        if self._heads.value is not None:
            raise ValueError(
                "this model has a value head and no language-model head: it gives no "
                "log-probabilities"
            )

    def values(self) -> Tensor:
        """See ``ForwardOutputs``."""
        head = self._heads.value
        if head is None:
            raise ValueError(
                "this model has no value head: a critic needs a ModelSpec with head='value'"
            )
        return self._spread(None if self._rows is None else head(self._rows.hidden)[..., 0].float())

    def keep(self, name: str, values: Tensor) -> None:
        """See ``ForwardOutputs``. Raises ValueError if ``values`` have another shape."""
        if values.shape != (self._size,):
            raise ValueError(
                f"keep({name!r}): shape {tuple(values.shape)}, the micro-batch has ({self._size},)"
            )
        self.kept[name] = values.detach().float().cpu()

    @property
    def hidden(self) -> Tensor:
        """See ``ForwardOutputs``."""
        return torch.zeros(0, 0, device=self._device) if self._rows is None else self._rows.hidden

    @property
    def place(self) -> Tensor:
        """See ``ForwardOutputs``."""
        return self._no_positions() if self._rows is None else self._rows.place

    @property
    def target(self) -> Tensor:
        """See ``ForwardOutputs``."""
        return self._no_positions() if self._rows is None else self._rows.target

    @property
    def head(self) -> Tensor | None:
        """See ``ForwardOutputs``."""
        heads = self._heads
        plain = (
            heads.adapter is None
            and heads.bias is None
            and heads.factor == 1.0
            and heads.cap is None
        )
        return heads.language() if heads.language is not None and plain else None

    def _no_positions(self) -> Tensor:
        """Return an empty int64 tensor: there are no scored positions."""
        return torch.zeros(0, dtype=torch.int64, device=self._device)

    def _spread(self, numbers: Tensor | None) -> Tensor:
        """Return values (m,) of the scored positions as an fp32 tensor in the packed L-1 layout, 0
        elsewhere."""
        blank = torch.zeros(self._size, device=self._device)
        return blank if numbers is None else blank.index_copy(0, self.place, numbers)

    def _score(
        self, rows: ScoredRows, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of ``ids`` int64 (m, K), fp32 (m, K), and the entropies,
        fp32 (m,)."""
        heads = self._heads
        (hidden, logits) = (rows.hidden, rows.logits)
        if heads.language is not None and logits is None:
            return selected_logprobs(
                hidden,
                heads.language(),
                ids,
                temperature,
                with_entropy=with_entropy,
                **self._head_shape(hidden),
            )
        assert logits is not None, "an unknown head gives its logits"
        log_p = functional.log_softmax(logits.float() / temperature, -1)
        logprobs = log_p.gather(-1, ids)
        return logprobs, -(log_p.exp() * log_p).sum(-1) if with_entropy else logprobs.new_zeros(
            len(ids)
        )

    def _head_shape(self, hidden: Tensor) -> dict[str, Any]:
        """Return what the head computes beyond a matrix product, as arguments of
        ``selected_logprobs``."""
        heads = self._heads
        return {
            "bias": None if heads.bias is None else heads.bias(),
            "adapter": None if heads.adapter is None else heads.adapter(hidden),
            "factor": heads.factor,
            "cap": heads.cap,
        }


_MAX_PROBED_WINDOW = 512
"""Maximum size, in columns, of a model-specific window that the test covers; the test's row is
slightly longer."""
_SLIDING_WINDOW = "sliding_window"
"""Configuration option of the only kind of window that the attention masks implement."""


def list_model_windows(config: Any) -> list[int]:
    """Return the configured sizes in tokens of a model's possible windows or chunks, except the
    sliding window, which the attention masks implement."""
    options = config.get_text_config().to_dict()
    named = {name: value for name, value in options.items() if "window" in name or "chunk" in name}
    named = {
        name: value
        for name, value in named.items()
        if name != _SLIDING_WINDOW and "layers" not in name
    }
    return sorted(value for value in named.values() if type(value) is int and value > 0)


def probe(config: Any) -> SequenceInputs | None:
    """Return test sequences that branch twice, all of whose positions are scored.

    When they are packed into one row, positions of one sequence lie further apart in columns than
    every model-specific window, but not further apart in tokens. Returns None if that would need
    too long a row.
    """
    widest = max(list_model_windows(config), default=0)
    if widest > _MAX_PROBED_WINDOW:
        return None
    vocabulary = int(config.get_text_config().vocab_size)
    draw = np.random.default_rng(0)
    stem = draw.integers(0, vocabulary, 9)
    twig = draw.integers(0, vocabulary, 5)
    tails = [draw.integers(0, vocabulary, n) for n in (4, 7, 3, 6)]
    tokens = [np.concatenate([stem, twig, tails[0]]), np.concatenate([stem, twig, tails[1]]), stem]
    tokens += [np.concatenate([stem, tail]) for tail in tails[2:]]
    for _ in range(0, widest, 16):
        tokens.append(np.concatenate([stem, draw.integers(0, vocabulary, 18)]))
    scored_positions = [np.arange(len(sequence)) for sequence in tokens]
    ends = np.cumsum([len(sequence) for sequence in tokens])
    place = [
        end - len(positions) + positions
        for end, positions in zip(ends, scored_positions, strict=True)
    ]
    return SequenceInputs(tokens, scored_positions, tokens, place, int(ends[-1]))


def max_deviation(hidden: Tensor, expected: Tensor) -> float:
    """Return the largest distance between a hidden state (n, width) and the expected one, relative
    to the norm of the expected one."""
    distance = (hidden - expected).float().norm(dim=-1) / expected.float().norm(dim=-1).clamp(
        min=1e-6
    )
    return float(distance.max())


def max_layout_error(dtype: torch.dtype, rounding: float) -> float:
    """Return the maximum error that shared rows may have. ``rounding`` is the error of the same
    model in ``dtype`` when only the composition of a batch changes."""
    return min(0.1, max(1e-3, 2 * torch.finfo(dtype).eps, 4 * rounding))


_N_REPEATED = 5
"""Number of rows that are computed again, one at a time, to measure the model's rounding error."""
_UNSUPPORTED_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a forward pass that indicate that the model does not support a layout."""
_log = logging.getLogger(__name__)


class PackedForward:
    """Forward passes of packed sequences through ``model``, a causal language model or a decoder
    with a ``value_head``. It has no state between calls.

    The constructor tests with a few tokens whether rows may share prefixes (``shares``), in rows of
    up to ``row_tokens`` positions, and whether rows are computed without padding (``packs``). On a
    CPU, attention is computed over pieces of the rows (``row_tree_attention``) if the model
    supports it.

    Args:
        pieces: Whether attention over pieces may be used. It must not be used if layers are
            recomputed in the backward pass, which does not pass the pieces on, or compiled, which
            would recompile for every tree.
        pace: Called before each forward pass.
    """

    def __init__(
        self, model: Any, *, pieces: bool = True, pace: Callable[[], None] = lambda: None
    ) -> None:
        self.model = model
        self.pace = pace
        self.heads = find_heads(model)
        self._kernel = self._find_tested_kernel()
        self.packs = self._kernel is not None or (pieces and self._supports_trees())
        self.shares = self.packs or self._supports_masks()
        # The size of a mask may grow with the square of a row; kernels without masks have no limit.
        self.row_tokens = (
            None if self._kernel is not None else BATCH_TOKENS if self.packs else ROW_TOKENS
        )

    def __call__(
        self, sample: SequenceSample, rows: Sequence[PackedRow] | None = None
    ) -> PackedOutputs:
        """Return the outputs at the scored positions: where ``loss_mask`` is True for the predicted
        token, or everywhere if there is no ``loss_mask``.

        ``rows`` are computed in one forward pass; by default every sequence is a row. Raises
        ValueError for an empty sequence.
        """
        inputs = SequenceInputs.from_sample(sample)
        chosen_rows = build_single_rows(inputs.scored, inputs.tokens) if rows is None else rows
        self.pace()
        if not chosen_rows:
            scored_rows = None
        elif self.packs:
            scored_rows = self._run_layout(build_packed_pass(chosen_rows, inputs, self._kernel))
        else:
            scored_rows = self._run_layout(build_padded_pass(chosen_rows, inputs))
        return PackedOutputs(scored_rows, inputs.size, self.heads, self.model.device)

    def run_zero_pass(self) -> Tensor:
        """Run one token through the decoder; return a scalar 0 whose autograd graph contains every
        weight, so that its backward pass reaches all of them."""
        decoder = self.model.get_decoder()
        tokens = torch.full(
            (1, 1), _non_padding_token(decoder), dtype=torch.int64, device=self.model.device
        )
        zero = 0.0 * decoder(input_ids=tokens, use_cache=False).last_hidden_state.sum()
        language = None if self.heads.value is not None else self.model.get_output_embeddings()
        for head in (language, self.heads.value):
            for weight in () if head is None else head.parameters():
                zero = zero + 0.0 * weight.sum()
        return zero

    def _run_layout(self, inputs: RowPass) -> ScoredRows:
        """Run the model on one pass with the attention that its layout needs."""
        device = self.model.device
        arguments: dict[str, Any] = {"input_ids": inputs.tokens.to(device), "use_cache": False}
        if inputs.visible is not None:
            depth = arguments["position_ids"] = inputs.depth.to(device)
            arguments["attention_mask"] = build_masks(
                self.model.config, inputs.visible.to(device), depth, self._dtype
            )
        if inputs.packed is not None:
            arguments["position_ids"], arguments[LAYOUT] = (
                inputs.depth.to(device),
                inputs.packed.to(device),
            )
            # Models build no mask if they get one; attention over packed rows ignores it.
            one = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
            arguments["attention_mask"] = build_masks(
                self.model.config, one, one[0].long(), self._dtype
            )
        if inputs.trees is None:
            return self._run_model(arguments, inputs)
        with use_attention(self.model.config, ROW_TREE):
            arguments |= {"position_ids": inputs.depth.to(device), "row_trees": inputs.trees}
            return self._run_model(arguments, inputs)

    def _run_model(self, arguments: dict[str, Any], inputs: RowPass) -> ScoredRows:
        """Run the model, and return the hidden states of the scored positions."""
        device = self.model.device
        column, target, place = (t.to(device) for t in (inputs.column, inputs.target, inputs.place))
        if self.heads.value is None and self.heads.language is None:
            hidden, logits = _run_whole_model(self.model, arguments, column)
            return ScoredRows(hidden, target, place, logits)
        return ScoredRows(
            _select_columns(self.model.get_decoder()(**arguments).last_hidden_state, column),
            target,
            place,
        )

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return next(self.model.parameters()).dtype

    def _find_tested_kernel(self) -> Kernel | None:
        """Return the device's kernel for packed rows if the model passes the test with it.
        Otherwise return None, and log why rows are padded unless that is normal for the device."""
        kernel, reason = find_kernel(self.model.device, self._dtype, head_sizes(self.model.config))
        if kernel is not None:
            if not can_pack(self.model):
                reason = "the model's attention has no fused kernel"
            else:
                windows: list[int | None] = []
                recording_kernel = record_windows(kernel, windows)
                with use_attention(self.model.get_decoder().config, PACKED_ROWS):
                    reason = self._find_layout_problem(
                        lambda rows, inputs: build_packed_pass(rows, inputs, recording_kernel)
                    )
                reason = reason or _find_window_problem(self.model.config, windows)
                if not reason:
                    use_packed_attention(self.model)
                    return kernel
        if reason:
            _log.warning("rows of a pass are padded to one length: %s", reason)
        return None

    def _supports_trees(self) -> bool:
        """Return whether the model supports attention over pieces. If it does not, rows are padded
        and may have masks."""
        if self.model.device.type != "cpu" or sliding_window(self.model.config) is not None:
            return False
        return not self._find_layout_problem(
            lambda rows, inputs: build_packed_pass(rows, inputs, None)
        )

    def _supports_masks(self) -> bool:
        """Return whether the model respects the masks of shared rows; log a warning if not."""
        reason = self._find_layout_problem(build_padded_pass)
        if reason:
            _log.warning("prefixes are computed for each sequence: %s", reason)
        return not reason

    @torch.no_grad()
    def _find_layout_problem(
        self, build_pass: Callable[[Sequence[PackedRow], SequenceInputs], RowPass]
    ) -> str:
        """Compare hidden states of sequences with common prefixes, in rows laid out by
        ``build_pass``, with those of the same sequences in separate padded rows. They differ if a
        model has positions, masks or states that depend on the order of columns.

        Returns the reason why the layout cannot be used, or "" if it can.
        """
        inputs = probe(self.model.config)
        if inputs is None:
            return "the model has a window of its own, too wide to try"
        rows = pack_shared_rows(inputs.scored, inputs.tokens)
        separate_rows = build_single_rows(rows[0].members, inputs.tokens)
        was_training = self.model.training
        self.model.eval()
        try:
            shared_states = self._run_layout(build_pass(rows, inputs)).hidden
            separate_states = self._run_layout(build_padded_pass(separate_rows, inputs)).hidden
            repeated_states = torch.cat(
                [
                    self._run_layout(build_padded_pass([row], inputs)).hidden
                    for row in separate_rows[:_N_REPEATED]
                ]
            )
        except _UNSUPPORTED_ERRORS as error:
            return f"the model does not support this layout of rows ({error})"
        finally:
            self.model.train(was_training)
        deviation = max_deviation(shared_states, separate_states)
        rounding = max_deviation(repeated_states, separate_states[: len(repeated_states)])
        if len(rows) == 1 and deviation <= max_layout_error(self._dtype, rounding):
            return ""
        return f"in shared rows hidden states are {deviation:.1e} off"


def _non_padding_token(decoder: Any) -> int:
    """Return a token other than the padding token, whose zero embedding gives some models no
    gradient."""
    return 1 if getattr(decoder.get_input_embeddings(), "padding_idx", None) == 0 else 0


def _find_window_problem(config: Any, windows: Sequence[int | None]) -> str:
    """Return an error text if the windows that the layers passed to their attention differ from
    those in the configuration, otherwise "". Some models apply the window only in the mask, which
    packed rows do not have, and test sequences are too short to show this."""
    window = sliding_window(config)
    sliding = count_sliding_layers(config)
    if [each for each in windows if each is not None] == [window] * sliding:
        return ""
    return f"its layers do not give their attention the sliding window of {window} tokens"


_PROBE_LOGIT = 100.0
"""Largest logit with which a head is tested, large enough for usual soft caps to take effect."""


@torch.no_grad()
def find_heads(model: Any) -> Heads:
    """Return the head of ``model``: its value head, or the language-model head that its
    configuration describes, if that gives the same logits as the model for small and large logits.
    Otherwise return ``Heads()``."""
    if (value := getattr(model, "value_head", None)) is not None:
        return Heads(value=value)
    layer = model.get_output_embeddings()
    plain = getattr(layer, "base_layer", layer)  # where it has an adapter
    if not isinstance(plain, nn.Linear):
        return Heads()
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    cap = float(cap) if cap else None
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    hidden_states: list[Tensor] = []

    def widen(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        wide = hidden * (_PROBE_LOGIT / layer(hidden).float().abs().max().clamp(min=1e-6)).to(
            hidden.dtype
        )
        hidden_states.extend((hidden, wide))
        output.last_hidden_state = torch.cat(hidden_states)
        return output

    tokens = torch.tensor([[0, 1]], device=model.device)
    handle = model.get_decoder().register_forward_hook(widen)
    try:
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        expected = scale_and_cap(layer(torch.cat(hidden_states)).float(), factor, cap)
    except (AttributeError, TypeError, RuntimeError):
        return Heads()
    finally:
        handle.remove()
    deviation = (logits - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2)).clamp(min=1e-6)
    if not float(deviation.max()) <= max(1e-4, 2 * torch.finfo(model.dtype).eps):
        return Heads()
    # Look the layer up at each call: its parameters are replaced when they are sharded over ranks.
    head: Callable[[], Any] = model.get_output_embeddings
    bias = None if plain.bias is None else lambda: head().bias
    adapter = None if plain is layer else lambda hidden: compute_adapter_factors(head(), hidden)
    return Heads(lambda: head().weight, adapter, bias, factor, cap)


def _select_columns(hidden: Tensor, column: Tensor) -> Tensor:
    """Return the hidden states at these columns, (m, width). Columns are numbered through all rows,
    one row after another."""
    # The gradient of index_select sums the rows of a repeated column in a fixed order; that of
    # indexing does not if there are several threads.
    return hidden.flatten(0, 1).index_select(0, column)


def _run_whole_model(
    model: Any, arguments: dict[str, Any], column: Tensor
) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits at these columns by running the whole model, because its head
    is unknown. The head is applied only to these positions."""
    selected: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> Any:
        selected.append(_select_columns(output.last_hidden_state, column))
        output.last_hidden_state = selected[0][None]
        return output

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        logits = model(**arguments).logits[0]
    finally:
        handle.remove()
    return selected[0], logits
