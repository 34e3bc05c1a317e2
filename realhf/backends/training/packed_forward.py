"""Hidden states, log-probabilities and values of packed sequences, for any decoder.

If a test at construction shows that the model computes it correctly, all rows of a pass are
concatenated without padding or masks: on a GPU by a variable-length attention kernel, on a CPU by
attention over pieces of the rows. Otherwise rows of similar length run as one right-padded batch. A
row of a single sequence needs no attention mask: under causal attention no real token sees the
padding after it, and the kernels without masks are the fast ones. Rows of sequences that share
prefixes have a mask and explicit positions, if the test shows that the model follows them. Hidden
states are kept only at positions whose prediction is scored.
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
from realhf.backends.training.lora import side_product
from realhf.backends.training.selected_logprobs import bent, selected_logprobs
from realhf.backends.training.sequence_packing import (
    BATCH_TOKENS,
    ROW_TOKENS,
    Row,
    RowPass,
    SequenceInputs,
    masks,
    packed_pass,
    plain_rows,
    row_pass,
    shared_rows,
)
from realhf.backends.training.tree_attention import ROW_TREE
from realhf.backends.training.varlen_attention import (
    LAYOUT,
    PACKED_ROWS,
    Kernel,
    can_pack,
    kernel_for,
    noting_windows,
    pack,
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
    """(m, vocabulary), only if the head of the model is unknown."""


@dataclass(frozen=True)
class Heads:
    """The head of a model: at most one of ``language`` and ``value``; neither if it is unknown."""

    language: Callable[[], Tensor] | None = None
    """Return the weight (vocabulary, width) of a language-model head that is a linear
    projection."""
    side: Callable[[Tensor], tuple[Tensor, Tensor] | None] | None = None
    """Return the factors of the product that the head's adapter adds for given hidden states, None
    while adapters are off (see ``lora.side_product``). None without an adapter."""
    bias: Callable[[], Tensor] | None = None
    """Return the bias (vocabulary,) of the language-model head. None without a bias."""
    factor: float = 1.0
    """Factor of the logits."""
    cap: float | None = None
    """Soft cap: logits are bounded to it by tanh after the factor."""
    value: nn.Module | None = None
    """Projection to one number, of any kind, in place of the language-model head."""


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
        if self._heads.value is not None:
            raise ValueError(
                "this model has a value head and no language-model head: it gives no "
                "log-probabilities"
            )
        rows = self._rows
        found = (
            (None, None)
            if rows is None
            else self._score(rows, rows.target[:, None], temperature, with_entropy)
        )
        logprobs = self._spread(None if found[0] is None else found[0][:, 0])
        return logprobs, self._spread(found[1]) if with_entropy else None

    def logprobs_of(self, tokens: Tensor) -> Tensor:
        """See ``ForwardOutputs``."""
        tokens = tokens.to(self._device)
        blank = torch.zeros(tokens.shape, device=self._device)
        if self._rows is None:
            return blank
        return blank.index_copy(
            0, self.place, self._score(self._rows, tokens[self.place], 1.0, False)[0]
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
        """See ``ForwardOutputs``. Raises ValueError on another shape."""
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
        return self._nowhere() if self._rows is None else self._rows.place

    @property
    def target(self) -> Tensor:
        """See ``ForwardOutputs``."""
        return self._nowhere() if self._rows is None else self._rows.target

    @property
    def head(self) -> Tensor | None:
        """See ``ForwardOutputs``."""
        heads = self._heads
        plain = (
            heads.side is None and heads.bias is None and heads.factor == 1.0 and heads.cap is None
        )
        return heads.language() if heads.language is not None and plain else None

    def _nowhere(self) -> Tensor:
        """Return an empty int64 tensor: there are no scored positions."""
        return torch.zeros(0, dtype=torch.int64, device=self._device)

    def _spread(self, numbers: Tensor | None) -> Tensor:
        """Return values (m,) of the scored positions as an fp32 tensor of the packed L-1 layout, 0
        elsewhere."""
        blank = torch.zeros(self._size, device=self._device)
        return blank if numbers is None else blank.index_copy(0, self.place, numbers)

    def _score(
        self, rows: ScoredRows, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of ``ids`` int64 (m, K), fp32 of that shape, and entropies fp32
        (m,)."""
        heads = self._heads
        (hidden, logits) = (rows.hidden, rows.logits)
        if heads.language is not None and logits is None:
            bias = None if heads.bias is None else heads.bias()
            side = None if heads.side is None else heads.side(hidden)
            shape: dict[str, Any] = {
                "bias": bias,
                "side": side,
                "factor": heads.factor,
                "cap": heads.cap,
            }
            return selected_logprobs(
                hidden, heads.language(), ids, temperature, with_entropy=with_entropy, **shape
            )
        assert logits is not None, "an unknown head gives its logits"
        log_p = functional.log_softmax(logits.float() / temperature, -1)
        logprobs = log_p.gather(-1, ids)
        return logprobs, -(log_p.exp() * log_p).sum(-1) if with_entropy else logprobs.new_zeros(
            len(ids)
        )


_LONGEST = 512
"""Maximum size, in columns, of a model-specific window that the test covers; the row of the test is
slightly longer."""
_OURS = "sliding_window"
"""Option of the one kind of window that the attention masks implement."""


def own_windows(config: Any) -> list[int]:
    """Return the values of a model's options that may be windows or chunks in tokens, except the
    sliding window, which the attention masks implement."""
    options = config.get_text_config().to_dict()
    named = {name: value for name, value in options.items() if "window" in name or "chunk" in name}
    named = {name: value for name, value in named.items() if name != _OURS and "layers" not in name}
    return sorted(value for value in named.values() if type(value) is int and value > 0)


def probe(config: Any) -> SequenceInputs | None:
    """Return test sequences that branch twice, all of whose positions are scored.

    In one row of all of them, positions within one sequence lie further apart in columns than every
    model-specific window, but not in tokens. Returns None if that would need too long a row.
    """
    widest = max(own_windows(config), default=0)
    if widest > _LONGEST:
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
    asked = [np.arange(len(sequence)) for sequence in tokens]
    ends = np.cumsum([len(sequence) for sequence in tokens])
    place = [end - len(own) + own for end, own in zip(ends, asked, strict=True)]
    return SequenceInputs(tokens, asked, tokens, place, int(ends[-1]))


def strayed(found: Tensor, expected: Tensor) -> float:
    """Return the largest distance between hidden states (n, width) and the expected ones, relative
    to the norm of the expected one at that position."""
    far = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-6)
    return float(far.max())


def tolerance(dtype: torch.dtype, own: float) -> float:
    """Return the maximum error of shared rows. ``own`` is the error of the same model, of
    ``dtype``, if only the composition of a batch changes."""
    return min(0.1, max(1e-3, 2 * torch.finfo(dtype).eps, 4 * own))


_AGAIN = 5
"""Number of rows that are computed a second time, each alone, to measure the rounding of the
model."""
_UNFIT = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a forward pass that mean that the model does not support a layout."""
_log = logging.getLogger(__name__)


class PackedForward:
    """Forward passes of packed sequences through ``model``, a causal language model or a decoder
    with a ``value_head``; without state between calls.

    The constructor tests with a few tokens whether rows may share prefixes (``shares``), in rows of
    up to ``row_tokens`` positions, and whether they are computed without padding (``packs``). On a
    CPU, attention is computed over pieces of the rows (``row_tree_attention``) if the model
    supports it.

    Args:
        pieces: Whether attention over pieces may be used. It may not if layers are recomputed in
            the backward pass, which does not pass the pieces on, or compiled, which would
            recompile for every tree.
        pace: Called before each forward pass.
    """

    def __init__(
        self, model: Any, *, pieces: bool = True, pace: Callable[[], None] = lambda: None
    ) -> None:
        self.model = model
        self.pace = pace
        self.heads = heads_of(model)
        self._kernel = self._proven_kernel()
        self.packs = self._kernel is not None or (pieces and self._follows_trees())
        self.shares = self.packs or self._follows_masks()
        # The size of a mask may grow with the square of a row; kernels without masks have no limit.
        self.row_tokens = (
            None if self._kernel is not None else BATCH_TOKENS if self.packs else ROW_TOKENS
        )

    def __call__(self, sample: SequenceSample, rows: Sequence[Row] | None = None) -> PackedOutputs:
        """Return the outputs at scored positions: where ``loss_mask`` is True at the predicted
        token, or everywhere without one.

        ``rows`` are computed in one forward pass; by default every sequence is a row. Raises
        ValueError for an empty sequence.
        """
        inputs = SequenceInputs.of(sample)
        chosen = plain_rows(inputs.scored, inputs.tokens) if rows is None else rows
        self.pace()
        if not chosen:
            found = None
        elif self.packs:
            found = self._scored(packed_pass(chosen, inputs, self._kernel))
        else:
            found = self._scored(row_pass(chosen, inputs))
        return PackedOutputs(found, inputs.size, self.heads, self.model.device)

    def nothing(self) -> Tensor:
        """Run one token through the decoder; return a scalar 0 whose autograd graph contains every
        weight."""
        decoder = self.model.get_decoder()
        tokens = torch.full(
            (1, 1), _no_padding(decoder), dtype=torch.int64, device=self.model.device
        )
        nothing = 0.0 * decoder(input_ids=tokens, use_cache=False).last_hidden_state.sum()
        language = None if self.heads.value is not None else self.model.get_output_embeddings()
        for head in (language, self.heads.value):
            for weight in () if head is None else head.parameters():
                nothing = nothing + 0.0 * weight.sum()
        return nothing

    def _scored(self, chosen: RowPass) -> ScoredRows:
        """Run the model on one pass with the attention that its layout needs."""
        device = self.model.device
        given: dict[str, Any] = {"input_ids": chosen.tokens.to(device), "use_cache": False}
        if chosen.seen is not None:
            depth = given["position_ids"] = chosen.depth.to(device)
            given["attention_mask"] = masks(
                self.model.config, chosen.seen.to(device), depth, self._dtype
            )
        if chosen.packed is not None:
            given["position_ids"], given[LAYOUT] = chosen.depth.to(device), chosen.packed.to(device)
            # Models build no mask if they get one; attention over packed rows ignores it.
            one = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
            given["attention_mask"] = masks(self.model.config, one, one[0].long(), self._dtype)
        if chosen.trees is None:
            return self._read(given, chosen)
        with use_attention(self.model.config, ROW_TREE):
            given |= {"position_ids": chosen.depth.to(device), "row_trees": chosen.trees}
            return self._read(given, chosen)

    def _read(self, given: dict[str, Any], chosen: RowPass) -> ScoredRows:
        """Run the model, and return the hidden states of the scored positions."""
        device = self.model.device
        column, target, place = (t.to(device) for t in (chosen.column, chosen.target, chosen.place))
        if self.heads.value is None and self.heads.language is None:
            hidden, logits = _through_the_whole_model(self.model, given, column)
            return ScoredRows(hidden, target, place, logits)
        return ScoredRows(
            _at(self.model.get_decoder()(**given).last_hidden_state, column), target, place
        )

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return next(self.model.parameters()).dtype

    def _proven_kernel(self) -> Kernel | None:
        """Return the device's kernel for packed rows if the model passes the test with it;
        otherwise log why rows are padded, except where that is usual."""
        kernel, reason = kernel_for(self.model.device, self._dtype, head_sizes(self.model.config))
        if kernel is not None:
            if not can_pack(self.model):
                reason = "the model's attention has no fused kernel"
            else:
                windows: list[int | None] = []
                noting = noting_windows(kernel, windows)
                with use_attention(self.model.get_decoder().config, PACKED_ROWS):
                    reason = self._strays(lambda rows, inputs: packed_pass(rows, inputs, noting))
                reason = reason or _missed_window(self.model.config, windows)
                if not reason:
                    pack(self.model)
                    return kernel
        if reason:
            _log.warning("rows of a pass are padded to one length: %s", reason)
        return None

    def _follows_trees(self) -> bool:
        """Return whether the model supports attention over pieces. If not, rows are padded, and may
        have masks."""
        if self.model.device.type != "cpu" or sliding_window(self.model.config) is not None:
            return False
        return not self._strays(lambda rows, inputs: packed_pass(rows, inputs, None))

    def _follows_masks(self) -> bool:
        """Return whether the model follows the masks of shared rows; log a warning if not."""
        reason = self._strays(row_pass)
        if reason:
            _log.warning("prefixes are computed for each sequence: %s", reason)
        return not reason

    @torch.no_grad()
    def _strays(self, laid_out: Callable[[Sequence[Row], SequenceInputs], RowPass]) -> str:
        """Compare hidden states of sequences with common prefixes, in rows laid out by
        ``laid_out``, with those of the same sequences in separate padded rows. They differ if a
        model has positions, masks or states that depend on the order of columns.

        Return the reason why the layout cannot be used, or "" if it can.
        """
        inputs = probe(self.model.config)
        if inputs is None:
            return "the model has a window of its own, too wide to try"
        rows = shared_rows(inputs.scored, inputs.tokens)
        alone = plain_rows(rows[0].members, inputs.tokens)
        was_training = self.model.training
        self.model.eval()
        try:
            together = self._scored(laid_out(rows, inputs)).hidden
            apart = self._scored(row_pass(alone, inputs)).hidden
            again = torch.cat(
                [self._scored(row_pass([row], inputs)).hidden for row in alone[:_AGAIN]]
            )
        except _UNFIT as error:
            return f"the model takes no layout of rows ({error})"
        finally:
            self.model.train(was_training)
        off = strayed(together, apart)
        own = strayed(again, apart[: len(again)])
        if len(rows) == 1 and off <= tolerance(self._dtype, own):
            return ""
        return f"in shared rows hidden states are {off:.1e} off"


def _no_padding(decoder: Any) -> int:
    """Return a token other than the padding token: some models have no gradient at its zero
    embedding."""
    return 1 if getattr(decoder.get_input_embeddings(), "padding_idx", None) == 0 else 0


def _missed_window(config: Any, windows: Sequence[int | None]) -> str:
    """Return an error text if the windows that the layers passed to their attention are not those
    of the configuration, or "". Some models apply the window only in the mask, which packed rows do
    not have, and test sequences are shorter than most windows."""
    window = sliding_window(config)
    sliding = count_sliding_layers(config)
    if [each for each in windows if each is not None] == [window] * sliding:
        return ""
    return f"its layers do not give their attention the sliding window of {window} tokens"


_WIDE = 100.0
"""Largest logit that a head is tested with, large enough that soft caps of usual size take
effect."""


@torch.no_grad()
def heads_of(model: Any) -> Heads:
    """Return the head of ``model``: its value head, or the language-model head that its
    configuration describes, if that gives the same logits as the model, both small and large ones.
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
    given: list[Tensor] = []

    def widen(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        wide = hidden * (_WIDE / layer(hidden).float().abs().max().clamp(min=1e-6)).to(hidden.dtype)
        given.extend((hidden, wide))
        output.last_hidden_state = torch.cat(given)
        return output

    tokens = torch.tensor([[0, 1]], device=model.device)
    handle = model.get_decoder().register_forward_hook(widen)
    try:
        found = model(input_ids=tokens, use_cache=False).logits.float()
        expected = bent(layer(torch.cat(given)).float(), factor, cap)
    except (AttributeError, TypeError, RuntimeError):
        return Heads()
    finally:
        handle.remove()
    off = (found - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2)).clamp(min=1e-6)
    if not float(off.max()) <= max(1e-4, 2 * torch.finfo(model.dtype).eps):
        return Heads()
    # Look the layer up at each call: its parameters are replaced when they are sharded over ranks.
    head: Callable[[], Any] = model.get_output_embeddings
    bias = None if plain.bias is None else lambda: head().bias
    side = None if plain is layer else lambda hidden: side_product(head(), hidden)
    return Heads(lambda: head().weight, side, bias, factor, cap)


def _at(hidden: Tensor, column: Tensor) -> Tensor:
    """Return the hidden states at these columns of all rows one after another, (m, width)."""
    # The gradient of index_select sums the rows of a repeated column in a fixed order; that of
    # indexing does not if there are several threads.
    return hidden.flatten(0, 1).index_select(0, column)


def _through_the_whole_model(
    model: Any, given: dict[str, Any], column: Tensor
) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits at these columns, by running the whole model, whose head is
    unknown. The head gets only these positions."""
    kept: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> Any:
        kept.append(_at(output.last_hidden_state, column))
        output.last_hidden_state = kept[0][None]
        return output

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        logits = model(**given).logits[0]
    finally:
        handle.remove()
    return kept[0], logits
