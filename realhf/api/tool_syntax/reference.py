"""Write the table of tool syntaxes for docs/extend/tool_syntax.md:

python -m realhf.api.tool_syntax.reference
"""

from __future__ import annotations

from realhf.api.tool_syntax.table import SYNTAXES, ToolSyntax

_EXAMPLE = (("look", {"where": "a cup", "times": 2}),)
"""The call that the table shows."""


def write_table() -> str:
    """Return a Markdown table with a row for each form of each syntax."""
    lines = [
        "| `actor.tool_parser` | models | a call (↵ is a line break) | the chat template contains "
        "| a turn also ends with |",
        "|---|---|---|---|---|",
    ]
    for syntax in SYNTAXES.values():
        for models, write in syntax.writers.items():
            cells = [
                _code(syntax.name),
                models,
                _code(write(_EXAMPLE)),
                _describe_marks(syntax),
                " or ".join(map(_code, syntax.ends)) or "-",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "| `plain` | calls remain text | - | - | - |"])


def _describe_marks(syntax: ToolSyntax) -> str:
    return ", or ".join(" and ".join(map(_code, words)) for words in syntax.template_marks)


def _code(text: str) -> str:
    """Return a text as code in a cell of a Markdown table."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text.replace('|', chr(92) + '|').replace(chr(10), '↵')}{fence}"


if __name__ == "__main__":
    print(write_table())
