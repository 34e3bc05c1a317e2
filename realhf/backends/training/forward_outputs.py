"""Holds the hidden states that a forward pass was asked for, and makes log-probabilities and values of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from realhf.backends.training.selected_logprobs import BentHead, selected_logprobs


@dataclass(frozen=True)
class ScoredRows:
    """Holds the asked-for positions of one pass through the model. ``hidden`` (m, width); ``target`` i64 (m,): the
    token that follows; ``place`` i64 (m,): where each stands in the packed L-1 layout; ``logits`` (m, vocabulary) only
    where nothing is known of the model's head."""

    hidden: Tensor
    target: Tensor
    place: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class Heads:
    """Says what a model has on top of its hidden states. ``language`` returns the weight (vocabulary, width) of a head
    that is a product with it and nothing else; ``bent`` is a head that does a bit more, where that is known; ``value``
    is a projection to one number. ``logits``: there is a language-model head, of whatever kind."""

    language: Callable[[], Tensor] | None = None
    bent: BentHead | None = None
    value: nn.Module | None = None
    logits: bool = True


class PackedOutputs:
    """Implements ``ForwardOutputs``. ``size`` is the sum of L-1 over the sequences of the micro-batch."""

    def __init__(self, rows: Sequence[ScoredRows], size: int, heads: Heads, device: torch.device) -> None:
        self._rows, self._size, self._heads, self._device = list(rows), size, heads, device
        self.kept: dict[str, Tensor] = {}

    def logprobs(self, *, temperature: float = 1.0, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """See ``ForwardOutputs``."""
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if not self._heads.logits:
            raise ValueError("this model has a value head and no language-model head: it gives no log-probabilities")
        found = [self._score(rows, temperature, with_entropy) for rows in self._rows]
        logprobs = self._spread([logprobs for logprobs, _ in found])
        return logprobs, (self._spread([entropy for _, entropy in found]) if with_entropy else None)

    def values(self) -> Tensor:
        """See ``ForwardOutputs``."""
        head = self._heads.value
        if head is None:
            raise ValueError("this model has no value head: a critic needs a ModelSpec with head='value'")
        return self._spread([head(rows.hidden)[..., 0].float() for rows in self._rows])

    def keep(self, name: str, values: Tensor) -> None:
        """See ``ForwardOutputs``. Raises ValueError on another shape."""
        if values.shape != (self._size,):
            raise ValueError(f"keep({name!r}): shape {tuple(values.shape)}, the micro-batch has ({self._size},)")
        self.kept[name] = values.detach().float().cpu()

    @property
    def hidden(self) -> Tensor:
        """See ``ForwardOutputs``."""
        return torch.cat([rows.hidden for rows in self._rows]) if self._rows else torch.zeros(0, 0, device=self._device)

    @property
    def place(self) -> Tensor:
        """See ``ForwardOutputs``."""
        return self._joined([rows.place for rows in self._rows])

    @property
    def target(self) -> Tensor:
        """See ``ForwardOutputs``."""
        return self._joined([rows.target for rows in self._rows])

    @property
    def head(self) -> Tensor | None:
        """See ``ForwardOutputs``."""
        head = self._heads.language
        return None if head is None else head()

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=self._device)

    def _spread(self, parts: list[Tensor]) -> Tensor:
        """Put the numbers of all rows, in their order, into the packed L-1 layout."""
        blank = torch.zeros(self._size, device=self._device)
        return blank.index_copy(0, self.place, torch.cat(parts)) if parts else blank

    def _score(self, rows: ScoredRows, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        if rows.logits is None and self._heads.bent is not None:
            return self._heads.bent.score(rows.hidden, rows.target, temperature, with_entropy=with_entropy)
        if rows.logits is None:
            head = self.head
            assert head is not None, "an unknown head gives its logits"
            return selected_logprobs(rows.hidden, head, rows.target, temperature, with_entropy=with_entropy)
        log_p = functional.log_softmax(rows.logits.float() / temperature, -1)
        logprobs = log_p.gather(-1, rows.target[:, None])[:, 0]
        return logprobs, -(log_p.exp() * log_p).sum(-1) if with_entropy else torch.zeros_like(logprobs)
