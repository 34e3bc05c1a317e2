"""Parsing of commands as people and models write them: over several lines, in a code fence, after a
prompt.

Every entry point (the wire, the MCP tool, the playground, policy turns) calls this module before
anything inspects the command, so that policy, grading and logs see the same line. Separate commands
are never joined: only a backslash at the end of a line joins it with the next one, as in a shell.
"""

from __future__ import annotations

from collections.abc import Iterator

from realhf.base.text import quote_states

_FENCE = "```"
_PROMPT = "$ "
_BLANKS = (" ", "\t")


def read_command(text: str) -> str:
    """Return the command in a text without the code fence, backticks or prompt around it.

    It is one line, except for line breaks inside quotes. If the text contains several commands,
    they stay on separate lines, which the policy refuses.
    """
    text = text.strip()
    if "\n" in text or text.startswith(("`", _PROMPT)) or text.endswith("\\"):
        lines = command_lines(unwrap(text.replace("\r\n", "\n")))
        text = "\n".join(line for line, _ in lines if line)
    return text


def unwrap(text: str) -> str:
    """Return a text without a code fence, backticks or prompt at its beginning, and without a code
    fence at its end."""
    text = text.strip()
    if text.startswith(_FENCE):
        text = _strip_language(text.lstrip("`"))
    if text.endswith(_FENCE):
        text = text.rstrip("`").rstrip()
    if len(text) > 1 and text.startswith("`"):
        text = text[1:].removesuffix("`")
    return text.removeprefix(_PROMPT).lstrip()


def _strip_language(text: str) -> str:
    """Return the content of a code fence. The rest of the fence's first line (language, attributes)
    is dropped, unless it contains a command."""
    words, newline, rest = text.partition("\n")
    for command in (words, words.partition(" ")[2].lstrip()):
        if command.startswith(("aws ", _PROMPT)):
            return f"{command}{newline}{rest}"
    return (rest if newline else words.partition(" ")[2]).lstrip()


def command_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (line, closed) for each command line of a text. ``closed``: whether all quotes in the
    line are closed.

    A command line ends at a line break that is neither quoted nor escaped by a backslash. An
    escaped line break is removed together with its backslash. Outside of quotes, blanks between the
    backslash and the line break are ignored, and the blanks around the removed line break become
    one blank.
    """
    line: list[str] = []
    quote = ""
    joined = False
    # Index in ``line`` of a backslash that may join two lines, because only blanks have followed it
    # so far; -1 if there is none.
    backslash = -1
    for char, quote, escapes in quote_states(text):
        if joined and char in _BLANKS:
            if line[-1:] not in ([" "], ["\t"]) or line[-2:-1] == ["\\"]:
                line.append(" ")
            continue
        joined = False
        if char == "\n" and backslash >= 0 and (not quote or backslash == len(line) - 1):
            del line[backslash:]
            backslash = -1
            joined = not quote
        elif char == "\n" and not quote:
            yield "".join(line).strip(), True
            line = []
        else:
            if escapes:
                backslash = len(line)
            elif char not in _BLANKS:
                backslash = -1
            line.append(char)
    if backslash >= 0:
        del line[backslash:]
    yield "".join(line).strip(), not quote
