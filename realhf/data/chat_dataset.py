"""Data for supervised training: tokenised conversations of a JSONL file, with a loss mask that
selects the assistant's turns."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
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
    """Return (token ids, loss mask) of a demonstration.

    The ids are the same as those of a played episode with these messages: the same template text
    around the turns, every turn tokenised separately, nothing after the last turn. An assistant
    message with ``"train": false`` (a mistake to recover from) stays in the context but not in the
    loss. ``reasoning_content`` is part of its turn, as the template renders it, and stays in the
    context of later turns.

    Args:
        row: Demonstration in the format of the OpenAI chat API: ``messages`` with the roles system,
            user, assistant and tool and, optionally, the schemas of ``tools``.
        chat: Chat template and tokenizer.
        system_prompt: System message to put before the messages; empty for none.

    Raises ValueError for the first problem that ``demonstration_problems`` finds, and
    ChatTemplateError for messages that the template cannot render.
    """
    for problem in demonstration_problems(row):
        raise ValueError(problem)
    messages = row["messages"]
    ids: list[int] = []
    mask: list[bool] = []
    for piece, turn in conversation_pieces(messages, row.get("tools") or (), chat, system_prompt):
        is_trained = turn is not None and messages[turn].get("train") is not False
        ids += piece
        mask += [is_trained] * len(piece)
    return ids, mask


def conversation_pieces(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    chat: TemplateChat,
    system_prompt: str = "",
) -> Iterator[tuple[list[int], int | None]]:
    """Yield the token ids of a conversation in pieces, each with the index of the assistant message
    that it is, or None for the text before, between and after such messages.

    A turn's piece ends with the token that ends the turn. The pieces end with the last turn.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    yield chat.opening([*system, *messages[: turns[0]]], tools), None
    for index, following in zip(turns, [*turns[1:], None], strict=True):
        closing = chat.closing(with_calls=bool(messages[index].get("tool_calls")))[:1]
        yield [*chat.encode_turn(messages[index], tools), *closing], index
        if following is not None:
            between = messages[index + 1 : following]
            ids = chat.following_messages(between, ended=True, end=closing[0], tools=tools)
            yield ids, None


class ChatDataset:
    """Tokenised conversations of a JSONL file, loaded on the worker.

    Raises ValueError if a row is not a valid demonstration or is longer than ``max_tokens``. Rows
    are not truncated, because that would train on incomplete turns.
    """

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
        chat = TemplateChat(
            tokenizer, template_kwargs=chat_template_kwargs, tool_parser=tool_parser
        )
        self._rows: list[tuple[list[int], list[bool]]] = []
        for row in read_json_lines(Path(path)):
            try:
                self._rows.append(conversation_tokens(row.values, chat, system_prompt))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"{row.where}: {error}") from error
        if not self._rows:
            raise ValueError(f"{path} has no conversations")
        lengths = [len(ids) for ids, _ in self._rows]
        n_too_long = sum(length > max_tokens for length in lengths)
        if n_too_long:
            raise ValueError(
                f"{path}: {n_too_long} of {len(lengths)} conversations are longer than "
                f"rollout.max_total_tokens={max_tokens} (the longest has {max(lengths)} tokens): "
                f"raise "
                "it, or leave them out"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, ids: Sequence[str], rows: Sequence[int]) -> SequenceSample:
        """Return the conversations with these row numbers as a sample with the ids ``ids`` and the
        keys ``packed_input_ids`` (int64) and ``loss_mask`` (bool), both of the conversation's
        length."""
        import torch

        selected = [self._rows[row] for row in rows]
        lengths = [[len(tokens)] for tokens, _ in selected]
        return SequenceSample.from_tensors(
            tuple(ids),
            {
                "packed_input_ids": torch.tensor(
                    [i for tokens, _ in selected for i in tokens], dtype=torch.int64
                ),
                "loss_mask": torch.tensor(
                    [m for _, mask in selected for m in mask], dtype=torch.bool
                ),
            },
            {"packed_input_ids": lengths, "loss_mask": lengths},
        )


class ShuffledRows:
    """Order in which the master draws the rows of a data set: a permutation for each seed and
    epoch. Sample ids are ``row@epoch``."""

    def __init__(self, *, seed: int, n_rows: int) -> None:
        self._n_rows = n_rows
        self._seed = seed
        self._cursor = 0

    def next_batch(self, n: int) -> list[SourceItem]:
        """Return the next ``n`` rows. A batch may contain rows of two epochs."""
        items = []
        for _ in range(n):
            epoch, position = divmod(self._cursor, self._n_rows)
            row = self._permutation(epoch)[position]
            items.append(SourceItem(f"{row}@{epoch}", {"row": row}, {}))
            self._cursor += 1
        return items

    def record(self, results: list[SampleResult]) -> None:
        """Ignore the results: the order of the rows does not depend on them."""
        del results

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows drawn so far, which determines all later rows."""
        return {"cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by ``state_dict``. Raises KeyError if it lacks ``cursor``."""
        self._cursor = int(state["cursor"])

    def stats(self) -> dict[str, float]:
        """Return {"epoch": number of epochs drawn so far, as a fraction}."""
        return {"epoch": self._cursor / self._n_rows}

    def _permutation(self, epoch: int) -> list[int]:
        """Return the row numbers in their order for this epoch."""
        if getattr(self, "_cached_epoch", None) != epoch:
            rows = list(range(self._n_rows))
            random.Random(f"{self._seed}/{epoch}").shuffle(rows)
            self._cached_epoch = epoch
            self._cached_rows = rows
        return self._cached_rows


class ChatDatasetSource(ShuffledRows):
    """Order in which the master draws the rows of a ``ChatDataset``."""

    def __init__(self, *, seed: int, path: str) -> None:
        n_rows = count_json_lines(Path(path))
        if n_rows == 0:
            raise ValueError(f"{path} has no conversations")
        super().__init__(seed=seed, n_rows=n_rows)
