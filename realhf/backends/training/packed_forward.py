"""Computes the hidden states of packed sequences by any decoder of transformers.

Rows of similar length run in one right-padded batch. Rows of one sequence each have no attention mask: under causal
attention no real token sees padding behind it, and the maskless kernels are the fast ones. Rows whose sequences share
what they have in common bring a mask and positions of their own, if the model is proven to follow them. Where the
device has a proven kernel for attention over sequences of different lengths, all rows of a pass lie behind each other
instead, without padding or masks. Hidden states are kept only at positions whose prediction is scored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from realhf.api.sample import SequenceSample
from realhf.backends.attention.row_trees import by_trees
from realhf.backends.embedded.attention_masks import n_sliding_layers, sliding_window
from realhf.backends.training.forward_outputs import Heads, PackedOutputs, ScoredRows
from realhf.backends.training.padded_batches import BATCH_TOKENS
from realhf.backends.training.row_pass import RowPass, masks, packed_pass, row_pass
from realhf.backends.training.row_probe import probe, strayed, tolerance
from realhf.backends.training.selected_logprobs import bent_head
from realhf.backends.training.sequence_inputs import SequenceInputs
from realhf.backends.training.shared_rows import ROW_TOKENS, Row, plain_rows, shared_rows
from realhf.backends.varlen.attention import LAYOUT, can_pack, pack, packed_for_trial
from realhf.backends.varlen.kernel import Kernel, kernel_for, noting_windows

_AGAIN = 5
"""Rows that are computed once more, each alone, which tells how a model rounds."""
_UNFIT = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_log = logging.getLogger(__name__)


class PackedForward:
    """Runs packed sequences through ``model``, a causal language model or a decoder with a ``value_head``; keeps no
    state between calls. ``pace`` is called before each pass. ``shares`` says whether rows may share prefixes, in rows
    of up to ``row_tokens`` positions, and ``packs`` whether they are computed without padding; the constructor finds
    that out by a few tokens. On a CPU attention is computed by pieces of the rows (``row_tree_attention``) if the model
    follows that; not without ``pieces``: layers that are computed again in the backward pass, where nobody tells them
    how, or compiled, which would be done anew for every tree."""

    def __init__(self, model: Any, *, pieces: bool = True, pace: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.pace = pace
        self.heads = heads_of(model)
        self._kernel = self._proven_kernel()
        self._by_trees = not self.packs and pieces and self._follows_trees()
        self.shares = self.packs or self._by_trees or self._follows_masks()
        self.row_tokens = BATCH_TOKENS if self._by_trees else ROW_TOKENS

    @property
    def packs(self) -> bool:
        """Whether the rows of a pass lie behind each other without padding."""
        return self._kernel is not None

    def __call__(self, sample: SequenceSample, rows: Sequence[Row] | None = None) -> PackedOutputs:
        """Return what is known of the positions whose prediction is asked for: where ``loss_mask`` is True at the
        predicted token, or everywhere without one. ``rows`` are computed, in one pass; without them every sequence is a
        row. Raises ValueError on an empty sequence."""
        inputs = SequenceInputs.of(sample)
        chosen = plain_rows(inputs.scored, inputs.tokens) if rows is None else rows
        self.pace()
        found = [self._scored(self._laid_out(chosen, inputs))] if chosen else []
        return PackedOutputs(found, inputs.size, self.heads, self.model.device)

    def nothing(self) -> Tensor:
        """Run one token through the decoder; return a 0 with its graph, which every weight is part of."""
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        nothing = 0.0 * self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state.sum()
        language = None if self.heads.value is not None else self.model.get_output_embeddings()
        for head in (language, self.heads.value):
            for weight in () if head is None else head.parameters():
                nothing = nothing + 0.0 * weight.sum()
        return nothing

    def _laid_out(self, rows: Sequence[Row], inputs: SequenceInputs) -> RowPass:
        if self._kernel is not None:
            return packed_pass(rows, inputs, self._kernel)
        return row_pass(rows, inputs, by_trees=self._by_trees)

    def _scored(self, chosen: RowPass) -> ScoredRows:
        device = self.model.device
        given: dict[str, Any] = {"input_ids": chosen.tokens.to(device), "use_cache": False}
        if chosen.seen is not None:
            depth = given["position_ids"] = chosen.depth.to(device)
            given["attention_mask"] = masks(self.model.config, chosen.seen.to(device), depth, self._dtype)
        if chosen.packed is not None:
            given["position_ids"], given[LAYOUT] = chosen.depth.to(device), chosen.packed.to(device)
            # Models make no mask where they are given one; nobody looks at it.
            one = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
            given["attention_mask"] = masks(self.model.config, one, one[0].long(), self._dtype)
        if chosen.trees is None:
            return self._read(given, chosen)
        with by_trees(self.model):
            given |= {"position_ids": chosen.depth.to(device), "row_trees": chosen.trees}
            return self._read(given, chosen)

    def _read(self, given: dict[str, Any], chosen: RowPass) -> ScoredRows:
        """Run the model, and keep what is scored."""
        device = self.model.device
        column, target, place = (t.to(device) for t in (chosen.column, chosen.target, chosen.place))
        if self.heads.logits and self.heads.language is None and self.heads.bent is None:
            hidden, logits = _through_the_whole_model(self.model, given, column)
            return ScoredRows(hidden, target, place, logits)
        return ScoredRows(_at(self.model.get_decoder()(**given).last_hidden_state, column), target, place)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def _proven_kernel(self) -> Kernel | None:
        """Return the device's kernel for packed rows if the model follows it; else say why rows are padded, where that
        is not the usual."""
        kernel, reason = kernel_for(self.model.device, self._dtype, _head_size(self.model.config))
        if kernel is not None:
            if not can_pack(self.model):
                reason = "the model's attention has no fused kernel"
            else:
                windows: list[int | None] = []
                noting = noting_windows(kernel, windows)
                with packed_for_trial(self.model):
                    reason = self._strays(lambda rows, inputs: packed_pass(rows, inputs, noting))
                reason = reason or _missed_window(self.model.config, windows)
                if not reason:
                    pack(self.model)
                    return kernel
        if reason:
            _log.warning("rows of a pass are padded to one length: %s", reason)
        return None

    def _follows_trees(self) -> bool:
        """Return whether the model takes attention by pieces; if not there still is the mask."""
        if self.model.device.type != "cpu" or sliding_window(self.model.config) is not None:
            return False
        return not self._strays(lambda rows, inputs: row_pass(rows, inputs, by_trees=True))

    def _follows_masks(self) -> bool:
        """Return whether the model follows the masks of shared rows, with a warning if it does not."""
        reason = self._strays(row_pass)
        if reason:
            _log.warning("prefixes are computed for each sequence: %s", reason)
        return not reason

    @torch.no_grad()
    def _strays(self, laid_out: Callable[[Sequence[Row], SequenceInputs], RowPass]) -> str:
        """Compare hidden states of sequences that share prefixes, in rows that ``laid_out`` lays out, with those of the
        same sequences in padded rows of their own: a model may have positions, masks or states that follow the order of
        columns. Return why it does, or ""."""
        inputs = probe(self.model.config)
        if inputs is None:
            return "the model has a window of its own, too wide to try"
        rows = shared_rows(inputs.scored, inputs.tokens)
        alone = plain_rows(rows[0].members, inputs.tokens)
        was_training = self.model.training
        self.model.eval()
        try:
            together, apart = self._scored(laid_out(rows, inputs)).hidden, self._scored(row_pass(alone, inputs)).hidden
            again = torch.cat([self._scored(row_pass([row], inputs)).hidden for row in alone[:_AGAIN]])
        except _UNFIT as error:
            return f"the model takes no layout of rows ({error})"
        finally:
            self.model.train(was_training)
        off, own = strayed(together, apart), strayed(again, apart[: len(again)])
        if len(rows) == 1 and off <= tolerance(self._dtype, own):
            return ""
        return f"in shared rows hidden states are {off:.1e} off"


def _missed_window(config: Any, windows: Sequence[int | None]) -> str:
    """Return what is wrong with the windows that layers gave to their attention, or "": some models have theirs in the
    mask alone, which packed rows do not have, and sequences of a trial are shorter than most windows."""
    window, sliding = sliding_window(config), n_sliding_layers(config)
    if [each for each in windows if each is not None] == [window] * sliding:
        return ""
    return f"its layers do not give their attention the sliding window of {window} tokens"


def _head_size(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def heads_of(model: Any) -> Heads:
    """Find out what ``model`` has on top of its decoder."""
    value = getattr(model, "value_head", None)
    if value is not None:
        return Heads(value=value, logits=False)
    if _has_plain_head(model):
        return Heads(language=lambda: model.get_output_embeddings().weight)
    return Heads(bent=bent_head(model))


def _at(hidden: Tensor, column: Tensor) -> Tensor:
    # The gradient of index_select adds the rows of a repeated column up in order; that of indexing does not on several
    # threads.
    return hidden.flatten(0, 1).index_select(0, column)


def _through_the_whole_model(model: Any, given: dict[str, Any], column: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits at some columns, for a head of which nothing is known: it sees those
    positions only."""
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


@torch.no_grad()
def _has_plain_head(model: Any) -> bool:
    """Return whether logits are output_embeddings(decoder output), without scaling or soft caps on top."""
    tokens = torch.tensor([[0, 1]], device=model.device)
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        return False
    try:
        hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return torch.equal(head(hidden), model(input_ids=tokens, use_cache=False).logits)
    except (AttributeError, TypeError, RuntimeError):
        return False
