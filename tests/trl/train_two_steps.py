"""Two GRPO steps of TRL's trainer on CPU with the built-in tiny model, against a running
environment server.

    python train_two_steps.py tool|rollout|own INPUT.json OUTPUT.json

Runs in .venv-trl. INPUT holds ``rows`` [{task_id, seed, text, solution, wrong}]. The model is
taught a few conversations first (right and wrong commands alike), because random weights never call
a tool. ``own`` trains on the class of examples/your_environment.py, which needs no server; its rows
are {seed, text, solution, wrong}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import get_training_chat_template, qwen3_chat_template

from examples.your_environment import Lock
from realhf.api.chat_template import TemplateChat
from realhf.api.config import BuiltinModelConfig
from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from realhf.aws.client.trl_rollout import PoolRollouts, episode_reward
from realhf.aws.client.trl_tool import AwsToolEnv
from realhf.aws.environment import SYSTEM_PROMPT
from realhf.aws.messages import observation_text
from realhf.backends.builtin_policy import build_model, train_tokenizer

INSTRUCTION = "Use the tool. "
CONFIG = BuiltinModelConfig(
    vocab_size=768,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    intermediate_size=192,
    max_positions=1024,
)
GROUP = 4
PROMPTS = 2
STEPS = 2
LESSONS = 80
OK = observation_text({"command_success": True, "command_output": ""})


class Taught(NamedTuple):
    """The class that TRL is given, its tool, the tool's one argument, and what the tool answers
    when it is right."""

    kind: type[Any]
    tool: Any
    argument: str
    answer: str


AWS = Taught(AwsToolEnv, AwsToolEnv.aws, "command", OK)
OWN = Taught(Lock, Lock.turn, "digit", "open")


def conversations(rows: list[dict[str, Any]], taught: Taught) -> list[list[dict[str, Any]]]:
    """Every task once with its solution and once with a wrong command, as tool calls."""
    found = []
    name = taught.tool.__name__
    for row in rows:
        for command in (row["solution"], row["wrong"]):
            call = {
                "type": "function",
                "function": {"name": name, "arguments": {taught.argument: command}},
            }
            found.append(
                [
                    {"role": "user", "content": INSTRUCTION + row["text"]},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "name": name, "content": taught.answer},
                    {"role": "assistant", "content": "done"},
                ]
            )
    return found


def tool_lessons(
    rows: list[dict[str, Any]], taught: Taught
) -> tuple[Any, list[tuple[list[int], list[bool]]]]:
    """(tokenizer, [(ids, what to learn)]): the policy's side of the conversations, in TRL's Qwen3
    format."""
    tools = [taught.tool]
    spoken = conversations(rows, taught)
    texts = [
        qwen3_chat_template,
        json.dumps(get_json_schema(taught.tool)),
        *map(json.dumps, spoken),
    ]
    tokenizer = train_tokenizer(texts, CONFIG.vocab_size, CONFIG.max_positions)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = qwen3_chat_template
    lessons = []
    for messages in spoken:
        for end in (2, 4):
            ids, asked = (
                tokenizer.apply_chat_template(
                    part,
                    tools=tools,
                    tokenize=True,
                    return_dict=False,
                    add_generation_prompt=cue,
                    chat_template=get_training_chat_template(tokenizer),
                )
                for part, cue in ((messages[:end], False), (messages[: end - 1], True))
            )
            lessons.append((ids, [position >= len(asked) for position in range(len(ids))]))
    return tokenizer, lessons


def text_lessons(rows: list[dict[str, Any]]) -> tuple[Any, list[tuple[list[int], list[bool]]]]:
    """The same for a policy that answers with the bare command."""
    texts = [row[key] for row in rows for key in ("text", "solution", "wrong")]
    tokenizer = train_tokenizer(texts, CONFIG.vocab_size, CONFIG.max_positions)
    chat = TemplateChat(tokenizer, system_prompt=SYSTEM_PROMPT)
    lessons = []
    for row in rows:
        for command in (row["solution"], row["wrong"]):
            asked = chat.first(row["text"])
            said = chat.encode(command) + chat.closing()
            lessons.append((asked + said, [False] * len(asked) + [True] * len(said)))
    return tokenizer, lessons


def taught(tokenizer: Any, lessons: list[tuple[list[int], list[bool]]]) -> Any:
    """The built-in model after a few passes over the lessons."""
    model = build_model(
        CONFIG, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=1
    )
    longest = max(len(ids) for ids, _ in lessons)
    ids = torch.tensor(
        [ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in lessons]
    )
    learn = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in lessons])
    labels = ids.masked_fill(~learn, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(LESSONS):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def trainer(mode: str, rows: list[dict[str, Any]], url: str, out: str) -> GRPOTrainer:
    about = {"tool": AWS, "own": OWN}.get(mode)
    tokenizer, lessons = tool_lessons(rows, about) if about else text_lessons(rows)
    model = taught(tokenizer, lessons)
    config = GRPOConfig(
        output_dir=out,
        max_steps=STEPS,
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * PROMPTS,
        max_completion_length=400,
        max_tool_calling_iterations=3,
        learning_rate=1e-5,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        seed=3,
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
    )
    if about is not None:
        dataset = Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": INSTRUCTION}]}
                | {name: row[name] for name in ("task_id", "seed") if name in row}
                for row in rows
            ]
        )
        return GRPOTrainer(
            model,
            train_dataset=dataset,
            args=config,
            processing_class=tokenizer,
            environment_factory=about.kind,
        )
    prompts = [json.dumps({"task_id": row["task_id"], "seed": row["seed"]}) for row in rows]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    )
    pool = MultiTurnEnvPool(url, GROUP, max_turns=2, max_total_tokens=512, turn_tokens=40)
    return GRPOTrainer(
        model,
        [episode_reward],
        train_dataset=dataset,
        args=config,
        processing_class=tokenizer,
        rollout_func=PoolRollouts(pool),
    )


def main() -> None:
    mode, source, target = sys.argv[1:]
    given = json.loads(Path(source).read_text())
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as out:
        job = trainer(mode, given["rows"], given.get("url", ""), out)
        before = [parameter.detach().clone() for parameter in job.model.parameters()]
        job.train()
        moved = max(
            float((a - b.detach()).abs().max())
            for a, b in zip(before, job.model.parameters(), strict=True)
        )
        Path(target).write_text(
            json.dumps(
                {"steps": job.state.global_step, "moved": moved, "log": job.state.log_history}
            )
        )


if __name__ == "__main__":
    main()
