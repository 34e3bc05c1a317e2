"""A generation engine: a table of logits, row t for what follows token t. One thread samples for all requests."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realhf.api.config import GenConfig
from realhf.api.generation import Done, HeldTensor
from realhf.api.keys import dtype_tag
from realhf.api.model import GenOutput, GenRequest
from realhf.base.tensor_digest import TensorDigester


@dataclass
class _Entry:
    """A request in play and what was sampled for it. ``finish`` is empty as long as it goes on."""

    request: GenRequest
    config: GenConfig
    stop_ids: frozenset[int]
    done: Done
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""

    def sample(self, table: Tensor, version: int) -> None:
        """Sample one token. With a seed it depends on that and on its position, and not on other requests."""
        ids = [*self.request.token_ids, *self.tokens]
        logits = table[ids[-1]].float()
        if self.config.temperature == 0:
            logprobs = logits.log_softmax(-1)
            token = int(logits.argmax())
        else:
            logprobs = (logits / self.config.temperature).log_softmax(-1)
            random = torch.Generator()
            if self.request.seed is None:
                random.seed()
            else:
                random.manual_seed((self.request.seed * 1_000_003 + len(ids)) % 2**63)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=random))
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        self.versions.append(version)
        if token in self.stop_ids:
            self.finish = "stop"
        elif self.request.sampled + len(self.tokens) >= self.config.max_new_tokens:
            self.finish = "length"


class BigramGenerator:
    """A ``StreamingGenerator``. All state is guarded by one condition, and tokens are sampled while it is held: who
    holds it knows that no token is being sampled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._table: Tensor | None = None
        self._version = -1
        self._entries: dict[int, _Entry] = {}
        self._paused = self._closed = False
        self._generated = 0
        self._thread = threading.Thread(target=self._run, name="bigram-generator", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The policy version in use; -1 before the first weights."""
        return self._version

    def submit(self, request: GenRequest, config: GenConfig, stop_ids: Sequence[int], done: Done) -> None:
        """Queue a request under its slot."""
        if not request.token_ids:
            raise ValueError("a request needs at least one token to continue")
        with self._changed:
            self._entries[request.slot] = _Entry(request, config, frozenset(stop_ids), done)
            self._changed.notify_all()

    def abort(self, slots: Sequence[int]) -> None:
        """End these requests with the tokens they have, also while the engine is paused."""
        with self._changed:
            for slot in slots:
                if slot in self._entries:
                    self._entries[slot].finish = "aborted"
            self._changed.notify_all()

    def free(self, slots: Sequence[int]) -> None:
        """Do nothing: a bigram model keeps nothing between tokens."""
        del slots

    def pause(self, timeout_s: float) -> None:
        """Stop sampling."""
        if not self._changed.acquire(timeout=timeout_s):
            raise TimeoutError(f"a token took longer than {timeout_s:g} s")
        self._paused = True
        self._changed.release()

    def resume(self) -> None:
        """Sample again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def load_weights(self, version: int, tensors: Mapping[str, Tensor], *, again: bool = False) -> None:
        """Take the table of a newer version between two tokens."""
        with self._changed:
            if version == self._version and not again:
                return
            if version < self._version:
                raise ValueError(f"version {version} is older than {self._version}, which is in use")
            table = tensors.get("logits")
            if table is None or (self._table is not None and table.shape != self._table.shape):
                raise ValueError("the weights need a tensor 'logits' of the shape of the one before")
            self._table, self._version = table.detach().cpu().clone(), version
            self._changed.notify_all()

    def weight_digests(self, names: Sequence[str]) -> dict[str, HeldTensor]:
        """Return a digest of the table that is sampled from."""
        with self._changed:
            if self._table is None or "logits" not in names:
                return {}
            return {"logits": HeldTensor(dtype_tag(self._table.dtype), TensorDigester().digest(self._table))}

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and what goes on now."""
        with self._changed:
            n = float(len(self._entries))
            counters = dict.fromkeys(("prefill_tokens", "reused_tokens", "busy_s"), 0.0)
            now = {"running": n, "waiting": 0.0} if self._sampling else {"running": 0.0, "waiting": n}
            return {"generated_tokens": float(self._generated), **counters, **now}

    def close(self) -> None:
        """End the thread; requests in play get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def _sampling(self) -> bool:
        return self._table is not None and not self._paused

    def _has_work(self) -> bool:
        waits = any(entry.finish for entry in self._entries.values())
        return self._closed or waits or (self._sampling and bool(self._entries))

    def _run(self) -> None:
        """Sample a token for every request, again and again. Answers go out without the lock: they may submit more."""
        while not self._closed:
            with self._changed:
                self._changed.wait_for(self._has_work)
                ended = [] if self._closed else self._round()
            for entry in ended:
                entry.done(GenOutput(entry.tokens, entry.logprobs, entry.versions, entry.finish))
        for entry in self._entries.values():
            entry.done(RuntimeError("the engine was closed"))

    def _round(self) -> list[_Entry]:
        """Sample one token for each request and take out those that have ended."""
        for entry in self._entries.values():
            if self._table is not None and not self._paused and not entry.finish:
                entry.sample(self._table, self._version)
                self._generated += 1
        ended = [slot for slot, entry in self._entries.items() if entry.finish]
        return [self._entries.pop(slot) for slot in ended]
