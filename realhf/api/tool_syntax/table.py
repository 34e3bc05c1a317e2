"""The table of tool syntaxes, and which of them a chat template uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from realhf.api.tool_syntax import (
    deepseek,
    dsml,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    llama,
    mistral,
    pythonic,
    xml,
)
from realhf.api.tool_syntax.calls import NamedCalls, ParsedTurn, Tools
from realhf.api.tool_syntax.tags import THINK_TAGS, TOOL_CALL_TAGS

HERMES = "hermes"
XML = "xml"
LLAMA = "llama"
PLAIN = "plain"


@dataclass(frozen=True)
class ToolSyntax:
    """A syntax of tool calls."""

    name: str
    """Value of the option ``tool_parser``."""
    parse: Callable[[str, Tools], ParsedTurn]
    """Parser of a turn. It never raises; a call that it cannot parse has a ``problem``."""
    writers: Mapping[str, Callable[[NamedCalls], str]] = field(default_factory=dict)
    """Functions that write calls, by the models whose chat templates write them so; ``parse``
    parses all forms. They raise CallProblem for calls that the syntax cannot express."""
    template_marks: tuple[tuple[str, ...], ...] = ()
    """Words by which a chat template is recognised. It contains all words of one of the tuples."""
    ends: tuple[str, ...] = ()
    """Control words that the policy samples at the end of a turn besides the tokenizer's own end:
    first the one after calls, last the one after other turns. They must be single tokens."""
    frames_words: bool = False
    """Whether control words also stand around the words of a turn without calls, so that its text
    is not what an agent should read."""
    find_reasoning_end: Callable[[str], int] = THINK_TAGS.find_reasoning_end
    """Function that returns the index in a turn's text at which the words after its leading
    reasoning begin; 0 if no reasoning is closed there."""
    reasoning_key: str = ""
    """Key of a message in which chat templates of this syntax read reasoning, if they read no
    ``reasoning_content``."""
    format_id: Callable[[str, str, int], str] | None = None
    """Function that converts the id of a call to the form that chat templates of this syntax
    expect: (id, name of the function, number of earlier calls) -> id. None: any id is accepted."""


def _parse_plain(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn whose calls remain text."""
    del tools
    return THINK_TAGS.parse(text)


SYNTAXES: Mapping[str, ToolSyntax] = {
    syntax.name: syntax
    for syntax in (
        ToolSyntax(
            "harmony",
            harmony.parse,
            {"gpt-oss": harmony.write},
            (("<|channel|>", "<|message|>", "functions."),),
            ends=("<|call|>", "<|return|>"),
            frames_words=True,
            find_reasoning_end=harmony.find_reasoning_end,
            reasoning_key="thinking",
        ),
        ToolSyntax(
            "gemma",
            gemma.parse,
            {"Gemma 4": gemma.write, "Gemma 4, first templates": gemma.write_none},
            (("<|tool_call>", "<tool_call|>"),),
            ends=("<|tool_response>", "<turn|>"),
            find_reasoning_end=gemma.find_reasoning_end,
        ),
        ToolSyntax(
            "kimi",
            kimi.parse,
            {"Kimi K2": kimi.write},
            (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
            format_id=kimi.format_id,
            find_reasoning_end=kimi.find_reasoning_end,
        ),
        ToolSyntax(
            "dsml",
            dsml.parse,
            {"DeepSeek V3.2": dsml.write, "DeepSeek V4": dsml.write_v4},
            (("｜DSML｜",),),
            find_reasoning_end=dsml.find_reasoning_end,
        ),
        ToolSyntax(
            "deepseek",
            deepseek.parse,
            {"DeepSeek V3.1": deepseek.write, "DeepSeek V3, R1": deepseek.write_fenced},
            (("<｜tool▁call▁begin｜>",),),
            find_reasoning_end=deepseek.find_reasoning_end,
        ),
        ToolSyntax(
            "mistral",
            mistral.parse,
            {
                "Mistral, tokenizer version 13 and later": mistral.write,
                "Mistral, tokenizer version 11": mistral.write_with_ids,
                "Mistral, tokenizer version 3 and 7": mistral.write_list,
            },
            (("[TOOL_CALLS]",),),
            format_id=mistral.format_id,
            find_reasoning_end=mistral.find_reasoning_end,
        ),
        ToolSyntax(
            "glm",
            glm.parse,
            {"GLM 4.5 and 4.6": glm.write_lines, "GLM 4.7 and 5": glm.write_compact},
            (("<tool_call>", "<arg_key>"),),
            ends=("<|observation|>", "<|user|>"),
            find_reasoning_end=TOOL_CALL_TAGS.find_reasoning_end,
        ),
        ToolSyntax(
            XML,
            xml.parse,
            {
                "Qwen3-Coder": xml.write_json_objects,
                "Qwen 3.5, Nemotron 3": xml.write_json_containers,
                "Qwen 3.6": xml.write_json_values,
            },
            (("<tool_call>", "<function="),),
            find_reasoning_end=TOOL_CALL_TAGS.find_reasoning_end,
        ),
        ToolSyntax(
            HERMES,
            hermes.parse,
            {"Hermes, Qwen 2.5 and 3, SmolLM": hermes.write},
            (("<tool_call>",),),
            find_reasoning_end=TOOL_CALL_TAGS.find_reasoning_end,
        ),
        ToolSyntax(
            "pythonic",
            pythonic.parse,
            {
                "LFM 2 and 2.5": pythonic.write_tagged,
                "Llama 3.2 and 4 with a template for it": pythonic.write,
            },
            (("<|tool_call_start|>",), ("func_name1(",)),
            find_reasoning_end=pythonic.find_reasoning_end,
        ),
        ToolSyntax(
            LLAMA,
            llama.parse,
            {"Llama 3.1, 3.2 and 4": llama.write},
            (("<|python_tag|>",), ('"parameters":',), ('"parameters\\":',)),
        ),
        ToolSyntax(PLAIN, _parse_plain),
    )
}
"""All syntaxes by name. A chat template uses the first one that it has the marks of; ``plain`` if
there is none."""


def detect_syntax(template: str) -> ToolSyntax:
    """Return the syntax that a chat template uses for tool calls; ``plain`` if it uses none of the
    others."""
    return next(
        (
            syntax
            for syntax in SYNTAXES.values()
            if any(all(word in template for word in words) for words in syntax.template_marks)
        ),
        SYNTAXES[PLAIN],
    )
