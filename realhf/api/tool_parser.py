"""Parser that splits policy turns into reasoning, tool calls in the syntax of the chat template,
and the remaining content. The syntaxes are those of ``realhf.api.tool_syntax``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from realhf.api.environment import AssistantMessage
from realhf.api.tool_syntax.arguments import schema_kinds
from realhf.api.tool_syntax.calls import (
    MAX_CALLS,
    MAX_NAME_CHARS,
    CallProblem,
    build_call,
    call_id,
    malformed_call,
)
from realhf.api.tool_syntax.json_values import MAX_DEPTH, check_value, read_json
from realhf.api.tool_syntax.table import HERMES, LLAMA, PLAIN, SYNTAXES, XML, detect_syntax
from realhf.api.tool_syntax.xml import read_xml_call

__all__ = [
    "AUTO",
    "FAMILIES",
    "HERMES",
    "LLAMA",
    "MAX_CALLS",
    "MAX_DEPTH",
    "MAX_NAME_CHARS",
    "PLAIN",
    "XML",
    "CallProblem",
    "build_call",
    "call_id",
    "check_value",
    "detect_family",
    "find_unread_variables",
    "malformed_call",
    "parse_turn",
    "read_json",
    "read_xml_call",
    "schema_kinds",
    "template_reads_tools",
]

FAMILIES = tuple(SYNTAXES)
"""Names of the syntaxes of tool calls (``realhf.api.tool_syntax.table.SYNTAXES``)."""
AUTO = "auto"
"""Option value that selects one of ``FAMILIES`` according to the chat template."""
_RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "tokenize", "chat_template", "tools"}
)
"""Variables of the chat template that are set at every rendering."""


def detect_family(template: str) -> str:
    """Return which syntax in ``FAMILIES`` a chat template uses for tool calls; "plain" if it uses
    none of the others."""
    return detect_syntax(template).name


def template_reads_tools(template: str) -> bool:
    """Return whether a chat template reads tool schemas."""
    return bool(re.search(r"\btools\b", template))


def find_unread_variables(template: str, names: Iterable[str]) -> list[str]:
    """Return those ``names`` that have no effect as template variables: names that do not occur in
    the template, and names that every rendering sets itself."""
    return [
        name
        for name in names
        if name in _RESERVED_VARIABLES or not re.search(rf"\b{re.escape(name)}\b", template)
    ]


def parse_turn(
    text: str, family: str, *, token_count: int = 0, tools: Sequence[Mapping[str, Any]] = ()
) -> AssistantMessage:
    """Parse a policy turn whose calls have the syntax ``family`` (one of ``FAMILIES``).

    Reasoning is the text between ``<think>`` and ``</think>``, or the syntax's own tags. If the
    closing tag is missing, the reasoning extends to the end; if the opening tag was in the prompt,
    it starts at the beginning. Calls within reasoning are ignored; tags within a well-formed call
    are part of the call. The content is the remaining text, stripped of white space if anything was
    removed. At most ``MAX_CALLS`` calls are parsed; the next one becomes a call with a problem that
    includes the rest of the turn. No text raises.

    tools: schemas from which argument types are taken in syntaxes whose arguments are not JSON.
    """
    turn = SYNTAXES[family].parse(text, tools)
    return AssistantMessage(turn.content, tuple(turn.calls), turn.reasoning, text, token_count)
