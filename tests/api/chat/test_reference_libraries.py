"""Calls of gpt-oss and Mistral against the libraries of the models' makers, ``openai_harmony`` and
``mistral_common``: what is written here they write, too, and what they read is read here."""

from __future__ import annotations

import json
import random
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realhf.api.tool_parser import parse_turn
from realhf.api.tool_syntax import harmony, mistral
from realhf.api.tool_syntax.calls import call_id
from tests.api.chat.families import family_chat
from tests.api.chat.test_tool_syntax import HARMONY, WRITERS, canonical, turns

pytestmark = pytest.mark.nightly
MISTRAL = {
    "v3": "Mistral, tokenizer version 3 and 7",
    "v7": "Mistral, tokenizer version 3 and 7",
    "v11": "Mistral, tokenizer version 11",
    "v13": "Mistral, tokenizer version 13 and later",
}
"""The form that each version of mistral_common's tokenizer writes."""
FAMILY = {"v3": "mistral3", "v11": "mistral11", "v13": "mistral13"}
"""Templates of the tests for whole conversations; version 7 has another order of tools."""
Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The encoding of gpt-oss. The library downloads its vocabulary; litellm's package holds it."""
    library = pytest.importorskip("openai_harmony", reason="make test-syntaxes installs it")
    holder = find_spec("litellm")  # Not imported: it is installed without what it needs.
    if holder is None or not holder.submodule_search_locations:
        pytest.skip("make test-syntaxes installs litellm")
    shipped = Path(holder.submodule_search_locations[0], "litellm_core_utils", "tokenizers")
    vocabulary = shipped / "fb374d419588a4632f3f557e76b4b70aebbca790"
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "o200k_base.tiktoken").write_bytes(vocabulary.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return library.load_harmony_encoding("HarmonyGptOss")


def render_harmony(encoding: Any, calls: Calls) -> list[int]:
    """The ids of the calls as the library writes them, after the start of the first message. Control
    words in arguments are no control ids."""
    library = pytest.importorskip("openai_harmony")
    messages = [
        library.Message.from_role_and_content(
            library.Role.ASSISTANT, json.dumps(arguments, ensure_ascii=False)
        )
        .with_channel("commentary")
        .with_recipient(f"functions.{name}")
        .with_content_type("json")
        for name, arguments in calls
    ]
    conversation = library.Conversation.from_messages(messages)
    return encoding.render_conversation_for_training(conversation)[2:]


def read_harmony(encoding: Any, ids: list[int]) -> list[tuple[str, str, str]]:
    """Channel, recipient and text of the messages that the library reads in a turn."""
    library = pytest.importorskip("openai_harmony")
    messages = encoding.parse_messages_from_completion_tokens(ids, library.Role.ASSISTANT)
    return [(m.channel or "", m.recipient or "", m.content[0].text) for m in messages]


def suppressed(test: Any) -> Any:
    """Settings of the random tests: encodings are module fixtures."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=80, deadline=None, suppress_health_check=checks)(test)


@suppressed
@given(turns(st.just("gpt-oss")))
def test_calls_of_gpt_oss_are_those_of_openai_harmony(encoding: Any, turn: Any) -> None:
    _, calls, written = turn
    ids = render_harmony(encoding, calls)
    theirs = encoding.decode_utf8(ids)
    assert theirs == written + "<|call|>"
    for text in (theirs, written):
        read = parse_turn(text, "harmony")
        assert canonical((c.name, c.arguments) for c in read.tool_calls) == canonical(calls)
    found = read_harmony(encoding, ids)
    assert [(to, json.loads(text)) for _, to, text in found] == [
        (f"functions.{name}", arguments) for name, arguments in calls
    ]


@pytest.mark.parametrize("text", [text for text, *_ in HARMONY if "<|message|>" in text])
def test_turns_of_gpt_oss_are_read_as_openai_harmony_reads_them(encoding: Any, text: str) -> None:
    """Reasoning, words and calls of whole turns, some of them cut."""
    found = read_harmony(encoding, encoding.encode(text, allowed_special="all"))
    read = parse_turn(text, "harmony")
    assert read.reasoning == "\n".join(
        t for channel, to, t in found if channel == "analysis" and not to
    )
    assert read.content == "\n".join(
        t for channel, to, t in found if channel != "analysis" and not to
    )
    calls = [(to.removeprefix("functions."), json.loads(t)) for _, to, t in found if to]
    assert canonical((c.name, c.arguments) for c in read.tool_calls) == canonical(calls)
    end = harmony.find_reasoning_end(text)
    rest = read_harmony(encoding, encoding.encode(text[end:], allowed_special="all"))
    assert rest == (found[1:] if end else found)
    assert bool(end) == (found[0][0] == "analysis" and len(found) > 1)


@cache
def load_mistral(version: str, folder: Path) -> Any:
    """A tokenizer of mistral_common: the bytes of a shipped vocabulary and all control words."""
    base = pytest.importorskip("mistral_common.tokens.tokenizers.base")
    module = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    shipped = files("mistral_common").joinpath("data/tekken_240911.json").read_text("utf-8")
    data = json.loads(shipped)
    words = [token.value for token in base.SpecialTokens]
    first = ["<unk>", "<s>", "</s>"]
    words = [*first, *(word for word in words if word not in first)]
    data["special_tokens"] = [
        {"rank": rank, "token_str": word, "is_control": True} for rank, word in enumerate(words)
    ]
    data["config"] |= {
        "version": version,
        "num_vocab_tokens": 256,
        "default_vocab_size": 356,
        "default_num_special_tokens": 100,
    }
    data["vocab"] = data["vocab"][:256]
    data.pop("image", None)
    path = folder / f"tekken_{version}.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return module.MistralTokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mistral_common", reason="make test-syntaxes installs it")
    return tmp_path_factory.mktemp("tekken")


def render_mistral(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """A conversation as the library writes it."""
    requests = pytest.importorskip("mistral_common.protocol.instruct.request")
    policy = pytest.importorskip("mistral_common.tokens.tokenizers.base").SpecialTokenPolicy
    encoded = tokenizer.encode_chat_completion(requests.ChatCompletionRequest(messages=messages))
    return tokenizer.decode(encoded.tokens, special_token_policy=policy.KEEP)


def conversation(calls: Calls, ids: list[str]) -> list[dict[str, Any]]:
    """A question, a turn with calls, and their answers."""
    return [
        {"role": "user", "content": "task"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": identifier,
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for identifier, (name, arguments) in zip(ids, calls, strict=True)
            ],
        },
        *(
            {"role": "tool", "name": name, "tool_call_id": identifier, "content": "a cup"}
            for identifier, (name, _) in zip(ids, calls, strict=True)
        ),
    ]


@pytest.mark.parametrize("version", MISTRAL)
@suppressed
@given(turns(st.just("mistral13")), st.integers(0, 2**32))
def test_calls_of_mistral_are_those_of_mistral_common(
    folder: Path, version: str, turn: Any, seed: int
) -> None:
    _, calls, _ = turn
    calls = [(name.replace(".", "_"), arguments) for name, arguments in calls]
    tokenizer = load_mistral(version, folder)
    ids = [mistral.format_id(call_id(n), name, n) for n, (name, _) in enumerate(calls)]
    text = render_mistral(tokenizer, conversation(calls, ids))
    said = text.partition("[/INST]")[2].partition("</s>")[0]
    assert said == WRITERS[MISTRAL[version]][1](calls)
    rng = random.Random(seed)
    ids = ["".join(rng.choices("abcXYZ0189", k=9)) for _ in calls]
    text = render_mistral(tokenizer, conversation(calls, ids))
    read = parse_turn(text.partition("[/INST]")[2].partition("</s>")[0], "mistral").tool_calls
    assert canonical((c.name, c.arguments) for c in read) == canonical(calls)
    if version in ("v3", "v7", "v11"):
        assert [call.id for call in read] == ids


@pytest.mark.parametrize("version", FAMILY)
def test_a_history_of_mistral_is_that_of_mistral_common(folder: Path, version: str) -> None:
    """The question, a sampled turn, and the answers with the ids that were sampled."""
    calls: Calls = [("look", {"where": "a cup"}), ("look", {"where": "é"})]
    messages = conversation(calls, ["abcdef123", "Zz0000009"])
    theirs = render_mistral(load_mistral(version, folder), messages)
    chat = family_chat(FAMILY[version])
    said = theirs.partition("[/INST]")[2].partition("</s>")[0]
    sampled = [*chat.encode(said), *chat.closing(with_calls=True)[:1]]
    read = chat.parse(sampled).tool_calls
    answers = [
        {**message, "tool_call_id": call.id}
        for message, call in zip(messages[2:], read, strict=True)
    ]
    ids = [*chat.opening(messages[:1]), *sampled]
    ids += chat.following_messages(answers, ended=True, end=sampled[-1])
    assert chat._decode_all(ids) == theirs
