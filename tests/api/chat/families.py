"""Chat templates of families of models, made alike: written here, with the call syntax, the cue and
the ends of turns that the families use, and without their prose. None of them is a copy of a
published template."""

from __future__ import annotations

from typing import Any, NamedTuple

from realhf.api.chat_template import TemplateChat
from tests.api.chat import tool_templates
from tests.api.chat.templates import QWEN3, QWEN25, tokenizer


class Family(NamedTuple):
    """A template, the tokens that end its turns, and the parser that reads its calls ("" for
    none)."""

    template: str
    eos: str
    stops: tuple[str, ...] = ()
    parser: str = ""


LLAMA32 = (
    "{{- '<|begin_of_text|>' }}{%- set listed = tools %}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    "{%- if listed %}{{- 'Environment: ipython\\n' }}{%- endif %}{{- system + '<|eot_id|>' }}"
    "{%- if listed %}{%- set first = messages[0].content | trim %}{%- set messages = messages[1:] "
    "%}"
    "{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}"
    '{{- \'Call a function as {"name": function name, "parameters": its arguments}.\\n\\n\' }}'
    "{%- for tool in listed %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{{- first + "
    "'<|eot_id|>' }}"
    "{%- endif %}"
    "{%- for message in messages %}{%- if message.role in ('tool', 'ipython') %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
    "{{- message.content | tojson if message.content is mapping else message.content }}{{- "
    "'<|eot_id|>' }}"
    "{%- elif message.tool_calls %}{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('one call at a time') }}{%- endif %}{%- set call = "
    "message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    '{{- \'{"name": "\' + call.name + \'", "parameters": \' + (call.arguments | tojson) + '
    "'}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' "
    "}}{%- endif %}"
)
"""Calls are the whole turn, as JSON with ``parameters``, one in a turn."""

_CHATML_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson + "
    "'\\n' }}{%- endfor %}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}{{- "
    "'<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + "
    "'<|im_end|>\\n' }}"
    "{%- endif %}"
)
_CHATML_ANSWERS = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user\\n' "
    "}}{%- endif %}"
    "{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- "
    "endif %}"
)


def _xml(thought: str, value: str, cue: str) -> str:
    """``thought`` writes what stands before the content of a turn, ``value`` an argument, ``cue``
    what is sampled after."""
    return (
        "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == "
        "'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        + _CHATML_TOOLS
        + "{%- for message in messages %}"
        "{%- if message.role == 'assistant' %}{%- set content = message.content or '' %}"
        "{%- set reasoning = '' %}{%- if '</think>' in content %}"
        "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\\n' }}" + thought + "{{- content }}"
        "{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}"
        "{%- if content or not loop.first %}{{- '\\n' }}{%- endif %}"
        "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}"
        "{%- for key, value in call.arguments | items %}{{- '<parameter=' + key + '>\\n' }}{{- "
        + value
        + " }}"
        "{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
        + _CHATML_ANSWERS
        + "{%- elif not loop.first or "
        "message.role == 'user' %}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
        "'<|im_end|>\\n' }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n"
        + cue
        + "' }}"
        "{%- endif %}"
    )


_JSON_VALUES = "(value if value is string else value | tojson)"
_JSON_CONTAINERS = (
    "(value if value is string else value | tojson if value is iterable else value | string)"
)
_JSON_OBJECTS = "(value | tojson if value is mapping else value | string)"
QWEN3_CODER = _xml("", _JSON_OBJECTS, "")
"""Writes what is no text as Python does: True, None."""
_QWEN35_THOUGHT = (
    "{%- if loop.index0 > ns.last %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif "
    "%}"
)
QWEN35 = _xml(_QWEN35_THOUGHT, _JSON_CONTAINERS, "<think>\\n")
"""Opens reasoning in its cue; the turns before the last question keep none."""
QWEN36 = _xml(_QWEN35_THOUGHT, _JSON_VALUES, "<think>\\n")
"""Writes all that is no text as JSON."""
NEMOTRON3 = _xml(
    "{{- '<think>' + ('\\n' + reasoning + '\\n' if reasoning and loop.index0 > ns.last else '') + "
    "'</think>' }}",
    _JSON_CONTAINERS,
    "<think>\\n",
)
"""Opens reasoning in its cue, and every turn of the history has some, if empty."""
LFM25 = (
    "{{- '<|startoftext|>' }}"
    + _CHATML_TOOLS
    + "{%- for message in messages %}{%- if message.role == 'assistant' and message.tool_calls %}"
    "{{- '<|im_start|>assistant\\n' + (message.content or '') + '<|tool_call_start|>[' }}"
    "{%- for call in message.tool_calls %}{%- set call = call.function or call %}{{- call.name + "
    "'(' }}"
    "{%- for key, value in call.arguments | items %}{{- key + '=' }}"
    '{{- ("\'" + value + "\'") if value is string else value | tojson if value is mapping else value }}'
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- "
    "']<|tool_call_end|><|im_end|>\\n' }}"
    "{%- elif not loop.first or message.role != 'system' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif "
    "%}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Writes calls as Python does, between control ids."""
GPT_OSS = (
    "{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- if tools or messages[0].role == 'system' %}{{- '<|start|>developer<|message|>' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}"
    "{%- for tool in tools or [] %}{{- 'type ' + tool.function.name + ' = (_: any) => any;' }}{%- "
    "endfor %}"
    "{{- '<|end|>' }}{%- endif %}{%- set last = namespace(name=none) %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' and message.tool_calls %}"
    "{%- set call = message.tool_calls[0].function or message.tool_calls[0] %}{%- set last.name = "
    "call.name %}"
    "{%- if message.content %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{%- "
    "endif %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' "
    "}}"
    "{{- call.arguments | tojson + '<|call|>' }}"
    "{%- elif message.role == 'assistant' %}{%- set last.name = none %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- elif message.role == 'tool' %}{%- if last.name is none %}"
    "{{- raise_exception('a tool message without a call') }}{%- endif %}"
    "{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- message.content | tojson + '<|end|>' }}"
    "{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + "
    "'<|end|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif "
    "%}"
)
"""A turn in the history ends with another id than the last one, and one with a call with a third;
the answer of a tool is an error where no call stands before it."""
COHERE = (
    "{{- '<BOS_TOKEN>' }}{%- if tools %}{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|END_OF_TURN_TOKEN|>' }}{%- "
    "endif %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' and message.tool_calls %}"
    "{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>' + (message.content or '') }}"
    "{{- '<|END_THINKING|><|START_ACTION|>[' }}{%- for call in message.tool_calls %}"
    '{%- set call = call.function or call %}{{- \'{"tool_call_id": "\' ~ loop.index0 ~ \'", '
    '"tool_name": "\' }}'
    "{{- call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}{{- "
    "']<|END_ACTION|><|END_OF_TURN_TOKEN|>' }}"
    "{%- elif message.role == 'assistant' %}{{- "
    "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}"
    "{{- message.content + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}"
    "{%- elif message.role == 'tool' %}{{- "
    "'<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>' }}"
    "{{- message.content + '<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' }}"
    "{%- else %}{{- '<|START_OF_TURN_TOKEN|><|' + message.role | upper + '_TOKEN|>' + "
    "message.content }}"
    "{{- '<|END_OF_TURN_TOKEN|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"
)
"""A turn ends with two control ids. A policy may sample the second of them alone."""

FAMILIES_OF_MODELS: dict[str, Family] = {
    "qwen2.5": Family(QWEN25, "<|im_end|>", parser="hermes"),
    "qwen3": Family(QWEN3, "<|im_end|>", parser="hermes"),
    "qwen3-coder": Family(QWEN3_CODER, "<|im_end|>", parser="xml"),
    "qwen3.5": Family(QWEN35, "<|im_end|>", parser="xml"),
    "qwen3.6": Family(QWEN36, "<|im_end|>", parser="xml"),
    "nemotron3": Family(NEMOTRON3, "<|im_end|>", parser="xml"),
    "llama3.2": Family(LLAMA32, "<|eot_id|>", parser="llama"),
    "lfm2.5": Family(LFM25, "<|im_end|>", parser="pythonic"),
    "gpt-oss": Family(GPT_OSS, "<|return|>", parser="harmony"),
    "glm4.6": Family(tool_templates.GLM46, "<|endoftext|>", parser="glm"),
    "glm4.7": Family(tool_templates.GLM47, "<|endoftext|>", parser="glm"),
    "mistral3": Family(tool_templates.MISTRAL3, "</s>", parser="mistral"),
    "mistral11": Family(tool_templates.MISTRAL11, "</s>", parser="mistral"),
    "mistral13": Family(tool_templates.MISTRAL13, "</s>", parser="mistral"),
    "deepseek3": Family(tool_templates.DEEPSEEK3, "<｜end▁of▁sentence｜>", parser="deepseek"),
    "deepseek3.1": Family(tool_templates.DEEPSEEK31, "<｜end▁of▁sentence｜>", parser="deepseek"),
    "deepseek3.2": Family(tool_templates.DEEPSEEK32, "<｜end▁of▁sentence｜>", parser="dsml"),
    "deepseek4": Family(tool_templates.DEEPSEEK4, "<｜end▁of▁sentence｜>", parser="dsml"),
    "kimi-k2": Family(tool_templates.KIMI, "<|im_end|>", parser="kimi"),
    "gemma4": Family(tool_templates.GEMMA4, "<turn|>", parser="gemma"),
    "gemma4-first": Family(tool_templates.GEMMA4_FIRST, "<turn|>", parser="gemma"),
    "llama4": Family(tool_templates.LLAMA4_PYTHONIC, "<|eot|>", parser="pythonic"),
    "cohere": Family(COHERE, "<|END_OF_TURN_TOKEN|>"),
}
CONTROL = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|startoftext|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
    "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>",
)  # fmt: skip
"""Control words of these families, beside those of ``templates.SPECIAL``."""


def family_tokenizer(name: str) -> Any:
    """Return a tokenizer of a family, with a token for each byte and each control word."""
    family = FAMILIES_OF_MODELS[name]
    control = (*CONTROL, *tool_templates.CONTROL)
    return tokenizer(family.template, family.eos, control=control)


def family_chat(name: str, **more: Any) -> TemplateChat:
    """Return the chat of a family, with its own ends of turns."""
    made = family_tokenizer(name)
    stops = made.encode("".join(FAMILIES_OF_MODELS[name].stops), add_special_tokens=False)
    return TemplateChat(made, stop_ids=stops, **more)
