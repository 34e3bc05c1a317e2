"""The table of tool syntaxes, and which of them a chat template uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.tool_syntax import hermes, llama, xml
from realhf.api.tool_syntax.calls import ParsedTurn, Tools
from realhf.api.tool_syntax.tags import THINK_TAGS

Write = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
"""Function from calls, as names and arguments, to their text. It raises CallProblem for calls that
the syntax cannot express."""


@dataclass(frozen=True)
class ToolSyntax:
    """A syntax of tool calls."""

    name: str
    """Value of the option ``tool_parser``."""
    parse: Callable[[str, Tools], ParsedTurn]
    """Parser of a turn. It never raises; a call that it cannot parse has a ``problem``."""
    writers: Mapping[str, Write] = field(default_factory=dict)
    """Writers by the models whose templates write so. ``parse`` parses all their forms."""
    template_marks: re.Pattern[str] = re.compile(r"(?!)")
    """Pattern that only the chat templates of this syntax and of syntaxes further up in the table
    contain."""


def _parse_plain(text: str, tools: Tools = ()) -> ParsedTurn:
    """Parse a turn whose calls remain text."""
    del tools
    return THINK_TAGS.parse(text)


HERMES = "hermes"
XML = "xml"
LLAMA = "llama"
PLAIN = "plain"
SYNTAXES: Mapping[str, ToolSyntax] = {
    syntax.name: syntax
    for syntax in (
        ToolSyntax(
            XML,
            xml.parse,
            {
                "Qwen3-Coder, Nemotron 3": xml.write_with_python,
                "Qwen 3.5": xml.write_with_json,
            },
            re.compile("(?s)(?=.*<tool_call>).*<function="),
        ),
        ToolSyntax(
            HERMES,
            hermes.parse,
            {"Hermes, Qwen 2.5 and 3, SmolLM": hermes.write},
            re.compile("<tool_call>"),
        ),
        ToolSyntax(
            LLAMA,
            llama.parse,
            {"Llama 3.1, 3.2 and 4": llama.write},
            re.compile(r'<\|python_tag\|>|"parameters\\?":'),
        ),
        ToolSyntax(PLAIN, _parse_plain),
    )
}
"""All syntaxes by name. A chat template uses the first one whose marks it contains; ``plain`` if it
contains none."""


def detect_syntax(template: str) -> ToolSyntax:
    """Return the syntax that a chat template uses for tool calls; ``plain`` if it uses none of the
    others."""
    return next(
        (syntax for syntax in SYNTAXES.values() if syntax.template_marks.search(template)),
        SYNTAXES[PLAIN],
    )
