"""Stands for a forward pass whose log-probabilities a test chooses."""

from __future__ import annotations

from torch import Tensor


class GivenOutputs:
    """Returns the log-probabilities that it was made with, whatever the temperature."""

    head = None

    def __init__(self, logprobs, entropy=None):
        self._logprobs, self._entropy = logprobs, entropy
        self.kept: dict[str, Tensor] = {}

    def logprobs(self, *, temperature=1.0, with_entropy=False):
        """What was given."""
        return self._logprobs, self._entropy if with_entropy else None

    def values(self):
        """Refuse: there is no value head."""
        raise ValueError("no value head")

    def keep(self, name, values):
        """Keep it for the test to see."""
        self.kept[name] = values.detach()

    @property
    def hidden(self):
        """Refuse: there are no hidden states."""
        raise AssertionError("no hidden states here")

    place = target = hidden
