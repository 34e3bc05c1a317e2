"""Turns in which tags mark reasoning and calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

from realhf.api.tool_syntax.calls import (
    MAX_CALLS,
    TEXT_FOLLOWS,
    ParsedTurn,
    ToolCall,
    malformed_call,
    surplus_call,
)

ReadCall = Callable[[str, int, int], tuple[list[ToolCall], int]]
"""Parser of the calls after one opening tag: (text, position after the tag, number of previous
calls) -> (calls, position after them)."""


_MAX_READS = 8 * MAX_CALLS
"""Maximum number of calls that are parsed in a turn, with those that turn out to be reasoning."""
_MAX_STARTS = 64
"""Maximum number of places at which calls without a tag are looked for."""


class Tags:
    """The tags of a syntax.

    Attributes:
        think: Tag before reasoning.
        think_end: Tag after reasoning.
        call: Tag before a call; "" if the syntax has no calls.
        call_end: Tag after a call; "" if the next call or the end of the turn ends one.
        ignored: Words around calls that are left out, such as the tags of a section of calls.
    """

    def __init__(
        self,
        think: str = "<think>",
        think_end: str = "</think>",
        call: str = "",
        call_end: str = "",
        *,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.think = think
        self.think_end = think_end
        self.call = call
        self.call_end = call_end
        self.ignored = ignored

    @cached_property
    def _any_tag(self) -> re.Pattern[str]:
        """Pattern of the tags outside of calls."""
        words = (self.think, self.think_end, self.call, *self.ignored)
        return re.compile("|".join(re.escape(word) for word in words if word))

    @cached_property
    def _malformed_end(self) -> re.Pattern[str]:
        """Pattern of the end of a malformed call: its closing tag, or the start of the next tag."""
        closing = f"{re.escape(self.call_end)}|" if self.call_end else ""
        return re.compile(f"{closing}(?={self._any_tag.pattern})")

    def parse(self, text: str, read: ReadCall | None = None) -> ParsedTurn:
        """Split a turn into reasoning, content and the calls that ``read`` parses.

        Reasoning is the text between the tags of reasoning. If the closing tag is missing, it
        extends to the end; if the opening tag was in the prompt, it starts at the beginning. Calls
        within reasoning are ignored. The content is the remaining text, stripped of white space if
        anything was removed. At most ``MAX_CALLS`` calls are parsed; the next one becomes a call
        with a problem that includes the rest of the turn.
        """
        match = self._any_tag.search(text)
        if match is None:
            return ParsedTurn(text)
        thoughts: list[str] = []
        words: list[str] = []
        calls: list[ToolCall] = []
        n_reads = 0
        place = reasoning_end = 0
        while match is not None:
            words.append(text[place : match.start()])
            place = match.end()
            if match[0] == self.think:
                end = text.find(self.think_end, place)
                thoughts.append(text[place:] if end < 0 else text[place:end])
                place = len(text) if end < 0 else end + len(self.think_end)
            elif match[0] == self.think_end:
                thoughts = []
                words = []
                calls = []
                reasoning_end = match.start()
            elif match[0] == self.call and read is not None:
                # A closing tag of reasoning discards calls, but not the time that they have cost.
                n_reads += 1
                if len(calls) >= MAX_CALLS or n_reads > _MAX_READS:
                    calls.append(surplus_call(text[match.start() :], len(calls)))
                    place = len(text)
                else:
                    read_calls, place = read(text, place, len(calls))
                    calls += read_calls
            match = self._any_tag.search(text, place)
        words.append(text[place:])
        thoughts = [text[:reasoning_end], *thoughts]
        return ParsedTurn(
            "".join(words).strip(),
            calls,
            "\n".join(filter(None, (thought.strip() for thought in thoughts))),
        )

    @cached_property
    def _reasoning(self) -> re.Pattern[str]:
        """Pattern of the leading reasoning of a turn, with the line breaks after it."""
        think = re.escape(self.think)
        end = re.escape(self.think_end)
        others = f"{think}|{re.escape(self.call)}" if self.call else think
        return re.compile(rf"(?:\s*{think}.*?{end}\n*|(?:(?!{others}).)*?{end}\n*)", re.DOTALL)

    def find_reasoning_end(self, text: str, start: int = 0) -> int:
        """Return the index in ``text`` at which the words after the reasoning at ``start`` begin; 0
        if no reasoning is closed there.

        The opening tag may be in the prompt. Line breaks after the closing tag belong to the
        reasoning.
        """
        match = self._reasoning.match(text, start)
        return match.end() if match else 0

    def read_malformed(
        self, problem: str, text: str, start: int, number: int
    ) -> tuple[list[ToolCall], int]:
        """Return a malformed call that extends to its closing tag or the next tag; see
        ``ReadCall``."""
        end = self._malformed_end.search(text, start)
        if self.call_end and (end is None or end[0] != self.call_end):
            problem = f"{self.call_end} is missing ({problem})"
        place = end.end() if end else len(text)
        return [malformed_call(problem, self.source(text, start, place), number)], place

    def source(self, text: str, start: int, end: int) -> str:
        """Return the text of a call from its opening tag, which ends at ``start``, to ``end``."""
        return text[start - len(self.call) : end]


THINK_TAGS = Tags()
"""The tags of reasoning in a turn without calls."""
TOOL_CALL_TAGS = Tags(call="<tool_call>", call_end="</tool_call>")
"""The tags of Hermes, Qwen and GLM."""
_THINK_TAG = re.compile("</?think>")


def parse_untagged_calls(text: str, read_calls: Callable[[str], list[ToolCall]]) -> ParsedTurn:
    """Parse a turn in which calls, with no tag before them, are everything but the reasoning.

    A tag in a malformed call is a word of it: without what is between the tags of reasoning, the
    rest could be another call, which the policy did not write.

    Args:
        text: The turn.
        read_calls: Parser of a text of calls only; [] if it does not look like one. What it cannot
            parse is the last call, with the problem ``TEXT_FOLLOWS`` after complete calls.
    """
    calls: list[ToolCall] = []
    start = next_start = 0
    for _ in range(_MAX_STARTS):
        start = next_start
        calls = read_calls(text[start:])
        if calls and calls[-1].problem != TEXT_FOLLOWS:
            break
        next_start = _next_word_start(text, start, text.rfind(calls[-1].text) if calls else start)
        if next_start < 0:
            break
    if not calls:
        return THINK_TAGS.parse(text)
    reasoning = [THINK_TAGS.parse(text[:start]).reasoning]
    if calls[-1].problem == TEXT_FOLLOWS and calls[-1].text.lstrip().startswith(THINK_TAGS.think):
        after = THINK_TAGS.parse(calls[-1].text)
        if not after.content:
            reasoning.append(after.reasoning)
            del calls[-1]
    return ParsedTurn("", calls, "\n".join(filter(None, reasoning)))


def _next_word_start(text: str, start: int, place: int) -> int:
    """Return the next index in ``text`` before which there is only reasoning; -1 if there is none.

    As in ``Tags.parse``, the closing tag of reasoning that was not opened makes all before it
    reasoning, and reasoning after other words does not.

    Args:
        text: The turn.
        start: An index before which there is only reasoning.
        place: Where to look for tags, not before ``start``.
    """
    first_word = len(text) - len(text[start:].lstrip())
    while match := _THINK_TAG.search(text, place):
        place = match.end()
        if match[0] == THINK_TAGS.think_end:
            return place
        end = text.find(THINK_TAGS.think_end, place)
        if end < 0:
            break
        place = end + len(THINK_TAGS.think_end)
        if match.start() == first_word:
            return place
    return -1
