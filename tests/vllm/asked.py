"""What the tests ask of a generator, and what a trainer says about the answer."""

from __future__ import annotations

import queue
import time
from typing import Any

import torch

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.vllm.generation import VllmGenerator

LIMIT_S = 60.0
PROMPT = [5, 9, 200, 41, 77, 130, 12, 300, 8, 33]
LONG = GenConfig(max_new_tokens=1600)
"""Enough to be in play while weights are replaced twice, which may take two seconds each on a busy machine."""


class Asked:
    """Submits requests and waits for their outputs by slot."""

    def __init__(self, generator: VllmGenerator) -> None:
        self.generator = generator
        self._done: queue.Queue[tuple[int, GenOutput | Exception]] = queue.Queue()

    def submit(
        self, slot: int, tokens: list[int], config: GenConfig, stop_ids: tuple[int, ...] = (), **more: Any
    ) -> None:
        request = GenRequest(slot, tokens, **more)
        self.generator.submit(request, config, stop_ids, lambda output: self._done.put((slot, output)))

    def outcomes(self, count: int = 1) -> dict[int, GenOutput | Exception]:
        return dict(self._done.get(timeout=LIMIT_S) for _ in range(count))

    def output(self) -> GenOutput:
        ((_, outcome),) = self.outcomes().items()
        assert isinstance(outcome, GenOutput), outcome
        return outcome

    def nothing_for(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self._done.empty()


def logprobs_of(model: Any, prefix: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """What a trainer computes for ``tokens`` after ``prefix``, fp32."""
    with torch.inference_mode():
        logits = model(torch.tensor([prefix + tokens])).logits[0, len(prefix) - 1 : -1].float()
    rows = torch.log_softmax(logits / (temperature or 1.0), -1)
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
