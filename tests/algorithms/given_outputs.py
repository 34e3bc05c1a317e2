"""Stands for a forward pass whose log-probabilities a test chooses."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class GivenOutputs:
    """Returns the log-probabilities that it was made with, whatever the temperature."""

    head = None

    def __init__(self, logprobs: Tensor, entropy: Tensor | None = None) -> None:
        self._logprobs, self._entropy = logprobs, entropy
        self.kept: dict[str, Tensor] = {}

    def logprobs(self, *, temperature: float = 1.0, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """What was given."""
        return self._logprobs, self._entropy if with_entropy else None

    def values(self) -> Tensor:
        """Refuse: there is no value head."""
        raise ValueError("no value head")

    def keep(self, name: str, values: Tensor) -> None:
        """Keep it for the test to see."""
        self.kept[name] = values.detach()

    @property
    def hidden(self) -> Any:
        """Refuse: there are no hidden states."""
        raise AssertionError("no hidden states here")

    place = target = hidden
