"""Token masks: which tokens a grammar allows next, computed by the package llguidance."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CACHED = 64
"""Number of grammars that are kept compiled."""
_WORD_BITS = 32
"""Number of tokens per entry of a packed mask."""

_NOT_ALLOWED = "doesn't satisfy the grammar"
"""Words of llguidance for tokens that leave a grammar. Other errors are limits of its own."""


class GrammarProblem(ValueError):
    """Raised for a grammar that cannot be compiled, or that a turn has already left."""


class TokenMask:
    """What the grammar of one turn allows next. Not thread-safe.

    Args:
        matcher: Matcher of the grammar at its start.
        sampled: Tokens that the turn already has.
        renew: Builder of another matcher at the start of the grammar, which shares nothing: the
            copies of a matcher reach a limit of llguidance together.

    Raises GrammarProblem if the tokens do not follow the grammar. If they reach a limit of
    llguidance, ``fill`` raises it.
    """

    def __init__(
        self, matcher: Any, sampled: Sequence[int] = (), renew: Callable[[], Any] | None = None
    ) -> None:
        self._matcher = matcher
        self._sampled = list(sampled)
        self._renew = renew
        follows = matcher.consume_tokens(self._sampled)
        if not follows and _NOT_ALLOWED in matcher.get_error():
            raise GrammarProblem("the tokens of the interrupted turn do not follow its grammar")

    def fill(self, packed: np.ndarray) -> None:
        """Write the allowed tokens into ``packed``, int32 (words,), token 0 in the lowest bit of
        the first word. A stop token is allowed where the grammar may end.

        Raises GrammarProblem if the grammar exceeds the limits of llguidance, or allows no token.
        """
        self._matcher.unsafe_compute_mask_ptr(packed.ctypes.data, packed.nbytes)
        if self._matcher.is_error() and self._restart():
            self._matcher.unsafe_compute_mask_ptr(packed.ctypes.data, packed.nbytes)
        if self._matcher.is_error():
            raise GrammarProblem(f"the token mask failed: {_first_line(self._matcher)}")
        if not packed.any():
            raise GrammarProblem("the grammar allows no token")

    def accept(self, token: int) -> None:
        """Add a sampled token, which the mask allowed and which does not end the turn. Raises
        GrammarProblem."""
        self._sampled.append(token)
        if not self._matcher.consume_token(token) and not self._restart():
            raise GrammarProblem(f"the token mask failed: {_first_line(self._matcher)}")

    def _restart(self) -> bool:
        """Go on with a new matcher, once; return whether it follows the turn."""
        if self._renew is None:
            return False
        self._matcher = self._renew()
        self._renew = None
        return self._matcher.consume_tokens(self._sampled)


class TokenMasks:
    """Factory of the token masks of one model. Thread-safe.

    Args:
        tokenizer: Tokenizer of the model.
        stop_ids: Token ids that end a turn.
        vocabulary: Number of logits of the model. Tokens that the tokenizer does not have are never
            allowed.

    Raises ValueError for a tokenizer that llguidance cannot read, and ImportError without it.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], vocabulary: int) -> None:
        from llguidance.hf import from_tokenizer

        if len(tokenizer) > vocabulary:
            raise ValueError(
                f"rollout.agent_structured=constrain: the tokenizer has {len(tokenizer)} tokens, "
                f"the model {vocabulary}"
            )
        try:
            self._tokenizer = from_tokenizer(
                tokenizer, n_vocab=vocabulary, eos_token=list(stop_ids)
            )
        except Exception as error:
            raise ValueError(
                f"rollout.agent_structured=constrain: llguidance cannot read the tokenizer: {error}"
            ) from None
        self._words = -(-vocabulary // _WORD_BITS)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        """Matchers at the start of their grammars, the most recently used last."""
        self._lock = threading.Lock()

    def start(self, grammar: str, sampled: Sequence[int] = ()) -> TokenMask:
        """Return the mask of a turn that follows a grammar and already has the tokens
        ``sampled``. Raises GrammarProblem."""
        with self._lock:
            start = self._compiled.get(grammar)
        # Not under the lock: compiling may take long, and others' turns go on meanwhile.
        start = start or self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = start
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
            matcher = start.deep_copy()
        return TokenMask(matcher, sampled, partial(self._renew, grammar, start))

    def _renew(self, grammar: str, failed: Any) -> Any:
        """Return a new matcher of a grammar, and forget the one whose copies failed."""
        with self._lock:
            if self._compiled.get(grammar) is failed:
                del self._compiled[grammar]
        return self._compile(grammar)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise GrammarProblem(f"no valid grammar: {_first_line(matcher)}")
        return matcher

    def allocate(self, rows: int) -> np.ndarray:
        """Return packed masks that allow nothing, int32 (rows, words)."""
        return np.zeros((rows, self._words), dtype=np.int32)


def mask_logits(logits: Tensor, rows: Sequence[int], packed: np.ndarray) -> Tensor:
    """Return a copy of ``logits`` (n, vocabulary) in fp32 with -inf for the tokens that the masks
    of ``rows`` do not allow. ``packed`` int32 (len(rows), words) is as in ``TokenMask.fill``."""
    vocabulary = logits.shape[-1]
    device = logits.device
    words = torch.from_numpy(packed).to(device)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=device)
    banned = ((words[:, :, None] >> bits) & 1).eq(0).flatten(1)[:, :vocabulary]
    index = torch.tensor(rows, dtype=torch.int64, device=device)
    masked = logits.float().clone()
    masked[index] = masked[index].masked_fill(banned, float("-inf"))
    return masked


def _first_line(matcher: Any) -> str:
    return str(matcher.get_error()).partition("\n")[0][:200]
