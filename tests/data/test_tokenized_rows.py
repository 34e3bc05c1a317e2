"""Rows of a file as tokens: the masks are those of TRL's options, which transformers computes, and
nothing is left out silently."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from realhf.data.row_formats import PREFERENCE, SUPERVISED, read_examples
from realhf.data.tokenize_rows import main, tokenize_file
from realhf.data.tokenized_rows import (
    ALL,
    ASSISTANT,
    COMPLETION,
    HELD_OUT,
    TRAIN,
    ExchangeTokenizer,
    RowsSummary,
    TokenizedRows,
    TokenizedRowsSource,
)
from tests.api.chat.templates import tokenizer

MARKED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""Template that marks the assistant's tokens, as TRL's ``assistant_only_loss`` needs."""
ASK = {"role": "user", "content": "Where is it?"}
SAY = {"role": "assistant", "content": "Over there."}
CALL = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}],
}
ANSWER = {"role": "tool", "content": "a box"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TALK = [{"role": "system", "content": "Be brief."}, ASK, CALL, ANSWER, SAY, ASK, SAY]


@pytest.fixture(scope="module")
def marked() -> Any:
    return tokenizer(MARKED, "<|im_end|>")


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def encode(folder: Path, made: Any, row: dict[str, Any], train_on: str, kind: str = SUPERVISED):
    encoder = ExchangeTokenizer(made, train_on=train_on)
    [example] = read_examples(write(folder, row), kind)
    return [encoder.encode(exchange) for exchange in example.exchanges]


def rendered(made: Any, messages: list[Any], **options: Any) -> Any:
    return made.apply_chat_template(
        messages, tools=TOOLS, tokenize=True, return_dict=True, **options
    )


def test_the_assistants_tokens_are_those_of_assistant_only_loss(tmp_path: Path, marked: Any):
    expected = rendered(marked, TALK, return_assistant_tokens_mask=True)
    row = {"messages": TALK, "tools": TOOLS}
    [(ids, mask)] = encode(tmp_path, marked, row, ASSISTANT)
    # The template writes a line break after the last turn, which nobody samples.
    assert ids == expected["input_ids"][:-1]
    assert [int(bit) for bit in mask] == expected["assistant_masks"][:-1]
    assert sum(mask) == sum(expected["assistant_masks"]) > 0
    [(whole, every)] = encode(tmp_path, marked, row, ALL)
    assert whole == expected["input_ids"] and all(every)


@pytest.mark.parametrize("n_prompt", [2, 6])
def test_a_completion_is_that_of_completion_only_loss(tmp_path: Path, marked: Any, n_prompt: int):
    """With a prompt, assistant_only_loss and completion_only_loss hold both."""
    whole = rendered(marked, TALK, return_assistant_tokens_mask=True)
    start = len(rendered(marked, TALK[:n_prompt], add_generation_prompt=True)["input_ids"])
    row = {"prompt": TALK[:n_prompt], "completion": TALK[n_prompt:], "tools": TOOLS}
    [(ids, mask)] = encode(tmp_path, marked, row, COMPLETION)
    assert ids == whole["input_ids"]
    assert mask == [place >= start for place in range(len(ids))]
    [(ids, mask)] = encode(tmp_path, marked, row, ASSISTANT)
    assert ids == whole["input_ids"][:-1]
    assert mask == [
        bool(bit) and place >= start for place, bit in enumerate(whole["assistant_masks"][:-1])
    ]


@pytest.mark.parametrize("train_on", [ASSISTANT, COMPLETION])
def test_plain_text_ends_with_the_end_of_sequence(tmp_path: Path, marked: Any, train_on: str):
    [(ids, mask)] = encode(tmp_path, marked, {"prompt": "2+2=", "completion": "4"}, train_on)
    assert marked.decode(ids) == "2+2=4<|im_end|>"
    assert mask == [False] * 4 + [True] * 2
    ended = {"prompt": "2+2=", "completion": "4<|im_end|>"}
    assert encode(tmp_path, marked, ended, train_on) == [(ids, mask)]


def test_a_token_that_spans_the_end_of_the_prompt_is_trained(tmp_path: Path):
    merging = merging_tokenizer()
    row = {"prompt": "A: ", "completion": "4"}
    [(ids, mask)] = encode(tmp_path, merging, row, COMPLETION)
    assert merging.convert_ids_to_tokens(ids) == ["A:", " 4", "</s>"]
    assert mask == [False, True, True]
    pair = {"chosen": "A: Paris", "rejected": "A: Prag"}
    chosen, rejected = encode(tmp_path, merging, pair, ASSISTANT, PREFERENCE)
    assert merging.convert_ids_to_tokens(chosen.ids) == ["A:", " Paris", "</s>"]
    assert chosen.mask == [False, True, True]
    assert rejected.mask == [False, *[True] * (len(rejected.ids) - 1)]


def test_the_end_token_that_a_tokenizer_adds_to_the_prompt_hides_no_completion(tmp_path: Path):
    from tokenizers.processors import TemplateProcessing

    ending = merging_tokenizer()
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", ending.eos_token_id)]
    )
    [(ids, mask)] = encode(tmp_path, ending, {"prompt": "A:", "completion": " 4"}, COMPLETION)
    assert ending.convert_ids_to_tokens(ids)[:3] == ["A:", " 4", "</s>"]
    assert mask[:3] == [False, True, True]


def merging_tokenizer() -> Any:
    """Return a tokenizer that merges a space and the characters after it into one token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merges = [("A", ":"), (" ", "4"), (" ", "P"), ("i", "s"), (" P", "a"), (" Pa", "r")]
    merges += [(" Par", "is")]
    joined = [one + other for one, other in merges]
    pieces = ["</s>", *sorted(set("A: 4Parisg")), *joined]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(ids, merges)), eos_token="</s>"
    )


def test_all_trains_the_turns_of_a_prompt_too(tmp_path: Path, marked: Any):
    row = {"prompt": TALK[:6], "completion": TALK[6:], "tools": TOOLS}
    [(ids, mask)] = encode(tmp_path, marked, row, ALL)
    assert ids == rendered(marked, TALK)["input_ids"] and all(mask)


def test_what_follows_a_message_that_is_left_out_is_not_trained(tmp_path: Path, marked: Any):
    row = {"prompt": [ASK], "completion": [SAY, ASK, {**SAY, "train": False}]}
    for train_on in (COMPLETION, ALL):
        [(ids, mask)] = encode(tmp_path, marked, row, train_on)
        size = len("Over there.") + 2  # With the end of the turn and the line break after it.
        assert marked.decode(ids[-size:]) == "Over there.<|im_end|>\n"
        assert mask[-size:] == [False] * size and mask[-size - 1]
    begins = {"prompt": [ASK], "completion": [ASK, SAY]}
    with pytest.raises(ValueError, match=r"the answer begins with the role user, which dataset"):
        encode(tmp_path, marked, begins, COMPLETION)


def test_a_turn_that_is_left_out_is_not_trained(tmp_path: Path, marked: Any):
    row = {"messages": [ASK, {**SAY, "weight": 0}, ASK, SAY]}
    [(ids, mask)] = encode(tmp_path, marked, row, ASSISTANT)
    trained = [i for i, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert marked.decode(trained) == "Over there.<|im_end|>"
    with pytest.raises(ValueError, match="no token of the row is trained"):
        encode(tmp_path, marked, {"messages": [ASK, {**SAY, "train": False}]}, ASSISTANT)
    with pytest.raises(ValueError, match=r"messages: dataset\.train_on=completion needs rows with"):
        encode(tmp_path, marked, row, COMPLETION)


# ---- the program


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, marked: Any) -> Path:
    folder = tmp_path_factory.mktemp("model")
    marked.save_pretrained(folder)
    return folder


def tokenize(folder: Path, model: Path, *rows: dict[str, Any], options: str = "") -> int:
    file = write(folder, *rows)
    out = folder / "out"
    return main([str(file), "--model", str(model), "--out", str(out), *options.split()])


PAIR = {"prompt": [ASK], "chosen": [SAY], "rejected": [{**SAY, "content": "No."}]}


def test_pairs_are_two_sequences_with_rewards(tmp_path: Path, model: Path):
    assert tokenize(tmp_path, model, PAIR, PAIR, options=f"--kind {PREFERENCE}") == 0
    sample = TokenizedRows(str(tmp_path / "out")).load(["a", "b"], [1, 0])
    lengths = sample.seqlens["packed_input_ids"]
    assert [len(inner) for inner in lengths] == [2, 2]
    assert sample["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert sample["loss_mask"].sum() == 2 * (len("Over there.") + len("No.") + 2)


def test_rows_are_held_out_by_the_seed_and_counted(tmp_path: Path, model: Path, capsys):
    rows = [{"prompt": f"{n}", "completion": "b" * (n + 1)} for n in range(10)]
    options = "--held-out 0.3 --seed {} --max-tokens 10 --too-long drop --shown 1"
    parts = {}
    for seed in (1, 1, 2):
        assert tokenize(tmp_path, model, *rows, options=options.format(seed)) == 0
        out = str(tmp_path / "out")
        found = [TokenizedRows(out), TokenizedRows(out, part=HELD_OUT)]
        lengths = [
            sorted(part.load([""], [row]).n_tokens("packed_input_ids") for row in range(len(part)))
            for part in found
        ]
        assert sorted(lengths[0] + lengths[1]) == [3, 4, 5, 6, 7, 8, 9, 10]
        parts.setdefault(seed, []).append(lengths)
    assert parts[1][0] == parts[1][1] != parts[2][0]
    summary = RowsSummary.read(tmp_path / "out")
    assert (summary.n_train, summary.n_held_out, summary.n_dropped) == (6, 2, 2)
    shown = capsys.readouterr().out.splitlines()
    assert "6 rows to train on, 2 held out, 2 dropped because they are too long" in shown[0]


def test_control_characters_are_shown_escaped(tmp_path: Path, model: Path, capsys):
    row = {"prompt": "a\x1b[2J\r", "completion": "\x0b\\"}
    assert tokenize(tmp_path, model, row) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[2:4] == [r"  -     6  a|\x1b|[|2|J|\r", r"  +     3  \x0b|\\|<|im_end|>"]


def test_rows_of_one_prompt_are_not_divided(tmp_path: Path, model: Path):
    rows = [{"prompt": f"{n % 5}", "completion": "b" * (n // 5 + 1)} for n in range(20)]
    prompts = []
    for seed in range(1, 4):
        assert tokenize(tmp_path, model, *rows, options=f"--held-out 0.4 --seed {seed}") == 0
        parts = [TokenizedRows(str(tmp_path / "out"), part=part) for part in (TRAIN, HELD_OUT)]
        found = [
            {int(part.load([""], [row])["packed_input_ids"][0]) for row in range(len(part))}
            for part in parts
        ]
        assert not found[0] & found[1]
        assert [len(part) for part in parts] == [12, 8]
        prompts.append(found[1])
    assert prompts[0] != prompts[1] or prompts[0] != prompts[2]


def test_the_first_rows_are_shown_as_tokens(tmp_path: Path, model: Path, capsys):
    assert tokenize(tmp_path, model, {"messages": [ASK, SAY]}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "rows.jsonl: 1 rows to train on; 43 tokens, 12 of them trained; the longest sequence has 43"
    ), "no folder, since another run may find the same rows elsewhere"
    assert lines[1] == "line 1: 43 tokens, 12 trained (+)"
    assert lines[2] == (
        "  -    31  <|im_start|>|u|s|e|r|\\n|W|h|e|r|e| |i|s| |i|t|?|<|im_end|>|\\n|"
        "<|im_start|>|a|s|s|i|s|t|a|n|t|\\n"
    )
    assert lines[3] == "  +    12  O|v|e|r| |t|h|e|r|e|.|<|im_end|>"
    assert (tmp_path / "out" / "examples.txt").read_text().splitlines() == lines


@pytest.mark.slow
def test_the_rows_of_a_large_file_are_held_as_arrays(tmp_path: Path, model: Path):
    from transformers import AutoTokenizer

    encoder = ExchangeTokenizer(AutoTokenizer.from_pretrained(model))
    file = write(tmp_path, *[{"prompt": "a", "completion": "b" * 20_000}] * 60)
    tokenize_file(file, SUPERVISED, encoder)
    tracemalloc.start()
    rows = tokenize_file(file, SUPERVISED, encoder)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    n_tokens = sum(row.longest for row in rows)
    assert n_tokens > 1_000_000
    assert held < 6 * n_tokens, "four bytes for the id of a token, one for its mask"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--max-tokens 5",
            "1 of 2 rows are longer than rollout.max_total_tokens=5; the longest has "
            "8 tokens (line 2): raise rollout.max_total_tokens, or drop them with "
            "dataset.too_long=drop",
        ),
        ("--max-tokens 2 --too-long drop", "2 of 2 rows are longer than "),
        (
            "--held-out 0.5",
            "dataset.held_out=0.5: the 2 rows have the same prompt, and those that are held out",
        ),
        (
            "--held-out 0.9",
            "dataset.held_out=0.9 holds out 2 of 2 rows and leaves none to train on",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    tmp_path: Path, model: Path, capsys, options: str, message: str
):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 6}]
    assert tokenize(tmp_path, model, *rows, options=options) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dataset.") and message in line
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_missing_is_no_fault_of_the_file(tmp_path: Path, capsys):
    assert tokenize(tmp_path, tmp_path / "none", {"messages": [ASK, SAY]}) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("actor.path: ")


def test_a_row_that_the_template_cannot_write_names_its_line(tmp_path: Path, capsys):
    plain = tokenizer("{% for m in messages %}{{ m.content }}</s>{% endfor %}", "</s>")
    plain.save_pretrained(tmp_path / "plain")
    rows = [{"messages": [ASK, SAY]}, {"messages": [ASK, SAY], "tools": TOOLS}]
    assert tokenize(tmp_path, tmp_path / "plain", *rows) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "rows.jsonl, line 2: the chat template does not read tools" in line


def test_a_resumed_run_refuses_other_held_out_rows(tmp_path: Path, model: Path):
    rows = [{"prompt": f"{n}", "completion": "b"} for n in range(4)]
    options = "--held-out 0.25"
    assert tokenize(tmp_path, model, *rows, options=options) == 0
    out = str(tmp_path / "out")
    state = TokenizedRowsSource(seed=1, path=out).state_dict()
    trained = TokenizedRows(out).load(["a", "b", "c"], range(3))["packed_input_ids"]
    number = int(model_text(model, TokenizedRows(out, part=HELD_OUT)))
    rows[number]["completion"] = "c"
    assert tokenize(tmp_path, model, *rows, options=options) == 0
    again = TokenizedRows(out).load(["a", "b", "c"], range(3))["packed_input_ids"]
    assert again.tolist() == trained.tolist()
    with pytest.raises(ValueError, match=r"dataset\.path: the file, or how it is tokenised, has"):
        TokenizedRowsSource(seed=1, path=out).load_state_dict(state)


def model_text(model: Path, part: TokenizedRows) -> str:
    """Return the first character of the first row of a part."""
    from transformers import AutoTokenizer

    ids = part.load([""], [0])["packed_input_ids"]
    return AutoTokenizer.from_pretrained(model).decode(ids[:1])


def test_a_resumed_run_refuses_other_rows(tmp_path: Path, model: Path):
    assert tokenize(tmp_path, model, *[{"prompt": "a", "completion": "b"}] * 3) == 0
    source = TokenizedRowsSource(seed=1, path=str(tmp_path / "out"))
    source.next_batch(2)
    state = source.state_dict()
    again = TokenizedRowsSource(seed=1, path=str(tmp_path / "out"))
    again.load_state_dict(state)
    assert again.next_batch(4) == source.next_batch(4)
    assert tokenize(tmp_path, model, *[{"prompt": "a", "completion": "c"}] * 3) == 0
    other = TokenizedRowsSource(seed=1, path=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"dataset\.path: the file, or how it is tokenised, has"):
        other.load_state_dict(state)
