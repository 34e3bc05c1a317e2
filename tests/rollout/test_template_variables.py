"""Variables of the chat template reach the prompts of episodes and the rows of supervised data
alike."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from realhf.api.chat_template import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.environment import HELD_OUT
from realhf.api.experiment import HeldOutOptions, RolloutOptions
from realhf.api.model import CallContext, EpisodeCount, GenOutput, GenRequest, Model
from realhf.api.sample import MicroBatchSpec
from realhf.base.installation import PACKAGE
from realhf.data.chat_dataset import ChatDataset
from realhf.rollout.interface import EnvRolloutInterface

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if not enable_thinking %}[quiet]{% endif %}{% "
    "endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.mark.parametrize("thinks", [True, False])
def test_prompts_and_rows_are_rendered_alike(tokenizer: Any, tmp_path: Path, thinks: bool) -> None:
    kwargs = {"enable_thinking": thinks}
    system = [{"role": "system", "content": "be brief"}]
    opening = [*system, {"role": "user", "content": "list"}]
    prompt = TemplateChat(tokenizer, system_prompt=None, template_kwargs=kwargs).opening(opening)
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "list"}, {"role": "assistant", "content": "aws"}]
    rows.write_text(json.dumps({"messages": messages}))
    row = (
        ChatDataset(str(rows), tokenizer, chat_template_kwargs=kwargs, system_prompt="be brief")
        .load(["a"], [0])["packed_input_ids"]
        .tolist()
    )
    assert row[: len(prompt)] == prompt
    assert tokenizer.decode(prompt).endswith("assistant:" if thinks else "assistant:[quiet]")


class Listening:
    """An engine whose policy says "no" to everything, and which keeps what it was given to read."""

    context_limit = 4096

    def __init__(self, tokenizer: Any) -> None:
        self.says: list[int] = [*tokenizer.encode("no"), tokenizer.eos_token_id]
        self.read: list[str] = []
        self._decode = tokenizer.decode

    def generator(self) -> Listening:
        return self

    def generate(self, requests: Sequence[GenRequest], *_: Any, **__: Any) -> list[GenOutput]:
        self.read += [self._decode(list(request.token_ids)) for request in requests]
        return [
            GenOutput(self.says, [0.0] * len(self.says), [0] * len(self.says), "stop")
            for _ in requests
        ]

    def free(self, slots: Any = None) -> None:
        pass


@pytest.mark.parametrize("thinks", [True, False])
def test_every_turn_of_a_played_episode_is_rendered_with_them(
    tokenizer: Any, tmp_path: Path, thinks: bool
) -> None:
    engine: Any = Listening(tokenizer)
    options = RolloutOptions(
        environment="sql",
        group_size=2,
        sessions=2,
        max_turns=3,
        max_total_tokens=4096,
        gen=GenConfig(),
    )
    interface = EnvRolloutInterface(**options.to_args())
    model = Model("actor", engine, tokenizer, {"enable_thinking": thinks})
    wanted = HeldOutOptions(HELD_OUT, episodes_per_task=1, greedy_episodes_per_task=1, templates=1)
    context = CallContext(0, 0, MicroBatchSpec(), tmp_path)
    try:
        interface.evaluate(model, wanted.to_args(), context)
    finally:
        interface.close()
    assert context.progress == EpisodeCount(2, 2), "of both passes"
    cue = "assistant:" if thinks else "assistant:[quiet]"
    turns = [text.count(cue) for text in engine.read]
    assert {1, 2} <= set(turns), "openings and later turns"
    assert all(text.endswith(cue) and ("[quiet]" in text) is not thinks for text in engine.read)


def test_whoever_makes_a_chat_gives_it_the_variables() -> None:
    """Lockstep, free play, the endpoint of agents, demonstrations, evaluation and producers each
    make one."""
    makers = []
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "workers").glob("*.py")]):
        text = path.read_text(encoding="utf-8")
        if "TemplateChat" not in text and "apply_chat_template" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "TemplateChat"
            ):
                makers.append(path.name)
                assert "template_kwargs" in {word.arg for word in node.keywords}, (
                    f"{path}:{node.lineno}"
                )
            elif isinstance(node, ast.Attribute) and node.attr == "apply_chat_template":
                assert path.name in ("chat_template.py", "pretrained_model.py"), (
                    f"{path}:{node.lineno}"
                )
    assert {
        "interface.py",
        "rollout_worker.py",
        "generation_worker.py",
        "chat_dataset.py",
        "agents.py",
    } <= set(makers)
