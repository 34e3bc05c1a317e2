"""Calls of tools against the chat templates of published models, as far as TRL ships them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.chat_template import TemplateChat
from realhf.api.tool_parser import parse_turn
from tests.api.chat import tool_templates
from tests.api.chat.families import CONTROL
from tests.api.chat.templates import tokenizer
from tests.api.chat.test_tool_syntax import (
    FORMS,
    WRITERS,
    canonical,
    rendered_turn,
    schemas,
    turns,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [*ROOT.glob(".venv-trl/lib/python3*/site-packages/trl/chat_templates")]
PUBLISHED = {
    "gptoss": ("gpt-oss", "<|return|>"),
    "glm4moe": ("glm4.6", "<|endoftext|>"),
    "deepseekv3": ("deepseek3", "<｜end▁of▁sentence｜>"),
    "qwen2_5": ("qwen2.5", "<|im_end|>"),
    "qwen3": ("qwen2.5", "<|im_end|>"),
    "qwen3_5_think": ("qwen3.5", "<|im_end|>"),
    "qwen3_6": ("qwen3.6", "<|im_end|>"),
    "nemotron_3_nano": ("qwen3.5", "<|im_end|>"),
    "llama3_2": ("llama3.2", "<|eot_id|>"),
    "lfm2_2_5": ("lfm2.5", "<|im_end|>"),
    "gemma4": ("gemma4-first", "<turn|>"),
    "gemma4_v5": ("gemma4", "<turn|>"),
}
"""Templates of TRL, the family whose calls they write, and their end of turns."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDERS, reason="no TRL beside us; `make test-trl` makes .venv-trl and runs this"
    ),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_are_what_a_published_template_writes(name: str) -> None:
    family, end = PUBLISHED[name]
    (path,) = FOLDERS[0].glob(f"{name}.jinja")
    made = tokenizer(
        path.read_text(encoding="utf-8"), end, control=(*CONTROL, *tool_templates.CONTROL)
    )
    made.bos_token = "<|begin_of_text|>"
    chat = TemplateChat(made)
    syntax, _ = WRITERS[FORMS[family]]
    assert chat.family == syntax.name

    @settings(max_examples=40, deadline=None)
    @given(turns(st.just(family)))
    def check(turn: Any) -> None:
        _, calls, written = turn
        text = rendered_turn(chat, calls)
        assert written in text
        read = parse_turn(text, chat.family, tools=schemas(calls)).tool_calls
        assert [call.problem for call in read] == [""] * len(calls)
        assert canonical((c.name, c.arguments) for c in read) == canonical(calls)

    check()
