"""Reads supervised data: conversations of a JSONL file as tokens with a loss mask on the assistant's words."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.api.chat import TemplateChat
from realhf.api.observation_text import message_text
from realhf.api.sample import SequenceSample
from realhf.api.source import SampleResult, SourceItem


def conversation_tokens(messages: Sequence[dict[str, Any]], chat: TemplateChat) -> tuple[list[int], list[bool]]:
    """Return ids and loss mask of a conversation that starts with the user's task.

    The ids are those an episode would have had: the same template text around the turns, every turn tokenised alone, no
    observation after the last turn. An assistant message with ``"train": false`` (a mistake to recover from) stays in
    the context and out of the loss.
    """
    ids = chat.first(messages[0]["content"])
    mask = [False] * len(ids)
    closing = chat.closing()[:1]
    for position, message in enumerate(messages[1:], start=1):
        if message["role"] == "assistant":
            turn = [*chat.encode(message["content"]), *closing]
            mask += [bool(message.get("train", True))] * len(turn)
        elif position == len(messages) - 1:
            break
        else:
            turn = chat.following(message_text(message), ended=True)
            mask += [False] * len(turn)
        ids += turn
    return ids, mask


class ChatDataset:
    """Holds the rows of a JSONL file, tokenised once, on the worker. Raises ValueError when a row is longer than
    ``max_tokens``: cut, it would teach commands without their ends."""

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        *,
        max_tokens: int = 1024,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        chat = TemplateChat(tokenizer, template_kwargs=chat_template_kwargs)
        self._rows: list[tuple[list[int], list[bool]]] = []
        with Path(path).open(encoding="utf-8") as lines:
            for line in lines:
                ids, mask = conversation_tokens(json.loads(line)["messages"], chat)
                self._rows.append((ids, mask))
        lengths = [len(ids) for ids, _ in self._rows]
        above = sum(length > max_tokens for length in lengths)
        if above:
            raise ValueError(
                f"{path}: {above} of {len(lengths)} conversations are longer than "
                f"rollout.max_total_tokens={max_tokens} (the longest has {max(lengths)} tokens): raise "
                "it, or leave them out"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, ids: Sequence[str], rows: Sequence[int]) -> SequenceSample:
        """Return the keys ``packed_input_ids`` i64 [L] and ``loss_mask`` bool [L] of these rows, named ``ids``."""
        import torch

        chosen = [self._rows[row] for row in rows]
        lengths = [[len(tokens)] for tokens, _ in chosen]
        return SequenceSample.from_tensors(
            tuple(ids),
            {
                "packed_input_ids": torch.tensor([i for tokens, _ in chosen for i in tokens], dtype=torch.int64),
                "loss_mask": torch.tensor([m for _, mask in chosen for m in mask], dtype=torch.bool),
            },
            {"packed_input_ids": lengths, "loss_mask": lengths},
        )


class ChatDatasetSource:
    """Decides on the master which rows come next: a permutation per (seed, epoch). Ids are ``row@epoch``."""

    def __init__(self, *, seed: int, path: str) -> None:
        with Path(path).open("rb") as lines:
            self._n_rows = sum(1 for _ in lines)
        if self._n_rows == 0:
            raise ValueError(f"{path} holds no conversations")
        self._seed = seed
        self._cursor = 0

    def next_batch(self, n: int) -> list[SourceItem]:
        """Draw the next ``n`` rows; epochs follow one another without a break."""
        items = []
        for _ in range(n):
            epoch, position = divmod(self._cursor, self._n_rows)
            row = self._permutation(epoch)[position]
            items.append(SourceItem(f"{row}@{epoch}", {"row": row}, {}))
            self._cursor += 1
        return items

    def record(self, results: list[SampleResult]) -> None:
        """Do nothing: rows are drawn whatever was learned from them."""
        del results

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows drawn so far, which decides all later draws."""
        return {"cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Raises KeyError without ``cursor``."""
        self._cursor = int(state["cursor"])

    def stats(self) -> dict[str, float]:
        """Return ``epoch``, the epochs drawn so far, with their fraction."""
        return {"epoch": self._cursor / self._n_rows}

    def _permutation(self, epoch: int) -> list[int]:
        if getattr(self, "_cached_epoch", None) != epoch:
            rows = list(range(self._n_rows))
            random.Random(f"{self._seed}/{epoch}").shuffle(rows)
            self._cached_epoch, self._cached_rows = epoch, rows
        return self._cached_rows
