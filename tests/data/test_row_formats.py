"""Rows of users' files: the formats that are read, and that each fault names its line and field."""

from __future__ import annotations

import importlib.util
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from realhf.base.json_rows import read_row_file
from realhf.data.row_formats import (
    PREFERENCE,
    SUPERVISED,
    Conversation,
    PlainText,
    check_rows,
    read_examples,
)

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
ASK = {"role": "user", "content": "Where?"}
SAY = {"role": "assistant", "content": "Here."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
ANSWER = {"role": "tool", "content": "a box"}


def read(folder: Path, kind: str, *rows: dict[str, Any]) -> list[Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [example.exchanges for example in read_examples(file, kind)]


def test_supervised_rows(tmp_path: Path):
    rows = [
        {"messages": [ASK, CALL, ANSWER, SAY], "tools": [TOOL], "source": "a log"},
        {"messages": [ASK, SAY], "tools": json.dumps([TOOL])},
        {"prompt": "Where?", "completion": " Here."},
        {"prompt": [ASK, SAY, ASK], "completion": [CALL, ANSWER, SAY], "tools": [TOOL]},
        {"prompt": "unused", "messages": [ASK, SAY]},
    ]
    exchanges = [each for (each,) in read(tmp_path, SUPERVISED, *rows)]
    assert [getattr(each, "prompt", None) for each in exchanges] == [0, 0, "Where?", 3, 0]
    assert exchanges[2] == PlainText("Where?", " Here.")
    for number in (0, 1, 3):
        assert exchanges[number].tools == [TOOL]
    assert exchanges[3].messages == [ASK, SAY, ASK, CALL, ANSWER, SAY]


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ({"thinking": "hm"}, {"reasoning_content": "hm"}),
        ({"reasoning": "hm"}, {"reasoning_content": "hm"}),
        ({"reasoning_content": "hm", "thinking": "hm"}, {"reasoning_content": "hm"}),
        ({"weight": 0}, {"train": False}),
        ({"weight": 1, "tool_calls": [], "name": None}, {"train": True}),
        ({"content": [{"type": "text", "text": "He"}, {"text": "re."}]}, {}),
    ],
)
def test_what_other_programs_write_in_a_turn(tmp_path: Path, given, read_as):
    [(exchange,)] = read(tmp_path, SUPERVISED, {"messages": [ASK, {**SAY, **given}]})
    assert exchange.messages[1] == {**SAY, **read_as}


def test_preferences_with_and_without_a_prompt(tmp_path: Path):
    other = {"role": "assistant", "content": "There."}
    rows = [
        {"prompt": [ASK], "chosen": [SAY], "rejected": [other]},
        {"chosen": [ASK, SAY], "rejected": [ASK, other]},
        {"prompt": "Where?", "chosen": [ASK, SAY], "rejected": [ASK, other]},
        {"prompt": "Where?", "chosen": " Here.", "rejected": " There."},
        {"chosen": "Where? Here.", "rejected": "Where? There."},
        {"chosen": "It is", "rejected": "It is not"},
    ]
    pairs = read(tmp_path, PREFERENCE, *rows)
    for chosen, rejected in pairs[:3]:
        assert isinstance(chosen, Conversation)
        assert (chosen.messages, chosen.prompt) == ([ASK, SAY], 1)
        assert (rejected.messages, rejected.prompt) == ([ASK, other], 1)
    assert pairs[3] == pairs[4] == (PlainText("Where?", " Here."), PlainText("Where?", " There."))
    assert pairs[5] == (PlainText("It", " is"), PlainText("It", " is not"))


def test_a_shared_beginning_ends_before_an_assistant_message(tmp_path: Path):
    other = {"role": "assistant", "content": "There."}
    row = {"chosen": [ASK, CALL, ANSWER, SAY], "rejected": [ASK, CALL, {**ANSWER}, other]}
    followed = {"chosen": [ASK, SAY, ASK, SAY], "rejected": [ASK, SAY, {**ASK, "content": "Why?"}]}
    followed["rejected"].append(other)
    first, second = read(tmp_path, PREFERENCE, row, followed)
    assert [exchange.prompt for exchange in first] == [3, 3]
    assert [exchange.prompt for exchange in second] == [1, 1]
    assert second[1].messages == followed["rejected"]


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "the row has neither messages nor prompt and completion": (SUPERVISED, {"text": "a"}),
    r"messages must be a list of messages": (SUPERVISED, {"messages": "a"}),
    r"messages\[0\] has no role": (SUPERVISED, {"messages": [{"content": "a"}, SAY]}),
    r"messages\[1\]: reasoning_content and thinking differ": (
        SUPERVISED,
        {"messages": [ASK, {**SAY, "reasoning_content": "a", "thinking": "b"}]},
    ),
    r"messages\[1\]\.weight: must be 0 or 1, not 0\.5": (
        SUPERVISED,
        {"messages": [ASK, {**SAY, "weight": 0.5}]},
    ),
    r"messages\[0\]\.content\[0\]: the content must be text": (
        SUPERVISED,
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}, SAY]},
    ),
    r"messages: has no assistant message to train on": (SUPERVISED, {"messages": [ASK]}),
    r"tools: not JSON: ": (SUPERVISED, {"messages": [ASK, SAY], "tools": "[{"}),
    r"tools\[0\] must be ": (SUPERVISED, {"messages": [ASK, SAY], "tools": [{"name": "look"}]}),
    r"images: is not read; only text can be trained": (
        SUPERVISED,
        {"messages": [ASK, SAY], "images": ["a"]},
    ),
    r"prompt: a row with a completion needs one": (SUPERVISED, {"completion": "a"}),
    r"completion: is empty": (SUPERVISED, {"prompt": "a", "completion": ""}),
    r"completion: must be text where prompt is text": (
        SUPERVISED,
        {"prompt": "a", "completion": [SAY]},
    ),
    r"completion\[0\]: the turn is empty": (
        SUPERVISED,
        {"prompt": [ASK], "completion": [{"role": "assistant", "content": " "}]},
    ),
    r"prompt: ends with an assistant message": (
        SUPERVISED,
        {"prompt": [ASK, SAY], "completion": [SAY]},
    ),
    r"messages and completion: a row has one of them": (
        SUPERVISED,
        {"messages": [ASK, SAY], "prompt": "a", "completion": "b"},
    ),
    r"tools: have no effect on plain text": (
        SUPERVISED,
        {"prompt": "a", "completion": "b", "tools": [TOOL]},
    ),
    r"rejected: missing \(the row has 'chosen'\)": (PREFERENCE, {"chosen": "a"}),
    r"rejected: equals chosen": (PREFERENCE, {"prompt": "a", "chosen": "b", "rejected": "b"}),
    r"rejected: must be text where chosen is text": (
        PREFERENCE,
        {"prompt": "a", "chosen": "b", "rejected": [SAY]},
    ),
    r"chosen: must be text where prompt is text, else messages": (
        PREFERENCE,
        {"prompt": [ASK], "chosen": "4", "rejected": "5"},
    ),
    r"prompt: is text that the messages of chosen and rejected do not begin with": (
        PREFERENCE,
        {"prompt": "How?", "chosen": [ASK, SAY], "rejected": [ASK, CALL, ANSWER, SAY]},
    ),
    r"rejected: has no prompt in common with chosen": (
        PREFERENCE,
        {"chosen": [SAY], "rejected": [ASK, SAY]},
    ),
    r"rejected\[0\] has no role": (
        PREFERENCE,
        {"prompt": [ASK], "chosen": [SAY], "rejected": [{"content": "a"}]},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_file_line_and_field(tmp_path: Path, fault: str):
    kind, row = FAULTS[fault]
    valid = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d"}
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: {fault}"):
        read(tmp_path, kind, valid, row)


def test_a_file_without_rows_and_with_broken_lines(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl: has no rows"):
        check_rows(file, SUPERVISED)
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not JSON"):
        check_rows(file, SUPERVISED)
    with pytest.raises(ValueError, match=r"rows\.txt: data is a \.jsonl file, a \.parquet file"):
        check_rows(tmp_path / "rows.txt", SUPERVISED)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_columns_that_are_not_read_may_hold_anything(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    row = json.dumps({"messages": [ASK, SAY]})
    file.write_text(f'{row[:-1]}, "score": NaN}}\n', encoding="utf-8")
    assert check_rows(file, SUPERVISED) == 1
    with pytest.raises(ValueError, match="line 1: not JSON: NaN"):
        next(read_row_file(file))
    file.write_text('{"text": NaN}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"the row has neither .* \(it has 'text'\)"):
        check_rows(file, SUPERVISED)
    file.write_text('{"messages": NaN}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: "):
        check_rows(file, SUPERVISED)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_its_package_names_the_extra(tmp_path: Path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"rows\.parquet: .* needs the package pyarrow: .*parquet"):
        next(read_row_file(tmp_path / "rows.parquet"))


def test_rows_of_parquet_are_those_of_json(tmp_path: Path):
    """Structures of Arrow have the same keys in every row; those that a row lacks are null (``make
    test-parquet``)."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        # Arrow takes the columns of the first row.
        {"messages": [ASK, {**SAY, "thinking": "hm"}], "tools": None},
        {"messages": [ASK, CALL, ANSWER, SAY], "tools": json.dumps([TOOL])},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = [each.exchanges for each in read_examples(tmp_path / "rows.parquet", SUPERVISED)]
    assert found == read(tmp_path, SUPERVISED, *rows)
    day = datetime(2026, 1, 1, tzinfo=UTC)
    dated = pyarrow.Table.from_pylist([{"day": day, **row} for row in rows])
    parquet.write_table(dated, tmp_path / "dated.parquet")
    assert found == [
        each.exchanges for each in read_examples(tmp_path / "dated.parquet", SUPERVISED)
    ]
    parquet.write_table(pyarrow.table({"day": [day]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"row 1: the row has neither .* \(it has 'day'\)"):
        check_rows(tmp_path / "other.parquet", SUPERVISED)
    parquet.write_table(pyarrow.table({"messages": [[ASK]]}), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet, row 1: messages: has no assistant"):
        check_rows(tmp_path / "bad.parquet", SUPERVISED)
