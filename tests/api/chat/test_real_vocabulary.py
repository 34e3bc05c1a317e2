"""The families' templates over the vocabulary of a real model, whose tokens cut words as they like."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from realhf.api.chat_template import TemplateChat
from realhf.api.tool_parser import parse_turn
from tests.api.chat import tool_templates
from tests.api.chat.families import CONTROL, FAMILIES_OF_MODELS
from tests.api.chat.test_tool_syntax import FORMS, ONE_CALL, canonical, schemas

MODEL = Path(__file__).resolve().parents[3] / "models" / "smollm2_135m"
pytestmark = pytest.mark.skipif(
    not MODEL.is_dir(), reason="no models/smollm2_135m; run `make model` to create it"
)
CALLS = [
    ("look", {"where": "über the </think> hill\n\n  twice", "n": -3, "o": {"a": [1, 2.5, None]}}),
    ("f.g-1", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FORMS)
def test_calls_are_encoded_decoded_and_parsed_back(family: str) -> None:
    made = AutoTokenizer.from_pretrained(str(MODEL))
    known = FAMILIES_OF_MODELS[family]
    words = dict.fromkeys((*CONTROL, *tool_templates.CONTROL, known.eos, "<|im_start|>"))
    made.add_special_tokens({"additional_special_tokens": [*words]})
    made.eos_token = known.eos
    made.chat_template = known.template
    chat = TemplateChat(made)
    calls = CALLS[:1] if family in ONE_CALL else CALLS
    tools = schemas(calls)
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": f"x{n}", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ],
    }
    ids = [*chat.encode_turn(turn, tools), *chat.closing(with_calls=True)[:1]]
    assert ids[-1] in chat.stop_ids
    read = chat.parse(ids, tools).tool_calls
    assert canonical((c.name, c.arguments) for c in read) == canonical(calls)
    text = chat.decode(ids)
    assert parse_turn(text, chat.family, tools=tools).tool_calls == read
    # A turn that is cut between any two tokens can be parsed.
    for end in range(len(ids)):
        found = [c for c in chat.parse(ids[:end], tools).tool_calls if not c.problem]
        assert canonical((c.name, c.arguments) for c in found) == canonical(calls[: len(found)])
