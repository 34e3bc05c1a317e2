"""Reads supervised data: conversations of a JSONL file as tokens with a loss mask on the assistant's words."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.api.chat_template import TemplateChat
from realhf.api.messages import demonstration_problems
from realhf.api.sample import SequenceSample
from realhf.api.source import SampleResult, SourceItem
from realhf.api.tool_parser import AUTO
from realhf.base.json_rows import count_json_lines, read_json_lines


def conversation_tokens(
    row: Mapping[str, Any], chat: TemplateChat, system_prompt: str = ""
) -> tuple[list[int], list[bool]]:
    """Return ids and loss mask of a demonstrated episode.

    ``row`` has ``messages`` of the roles system, user, assistant and tool, and perhaps the schemas of ``tools``, in the
    form of the OpenAI chat API; ``system_prompt`` precedes them. The ids are those that the episode would have had: the
    same template text around the turns, every turn tokenised alone, nothing after the last turn. An assistant message
    with ``"train": false`` (a mistake to recover from) stays in the context and out of the loss;
    ``reasoning_content`` is part of the turn, as the template writes it, and stays in the context of later turns.
    Raises ValueError for what ``demonstration_problems`` finds, ChatTemplateError for messages that the template does
    not render.
    """
    for problem in demonstration_problems(row):
        raise ValueError(problem)
    messages, tools = row["messages"], row.get("tools") or ()
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    ids = chat.opening([*system, *messages[: turns[0]]], tools)
    mask = [False] * len(ids)
    closing = chat.closing()[:1]
    for place, following in zip(turns, [*turns[1:], None], strict=True):
        turn = [*chat.encode_turn(messages[place], tools), *closing]
        mask += [messages[place].get("train") is not False] * len(turn)
        ids += turn
        if following is None:
            break
        between_ids = chat.following_messages(messages[place + 1 : following], ended=True, tools=tools)
        mask += [False] * len(between_ids)
        ids += between_ids
    return ids, mask


class ChatDataset:
    """Holds the rows of a JSONL file, tokenised once, on the worker. Raises ValueError when a row is longer than
    ``max_tokens`` (cut, it would teach turns without their ends) or is no demonstration."""

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        *,
        max_tokens: int = 1024,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        tool_parser: str = AUTO,
    ) -> None:
        chat = TemplateChat(tokenizer, template_kwargs=chat_template_kwargs, tool_parser=tool_parser)
        self._rows: list[tuple[list[int], list[bool]]] = []
        for row in read_json_lines(Path(path)):
            try:
                self._rows.append(conversation_tokens(row.values, chat, system_prompt))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"{row.where}: {error}") from error
        if not self._rows:
            raise ValueError(f"{path} holds no conversations")
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
        self._n_rows = count_json_lines(Path(path))
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
