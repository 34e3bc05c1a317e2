"""Batch generation inside the training process, for any causal language model of transformers.

Every request names a *slot*, whose keys and values are kept between calls. The engine reuses them
as far as the cached tokens match the request's prefix, computes the other tokens of all rows
together, and then decodes all rows together. A prefix that rows share (the prompt of a group, the
system message) is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.embedded.compute_threads import ComputeThreads, unmanaged_threads
from realhf.backends.embedded.decode_core import DecodeCore, DecodeTurn, remaining_tokens
from realhf.backends.embedded.sampling import check_request, seed_stream


class EmbeddedGenerator:
    """``GenerationEngine`` that runs the model in this process. Not thread-safe.

    Args:
        model: The model.
        version: Function that returns the version of the weights, called in every ``generate``.
        ready: Function called before ``version``; it may update the weights.
        max_bytes: Function that returns the maximum size of keys and values in bytes, None for no
            limit. Requests that do not fit wait until others have ended.
    """

    def __init__(
        self,
        model: Any,
        *,
        version: Callable[[], int] = lambda: 0,
        ready: Callable[[], object] = lambda: None,
        max_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.model = model
        self._version = version
        self._ready = ready
        self.core = DecodeCore(model, max_bytes=max_bytes)
        self.threads: ComputeThreads = unmanaged_threads()

    @property
    def context_limit(self) -> int:
        """See ``GenerationEngine``."""
        return self.core.limit

    def free(self, slots: Sequence[int] | None = None) -> None:
        """Release these slots (all if None)."""
        self.core.free(slots)

    def release(self) -> None:
        """Release all slots and free the memory of the keys and values until the next
        ``generate``."""
        self.core.release()

    def generate(
        self,
        requests: Sequence[GenRequest],
        config: GenConfig,
        *,
        stop_ids: Sequence[int],
        seed: int,
    ) -> list[GenOutput]:
        """See ``GenerationEngine``.

        A request that fills the model's context gets an empty output with the finish reason
        ``length``. Raises ValueError for an empty prefix, a repeated slot or an option out of
        range, and FloatingPointError for logits that are not finite.
        """
        if len({request.slot for request in requests}) != len(requests):
            raise ValueError("generate: a slot is named by two requests")
        for request in requests:
            check_request(request, config)
            if request.grammar:
                raise ValueError("generate: grammars are followed in continuous batching only")
        outputs = [GenOutput([], [], [], "length") for _ in requests]
        runnable = [
            i for i, r in enumerate(requests) if remaining_tokens(r, config, self.core.limit) > 0
        ]
        if not runnable:
            return outputs
        self._ready()
        turns = self._build_turns(
            [requests[i] for i in runnable], config, frozenset(stop_ids), seed
        )
        was_training = self.model.training
        self.model.eval()
        try:
            version = self._version()
            with self.threads.computing():
                waiting = turns[self.core.join(turns) :]
                while self.core.n_running:
                    ended = self.core.step(version)
                    if ended and waiting:
                        waiting = waiting[self.core.join(waiting) :]
                    self.threads.measure_if_due()
        except BaseException:
            self.core.reset()
            raise
        finally:
            self.model.train(was_training)
        for i, turn in zip(runnable, turns, strict=True):
            if turn.reason == "length" and turn.budget < remaining_tokens(
                turn.request, config, self.core.limit
            ):
                turn.reason = "interrupted"
            outputs[i] = turn.output()
        return outputs

    def _build_turns(
        self, requests: Sequence[GenRequest], config: GenConfig, stops: frozenset[int], seed: int
    ) -> list[DecodeTurn]:
        """Return the turns of these requests.

        A request without a seed gets the random numbers for all its tokens in advance, so that its
        tokens do not depend on when other requests end.
        """
        chunk = config.new_tokens_per_chunk or config.max_new_tokens
        budgets = [min(remaining_tokens(r, config, self.core.limit), chunk) for r in requests]
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(
            max(budgets), len(requests), generator=generator, dtype=torch.float64
        ).numpy()
        return [
            DecodeTurn(
                r,
                config,
                stops,
                budget,
                *((0, draws[:, i]) if r.seed is None else (seed_stream(r.seed), None)),
            )
            for i, (r, budget) in enumerate(zip(requests, budgets, strict=True))
        ]
