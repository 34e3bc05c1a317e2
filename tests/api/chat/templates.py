"""Small chat templates in the style of known models, and a byte-level tokenizer for any of them."""

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

_TOOLS_OF_QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- "
    "endfor %}"
    '{{- \'\\n</tools>\\n\\nAnswer with <tool_call>{"name": <function-name>, "arguments": '
    "<args-json-object>}"
    "</tool_call><|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + "
    "'<|im_end|>\\n' }}"
    "{%- endif %}"
)
_CALLS_OF_QWEN = (
    "{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}"
    "{%- if (loop.first and message.content) or (not loop.first) %}{{- '\\n' }}{%- endif %}"
    "{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}'
    "{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{%- endif %}"
)
_REPLIES_OF_QWEN = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- "
    "endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- "
    "endif %}"
)
QWEN25 = (
    _TOOLS_OF_QWEN + "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or "
    "(message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + (message.content or "
    "'') }}"
    + _CALLS_OF_QWEN
    + "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
    + _REPLIES_OF_QWEN
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' "
    "}}{%- endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' "
    "%}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + _TOOLS_OF_QWEN
    + "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}{%- set thought = "
    "'' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = "
    "content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + "
    "content.lstrip('\\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}"
    + _CALLS_OF_QWEN
    + "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
    + _REPLIES_OF_QWEN
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- "
    "'<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- '<|begin|>' }}{%- if messages[0]['role'] == 'system' %}{%- set system = "
    "messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start|>system<|stop|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- "
    "endif %}"
    "{{- system + '<|eot|>' }}"
    "{%- if tools %}{%- set first = messages[0]['content'] | trim %}{%- set messages = "
    "messages[1:] %}"
    "{{- '<|start|>user<|stop|>\\n\\n' }}"
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary}.\\n\\n\' }}'
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- first + "
    "'<|eot|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' "
    "}}"
    "{%- elif 'tool_calls' in message %}{%- if not message.tool_calls | length == 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set tool_call = message.tool_calls[0].function %}{{- '<|start|>assistant<|stop|>\\n\\n' }}"
    "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}{{- "
    "tool_call.arguments | tojson }}"
    "{{- '}' }}{{- '<|eot|>' }}"
    "{%- else %}{{- '<|start|>ipython<|stop|>\\n\\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}{{- message.content | "
    "tojson }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|eot|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}"
)
INSISTS = (
    "{{ tools | length if tools else '' }}{% set ns = namespace(calls=0) %}{% for message in "
    "messages %}"
    "{% if message.role == 'tool' %}{% if ns.calls == 0 %}{{ raise_exception('a tool message "
    "follows a call') }}"
    "{% endif %}{% if message.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 "
    "characters') }}{% endif %}"
    "{% set ns.calls = ns.calls - 1 %}[R]{{ message.content }}[/R]"
    "{% elif message.role == 'assistant' %}{{ message.content }}{% if message.tool_calls %}"
    "{% set ns.calls = message.tool_calls | length %}<tool_call>{{ message.tool_calls | length "
    "}}</tool_call>"
    "{% endif %}</s>{% else %}[{{ message.role }}]{{ message.content }}[/]{% endif %}{% endfor %}"
)
"""Takes a tool's answer only after a call, as the templates of Mistral do."""
DROPS = (
    "{{ tools }}{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Reads tools, and shows neither their answers nor a system message."""

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|stop|>",
    "<|eot|>",
    "<|begin|>",
    "</s>",
    "<|python_tag|>",
]


def tokenizer(template, eos, merges=(), control=()):
    """Byte-level, so that every text has ids and every id a text. ``merges`` join two letters to a
    token more; ``control`` are special tokens beside those of ``SPECIAL``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(vocabulary)}, merges=[*merges]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    inner.decoder = ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=eos,
        additional_special_tokens=[token for token in (*SPECIAL, *control) if token != eos],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast
