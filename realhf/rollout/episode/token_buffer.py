"""Keeps the token ids of one episode exactly as the engine saw and sampled them (docs/reference/environment.md 9).

Nothing here is ever decoded and encoded again: the prefix given to the engine at turn t is the list that is stored, and
the trainer gets the same list.
"""

from __future__ import annotations

from collections.abc import Sequence

from realhf.api.model import GenOutput


class TokenBuffer:
    """Holds the prompt ids and, of the completion, ids, logprobs, versions and mask of equal lengths. ``turn_starts``
    are the places in the completion where policy turns begin."""

    def __init__(self, prompt_ids: Sequence[int], max_total_tokens: int) -> None:
        if not prompt_ids:
            raise ValueError("the first prompt has no tokens")
        self.prompt_ids = list(prompt_ids)
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.loss_mask: list[bool] = []
        self.turn_starts: list[int] = []
        self._max_total = max_total_tokens
        self._generated = 0
        self._policy_spoke_last = False

    @property
    def room(self) -> int:
        """Return how many tokens still fit into the budget."""
        return self._max_total - len(self.prompt_ids) - len(self.completion_ids)

    def prefix(self) -> list[int]:
        """Return what the engine continues: prompt and completion so far."""
        return self.prompt_ids + self.completion_ids

    def append_policy(self, output: GenOutput, *, continues: bool = False) -> None:
        """Add a sampled turn, or (``continues``) the next part of an interrupted one. Raises ValueError when its
        ids, logprobs and versions differ in length or it exceeds the budget."""
        count = len(output.token_ids)
        if not count == len(output.logprobs) == len(output.versions):
            raise ValueError(
                f"engine returned {count} tokens, {len(output.logprobs)} logprobs, {len(output.versions)} versions"
            )
        if self._policy_spoke_last is not continues:
            raise ValueError("a policy turn follows the prompt or an observation, and its rest follows it at once")
        if count > self.room:
            raise ValueError(
                f"policy turn of {count} tokens where max_total_tokens={self._max_total} leaves {self.room}; "
                "the pool's turn_tokens must be at least the engine's max_new_tokens"
            )
        if not continues:
            self.turn_starts.append(len(self.completion_ids))
        self.completion_ids += output.token_ids
        self.logprobs += output.logprobs
        self.versions += output.versions
        self.loss_mask += [True] * count
        self._generated += count
        self._policy_spoke_last = True

    def append_environment(self, ids: Sequence[int]) -> None:
        """Add template and observation tokens, which carry no loss."""
        if not self._policy_spoke_last:
            raise ValueError("environment tokens follow a policy turn only")
        self.completion_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.loss_mask += [False] * len(ids)
        self._policy_spoke_last = False

    def drop_environment(self) -> None:
        """Remove what was added after the last policy turn: nobody will answer it."""
        while self.completion_ids and not self.loss_mask[-1]:
            for column in (self.completion_ids, self.logprobs, self.versions, self.loss_mask):
                column.pop()
        self._policy_spoke_last = bool(self.completion_ids)

    def check(self) -> None:
        """Raise AssertionError unless the invariants of a finished episode hold."""
        sizes = {len(self.completion_ids), len(self.logprobs), len(self.versions), len(self.loss_mask)}
        assert len(sizes) == 1, f"completion parts differ in length: {sizes}"
        assert sum(self.loss_mask) == self._generated, "the mask does not cover exactly the generated tokens"
        assert not self.completion_ids or self.loss_mask[-1], "environment tokens after the last policy turn"
        assert self.room >= 0, "token budget exceeded"
