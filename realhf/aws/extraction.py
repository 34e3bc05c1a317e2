"""Finds the command in a policy turn (docs/reference/environment.md 9, "Extraction")."""

from __future__ import annotations

import re

from realhf.base.shell_quotes import quote_states

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_QUOTING = re.compile(r"""['"\\]""")


def extract_command(text: str) -> str | None:
    """Return the first ``aws ...`` command of a turn, or None.

    Reasoning is dropped (an unclosed ``<think>`` swallows the rest, a ``</think>`` whose opening stood in the prompt
    everything before it); code fences, enclosing backticks and a leading ``$ `` are stripped; lines that end in a
    backslash or inside an open quote are joined with the next.
    """
    lines = _without_reasoning(text).replace("\r\n", "\n").split("\n")
    for number, line in enumerate(lines):
        start = _bare(line)
        if start.startswith("aws "):
            return _join(start, lines[number + 1 :])
    return None


def _without_reasoning(text: str) -> str:
    text = _THINK.sub("", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0]


def _bare(line: str) -> str:
    line = line.strip()
    if line.startswith("```"):
        line = line.lstrip("`")
        if not line.startswith(("aws ", "$ ")):
            line = line.partition(" ")[2].lstrip()
    if line.endswith("```"):
        line = line.rstrip("`")
    if len(line) > 1 and line.startswith("`"):
        line = line[1:].removesuffix("`")
    return line.removeprefix("$ ").lstrip()


def _join(line: str, rest: list[str]) -> str:
    command = line
    for following in rest:
        quote, escaped = _scan(command)
        if (not quote and not escaped) or following.strip().startswith("```"):
            break
        command = f"{command}\n{following}" if quote else f"{command[:-1].rstrip()} {following.strip()}"
    if _scan(command)[0]:
        return line.strip()
    return command.removesuffix("\\").strip()


def _scan(text: str) -> tuple[str, bool]:
    """Return (quote character open at the end or "", whether the text ends in an escaping backslash)."""
    quote, escaped = "", False
    if not _QUOTING.search(text):
        return quote, escaped
    for _, quote, escaped in quote_states(text):  # noqa: B007
        pass
    return quote, escaped
