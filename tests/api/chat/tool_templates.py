"""Chat templates of families whose calls are neither in Qwen's nor in Llama's syntax, made alike: they
write calls, cues and ends of turns character by character as the families do, and nothing else. None
of them is a copy of a published template. Each was compared over random calls with the template that
its docstring names."""

from __future__ import annotations


def _template(
    *, user: str, assistant: str, tool: str, system: str, cue: str, start: str = "", each: str = ""
) -> str:
    """Return a template; each part writes one message, ``each`` stands before every message."""
    return (
        "{%- set ns = namespace(last='') %}{{- '" + start + "' }}"
        "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}"
        "{%- for message in messages %}" + each + "{%- if message.role == 'assistant' %}"
        "{%- set content = message.content or '' %}{%- set calls = message.tool_calls or [] %}"
        + assistant
        + "{%- elif message.role == 'tool' %}"
        + tool
        + "{%- elif message.role == 'user' %}"
        + user
        + "{%- else %}"
        + system
        + "{%- endif %}{%- set ns.last = message.role %}{%- endfor %}"
        "{%- if add_generation_prompt %}" + cue + "{%- endif %}"
    )


def _glm(line_break: str) -> str:
    return _template(
        start="[gMASK]<sop>",
        user="{{- '<|user|>\\n' + message.content }}",
        assistant="{{- '<|assistant|>\\n<think></think>' }}"
        "{%- if content %}{{- '\\n' + content }}{%- endif %}{%- for call in calls %}"
        "{{- '" + line_break + "<tool_call>' + call.function.name + '" + line_break + "' }}"
        "{%- for key, value in call.function.arguments | items %}"
        "{{- '<arg_key>' + key + '</arg_key>" + line_break + "<arg_value>' }}"
        "{{- value if value is string else value | tojson }}{{- '</arg_value>" + line_break + "' }}"
        "{%- endfor %}{{- '</tool_call>' }}{%- endfor %}",
        tool="{%- if ns.last != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
        "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}",
        system="{{- '<|system|>\\n' + message.content }}",
        cue="{{- '<|assistant|>' }}",
    )


GLM46 = _glm("\\n")
"""GLM 4.5 and 4.6: no word ends a turn; the next message's start does."""
GLM47 = _glm("")
"""GLM 4.7 and 5, whose calls have no line breaks."""


def _mistral(calls: str, tool: str) -> str:
    return _template(
        start="<s>",
        user="{{- '[INST]' + message.content + '[/INST]' }}",
        assistant="{{- content }}" + calls + "{{- '</s>' }}",
        tool=tool,
        system="{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}",
        cue="",
    )


_NINE = (
    "{%- if not id or id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif "
    "%}"
)
_NAMED_CALLS = (
    "{%- for call in calls %}{%- set id = call.id %}"
    + _NINE
    + "{{- '[TOOL_CALLS]' + call.function.name }}{{- @ }}"
    "{{- '[ARGS]' + (call.function.arguments | tojson) }}{%- endfor %}"
)
MISTRAL3 = _mistral(
    "{%- if calls %}{{- '[TOOL_CALLS][' }}{%- for call in calls %}{%- set id = call.id %}"
    + _NINE
    + '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- ', \"id\": \"' + id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}{%- endif %}",
    "{%- set id = message.tool_call_id %}" + _NINE + "{{- '[TOOL_RESULTS]' }}"
    "{{- {'content': message.content, 'call_id': id} | tojson }}{{- '[/TOOL_RESULTS]' }}",
)
"""Mistral, version 3 of mistral-common's templates: a list of calls with ids."""
MISTRAL11 = _mistral(
    _NAMED_CALLS.replace("@", "'[CALL_ID]' + id"),
    "{%- set id = message.tool_call_id %}" + _NINE + "{{- '[TOOL_RESULTS]' + id }}"
    "{{- '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}",
)
"""Mistral, version 11: names and ids before arguments."""
MISTRAL13 = _mistral(
    _NAMED_CALLS.replace("@", "''"), "{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}"
)
"""Mistral, versions 13 and 15: names before arguments."""

_DEEPSEEK_CALL = "'<｜tool▁call▁begin｜>' + @ + '<｜tool▁call▁end｜>'"


def _deepseek(call: str, separator: str) -> str:
    return _template(
        start="<｜begin▁of▁sentence｜>",
        user="{{- '<｜User｜>' + message.content }}",
        assistant="{%- if ns.last != 'tool' %}{{- '<｜Assistant｜></think>' }}{%- endif %}"
        "{{- content }}{%- if calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for call in calls %}"
        "{{- " + _DEEPSEEK_CALL.replace("@", call) + " }}"
        "{%- if not loop.last %}{{- '" + separator + "' }}{%- endif %}{%- endfor %}"
        "{{- '<｜tool▁calls▁end｜>' }}{%- endif %}{{- '<｜end▁of▁sentence｜>' }}",
        tool="{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}",
        system="{{- message.content }}",
        cue="{%- if ns.last != 'tool' %}{{- '<｜Assistant｜></think>' }}{%- endif %}",
    )


DEEPSEEK31 = _deepseek("call.function.name + '<｜tool▁sep｜>' + call.function.arguments", "")
"""DeepSeek V3.1, which reads arguments as JSON text only; no cue follows the answer of a tool."""
DEEPSEEK3 = _deepseek(
    "'function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments + "
    "'\\n```'",
    "\\n",
)
"""DeepSeek V3 and R1: arguments in a block of code."""
DEEPSEEK32 = _template(
    start="<｜begin▁of▁sentence｜>",
    user="{{- '<｜User｜>' + message.content }}",
    assistant="{{- '<｜Assistant｜></think>' + content }}{%- if calls %}"
    "{{- '\\n\\n<｜DSML｜function_calls>' }}{%- for call in calls %}"
    "{{- '\\n<｜DSML｜invoke name=\"' + call.function.name + '\">\\n' }}"
    "{%- for key, value in call.function.arguments | items %}"
    "{%- if not loop.first %}{{- '\\n' }}{%- endif %}"
    "{{- '<｜DSML｜parameter name=\"' + key + '\" string=\"' }}"
    "{{- 'true' if value is string else 'false' }}{{- '\">' }}"
    "{{- value if value is string else value | tojson }}{{- '</｜DSML｜parameter>' }}{%- endfor %}"
    "{{- '\\n</｜DSML｜invoke>' }}{%- endfor %}{{- '\\n</｜DSML｜function_calls>' }}{%- endif %}"
    "{{- '<｜end▁of▁sentence｜>' }}",
    tool="{{- '\\n\\n<function_results>\\n<result>' + message.content + "
    "'</result>\\n</function_results>' }}",
    system="{{- message.content }}",
    cue="{{- '<｜Assistant｜></think>' }}",
)
"""DeepSeek V3.2: elements with typed parameters."""
DEEPSEEK4 = DEEPSEEK32.replace("function_calls", "tool_calls")
"""DeepSeek V4: another name of the element around the calls."""
KIMI = _template(
    user="{{- '<|im_user|>user<|im_middle|>' + message.content + '<|im_end|>' }}",
    assistant="{{- '<|im_assistant|>assistant<|im_middle|>' + content }}{%- if calls %}"
    "{{- '<|tool_calls_section_begin|>' }}{%- for call in calls %}"
    "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
    "{{- call.function.arguments | tojson }}{{- '<|tool_call_end|>' }}{%- endfor %}"
    "{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|im_end|>' }}",
    tool="{{- '<|im_system|>tool<|im_middle|>## Return of ' + (message.tool_call_id or '') + '\\n' "
    "}}{{- message.content + '<|im_end|>' }}",
    system="{{- '<|im_system|>system<|im_middle|>' + message.content + '<|im_end|>' }}",
    cue="{{- '<|im_assistant|>assistant<|im_middle|>' }}",
)
"""Kimi K2: the name of the function is part of the call's id."""
GEMMA4 = (
    "{%- macro written(value) -%}{%- if value is string -%}"
    "{{- '<|\"|>' + value + '<|\"|>' -}}{%- elif value is boolean -%}"
    "{{- 'true' if value else 'false' -}}{%- elif value is mapping -%}{{- '{' -}}"
    "{%- for key, item in value | dictsort -%}{{- key + ':' -}}{{- written(item) -}}"
    "{%- if not loop.last -%}{{- ',' -}}{%- endif -%}{%- endfor -%}{{- '}' -}}"
    "{%- elif value is sequence -%}{{- '[' -}}{%- for item in value -%}{{- written(item) -}}"
    "{%- if not loop.last -%}{{- ',' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}"
    "{%- else -%}{{- 'null' if value is none else value -}}{%- endif -%}{%- endmacro -%}"
    + _template(
        start="<bos>",
        user="{{- '<|turn>user\\n' + message.content + '<turn|>\\n' }}",
        assistant="{%- if ns.last != 'tool' %}{{- '<|turn>model\\n' }}{%- endif %}"
        "{%- for call in calls %}{{- '<|tool_call>call:' + call.function.name }}"
        "{{- written(call.function.arguments) }}{{- '<tool_call|>' }}{%- endfor %}"
        "{%- if calls and (loop.last or messages[loop.index0 + 1].role != 'tool') %}"
        "{{- '<|tool_response>' }}{%- endif %}{{- content }}"
        "{%- if not calls %}{{- '<turn|>\\n' }}{%- endif %}",
        # As in the published template, an answer is shown only after a call.
        tool="{%- if messages[loop.index0 - 1].tool_calls or ns.last == 'tool' %}"
        "{{- '<|tool_response>response:' + (message.name or 'unknown') + '{value:' }}"
        "{{- written(message.content) }}{{- '}<tool_response|>' }}{%- endif %}",
        system="{{- '<|turn>system\\n' + message.content + '<turn|>\\n' }}",
        cue="{%- if ns.last != 'tool' %}{{- '<|turn>model\\n<|channel>thought\\n<channel|>' }}"
        "{%- endif %}",
    )
)
"""Gemma 4: answers continue the turn of the call, and the cue closes an empty thought."""
GEMMA4_FIRST = GEMMA4.replace("'null' if value is none else value", "value")
"""The first templates of Gemma 4, which write null as Python does."""
LLAMA4_PYTHONIC = _template(
    start="<|begin_of_text|>[func_name1(param=value)]",
    user="{{- '<|header_start|>user<|header_end|>\\n\\n' + message.content + '<|eot|>' }}",
    assistant="{{- '<|header_start|>assistant<|header_end|>\\n\\n' + content }}{%- if calls %}"
    "{{- '[' }}{%- for call in calls %}{{- call.function.name + '(' }}"
    "{%- for key, value in call.function.arguments | items %}{{- key + '=' }}"
    "{{- '%r' | format(value) }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}{%- endif %}"
    "{{- '<|eot|>' }}",
    tool="{{- '<|header_start|>ipython<|header_end|>\\n\\n' }}{{- message.content | tojson }}"
    "{{- '<|eot|>' }}",
    system="{{- '<|header_start|>system<|header_end|>\\n\\n' + message.content + '<|eot|>' }}",
    cue="{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}",
)
"""A list of Python calls as the whole turn. The published templates for Llama 3.2 and 4 write strings
without escapes."""
CONTROL = (
    "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", '<|"|>',
    "<|header_start|>", "<|header_end|>",
)  # fmt: skip
"""Control words of these families."""
