"""Reads a command in the ways that people and models write it: over several lines, in a code fence, behind a prompt.

Every entrance (the wire, the tool of MCP, the playground, turns of a policy) reads with this module before anything
looks at the command, so that policy, grading and logs see the same line. What is a command of its own stays one: only a
backslash at the end of a line joins it with the next, as in a shell.
"""

from __future__ import annotations

from collections.abc import Iterator

from realhf.base.text import quote_states

_FENCE = "```"
_PROMPT = "$ "
_BLANKS = (" ", "\t")


def read_command(text: str) -> str:
    """Return the command that a text consists of, without the code fence, the backticks and the prompt around it, in
    one line but for what is quoted. A text of several commands keeps their line ends, which the policy refuses."""
    text = text.strip()
    if "\n" in text or text.startswith(("`", _PROMPT)) or text.endswith("\\"):
        lines = command_lines(unwrap(text.replace("\r\n", "\n")))
        text = "\n".join(line for line, _ in lines if line)
    return text


def unwrap(text: str) -> str:
    """Return what is written in a code fence, between backticks or behind a prompt, where a text begins with one; the
    end of a fence goes in any case."""
    text = text.strip()
    if text.startswith(_FENCE):
        text = _without_language(text.lstrip("`"))
    if text.endswith(_FENCE):
        text = text.rstrip("`").rstrip()
    if len(text) > 1 and text.startswith("`"):
        text = text[1:].removesuffix("`")
    return text.removeprefix(_PROMPT).lstrip()


def _without_language(text: str) -> str:
    """Return what a fence holds: the words behind its backticks (the language, attributes) are no part of it, unless a
    command follows on the same line."""
    words, newline, rest = text.partition("\n")
    for command in (words, words.partition(" ")[2].lstrip()):
        if command.startswith(("aws ", _PROMPT)):
            return f"{command}{newline}{rest}"
    return (rest if newline else words.partition(" ")[2]).lstrip()


def command_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the command lines of a text, each with whether its quotes are closed.

    A line ends where a line end is neither quoted nor behind a backslash; such a backslash goes with its line end.
    Outside of quotes, blanks behind it do not count, since they cannot be seen, and those around it are one.
    """
    line: list[str] = []
    quote = ""
    joined = False
    backslash = -1  # where in the line one escapes what comes next, as long as that is nothing but blanks
    for char, quote, escapes in quote_states(text):
        if joined and char in _BLANKS:
            if line[-1:] not in ([" "], ["\t"]) or line[-2:-1] == ["\\"]:
                line.append(" ")
            continue
        joined = False
        if char == "\n" and backslash >= 0 and (not quote or backslash == len(line) - 1):
            del line[backslash:]
            backslash, joined = -1, not quote
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
