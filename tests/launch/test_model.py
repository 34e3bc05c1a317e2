"""The folder of a model is read before anything starts: its chat template and the length of its context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realhf.api.chat import unread_variables
from realhf.api.config import ModelConfig
from realhf.backends.builtin_policy import CHAT_TEMPLATE
from realhf.backends.training.tokenizer_loading import ModelLoadError, check_context
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.launch.model import BUILTIN_PATHS, BUILTIN_VARIABLES, model_problems

TEMPLATE = "{{ messages }}{% if enable_thinking %}<think>{% endif %}"


def folder_of(path: Path, template: str | None = TEMPLATE, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **config}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(path)


def problems(path: str, total: int = 1024, **kwargs: Any) -> list[str]:
    return list(model_problems("actor", ModelConfig(path=path, chat_template_kwargs=kwargs), total))


def test_the_template_must_exist_and_read_the_variables(tmp_path: Path):
    assert problems(folder_of(tmp_path), enable_thinking=False) == []
    assert "does not read enable_thinkin" in problems(folder_of(tmp_path), enable_thinkin=False)[0]
    assert "no chat template" in problems(folder_of(tmp_path, None))[0]
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert problems(str(tmp_path), enable_thinking=True) == []
    for path in BUILTIN_PATHS:
        assert problems(path, show_tools=True) == []
        assert "does not read enable_thinking (it reads" in problems(path, enable_thinking=True)[0]
    assert not unread_variables(CHAT_TEMPLATE, BUILTIN_VARIABLES)


def test_episodes_longer_than_the_context_are_refused(tmp_path: Path):
    assert problems(folder_of(tmp_path), total=4096) == []
    [problem] = problems(folder_of(tmp_path), total=4097)
    assert problem == f"rollout.max_total_tokens=4097: the context of {tmp_path} holds 4096 tokens"
    windowed = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    assert problems(folder_of(tmp_path, **windowed), total=4096) == [], "a window is no bound"


@pytest.mark.parametrize("option", ["={enable_thinking:false}", ".enable_thinking=false"])
def test_variables_can_be_set_on_the_command_line(option: str):
    given = ["experiment=grpo_aws", "actor.path=owner/name", f"actor.chat_template_kwargs{option}"]
    spec = build_experiment(compose_config(given)).spec
    assert spec.models["actor"].chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("experiment", ["grpo_aws", "grpo_aws_async", "sft_aws"])
def test_the_qwen3_configuration_does_not_think_anywhere(experiment: str):
    spec = build_experiment(compose_config([f"experiment={experiment}", "model=qwen3_0_6b"])).spec
    assert spec.models["actor"].chat_template_kwargs == {"enable_thinking": False}
    if spec.source.dataset_args is not None:
        assert spec.source.dataset_args["chat_template_kwargs"] == {"enable_thinking": False}


def test_rollout_workers_refuse_a_context_that_is_too_short(tmp_path: Path):
    folder_of(tmp_path, model_type="llama")
    check_context(str(tmp_path), "actor", 4096)
    with pytest.raises(ModelLoadError, match="holds 4096 tokens"):
        check_context(str(tmp_path), "actor", 4097)
