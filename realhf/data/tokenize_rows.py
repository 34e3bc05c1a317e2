"""Tokenise the rows of a data file for training, and show the first of them.

    python -m realhf.data.tokenize_rows rows.jsonl --model FOLDER --out DIR

Every row is checked before anything is written. The launcher runs this program before it trains on
a file (``dataset.path``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import realhf
from realhf.api.tool_parser import AUTO
from realhf.base.dataclass_json import to_json_value
from realhf.base.files import atomic_folder
from realhf.data.row_formats import PREFERENCE, SUPERVISED, Exchange, PlainText, read_examples
from realhf.data.tokenized_rows import (
    ALL,
    ASSISTANT,
    COMPLETION,
    EXAMPLES_FILE,
    HELD_OUT,
    SUMMARY_FILE,
    TRAIN,
    ExchangeTokenizer,
    PackedRow,
    RowsSummary,
    digest_rows,
    pack_rows,
)

REFUSE = "refuse"
DROP = "drop"
_SHOWN_TOKENS = 48
"""Maximum number of tokens of a segment that are shown; the middle of longer ones is left out."""
_SEPARATOR = "|"
"""Mark between two shown tokens."""


class LocatedRow(NamedTuple):
    """A tokenised row and its location in the file."""

    where: str
    """Location, such as ``rows.jsonl, line 3``."""
    prompt: str
    """Digest of the row's prompt, or of the whole row if it has none."""
    sequences: tuple[PackedRow, ...]
    """The row's sequence, or the chosen one and the rejected one."""

    @property
    def longest(self) -> int:
        """Length in tokens of the row's longest sequence."""
        return max(len(sequence.ids) for sequence in self.sequences)


def tokenize_file(file: Path, kind: str, encoder: ExchangeTokenizer) -> list[LocatedRow]:
    """Return the tokenised rows of a file. Raises ValueError that names the file and the line of
    the first row that cannot be trained on, and for a file without rows."""
    rows = []
    for where, exchanges in read_examples(file, kind):
        try:
            sequences = tuple(PackedRow.of(encoder.encode(exchange)) for exchange in exchanges)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from error
        rows.append(LocatedRow(where, _digest_prompt(exchanges[0]), sequences))
    if not rows:
        raise ValueError(f"{file}: has no rows")
    return rows


def _digest_prompt(exchange: Exchange) -> str:
    """Return a digest of the exchange's prompt, or of the exchange if it has none."""
    if isinstance(exchange, PlainText):
        value = exchange.prompt or [exchange.completion]
    else:
        value = [exchange.messages[: exchange.prompt or None], exchange.tools]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def select_short(
    file: Path, rows: Sequence[LocatedRow], max_tokens: int, too_long: str
) -> list[LocatedRow]:
    """Return the rows of at most ``max_tokens`` tokens.

    Raises ValueError if there are longer ones and ``too_long`` is ``REFUSE``, and if all are
    longer.
    """
    kept = [row for row in rows if row.longest <= max_tokens]
    if len(kept) == len(rows):
        return kept
    longest = max(rows, key=lambda row: row.longest)
    found = (
        f"{file}: {len(rows) - len(kept)} of {len(rows)} rows are longer than "
        f"rollout.max_total_tokens={max_tokens}; the longest has {longest.longest} tokens "
        f"({longest.where.removeprefix(f'{file}, ')})"
    )
    if not kept:
        raise ValueError(f"{found}: raise rollout.max_total_tokens, no row is left")
    if too_long == REFUSE:
        raise ValueError(
            f"{found}: raise rollout.max_total_tokens, or drop them with dataset.too_long={DROP}"
        )
    return kept


def split_rows(
    rows: Sequence[LocatedRow], held_out: float, seed: int
) -> tuple[list[LocatedRow], list[LocatedRow]]:
    """Return (rows to train on, rows held out), both in the order of the file.

    ``held_out``: fraction of the rows, of which at least one is held out unless it is 0; the seed
    determines which. Rows with the same prompt are never divided, so that no held-out row is
    trained; the number of rows may therefore be smaller or, if every prompt has more, larger.
    Raises ValueError if no row would be left to train on.
    """
    if not held_out:
        return [*rows], []
    count = max(1, round(held_out * len(rows)))
    if count >= len(rows):
        raise ValueError(
            f"dataset.held_out={held_out:g} holds out {count} of {len(rows)} rows and leaves none "
            "to train on"
        )
    sizes = Counter(row.prompt for row in rows)
    if len(sizes) == 1:
        raise ValueError(
            f"dataset.held_out={held_out:g}: the {len(rows)} rows have the same prompt, and those "
            "that are held out must have others than those that are trained"
        )
    prompts = [*sizes]
    random.Random(f"{seed}/held out").shuffle(prompts)
    chosen: set[str] = set()
    left = count
    for prompt in prompts:
        if sizes[prompt] <= left:
            chosen.add(prompt)
            left -= sizes[prompt]
    if not chosen:
        chosen.add(min(prompts, key=lambda prompt: sizes[prompt]))
    return (
        [row for row in rows if row.prompt not in chosen],
        [row for row in rows if row.prompt in chosen],
    )


def summarize(
    kind: str,
    train: Sequence[LocatedRow],
    held_out: Sequence[LocatedRow],
    n_dropped: int,
    digest: str,
) -> RowsSummary:
    """Return the counts of tokenised rows. ``digest``: that of all rows (``digest_rows``)."""
    sequences = [sequence for row in train for sequence in row.sequences]
    return RowsSummary(
        kind,
        len(train),
        len(held_out),
        n_dropped,
        sum(len(sequence.ids) for sequence in sequences),
        sum(int(sequence.mask.sum()) for sequence in sequences),
        max(row.longest for row in [*train, *held_out]),
        digest,
    )


def describe_rows(
    file: Path, summary: RowsSummary, first: Sequence[LocatedRow], tokenizer: Any
) -> str:
    """Return a text about the rows: the counts, and the tokens of the rows ``first``, one line for
    each segment of tokens that are trained (``+``) or not (``-``).

    It names no folder, since later runs may find the same rows in another one.
    """
    parts = [f"{summary.n_train} rows to train on"]
    if summary.n_held_out:
        parts.append(f"{summary.n_held_out} held out")
    if summary.n_dropped:
        parts.append(f"{summary.n_dropped} dropped because they are too long")
    lines = [
        f"{file.name}: {', '.join(parts)}; {summary.n_tokens:,} tokens, {summary.n_trained_tokens:,} of "
        f"them trained; the longest sequence has {summary.longest:,}"
    ]
    for row in first:
        names = ("chosen", "rejected") if len(row.sequences) == 2 else ("",)
        for name, sequence in zip(names, row.sequences, strict=True):
            where = row.where.removeprefix(f"{file}, ")
            label = f"{where}, {name}" if name else where
            trained = int(sequence.mask.sum())
            lines.append(f"{label}: {len(sequence.ids)} tokens, {trained} trained (+)")
            lines += _format_segments(sequence, tokenizer)
    return "\n".join(lines) + "\n"


def _format_segments(sequence: PackedRow, tokenizer: Any) -> Iterator[str]:
    """Yield a line for each run of tokens with the same mask."""
    start = 0
    for place in range(1, len(sequence.ids) + 1):
        if place < len(sequence.ids) and sequence.mask[place] == sequence.mask[start]:
            continue
        ids = sequence.ids[start:place].tolist()
        half = _SHOWN_TOKENS // 2
        left_out = len(ids) - _SHOWN_TOKENS
        if left_out > 0:
            shown = (
                f"{_format_tokens(ids[:half], tokenizer)} [{left_out} more] "
                f"{_format_tokens(ids[-half:], tokenizer)}"
            )
        else:
            shown = _format_tokens(ids, tokenizer)
        yield f"  {'+' if sequence.mask[start] else '-'} {len(ids):5}  {shown}"
        start = place


def _format_tokens(ids: Sequence[int], tokenizer: Any) -> str:
    """Return tokens as text on one line, with marks between them."""
    texts = [
        tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for i in ids
    ]
    # Other control characters could end the line or change the terminal.
    return _SEPARATOR.join(
        "".join(
            c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode()
            for c in text
        )
        for text in texts
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenise the rows of a file, as the command-line arguments describe. Returns the exit
    status."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.data.tokenize_rows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("file", type=Path, help="a .jsonl file, a .parquet file or a folder")
    parser.add_argument("--model", required=True, help="folder or hub id of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--kind", choices=(SUPERVISED, PREFERENCE), default=SUPERVISED)
    parser.add_argument("--train-on", choices=(ASSISTANT, COMPLETION, ALL), default=ASSISTANT)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--too-long", choices=(REFUSE, DROP), default=REFUSE)
    parser.add_argument("--held-out", type=float, default=0.0, help="fraction of the rows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shown", type=int, default=2, help="number of rows to show")
    parser.add_argument("--tool-parser", default=AUTO)
    parser.add_argument("--template-kwargs", type=json.loads, default={}, help="a JSON object")
    args = parser.parse_args(argv)
    concerned = "actor.path: "
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        encoder = ExchangeTokenizer(
            tokenizer,
            train_on=args.train_on,
            chat_template_kwargs=args.template_kwargs,
            tool_parser=args.tool_parser,
        )
        concerned = "dataset.path: "
        rows = tokenize_file(args.file, args.kind, encoder)
        kept = select_short(args.file, rows, args.max_tokens, args.too_long)
        concerned = ""
        train, held_out = split_rows(kept, args.held_out, args.seed)
        parts = {TRAIN: pack_rows(row.sequences for row in train)}
        if held_out:
            parts[HELD_OUT] = pack_rows(row.sequences for row in held_out)
        n_dropped = len(rows) - len(kept)
        summary = summarize(args.kind, train, held_out, n_dropped, digest_rows(parts))
        text = describe_rows(args.file, summary, train[: args.shown], tokenizer)
        with atomic_folder(args.out) as folder:
            for name, arrays in parts.items():
                np.savez(folder / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]
            (folder / SUMMARY_FILE).write_text(json.dumps(to_json_value(summary)), "utf-8")
            (folder / EXAMPLES_FILE).write_text(text, "utf-8")
    except (OSError, ValueError) as error:
        print(f"{concerned}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
