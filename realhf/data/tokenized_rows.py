"""Tokenised rows of a user's data file: how they are made, and the data set that workers load.

A folder of tokenised rows holds ``rows.json`` (a ``RowsSummary``), ``train.npz`` and, if rows were
held out, ``held_out.npz``, and ``examples.txt`` with the first rows as readable tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realhf.api.chat_template import TemplateChat
from realhf.api.sample import SequenceSample
from realhf.api.tool_parser import AUTO
from realhf.base.dataclass_json import from_json_value
from realhf.data.chat_dataset import ShuffledRows, conversation_pieces
from realhf.data.row_formats import Conversation, Exchange, PlainText

ASSISTANT = "assistant"
COMPLETION = "completion"
ALL = "all"
TRAIN = "train"
HELD_OUT = "held_out"
"""Names of the parts of a folder of tokenised rows."""
SUMMARY_FILE = "rows.json"
EXAMPLES_FILE = "examples.txt"


class TokenRow(NamedTuple):
    """A sequence of tokens and which of them are trained."""

    ids: list[int]
    """Token ids."""
    mask: list[bool]
    """Whether each token is trained."""


class PackedRow(NamedTuple):
    """A ``TokenRow`` as arrays, which take a tenth of the memory."""

    ids: np.ndarray
    """Token ids, int32."""
    mask: np.ndarray
    """Whether each token is trained, bool."""

    @staticmethod
    def of(row: TokenRow) -> PackedRow:
        """Return the row as arrays."""
        return PackedRow(np.array(row.ids, np.int32), np.array(row.mask, bool))


class ExchangeTokenizer:
    """Converter of exchanges to tokens with a loss mask.

    Conversations get the ids of a played episode (``conversation_tokens``); after their last turn,
    ``COMPLETION`` and ``ALL`` add what the template writes there. Plain text ends with the
    tokenizer's end-of-sequence token.

    Args:
        train_on: Tokens that are trained: ``ASSISTANT`` (the assistant's messages with their end
            tokens, without those of a prompt), ``COMPLETION`` (everything after the prompt) or
            ``ALL``. A message with ``"train": false`` is never trained. A token of plain text
            that spans the end of the prompt belongs to the completion.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        train_on: str = ASSISTANT,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str = AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._template_kwargs = chat_template_kwargs
        self._tool_parser = tool_parser

    @cached_property
    def _chat(self) -> TemplateChat:
        """The chat template, which plain text does not need."""
        return TemplateChat(
            self._tokenizer,
            template_kwargs=self._template_kwargs,
            tool_parser=self._tool_parser,
        )

    def encode(self, exchange: Exchange) -> TokenRow:
        """Return the tokens of an exchange.

        Raises ValueError if no token would be trained, if ``COMPLETION`` is used without a prompt,
        and ChatTemplateError if the template cannot render the messages.
        """
        is_text = isinstance(exchange, PlainText)
        row = self._encode_text(exchange) if is_text else self._encode_conversation(exchange)
        # The first token of a sequence has no context, so it is never predicted.
        if not any(row.mask[1:]):
            raise ValueError("no token of the row is trained")
        return row

    def _encode_conversation(self, exchange: Conversation) -> TokenRow:
        messages = exchange.messages
        if self._train_on == COMPLETION:
            if not exchange.prompt:
                raise ValueError(
                    f"messages: dataset.train_on={COMPLETION} needs rows with prompt and completion"
                )
            first = messages[exchange.prompt]["role"]
            # The template writes it together with the prompt, whose tokens are not trained.
            if first != "assistant":
                raise ValueError(
                    f"the answer begins with the role {first}, which dataset.train_on={COMPLETION} "
                    "would train: begin it with an assistant message, or move the others to prompt"
                )
        ids: list[int] = []
        mask: list[bool] = []
        is_trained = self._train_on == ALL
        for piece, turn in conversation_pieces(messages, exchange.tools, self._chat):
            is_answer = turn is not None and turn >= exchange.prompt
            is_trained = is_answer if self._train_on == ASSISTANT else is_trained or is_answer
            is_left_out = turn is not None and messages[turn].get("train") is False
            ids += piece
            mask += [is_trained and not is_left_out] * len(piece)
        if self._train_on != ASSISTANT:
            last = next(message for message in reversed(messages) if message["role"] == "assistant")
            tail = self._chat.closing(with_calls=bool(last.get("tool_calls")))[1:]
            ids += tail
            mask += [last.get("train") is not False] * len(tail)
        return TokenRow(ids, mask)

    def _encode_text(self, exchange: PlainText) -> TokenRow:
        end = self._tokenizer.eos_token
        if end is None:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, so plain text would not end; "
                "write the row as messages"
            )
        text = exchange.prompt + exchange.completion
        ids = list(self._tokenizer(text if text.endswith(end) else text + end)["input_ids"])
        # A token may span the end of the prompt, and some tokenizers end each text with a token.
        # What follows the tokens that both have in common is the continuation.
        alone = self._tokenizer(exchange.prompt)["input_ids"]
        n_prompt = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, ids, strict=False))
        )
        return TokenRow(
            ids, [self._train_on == ALL or place >= n_prompt for place in range(len(ids))]
        )


@dataclass(frozen=True)
class RowsSummary:
    """Counts of a folder of tokenised rows. A row of preferences counts as one row."""

    kind: str
    """``SUPERVISED`` or ``PREFERENCE``."""
    n_train: int
    """Rows to train on."""
    n_held_out: int
    """Rows that are held out from training."""
    n_dropped: int
    """Rows that were dropped because they are too long."""
    n_tokens: int
    """Tokens of the rows to train on."""
    n_trained_tokens: int
    """Those tokens that are trained."""
    longest: int
    """Length in tokens of the longest sequence that was kept."""
    digest: str
    """Digest of the tokens and masks of all rows, those that are held out included."""

    @staticmethod
    def read(folder: Path) -> RowsSummary:
        """Read the summary of a folder of tokenised rows. Raises OSError."""
        text = (folder / SUMMARY_FILE).read_text(encoding="utf-8")
        return from_json_value(RowsSummary, json.loads(text))


def pack_rows(rows: Iterable[Sequence[PackedRow]]) -> dict[str, np.ndarray]:
    """Return rows as arrays: ``ids`` int32 and ``mask`` bool of all tokens, and ``lengths`` int64
    (rows, sequences of a row). Every row has the same number of sequences: one, or the chosen and
    the rejected one."""
    sequences = [[*row] for row in rows]
    flat = [sequence for row in sequences for sequence in row]
    return {
        "ids": np.concatenate([sequence.ids for sequence in flat]),
        "mask": np.concatenate([sequence.mask for sequence in flat]),
        "lengths": np.array(
            [[len(sequence.ids) for sequence in row] for row in sequences], np.int64
        ),
    }


def digest_rows(parts: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Return the SHA-256 of the packed rows of all parts of a folder."""
    digest = hashlib.sha256()
    for part, arrays in sorted(parts.items()):
        for name, array in sorted(arrays.items()):
            digest.update(f"{part} {name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class TokenizedRows:
    """Tokenised rows of one part of a folder, loaded on the worker.

    ``path``: the folder. ``part``: ``TRAIN`` or ``HELD_OUT``.
    """

    def __init__(self, path: str, tokenizer: Any = None, *, part: str = TRAIN) -> None:
        del tokenizer
        with np.load(Path(path) / f"{part}.npz") as arrays:
            self._ids = arrays["ids"]
            self._mask = arrays["mask"]
            self._lengths = arrays["lengths"]
        self._ends = np.cumsum(self._lengths.sum(axis=1))

    def __len__(self) -> int:
        return len(self._lengths)

    def load(self, ids: Sequence[str], rows: Sequence[int]) -> SequenceSample:
        """Return the rows with these numbers as a sample with the ids ``ids``.

        Its keys are ``packed_input_ids`` (int64) and ``loss_mask`` (bool) and, for preferences,
        ``rewards`` (f32): 1 for the chosen sequence and 0 for the rejected one.
        """
        import torch

        spans = [slice(self._ends[row] - self._lengths[row].sum(), self._ends[row]) for row in rows]
        lengths = [self._lengths[row].tolist() for row in rows]
        tensors = {
            "packed_input_ids": torch.from_numpy(
                np.concatenate([self._ids[span] for span in spans]).astype(np.int64)
            ),
            "loss_mask": torch.from_numpy(np.concatenate([self._mask[span] for span in spans])),
        }
        seqlens = dict.fromkeys(tensors, lengths)
        if self._lengths.shape[1] == 2:
            tensors["rewards"] = torch.tensor([1.0, 0.0]).repeat(len(rows))
            seqlens["rewards"] = [[1, 1] for _ in rows]
        return SequenceSample.from_tensors(tuple(ids), tensors, seqlens)


class TokenizedRowsSource(ShuffledRows):
    """Order in which the master draws the rows of ``TokenizedRows``."""

    def __init__(self, *, seed: int, path: str) -> None:
        summary = RowsSummary.read(Path(path))
        super().__init__(seed=seed, n_rows=summary.n_train)
        self._digest = summary.digest

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows drawn so far, and the digest of the rows."""
        return {**super().state_dict(), "rows": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by ``state_dict``. Raises ValueError if it belongs to other
        rows, since a resumed run would continue in another order."""
        if state["rows"] != self._digest:
            raise ValueError(
                "dataset.path: the file, or how it is tokenised, has changed since the checkpoint; "
                "restore it, choose another trial_name, or start over with recover_mode=disabled"
            )
        super().load_state_dict(state)
