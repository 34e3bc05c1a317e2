"""Makes the masks that say what the layers of a model see of the cached rows: all earlier tokens, or the last ones
only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FULL, _SLIDING = "full_attention", "sliding_attention"


def sliding_window(config: Any) -> int | None:
    """Return how many tokens the layers with a sliding window see, their own included; None if no layer has one."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    slides = _SLIDING in kinds if kinds else getattr(config, "use_sliding_window", True)
    return int(window) if window and slides else None


def n_sliding_layers(config: Any) -> int:
    """Return how many layers of a model with this configuration have its sliding window."""
    if sliding_window(config) is None:
        return 0
    kinds = getattr(config.get_text_config(), "layer_types", None)
    return list(kinds).count(_SLIDING) if kinds else int(config.get_text_config().num_hidden_layers)


class AttentionMasks:
    """Makes additive masks for a model with this configuration, 0 or -inf in ``dtype``. Raises ValueError for layers
    that see anything else than all tokens or the last ones."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._window = sliding_window(config)
        self._kinds = frozenset(getattr(config.get_text_config(), "layer_types", None) or ())
        if odd := sorted(self._kinds - {_FULL, _SLIDING}):
            raise ValueError(f"{type(config).__name__}: layers of the kind {odd[0]} cannot generate from cached rows")

    def of(self, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Make the mask for queries at ``positions`` int64 (n, n_query) over ``width`` columns: (n, 1, n_query, width),
        or one mask for each kind of layer where a model has several."""
        column, at = torch.arange(width, device=positions.device), positions[:, None, :, None]
        later = column > at
        full = self._mask(later)
        if self._window is None:
            return full
        # A row that idles beyond the width must see something too: a softmax over nothing is not a number.
        windowed = self._mask(later | (column <= at.clamp(max=width - 1) - self._window))
        return {_FULL: full, _SLIDING: windowed} if self._kinds else windowed

    def _mask(self, closed: Tensor) -> Tensor:
        zeros = torch.zeros(closed.shape, dtype=self._dtype, device=closed.device)
        return zeros.masked_fill_(closed, float("-inf"))
