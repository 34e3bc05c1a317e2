"""Generates batches inside the training process, for any causal language model of transformers.

Every request names a *slot*. The engine keeps a slot's keys and values between calls, compares the tokens it holds with
the request's prefix, reuses what matches and computes the rest of all rows together; then all rows decode together.
Rows that start alike (the rollouts of a group, the common system text) compute their shared prefix once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.embedded.compute_threads import ComputeThreads, unmanaged
from realhf.backends.embedded.decode_core import DecodeCore, Turn, rest_of_turn
from realhf.backends.embedded.sampling import check_request, stream_of


class EmbeddedGenerator:
    """Implements ``GenerationEngine`` by running ``model`` itself. It calls ``version`` at every ``generate`` and
    stamps the number on the tokens; ``ready`` is called before, and may still write weights. ``most_bytes`` bounds the
    memory of keys and values: requests that find no room are played when others have ended. Not thread-safe."""

    def __init__(
        self,
        model: Any,
        *,
        version: Callable[[], int] = lambda: 0,
        ready: Callable[[], object] = lambda: None,
        most_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.model = model
        self._version, self._ready = version, ready
        self.core = DecodeCore(model, most_bytes=most_bytes)
        self.threads: ComputeThreads = unmanaged()

    @property
    def context_limit(self) -> int:
        """See ``GenerationEngine``."""
        return self.core.limit

    def free(self, slots: Sequence[int] | None = None) -> None:
        """Forget these slots (all when None)."""
        self.core.free(slots)

    def release(self) -> None:
        """Forget all slots and give the memory of their keys and values back, until the next call."""
        self.core.release()

    def generate(
        self, requests: Sequence[GenRequest], config: GenConfig, *, stop_ids: Sequence[int], seed: int
    ) -> list[GenOutput]:
        """See ``GenerationEngine``. A request that leaves no room in the model's context gets an empty output with
        finish reason ``length``. Raises ValueError on an empty prefix, a slot named twice or an option out of range,
        and FloatingPointError when the model returns logits that are not finite."""
        if len({request.slot for request in requests}) != len(requests):
            raise ValueError("generate: a slot is named by two requests")
        for request in requests:
            check_request(request, config)
        outputs = [GenOutput([], [], [], "length") for _ in requests]
        room = [i for i, r in enumerate(requests) if rest_of_turn(r, config, self.core.limit) > 0]
        if not room:
            return outputs
        self._ready()
        turns = self._turns([requests[i] for i in room], config, frozenset(stop_ids), seed)
        was_training = self.model.training
        self.model.eval()
        try:
            version = self._version()
            with self.threads.computing():
                waiting = turns[self.core.join(turns) :]
                while self.core.live:
                    ended = self.core.step(version)
                    if ended and waiting:
                        waiting = waiting[self.core.join(waiting) :]
                    self.threads.pace()
        except BaseException:
            self.core.reset()
            raise
        finally:
            self.model.train(was_training)
        for i, turn in zip(room, turns, strict=True):
            if turn.reason == "length" and turn.budget < rest_of_turn(turn.request, config, self.core.limit):
                turn.reason = "interrupted"
            outputs[i] = turn.output()
        return outputs

    def _turns(self, requests: Sequence[GenRequest], config: GenConfig, stops: frozenset[int], seed: int) -> list[Turn]:
        """Make the turns of these requests. One without a seed gets a draw per step in advance, so that its tokens do
        not depend on when others end."""
        chunk = config.new_tokens_per_chunk or config.max_new_tokens
        budgets = [min(rest_of_turn(r, config, self.core.limit), chunk) for r in requests]
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(max(budgets), len(requests), generator=generator, dtype=torch.float64).numpy()
        return [
            Turn(r, config, stops, budget, *((0, draws[:, i]) if r.seed is None else (stream_of(r.seed), None)))
            for i, (r, budget) in enumerate(zip(requests, budgets, strict=True))
        ]
