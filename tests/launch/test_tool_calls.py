"""A model whose calls of tools the policy's parser would not find is refused before anything
starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realhf.api.chat_template import TemplateChat
from realhf.launch.__main__ import main
from realhf.rollout.tool_call_check import build_example_calls, check_calls
from realhf.rollout.tool_call_check import main as check
from tests.api.chat.families import FAMILIES_OF_MODELS, family_tokenizer
from tests.api.chat.templates import SMOLLM2, tokenizer

CLASS = '''
class Lamp:
    """A lamp."""

    def reset(self, **row):
        """Begin."""
        return "Light it."

    def set(self, on: bool, level: int, colour: str, note: str | None = None) -> str:
        """Set the lamp.

        Args:
            on: whether it is lit
            level: how bright
            colour: which
            note: more
        """
        return "set"

    def get_reward(self) -> float:
        """The end."""
        return 1.0
'''


def policy(folder: Path, made: Any) -> str:
    """Write a tiny model with this tokenizer; its context holds the longest demonstration in
    bytes."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(made), max_position_embeddings=8192, tie_word_embeddings=True, **shape
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES_OF_MODELS)
@pytest.mark.parametrize("demonstrated", [False, True])
def test_calls_that_are_read_back_pass_and_others_do_not(
    name: str, demonstrated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family_tokenizer(name).save_pretrained(tmp_path)
    request = {"episodes_per_task": 1, "seed": 1}
    asked = ["--request", json.dumps(request)] if demonstrated else []
    code = check(["files", "--model", str(tmp_path), *asked])
    said = capsys.readouterr()
    if FAMILIES_OF_MODELS[name].parser:
        assert code == 0
        assert f"read back by the parser {FAMILIES_OF_MODELS[name].parser}" in said.out
    else:
        assert code == 1
        assert said.err.startswith("the chat template ") and len(said.err.splitlines()) == 1


def test_calls_with_other_arguments_than_texts_are_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lamp.py").write_text(CLASS)
    family_tokenizer("qwen3-coder").save_pretrained(tmp_path / "model")
    assert check([f"{tmp_path}/lamp.py:Lamp", "--model", str(tmp_path / "model")]) == 0
    assert "1 turns with calls" in capsys.readouterr().out


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"type": ["boolean", "null"]},
        {"oneOf": [{"type": "array"}, {"type": "object"}]},
        {"type": "null"},
        {"const": 5},
        {"enum": [2, 3]},
        {"$ref": "#/$defs/Colour"},
        {},
        True,
    ],
    ids=str,
)
def test_the_call_that_is_tried_has_arguments_that_the_schema_allows(schema: Any) -> None:
    """An integer or null was tried with a text, and a right model of the XML family was refused."""
    parameters = {"type": "object", "properties": {"given": schema}, "required": ["given"]}
    tools = [
        {
            "type": "function",
            "function": {"name": "set", "description": "Set.", "parameters": parameters},
        }
    ]
    chat = TemplateChat(family_tokenizer("qwen3-coder"))
    assert check_calls(chat, build_example_calls(tools), tools) == 1


def test_a_template_that_shows_no_tools_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer(SMOLLM2, "<|im_end|>").save_pretrained(tmp_path)
    assert check(["files", "--model", str(tmp_path)]) == 1
    assert "does not read tools" in capsys.readouterr().err


def launched(tmp_path: Path, name: str, *more: str) -> list[str]:
    path = policy(tmp_path / "model", family_tokenizer(name))
    given = ["experiment=grpo", "env=files", f"actor.path={path}", f"fileroot={tmp_path}"]
    return [*given, "rollout.max_total_tokens=8192", *more]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "refusal"),
    [
        ("qwen3.5", ["actor.warm_start=true"], ""),
        ("cohere", ["actor.warm_start=true"], "in which the parser 'llama' finds no call"),
        pytest.param(
            "cohere", [], "in which the parser 'llama' finds no call", marks=pytest.mark.nightly
        ),
        pytest.param("cohere", ["actor.tool_parser=plain"], "", marks=pytest.mark.nightly),
        pytest.param(
            "qwen3",
            ["actor.tool_parser=xml"],
            "the parser 'xml' sees a mistake",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_launch_says_so(
    name: str, more: list[str], refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*launched(tmp_path, name, *more), "mode=check"])
    errors = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("config error: ")
    ]
    assert code == (2 if refusal else 0)
    assert len(errors) == bool(refusal)
    if refusal:
        assert refusal in errors[0] and "actor.tool_parser" in errors[0]
        assert errors[0].startswith(
            f"config error: actor.path={tmp_path / 'model'}: the chat template writes the call"
        )
        assert errors[0].endswith("; the environment files would see no call of its tools")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_warm_start_trains_on_calls_that_are_not_those_of_hermes(tmp_path: Path) -> None:
    sizes = [
        "warm_start.episodes_per_task=1",
        "warm_start.train_steps=2",
        "warm_start.batch_size=2",
    ]
    sizes += [
        "total_train_steps=1",
        "dataset.train_bs_n_seqs=1",
        "ppo.group_size=2",
        "rollout.max_turns=1",
    ]
    sizes += [
        "evaluation.episodes_per_task=0",
        "evaluation.greedy_episodes_per_task=0",
        "gen.max_new_tokens=8",
    ]
    given = launched(
        tmp_path, "qwen3.5", "actor.warm_start=true", "experiment_name=x", "trial_name=t", *sizes
    )
    assert main(given) == 0
    (rows,) = (tmp_path / "warm_start").glob("demonstrations-*.jsonl")
    turns = [
        m
        for line in rows.read_text().splitlines()
        for m in json.loads(line)["messages"]
        if m["role"] == "assistant"
    ]
    assert turns and all(turn["tool_calls"] and not turn["content"] for turn in turns)
