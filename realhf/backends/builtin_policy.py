"""Built-in policy: a small Qwen3 transformer and a BPE tokenizer trained on demonstrations.

    python -m realhf.backends.builtin_policy --demonstrations demos.jsonl --out DIR

It needs no download. Without demonstrations the tokenizer has one id per byte. The result is an
ordinary Hugging Face folder with random weights.

Copying resource names is the hardest task for such a small model. Therefore the tokenizer encodes
each word of a name as one token, the same one in every context (`-otter` after a space, a quote or
a colon). The BPE merges are used for frequent parts of commands: `aws s3api create-bucket`, `
--bucket `, an ARN prefix. The text of a tool call before its first argument is one token too, and
so is its end. Words of prose include the space before them, as usual; the first word of a
hyphenated name does not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import realhf
from realhf.api.config import BuiltinModelConfig
from realhf.api.messages import demonstration_problems
from realhf.base.files import atomic_folder
from realhf.base.json_rows import read_json_lines

SPECIAL_TOKENS = PAD, USER, ASSISTANT, END = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
SPLIT_PATTERN = (
    r'<tool_call>\{"name": "\w+", "arguments": \{(?:"\w+": "?)?|"?\}\}</tool_call>|'
    r"aws [a-z0-9-]+ [a-z0-9-]+"
    r"| ?--[a-z0-9-]+ ?"
    r"|arn:aws:[a-z0-9-]+:[a-z0-9-]*:\d*:"
    r"| ?[A-Za-z]+(?![A-Za-z-])"
    r"|-?[A-Za-z]+|-?\d+|[^\sA-Za-z0-9-]+|-+|\s"
)
"""Regular expression that splits text into pieces; BPE merges tokens only within a piece."""
CHAT_TEMPLATE = (
    "{% if tools and show_tools %}<|user|>{% for tool in tools %}{% set tool = tool.function or "
    "tool %}"
    "{{ tool.name }}({{ (tool.parameters.properties or {}) | join(', ') }})\n{% endfor %}{% endif "
    "%}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' or message['role'] == 'tool' %}<|user|>{{ message['content'] "
    "}}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}{% set call = call.function or "
    "call %}"
    '<tool_call>{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson '
    "}}}</tool_call>"
    "{% endfor %}{% endif %}<|end|>"
    "{% elif show_system or message != messages[0] or not messages[1] or messages[1]['role'] == "
    "'assistant' %}"
    "<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template with two roles, policy and user.

Tool results and system messages within the conversation are rendered as user messages. To save
tokens, the template omits tool schemas and a system message before the first user message, unless
the variables ``show_tools`` and ``show_system`` are true: a model of this size learns its tools
from demonstrations or by trial. With ``show_tools``, each tool is shown by its signature, such as
``look(where, how)``. Calls have Qwen's format, without line breaks.
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_positions: int) -> Any:
    """Return a byte-level BPE tokenizer (``PreTrainedTokenizerFast``) trained on ``texts``, with a
    chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [  # type: ignore[assignment]
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(
    config: BuiltinModelConfig, vocab_size: int, eos_id: int, pad_id: int, seed: int
) -> Any:
    """Return a randomly initialised ``Qwen3ForCausalLM`` in float32 with tied embeddings."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            head_dim=config.hidden_size // config.num_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            eos_token_id=eos_id,
            pad_token_id=pad_id,
            bos_token_id=None,
        )
    )


def demonstration_texts(path: Path) -> Iterator[str]:
    """Yield the text of every message in a JSONL file of demonstrations, and of every tool call as
    the chat template renders it. Raises ValueError naming file and line of an invalid
    demonstration."""
    for row in read_json_lines(path):
        for problem in demonstration_problems(row.values):
            raise ValueError(f"{row.where}: {problem}")
        for message in row.values["messages"]:
            yield message.get("content") or ""
            for call in message.get("tool_calls") or ():
                yield _call_text(call.get("function", call))


def _call_text(function: Mapping[str, Any]) -> str:
    """Return a tool call as the chat template renders it."""
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return (
        f'<tool_call>{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        f"{text}}}</tool_call>"
    )


def build_builtin_policy(
    demonstrations: Path | None, out: Path, config: BuiltinModelConfig, seed: int
) -> None:
    """Write tokenizer and random weights to ``out``; the folder appears only when complete. Without
    demonstrations the tokenizer has one id for each byte and each special token, regardless of
    ``config.vocab_size``."""
    texts = demonstration_texts(demonstrations) if demonstrations else ()
    vocab_size = config.vocab_size if demonstrations else len(SPECIAL_TOKENS) + 256
    tokenizer = train_tokenizer(texts, vocab_size, config.max_positions)
    model = build_model(config, vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id, seed)
    with atomic_folder(out) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def main() -> None:
    """Build the built-in policy that the command-line arguments describe."""
    defaults = BuiltinModelConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument(
        "--demonstrations",
        type=Path,
        help="JSONL with a 'messages' list per line; without it, a token is a byte",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    for name, value in vars(defaults).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}"
        )
    args = parser.parse_args()
    config = BuiltinModelConfig(**{name: getattr(args, name) for name in vars(defaults)})
    try:
        build_builtin_policy(args.demonstrations, args.out, config, args.seed)
    except (OSError, ValueError) as error:
        raise SystemExit(f"builtin_policy: {error}") from None


if __name__ == "__main__":
    main()
